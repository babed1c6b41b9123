"""``megatron-ext COMMAND ...`` (after ``pip install -e .``) or ``python -m launch COMMAND ...``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

# Command -> its line of help; each is the module launch.COMMAND with ``main(argv) -> int``.
COMMANDS = {
    "train": "train a recipe",
    "eval": "evaluate a run's checkpoint on held-out tasks",
    "export": "write a run's model as a Hugging Face checkpoint",
    "report": "write a run's report, or the comparison of several, as one HTML file",
    "inspect": "print a kept step of a run, token by token",
    "recipes": "list, show, check and compare recipes",
    "table": "train a recipe over seeds, with a control, and table what it learned",
    "quickstart": "the main job, with its result at the end",
    "bench": "measure, against a bar",
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: megatron-ext COMMAND ...\n")
        for name, text in COMMANDS.items():
            print(f"  {name:<12}{text}")
        print("\nmegatron-ext COMMAND --help says more.")
        return 0 if arguments else 2
    name = arguments[0]
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS) or list(COMMANDS)
        print(f"error: {name}: no such command; nearest: {', '.join(near)}", file=sys.stderr)
        return 2
    command: Callable[[Sequence[str]], int] = importlib.import_module(f"launch.{name}").main
    return command(arguments[1:])
