"""``python -m launch.recipes list | show SLUG | check SLUG | compare SLUG``: what is there, what it is made of, whether
it holds, and what its mechanism does.

Exit status: 0 done (whatever the comparison found), 1 a check or a run failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path

from launch.errors import show as show_error
from launch.output import printing
from launch.paths import RECIPES, ROOT
from launch.recipes_about import find
from megatron_ext.config.compose import ConfigError
from megatron_ext.config.instantiate import InstantiateError

PROGRAM = "python -m launch.recipes"
COMMANDS = ("list", "show", "check", "compare")
TESTS = ROOT / "tests" / "recipes"
_ABOUT = """\
A published method is a folder recipes/SLUG: YAML that says what it composes, its own math in a small module, a README.

  list             every recipe: what it is, what it composes, its presets, what stands behind it
  show SLUG        what it composes in order, its constants (and which are not the paper's), what was measured
  check SLUG       its worked numbers, every preset, two steps of training; a line each
  compare SLUG     trains its mechanism on and off over seeds, and tells what differs

examples:
  python -m launch.recipes list
  python -m launch.recipes show quickstart/long
  python -m launch.recipes check quickstart
  python -m launch.recipes compare quickstart --seeds 1 2 3 --jobs 2

python -m launch.recipes COMMAND --help says more.
"""
_COMPARE = """\
Trains every arm of recipes/SLUG/comparison.yaml once a seed, from one warm start, in warm processes, and writes
runs/compare/SLUG: a folder and a log a run, table.md, table.json, figure.png. Run again, it keeps finished runs and
goes on with the one that was interrupted, from its last checkpoint. Ctrl-C saves first; kill -9 costs at most five
steps.

The table has held-out success before and after (greedy and sampled), the paired difference of each arm to the baseline
arm with its intervals over seeds and over tasks, the share of trained tokens that the mechanism changed, and counters.
A difference whose interval over seeds contains 0 is told as none.

KEY=VALUE goes to every arm, as in launch.train. A comparison.yaml:

  title: does the weight help?
  baseline: off                      # the arm that the others are measured against
  arms:
    on: {preset: micro, title: weight by state}
    off: {preset: micro_off, title: one weight}
    fixed: {preset: micro, title: weight 0.5, overrides: [credit.edits.NAME.weight=0.5]}
  changed: credit/NAME/changed_fraction      # left out: found by running the baseline's credit on kept steps
  counters:
    credit/NAME/weight_mean: weight of a step
"""


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(
        prog=PROGRAM, description=_ABOUT, formatter_class=plain, usage=f"{PROGRAM} COMMAND ..."
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND", help=argparse.SUPPRESS)
    commands.add_parser("list", description="Every recipe: title, what it composes, presets, what stands behind it.")
    show = commands.add_parser("show", description="All of one recipe, or of one of its presets.")
    show.add_argument("name", metavar="SLUG[/PRESET]")
    check = commands.add_parser(
        "check",
        description="Runs the recipe's worked numbers (tests/recipes/SLUG), composes and judges every preset (as for "
        "the machine it is meant for), and trains two steps of the smallest. A line each; exit status 1 if one fails.",
    )
    check.add_argument("name", metavar="SLUG")
    compare = commands.add_parser(
        "compare",
        description=_COMPARE,
        formatter_class=plain,
        usage=f"{PROGRAM} compare SLUG [--seeds N ...] [--arms NAME ...] [--jobs N] [--json] [KEY=VALUE ...]",
    )
    compare.add_argument("name", metavar="SLUG")
    compare.add_argument("--seeds", type=int, nargs="+", default=[], metavar="N", help="default: the file's, or 1 2 3")
    compare.add_argument("--arms", nargs="+", default=[], metavar="NAME", help="only these arms")
    compare.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time (default: 1)")
    compare.add_argument(
        "--root", type=Path, default=Path("runs/compare"), metavar="FOLDER", help="default: runs/compare"
    )
    compare.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
    return made


def main(argv: Sequence[str] | None = None, recipes: Path = RECIPES, tests: Path = TESTS) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments:
        print(_ABOUT)
        return 2
    if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        near = get_close_matches(arguments[0], COMMANDS) or COMMANDS
        print(f"error: {arguments[0]}: no such command; nearest: {', '.join(near)}", file=sys.stderr)
        return 2
    comparing = "compare" in arguments[:1]
    overrides = [a for a in arguments if comparing and ("=" in a and not a.startswith("-") or a.startswith("~"))]
    made = parser()
    options = made.parse_args([a for a in arguments if a not in overrides])
    try:
        if options.command == "list":
            from launch.recipes_show import listing

            return printing(lambda: _lines(listing(recipes, tests)))
        if options.command == "show":
            from launch.recipes_show import card, split

            return printing(lambda: _lines(card(*split(options.name, recipes), recipes, tests)))
        slug = find(options.name, recipes)
        if options.command == "check":
            return _check(slug, recipes, tests)
        if options.jobs < 1:
            raise ConfigError([f"--jobs {options.jobs}: must be at least 1"])
        if len(set(options.seeds)) != len(options.seeds):
            raise ConfigError([f"--seeds {' '.join(map(str, options.seeds))}: a seed is there twice"])
    except (ConfigError, InstantiateError) as error:
        return show_error(error)
    from launch.recipes_compare import Options, run

    wanted = Options(
        slug=slug,
        seeds=tuple(options.seeds),
        arms=tuple(options.arms),
        jobs=options.jobs,
        root=options.root,
        overrides=tuple(overrides),
        json=options.json,
    )
    return run(wanted, recipes)


def _lines(lines: Iterable[str]) -> int:
    print("\n".join(lines))
    return 0


def _check(slug: str, recipes: Path, tests: Path) -> int:
    from launch.recipes_check import checks

    held = True
    for found in checks(slug, recipes, tests, lambda text: print(f"... {text}", file=sys.stderr, flush=True)):
        held = held and found.holds
        print(f"{found.name:<28} {'holds ' if found.holds else 'FAILED'}  {found.said}", flush=True)
        for line in found.lines:
            print(f"    {line}", flush=True)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
