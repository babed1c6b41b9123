"""HF <-> Megatron weights as a pure plan: which slices of which HF tensors make each parameter.

A Megatron parameter of a rank is its ``pieces`` concatenated along dimension 0; a piece is a slice of one HF tensor:

    linear_qkv   [q heads of KV group g, k of g, v of g] for the rank's groups g
    linear_fc1   [gate rows, up rows] of the rank's share of the width
    linear_proj, linear_fc2   the rank's columns
    word_embeddings, output_layer   the rank's rows of the vocabulary
    router and its bias, norms   whole

The bias that a router chooses with is a buffer in Megatron; here it is a parameter like any other, always fp32.

Invariants (``tests/models/test_hf_map.py``):

1. The plan is a function of the HF configuration, the layout and the rank's coordinate: no model, no process groups.
2. For every layout the ranks' pieces cover every element of every HF tensor; what more than one rank holds is the same.
3. HF -> Megatron -> HF is bit-exact, and so is reassembling the shards of any layout.
4. Loading writes every parameter exactly once, and reads of each HF tensor only the rows and columns the rank holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.hf_config import HFConfig, compare_model

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

Spec = Literal["local", "te"]


class WeightError(ValueError):
    """Weights that do not fit the model; one line per reason."""


class TensorReader(Protocol):
    """Source of HF tensors by name, read in slices."""

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """``tensor[start:stop]`` along ``dim``, on the CPU."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the model-parallel dimensions. ``virtual`` is the number of model chunks of a pipeline rank."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    expert: int = 1
    expert_tensor: int = 1
    spec: Spec = "local"

    @staticmethod
    def of(config: ParallelConfig, spec: Spec = "local") -> Layout:
        return Layout(
            config.tensor, config.pipeline, config.virtual_pipeline, config.expert, config.expert_tensor, spec
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
    """Parameter ``param`` of model chunk ``chunk``, of ``shape``: its pieces concatenated along dimension 0."""

    chunk: int
    param: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class ExpertNames:
    """How a family names its experts under ``model.layers.N``: the ``block`` that holds router and experts, the
    router's ``bias`` ("" = none), and the matrices of an expert."""

    block: str
    bias: str
    gate: str
    up: str
    down: str


_NAMES: dict[str, ExpertNames] = {
    "qwen3_moe": ExpertNames("mlp", "", "gate_proj", "up_proj", "down_proj"),
    "glm4_moe": ExpertNames("mlp", "mlp.gate.e_score_correction_bias", "gate_proj", "up_proj", "down_proj"),
    "minimax_m2": ExpertNames("block_sparse_moe", "block_sparse_moe.e_score_correction_bias", "w1", "w3", "w2"),
}
_DENSE = ExpertNames("mlp", "", "gate_proj", "up_proj", "down_proj")


def expert_names(hf: HFConfig) -> ExpertNames:
    """The names of a model's experts; those of a dense layer where it has none."""
    return _NAMES.get(hf.family, _DENSE)


def is_bias_of_router(name: str) -> bool:
    """Whether an HF tensor is a router's bias, which stays fp32 whatever the parameters are."""
    return name.endswith("e_score_correction_bias")


def is_next_token_module(name: str, hf: HFConfig) -> bool:
    """Whether an HF tensor belongs to a module behind the decoder that predicts several tokens ahead (GLM-4.5)."""
    parts = name.split(".")
    behind = len(parts) > 2 and parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= hf.layers
    return hf.family == "glm4_moe" and behind


def hf_shapes(hf: HFConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> full shape of every tensor of the checkpoint, in the order of the model."""
    q, kv = hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf.vocab, hf.hidden)}
    for i, moe in enumerate(hf.moe_pattern):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hf.hidden,),
            f"{at}.self_attn.q_proj.weight": (q, hf.hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hf.hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hf.hidden),
        }
        if hf.qkv_bias:
            shapes |= {f"{at}.self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
        if hf.qk_norm != "none":
            sizes = (hf.head_dim, hf.head_dim) if hf.qk_norm == "head" else (q, kv)
            shapes |= {f"{at}.self_attn.{n}_norm.weight": (size,) for n, size in zip("qk", sizes, strict=True)}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (hf.hidden, q),
            f"{at}.post_attention_layernorm.weight": (hf.hidden,),
        }
        names = _NAMES[hf.family] if moe else _DENSE
        blocks, width = [f"{at}.mlp"], hf.intermediate
        if moe:
            moe_at = f"{at}.{names.block}"
            shapes[f"{moe_at}.gate.weight"] = (hf.num_experts, hf.hidden)
            if names.bias:
                shapes[f"{at}.{names.bias}"] = (hf.num_experts,)
            blocks, width = [f"{moe_at}.experts.{e}" for e in range(hf.num_experts)], hf.moe_intermediate
        widths = dict.fromkeys(blocks, width)
        if moe and hf.shared_experts:
            widths[f"{moe_at}.shared_experts"] = hf.shared_intermediate
        for block, width in widths.items():
            shapes[f"{block}.{names.gate}.weight"] = (width, hf.hidden)
            shapes[f"{block}.{names.up}.weight"] = (width, hf.hidden)
            shapes[f"{block}.{names.down}.weight"] = (hf.hidden, width)
    shapes["model.norm.weight"] = (hf.hidden,)
    if not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (hf.vocab, hf.hidden)
    return shapes


def check_divisible(hf: HFConfig, layout: Layout) -> list[str]:
    """Reasons why ``layout`` cannot shard the model; empty when it can."""
    chunks = layout.pipeline * layout.virtual
    rules = [
        ("heads", hf.heads, "parallel.tensor", layout.tensor),
        ("kv_heads", hf.kv_heads, "parallel.tensor", layout.tensor),
        ("vocab", hf.vocab, "parallel.tensor", layout.tensor),
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
    return [f"{name} {size} of the model is not a multiple of {key} {n}" for name, size, key, n in rules if size % n]


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
            self.mlp(f"{at}.mlp", _DENSE, fc1, fc2, self.layout.tensor, self.at.tensor)
            return
        names = _NAMES[self.hf.family]
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
        embedding = build.share("model.embed_tokens.weight", 0, layout.tensor, at.tensor)
        if first:
            build.add("embedding.word_embeddings.weight", embedding)
        for local, index in enumerate(chunk_layers(hf, layout, at.pipeline, chunk)):
            build.layer(index, local)
        if last:
            build.whole("decoder.final_layernorm.weight", "model.norm.weight")
            if not hf.tie_word_embeddings:
                build.add("output_layer.weight", build.share("lm_head.weight", 0, layout.tensor, at.tensor))
            elif not first:
                build.add("output_layer.weight", embedding)  # the last stage keeps a copy of the tied embedding
        params.extend(build.params)
    return tuple(params)


def plan(hf: HFConfig, layout: Layout) -> dict[Coordinate, tuple[ParamPlan, ...]]:
    """``rank_plan`` of every coordinate."""
    return {at: rank_plan(hf, layout, at) for at in layout.coordinates()}


# --------------------------------------------------------------------------------------------- applying a plan


def assemble(param: ParamPlan, read: Callable[[str, int, int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces of one parameter in order, reading each HF tensor once: its pieces are neighbours, so one slice."""
    spans: dict[str, tuple[int, int]] = {}
    for piece in param.pieces:
        low, high = spans.get(piece.name, (piece.start, piece.stop))
        spans[piece.name] = (min(low, piece.start), max(high, piece.stop))
    held = {name: read(name, param.pieces[0].dim, low, high) for name, (low, high) in spans.items()}
    for piece in param.pieces:
        yield held[piece.name].narrow(piece.dim, piece.start - spans[piece.name][0], piece.stop - piece.start)


def place_of(chunks: Sequence[GPTModel]) -> tuple[Layout, Coordinate]:
    """Layout and coordinate of the rank that built these chunks."""
    config, groups = chunks[0].config, chunks[0].pg_collection
    layout = Layout(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        virtual=len(chunks),
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size or 1,
        spec="local" if config.transformer_impl == "local" else "te",
    )
    return layout, Coordinate(groups.tp.rank(), groups.pp.rank(), groups.ep.rank(), groups.expt_tp.rank())


def _parameters(chunks: Sequence[GPTModel], params: Sequence[ParamPlan]) -> list[torch.Tensor]:
    """The parameters of a plan, in its order; checks that plan and model agree on names and shapes."""
    have: dict[tuple[int, str], torch.Tensor] = {}
    for i, chunk in enumerate(chunks):
        biases = [(name, b) for name, b in chunk.named_buffers() if name.endswith(".router.expert_bias")]
        have |= {(i, name): tensor for name, tensor in [*chunk.named_parameters(), *biases]}
    want = {(param.chunk, param.param): param for param in params}
    errors = [
        f"parameter {name} of the model is not in the weight map" for _, name in sorted(have.keys() - want.keys())
    ]
    errors += [
        f"parameter {name} of the weight map is not in the model" for _, name in sorted(want.keys() - have.keys())
    ]
    errors += [
        f"parameter {key[1]}: model {tuple(have[key].shape)}, weight map {want[key].shape}"
        for key in want
        if key in have and tuple(have[key].shape) != want[key].shape
    ]
    if errors:
        raise WeightError("\n".join(errors))
    return [have[(param.chunk, param.param)] for param in params]


def load_tensors(chunks: Sequence[GPTModel], hf: HFConfig, reader: TensorReader) -> None:
    """Fills the chunks of this rank from HF tensors, reading only what it holds. No communication.

    The HF configuration is compared with the model's field by field first; a mismatch raises ``WeightError`` that names
    each field. On the host at most one parameter's HF tensors are held at a time.
    """
    mismatches = [line for chunk in chunks for line in compare_model(hf, chunk)]
    if mismatches:
        raise WeightError("the HF config and the model disagree:\n" + "\n".join(dict.fromkeys(mismatches)))
    layout, at = place_of(chunks)
    params = rank_plan(hf, layout, at)
    with torch.no_grad():
        for param, parameter in zip(params, _parameters(chunks, params), strict=True):
            row = 0
            for piece in assemble(param, reader.read):
                parameter[row : row + piece.size(0)].copy_(piece)
                row += piece.size(0)


Gather = Callable[[str, list[tuple[Piece, torch.Tensor]]], list[tuple[Piece, torch.Tensor]]]


def export_tensors(
    chunks: Sequence[GPTModel], hf: HFConfig, gather: Gather | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of every weight, once, in the order of ``hf_shapes``.

    A tensor may share memory with a parameter: use it before the next optimizer step, or copy it. ``gather`` completes
    the pieces of one HF tensor from the other ranks; without it every tensor must be whole on this rank.
    """
    parts = held_pieces(chunks, hf)
    for name, shape in hf_shapes(hf).items():
        held = parts[name] if gather is None else gather(name, parts[name])
        yield name, join(name, shape, held)


def held_pieces(chunks: Sequence[GPTModel], hf: HFConfig) -> dict[str, list[tuple[Piece, torch.Tensor]]]:
    """HF name -> the pieces of it that this rank holds, views of its parameters, in the order of its plan."""
    layout, at = place_of(chunks)
    params = rank_plan(hf, layout, at)
    parts: dict[str, list[tuple[Piece, torch.Tensor]]] = {name: [] for name in hf_shapes(hf)}
    for param, parameter in zip(params, _parameters(chunks, params), strict=True):
        if is_copy(param, hf):
            continue
        row = 0
        for piece in param.pieces:
            rows = piece.stop - piece.start if piece.dim == 0 else parameter.size(0)
            parts[piece.name].append((piece, parameter.detach()[row : row + rows]))
            row += rows
    return parts


def is_copy(param: ParamPlan, hf: HFConfig) -> bool:
    """Whether a parameter is the last stage's copy of the tied embedding."""
    return param.param == "output_layer.weight" and hf.tie_word_embeddings


def join(name: str, shape: tuple[int, ...], held: list[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """The full HF tensor of its pieces (equal pieces of several ranks count once). Raises ``WeightError`` on a gap."""
    unique = {(piece.start, piece.stop): (piece, tensor) for piece, tensor in held}
    ordered = [unique[key] for key in sorted(unique)]
    end = 0
    for piece, _ in ordered:
        if piece.start != end:
            break
        end = piece.stop
    if not ordered or end != shape[ordered[0][0].dim]:
        raise WeightError(f"{name}: this rank holds only part of it; pass a gather over the model-parallel ranks")
    tensors = [tensor for _, tensor in ordered]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=ordered[0][0].dim)
