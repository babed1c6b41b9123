"""The invariants of ``megatron_ext/report/places.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.report.places import command_line, ends, place, without_machine


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("/mnt/me/models/qwen", "…/qwen"),
        ("/mnt/me/models/", "…/models"),
        ("~/models/qwen", "…/qwen"),
        ("run.root=/mnt/disk-1/runs", "run.root=…/runs"),
        ("['/data/a.jsonl', '/data/b.jsonl']", "['…/a.jsonl', '…/b.jsonl']"),
        ("runs/quickstart", "runs/quickstart"),
        ("https://host/a/b", "https://host/a/b"),
        ("Think between <think> and </think>, then GET /api/v1/users and/or stop. /no_think", None),
        ("/no_think", None),
        ("a/b/c", None),
        ("launch.benches._e2e_setup:letters", None),
        ("", None),
    ],
)
def test_of_an_absolute_path_the_last_part_is_left(text: str, left: str | None) -> None:  # invariant 1
    assert without_machine(text) == (text if left is None else left)


def test_a_command_can_be_typed() -> None:  # invariant 1
    words = ["/opt/envs/x/bin/python3.11", "-m", "launch.train", "recipe=walk", "run.root=/mnt/a b/runs", "x='y'"]
    assert command_line(words).startswith("python -m launch.train recipe=walk ")
    assert "/opt" not in command_line(words) and "/mnt" not in command_line(words)
    assert command_line([]) == ""


def test_a_folder_is_found_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "one"
    assert place(run) == "…/runs/one"
    monkeypatch.chdir(tmp_path)
    assert place(run) == place(Path("runs/one")) == "runs/one"


def test_folders_are_told_apart(tmp_path: Path) -> None:  # invariant 2
    a, b, c = (tmp_path / name for name in ("x/a", "x/b", "y/a"))
    assert ends([a, b]) == ["a", "b"] and ends([a, b, c]) == ["x/a", "x/b", "y/a"]
    assert ends([a, a]) == ["a", "a"] and ends([]) == []
