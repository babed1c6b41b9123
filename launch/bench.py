"""``python -m launch.bench NAME [--json]``: runs one bench and prints what it measured against its bar.

A bench is a module of ``launch/benches`` with ``HELP`` (one line) and ``run(report)``. ``--json`` prints one object
a line (``name``, ``value``, ``unit``, ``bar``, ``better``, ``size``); otherwise a table. Exit status: 0 when it was
measured, whether the bar held or not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path

from launch.measurement import Measurement, Report
from launch.output import json_lines


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


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    names = [a for a in arguments if not a.startswith("-")]
    flags = [a for a in arguments if a.startswith("-")]
    known = benches()
    if "-h" in flags or "--help" in flags:
        print("usage: python -m launch.bench NAME [--json]\n")
        for name in known:
            print(f"  {name:<16}{importlib.import_module(f'launch.benches.{name}').HELP}")
        return 0
    unknown = [flag for flag in flags if flag != "--json"]
    if unknown or len(names) != 1:
        what = f"{unknown[0]}: no such option" if unknown else "give one bench"
        print(
            f"error: {what}; usage: python -m launch.bench NAME [--json]; benches: {', '.join(known)}", file=sys.stderr
        )
        return 2
    if names[0] not in known:
        near = get_close_matches(names[0], known) or known
        print(f"error: {names[0]}: no such bench; nearest: {', '.join(near) or 'none'}", file=sys.stderr)
        return 2
    run: Callable[[Report], None] = importlib.import_module(f"launch.benches.{names[0]}").run
    if "--json" in flags:
        with json_lines() as write:
            run(lambda row: write(asdict(row)))
        return 0
    rows: list[Measurement] = []
    run(rows.append)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
