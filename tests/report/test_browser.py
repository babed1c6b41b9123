"""The report as a person meets it: opened in a browser, read, clicked, on a wide and on a narrow screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.report.render import write_report
from megatron_ext.training.measures.routing_metrics import RoutingLog
from megatron_ext.training.step_replay.kept_step import write_step
from tests.helpers.browser import CHROMIUM, Page, browser
from tests.helpers.records import build, model, single, user
from tests.helpers.run_folders import config, evaluation, kept_step, make_run, rows
from tests.helpers.scripted import small_codec
from tests.helpers.structured import loads

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on PATH: apt-get install chromium")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def make(folder: Path, seed: int, rate: float, said: str = "go") -> Path:
    made = config(folder.parent, folder.name, seed)
    made.control.permute_rewards = rate < 0.5
    run = make_run(
        folder,
        made=made,
        metrics=rows(40, seed=seed, rate=rate),
        before=evaluation("before", np.arange(50) < 10),
        after=evaluation("after", np.arange(50) < 50 * rate),
    )
    codec = small_codec(run / "tokenizer")
    turns = [user(codec._text("walk 0 at 0")), model(codec.encode_turn(said)), user(codec._text("at 1"))]
    write_step(run, kept_step(10, build([(single(turns, reward=1.0, success=True), single(turns))])))
    return run


def test_one_run_is_read_and_clicked(page: Page, tmp_path: Path) -> None:
    said = "<script>document.title='broken'</script><b>go</b>"
    path = write_report([make(tmp_path / "run", 1, 0.9, said)])
    page.open(path)
    assert page.run("document.title").startswith("run")
    shown = 'getComputedStyle(document.querySelector(\'.chart[data-chart="3"] .line[data-key="1"]\')).display'
    assert (
        page.run("document.querySelector('.chart[data-chart=\"3\"] figcaption b').textContent") == "Parts of the reward"
    )
    assert page.run(shown) != "none"
    button = ".chart[data-chart='3'] [data-toggle='1']"
    page.click(button)
    assert page.run(shown) == "none" and page.run(f'document.querySelector("{button}").ariaPressed') == "false"

    # The pointer over that chart reads the line that is left.
    page.point(".chart[data-chart='3'] svg", across=0.99)
    tip = page.run("document.getElementById('tip').innerText").split()
    assert tip[:2] == ["step", "40"] and tip[2] == "form" and len(tip) == 4
    page.click(button)
    assert page.run(shown) != "none"

    # A trajectory unfolds; its generated text is text, and a token says what trained it.
    first = ".trajectory"
    assert page.run(f"document.querySelector('{first}').open") is False
    page.click(f"{first} > summary")
    assert page.run(f"document.querySelector('{first}').open") is True
    assert said in page.run(f"document.querySelector('{first}').innerText")
    page.point(f"{first} .turn.model .t.y")
    assert "advantage" in page.run("document.getElementById('tip').innerText")
    page.click("#unfold")
    assert page.run("[...document.querySelectorAll('#samples details')].every((d) => d.open)")

    # Light and dark.
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.click("#theme")
    assert page.run(ground) != light
    page.open(path, dark=True)
    assert page.run(ground) != light
    assert page.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_hangs_over_the_edge(page: Page, tmp_path: Path, width: int) -> None:
    runs = [make(tmp_path / f"r{seed}{rate}", seed, rate, "talk 7 " * 12) for seed in (1, 2) for rate in (0.9, 0.3)]
    RoutingLog(runs[0]).write(1, loads([[5, 1, 0, 2]]))
    for path in (write_report(runs[:1]), write_report(runs, tmp_path / "all.html")):
        page.open(path, width=width)
        page.run("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
        wide = page.run(
            "[...document.querySelectorAll('body *')].filter((e) => e.getBoundingClientRect().right > innerWidth + 1"
            " && !e.closest('.scroll') && !e.closest('svg')).map((e) => e.outerHTML.slice(0, 120))"
        )
        assert wide == [] and page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.problems == []


def test_groups_are_switched_in_all_charts(page: Page, tmp_path: Path) -> None:
    runs = [make(tmp_path / f"r{seed}{rate}", seed, rate) for seed in (1, 2) for rate in (0.9, 0.3)]
    page.open(write_report(runs, tmp_path / "all.html"))
    hidden = "document.querySelectorAll('.line.off').length"
    page.click(".legend.all [data-toggle='g1']")
    assert page.run(hidden) == page.run("document.querySelectorAll('.line[data-key=g1]').length") > 10
    page.click(".legend.all [data-toggle='g1']")
    assert page.run(hidden) == 0 and page.problems == []


@pytest.mark.slow
def test_it_prints(page: Page, tmp_path: Path) -> None:
    page.open(write_report([make(tmp_path / "run", 1, 0.9)]))
    page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_the_map_of_experts_is_read_by_pointing(page: Page, tmp_path: Path) -> None:
    run = make(tmp_path / "run", 1, 0.9)
    log = RoutingLog(run)
    for step in range(1, 41):
        log.write(step, loads([[100 + 10 * step, 100, 100, 100], [100, 100, 100, 800]]))
    page.open(write_report([run]))
    assert page.run("document.querySelectorAll('.map').length") == 2
    page.point(".map:nth-child(2) img.experts", across=0.99)
    tip = page.run("document.getElementById('tip').innerText")
    assert "step\n40" in tip and "expert 2" in tip and "0.36 × the mean" in tip
    assert page.problems == [] and page.run("document.documentElement.scrollWidth <= innerWidth")
    page.open(write_report([run]), width=380)
    assert page.run("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off on a phone"
    assert page.run("getComputedStyle(document.querySelector('.map img')).imageRendering") == "pixelated"
