"""From runs to what the page shows: texts, tables, charts, samples. The template only lays them out.

Invariants (``tests/report/test_build.py`` asserts each):

1. Any run folders give a page, together or alone; only several have groups, rows and differences.
2. A page of several runs says whether its lines are runs or means over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_ext.report import chart_sections, compare
from megatron_ext.report.chart_sections import ChartSection
from megatron_ext.report.experts import common_reach
from megatron_ext.report.run_data import RunData
from megatron_ext.report.run_page import RunPage, run_page
from megatron_ext.report.samples import Limits


@dataclass(frozen=True)
class Page:
    """The report. ``groups``, ``rows`` and ``differences`` are empty for a single run."""

    title: str
    written: str
    runs: tuple[RunPage, ...]
    sections: tuple[ChartSection, ...]
    groups: tuple[compare.Group, ...]
    rows: tuple[compare.Row, ...]
    differences: tuple[compare.Difference, ...]
    note: str


def build_page(runs: Sequence[RunData], recipes: Path | None, limits: Limits, now: datetime | None = None) -> Page:
    """The page of one or more runs. ``recipes`` holds the presets that configurations are compared with."""
    several = len(runs) > 1
    groups = compare.group_runs(runs) if several else []
    note = chart_sections.compared_note(groups) if several else chart_sections.single_note(runs[0])
    sections = chart_sections.compared(groups) if several else chart_sections.single(runs[0])
    reach = common_reach([run.routing for run in runs if run.routing is not None])
    return Page(
        title=f"{len(runs)} runs" if several else runs[0].name,
        written=(now or datetime.now(UTC)).strftime("%Y-%m-%d %H:%M UTC"),
        runs=tuple(run_page(run, recipes, limits, reach) for run in runs),
        sections=tuple(sections),
        groups=tuple(groups),
        rows=tuple(compare.rows(groups)),
        differences=tuple(compare.differences(groups)) if several else (),
        note=note,
    )
