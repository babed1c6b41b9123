"""``list`` and ``show SLUG[/PRESET]`` of ``launch.recipes``, as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.recipes_about import About, Edit, Part, about, composes, constants, edits, parts
from megatron_ext.config.compose import ConfigError, compose, recipes
from megatron_ext.credit.protocol import Scale

WIDTH = 118


def listing(root: Path, tests: Path) -> Iterator[str]:
    """Every recipe: what it is, what it composes, its presets and what stands behind it."""
    slugs = list(recipes(root))
    indent = max((len(slug) for slug in slugs), default=0) + 2
    for slug in slugs:
        found = about(slug, root, tests)
        yield f"{slug:<{indent}}{found.title}"
        lines = [found.summary] if found.summary else []
        lines += [composes(slug, root), f"presets: {', '.join(found.presets) or 'none'}", f"has: {found.has}"]
        for line in lines:
            yield from _wrapped(line, indent, first_sentences=line == found.summary)
        yield ""
    yield "python -m launch.recipes show SLUG says more; python -m launch.train recipe=SLUG[/PRESET] trains."


def _wrapped(text: str, indent: int, *, first_sentences: bool = False) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - indent)
    if first_sentences and len(lines) > 2:
        lines = [lines[0], textwrap.shorten(" ".join(lines[1:]), WIDTH - indent, placeholder=" ...")]
    return [" " * indent + line for line in lines]


def card(slug: str, preset: str, root: Path, tests: Path) -> Iterator[str]:
    """All of one recipe. Raises ``ConfigError``."""
    name = slug if preset == "recipe" else f"{slug}/{preset}"
    config = compose([f"recipe={name}"], root)
    found = about(slug, root, tests)
    yield from _head(found, name)
    yield from _section("environments", [_part(part) for part in parts(config.environments)])
    tasks = config.tasks
    counts = (
        f"{tasks.train_tasks} training, {tasks.dev_tasks} dev, {tasks.test_tasks} held-out tasks of {tasks.environment}"
    )
    yield from _section("tasks", [counts])
    yield from _section("harness", [_part(part) for part in parts({"": config.harness})])
    yield from _section("rewards, summed", [_part(part) for part in parts(config.rewards)])
    base = f"{config.credit.normalize} over the group"
    lines = [base, *(_edit(number, edit) for number, edit in enumerate(edits(config), start=1))]
    yield from _section("credit, in order", lines)
    yield from _section(f"loss, {config.loss.aggregation}", [_part(part) for part in parts(config.loss.terms)])
    router = {"": config.model.router} if config.model.router else {}
    yield from _section("router", [_part(part) for part in parts(router)] or ["trained"])
    title = "constants that its own files set (* ours; the others are the paper's, or sizes)"
    yield from _section(title, _constants(slug, preset, root))
    yield from _section("what was measured", found.evidence.splitlines() or ["nothing that its README tells"])
    if found.compared:
        yield f"python -m launch.recipes compare {slug}"
    yield f"python -m launch.recipes check {slug}"
    yield f"python -m launch.train recipe={name}"


def _head(found: About, name: str) -> Iterator[str]:
    yield f"{found.title}" + (f"  ({found.paper})" if found.paper else "")
    if found.summary:
        yield from textwrap.wrap(found.summary, WIDTH)
    yield ""
    yield f"recipe={name}; presets: {', '.join(found.presets) or 'none'}; has: {found.has}"
    yield ""


def _section(title: str, lines: Sequence[str]) -> Iterator[str]:
    yield title
    for line in lines:
        yield f"  {line}".rstrip()
    yield ""


def _part(part: Part) -> str:
    said = [part.name, part.kind, _arguments(part.arguments)]
    return "  ".join(word for word in said if word)


def _arguments(arguments: Mapping[str, Any]) -> str:
    return textwrap.shorten(", ".join(f"{k}={_value(v)}" for k, v in arguments.items()), WIDTH - 20, placeholder=" ...")


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _edit(number: int, edit: Edit) -> str:
    traits = edit.traits
    said = [
        f"{traits.slot.value}-side",
        "sets the scale" if traits.scale == Scale.SETS else "keeps the scale",
        *([f"conserves {', '.join(sorted(traits.conserves))}"] if traits.conserves else []),
        *([f"gives up invariant {', '.join(sorted(traits.breaks))}"] if traits.breaks else []),
        *(["a signal of its own: constant groups are kept"] if traits.own_signal else []),
    ]
    return f"{number}. {edit.part.name}  {edit.part.kind}: {'; '.join(said)}"


def _constants(slug: str, preset: str, root: Path) -> list[str]:
    found = constants(slug, preset, root)
    if not found:
        return ["none"]
    width = max(len(constant.key) for constant in found)
    lines = []
    for constant in found:
        note = f"   {constant.note}" if constant.note else ""
        value = textwrap.shorten(constant.value, 60, placeholder=" ...")
        lines.append(f"{'*' if constant.ours else ' '} {constant.key:<{width}}  {value}{note}")
    return lines


def split(name: str, root: Path) -> tuple[str, str]:
    """(slug, preset) of SLUG or SLUG/PRESET, both known. Raises ``ConfigError``."""
    from launch.recipes_about import find

    slug, _, preset = name.partition("/")
    find(slug, root)
    known = recipes(root)[slug]
    if preset and preset not in known:
        raise ConfigError(
            [f"{name}: no such preset; presets: {', '.join(p for p in known if p != 'recipe') or 'none'}"]
        )
    return slug, preset or "recipe"
