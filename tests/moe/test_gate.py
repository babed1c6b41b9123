from __future__ import annotations

import pytest

from megatron_ext.moe.gate import EntropyGate


@pytest.mark.parametrize(
    ("entropy", "is_open"), [(0.0, True), (0.1, True), (0.2, True), (0.2001, False), (float("nan"), False)]
)
def test_the_band_is_closed(entropy: float, is_open: bool) -> None:
    assert EntropyGate(0.0, 0.2).is_open(entropy) is is_open


def test_a_low_end_above_zero_closes_below_it() -> None:
    assert not EntropyGate(0.1, 0.2).is_open(0.05)


def test_a_band_upside_down_is_refused() -> None:
    with pytest.raises(ValueError, match="low <= high"):
        EntropyGate(0.3, 0.2)
    with pytest.raises(ValueError, match="entropy_low=-0.1 .* 0 <= low"):
        EntropyGate(-0.1, 0.2)
    with pytest.raises(ValueError, match="entropy_high=nan"):
        EntropyGate(0.0, float("nan"))
