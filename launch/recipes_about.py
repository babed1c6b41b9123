"""What a recipe is: title, presets, what it composes and its constants, from its folder alone; nothing is trained.

A constant that is the project's own, not its paper's, is marked in the YAML where it is written, on its own line:

    kappa: 2.0  # ours
    floor: 0.1  # ours: the paper gives none

The mark holds for every value that begins on its line.

Invariants (``tests/launch/test_recipes.py``):

1. Every recipe can be listed: one that does not compose says why in place of what it composes.
2. A value of the recipe's own files is told once, as the last file that sets it has it, with the mark of that place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from megatron_ext.config.compose import COMPARISON, ConfigError, compose, files, recipes
from megatron_ext.config.instantiate import InstantiateError, instantiate, ordered
from megatron_ext.config.schema import Config
from megatron_ext.credit.protocol import EditTraits, Slot

# Parts of a configuration whose values are a method's constants.
METHOD = ("credit", "loss", "rewards", "harness", "environments", "model.router", "method")
_OURS = re.compile(r"#\s*\[?ours\]?(?=\W|$)\W*(?P<note>.*)$")
_REMARK = re.compile(r"<!--.*?-->", re.DOTALL)  # a place that is kept for a table is no table
_EVIDENCE = re.compile(r"evidence|measured|results|comparison", re.IGNORECASE)
_PAPER = re.compile(r"arxiv[:\s]*\d{4}\.\d{4,5}|https?://arxiv\.org/abs/\S+?(?=[\s)\].,]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class Constant:
    """A value that the recipe's own files set. ``note``: what the mark says."""

    key: str
    value: str
    ours: bool
    note: str


@dataclass(frozen=True)
class Part:
    """An entry of a plug point: its name, the class, and its arguments as written."""

    name: str
    target: str
    arguments: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.target.rsplit(".", 1)[-1]


@dataclass(frozen=True)
class Edit:
    """A credit edit and what it declares."""

    part: Part
    traits: EditTraits


@dataclass(frozen=True)
class About:
    """A recipe. ``evidence`` is the section of its README that tells what was measured, empty without one."""

    slug: str
    title: str
    summary: str
    paper: str
    presets: tuple[str, ...]
    evidence: str
    compared: bool
    tests: bool

    @property
    def has(self) -> str:
        """What stands behind it, in words."""
        said = [
            *(["worked numbers"] if self.tests else []),
            *(["comparison"] if self.compared else []),
            *(["measured"] if self.evidence else []),
        ]
        return ", ".join(said) or "no evidence yet"


def find(slug: str, root: Path) -> str:
    """``slug``, or ``ConfigError`` with the nearest names."""
    known = recipes(root)
    if slug not in known:
        near = get_close_matches(slug, known, 3, 0.5) or list(known)
        raise ConfigError([f"{slug}: no such recipe; nearest: {', '.join(near) or 'none found'}"])
    return slug


def about(slug: str, root: Path, tests: Path) -> About:
    """What the folder says. ``tests``: the folder of the recipes' tests."""
    folder = root / slug
    readme = folder / "README.md"
    text = _REMARK.sub("", readme.read_text(encoding="utf-8")) if readme.is_file() else ""
    title, summary = _opening(text) if text else _comment(folder / "recipe.yaml")
    paper = _PAPER.search(text.split("\n## ")[0])  # what is cited further down is another's
    return About(
        slug=slug,
        title=title or slug,
        summary=summary,
        paper="" if paper is None else paper[0],
        presets=tuple(p for p in recipes(root)[slug] if p != "recipe"),
        evidence=_section(text),
        compared=(folder / COMPARISON).is_file(),
        tests=(tests / slug).is_dir(),
    )


def _opening(text: str) -> tuple[str, str]:
    """Heading and first paragraph of a README."""
    heading = re.search(r"^#\s+(.+)$", text, re.MULTILINE)
    rest = text[heading.end() :] if heading else text
    for block in re.split(r"\n\s*\n", rest):
        words = " ".join(block.split())
        if words and words[0] not in "#|`![<-":
            return (heading[1].strip() if heading else ""), words
    return (heading[1].strip() if heading else ""), ""


def _comment(file: Path) -> tuple[str, str]:
    """The comment that a YAML file opens with: what stands before its first colon, and after it."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# "))
    title, _, rest = " ".join(lines).partition(":")
    return title.rstrip("."), rest.strip()


def _section(text: str) -> str:
    """The first section of a README whose heading speaks of evidence, without the heading."""
    parts = re.split(r"^(##+\s+.+)$", text, flags=re.MULTILINE)
    for heading, body in zip(parts[1::2], parts[2::2], strict=True):
        if _EVIDENCE.search(heading) and body.strip():
            return body.strip()
    return ""


# -- what it composes ------------------------------------------------------------------------------------------------
def parts(tree: Mapping[str, Any]) -> list[Part]:
    """Entries of a map of plug points, in its order."""
    found = []
    for name, node in tree.items():
        arguments = {str(k): v for k, v in node.items() if k not in ("_target_", "order")}
        found.append(Part(str(name), str(node["_target_"]), arguments))
    return found


def edits(config: Config) -> list[Edit]:
    """Credit edits in the order in which they run: those of the reward, then those of the advantage."""
    made = []
    for name, node in ordered(config.credit.edits, "credit.edits"):
        built = instantiate(node, skip=("order",), where=f"credit.edits.{name}")
        made.append(Edit(parts({name: node})[0], built.traits))
    return sorted(made, key=lambda edit: edit.traits.slot != Slot.REWARD)


def composes(slug: str, root: Path) -> str:
    """Plug points in one line; what is wrong where it does not compose."""
    try:
        config = compose([f"recipe={slug}"], root)
        named = [edit.part.name for edit in edits(config)]
    except (ConfigError, InstantiateError) as error:
        problem = str(error).splitlines()[0]
        return f"does not compose: {problem}"
    environment = config.environments[config.tasks.environment]
    said = [
        parts({"": environment})[0].kind,
        parts({"": config.harness})[0].kind,
        f"rewards: {', '.join(config.rewards)}",
        *([f"credit: {' > '.join(named)}"] if named else []),
        f"loss: {', '.join(part.kind for part in parts(config.loss.terms))}",
        *([f"router: {parts({'': config.model.router})[0].kind}"] if config.model.router else []),
    ]
    return " · ".join(said)


# -- constants -------------------------------------------------------------------------------------------------------
def constants(slug: str, preset: str, root: Path) -> list[Constant]:
    """Values that the recipe's own files give to the parts of its method, and all that they mark, in the order in which
    they are written."""
    own = [file for file in files(slug, preset, root) if file.parent.name == slug]
    found: dict[str, Constant] = {}
    for file in own:
        for constant in _marked(file.read_text(encoding="utf-8")):
            if constant.ours or constant.key.startswith(tuple(f"{key}." for key in METHOD)):
                found[constant.key] = constant
    return list(found.values())


def _marked(text: str) -> Iterator[Constant]:
    lines = text.splitlines()
    tree = yaml.compose(text)
    if tree is not None:
        yield from _walk(tree, "", lines)


def _walk(node: yaml.Node, path: str, lines: Sequence[str]) -> Iterator[Constant]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value not in ("_target_", "_schema_", "order", "defaults"):
                yield from _walk(value, f"{path}.{key.value}".lstrip("."), lines)
        return
    after = lines[node.start_mark.line][node.start_mark.column :]
    mark = _OURS.search(after)
    value = node.value if isinstance(node, yaml.ScalarNode) else _inline(node)
    yield Constant(path, value, mark is not None, mark["note"].strip() if mark else "")


def _inline(node: yaml.Node) -> str:
    if isinstance(node, yaml.SequenceNode):
        return "[" + ", ".join(_inline(item) for item in node.value) + "]"
    if isinstance(node, yaml.MappingNode):
        return "{" + ", ".join(f"{key.value}: {_inline(value)}" for key, value in node.value) + "}"
    return str(node.value)
