"""What a comparison found, as Markdown.

Invariant (``tests/launch/test_compare_report.py``): findings are told as they came out; no difference is one, and so is
a mechanism that changed too little to be seen.
"""

from __future__ import annotations

from launch.compare_report import CHANGED_STD, Compared
from launch.table_report import aligned
from megatron_ext.report.compare import Figure
from megatron_ext.training.evaluation import Interval

NOT_SHOWN = 0.05  # a mechanism that changes fewer of the trained tokens has not been shown


def number(value: float) -> str:
    """Three digits after the point, or three that count."""
    if not value or 0.001 <= abs(value) < 1000:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.2e}"


def _figure(found: Figure | None) -> str:
    if found is None:
        return "-"
    return number(found.mean) + (f" [{number(found.low)}, {number(found.high)}]" if found.over else "")


def _signed(over: Interval | None) -> str:
    return "-" if over is None else f"[{over.low:+.3f}, {over.high:+.3f}]"


def verdicts(made: Compared) -> list[str]:
    """The findings, a line each."""
    baseline = made.comparison.baseline
    said = [
        f"`{found.name}` against `{baseline}`, {found.what} success: {found.mean:+.3f} "
        f"{_signed(found.over_seeds or found.over_tasks)}: {found.verdict}"
        for found in made.differences
    ]
    if not any(row.greedy_after.high or (row.sampled_after and row.sampled_after.high) for row in made.rows):
        said.append("no arm ever succeeded after training: there is nothing to compare")
    for row in made.rows:
        if row.changed is not None:
            low = " (below 5 %: the mechanism has not been shown)" if row.changed.mean < NOT_SHOWN else ""
            said.append(f"`{row.name}`: {100 * row.changed.mean:.1f} % of the trained tokens were changed{low}")
        elif row.name != baseline:
            said.append(f"`{row.name}`: the share of changed tokens is not known, {row.changed_why}")
    return said


def markdown(made: Compared) -> str:
    """Tables, findings, how to read them, and the command that made them, as GitHub reads them."""
    comparison = made.comparison
    seeds = ", ".join(map(str, comparison.seeds))
    title = f": {comparison.title}" if comparison.title else ""
    several = f"{made.warm_starts} warm starts"
    start = {0: "no warm start", 1: "one warm start for all runs"}.get(made.warm_starts, several)
    lines = [f"**{comparison.slug}**{title}", ""]
    for arm in comparison.arms:
        words = " ".join([f"recipe={arm.recipe(comparison.slug)}", *arm.overrides])
        lines.append(f"- `{arm.name}`: {arm.title} (`{words}`)")
    lines += ["", f"Success on {made.tasks} held-out tasks, seeds {seeds}, {start}:", "", _success(made), ""]
    lines += [_differences(made), ""] if made.differences else []
    lines += [_counters(made), ""] if comparison.counters else []
    lines += [_over_steps(made), ""] if comparison.over_steps else []
    lines += [f"- {line}" for line in verdicts(made)]
    return "\n".join([*lines, "", _how(made), "", "```bash", *made.commands, "```", ""])


def _success(made: Compared) -> str:
    sampled = any(row.sampled_after is not None for row in made.rows)
    header = ["arm", "greedy before", "greedy after"] + (["sampled before", "sampled after"] if sampled else [])
    header += ["tokens changed", "steps", "minutes a run"]
    body = []
    for row in made.rows:
        cells = [row.name, _figure(row.greedy_before), _figure(row.greedy_after)]
        cells += [_figure(row.sampled_before), _figure(row.sampled_after)] if sampled else []
        cells += ["-" if row.changed is None else f"{100 * row.changed.mean:.1f} %", str(row.steps)]
        body.append([*cells, "-" if row.minutes is None else f"{row.minutes:.1f}"])
    return aligned(header, body)


def _differences(made: Compared) -> str:
    header = [f"against {made.comparison.baseline}", "difference", "over seeds", "over tasks", "each seed"]
    body = [
        [
            f"{found.name}, {found.what}",
            f"{found.mean:+.3f}",
            _signed(found.over_seeds),
            _signed(found.over_tasks),
            ", ".join(f"{value:+.3f}" for value in found.seeds.values()),
        ]
        for found in made.differences
    ]
    return aligned(header, body)


def _counters(made: Compared) -> str:
    header = ["counter, mean over steps", *(row.name for row in made.rows)]
    body = [
        [f"{words} (`{name}`)", *(_figure(row.counters[name]) for row in made.rows)]
        for name, words in made.comparison.counters.items()
    ]
    return aligned(header, body)


def _over_steps(made: Compared) -> str:
    header = ["first, middle and last third of the steps", *(row.name for row in made.rows)]
    body = []
    for name, words in made.comparison.over_steps.items():
        courses = [row.over_steps[name] for row in made.rows]
        cells = ["-" if course is None else ", ".join(f"{value:.3f}" for value in course) for course in courses]
        body.append([f"{words} (`{name}`)", *cells])
    return aligned(header, body)


def _how(made: Compared) -> str:
    """How the numbers are to be read."""
    said = ["Intervals are 95 %; before training over tasks (Wilson or bootstrap)"]
    count = len(made.comparison.seeds)
    if count > 1:
        one = "; they tell how training varies from one policy, not how warm starts vary" if made.warm_starts else ""
        said.append(f", after training and of counters Student's t over {count} seeds{one}.")
    else:
        said.append(", after training too: there is one seed.")
    if made.differences:
        said.append(" Differences are paired: same seeds (t), same tasks (bootstrap of the seeds' mean).")
    if made.comparison.changed is not None:
        said.append(f" Tokens changed: `{made.comparison.changed}`, mean over steps.")
    elif made.differences:
        said.append(
            " Tokens changed: trained tokens of kept steps to which the credit of "
            f"`{made.comparison.baseline}` gives another advantage, by more than {100 * CHANGED_STD:g} % of the "
            "standard deviation."
        )
    return "".join([*said, " Minutes are of whole runs, set-up and evaluations included."])
