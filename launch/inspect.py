"""``python -m launch.inspect RUN --step N [--trajectory ID] [--json]``: what a kept step generated, masked, rewarded
and credited.

Without ``--trajectory``: a line a trajectory, then what each said, turn by turn, with its trained tokens underlined and
coloured by their advantage (blue above 0, red below). With it: a table of that trajectory with a row a token.
Steps are kept by ``samples.every`` and ``samples.groups``; the last ones are also read from the run's store, without
scores. ``--json``: an object a line on stdout, ``kind`` being step, trajectory, turn or token.

Exit status: 0 printed, 2 there is nothing to print (one line on stderr, with the steps or trajectories that there are).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.style import Style
from rich.table import Table
from rich.text import Text

from launch.errors import expected, show
from launch.output import json_lines as clean_stdout
from launch.output import printing

if TYPE_CHECKING:
    from megatron_ext.report.tokens import TokenValues, TrajectoryValues, TurnValues
    from megatron_ext.training.step_replay.kept_step import KeptStep

WIDTH = 130  # columns where the output is no terminal
ROLES = {"model": "bold", "user": "cyan", "tool": "magenta", "system": "yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    return printing(lambda: inspect(argv))


def inspect(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m launch.inspect", description="Prints a kept step of a run, token by token."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run, such as runs/quickstart")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="step, as in metrics.jsonl")
    parser.add_argument("--trajectory", metavar="ID", help="one trajectory, with a row a token (default: all, as text)")
    parser.add_argument("--json", action="store_true", help="an object a line on stdout, everything else on stderr")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        write = stack.enter_context(clean_stdout()) if options.json else None
        from megatron_ext.report.run_data import ReportError
        from megatron_ext.report.text import run_tokenizer
        from megatron_ext.report.tokens import json_lines
        from megatron_ext.training.step_replay.kept_step import read_step

        try:
            if not options.run.is_dir():
                raise ReportError(f"{options.run}: no such run folder; a run is kept in <run.root>/<run.name>")
            kept = read_step(options.run, options.step)
            chosen = _choose(kept, options.trajectory)
            tokenizer = run_tokenizer(options.run)
        except expected() as error:
            return show(error)
        if write is not None:
            for line in json_lines(kept, chosen, tokenizer):
                write(line)
            return 0
        console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False, markup=False)
        _print(console, kept, chosen, options.run, one=options.trajectory is not None)
    return 0


def _choose(kept: KeptStep, trajectory: str | None) -> list[int]:
    from megatron_ext.training.step_replay.kept_step import KeptStepError

    known = kept.batch.trajectory_id
    if trajectory is None:
        return list(range(len(known)))
    if trajectory not in known:
        near = difflib.get_close_matches(trajectory, known, 4, 0.3) or list(known[:4])
        raise KeptStepError(
            f"step {kept.step} keeps no trajectory {trajectory!r}; nearest of its {len(known)}: {', '.join(near)}"
        )
    return [known.index(trajectory)]


# -- the terminal ---------------------------------------------------------------------------------------------------
def _print(console: Console, kept: KeptStep, chosen: Sequence[int], run: Path, *, one: bool) -> None:
    from megatron_ext.report.samples import trained_mask, version_text
    from megatron_ext.report.text import run_tokenizer
    from megatron_ext.report.tokens import trajectory_values, turn_values

    opened = "" if kept.opened is None else f", trained from version {version_text(kept.opened)}"
    scores = "" if kept.scores is not None else "; read from the store: no advantages or training log-probs"
    groups = f"{kept.batch.num_groups} of {len(kept.trained)} trained groups kept"
    said = f" step {kept.step}: {groups}{opened}; filtered groups: {len(kept.filtered)}{scores}"
    console.print(Text.assemble((run.name, "bold"), said))
    mask = trained_mask(kept.batch)
    about = {index: trajectory_values(kept, index, mask) for index in chosen}
    if not one:
        console.print(_overview(list(about.values())))
    tokenizer = run_tokenizer(run)
    top = 0.0 if kept.scores is None else float(abs(kept.scores.advantage[mask]).max(initial=0.0))
    for index in chosen:
        console.print()
        console.print(_heading(about[index]))
        turns = list(turn_values(kept, index, mask, tokenizer))
        if one:
            console.print(_token_table(turns, top))
        else:
            console.print(_dialogue(turns, top))
    if not one:
        last = f"numbers of one: --trajectory {about[chosen[0]].trajectory}" if chosen else "no trajectory"
        console.print(f"\n{last}")


def _overview(rows: Sequence[TrajectoryValues]) -> Table:
    table = Table()
    for name in ("trajectory", "task", "status"):
        table.add_column(name, overflow="fold")
    for name in ("reward", "advantage", "turns", "tokens", "trained"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            Text(row.trajectory, "green" if row.success else ""),
            Text(row.task),
            row.status.lower(),
            f"{row.reward:g}",
            _signed(row.advantage_mean),
            str(row.model_turns),
            str(row.tokens),
            str(row.trained_tokens),
        )
    return table


def _heading(row: TrajectoryValues) -> Text:
    parts = ", ".join(
        f"{name} missing" if value is None else f"{name} {value:g}" for name, value in row.reward_parts.items()
    )
    return Text.assemble(
        (row.trajectory, "bold"),
        f"  task {row.task}, {row.status.lower()}, ",
        ("solved" if row.success else "not solved", "green" if row.success else "red"),
        f", reward {row.reward:g}" + (f" ({parts})" if parts else ""),
        f", {row.trained_tokens} of {row.tokens} tokens trained",
    )


def colour(advantage: float | None, top: float) -> str:
    """Background of a token: blue above 0, red below, stronger the nearer to ``top``; the name of no colour at 0."""
    if not advantage or top <= 0:
        return ""
    strength = min(1.0, abs(advantage) / top)
    low, high = round(40 * (1 - strength)), round(70 + 130 * strength)
    return f"#{low:02x}{low + 30:02x}{high:02x}" if advantage > 0 else f"#{high:02x}{low + 20:02x}{low:02x}"


def printable(text: str) -> str:
    """Text that cannot steer a terminal: what is not printable is spelt out, line breaks excepted."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text) or "▫"


def _style(token: TokenValues, top: float) -> Style:
    if token.trained:
        shade = colour(token.advantage, top)
        return Style(underline=True, bgcolor=shade, color="white") if shade else Style(underline=True)
    return Style(dim=True, strike=token.version is not None)


def _label(turn: TurnValues) -> Text:
    said = turn.role if turn.number is None else f"{turn.role} {turn.number}"
    label = Text(said, ROLES.get(turn.role, "dim"))
    for more in (f"{turn.reward:+g}" if turn.reward else "", turn.session):
        if more:
            label.append(f"\n{more}", "dim")
    for name, value in turn.labels.items():
        if value >= 0:
            label.append(f"\n{name} {value}", "dim")
    return label


def _dialogue(turns: Sequence[TurnValues], top: float) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for turn in turns:
        said = Text()
        for token in turn.tokens:
            said.append(printable(token.text), _style(token, top))
        table.add_row(_label(turn), said)
    return table


def _token_table(turns: Sequence[TurnValues], top: float) -> Table:
    tokens = [token for turn in turns for token in turn.tokens]
    columns = {
        "log-prob": [token.rollout_logp for token in tokens],
        "training": [token.logp for token in tokens],
        "reference": [token.reference_logp for token in tokens],
        "entropy": [token.entropy for token in tokens],
        "advantage": [token.advantage for token in tokens],
        "weight": [token.weight for token in tokens],
    }
    shown = {name: values for name, values in columns.items() if any(v is not None for v in values)}
    table = Table()
    table.add_column("turn", no_wrap=True)
    for name in ("at", "id"):
        table.add_column(name, justify="right")
    table.add_column("token", overflow="fold")
    table.add_column("trained")
    table.add_column("version", justify="right")
    for name in shown:
        table.add_column(name, justify="right")
    at = 0
    for turn in turns:
        if not turn.tokens:
            table.add_row(_label(turn), "", "", Text("(no token)", "dim"))
        for number, token in enumerate(turn.tokens):
            trained = "yes" if token.trained else "masked" if token.version is not None else ""
            table.add_row(
                _label(turn) if number == 0 else "",
                str(token.position),
                str(token.id),
                Text(repr(token.text)[1:-1] or "▫", _style(token, top)),
                trained,
                token.version or "",
                *(_value(name, values[at]) for name, values in shown.items()),
            )
            at += 1
        table.add_section()
    return table


def _value(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return _signed(value) if name == "advantage" else f"{value:.2e}" if name == "weight" else f"{value:.4f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3f}"


if __name__ == "__main__":
    sys.exit(main())
