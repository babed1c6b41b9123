"""The lock files, setup.py and the environment agree."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.paths import MEGATRON_CORE

LOCKS = ("base", "compiled", "megatron", "test", "peers")


def pins(root: Path, name: str) -> dict[str, str]:
    found = {}
    for line in (root / f"requirements/{name}.txt").read_text().splitlines():
        if text := line.split("#")[0].strip():
            package, version = text.split("==")  # anything but an exact pin fails here
            found[re.sub(r"[-_.]+", "-", package).lower()] = version
    return found


def test_no_package_is_pinned_twice(root: Path) -> None:
    names = [name for lock in LOCKS for name in pins(root, lock)]
    assert len(names) == len(set(names))


def test_every_pin_says_why_it_is_there(root: Path) -> None:
    for lock in LOCKS:
        lines = (root / f"requirements/{lock}.txt").read_text().splitlines()
        for before, line in zip(["", *lines], lines, strict=False):
            if line and not line.startswith("#"):
                assert "#" in line or (before.startswith("# ") and len(before) > 10), f"{lock}.txt: {line}"


def test_this_environment_has_the_pinned_versions(root: Path) -> None:
    for lock in ("base", "megatron", "test"):
        for name, version in pins(root, lock).items():
            assert importlib.metadata.version(name).split("+")[0] == version, name


def test_what_megatron_needs_is_said_with_the_pinned_version(root: Path) -> None:
    assert pins(root, "megatron") == {"megatron-core": MEGATRON_CORE.removeprefix("megatron-core==")}


def test_an_editable_install_asks_for_the_same_versions(root: Path, tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    info = tmp_path / "megatron_ext.egg-info"
    base: dict[str, str] = {}
    section = ""
    for line in (info / "requires.txt").read_text().splitlines():
        if line.startswith("["):
            section = line
        elif line and section in ("", '[:python_version >= "3.12"]'):
            name, version = line.split("==")
            base[re.sub(r"[-_.]+", "-", name).lower()] = version
    assert base == {**pins(root, "base"), **pins(root, "compiled"), **pins(root, "megatron")}
    assert "megatron-ext = launch.cli:main" in (info / "entry_points.txt").read_text()
    assert {"launch", "megatron_ext", "recipes"} == set((info / "top_level.txt").read_text().split())


@pytest.mark.slow
def test_the_environments_packages_fit_together() -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=600)
    # The peers beside them are held to their formulas alone, and jericho works without spacy (launch/env says why).
    lines = [line for line in done.stdout.splitlines() if " requires " in line or " has requirement " in line]
    assert [line for line in lines if not line.startswith(("verl ", "pyvers ", "jericho 3.3.1 requires spacy"))] == []
