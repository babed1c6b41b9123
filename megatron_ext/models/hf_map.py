"""HF <-> Megatron weights as a pure plan: which slices of which HF tensors make each parameter.

A Megatron parameter of a rank is its ``pieces`` concatenated along dimension 0; a piece is a slice of one HF tensor:

    linear_qkv   [q heads of KV group g, k of g, v of g] for the rank's groups g
    linear_fc1   [gate rows, up rows] of the rank's share of the width
    linear_proj, linear_fc2   the rank's columns
    word_embeddings, output_layer   the rank's rows of the vocabulary, then its share of the padding (``vocab.py``)
    router and its bias, norms   whole

The bias that a router chooses with is a buffer in Megatron; here it is a parameter like any other, always fp32.

Invariants (``tests/models/test_hf_map.py``):

1. The plan is a function of the HF configuration, the layout and the rank's coordinate: no model, no process groups.
2. For every layout the ranks' pieces cover every element of every HF tensor; what more than one rank holds is the same.
   Padding belongs to no HF tensor.
3. Reassembling the shards of any layout is bit-exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.families import DENSE, ExpertNames
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_tensors import WeightError, expert_names, hf_shapes
from megatron_ext.models.vocab import VocabRows

Spec = Literal["local", "te"]


@dataclass(frozen=True)
class Layout:
    """Sizes of the model-parallel dimensions. ``virtual`` is the number of model chunks of a pipeline rank; the rows of
    the vocabulary are filled up to ``vocab_multiple``."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 1
    spec: Spec = "local"
    vocab_multiple: int = 1

    @staticmethod
    def of(config: ParallelConfig, spec: Spec = "local", vocab_multiple: int = 1) -> Layout:
        return Layout(
            tensor=config.tensor,
            pipeline=config.pipeline,
            virtual=config.virtual_pipeline,
            expert=config.expert,
            expert_tensor=config.expert_tensor,
            spec=spec,
            vocab_multiple=vocab_multiple,
        )

    def coordinates(self) -> Iterator[Coordinate]:
        """Every distinct set of weights a rank can hold."""
        sizes = (self.tensor, self.pipeline, self.expert, self.expert_tensor)
        for tensor, pipeline, expert, expert_tensor in product(*map(range, sizes)):
            yield Coordinate(tensor, pipeline, expert, expert_tensor)


@dataclass(frozen=True)
class Coordinate:
    """A rank's place in each model-parallel dimension."""

    tensor: int = 0
    pipeline: int = 0
    expert: int = 0
    expert_tensor: int = 0


@dataclass(frozen=True)
class Piece:
    """``tensor[start:stop]`` along ``dim`` of HF tensor ``name``."""

    name: str
    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class ParamPlan:
    """Parameter ``param`` of model chunk ``chunk``, of ``shape``: its pieces concatenated along dimension 0, and zeros
    from where they end. A rank whose share of the vocabulary is all padding has no piece of it."""

    chunk: int
    param: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def check_divisible(hf: HFConfig, layout: Layout) -> list[str]:
    """Reasons why ``layout`` cannot shard the model; empty when it can."""
    chunks = layout.pipeline * layout.virtual
    rules = [
        ("heads", hf.heads, "parallel.tensor", layout.tensor),
        ("kv_heads", hf.kv_heads, "parallel.tensor", layout.tensor),
        ("layers", hf.layers, "parallel.pipeline x virtual_pipeline", chunks),
    ]
    if not all(hf.moe_pattern):
        rules.append(("intermediate", hf.intermediate, "parallel.tensor", layout.tensor))
    if hf.shared_experts:
        rules.append(("shared_intermediate", hf.shared_intermediate, "parallel.tensor", layout.tensor))
    if any(hf.moe_pattern):
        rules.append(("num_experts", hf.num_experts, "parallel.expert", layout.expert))
        rules.append(("moe_intermediate", hf.moe_intermediate, "parallel.expert_tensor", layout.expert_tensor))
    elif layout.expert > 1 or layout.expert_tensor > 1:
        return [f"{hf.family} has no experts: set parallel.expert=1 and parallel.expert_tensor=1"]
    found = [f"{name} {size} of the model is not a multiple of {key} {n}" for name, size, key, n in rules if size % n]
    if layout.vocab_multiple < 1:
        return [*found, f"model.vocab_multiple must be >= 1, got {layout.vocab_multiple}"]
    indivisible = VocabRows(hf.vocab, layout.vocab_multiple).why_not(layout.tensor)
    return [*found, indivisible] if indivisible else found


def chunk_layers(hf: HFConfig, layout: Layout, pipeline: int, chunk: int) -> range:
    """Decoder layers of model chunk ``chunk`` of pipeline rank ``pipeline`` (Megatron's interleaving)."""
    count = hf.layers // (layout.pipeline * layout.virtual)
    first = chunk * (hf.layers // layout.virtual) + pipeline * count
    return range(first, first + count)


class _Builder:
    """Collects the parameters of one chunk."""

    def __init__(self, hf: HFConfig, layout: Layout, at: Coordinate, chunk: int) -> None:
        self.hf, self.layout, self.at, self.chunk = hf, layout, at, chunk
        self.shapes = hf_shapes(hf)
        self.params: list[ParamPlan] = []

    def add(self, param: str, *pieces: Piece) -> None:
        shape = list(self.shapes[pieces[0].name])
        if pieces[0].dim == 0:
            shape[0] = sum(piece.stop - piece.start for piece in pieces)
        else:
            shape[pieces[0].dim] = pieces[0].stop - pieces[0].start
        self.params.append(ParamPlan(self.chunk, param, tuple(shape), pieces))

    def whole(self, param: str, name: str) -> None:
        self.add(param, Piece(name, 0, 0, self.shapes[name][0]))

    def share(self, name: str, dim: int, size: int, rank: int) -> Piece:
        width = self.shapes[name][dim] // size
        return Piece(name, dim, rank * width, (rank + 1) * width)

    def vocabulary(self, param: str, name: str) -> None:
        """The rank's share of the rows of ``name``, padding included."""
        vocab, width = self.shapes[name]
        rows = VocabRows(vocab, self.layout.vocab_multiple).padded // self.layout.tensor
        start, stop = (min(row, vocab) for row in (self.at.tensor * rows, (self.at.tensor + 1) * rows))
        pieces = (Piece(name, 0, start, stop),) if start < stop else ()
        self.params.append(ParamPlan(self.chunk, param, (rows, width), pieces))

    def attention(self, at: str, to: str) -> None:
        hf, tensor = self.hf, self.layout.tensor
        per_group = hf.heads // hf.kv_heads * hf.head_dim
        groups = hf.kv_heads // tensor
        pieces: list[Piece] = []
        for g in range(self.at.tensor * groups, (self.at.tensor + 1) * groups):
            for name, width in (("q_proj", per_group), ("k_proj", hf.head_dim), ("v_proj", hf.head_dim)):
                pieces.append(Piece(f"{at}.self_attn.{name}.weight", 0, g * width, (g + 1) * width))
        self.add(f"{to}.self_attention.linear_qkv.weight", *pieces)
        if hf.qkv_bias:
            rows = [Piece(p.name.removesuffix("weight") + "bias", p.dim, p.start, p.stop) for p in pieces]
            self.add(f"{to}.self_attention.linear_qkv.bias", *rows)
        for n in "qk" if hf.qk_norm != "none" else "":
            self.whole(f"{to}.self_attention.{n}_layernorm.weight", f"{at}.self_attn.{n}_norm.weight")
        self.add(
            f"{to}.self_attention.linear_proj.weight",
            self.share(f"{at}.self_attn.o_proj.weight", 1, tensor, self.at.tensor),
        )

    def mlp(self, block: str, names: ExpertNames, fc1: str, fc2: str, size: int, rank: int) -> None:
        gate_up = [self.share(f"{block}.{name}.weight", 0, size, rank) for name in (names.gate, names.up)]
        self.add(fc1, *gate_up)
        self.add(fc2, self.share(f"{block}.{names.down}.weight", 1, size, rank))

    def layer(self, index: int, local: int) -> None:
        te = self.layout.spec == "te"
        at, to = f"model.layers.{index}", f"decoder.layers.{local}"
        moe = self.hf.moe_pattern[index]
        # Transformer Engine fuses a norm into the linear layer that follows it; a router is not such a layer.
        norm = f"{to}.self_attention.linear_qkv.layer_norm_weight" if te else f"{to}.input_layernorm.weight"
        self.whole(norm, f"{at}.input_layernorm.weight")
        self.attention(at, to)
        fused = te and not moe
        norm = f"{to}.mlp.linear_fc1.layer_norm_weight" if fused else f"{to}.pre_mlp_layernorm.weight"
        self.whole(norm, f"{at}.post_attention_layernorm.weight")
        if not moe:
            fc1, fc2 = f"{to}.mlp.linear_fc1.weight", f"{to}.mlp.linear_fc2.weight"
            self.mlp(f"{at}.mlp", DENSE, fc1, fc2, self.layout.tensor, self.at.tensor)
            return
        names = expert_names(self.hf)
        moe_at = f"{at}.{names.block}"
        self.whole(f"{to}.mlp.router.weight", f"{moe_at}.gate.weight")
        if names.bias:
            self.whole(f"{to}.mlp.router.expert_bias", f"{at}.{names.bias}")
        if self.hf.shared_experts:
            fc1, fc2 = (f"{to}.mlp.shared_experts.linear_{fc}.weight" for fc in ("fc1", "fc2"))
            self.mlp(f"{moe_at}.shared_experts", names, fc1, fc2, self.layout.tensor, self.at.tensor)
        experts = self.hf.num_experts // self.layout.expert
        for e in range(experts):
            if te:
                fc1, fc2 = (f"{to}.mlp.experts.linear_{fc}.weight{e}" for fc in ("fc1", "fc2"))
            else:
                fc1, fc2 = (f"{to}.mlp.experts.local_experts.{e}.linear_{fc}.weight" for fc in ("fc1", "fc2"))
            block = f"{moe_at}.experts.{self.at.expert * experts + e}"
            self.mlp(block, names, fc1, fc2, self.layout.expert_tensor, self.at.expert_tensor)


def rank_plan(hf: HFConfig, layout: Layout, at: Coordinate) -> tuple[ParamPlan, ...]:
    """Every parameter of the rank at ``at``. Raises ``WeightError`` when the layout cannot shard the model."""
    errors = check_divisible(hf, layout)
    if errors:
        raise WeightError("\n".join(errors))
    params: list[ParamPlan] = []
    for chunk in range(layout.virtual):
        build = _Builder(hf, layout, at, chunk)
        first = at.pipeline == 0 and chunk == 0
        last = at.pipeline == layout.pipeline - 1 and chunk == layout.virtual - 1
        if first:
            build.vocabulary("embedding.word_embeddings.weight", "model.embed_tokens.weight")
        for local, index in enumerate(chunk_layers(hf, layout, at.pipeline, chunk)):
            build.layer(index, local)
        if last:
            build.whole("decoder.final_layernorm.weight", "model.norm.weight")
            if not hf.tie_word_embeddings:
                build.vocabulary("output_layer.weight", "lm_head.weight")
            elif not first:  # the last stage keeps a copy of the tied embedding
                build.vocabulary("output_layer.weight", "model.embed_tokens.weight")
        params.extend(build.params)
    return tuple(params)


def plan(hf: HFConfig, layout: Layout) -> dict[Coordinate, tuple[ParamPlan, ...]]:
    """``rank_plan`` of every coordinate."""
    return {at: rank_plan(hf, layout, at) for at in layout.coordinates()}
