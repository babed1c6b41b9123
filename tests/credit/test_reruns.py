"""A trajectory whose prompt ran again on other experts is recorded in more segments (``Rerun.SEGMENT``), and gets the
credit of one recorded in one (``Rerun.FIRST``): every method that segments mean nothing to, GAE, and loss weights."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from megatron_ext.credit.batch_gae import GAE, Chain
from megatron_ext.credit.gae import Unit
from megatron_ext.losses.aggregation import MODES, token_weights
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.trajectory.builder import FinishedTrajectory, TrajectoryBuilder, build_group
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import Rerun
from tests.helpers.credit_contract import MakeEdit, advantage, by_trajectory, gives_up, same
from tests.helpers.credit_methods import METHODS
from tests.helpers.records import on_trained

SEEDS = range(4)


def agent(seed: int, name: str, sample: int, rerun: Rerun) -> FinishedTrajectory:
    """A dialogue with a sub-agent in it; before a call the engine may have lost its cache."""
    rng = np.random.default_rng(seed)
    b = TrajectoryBuilder(name, sample, "text", rerun)
    main, cached = b.open_session(), dict[int, int]()
    sub = -1
    for turn in range(int(rng.integers(2, 6))):
        if turn == 1 and rng.random() < 0.5:
            sub = b.open_session(SessionKind.SUBAGENT, main)
        session = sub if sub >= 0 and turn == 1 else main
        said = b.add_message(session, Role.TOOL, rng.integers(0, 99, int(rng.integers(1, 5))))
        if sub >= 0 and turn == 2:
            b.set_return(sub, said)
        count, prompt = int(rng.integers(1, 6)), len(b.prompt_ids(session))
        first = 0 if rng.random() < 0.5 else cached.get(session, 0)
        cached[session] = prompt + count - 1
        rows = np.full((cached[session] - first, 2, 1), rng.integers(0, 200), dtype=np.uint8)
        number = b.add_model_turn(
            session,
            rng.integers(0, 99, count),
            -rng.random(count),
            np.full(count, turn),
            state_key=int(rng.integers(1, 4)),
            action_key=int(rng.integers(1, 4)),
            routed=rows,
            routed_from=first,
        )
        b.set_turn_reward(number, float(rng.random()))
        for label in ("stage", "role"):
            b.label_turn(number, label, int(rng.integers(-1, 3)))
    b.set_prepared("answer_prefix", [90, 91])
    b.set_prepared("answer", rng.integers(0, 99, 3))
    reward = float(np.float32(rng.choice([0.0, 0.5, 1.0])))
    return b.finish(reward, {"half": reward / 2}, reward == 1.0, Status(int(rng.integers(0, 3))))


@cache
def agents(seed: int, rerun: Rerun) -> TrajectoryBatch:
    groups = []
    for g in range(4):
        made = [agent(1000 * seed + 10 * g + s, f"g{g}/s{s}", s, rerun) for s in range(4)]
        groups.append(build_group(f"g{g}", f"task{g}", made))
    return concat(groups)


def both(seed: int) -> tuple[TrajectoryBatch, TrajectoryBatch]:
    whole, cut = agents(seed, Rerun.FIRST), agents(seed, Rerun.SEGMENT)
    assert cut.num_segments > whole.num_segments and cut.num_tokens > whole.num_tokens
    assert whole.num_segments == whole.num_sessions
    return whole, cut


@pytest.mark.parametrize("make", METHODS.values(), ids=METHODS.keys())
def test_advantages_of_every_method(make: MakeEdit) -> None:
    if "b" in gives_up(make()):
        pytest.skip("its advantages depend on segments, as it says")
    for seed in SEEDS:
        whole, cut = both(seed)
        same(by_trajectory(advantage(make, cut)), by_trajectory(advantage(make, whole)), "ran again")


def test_most_methods_are_held_to_it() -> None:
    assert sum("b" not in gives_up(make()) for make in METHODS.values()) > 0.9 * len(METHODS)


@pytest.mark.parametrize("chain", [Chain.TRAJECTORY, Chain.SESSION])
@pytest.mark.parametrize("unit", [Unit.TOKEN, Unit.ACTION_TOKEN, Unit.STEP])
def test_gae_goes_on_across_the_segments(unit: Unit, chain: Chain) -> None:
    for seed in SEEDS:
        found = []
        for batch in both(seed):
            # A value of each token by what it is, whatever segment holds it.
            values = np.sin(batch.ids + 7.0 * batch.turn_number[np.maximum(batch.turn, 0)])
            gae = GAE(unit=unit, chain=chain, gamma=0.9, lam=0.8, turn_rewards=True)
            found.append(on_trained(batch, gae(batch, values).advantage))
        same(found[1], found[0], "ran again")


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("row")])
def test_loss_weights(mode: str) -> None:
    for seed in SEEDS:
        whole, cut = both(seed)
        same(on_trained(cut, token_weights(cut, mode)), on_trained(whole, token_weights(whole, mode)), "ran again")


def test_what_a_step_agreement_counts() -> None:
    whole, cut = (GroupMeta.from_batch(batch, "") for batch in both(0))
    for name in ("trained_tokens", "turns", "rewards", "success", "status", "min_version", "max_version"):
        assert getattr(whole, name) == getattr(cut, name)
    assert sum(cut.tokens) > sum(whole.tokens)  # what runs, repeated prompts too
