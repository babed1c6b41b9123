"""``bash launch/quickstart [--json] [KEY=VALUE ...]``: the main job, ``recipe=quickstart``, with its result at the end.

``--json``: the last (and only) line of stdout is ``{success_before, success_after, steps, idle_steps, hint, seconds,
run_dir, report}``; progress goes to stderr. Exit status as in ``launch.train``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from launch.errors import status
from launch.output import json_lines
from launch.paths import RECIPES
from launch.train import how_to_go_on, run, summary
from megatron_ext.config.compose import compose

USAGE = (
    "usage: bash launch/quickstart [--json] [KEY=VALUE ...]\n"
    "Makes the environment if it is missing, trains recipe=quickstart and prints success before and after.\n"
    "Every key: bash launch/env python -m launch.train --help recipe=quickstart"
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = [a for a in arguments if a.startswith("-")]
    if "-h" in flags or "--help" in flags:
        print(USAGE)
        return 0
    unknown = [flag for flag in flags if flag != "--json"]
    if unknown:
        print(f"error: {unknown[0]}: no such option; there are --json and --help", file=sys.stderr)
        return 2
    overrides = [a for a in arguments if not a.startswith("-")]
    if not any(a.startswith("recipe=") for a in overrides):
        overrides.insert(0, "recipe=quickstart")
    with ExitStack() as stack:
        write = stack.enter_context(json_lines()) if "--json" in flags else None
        try:
            overrides = next_run(overrides)
            result = run(overrides)
        except (Exception, KeyboardInterrupt) as error:
            return status(error)
        if result.interrupted:
            print(how_to_go_on(overrides, result), file=sys.stderr)
            return 130
        if write is None:
            print(summary(result))
        else:
            write(
                {
                    "success_before": result.success_before,
                    "success_after": result.success_after,
                    "steps": result.steps,
                    "idle_steps": result.idle_steps,
                    "hint": result.hint,
                    "seconds": round(result.seconds, 1),
                    "run_dir": str(result.run_dir.resolve()),
                    "report": None if result.report is None else str(result.report.resolve()),
                }
            )
    return 0


def next_run(overrides: list[str]) -> list[str]:
    """An unfinished run goes on; after a finished one the next has a name of its own, unless ``run.name`` is given."""
    if any(a.startswith("run.name=") for a in overrides):
        return overrides
    cfg = compose(overrides, RECIPES)
    number, name = 1, cfg.run.name
    while _finished(Path(cfg.run.root) / name):
        number += 1
        name = f"{cfg.run.name}-{number}"
    return overrides if number == 1 else [*overrides, f"run.name={name}"]


def _finished(folder: Path) -> bool:
    path = folder / "result.json"
    return path.exists() and json.loads(path.read_text())["success_after"] is not None


if __name__ == "__main__":
    sys.exit(main())
