"""``python -m launch.bench NAME [--json] [OPTIONS]``: runs one bench and prints what it measured against its bar.

A bench is a module of ``launch/benches`` with a docstring that says what it measures, ``ABOUT`` and ``run(report)``,
which takes the bench's own options as arguments. ``--help`` lists the benches, ``NAME --help`` says all of one.
``--json`` prints one object a line (``name``, ``value``, ``unit``, ``bar``, ``better``, ``size``); otherwise a table.
Exit status: 0 when it was measured, whether the bar held or not.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from launch.measurement import About, Measurement
from launch.output import json_lines

USAGE = "python -m launch.bench NAME [--json] [OPTIONS]"


def benches(folder: Path | None = None) -> list[str]:
    """Names of the benches there are."""
    where = folder or Path(__file__).parent / "benches"
    return sorted(file.stem for file in where.glob("*.py") if not file.stem.startswith("_"))


def table(rows: Sequence[Measurement]) -> str:
    """Aligned columns; the last says whether the bar held."""
    cells = [("name", "value", "unit", "bar", "", "size")]
    for row in rows:
        bar = "" if row.bar is None else f"{'<=' if row.better == 'lower' else '>='} {row.bar:g}"
        held = {None: "", True: "holds", False: "missed"}[row.holds]
        cells.append((row.name, f"{row.value:.4g}", row.unit, bar, held, row.size))
    widths = [max(len(line[column]) for line in cells) for column in range(6)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The options of one bench, with all that it says of itself."""
    about: About = module.ABOUT
    # A module's docstring says what it measures, and then what its tests assert, which is not for who runs it.
    said = inspect.cleandoc(module.__doc__ or "").split("\n\nInvariants")[0].replace("``", "")
    wide = max(map(len, about.keys)) + 2
    keys = "\n".join(f"  {key:<{wide}}{what}" for key, what in about.keys.items())
    made = _Parser(
        prog=f"python -m launch.bench {name}",
        description=f"{about.line}\n\n{said}\n\ntakes: {about.takes}",
        epilog=f"prints:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--json", action="store_true", help="one JSON object a line, instead of a table at the end")
    about.options(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    known = benches()
    name = next((a for a in arguments if not a.startswith("-")), None)
    if name is None and {"-h", "--help"} & {*arguments}:
        print(f"usage: {USAGE}\n")
        for one in known:
            print(f"  {one:<16}{importlib.import_module(f'launch.benches.{one}').ABOUT.line}")
        print("\npython -m launch.bench NAME --help says what it prints, its options, and how long it takes.")
        return 0
    if name is None:
        print(f"error: give one bench; usage: {USAGE}; benches: {', '.join(known)}", file=sys.stderr)
        return 2
    if name not in known:
        near = get_close_matches(name, known) or known
        print(f"error: {name}: no such bench; nearest: {', '.join(near) or 'none'}", file=sys.stderr)
        return 2
    arguments.remove(name)
    module = importlib.import_module(f"launch.benches.{name}")
    try:
        options = vars(parser(name, module).parse_args(arguments))
    except argparse.ArgumentError as error:
        print(f"error: {error}; python -m launch.bench {name} --help lists the options", file=sys.stderr)
        return 2
    if options.pop("json"):
        with json_lines() as write:
            module.run(lambda row: write(asdict(row)), **options)
        return 0
    rows: list[Measurement] = []
    module.run(rows.append, **options)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
