"""The text of ``launch.train --help``: usage, how overrides work, and every key with type, value and line of help.

Invariant (``tests/config/test_help.py``): every key of the schema, and every entry of its maps, is in the text.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omegaconf import MISSING

from megatron_ext.config import keys
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config

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
  'loss.terms.kl={{_target_: megatron_ext.losses.policy.ClipLoss}}'    a new entry: _target_ is an import path
  ~loss.terms.kl           removes an entry
  An unknown key, a wrong type and an impossible combination are each one line, all at once, before anything starts.

exit status: 0 done, 2 the configuration is wrong, 130 interrupted (saved; the same command goes on)
"""


def render(cfg: Config | None, recipes: Mapping[str, Sequence[str]], program: str = "python -m launch.train") -> str:
    """The help text. ``cfg``: the values to show (None: the schema's defaults); ``recipes``: slug -> presets."""
    example = next(iter(recipes), "SLUG")
    lines = [_USAGE.format(program=program, example=example), "recipes:"]
    for slug, presets in recipes.items():
        others = [f"{slug}/{preset}" for preset in presets if preset != "recipe"]
        lines.append(f"  {slug}" + (f"    presets: {', '.join(others)}" if others else ""))
    if not recipes:
        lines.append("  none found")
    lines += ["", "configuration (key: type = value):"]
    values: Config = cfg if cfg is not None else Config()
    for key in keys.walk(Config):
        if key.kind is Kind.SECTION:
            lines += ["", f"  {key.path}  ({key.type_name})"]
            continue
        lines.append(f"  {key.path}: {key.type_name} = {_show(keys.value(values, key.path))}")
        if key.help:
            lines += textwrap.wrap(key.help, 108, initial_indent="      ", subsequent_indent="      ")
        if key.kind is Kind.MAP:
            lines += [f"        {line}" for line in _entries(keys.value(values, key.path), key.path)]
        if key.kind is Kind.ANY and dataclasses.is_dataclass(keys.value(values, key.path)):
            lines += list(_method(keys.value(values, key.path), key.path))
    return "\n".join(lines) + "\n"


def _show(value: Any) -> str:
    if isinstance(value, str):
        return "(needs a value)" if value == MISSING else repr(value)
    if isinstance(value, Mapping):
        return "{}" if not value else ""
    if dataclasses.is_dataclass(value):
        return type(value).__qualname__
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


def _entries(value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _entries(inner, f"{path}.{name}")
        else:
            yield f"{path}.{name} = {_show(inner)}"


def _method(value: Any, path: str) -> Iterator[str]:
    schema: type = type(value)
    for key in keys.walk(schema):
        if key.kind is Kind.SECTION:
            continue
        yield f"        {path}.{key.path}: {key.type_name} = {_show(keys.value(value, key.path))}"
        if key.help:
            yield from textwrap.wrap(key.help, 108, initial_indent=" " * 12, subsequent_indent=" " * 12)
