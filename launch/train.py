"""``python -m launch.train recipe=SLUG[/PRESET] [KEY=VALUE ...]``: composes, checks, trains.

With ``--replay-step N [--replay train|rollout]`` a step of the run is made again instead (``launch.replay``).

Under ``torchrun`` or ``srun`` every rank runs this; rank 0 alone speaks.

Exit status: 0 done, 2 the configuration is wrong (one line a problem on stderr), 130 interrupted (saved; the same
command goes on from there).
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.errors import is_first, show, status
from launch.output import printing
from launch.paths import RECIPES
from launch.prepare import half_launched, missing_packages, prepare
from launch.replay import KINDS, replay
from megatron_ext.config import help as config_help
from megatron_ext.config.compose import ConfigError, compose, recipes

if TYPE_CHECKING:
    from megatron_ext.training.run import RunResult

PROGRAM = "python -m launch.train"
FLAGS = ("-h", "--help", "--print-config")
VALUED = ("--replay-step", "--replay")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        valued = take_values(arguments, VALUED)
    except ConfigError as error:
        return show(error)
    flags = [a for a in arguments if a.startswith("-")]
    overrides = [a for a in arguments if not a.startswith("-")]
    unknown = [flag for flag in flags if flag not in FLAGS]
    if unknown:
        there_are = ", ".join((*FLAGS[1:], *VALUED))
        return show(ConfigError([f"{unknown[0]}: no such option; there are {there_are}"]))
    if "-h" in flags or "--help" in flags:
        return printing(lambda: show_help(overrides))
    try:
        if "--print-config" in flags:
            from omegaconf import OmegaConf

            from megatron_ext.config.saved import as_tree

            print(OmegaConf.to_yaml(OmegaConf.create(as_tree(prepare(overrides)))), end="")
            return 0
        if valued:
            return replay(overrides, *replay_options(valued))
        result = run(overrides)
    except (Exception, KeyboardInterrupt) as error:
        return status(error)
    if result.interrupted:
        if is_first():
            print(how_to_go_on(overrides, result), file=sys.stderr)
        return 130
    if is_first():
        print(summary(result))
    return 0


def take_values(arguments: list[str], names: Sequence[str]) -> dict[str, str]:
    """Takes ``--name VALUE`` and ``--name=VALUE`` out of ``arguments``. Raises ``ConfigError`` for one without."""
    taken: dict[str, str] = {}
    at = 0
    while at < len(arguments):
        name, equals, value = arguments[at].partition("=")
        if name not in names:
            at += 1
            continue
        if not equals:
            if at + 1 == len(arguments) or arguments[at + 1].startswith("-"):
                raise ConfigError([f"{name}: needs a value"])
            value = arguments.pop(at + 1)
        arguments.pop(at)
        taken[name] = value
    return taken


def replay_options(given: Mapping[str, str]) -> tuple[int, str]:
    """(step, kind) of ``--replay-step`` and ``--replay``. Raises ``ConfigError``."""
    kind = given.get("--replay", KINDS[0])
    if kind not in KINDS:
        raise ConfigError([f"--replay {kind}: must be one of {', '.join(KINDS)}"])
    step = given.get("--replay-step", "")
    if not step.isdecimal() or int(step) < 1:
        raise ConfigError([f"--replay-step {step}".rstrip() + ": must be the number of a step, 1 or more"])
    return int(step), kind


def run(overrides: Sequence[str]) -> RunResult:
    """Trains what the overrides describe. Raises ``ConfigError``."""
    problems = missing_packages() + half_launched()
    if problems:
        raise ConfigError(problems)
    cfg = prepare(overrides)
    # Imported once everything was checked: the training stack takes seconds to load.
    from megatron_ext.training.run import train

    return train(cfg, RECIPES)


def show_help(overrides: Sequence[str], recipes_root: Path = RECIPES) -> int:
    """Help with the values of the recipe on the command line, or the schema's defaults without one."""
    try:
        cfg = compose(overrides, recipes_root) if overrides else None
    except ConfigError as error:
        return show(error)
    print(config_help.render(cfg, recipes(recipes_root), PROGRAM), end="")
    return 0


def how_to_go_on(overrides: Sequence[str], result: RunResult) -> str:
    """What an interrupted run keeps, and the command that goes on from there."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    program = PROGRAM if world == 1 else f"torchrun --nproc-per-node {world} -m launch.train"
    return f"interrupted; {result.run_dir}: {result.kept}. To go on: bash launch/env {program} {shlex.join(overrides)}"


def summary(result: RunResult) -> str:
    def percent(share: float | None) -> str:
        return "not measured" if share is None else f"{100 * share:.1f} %"

    return (
        f"held-out success, greedy: {percent(result.success_before)} before, {percent(result.success_after)} after "
        f"{result.steps} steps ({result.seconds / 60:.1f} min)\nkept in {result.run_dir}"
        + (f"\n{result.hint}" if result.hint else "")
        + (f"\nreport: {result.report}" if result.report is not None else "")
    )


if __name__ == "__main__":
    sys.exit(main())
