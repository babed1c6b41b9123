"""Reports as the tests read them: the tags, scripts and words of a page, and runs to write one of."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from megatron_ext.report.render import write_report
from tests.helpers.run_folders import config, evaluation, kept_step, make_run, rows
from tests.helpers.scripted import small_codec

RESULT = {"success_before": 0.2, "success_after": 0.9, "steps": 40, "seconds": 3.0, "interrupted": False}
VOID = {"meta"}


class Tree(HTMLParser):
    """Checks that tags close in order; collects scripts, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


def report(*runs: Path) -> Tree:
    return Tree(write_report(list(runs), runs[0].parent / "out.html").read_text())


def finished(folder: Path, *, seed: int = 1, rate: float = 1.0, permuted: bool = False, samples: bool = True) -> Path:
    made = config(folder.parent, folder.name, seed)
    made.control.permute_rewards = permuted
    solved = np.arange(50) < 45 * rate
    run = make_run(
        folder,
        made=made,
        metrics=rows(40, seed=seed, rate=rate),
        before=evaluation("before", np.arange(50) < 10),
        after=evaluation("after", solved),
        result=RESULT,
        kept=[kept_step(step, seed=step) for step in (1, 10)] if samples else [],
    )
    small_codec(run / "tokenizer")
    return run
