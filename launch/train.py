"""``python -m launch.train recipe=SLUG[/PRESET] [KEY=VALUE ...]``: composes, checks, trains.

Exit status: 0 done, 2 the configuration is wrong (one line a problem on stderr), 130 interrupted (saved; the same
command goes on from there).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import show, status
from launch.paths import RECIPES
from launch.prepare import missing_packages, prepare, ranks
from megatron_ext.config import help as config_help
from megatron_ext.config.compose import ConfigError, compose, recipes

if TYPE_CHECKING:
    from megatron_ext.training.run import RunResult

PROGRAM = "python -m launch.train"


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    flags = [a for a in arguments if a.startswith("-")]
    overrides = [a for a in arguments if not a.startswith("-")]
    unknown = [flag for flag in flags if flag not in ("-h", "--help", "--print-config")]
    if unknown:
        print(f"error: {unknown[0]}: no such option; there are --help and --print-config", file=sys.stderr)
        return 2
    if "-h" in flags or "--help" in flags:
        return show_help(overrides)
    try:
        if "--print-config" in flags:
            from omegaconf import OmegaConf

            from megatron_ext.config.saved import as_tree

            print(OmegaConf.to_yaml(OmegaConf.create(as_tree(prepare(overrides)))), end="")
            return 0
        result = run(overrides)
    except (Exception, KeyboardInterrupt) as error:
        return status(error)
    if result.interrupted:
        print(how_to_go_on(overrides, result.run_dir), file=sys.stderr)
        return 130
    print(summary(result))
    return 0


def run(overrides: Sequence[str]) -> RunResult:
    """Trains what the overrides describe. Raises ``ConfigError``."""
    missing = missing_packages()
    if missing:
        raise ConfigError(missing)
    cfg = prepare(overrides)
    world = ranks([])
    if world > 1:
        raise ConfigError([f"{world} training ranks (WORLD_SIZE): training runs on one; start a single process"])
    # Imported once everything was checked: the training stack takes seconds to load.
    from megatron_ext.training.run import train

    return train(cfg)


def show_help(overrides: Sequence[str], recipes_root: Path = RECIPES) -> int:
    """Help with the values of the recipe on the command line, or the schema's defaults without one."""
    try:
        cfg = compose(overrides, recipes_root) if overrides else None
    except ConfigError as error:
        return show(error)
    print(config_help.render(cfg, recipes(recipes_root), PROGRAM), end="")
    return 0


def how_to_go_on(overrides: Sequence[str], run_dir: Path) -> str:
    return f"interrupted; {run_dir} is saved. To go on: bash launch/env {PROGRAM} {shlex.join(overrides)}"


def summary(result: RunResult) -> str:
    def percent(share: float | None) -> str:
        return "not measured" if share is None else f"{100 * share:.1f} %"

    return (
        f"held-out success, greedy: {percent(result.success_before)} before, {percent(result.success_after)} after "
        f"{result.steps} steps ({result.seconds / 60:.1f} min)\nkept in {result.run_dir}"
    )


if __name__ == "__main__":
    sys.exit(main())
