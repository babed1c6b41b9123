"""Invariants of the wire form of recorded experts (``megatron_ext/moe/wire.py``)."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.moe.wire import Recording, RoutedModel, WireError, decode, encode, from_int32, routed_model, smallest
from megatron_ext.trajectory.builder import TrajectoryBuilder
from megatron_ext.trajectory.record import Role, Status

# A leading dense layer and one in the middle.
MODEL = routed_model([False, True, False, True, True], 2, 8)


def drawn(tokens: int, seed: int = 0, model: RoutedModel = MODEL) -> np.ndarray:
    """int32 [tokens - 1, layers, k] as SGLang captures them: garbage in dense layers."""
    rng = np.random.default_rng(seed)
    values = rng.random((tokens - 1, len(model.moe_pattern), model.experts)).argsort(axis=-1)[..., : model.top_k]
    values[:, ~np.array(model.moe_pattern)] = rng.integers(-5, 99, (tokens - 1, 2, model.top_k))
    return values.astype("<i4")


def text_of(values: np.ndarray) -> str:
    return base64.b64encode(values.tobytes()).decode()


def test_prompt_and_completion_less_one() -> None:
    """Invariants 1 and 2: a row a token but for the last, MoE layers in order, one byte an id."""
    values = drawn(7)
    found = decode(text_of(values), MODEL, tokens=7)
    assert found.tokens == 7 and found.rows.dtype == np.uint8 and found.rows.shape == (6, 3, 2)
    assert np.array_equal(found.rows, values[:, [1, 3, 4]]) and found.valid.all()
    routed, valid = found.padded()
    assert routed.shape == (7, 3, 2) and routed.dtype == np.uint8 and valid.tolist() == [True] * 6 + [False]
    assert np.array_equal(routed[:6], found.rows) and not routed[6].any()


def test_an_engine_that_sends_moe_layers_alone() -> None:
    values = drawn(5)[:, [1, 3, 4]]
    assert np.array_equal(decode(text_of(values), MODEL, tokens=5, moe_alone=True).rows, values)
    with pytest.raises(WireError, match="of 5 layers; pass moe_alone=True if"):
        decode(text_of(values), MODEL, tokens=5)


def test_a_short_recording_is_not_taken_for_one_of_fewer_layers() -> None:
    """Invariant 3: 3 tokens of 5 layers are as many ids as 5 tokens of 3."""
    rng = np.random.default_rng(0)
    values = rng.random((3, 5, 8)).argsort(axis=-1)[..., :2].astype("<i4")  # no id of a dense layer gives it away
    with pytest.raises(WireError, match=r"15 times 2 ids; expected 5 tokens \(prompt \+ completion - 1\) of 5 layers"):
        decode(text_of(values), MODEL, tokens=6)


@pytest.mark.parametrize("tokens", [5, 7])
def test_a_short_or_long_recording_is_an_error(tokens: int) -> None:
    with pytest.raises(
        WireError, match=rf"g1/3: .* expected {tokens - 1} tokens \(prompt \+ completion - 1\) of 5 lay"
    ):
        decode(text_of(drawn(6)), MODEL, tokens=tokens, name="g1/3")


def test_every_token_recorded_is_one_too_many() -> None:
    """An engine that sends prompt + completion rows would shift nothing here and everything after a partial rollout."""
    with pytest.raises(WireError, match="30 times 2 ids; expected 5 tokens"):
        decode(text_of(drawn(7)), MODEL, tokens=6)


def test_what_is_no_recording_is_refused() -> None:
    with pytest.raises(WireError, match="req: no routed experts were sent; start SGLang with"):
        decode(None, MODEL, tokens=3, name="req")
    with pytest.raises(WireError, match="req: routed experts are not base64"):
        decode("not base64!", MODEL, tokens=3, name="req")
    with pytest.raises(WireError, match="and 3 bytes"):
        decode(base64.b64encode(drawn(3).tobytes()[:-5]), MODEL, tokens=3)
    values = drawn(6)
    values[2, 3, 1] = 8
    with pytest.raises(WireError, match="token 2, MoE layer 1: expert 8 of 8"):
        decode(text_of(values), MODEL, tokens=6)
    values = drawn(6)
    values[4, 4] = 5
    with pytest.raises(WireError, match=r"token 4, MoE layer 2: \[5, 5\] names one twice"):
        decode(text_of(values), MODEL, tokens=6)
    values = drawn(6)
    values[1, 3, 0] = -1
    with pytest.raises(WireError, match="token 1, MoE layer 1: expert -1 of 8"):
        decode(text_of(values), MODEL, tokens=6)
    with pytest.raises(WireError, match=r"routed experts \(2, 5, 2\), expected \[m, 3, 2\]"):
        from_int32(np.zeros((2, 5, 2), np.int32), MODEL)
    with pytest.raises(WireError, match="0 MoE layers"):
        routed_model([False], 1, 4)
    with pytest.raises(WireError, match="of 0 tokens"):
        decode("", MODEL, tokens=0)


def test_tokens_that_the_engine_did_not_keep_are_not_valid() -> None:
    values = drawn(6)
    values[2] = -1
    found = decode(text_of(values), MODEL, tokens=6)
    assert found.valid.tolist() == [True, True, False, True, True] and not found.rows[2].any()


def test_a_request_of_one_token_has_no_rows() -> None:
    found = decode("", MODEL, tokens=1)
    assert found.rows.shape == (0, 3, 2) and found.padded()[1].tolist() == [False]


@given(
    pattern=st.lists(st.booleans(), min_size=1, max_size=6).filter(any),
    experts=st.sampled_from([4, 256, 257, 70_000]),
    tokens=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_there_and_back(pattern: list[bool], experts: int, tokens: int, seed: int) -> None:
    """Invariant 4, in the smallest integers."""
    model, rng = routed_model(pattern, 3, experts), np.random.default_rng(seed)
    rows = np.stack(
        [rng.choice(experts, 3, replace=False) for _ in range((tokens - 1) * model.layers)]
        or [np.zeros(3, dtype=np.int64)]
    )[: (tokens - 1) * model.layers].reshape(tokens - 1, model.layers, 3)
    valid = rng.random(tokens - 1) < 0.8
    sent = Recording(np.where(valid[:, None, None], rows, 0).astype(model.dtype), valid)
    found = decode(encode(sent, model), model, tokens=tokens)
    assert np.array_equal(found.rows, sent.rows) and np.array_equal(found.valid, valid)
    assert found.rows.dtype == model.dtype == smallest(experts)
    assert model.dtype.itemsize == {4: 1, 256: 1, 257: 2, 70_000: 4}[experts]


def test_a_recording_goes_into_the_record() -> None:
    """The builder takes it as it takes the embedded engine's, turn after turn; each token keeps its first recording."""
    builder = TrajectoryBuilder("g/0", 0, "text")
    session = builder.open_session()
    builder.add_message(session, Role.USER, [1, 2, 3])
    first, second = drawn(5, seed=1), drawn(9, seed=2)
    one = decode(text_of(first), MODEL, tokens=5)
    builder.add_model_turn(session, [4, 5], [-1.0, -1.0], [0, 0], routed=one.rows, routed_from=0)
    builder.add_message(session, Role.USER, [6, 7])
    two = decode(text_of(second), MODEL, tokens=9)
    builder.add_model_turn(session, [8, 9], [-1.0, -1.0], [0, 0], routed=two.rows, routed_from=0)
    batch = builder.finish(1.0, {}, True, Status.DONE).batch
    assert batch.routed is not None and batch.routed_valid is not None and batch.routed.dtype == np.uint8
    assert batch.routed_valid.tolist() == [True] * 8 + [False]
    assert np.array_equal(batch.routed[:4], one.rows) and np.array_equal(batch.routed[4:8], two.rows[4:])


def test_it_loads_without_torch(root: Path) -> None:
    code = "import sys, megatron_ext.moe.wire; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=300)
