from __future__ import annotations

import importlib
from math import nan

import pytest

from launch import bench
from launch.measurement import Measurement


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


def test_every_bench_says_what_it_is() -> None:
    for name in bench.benches():
        module = importlib.import_module(f"launch.benches.{name}")
        assert module.HELP and "\n" not in module.HELP
        assert callable(module.run)


@pytest.mark.parametrize(
    ("argv", "words"), [([], "give one bench"), (["x", "--jsno"], "--jsno"), (["nope"], "no such")]
)
def test_bad_command_lines(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and len(captured.err.splitlines()) == 1


def test_help_lists_the_benches(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "usage:" in out and all(name in out for name in bench.benches())
