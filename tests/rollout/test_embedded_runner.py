"""Invariants of ``megatron_ext/rollout/embedded/runner.py``. What whole requests get is in
``test_embedded_scheduler.py``, what ``invariant`` promises in ``test_embedded_invariant.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_ext.rollout.embedded import runner as module
from megatron_ext.rollout.embedded.arithmetic import FAST, INVARIANT
from megatron_ext.rollout.embedded.model import Decoder
from megatron_ext.rollout.embedded.runner import Runner
from megatron_ext.rollout.embedded.slots import FILLING, Slots
from megatron_ext.rollout.embedded.weights import WeightStage
from tests.helpers.engines import DENSE, Twin

CPU = torch.device("cpu")
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7], [1, 8, 2, 8, 1])


@pytest.fixture(scope="module")
def twin() -> Twin:
    return Twin(DENSE, 1)


def made(twin: Twin, limit: int = 9, *, invariant: bool = False) -> tuple[Runner, Slots]:
    """A runner whose slots hold the prompts, greedy, none of them run yet; each row ends at ``limit`` tokens."""
    stage = WeightStage(DENSE, CPU)
    for name, tensor in twin.tensors():
        stage.add(name, tensor)
    slots = Slots(DENSE, 4, 32, CPU)
    for seat, ids in enumerate(PROMPTS):
        slots.tokens[seat, : len(ids)] = ids
        slots.length[seat], slots.limit[seat], slots.temperature[seat] = len(ids), limit, 0.0
    slots.arrange(np.where(np.arange(4) < len(PROMPTS), FILLING, slots.zones()))
    arithmetic = INVARIANT if invariant else FAST
    return Runner(Decoder(DENSE, stage.finish(), 32, CPU, 1, arithmetic), slots, 32, CPU, invariant=invariant), slots


def texts(slots: Slots) -> list[list[int]]:
    return [slots.tokens[seat, : slots.length[seat]].tolist() for seat in range(len(PROMPTS))]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_is_in_the_cache_and_its_tokens_behind_it(twin: Twin, invariant: bool) -> None:  # invariants 1 and 2
    runner, slots = made(twin, invariant=invariant)
    assert runner.prefill(7).tolist() == [] and (slots.ready, slots.busy) == (3, 3)
    assert slots.cached[:3].tolist() == [6, 2, 5] and slots.length[:3].tolist() == [7, 3, 6]
    for number in range(1, 3):
        ended: NDArray[np.int64] = runner.decode(7 + number)
        assert slots.cached[:3].tolist() == [6 + number, 2 + number, 5 + number]
    assert ended.tolist() == [0], "the longest row is at its limit"
    assert slots.versions[0, 6:9].tolist() == [7, 8, 9]
    # Token by token what the model says to the whole row.
    for seat, row in enumerate(texts(slots)):
        first = len(PROMPTS[seat])
        assert row[first:] == twin.logp(np.array(row[:-1]))[first - 1 :].argmax(-1).tolist()


def test_a_prompt_over_the_budget_takes_several_steps(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, one = made(twin)
    whole.prefill(0)
    monkeypatch.setattr(module, "PREFILL_TOKENS", 4)
    runner, slots = made(twin)
    taken = []
    while slots.ready < slots.busy:
        runner.prefill(0)
        taken.append(slots.length[:3].tolist())
    # 4 tokens of the first prompt; 2 and the second prompt; 4 and 1 of the third. Whoever is through samples.
    assert taken == [[6, 2, 5], [7, 3, 5], [7, 3, 5], [7, 3, 6]]
    assert texts(slots) == texts(one)


def test_other_settings_of_a_row_are_seen(twin: Twin) -> None:
    """They are kept from step to step while they stay the same."""
    runner, slots = made(twin, limit=20)
    runner.prefill(0)
    runner.decode(0)
    kept = runner._rows
    runner.decode(0)
    assert runner._rows is kept
    slots.temperature[1], slots.top_k[1] = 1.0, 2
    runner.decode(0)
    assert runner._rows is not kept and runner._rows is not None and not runner._rows.all_greedy
