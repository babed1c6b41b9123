"""The text of ``launch.train --help``: usage, how overrides work, and every key with type, value and line of help.

Invariants (``tests/config/test_help.py``):

1. Every key of the schema is in the text; below it every plug point that is there, with each of its arguments, their
   types, values and what the class says about them; below that what this library ships for the key.
2. A line has at most 120 columns.
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from megatron_ext.config import keys
from megatron_ext.config.arguments import REQUIRED, arguments, summary
from megatron_ext.config.instantiate import InstantiateError, import_target
from megatron_ext.config.keys import Kind
from megatron_ext.config.protocols import PLUG_POINTS
from megatron_ext.config.schema import Config
from megatron_ext.config.shipped import SHIPPED
from megatron_ext.config.targets import RESERVED

WIDTH = 120
# What stands in for a plug point that the configuration leaves out.
DEFAULTS: Mapping[str, str] = {"model.router": "megatron_ext.moe.policies.TrainedRouter"}
OF_THE_STACK: Mapping[str, tuple[str, str, str]] = {
    "order": ("float", "0", "place among the others; equal ones go by name"),
    "weight": ("float", "1", "what the part's value is multiplied by"),
    "cap": ("float | null", "null", "the weighted value is kept within [-cap, cap]"),
}
BY_PROGRAM = ("rollout.engine", "tasks.source")  # what they need and a configuration does not give is passed to them

_USAGE = """\
usage: {program} recipe=SLUG[/PRESET] [KEY=VALUE ...] [--print-config] [--help]

Trains one run. The configuration is the recipe's, on top of the defaults below; overrides come last.

examples:
  {program} recipe={example}
  {program} recipe={example} run.name=mine run.steps=50 optimizer.lr=3e-4
  {program} recipe={example} --print-config        what would run, as YAML
  {program} recipe={example} --help                this text, with the recipe's values

overrides:
  KEY=VALUE                a dotted key below; lists are [a,b], maps {{a: 1, b: 2}}; quote values with spaces or commas
  loss.terms.kl.coefficient=0.01     one argument of one entry of a map
  'loss.terms.kl={{_target_: megatron_ext.losses.kl.KLToReference}}'    a new entry: _target_ is an import path
  ~loss.terms.kl           removes an entry
  With a plug point on the command line, --help shows its arguments.
  An unknown key, a wrong type and an impossible combination are each one line, all at once, before anything starts.

exit status: 0 done, 2 the configuration is wrong, 130 interrupted (saved; the same command goes on)
"""


def render(cfg: Config | None, recipes: Mapping[str, Sequence[str]], program: str = "python -m launch.train") -> str:
    """The help text. ``cfg``: the values to show (None: the schema's defaults); ``recipes``: slug -> presets."""
    example = next(iter(recipes), "SLUG")
    lines = [_USAGE.format(program=program, example=example), "recipes:"]
    for slug, presets in recipes.items():
        others = [f"{slug}/{preset}" for preset in presets if preset != "recipe"]
        lines += _wrap(slug + (f"    presets: {', '.join(others)}" if others else ""), 2)
    if not recipes:
        lines.append("  none found")
    lines += ["", "configuration (key: type = value):"]
    values: Config = cfg if cfg is not None else Config()
    for key in keys.walk(Config):
        value = keys.value(values, key.path)
        if key.kind is Kind.SECTION:
            lines += ["", f"  {key.path}  ({key.type_name})"]
            continue
        shown, type_name = _show(value), key.type_name
        if key.kind is Kind.MAP:
            what, several = PLUG_POINTS[key.path].what, _several(key.path)
            type_name = f"name -> {what}" if several else what
            shown = (", ".join(value) if several else value.get("_target_", "")) or "{}"
        lines += _wrap(f"{key.path}: {type_name} = {shown}", 2)
        lines += _wrap(key.help, 6)
        if key.kind is Kind.MAP:
            lines += _plug_points(key.path, value)
        if key.kind is Kind.ANY and dataclasses.is_dataclass(value):
            lines += list(_method(value, key.path))
    return "\n".join(lines) + "\n"


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=" " * indent, subsequent_indent=" " * (indent + 2))


def _show(value: Any) -> str:
    if isinstance(value, str):
        return "(needs a value)" if value == MISSING else repr(value)
    if dataclasses.is_dataclass(value):
        return type(value).__qualname__
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (Mapping, list, tuple)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def _several(path: str) -> bool:
    return path in RESERVED or path == "environments"


def _plug_points(path: str, value: Mapping[str, Any]) -> Iterator[str]:
    """The plug points at ``path`` with their arguments, and what is shipped for it."""
    nodes = {f"{path}.{name}": node for name, node in value.items()} if _several(path) else {path: value}
    for where, node in nodes.items():
        if "_target_" in node or path in DEFAULTS:
            yield from _plug_point(where, {"_target_": DEFAULTS.get(path, "")} | dict(node), path)
    yield f"        shipped (_target_ of {path + '.NAME' if _several(path) else path}):"
    for target in SHIPPED[path]:
        said = summary(import_target(target))
        line = textwrap.shorten(f"{target}: {said}" if said else target, WIDTH - 10, placeholder=" ...")
        yield " " * 10 + line


def _plug_point(where: str, node: Mapping[str, Any], path: str) -> Iterator[str]:
    target = str(node["_target_"])
    yield from _wrap(f"{where}._target_ = {target}", 8)
    try:
        found = import_target(target)
        if target not in SHIPPED[path]:
            yield from _wrap(summary(found), 12)
        known = arguments(found)
    except (InstantiateError, ValueError):
        known = []  # composing a configuration has said what is wrong with it
    explained: dict[str, str] = {}
    for argument in known:
        given, default = node.get(argument.name, argument.default), argument.default
        shown = _show(given) if given is not REQUIRED else "(set by the program)" if path in BY_PROGRAM else "(needed)"
        if default is not REQUIRED and given != (list(default) if isinstance(default, tuple) else default):
            shown += f"  (default {_show(default)})"
        type_name = f": {argument.type_name}" if argument.type_name else ""
        yield from _wrap(f"{where}.{argument.name}{type_name} = {shown}", 8)
        first = explained.setdefault(argument.help, argument.name)
        yield from _wrap(argument.help if first == argument.name or not argument.help else f"see {first}", 12)
        if isinstance(given, Mapping) and "_target_" in given:
            yield from _plug_point(f"{where}.{argument.name}", given, path)
    names = {argument.name for argument in known}
    for name, (type_name, default_text, text) in OF_THE_STACK.items():
        if name in RESERVED.get(path, ()) and name not in names:
            yield from _wrap(f"{where}.{name}: {type_name} = {_show(node[name]) if name in node else default_text}", 8)
            yield from _wrap(text, 12)
    for name, value in node.items():
        if name != "_target_" and name not in names and name not in RESERVED.get(path, ()):
            yield from _wrap(f"{where}.{name} = {_show(value)}", 8)


def _method(value: Any, path: str) -> Iterator[str]:
    schema: type = type(value)
    for key in keys.walk(schema):
        if key.kind is Kind.SECTION:
            continue
        yield from _wrap(f"{path}.{key.path}: {key.type_name} = {_show(keys.value(value, key.path))}", 8)
        yield from _wrap(key.help, 12)
