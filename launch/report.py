"""``python -m launch.report RUN [RUN ...] [--out FILE]``: writes a run's report, or the comparison of several, as one
HTML file that needs nothing else: curves, held-out success with intervals, sample trajectories, configuration.

One run's report is ``RUN/report.html`` unless ``--out`` says otherwise, and is also written when a run ends; several
runs go to ``report.html`` in the folder that holds the first. A run that is still going is shown as far as it got.

Exit status: 0 written (its path on stdout), 2 a folder cannot be used (one line on stderr).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.errors import expected, show
from launch.paths import RECIPES


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.report", description="Writes a run's report, or the comparison of several, as HTML."
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as runs/quickstart")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.html in the run's folder")
    options = parser.parse_args(argv)
    from megatron_ext.report.render import FILE_NAME, write_report

    runs = list(dict.fromkeys(options.runs))
    out = options.out
    if out is None and len(runs) > 1:
        out = runs[0].resolve().parent / FILE_NAME
    try:
        print(write_report(runs, out, RECIPES))
    except expected() as error:
        return show(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
