"""What a compressed dialogue goes on with: invariant 3 of ``megatron_ext/rollout/dialogues.py``, and summaries that are
empty, cut off or aborted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.harness.template import ChatCodec, load_codec
from megatron_ext.harness.tokenizer import save_tokenizer
from megatron_ext.rollout.engine import FinishReason, GenerateResult
from megatron_ext.trajectory.record import Status
from tests.helpers.dialogue_play import (
    COMPRESS,
    NORMAL,
    TASK,
    Change,
    Played,
    check,
    harness,
    play,
    tool,
    words,
)
from tests.helpers.errands import Errands
from tests.helpers.scripted import small_codec


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatCodec:
    return small_codec(tmp_path_factory.mktemp("tokenizer"))


def compressed(codec: ChatCodec, summary: str, change: Change = lambda result: result, **more: object) -> Played:
    """One look, then a summary, then the end."""
    say = words(tool("look", number=3), summary, tool("finish", word="x"))
    played = play(codec, say, harness=harness(50), change=change, **more)  # type: ignore[arg-type]
    check(played, 2000)
    return played


def _repeated(played: Played) -> list[int]:
    """Ids of the summary in the last session: what stands between the opening and the message that follows."""
    batch, codec = played.batch, played.run.codec
    ids = batch.ids[played.tokens(2)].tolist()
    opening = harness().opening(TASK, Errands().reset(TASK.seed), played.run.tools)
    before = codec.opening() + [i for message in opening for i in codec.message(message)]
    turns = np.flatnonzero(batch.turn_start >= played.tokens(2).start)
    resume = int(batch.turn_start[turns[len(opening)]]) - played.tokens(2).start
    inside: list[int] = ids[len(before) : resume]
    return inside


@pytest.mark.parametrize("text", ["at 3 what", "  at 3 what \n", "<think>go walk at 3 what</think>at 3 what", "é at 3"])
def test_the_sampled_ids_of_a_summary_go_on(codec: ChatCodec, text: str) -> None:  # invariant 3
    played = compressed(codec, text)
    assert played.kinds == [NORMAL, COMPRESS, NORMAL] and played.run.counts.sessions.retokenised == 0
    sampled = played.results[1].ids.tolist()
    repeated = _repeated(played)
    opener = codec.generation_prompt()
    assert repeated[: len(opener)] == opener
    kept = repeated[len(opener) :]
    assert sampled[-len(kept) :] == kept and codec.decode_turn(kept).strip() == text.rpartition("</think>")[2].strip()


def test_a_token_across_the_end_of_the_thinking_is_told_anew(codec: ChatCodec, tmp_path: Path) -> None:  # invariant 3
    """A tokenizer that has such a token: ``>at``."""
    import json

    save_tokenizer(tmp_path, codec.tokenizer, codec.template)
    path = tmp_path / "tokenizer.json"
    made = json.loads(path.read_text())
    vocab = made["model"]["vocab"]
    unused = next(word for word, i in sorted(vocab.items(), key=lambda item: -item[1]))
    vocab[">at"] = vocab.pop(unused)
    made["model"]["merges"] = []
    vocab = {word: i for word, i in vocab.items() if len(word) == 1 or word == ">at" or word.startswith("<|")}
    made["model"]["vocab"] = vocab
    path.write_text(json.dumps(made))
    odd = load_codec(tmp_path)
    glued = vocab[">at"]

    def glue(result: GenerateResult) -> GenerateResult:
        ids = result.ids.tolist()
        text = odd.decode_turn(ids)
        if not text.startswith("<think>"):
            return result
        ids = [*odd.encode_turn("<think>x</think")[:-1], glued, *odd.encode_turn(" 3")]
        n = len(ids)
        return GenerateResult(
            result.request_id,
            np.array(ids, np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int64) + 3,
            result.finish,
        )

    say = words(tool("look", number=3), "<think>x</think>at 3", tool("finish", word="x"))
    played = play(odd, say, harness=harness(60), change=glue)
    check(played, 2000)
    assert played.run.counts.sessions.retokenised == 1
    assert _repeated(played) == [*odd.generation_prompt(), *odd.encode_turn("at 3")]


@pytest.mark.parametrize("text", ["", "  ", "<think>go go"])
def test_a_turn_without_a_summary_leaves_nothing(codec: ChatCodec, text: str) -> None:
    played = compressed(codec, text)
    assert played.status is Status.DONE and _repeated(played) == [] and played.run.counts.malformed == 0
    assert played.run.counts.sessions.empty == 1


def test_a_summary_that_was_cut_off_is_closed(codec: ChatCodec) -> None:
    say = words(tool("look", number=3), "walk " * 30, tool("finish", word="x"))
    played = play(codec, say, harness=harness(50, summary_tokens=4))
    check(played, 2000)
    cut = played.results[1]
    assert len(cut.ids) == 4 and cut.finish is FinishReason.LENGTH
    assert _repeated(played) == [*codec.generation_prompt(), *cut.ids.tolist(), codec.end_id]


def test_an_abort_in_a_summary_keeps_it(codec: ChatCodec) -> None:
    def abort(result: GenerateResult) -> GenerateResult:
        if result.request_id != "g0/1#1":
            return result
        return GenerateResult(
            result.request_id, result.ids[:1], result.logp[:1], result.versions[:1], FinishReason.ABORT
        )

    played = play(codec, words(tool("look", number=3), "at 3"), harness=harness(50), change=abort)
    check(played, 2000)
    assert played.status is Status.ABORTED and played.kinds == [NORMAL, COMPRESS]
    assert not played.batch.loss_mask.any() and played.ended == ["g0/1"]


def test_routing_of_repeated_tokens_is_that_of_their_forward(codec: ChatCodec) -> None:
    """An engine that kept the compressed session sends rows for the new tokens only."""

    def reuse(result: GenerateResult) -> GenerateResult:
        assert result.routed is not None
        start = 30 if result.request_id == "g0/1#1" else 0
        mark = result.routed if start else np.full_like(result.routed, 7)
        return GenerateResult(
            result.request_id, result.ids, result.logp, result.versions, result.finish, mark[start:], start
        )

    say = words(tool("look", number=3), "at 3", tool("finish", word="x"))
    played = play(codec, say, harness=harness(50), change=reuse, routing=True)
    check(played, 2000)
    batch = played.batch
    assert batch.routed is not None and batch.routed_valid is not None
    rows, valid = batch.routed[played.tokens(1)], batch.routed_valid[played.tokens(1)]
    assert (rows[:30] == 7).all() and valid[:30].all()
    assert rows[30:-2, 0, 0].tolist() == [n % 8 for n in range(30, len(rows) - 2)], "the engine's own rows win"
