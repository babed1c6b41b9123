"""Builds plug points from configuration nodes ``{_target_: import.path, key: value, ...}``.

Invariants (``tests/config/test_instantiate.py`` asserts each):

1. Every key of a node reaches the target, is named in ``skip``, or is an error: nothing is dropped silently.
2. Errors are one line: target, key, nearest parameter names. A ``ValueError`` of the target is its word on what the
   configuration gave it and becomes one too, and a ``ConfigError`` one for each of its problems; whatever else it
   raises passes through unchanged.
3. ``ordered`` is the same for every order in which the map was written.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from types import ModuleType
from typing import Any

from megatron_ext.config.errors import ConfigError
from megatron_ext.config.signature import Signature

TARGET = "_target_"


class InstantiateError(ValueError):
    """A node that cannot be built; the message names the target, the key and the nearest names."""


def import_target(path: str, where: str = "") -> Any:
    """The object at ``package.module.Name`` (or ``.Name.attribute``)."""
    prefix = f"{where}: " if where else ""
    parts = path.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise InstantiateError(f"{prefix}_target_ {path!r} is not an import path such as package.module.Name")
    for cut in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:cut])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if missing == module_name or module_name.startswith(missing + "."):
                continue  # the path may go through a class: try the shorter module name
            raise InstantiateError(
                f"{prefix}_target_ {path}: module {module_name} needs the package {missing!r}, which is not installed"
            ) from error
        for done, part in enumerate(parts[cut:], start=cut):
            if not hasattr(found, part):
                near = _near(part, _members(found))
                raise InstantiateError(f"{prefix}_target_ {path}: {'.'.join(parts[:done])} has no {part!r}{near}")
            found = getattr(found, part)
        return found
    raise InstantiateError(f"{prefix}_target_ {path}: there is no module {parts[0]!r}; is it installed, or misspelt?")


def instantiate(
    node: Mapping[str, Any], /, *, skip: Collection[str] = (), where: str = "", **extra: Any
) -> Any:  # the class is only known to the configuration
    """Calls ``node['_target_']`` with the node's other keys and ``extra``.

    Args:
        node: a mapping (an OmegaConf node too). Nested mappings are passed on as plain dicts and lists, not built.
        skip: keys that belong to the plug point and not to the target (``order``, ``weight``, ...).
        where: the node's place in the configuration, for errors (``rewards.success``).
        extra: arguments that the program supplies; a node may not set them.
    """
    prefix = f"{where}: " if where else ""
    if not isinstance(node, Mapping):
        raise InstantiateError(f"{prefix}expected a mapping with {TARGET}, got {node!r}")
    path = node.get(TARGET)
    if not isinstance(path, str) or not path:
        raise InstantiateError(f"{prefix}the node needs {TARGET}, an import path; it holds {sorted(map(str, node))}")
    target = import_target(path, where)
    if not callable(target):
        raise InstantiateError(f"{prefix}{TARGET} {path} is not a class or function")
    arguments = {str(key): _plain(value) for key, value in node.items() if key != TARGET and key not in skip}
    both = sorted(arguments.keys() & extra.keys())
    if both:
        raise InstantiateError(f"{prefix}{path}: the program sets {', '.join(both)}; remove it from the configuration")
    _check(target, path, arguments, extra, prefix)
    try:
        return target(**arguments, **extra)
    except ConfigError as error:
        raise ConfigError([f"{prefix}{path}: {line}" for line in error.problems]) from error
    except ValueError as error:
        raise InstantiateError(f"{prefix}{path}: {' '.join(str(error).split())}") from error


def ordered(plugins: Mapping[str, Any], where: str = "") -> list[tuple[str, Mapping[str, Any]]]:
    """Entries of a plug-point map by ``order`` (default 0), then name. Null entries are left out; ``losses.kl=null``
    removes one."""
    prefix = f"{where}." if where else ""
    entries: list[tuple[float, str, Mapping[str, Any]]] = []
    for name, node in plugins.items():
        if node is None:
            continue
        if not isinstance(node, Mapping):
            raise InstantiateError(
                f"{prefix}{name}: expected a mapping with {TARGET}, or null to remove it; got {node!r}"
            )
        order = node.get("order", 0)
        if isinstance(order, bool) or not isinstance(order, (int, float)) or order != order:
            raise InstantiateError(f"{prefix}{name}.order: expected a number, got {order!r}")
        entries.append((order, str(name), node))
    return [(name, node) for _, name, node in sorted(entries, key=lambda entry: entry[:2])]


def _members(owner: object) -> list[str]:
    """Public names of a class, or what a module defines itself and the modules of a package."""
    names = {name for name in dir(owner) if not name.startswith("_")}
    if isinstance(owner, ModuleType):
        names = {name for name in names if getattr(getattr(owner, name), "__module__", None) == owner.__name__}
        if hasattr(owner, "__path__"):
            names |= {module.name for module in pkgutil.iter_modules(owner.__path__)}
    return sorted(names)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value


def _near(name: str, known: Sequence[str]) -> str:
    close = get_close_matches(name, known, n=3)
    if close:
        return f"; did you mean {', '.join(close)}?"
    return f"; there is {', '.join(known[:12])}{', ...' if len(known) > 12 else ''}" if known else "; it takes none"


def _check(
    target: Callable[..., Any], path: str, arguments: Mapping[str, Any], extra: Mapping[str, Any], prefix: str
) -> None:
    """Unknown, missing and wrongly typed arguments, before the call, so that its own TypeErrors stay its own."""
    try:
        signature = Signature.of(target)
    except ValueError as error:
        raise InstantiateError(f"{prefix}{TARGET} {path} does not say what arguments it takes") from error
    for name in [*arguments, *extra]:
        if name not in signature.names and not signature.anything:
            raise InstantiateError(f"{prefix}{path} takes no argument {name!r}{_near(name, sorted(signature.names))}")
    missing = [name for name in signature.required if name not in arguments and name not in extra]
    if missing:
        raise InstantiateError(f"{prefix}{path} needs {', '.join(missing)}, which the configuration does not give")
    for name, value in arguments.items():
        problem = signature.misfit(name, value)
        if problem is not None:
            raise InstantiateError(f"{prefix}{path}: {name} {problem}")
