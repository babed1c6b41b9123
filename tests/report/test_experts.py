"""The invariants of ``megatron_ext/report/experts.py``: what a picture shows can be read back from its bytes."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.report.experts import COLUMNS, common_reach, expert_map
from megatron_ext.report.render import write_report
from megatron_ext.training.measures.routing_metrics import RoutingHistory, RoutingLog
from tests.helpers.run_folders import config, make_run, rows
from tests.helpers.structured import loads


def decoded(url: str, reach: float) -> np.ndarray:
    """Factors [H, W] of a picture: its palette's opacity and colour, by pixel."""
    data = base64.b64decode(url.removeprefix("data:image/png;base64,"))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, at = {}, 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        chunks[kind] = body
        at += 12 + size
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8).reshape(height, width + 1)
    colour = np.frombuffer(chunks[b"PLTE"], dtype=np.uint8).reshape(-1, 3).astype(int)
    opacity = np.frombuffer(chunks[b"tRNS"], dtype=np.uint8)
    sign = np.where(colour[:, 0] > colour[:, 2], 1, -1)
    factors: np.ndarray = reach ** (sign * opacity / 255)
    return factors[lines[:, 1:]]


@pytest.mark.parametrize("reach", [2.0, 8.0])
def test_a_pixel_is_the_load_over_the_mean(reach: float) -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(50, 200, (7, 2, 5))
    counts[:, 0, 0], counts[3, 1] = 0, 0
    found = expert_map(RoutingHistory(np.arange(1, 8), (2, 4), counts), reach)
    assert [layer.layer for layer in found.layers] == [2, 4] and found.steps == tuple(range(1, 8))
    for at, layer in enumerate(found.layers):
        mean = counts[:, at].mean(axis=1, keepdims=True)
        want = np.where(mean > 0, counts[:, at] / np.maximum(mean, 1), 1.0).T
        factors = decoded(layer.picture, reach)
        assert factors.shape == (5, 7)
        assert factors == pytest.approx(np.clip(want, 1 / reach, reach), rel=0.02)
    assert "cold 20 %" in found.layers[0].text and "expert 0" in found.layers[0].aside


def test_many_steps_share_columns_and_none_is_left_out() -> None:
    counts = np.full((1000, 1, 2), 10)
    counts[613, 0] = (100000, 10)  # one step of a thousand
    found = expert_map(RoutingHistory(np.arange(1, 1001), (0,), counts), 2.0)
    factors = decoded(found.layers[0].picture, 2.0)
    assert factors.shape == (2, COLUMNS) and found.steps[-1] == 1000
    (column,) = np.flatnonzero(factors[0] > 1.5)
    before = 0 if column == 0 else found.steps[column - 1]
    assert before < 614 <= found.steps[column]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 2), (3, 1, 300)])
def test_any_history_gives_a_map(shape: tuple[int, int, int]) -> None:
    for counts in (np.zeros(shape, dtype=np.int64), np.ones(shape, dtype=np.int64)):
        found = expert_map(RoutingHistory(np.arange(1, shape[0] + 1), tuple(range(shape[1])), counts), 2.0)
        assert all(np.array_equal(decoded(layer.picture, 2.0), np.ones((shape[2], shape[0]))) for layer in found.layers)


def history(*counts: list[int]) -> RoutingHistory:
    """One layer, a step a list."""
    return RoutingHistory(np.arange(1, len(counts) + 1), (0,), np.array(counts)[:, None])


def test_the_scale_comes_from_the_loads_of_all_maps() -> None:
    """Invariant 3: noise stays pale, what is far apart is told, and a few cells do not whiten all others."""
    noise, apart = history([95, 105, 100, 100]), history([40, 260, 60, 40])
    assert common_reach([]) == common_reach([noise]) == 2.0
    assert common_reach([apart]) == 3.0 and common_reach([noise, apart]) == 3.0
    assert common_reach([history([0, 400, 0, 0])]) == 8.0
    one_cold = history(*[[100] * 128] * 3 + [[100] * 127 + [0]])
    assert common_reach([one_cold]) == 2.0
    (layer,) = expert_map(noise, 2.0).layers
    assert np.abs(np.log2(decoded(layer.picture, 2.0))).max() < 0.1, "a tenth of the colour"


def test_a_report_has_the_map_of_a_run_that_kept_its_loads(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", made=config(tmp_path, "run"), metrics=rows(3))
    assert 'id="experts"' not in write_report([run]).read_text()
    log = RoutingLog(run)
    for step in (1, 2, 3):
        log.write(step, loads([[5, 1, 0, 2], [2, 2, 2, 2]], layers=(1, 3)))
    page = write_report([run]).read_text()
    assert page.count('<figure class="map"') == 2 and "<b>Layer 3</b>" in page and "A row an expert (4 a layer)" in page
    other = make_run(tmp_path / "other", made=config(tmp_path, "other", 2), metrics=rows(3))
    both = write_report([run, other], tmp_path / "both.html").read_text()
    assert both.count('<figure class="map"') == 2 and "<summary>run</summary>" in both
