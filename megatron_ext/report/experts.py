"""The map of experts: for each layer the load of every expert over the steps, as a small picture. Pure.

Colour says how far an expert's tokens are from the layer's mean, by a factor: one colour above, another below, none at
the mean; a factor of ``reach`` or more is fully coloured. What is drawn is in the picture alone, so that a page of 48
layers and 128 experts stays small; the page's script reads a factor back from a pixel.

Invariants (``tests/report/test_experts.py`` asserts each):

1. A picture has one pixel an expert and stretch of steps; its factor can be read back within two per cent.
2. At most ``COLUMNS`` stretches, each the sum of its steps, so that no step is left out.
3. All maps of a page have one scale, from the loads themselves: nearly all of them lie inside, and it never reaches
   less far than a factor of 2, so that noise stays pale.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.moe.load import layer_loads
from megatron_ext.report.numbers import number
from megatron_ext.training.measures.routing_metrics import RoutingHistory

COLUMNS = 120
LEVELS = 127  # shades of a picture, the middle one at the mean
REACHES = (2.0, 3.0, 4.0, 6.0, 8.0)  # factors of the mean that may be coloured fully
INSIDE = 0.99  # share of the cells whose factor the scale must hold
MORE, LESS = (224, 96, 26), (47, 127, 224)  # above and below the mean
ROW_PX, LOW_PX, HIGH_PX = 15, 44, 150  # height of an expert's row where there is room, and of a picture


@dataclass(frozen=True)
class LayerMap:
    """One layer: its picture as a data URL, ``height`` in pixels of the page, and what is said below it."""

    layer: int
    picture: str
    height: int
    text: str
    aside: str


@dataclass(frozen=True)
class ExpertMap:
    """All layers of a run. ``steps``: the last step of each column."""

    layers: tuple[LayerMap, ...]
    experts: int
    first: int
    last: int
    steps: tuple[int, ...]
    reach: float
    legend: str


def common_reach(histories: Sequence[RoutingHistory]) -> float:
    """The scale of maps that are compared: the smallest of ``REACHES`` that holds nearly all of their factors."""
    far = [np.zeros(0)]
    for history in histories:
        factor = _factors(_columns(history)[1])
        far.append(np.abs(np.log(np.maximum(factor, 1e-9))).ravel())
    cells = np.concatenate(far)
    most = math.exp(min(float(np.quantile(cells, INSIDE)), 20.0)) if len(cells) else 1.0
    return next((reach for reach in REACHES if reach >= most), REACHES[-1])


def _columns(history: RoutingHistory) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Bounds of the stretches of steps [C + 1], and their loads [C, L, E]."""
    bounds = np.linspace(0, len(history.steps), min(COLUMNS, len(history.steps)) + 1).astype(np.int64)
    return bounds, np.add.reduceat(history.counts, bounds[:-1], axis=0)


def _factors(loads: NDArray[np.int64]) -> NDArray[np.float64]:
    """Loads [..., E] over their mean; 1 where there is none."""
    mean = np.broadcast_to(loads.mean(axis=-1, keepdims=True), loads.shape)
    return np.divide(loads, mean, out=np.ones(loads.shape), where=mean > 0)


def expert_map(history: RoutingHistory, reach: float) -> ExpertMap:
    """The map of the loads that a run kept; a factor of ``reach`` is coloured fully."""
    bounds, loads = _columns(history)
    factors = _factors(loads)
    layers = tuple(
        _layer(layer, history.counts[:, at], factors[:, at].T, reach) for at, layer in enumerate(history.layers)
    )
    scale = np.geomspace(1 / reach, reach, 121)[None]
    return ExpertMap(
        layers=layers,
        experts=loads.shape[2],
        first=int(history.steps[0]),
        last=int(history.steps[-1]),
        steps=tuple(history.steps[bounds[1:] - 1].tolist()),
        reach=reach,
        legend=_picture(scale, reach),
    )


def _layer(layer: int, counts: NDArray[np.int64], factor: NDArray[np.float64], reach: float) -> LayerMap:
    """``counts`` [S, E] of each step; ``factor`` [E, C] of each column."""
    begin, end = (layer_loads(part.sum(axis=0)[None]) for part in _ends(counts))
    last = counts[-1] / max(counts[-1].mean(), 1e-12)
    most, least = int(last.argmax()), int(last.argmin())
    text = f"CV {_change(begin, end, 'load_cv')}, peak {_change(begin, end, 'load_peak')}"
    cold = 100 * float(end["cold_fraction"][0]) if end else 0.0
    if cold:
        text += f", cold {cold:.0f} %"
    shares = [number(float(last[expert]), 2) for expert in (most, least)]
    aside = f"last step: {shares[0]} × (expert {most}) to {shares[1]} × (expert {least})"
    height = int(min(max(ROW_PX * len(factor), LOW_PX), HIGH_PX))
    return LayerMap(layer, _picture(factor, reach), height, text, aside)


def _ends(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last tenth of the steps."""
    size = max(1, len(counts) // 10)
    return counts[:size], counts[-size:]


def _change(begin: dict[str, NDArray[np.float64]], end: dict[str, NDArray[np.float64]], name: str) -> str:
    if not begin or not end:
        return "–"
    return f"{number(float(begin[name][0]), 2)} → {number(float(end[name][0]), 2)}"


# -- pictures ----------------------------------------------------------------------------------------------------------
def _picture(factor: NDArray[np.float64], reach: float) -> str:
    """A PNG of factors [H, W] as a data URL: the distance from 1 as opacity, so that it reads on any background."""
    far = np.clip(np.log(np.maximum(factor, 1e-9)) / math.log(reach), -1, 1)
    height, width = factor.shape
    shade = np.rint((far + 1) / 2 * (LEVELS - 1)).astype(np.uint8)
    lines = np.concatenate([np.zeros((height, 1), dtype=np.uint8), shade], axis=1)
    level = np.linspace(-1, 1, LEVELS)
    colours = np.where((level > 0)[:, None], MORE, LESS).astype(np.uint8)
    opacity = np.rint(255 * np.abs(level)).astype(np.uint8)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    body = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0))  # eight bits, of a palette
    body += chunk(b"PLTE", colours.tobytes()) + chunk(b"tRNS", opacity.tobytes())
    body += chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()
