from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from math import nan
from pathlib import Path

import pytest

from launch import bench
from launch.measurement import About, Measurement


def test_bars() -> None:
    assert Measurement("a", 2.0, "x", 1.5, "higher", "s").holds is True
    assert Measurement("a", 1.0, "x", 1.5, "higher", "s").holds is False
    assert Measurement("a", 1.5, "s", 1.5, "lower", "s").holds is True
    assert Measurement("a", 1.0, "s", None, "lower", "s").holds is None
    with pytest.raises(ValueError, match="bench a: measured nan"):
        Measurement("a", nan, "s", None, "lower", "s")


def test_table() -> None:
    rows = [
        Measurement("speed", 2.25, "x", 1.5, "higher", "64 x 128"),
        Measurement("time", 0.5, "s", 0.25, "lower", ""),
        Measurement("share", 0.125, "", None, "lower", "all"),
    ]
    lines = bench.table(rows).splitlines()
    assert lines[1].split() == ["speed", "2.25", "x", ">=", "1.5", "holds", "64", "x", "128"]
    assert lines[2].split() == ["time", "0.5", "s", "<=", "0.25", "missed"]
    assert lines[3].split() == ["share", "0.125", "all"]
    assert lines[1].index("x") == lines[0].index("unit")


def about(name: str) -> About:
    found: About = importlib.import_module(f"launch.benches.{name}").ABOUT
    return found


@pytest.mark.parametrize("name", bench.benches())
def test_every_bench_says_what_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "\n" not in about(name).line and about(name).keys
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and f"usage: python -m launch.bench {name} [-h] [--json]" in out
    said = [about(name).line, f"takes: {about(name).takes}", *about(name).keys]
    assert all(part in out for part in said) and "Invariants" not in out and "``" not in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize("name", bench.benches())
def test_options_are_arguments_of_run(name: str) -> None:
    """With their own defaults a bench runs as it does when it is called."""
    module = importlib.import_module(f"launch.benches.{name}")
    given = vars(bench.parser(name, module).parse_args([]))
    takes = {k: p.default for k, p in inspect.signature(module.run).parameters.items() if k != "report"}
    assert given == takes | {"json": False}


@pytest.mark.parametrize("name", bench.benches())
def test_every_figure_that_a_source_names_is_among_the_keys(name: str) -> None:
    folder = Path(bench.__file__).parent / "benches"
    files = sorted(folder.glob("_core_*.py")) if name == "core" else [folder / f"{name}.py"]
    names = [text for file in files for text in figures(ast.parse(file.read_text()))]
    assert names
    for text in names:
        assert any(about(name).knows(text.replace("*", part)) for part in ("x", "_x", "_shallow", "")), text


def figures(tree: ast.AST) -> Iterator[str]:
    """First arguments of ``Measurement`` that are written where it is made; ``*`` for what is put into them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Measurement":
            first = node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                yield "".join(str(v.value) if isinstance(v, ast.Constant) else "*" for v in first.values)


def test_keys() -> None:
    found = About("a", "b", {"size": "", "time_<part>": "", "speed[_small]": ""})
    assert all(found.knows(name) for name in ("size", "time_of_all", "speed", "speed_small"))
    assert not any(found.knows(name) for name in ("sizes", "time_", "speed_large", "a_size"))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give one bench"),
        (["tree", "--jsno"], "--jsno"),
        (["nope"], "no such bench; nearest"),
        (["moe", "--smal"], "unrecognized arguments: --smal; python -m launch.bench moe --help"),
        (["moe", "--cache"], "expected one argument"),
        (["tree", "moe"], "unrecognized arguments: moe"),
        (["kill", "--kills", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_command_lines(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and len(captured.err.splitlines()) == 1


def test_help_lists_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "usage:" in out and all(name in out for name in bench.benches())
