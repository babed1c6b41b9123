"""The model families: what of a family's ``config.json`` and checkpoint is its own. A new family is one more entry.

Invariants (``tests/models/test_families.py``):

1. No other file of the library names a family: what depends on one is in its entry.
2. What an entry of ``config.json`` is read as, it is written from: ``decode(encode(value)) == value``.
3. Whatever a family's file may say that this code would compute differently is in ``only``, and refused by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

REQUIRED: Final = object()


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """An entry of ``config.json`` and the field of ``HFConfig`` that it sets.

    ``name``: what it is written as. ``kind``: int, float, bool, or list (of whole numbers). ``default``: the entry's
    value where it is absent or null; ``REQUIRED``: it must be there. ``names``: what it is read from, the first that is
    there (empty: ``name`` alone). ``decode`` and ``encode`` lead from the entry's value to the field's and back.
    """

    name: str
    field: str
    kind: type
    default: Any = REQUIRED
    names: tuple[str, ...] = ()
    decode: Callable[[Any], Any] = _same
    encode: Callable[[Any], Any] = _same


@dataclass(frozen=True)
class ExpertNames:
    """How a family names its experts under ``model.layers.N``: the ``block`` that holds router and experts, the
    router's ``bias`` ("" = none), and the matrices of an expert."""

    block: str
    bias: str
    gate: str
    up: str
    down: str


# A dense layer, named in the same way by every family.
DENSE = ExpertNames("mlp", "", "gate_proj", "up_proj", "down_proj")

_KEYS = (
    Key("vocab_size", "vocab", int),
    Key("hidden_size", "hidden", int),
    Key("num_hidden_layers", "layers", int),
    Key("num_attention_heads", "heads", int),
    Key("num_key_value_heads", "kv_heads", int),
    Key("intermediate_size", "intermediate", int),
    Key("max_position_embeddings", "max_position_embeddings", int),
    Key("head_dim", "head_dim", int, 0),
    Key("rms_norm_eps", "rms_eps", float, 1e-6),
    Key("initializer_range", "initializer_range", float, 0.02),
    Key("tie_word_embeddings", "tie_word_embeddings", bool, False),
    Key("bos_token_id", "bos_token_id", int, None),
    Key("pad_token_id", "pad_token_id", int, None),
)
_GLM_KEYS = tuple(replace(key, default=1e-5) if key.name == "rms_norm_eps" else key for key in _KEYS)
_EXPERTS = ("num_experts", "num_local_experts")  # transformers 5 maps one name to the other
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "router_jitter_noise": (None, 0, 0.0),
}
_WRITTEN: dict[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0, "use_sliding_window": False}


@dataclass(frozen=True)
class Family:
    """One family; what ``transformers`` takes where its file says nothing is a default here too.

    ``keys``: the entries that are read and written. ``only``: entries with the values that this code computes, any
    other is refused. ``written``: entries with the value they are always written with. ``fixed``: fields of
    ``HFConfig`` that are no choice. ``experts``: None = dense. ``sigmoid``: routers choose by sigmoids and a bias of
    each expert, not by softmax. ``head_dim``: 0 = the hidden size over the heads. ``rotary_share``: of a head that
    turns; None = always all of it, and ``rotary_dim`` = the file may also give the values that turn.
    ``next_tokens``: checkpoints hold modules behind the decoder that predict several tokens ahead.
    """

    architecture: str
    keys: tuple[Key, ...] = _KEYS
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    written: Mapping[str, Any] = field(default_factory=lambda: _WRITTEN)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    experts: ExpertNames | None = None
    sigmoid: bool = False
    head_dim: int = 0
    rotary_share: float | None = None
    rotary_dim: bool = False
    next_tokens: bool = False

    def entry(self, name: str) -> str:
        """What the family's ``config.json`` calls a field of ``HFConfig``; the field's own name where it has none."""
        return next((key.name for key in self.keys if key.field == name), name)


_QWEN_ONLY = _ONLY | {
    "attention_bias": (False, None),
    "partial_rotary_factor": (None, 1.0),
    "rotary_dim": (None,),
    "use_qk_norm": (None, True),
}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        keys=(
            *_KEYS,
            Key("num_experts", "num_experts", int, names=_EXPERTS),
            Key("num_experts_per_tok", "top_k", int),
            Key("moe_intermediate_size", "moe_intermediate", int),
            Key("norm_topk_prob", "norm_topk_prob", bool),
            Key("decoder_sparse_step", "decoder_sparse_step", int, 1),
            Key("mlp_only_layers", "mlp_only_layers", list, (), decode=tuple, encode=list),
        ),
        only=_QWEN_ONLY,
        written=_WRITTEN | {"output_router_logits": False},
        experts=DENSE,
    ),
    "qwen3": Family(architecture="Qwen3ForCausalLM", only=_QWEN_ONLY, head_dim=128),
    "glm4_moe": Family(
        architecture="Glm4MoeForCausalLM",
        keys=(
            *_GLM_KEYS,
            Key("n_routed_experts", "num_experts", int),
            Key("num_experts_per_tok", "top_k", int),
            Key("moe_intermediate_size", "moe_intermediate", int),
            Key("norm_topk_prob", "norm_topk_prob", bool, True),
            Key("first_k_dense_replace", "mlp_only_layers", int, 1, decode=lambda k: tuple(range(k)), encode=len),
            Key("n_shared_experts", "shared_experts", int, 1),
            Key("n_group", "expert_groups", int, 1),
            Key("topk_group", "top_groups", int, 1),
            Key("routed_scaling_factor", "routed_scaling", float, 1.0),
            Key(
                *("use_qk_norm", "qk_norm", bool, False),
                decode=lambda used: "head" if used else "none",
                encode=lambda norm: norm == "head",
            ),
            Key("attention_bias", "qkv_bias", bool, False),
        ),
        only=_ONLY | {"rotary_dim": (None,)},
        written=_WRITTEN | {"num_nextn_predict_layers": 0},
        experts=ExpertNames("mlp", "mlp.gate.e_score_correction_bias", "gate_proj", "up_proj", "down_proj"),
        sigmoid=True,
        rotary_share=0.5,
        next_tokens=True,
    ),
    "minimax_m2": Family(
        architecture="MiniMaxM2ForCausalLM",
        keys=(
            *_KEYS,
            Key("num_local_experts", "num_experts", int, names=_EXPERTS),
            Key("num_experts_per_tok", "top_k", int),
            Key("intermediate_size", "moe_intermediate", int),
        ),
        only=_ONLY
        | {
            "attention_bias": (False, None),
            "use_qk_norm": (None, True),
            "qk_norm_type": (None, "per_layer"),
            "scoring_func": (None, "sigmoid"),
            "use_routing_bias": (None, True),
            "shared_intermediate_size": (None, 0),
        },
        written=_WRITTEN
        | {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True},
        fixed={"norm_topk_prob": True, "qk_norm": "layer"},
        experts=ExpertNames("block_sparse_moe", "block_sparse_moe.e_score_correction_bias", "w1", "w3", "w2"),
        sigmoid=True,
        head_dim=128,
        rotary_share=1.0,
        rotary_dim=True,
    ),
}
