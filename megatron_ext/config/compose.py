"""Composes a run's configuration: recipe files, then overrides, onto the typed schema.

``recipe=SLUG`` or ``recipe=SLUG/PRESET`` names ``<search root>/SLUG/recipe.yaml`` or ``SLUG/PRESET.yaml``. Hydra orders
the ``defaults`` lists (``/base/cpu`` is from the search root, ``recipe`` from the same folder) and parses overrides;
the files are merged at the root in that order, each onto the last.

Invariants (``tests/config/test_compose.py``):

1. Every problem of every file and override is found before anything is built, and all are reported together.
2. A file or override that gives a plug point another ``_target_`` starts it afresh: arguments of the old one do not
   leak into the new one. Files and overrides that keep the ``_target_`` change single arguments. An override of
   ``_target_`` alone that would drop arguments is refused: the whole plug point, written out, says the same aloud.
3. An entry of a map set to null, or deleted with ``~``, is gone; a map, or a map inside one, set to ``{}`` is empty.
4. What comes out is the dataclass itself, with every value set and every interpolation resolved.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import OverrideType
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ext.config import keys, targets
from megatron_ext.config.errors import ConfigError as ConfigError
from megatron_ext.config.instantiate import InstantiateError, import_target
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config

COMPARISON = "comparison.yaml"


@dataclass(frozen=True)
class Edit:
    """One value to set at a dotted path (or to delete), and where it was written."""

    path: str
    value: object
    delete: bool
    written: str


def recipes(search_root: Path) -> dict[str, list[str]]:
    """Slug -> presets (``recipe`` is the one that the slug alone means) of every recipe under the search root. The
    folder's ``comparison.yaml`` says which presets are compared, and is none."""
    found: dict[str, list[str]] = {}
    for file in sorted(search_root.glob("*/recipe.yaml")):
        found[file.parent.name] = sorted(f.stem for f in file.parent.glob("*.yaml") if f.name != COMPARISON)
    return found


def files(slug: str, preset: str, search_root: Path) -> list[Path]:
    """Files that a recipe's preset is merged from, first to last. Raises ``ConfigError``."""
    problems: list[str] = []
    found = _files(f"{slug}/{preset}", search_root, problems)
    if problems:
        raise ConfigError(problems)
    return found


def compose(argv: Sequence[str], search_root: Path) -> Config:
    """The configuration that ``argv`` (``recipe=...`` and overrides) describes. Raises ``ConfigError``."""
    config, problems = collect(argv, search_root)
    if config is None or problems:
        raise ConfigError(problems)
    return config


def collect(argv: Sequence[str], search_root: Path) -> tuple[Config | None, list[str]]:
    """``compose`` for callers that go on to check more: the configuration without the overrides that are wrong (None
    when even that cannot be had), and the problems so far."""
    problems: list[str] = []
    name, slug, preset = _recipe(argv, search_root, problems)
    edits = _overrides([a for a in argv if not a.startswith("recipe=")], problems)
    tree = _plain(OmegaConf.structured(Config))
    wrong: list[str] = []
    if slug is not None:
        for file in _files(f"{slug}/{preset}", search_root, wrong):
            where = file.relative_to(search_root).as_posix()
            content = _read(file, where, wrong)
            wrong += [f"{where}: {line}" for line in _tree_problems(Config, content)]
            tree = cast(dict[str, Any], _overlay(tree, content))
    problems += wrong
    composed = slug is not None and not wrong
    for number, edit in enumerate(edits):
        found = _edit_problems(edit)
        if composed and not found:
            found = _dropped(tree, edit, edits[number + 1 :])
            _apply(tree, edit, found)
        problems += found
    if not composed:
        return None, problems

    tree["recipe"] = name
    if tree["run"]["name"] == "???":
        tree["run"]["name"] = name.replace("/", "-")
    hf_config = tree["model"]["hf_config"]
    if hf_config != "???" and "${" not in hf_config:
        tree["model"]["hf_config"] = str(search_root / hf_config)
    config, found = _build(tree)
    return config, problems + found


def build(tree: Mapping[str, Any]) -> Config:
    """The dataclass of a complete tree, such as one read back from a run. Raises ``ConfigError``."""
    problems = _tree_problems(Config, tree)
    if not problems:
        config, problems = _build(tree)
        if config is not None and not problems:
            return config
    raise ConfigError(problems)


def _build(tree: Mapping[str, Any]) -> tuple[Config | None, list[str]]:
    """The dataclass of a tree whose keys and types are right, and what is wrong with its plug points."""
    typed = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.create(dict(tree)))
    for key in keys.walk(Config):
        # The schema's maps have entries of their own, which a merge would bring back: the tree's are the whole truth.
        if key.kind is Kind.MAP and (entries := _at(tree, key.path)) is not None:
            OmegaConf.update(typed, key.path, _without_nulls(entries), merge=False)
    try:
        problems = [f"{path}: needs a value" for path in sorted(OmegaConf.missing_keys(typed))]
        if problems:
            return None, problems
        config = cast(Config, OmegaConf.to_object(typed))
    except OmegaConfBaseException as error:
        return None, [f"{error.full_key or 'configuration'}: {str(error).splitlines()[0]}"]
    for key in keys.walk(Config):
        if key.kind is Kind.MAP:
            problems += targets.problems(key.path, keys.value(config, key.path))
    if config.method is not None:
        config.method = _method(config.method, problems)
    return config, problems


# ---- the recipe and its files ------------------------------------------------------------------------------------


def _recipe(argv: Sequence[str], root: Path, problems: list[str]) -> tuple[str, str | None, str]:
    """Name, slug (None when there is no such recipe) and preset of the one ``recipe=`` among ``argv``."""
    known = recipes(root)
    chosen = [a.removeprefix("recipe=") for a in argv if a.startswith("recipe=")]
    if len(chosen) != 1:
        what = "no recipe given" if not chosen else f"recipe given {len(chosen)} times"
        problems.append(f"{what}: say recipe=SLUG or recipe=SLUG/PRESET; recipes: {', '.join(known) or 'none found'}")
        return "", None, ""
    slug, _, preset = chosen[0].partition("/")
    preset = preset or "recipe"
    if slug not in known:
        near = difflib.get_close_matches(slug, known, 3, 0.5) or list(known)
        problems.append(f"recipe={chosen[0]}: no such recipe; nearest: {', '.join(near) or 'none found'}")
        return chosen[0], None, preset
    if preset not in known[slug]:
        presets = ", ".join(f"{slug}/{p}" for p in known[slug] if p != "recipe") or "none"
        problems.append(f"recipe={chosen[0]}: no such preset; presets: {presets}")
        return chosen[0], None, preset
    return slug if preset == "recipe" else f"{slug}/{preset}", slug, preset


def _files(config_name: str, root: Path, problems: list[str]) -> list[Path]:
    """Files that a recipe is merged from, first to last, as Hydra orders its ``defaults``."""
    with initialize_config_dir(str(root.resolve()), version_base="1.3", job_name="megatron_ext"):
        try:
            loader = GlobalHydra.instance().config_loader()
            listed = loader.compute_defaults_list(config_name, [], RunMode.RUN).defaults
        except (ConfigCompositionException, yaml.YAMLError, RecursionError) as error:
            reason = " ".join(str(error).split("Config search path")[0].split()) or "its defaults lists form a circle"
            problems.append(f"{config_name}.yaml: {reason}")
            return []
    own = [entry.config_path for entry in listed if entry.config_path and not entry.config_path.startswith("hydra/")]
    return [root / f"{path}.yaml" for path in own]


def _read(file: Path, where: str, problems: list[str]) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{where}: {' '.join(str(error).split())}")
        return {}
    if not isinstance(content, dict):
        problems.append(f"{where}: needs a map of keys, got {type(content).__name__}")
        return {}
    return {str(key): value for key, value in content.items() if key != "defaults"}


# ---- overrides ---------------------------------------------------------------------------------------------------


def _overrides(argv: Sequence[str], problems: list[str]) -> list[Edit]:
    parser = OverridesParser.create()
    edits = []
    for text in argv:
        try:
            parsed = parser.parse_override(text)
        except HydraException:
            shape = "key=value" if "=" not in text else "key=value (quote a value that holds spaces, commas or =)"
            problems.append(f"{text}: cannot be read as {shape}")
            continue
        if parsed.package is not None or parsed.is_sweep_override():
            problems.append(f"{text}: one key, one value; write a list as [a,b]")
            continue
        delete = parsed.type is OverrideType.DEL
        edits.append(Edit(parsed.key_or_group, None if delete else _unquote(parsed.value()), delete, text))
    return edits


def _unquote(value: Any) -> object:
    """Values of Hydra's grammar as plain Python: its quoted strings and nested containers unwrapped."""
    return OmegaConf.to_container(OmegaConf.create({"v": value}), resolve=False)["v"]  # type: ignore[index,call-overload]


def _edit_problems(edit: Edit) -> list[str]:
    key = keys.find(Config, edit.path)
    if edit.path == "defaults":
        return [_no_defaults(edit)]
    if key is None:
        return [f"{keys.unknown(Config, edit.path)} (in {edit.written})"]
    if edit.delete:
        inside = key.kind in (Kind.MAP, Kind.ANY) and edit.path != key.path
        return (
            [] if inside else [f"{edit.written}: only an entry of a map can be deleted; {key.path} is {key.type_name}"]
        )
    tree: object = edit.value
    for part in reversed(edit.path.split(".")):
        tree = {part: tree}
    return _tree_problems(Config, cast(dict[str, Any], tree))


def _no_defaults(edit: Edit) -> str:
    """What to write instead of presets on the command line."""
    named = edit.value if isinstance(edit.value, list) else [edit.value]
    files = ", ".join(f"{name.strip('/')}.yaml" for name in named if isinstance(name, str)) or "the preset"
    return (
        f"{edit.written}: presets are listed in a recipe's YAML file (recipe=SLUG/PRESET names one); on the command "
        f"line give each key that {files} sets, a plug point whole: 'model.router={{_target_: import.path, name: 1}}'"
    )


def _dropped(tree: dict[str, Any], edit: Edit, later: Sequence[Edit]) -> list[str]:
    """The arguments that ``edit``, of a ``_target_`` alone, takes from a plug point and none of ``later`` sets."""
    above, _, last = edit.path.rpartition(".")
    at: Any = tree
    for part in above.split("."):
        at = at.get(part) if isinstance(at, dict) else None
    if last != "_target_" or not isinstance(at, dict) or at.get(last, edit.value) == edit.value:
        return []
    set_again = {other.path.removeprefix(f"{above}.") for other in later if other.path.startswith(f"{above}.")}
    lost = [name for name in at if name != last and name not in set_again]
    try:
        import_target(str(edit.value))
    except InstantiateError:
        return []  # one mistake, one line: the target's own
    if not lost or any(other.path == above for other in later):
        return []
    again = "".join(f", {name}: ..." for name in sorted(set_again - {last}))
    return [
        f"{edit.written}: would drop what {at[last]} was given ({', '.join(lost)}); if that is meant, write the whole "
        f"plug point: '{above}={{_target_: {edit.value}{again}}}'"
    ]


def _apply(tree: dict[str, Any], edit: Edit, problems: list[str]) -> None:
    *above, last = edit.path.split(".")
    at: Any = tree
    for part in above:
        if at.get(part) is None:
            at[part] = {}
        at = at[part]
        if not isinstance(at, dict):
            problems.append(f"{edit.written}: {part} holds a value, not a map")
            return
    if edit.delete:
        if last not in at:
            near = difflib.get_close_matches(last, list(at), 3, 0.5) or list(at)
            problems.append(f"{edit.written}: nothing to delete; there is: {', '.join(near) or 'nothing'}")
            return
        del at[last]
        return
    patch: object = edit.value
    for part in reversed(edit.path.split(".")):
        patch = {part: patch}
    merged = cast(dict[str, Any], _overlay(tree, patch))
    tree.clear()
    tree.update(merged)


# ---- trees -------------------------------------------------------------------------------------------------------


def _plain(config: Any) -> dict[str, Any]:
    return cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))


def _overlay(under: object, over: object, path: str = "") -> object:
    """``over`` merged onto ``under`` at dotted ``path``. A map that names another ``_target_`` replaces the one below
    it whole; so does ``{}`` where the schema has a map (an empty section says nothing, an empty map that it is)."""
    if not isinstance(under, dict) or not isinstance(over, dict):
        return over
    if "_target_" in under and over.get("_target_", under["_target_"]) != under["_target_"]:
        return over
    if not over and path and (key := keys.find(Config, path)) is not None and key.kind is Kind.MAP:
        return over
    merged = dict(under)
    for name, value in over.items():
        merged[name] = _overlay(under[name], value, f"{path}.{name}".lstrip(".")) if name in under else value
    return merged


def _without_nulls(entries: Mapping[str, Any]) -> dict[str, Any]:
    """A map of plug points without those set to null. A plug point itself keeps its arguments, null ones too."""
    if "_target_" in entries:
        return dict(entries)
    return {name: entry for name, entry in entries.items() if entry is not None}


def _tree_problems(schema: type, tree: Mapping[str, Any], root: str = "") -> list[str]:
    """Unknown keys and wrong types of a (partial) tree; the arguments of plug points are judged once all is merged."""
    found: list[str] = []

    def visit(value: object, path: str) -> None:
        key = keys.find(schema, path)
        if key is None:
            found.append(keys.unknown(schema, path, root))
        elif key.kind is Kind.SECTION:
            if not isinstance(value, Mapping):
                found.append(f"{root}{path}: is a section ({key.type_name}), got {value!r}")
                return
            for name, inner in value.items():
                visit(inner, f"{path}.{name}")
        elif key.kind is Kind.MAP:
            if not isinstance(value, Mapping):
                found.append(f"{root}{path}: needs a map, got {_reset(key) if value is None else repr(value)}")
        elif key.kind is Kind.VALUE and value != "???":
            problem = keys.type_problem(key, value)
            if problem is not None:
                found.append(f"{root}{path}: {problem}")

    for name, value in tree.items():
        visit(value, str(name))
    return found


def _reset(key: keys.Key) -> str:
    """What ``null`` may have meant at a map of the schema."""
    field = next(field for field in dataclasses.fields(key.owner) if field.name == key.name)
    default = field.default_factory() if field.default_factory is not dataclasses.MISSING else {}
    if "_target_" in default:
        return f"null; its default is '{key.path}={{_target_: {default['_target_']}}}'"
    if key.path == "model.router":
        return "null; model.router={} sets the default"
    return f"null; {key.path}={{}} empties it, {key.path}.NAME=null removes an entry"


def _at(tree: Mapping[str, Any], path: str) -> Mapping[str, Any] | None:
    at: Any = tree
    for part in path.split("."):
        if part not in at:
            return None
        at = at[part]
    return cast(Mapping[str, Any], at)


def _method(raw: object, problems: list[str]) -> object:
    """The recipe's own dataclass: its import path is ``method._schema_``, the other keys are its fields."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("_schema_"), str):
        problems.append("method: needs _schema_ (the import path of the recipe's dataclass)")
        return raw
    try:
        schema = import_target(raw["_schema_"], "method._schema_")
    except InstantiateError as error:
        problems.append(str(error))
        return raw
    if not isinstance(schema, type) or not dataclasses.is_dataclass(schema):
        problems.append(f"method._schema_: {raw['_schema_']} is not a dataclass")
        return raw
    fields = {str(key): value for key, value in raw.items() if key != "_schema_"}
    found = _tree_problems(schema, fields, "method.")
    problems += found
    if found:
        return raw
    typed = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.create(fields))
    missing = sorted(OmegaConf.missing_keys(typed))
    problems += [f"method.{path}: needs a value" for path in missing]
    return raw if missing else OmegaConf.to_object(typed)
