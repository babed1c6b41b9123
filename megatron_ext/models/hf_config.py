"""HF ``config.json`` of the Qwen3-MoE and Qwen3 families: read, write, and compare with what Megatron built.

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

Family = Literal["qwen3_moe", "qwen3"]
_ARCHITECTURE: dict[Family, str] = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Fields of other architectures that change the computation: refused unless they have the value that switches them off.
_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "attention_dropout": (0, 0.0, None),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "shared_expert_intermediate_size": (None, 0),
    "partial_rotary_factor": (None, 1.0),
    "use_qk_norm": (None, True),
}


class HFConfigError(ValueError):
    """A config.json that cannot be used; one line per field."""


@dataclass(frozen=True)
class HFConfig:
    """Architecture of a model. ``intermediate`` is the width of dense layers, ``moe_intermediate`` that of one expert.

    The MoE fields are 0, False and empty for ``qwen3``. Token ids are carried for generation and export; None = unset.
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
        if self.family == "qwen3_moe":
            sizes += ["num_experts", "top_k", "moe_intermediate", "decoder_sparse_step"]
        values = {name: getattr(self, name) for name in sizes}
        errors += [f"{name} must be >= 1, got {value}" for name, value in values.items() if value < 1]
        if not errors:
            if self.heads % self.kv_heads:
                errors.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
            if self.head_dim % 2:
                errors.append(f"head_dim {self.head_dim} must be even")
            if self.top_k > self.num_experts:
                errors.append(f"top_k {self.top_k} is more than num_experts {self.num_experts}")
        bad = [i for i in self.mlp_only_layers if not 0 <= i < self.layers]
        if bad:
            errors.append(f"mlp_only_layers {bad} lie outside 0..{self.layers - 1}")
        if self.rope_theta <= 0:
            errors.append(f"rope_theta must be positive, got {self.rope_theta}")
        if errors:
            raise HFConfigError("HF config: " + "; ".join(errors))

    @property
    def moe_pattern(self) -> tuple[bool, ...]:
        """[layers]: whether each decoder layer is a Mixture-of-Experts layer (the rule of ``transformers``)."""
        return tuple(
            self.family == "qwen3_moe" and i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
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
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rms_norm_eps": self.rms_eps,
            "initializer_range": self.initializer_range,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": False,
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
        return out


def from_dict(raw: Mapping[str, Any], source: str = "config.json") -> HFConfig:
    """``HFConfig`` of a parsed ``config.json``. Raises ``HFConfigError`` naming every bad field."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _ARCHITECTURE:
        raise HFConfigError(f"{source}: model_type {family!r} is not supported; use one of {', '.join(_ARCHITECTURE)}")
    errors = [
        f"{key}={raw[key]!r} is not supported (only {off[0]!r})"
        for key, off in _OFF.items()
        if key in raw and raw[key] not in off
    ]
    kinds = raw.get("layer_types") or ()
    sliding = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, (list, tuple)) else [kinds]
    if sliding:
        errors.append(f"layer_types holds {sliding[0]!r}; only full_attention is supported")

    theta = _rope_theta(raw, errors)
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
    # The default of transformers: Qwen3 has a fixed head_dim, Qwen3-MoE divides the hidden size.
    divided = 128 if family == "qwen3" else fields["hidden"] // max(1, fields["heads"])
    try:
        return HFConfig(
            family=family,
            head_dim=given_head_dim or divided,
            rope_theta=theta,
            eos_token_id=several if isinstance(eos, list) else eos,
            **fields,
        )
    except HFConfigError as error:
        raise HFConfigError(f"{source}: {error}") from None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rope_theta(raw: Mapping[str, Any], errors: list[str]) -> float:
    """Reads the flat form (``rope_theta``, ``rope_scaling``) and that of transformers 5 (``rope_parameters``)."""
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for key, form in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(form, dict):
            errors.append(f"{key} must be an object, got {form!r}")
            return 1.0
    for key, form in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = form.get("rope_type", form.get("type", "default"))
        if kind != "default":
            errors.append(f"{key}.rope_type={kind!r} is not supported (only 'default')")
        if form.get("partial_rotary_factor", 1.0) != 1.0:
            errors.append(f"{key}.partial_rotary_factor={form['partial_rotary_factor']} is not supported (only 1.0)")
    thetas = [form["rope_theta"] for form in (raw, parameters) if form.get("rope_theta") is not None]
    if not all(isinstance(theta, (int, float)) and not isinstance(theta, bool) for theta in thetas):
        errors.append(f"rope_theta must be float, got {thetas[0]!r}")
        return 1.0
    given = {float(theta) for theta in thetas}
    if not given:
        errors.append("rope_theta is missing (neither rope_theta nor rope_parameters.rope_theta)")
        return 1.0
    if len(given) > 1:
        errors.append(f"rope_theta and rope_parameters.rope_theta disagree: {sorted(given)}")
    return given.pop()


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
        "qk_layernorm": (True, config.qk_layernorm),
        "gated_linear_unit": (True, config.gated_linear_unit),
        "activation_func": ("silu", activation),
        "add_bias_linear": (False, config.add_bias_linear),
        "add_qkv_bias": (False, config.add_qkv_bias),
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
            "moe_router_score_function": ("softmax", config.moe_router_score_function),
            # Softmax before top-k keeps raw probabilities; after top-k it is normalised over the chosen experts.
            "moe_router_pre_softmax": (not hf.norm_topk_prob, config.moe_router_pre_softmax),
            "moe_router_topk_scaling_factor": (None, config.moe_router_topk_scaling_factor),
            "moe_router_num_groups": (None, config.moe_router_num_groups),
            "moe_router_enable_expert_bias": (False, config.moe_router_enable_expert_bias),
            "moe_shared_expert_intermediate_size": (None, config.moe_shared_expert_intermediate_size),
            "moe_expert_capacity_factor": (None, config.moe_expert_capacity_factor),
        }
    return [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]


def compare_model(hf: HFConfig, chunk: GPTModel) -> list[str]:
    """``compare`` plus what lives on the model itself: vocabulary, tied embeddings and the rotary base."""
    pairs: dict[str, tuple[object, object]] = {
        "vocab_size": (hf.vocab, chunk.vocab_size),
        "share_embeddings_and_output_weights": (hf.tie_word_embeddings, chunk.share_embeddings_and_output_weights),
        "rotary_base": (hf.rope_theta, float(chunk.rotary_base)),
    }
    lines = [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]
    return compare(hf, chunk.config) + lines
