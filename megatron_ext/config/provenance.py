"""Where a run comes from: package versions, git state, command line, Python, platform. Saved with it and tracked."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

_PACKAGES = (
    "torch",
    "megatron-core",
    "numpy",
    "transformers",
    "tokenizers",
    "safetensors",
    "hydra-core",
    "omegaconf",
    "wandb",
    "textworld",
    "textworld-express",
    "reasoning-gym",
)


def collect_provenance(root: Path | None = None) -> dict[str, Any]:
    """``versions`` (None: not installed), ``git`` (commit and whether the tree is dirty, or None outside a repository),
    ``command``, ``python``, ``platform``. ``root`` is the folder whose git state counts (default: this package's)."""
    return {
        "versions": {name: _version(name) for name in _PACKAGES},
        "git": _git(root or Path(__file__).resolve().parent),
        "command": list(sys.orig_argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    def run(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *args], capture_output=True, text=True, check=False, timeout=30
            )
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout if done.returncode == 0 else None

    commit, status = run("rev-parse", "HEAD"), run("status", "--porcelain")
    if commit is None or status is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(status.strip())}
