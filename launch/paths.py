"""Where the clone's parts are, and the one package that pip cannot be told about on Python 3.11."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ROOT / "recipes"

# requirements/megatron.txt holds the same pin (a test compares them); an installed package has no requirements folder.
MEGATRON_CORE = "megatron-core==0.19.2"
