"""What both sides of the end-to-end bench share: sizes, prompts, reward, tokenizer, and a side's answer.

Invariants (``tests/launch/test_bench_e2e.py``):

1. The tokenizer has one id a byte and two special ones, and both sides see the same prompt ids: a prompt's bytes.
2. A side's answer counts the tokens it really sampled; steps with another count than the size says are an error.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

BYTES = 256
PAD, END = "<|pad|>", "<|end|>"
VOCAB = BYTES + 2


@dataclass(frozen=True)
class Size:
    """What is measured. ``warmup`` steps come before the ``steps`` that count, in each of ``rounds`` turns a side."""

    hidden: int = 128
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    expert_hidden: int = 128
    prompts: int = 8
    samples: int = 8
    new_tokens: int = 128
    threads: int = 2
    warmup: int = 2
    steps: int = 4
    rounds: int = 4

    @property
    def completions(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Sampled tokens of one step."""
        return self.completions * self.new_tokens

    def __str__(self) -> str:
        return (
            f"{self.completions} completions of {self.new_tokens} tokens, {self.samples} a group; "
            f"hidden {self.hidden}, {self.layers} layers, {self.experts} experts top-{self.top_k}, fp32, "
            f"{self.threads} threads; median of {self.rounds * self.steps} steps a side"
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Size:
        return Size(**json.loads(text))


@dataclass(frozen=True)
class Side:
    """One turn of one side: for each measured step its seconds, its seconds in each phase, and its sampled tokens."""

    seconds: tuple[float, ...]
    phases: tuple[dict[str, float], ...]
    tokens: tuple[int, ...]

    def check(self, size: Size, who: str) -> Side:
        if len(self.seconds) != size.steps or any(count != size.tokens for count in self.tokens):
            raise RuntimeError(
                f"{who}: wanted {size.steps} steps of {size.tokens} sampled tokens, got {list(self.tokens)}"
            )
        return self

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(path: Path) -> Side:
        raw: dict[str, Any] = json.loads(path.read_text())
        return Side(tuple(raw["seconds"]), tuple(raw["phases"]), tuple(raw["tokens"]))


def prompts(size: Size) -> list[str]:
    """As many different prompts of 24 bytes, so that no side pads."""
    return [f"Say letters only. Go {number:03d}" for number in range(size.prompts)]


def letters(answer: str, row: dict[str, Any]) -> float:
    """The reward of both sides: the share of characters that are letters."""
    return sum(c.isalpha() for c in answer) / max(len(answer), 1)


def write_task_file(path: Path, size: Size) -> None:
    lines = [{"id": str(i), "prompt": text, "split": "train"} for i, text in enumerate(prompts(size))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_tokenizer(folder: Path) -> None:
    """A byte tokenizer in the HF layout whose chat template adds nothing to a user message."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from megatron_ext.harness.template import ChatTemplate, Frame
    from megatron_ext.harness.tokenizer import save_tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (PAD, END)])
    plain = Frame("", "")
    template = ChatTemplate(
        name="bytes",
        special=(PAD, END),
        pad=PAD,
        bos="",
        system=plain,
        user=plain,
        tool=plain,
        generation_prompt="",
        end=END,
    )
    save_tokenizer(folder, tokenizer, template)


def write_model(folder: Path, tokenizer: Path, size: Size) -> None:
    """Fresh weights as an HF folder: what both sides start from."""
    from megatron_ext.config.schema import BackendConfig, ModelConfig, ParallelConfig
    from megatron_ext.models.backends import resolve_backend
    from megatron_ext.models.build import build_model
    from megatron_ext.models.hf_config import HFConfig
    from megatron_ext.models.hf_io import save_hf
    from megatron_ext.models.hf_weights import export_tensors
    from megatron_ext.models.parallel import initialize, shutdown

    hf = HFConfig(
        family="qwen3_moe",
        vocab=VOCAB,
        hidden=size.hidden,
        layers=size.layers,
        heads=4,
        kv_heads=2,
        head_dim=size.hidden // 4,
        intermediate=2 * size.hidden,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        num_experts=size.experts,
        top_k=size.top_k,
        moe_intermediate=size.expert_hidden,
        norm_topk_prob=True,
        pad_token_id=BYTES,
    )
    parallel, backend = ParallelConfig(), resolve_backend(BackendConfig(device="cpu"))
    context = initialize(parallel, backend, seed=1)
    try:
        chunks = build_model(hf, ModelConfig(hf_config=""), parallel, backend, seed=1)
        save_hf(folder, hf, export_tensors(chunks, hf), tokenizer)
    finally:
        shutdown(context)


def differences(times: Sequence[float]) -> tuple[float, ...]:
    """Seconds between consecutive times."""
    return tuple(after - before for before, after in zip(times, times[1:], strict=False))
