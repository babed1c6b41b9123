"""HF ``config.json`` of the Qwen3, Qwen3-MoE, GLM-4.5 and MiniMax-M2 families: read, write, and compare with what
Megatron built.

Invariants (``tests/models/test_hf_config.py``):

1. A configuration that this code would compute differently from ``transformers`` is refused: every field that is
   missing, inconsistent or unsupported is named, all in one error.
2. ``from_dict(to_dict())`` is the identity, and ``transformers`` loads what ``to_dict`` writes.
3. ``compare`` names every architecture field in which a Megatron configuration differs from the HF one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

Family = Literal["qwen3_moe", "qwen3", "glm4_moe", "minimax_m2"]
QKNorm = Literal["head", "layer", "none"]
ScoreFunction = Literal["softmax", "sigmoid"]
_ARCHITECTURE: dict[Family, str] = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
}
MOE_FAMILIES: tuple[Family, ...] = ("qwen3_moe", "glm4_moe", "minimax_m2")
SIGMOID_FAMILIES: tuple[Family, ...] = ("glm4_moe", "minimax_m2")

# Fields of other architectures that change the computation: refused unless they have the value that switches them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "router_jitter_noise": (None, 0, 0.0),
}
# The same for some families only: what the others read.
_OFF_IN: dict[Family, dict[str, tuple[Any, ...]]] = {
    family: {
        "attention_bias": (False, None),
        "partial_rotary_factor": (None, 1.0),
        "rotary_dim": (None,),
        "use_qk_norm": (None, True),
    }
    for family in ("qwen3_moe", "qwen3")
} | {
    "glm4_moe": {"rotary_dim": (None,)},
    "minimax_m2": {
        "attention_bias": (False, None),
        "use_qk_norm": (None, True),
        "qk_norm_type": (None, "per_layer"),
        "scoring_func": (None, "sigmoid"),
        "use_routing_bias": (None, True),
        "shared_intermediate_size": (None, 0),
    },
}


class HFConfigError(ValueError):
    """A config.json that cannot be used; one line per field."""


@dataclass(frozen=True)
class HFConfig:
    """Architecture of a model. ``intermediate`` is the width of dense layers, ``moe_intermediate`` that of one expert.

    The MoE fields are 0, False and empty for ``qwen3``. Token ids are carried for generation and export; None = unset.
    ``qk_norm``: q and k are normalised over each head, over all heads of the layer together, or not.
    ``rotary_dim``: values of a head that rotary embeddings turn; 0 = all. A ``sigmoid`` router chooses by
    sigmoid(logits) + bias and weighs by the sigmoids of the chosen, which sum to ``routed_scaling``; it may first
    choose ``top_groups`` of ``expert_groups`` equal groups, by the sum of their two best. ``shared_experts``: how many
    widths of an expert every token passes through besides.
    """

    family: Family
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_position_embeddings: int
    rope_theta: float
    rms_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    num_experts: int = 0
    top_k: int = 0
    moe_intermediate: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    qk_norm: QKNorm = "head"
    qkv_bias: bool = False
    rotary_dim: int = 0
    expert_groups: int = 1
    top_groups: int = 1
    routed_scaling: float = 1.0
    shared_experts: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        errors: list[str] = []
        sizes = [
            "vocab",
            "hidden",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate",
            "max_position_embeddings",
        ]
        if self.family in MOE_FAMILIES:
            sizes += ["num_experts", "top_k", "moe_intermediate", "decoder_sparse_step", "expert_groups", "top_groups"]
        values = {name: getattr(self, name) for name in sizes}
        errors += [f"{name} must be >= 1, got {value}" for name, value in values.items() if value < 1]
        if not errors:
            if self.heads % self.kv_heads:
                errors.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
            if self.head_dim % 2:
                errors.append(f"head_dim {self.head_dim} must be even")
            if self.top_k > self.num_experts:
                errors.append(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
            errors += self._routing_errors() if self.family in SIGMOID_FAMILIES else []
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            errors.append(f"rotary_dim {self.rotary_dim} must be even and at most head_dim {self.head_dim}")
        bad = [i for i in self.mlp_only_layers if not 0 <= i < self.layers]
        if bad:
            errors.append(f"mlp_only_layers {bad} lie outside 0..{self.layers - 1}")
        if self.rope_theta <= 0:
            errors.append(f"rope_theta must be positive, got {self.rope_theta}")
        if errors:
            raise HFConfigError("HF config: " + "; ".join(errors))

    def _routing_errors(self) -> list[str]:
        errors = []
        if not self.norm_topk_prob or self.top_k < 2:
            errors.append("a sigmoid router needs top_k >= 2 and norm_topk_prob: its weights are normalised")
        groups, chosen = self.expert_groups, self.top_groups
        if groups > 1:
            if self.num_experts % groups or chosen > groups:
                errors.append(f"{groups} expert groups, {chosen} chosen: {self.num_experts} experts do not divide so")
            elif self.top_k != 2 * chosen:
                # Megatron ranks groups by their top_k / top_groups best experts, transformers by their two best.
                errors.append(
                    f"top_k {self.top_k} must be twice the {chosen} chosen groups: groups rank by their best two"
                )
        if self.shared_experts < 0:
            errors.append(f"shared_experts must be >= 0, got {self.shared_experts}")
        return errors

    @property
    def score_function(self) -> ScoreFunction:
        return "sigmoid" if self.family in SIGMOID_FAMILIES else "softmax"

    @property
    def expert_bias(self) -> bool:
        """Whether routers choose with a bias of each expert."""
        return self.family in SIGMOID_FAMILIES

    @property
    def shared_intermediate(self) -> int:
        """Width of the shared experts together."""
        return self.shared_experts * self.moe_intermediate

    @property
    def moe_pattern(self) -> tuple[bool, ...]:
        """[layers]: whether each decoder layer is a Mixture-of-Experts layer (the rule of ``transformers``)."""
        return tuple(
            self.family in MOE_FAMILIES and i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
            for i in range(self.layers)
        )

    def with_vocab(self, vocab: int) -> HFConfig:
        """The same architecture over a tokenizer of ``vocab`` ids."""
        return replace(self, vocab=vocab)

    def with_token_ids(
        self, bos: int | None = None, eos: int | tuple[int, ...] | None = None, pad: int | None = None
    ) -> HFConfig:
        """The same architecture with the tokenizer's special ids, as generation needs them."""
        return replace(self, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)

    def to_dict(self, dtype: str = "float32") -> dict[str, Any]:
        """A ``config.json`` that ``transformers`` 5 loads; ``rope_theta`` is written in both its forms."""
        out: dict[str, Any] = {
            "architectures": [_ARCHITECTURE[self.family]],
            "model_type": self.family,
            "dtype": dtype,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, **self._partial()},
            "rms_norm_eps": self.rms_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.qkv_bias,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "pad_token_id": self.pad_token_id,
        }
        if self.family == "qwen3_moe":
            out |= {
                "num_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.moe_intermediate,
                "norm_topk_prob": self.norm_topk_prob,
                "decoder_sparse_step": self.decoder_sparse_step,
                "mlp_only_layers": list(self.mlp_only_layers),
                "output_router_logits": False,
            }
        elif self.family == "glm4_moe":
            out |= {
                "n_routed_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.moe_intermediate,
                "norm_topk_prob": self.norm_topk_prob,
                "first_k_dense_replace": len(self.mlp_only_layers),
                "n_shared_experts": self.shared_experts,
                "n_group": self.expert_groups,
                "topk_group": self.top_groups,
                "routed_scaling_factor": self.routed_scaling,
                "use_qk_norm": self.qk_norm == "head",
                "num_nextn_predict_layers": 0,
                **self._partial(),
            }
        elif self.family == "minimax_m2":
            out |= {
                "num_local_experts": self.num_experts,
                "num_experts_per_tok": self.top_k,
                "intermediate_size": self.moe_intermediate,
                "use_qk_norm": True,
                "qk_norm_type": "per_layer",
                "scoring_func": "sigmoid",
                "use_routing_bias": True,
                "rotary_dim": self.rotary_dim or self.head_dim,
                **self._partial(),
            }
        return out

    def _partial(self) -> dict[str, float]:
        """How much of a head turns, in the families that say so."""
        partial = self.family in SIGMOID_FAMILIES
        return {"partial_rotary_factor": (self.rotary_dim or self.head_dim) / self.head_dim} if partial else {}


def from_dict(raw: Mapping[str, Any], source: str = "config.json") -> HFConfig:
    """``HFConfig`` of a parsed ``config.json``. Raises ``HFConfigError`` naming every bad field."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURE:
        raise HFConfigError(f"{source}: model_type {family!r} is not supported; use one of {', '.join(_ARCHITECTURE)}")
    errors = [
        f"{key}={raw[key]!r} is not supported (only {off[0]!r})"
        for key, off in (_OFF | _OFF_IN[family]).items()
        if key in raw and raw[key] not in off
    ]
    kinds = raw.get("layer_types") or ()
    sliding = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, (list, tuple)) else [kinds]
    if sliding:
        errors.append(f"layer_types holds {sliding[0]!r}; only full_attention is supported")

    theta, turned = _rope(raw, family, errors)
    renamed = {"num_experts": ("num_experts", "num_local_experts")}  # transformers 5 maps one name to the other

    def need(key: str, kind: type) -> Any:
        for name in renamed.get(key, (key,)):
            value = raw.get(name)
            if value is not None:
                return read(name, kind, kind())
        errors.append(f"{key} is missing")
        return kind()

    def read(key: str, kind: type, default: Any) -> Any:
        """The value of ``key``, or ``default`` where it is absent or of another type, which is an error."""
        value = raw.get(key)
        if value is None:
            return default
        numbers = (int, float) if kind is float else kind
        if not isinstance(value, numbers) or (kind is not bool and isinstance(value, bool)):
            errors.append(f"{key} must be {kind.__name__}, got {value!r}")
            return default
        return value

    fields: dict[str, Any] = {
        "vocab": need("vocab_size", int),
        "hidden": need("hidden_size", int),
        "layers": need("num_hidden_layers", int),
        "heads": need("num_attention_heads", int),
        "kv_heads": need("num_key_value_heads", int),
        "intermediate": need("intermediate_size", int),
        "max_position_embeddings": need("max_position_embeddings", int),
    }
    if family == "qwen3_moe":
        fields |= {
            "num_experts": need("num_experts", int),
            "top_k": need("num_experts_per_tok", int),
            "moe_intermediate": need("moe_intermediate_size", int),
            "norm_topk_prob": need("norm_topk_prob", bool),
            "decoder_sparse_step": read("decoder_sparse_step", int, 1),
            "mlp_only_layers": tuple(read("mlp_only_layers", list, [])),
        }
        if not all(_is_int(layer) for layer in fields["mlp_only_layers"]):
            errors.append(f"mlp_only_layers must hold whole numbers, got {raw['mlp_only_layers']!r}")
    elif family == "glm4_moe":
        fields |= {
            "num_experts": need("n_routed_experts", int),
            "top_k": need("num_experts_per_tok", int),
            "moe_intermediate": need("moe_intermediate_size", int),
            "norm_topk_prob": read("norm_topk_prob", bool, True),
            "mlp_only_layers": tuple(range(read("first_k_dense_replace", int, 1))),
            "shared_experts": read("n_shared_experts", int, 1),
            "expert_groups": read("n_group", int, 1),
            "top_groups": read("topk_group", int, 1),
            "routed_scaling": float(read("routed_scaling_factor", float, 1.0)),
            "qk_norm": "head" if read("use_qk_norm", bool, False) else "none",
            "qkv_bias": read("attention_bias", bool, False),
        }
    elif family == "minimax_m2":
        fields |= {
            "num_experts": need("num_experts", int),
            "top_k": need("num_experts_per_tok", int),
            "moe_intermediate": fields["intermediate"],
            "norm_topk_prob": True,
            "qk_norm": "layer",
        }
    given_head_dim = read("head_dim", int, 0)
    fields |= {
        "rms_eps": float(read("rms_norm_eps", float, 1e-6)),
        "initializer_range": float(read("initializer_range", float, 0.02)),
        "tie_word_embeddings": read("tie_word_embeddings", bool, False),
        "bos_token_id": read("bos_token_id", int, None),
        "pad_token_id": read("pad_token_id", int, None),
    }
    eos = raw.get("eos_token_id")
    several = tuple(eos) if isinstance(eos, list) else (eos,)
    if eos is not None and not all(_is_int(token) for token in several):
        errors.append(f"eos_token_id must be int or a list of them, got {eos!r}")
    if errors:
        raise HFConfigError(f"{source}: " + "; ".join(errors))
    # The default of transformers: Qwen3 and MiniMax-M2 have a fixed head_dim, the others divide the hidden size.
    divided = 128 if family in ("qwen3", "minimax_m2") else fields["hidden"] // max(1, fields["heads"])
    head_dim = given_head_dim or divided
    rotary = turned * head_dim
    if rotary != int(rotary):
        raise HFConfigError(f"{source}: partial rotary factor {turned} of head_dim {head_dim} is no whole number")
    try:
        return HFConfig(
            family=family,
            head_dim=head_dim,
            rotary_dim=0 if rotary == head_dim else int(rotary),
            rope_theta=theta,
            eos_token_id=several if isinstance(eos, list) else eos,
            **fields,
        )
    except HFConfigError as error:
        raise HFConfigError(f"{source}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rope(raw: Mapping[str, Any], family: Family, errors: list[str]) -> tuple[float, float]:
    """Rotary base, and the share of a head that turns. Reads the flat form (``rope_theta``, ``rope_scaling``,
    ``partial_rotary_factor``, ``rotary_dim``) and that of transformers 5 (``rope_parameters``)."""
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for key, form in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(form, dict):
            errors.append(f"{key} must be an object, got {form!r}")
            return 1.0, 1.0
    partial = family in SIGMOID_FAMILIES
    for key, form in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = form.get("rope_type", form.get("type", "default"))
        if kind != "default":
            errors.append(f"{key}.rope_type={kind!r} is not supported (only 'default')")
        if not partial and form.get("partial_rotary_factor", 1.0) != 1.0:
            errors.append(f"{key}.partial_rotary_factor={form['partial_rotary_factor']} is not supported (only 1.0)")
    thetas = [form["rope_theta"] for form in (raw, parameters) if form.get("rope_theta") is not None]
    if not all(_is_number(theta) for theta in thetas):
        errors.append(f"rope_theta must be float, got {thetas[0]!r}")
        return 1.0, 1.0
    given = {float(theta) for theta in thetas}
    if not given:
        errors.append("rope_theta is missing (neither rope_theta nor rope_parameters.rope_theta)")
        return 1.0, 1.0
    if len(given) > 1:
        errors.append(f"rope_theta and rope_parameters.rope_theta disagree: {sorted(given)}")
    return given.pop(), _turned(raw, parameters, family, errors) if partial else 1.0


def _turned(raw: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, errors: list[str]) -> float:
    """The share of a head that rotary embeddings turn, however it is said."""
    said = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    said["rope_parameters.partial_rotary_factor"] = parameters.get("partial_rotary_factor")
    if family == "minimax_m2" and _is_number(raw.get("rotary_dim")):
        head_dim = raw.get("head_dim") or 128
        said["rotary_dim / head_dim"] = raw["rotary_dim"] / head_dim if _is_number(head_dim) else None
    held = {name: value for name, value in said.items() if value is not None}
    wrong = {name: value for name, value in held.items() if not _is_number(value) or not 0 < value <= 1}
    if wrong or len({float(value) for value in held.values() if _is_number(value)}) > 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in held.items())
        errors.append(f"{shown}: must be one share above 0 and at most 1")
        return 1.0
    # What transformers takes where nothing is said.
    return float(next(iter(held.values()))) if held else 0.5 if family == "glm4_moe" else 1.0


def load_hf_config(path: str | Path) -> HFConfig:
    """Reads a ``config.json``, or the one in folder ``path``. ``HFConfigError`` names the file and the fields."""
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HFConfigError(f"{file} does not exist; model.hf_config names a config.json or its folder") from None
    except OSError as error:
        raise HFConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no JSON, or no UTF-8
        raise HFConfigError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise HFConfigError(f"{file} must hold a JSON object")
    return from_dict(raw, str(file))


# What two descriptions of one checkpoint may differ in: which ids mean what, how fresh weights are drawn, how long a
# text may be. The rest decides what the weights compute.
_NOT_ARCHITECTURE = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")


def differences(hf: HFConfig, other: HFConfig) -> list[str]:
    """Architecture fields in which two HF configurations differ, ``field: value and value``."""
    names = [field.name for field in dataclasses.fields(HFConfig) if field.name not in _NOT_ARCHITECTURE]
    pairs = {name: (getattr(hf, name), getattr(other, name)) for name in names}
    return [f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def compare(hf: HFConfig, config: TransformerConfig) -> list[str]:
    """Mismatches between the HF configuration and a Megatron one, one line a field; empty when they agree."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    if config.num_moe_experts is None:
        pattern = [0] * config.num_layers
    activation = getattr(config.activation_func, "__name__", str(config.activation_func))
    pairs: dict[str, tuple[object, object]] = {
        "num_layers": (hf.layers, config.num_layers),
        "hidden_size": (hf.hidden, config.hidden_size),
        "num_attention_heads": (hf.heads, config.num_attention_heads),
        "num_query_groups": (hf.kv_heads, config.num_query_groups),
        "kv_channels": (hf.head_dim, config.kv_channels),
        "ffn_hidden_size": (hf.intermediate, config.ffn_hidden_size),
        "layernorm_epsilon": (hf.rms_eps, config.layernorm_epsilon),
        "normalization": ("RMSNorm", config.normalization),
        "layernorm_zero_centered_gamma": (False, config.layernorm_zero_centered_gamma),
        "qk_layernorm": (hf.qk_norm != "none", config.qk_layernorm),
        "gated_linear_unit": (True, config.gated_linear_unit),
        "activation_func": ("silu", activation),
        "add_bias_linear": (False, config.add_bias_linear),
        "add_qkv_bias": (hf.qkv_bias, config.add_qkv_bias),
        "rotary_interleaved": (False, config.rotary_interleaved),
        "window_size": (None, config.window_size),
        "softmax_type": ("vanilla", config.softmax_type),
        "attention_dropout": (0.0, config.attention_dropout),
        "hidden_dropout": (0.0, config.hidden_dropout),
        "moe_layer_freq": ([int(moe) for moe in hf.moe_pattern], list(pattern)),
        "num_moe_experts": (hf.num_experts if any(hf.moe_pattern) else None, config.num_moe_experts),
        "multi_latent_attention": (False, config.multi_latent_attention),
        "mtp_num_layers": (None, config.mtp_num_layers or None),
    }
    if any(hf.moe_pattern):
        pairs |= {
            "moe_router_topk": (hf.top_k, config.moe_router_topk),
            "moe_ffn_hidden_size": (hf.moe_intermediate, config.moe_ffn_hidden_size),
            "moe_router_score_function": (hf.score_function, config.moe_router_score_function),
            # Softmax before top-k keeps raw probabilities; after top-k it is normalised over the chosen experts.
            "moe_router_pre_softmax": (not hf.norm_topk_prob, config.moe_router_pre_softmax),
            "moe_router_topk_scaling_factor": (hf.routed_scaling, config.moe_router_topk_scaling_factor or 1.0),
            "moe_router_num_groups": (hf.expert_groups, config.moe_router_num_groups or 1),
            "moe_router_group_topk": (hf.top_groups, config.moe_router_group_topk or 1),
            "moe_router_enable_expert_bias": (hf.expert_bias, config.moe_router_enable_expert_bias),
            "moe_shared_expert_intermediate_size": (
                hf.shared_intermediate,
                config.moe_shared_expert_intermediate_size or 0,
            ),
            "moe_expert_capacity_factor": (None, config.moe_expert_capacity_factor),
        }
    return [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]


def compare_model(hf: HFConfig, chunk: GPTModel) -> list[str]:
    """``compare`` plus what lives on the model itself: vocabulary, tied embeddings and the rotary base."""
    pairs: dict[str, tuple[object, object]] = {
        "vocab_size": (hf.vocab, chunk.vocab_size),
        "share_embeddings_and_output_weights": (hf.tie_word_embeddings, chunk.share_embeddings_and_output_weights),
        "rotary_base": (hf.rope_theta, float(chunk.rotary_base)),
        "rotary_percent": ((hf.rotary_dim or hf.head_dim) / hf.head_dim, float(chunk.rotary_percent)),
    }
    lines = [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]
    return compare(hf, chunk.config) + lines
