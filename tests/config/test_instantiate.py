"""Building plug points from configuration (numbers refer to ``megatron_ext/config/instantiate.py``)."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_ext.config.errors import ConfigError
from megatron_ext.config.instantiate import InstantiateError, import_target, instantiate, ordered


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "plug_xyz.py").write_text(
        "from dataclasses import dataclass\n"
        "from megatron_ext.config.errors import ConfigError\n"
        "@dataclass(frozen=True)\n"
        "class Clip:\n"
        "    tasks: list\n"
        "    clip_low: float = 0.2\n"
        "    steps: 'int' = 1\n"
        "    name: str = ''\n"
        "    on: bool = False\n"
        "    inner: dict | None = None\n"
        "    @classmethod\n"
        "    def tight(cls): return cls([], 0.01)\n"
        "def loose(**options): return options\n"
        "def fails(x=1): raise TypeError('its own')\n"
        "def refuses(x=1): raise ValueError('x is too\\nlow')\n"
        "def several(x=1): raise ConfigError(['x is too low', 'y is missing'])\n"
        "NUMBER = 3\n"
    )
    (tmp_path / "needs_xyz.py").write_text("import not_there_xyz\n")
    (tmp_path / "broken_xyz.py").write_text("raise RuntimeError('while importing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "plug_xyz"
    for name in ("plug_xyz", "needs_xyz", "broken_xyz"):
        sys.modules.pop(name, None)


def test_keys_reach_the_target(plugin: str) -> None:
    node = {"_target_": f"{plugin}.Clip", "clip_low": 1, "order": 3, "weight": 2, "inner": {"_target_": "x", "y": [1]}}
    made = instantiate(node, skip=("order", "weight"), where="loss.terms.policy", tasks=[1])
    assert (made.tasks, made.clip_low, made.inner) == ([1], 1, {"_target_": "x", "y": [1]})
    assert instantiate({"_target_": f"{plugin}.loose", "a": 1}, b=2) == {"a": 1, "b": 2}
    assert instantiate({"_target_": f"{plugin}.Clip.tight"}).clip_low == 0.01


def test_each_problem_of_several_is_a_line(plugin: str) -> None:  # invariant 2
    with pytest.raises(ConfigError) as caught:
        instantiate({"_target_": f"{plugin}.several"}, where="rewards.a")
    assert caught.value.problems == tuple(
        f"rewards.a: {plugin}.several: {text}" for text in ("x is too low", "y is missing")
    )


def test_omegaconf_becomes_plain(plugin: str) -> None:
    node = OmegaConf.create({"n": 4, "p": {"_target_": f"{plugin}.Clip", "steps": "${n}", "inner": {"a": [1]}}})
    made = instantiate(node.p, tasks=[])
    assert made.steps == 4 and type(made.inner) is dict and type(made.inner["a"]) is list


@pytest.mark.parametrize(
    ("node", "extra", "says"),
    [
        (
            {"_target_": "plug_xyz.Clip", "clip_lo": 1},
            {"tasks": []},
            "takes no argument 'clip_lo'; did you mean clip_low",
        ),
        ({"_target_": "plug_xyz.Clip", "order": 1}, {"tasks": []}, "takes no argument 'order'"),
        ({"_target_": "plug_xyz.Clip"}, {"tasks": [], "seed": 1}, "takes no argument 'seed'"),
        ({"_target_": "plug_xyz.Clip"}, {}, "needs tasks, which"),
        ({"_target_": "plug_xyz.Clip", "tasks": []}, {"tasks": []}, "the program sets tasks"),
        ({"_target_": "plug_xyz.Clip", "clip_low": "1e-3"}, {"tasks": []}, "clip_low needs float, got '1e-3'"),
        ({"_target_": "plug_xyz.Clip", "steps": 1.5}, {"tasks": []}, "steps needs int, got 1.5"),
        ({"_target_": "plug_xyz.Clip", "steps": True}, {"tasks": []}, "steps needs int, got True"),
        ({"_target_": "plug_xyz.Clip", "on": 1}, {"tasks": []}, "on needs bool, got 1"),
        ({"_target_": "plug_xyz.Clpi"}, {}, "plug_xyz has no 'Clpi'; did you mean Clip"),
        ({"_target_": "plug_xyz.NUMBER"}, {}, "is not a class or function"),
        ({"_target_": "plug_xzy.Clip"}, {}, "there is no module 'plug_xzy'"),
        ({"_target_": "megatron_ext.rewards.outcom.Success"}, {}, "did you mean outcome?"),
        ({"_target_": "needs_xyz.Thing"}, {}, "needs the package 'not_there_xyz', which is not installed"),
        ({"_target_": "Clip"}, {}, "not an import path"),
        ({"_target_": "plug_xyz..Clip"}, {}, "not an import path"),
        ({"target": "plug_xyz.Clip"}, {}, "needs _target_, an import path; it holds ['target']"),
        ({"_target_": "plug_xyz.refuses"}, {}, "plug_xyz.refuses: x is too low"),
        ({"_target_": "builtins.dict"}, {}, "does not say what arguments it takes"),
        ("plug_xyz.Clip", {}, "expected a mapping with _target_, got 'plug_xyz.Clip'"),
    ],
)
def test_errors_are_one_line_that_names_the_place(plugin: str, node: Any, extra: dict[str, Any], says: str) -> None:
    with pytest.raises(InstantiateError) as error:
        instantiate(node, where="loss.terms.kl", **extra)
    message = str(error.value)
    assert says in message and message.startswith("loss.terms.kl: ") and "\n" not in message


def test_other_errors_of_the_target_pass_through(plugin: str) -> None:
    with pytest.raises(TypeError, match="its own"):
        instantiate({"_target_": f"{plugin}.fails"})
    with pytest.raises(RuntimeError, match="while importing"):
        import_target("broken_xyz.Thing")


def test_ordered_is_independent_of_writing() -> None:
    entries = {"b": {"order": 1}, "c": {}, "a": {}, "z": {"order": -2.5}, "kl": None}
    for permuted in itertools.permutations(entries.items()):
        assert [name for name, _ in ordered(dict(permuted))] == ["z", "a", "c", "b"]
    with pytest.raises(InstantiateError, match=r"credit.edits.x: expected a mapping .* got 3"):
        ordered({"x": 3}, "credit.edits")
    for order in ("first", True, float("nan"), None):
        with pytest.raises(InstantiateError, match="x.order: expected a number"):
            ordered({"x": {"order": order}})
