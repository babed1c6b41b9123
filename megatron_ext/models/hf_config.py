"""HF ``config.json``: the architecture it describes, read, checked and written. What a family has of its own is in
``families.py``.

Invariants (``tests/models/test_hf_config.py``):

1. A configuration that this code would compute differently from ``transformers`` is refused: every field that is
   missing, inconsistent or unsupported is named, all in one error.
2. ``from_dict(to_dict())`` is the identity, and ``transformers`` loads what ``to_dict`` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron_ext.models.families import FAMILIES, REQUIRED, Family, Key

QKNorm = Literal["head", "layer", "none"]
ScoreFunction = Literal["softmax", "sigmoid"]


class HFConfigError(ValueError):
    """A config.json that cannot be used; one line per field."""


@dataclass(frozen=True)
class HFConfig:
    """Architecture of a model. ``intermediate`` is the width of dense layers, ``moe_intermediate`` that of one expert.

    ``family`` is a key of ``FAMILIES``; the MoE fields are 0, False and empty in a dense one. Token ids are carried for
    generation and export; None = unset. ``qk_norm``: q and k are normalised over each head, over all heads of the layer
    together, or not. ``rotary_dim``: values of a head that rotary embeddings turn; 0 = all. A ``sigmoid`` router
    chooses by sigmoid(logits) + bias and weighs by the sigmoids of the chosen, which sum to ``routed_scaling``; it may
    first choose ``top_groups`` of ``expert_groups`` equal groups, by the sum of their two best. ``shared_experts``: how
    many widths of an expert every token passes through besides.
    """

    family: str
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
        if self.family not in FAMILIES:
            raise HFConfigError(f"HF config: family {self.family!r} is unknown; use one of {', '.join(FAMILIES)}")
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
        if self.traits.experts is not None:
            sizes += ["num_experts", "top_k", "moe_intermediate", "decoder_sparse_step", "expert_groups", "top_groups"]
        said = {name: f"{self.traits.entry(name)} {getattr(self, name)}" for name in sizes}  # as the file has it
        errors = [f"{text} must be >= 1" for name, text in said.items() if getattr(self, name) < 1]
        if not errors:
            if self.heads % self.kv_heads:
                errors.append(f"{said['heads']} is not a multiple of {said['kv_heads']}")
            if self.head_dim % 2:
                errors.append(f"{said['head_dim']} must be even")
            if self.top_k > self.num_experts:
                errors.append(f"{said['top_k']} is more than {said['num_experts']}")
            errors += self._routing_errors(said) if self.traits.sigmoid else []
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= self.head_dim:
            errors.append(f"rotary_dim {self.rotary_dim} must be even and at most {said['head_dim']}")
        bad = [i for i in self.mlp_only_layers if not 0 <= i < self.layers]
        if bad:
            errors.append(f"{self.traits.entry('mlp_only_layers')}: layers {bad} lie outside 0..{self.layers - 1}")
        if self.rope_theta <= 0:
            errors.append(f"rope_theta must be positive, got {self.rope_theta}")
        if errors:
            raise HFConfigError("HF config: " + "; ".join(dict.fromkeys(errors)))

    def _routing_errors(self, said: Mapping[str, str]) -> list[str]:
        """Of a sigmoid router; ``said`` are the sizes in the words of the file."""
        errors = []
        if self.top_k < 2:
            errors.append(f"{said['top_k']}: a sigmoid router's weights are normalised, which needs 2 or more")
        if not self.norm_topk_prob:
            errors.append("norm_topk_prob false: a sigmoid router's weights are normalised")
        experts, groups, chosen = said["num_experts"], said["expert_groups"], said["top_groups"]
        wrong = [f"{chosen} is more than {groups}"] if self.top_groups > self.expert_groups else []
        if self.expert_groups > 1:
            if self.num_experts % self.expert_groups:
                wrong.append(f"{experts} is not a multiple of {groups}")
            elif self.num_experts < 2 * self.expert_groups:
                wrong.append(f"{groups} leaves groups of one of {experts}: a group needs the two that it ranks by")
            if not wrong and self.top_k != 2 * self.top_groups:
                # Megatron ranks groups by their top_k / top_groups best experts, transformers by their two best.
                wrong.append(f"{said['top_k']} must be twice {chosen}: groups rank by their best two")
        errors += wrong
        if self.shared_experts < 0:
            errors.append(f"{self.traits.entry('shared_experts')} must be >= 0, got {self.shared_experts}")
        return errors

    @property
    def traits(self) -> Family:
        """What its family has of its own."""
        return FAMILIES[self.family]

    @property
    def score_function(self) -> ScoreFunction:
        return "sigmoid" if self.traits.sigmoid else "softmax"

    @property
    def expert_bias(self) -> bool:
        """Whether routers choose with a bias of each expert."""
        return self.traits.sigmoid

    @property
    def shared_intermediate(self) -> int:
        """Width of the shared experts together."""
        return self.shared_experts * self.moe_intermediate

    @property
    def moe_pattern(self) -> tuple[bool, ...]:
        """[layers]: whether each decoder layer is a Mixture-of-Experts layer (the rule of ``transformers``)."""
        sparse = self.traits.experts is not None
        return tuple(
            sparse and i not in self.mlp_only_layers and (i + 1) % self.decoder_sparse_step == 0
            for i in range(self.layers)
        )

    @property
    def rotary_share(self) -> float:
        """How much of a head rotary embeddings turn."""
        return (self.rotary_dim or self.head_dim) / self.head_dim

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
        traits = self.traits
        partial = {} if traits.rotary_share is None else {"partial_rotary_factor": self.rotary_share}
        return {
            "architectures": [traits.architecture],
            "model_type": self.family,
            "dtype": dtype,
            "attention_bias": self.qkv_bias,
            **{key.name: key.encode(getattr(self, key.field)) for key in traits.keys},
            "eos_token_id": list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta, **partial},
            **partial,
            **({"rotary_dim": self.rotary_dim or self.head_dim} if traits.rotary_dim else {}),
            **traits.written,
        }


def from_dict(raw: Mapping[str, Any], source: str = "config.json") -> HFConfig:
    """``HFConfig`` of a parsed ``config.json``. Raises ``HFConfigError`` naming every bad field."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise HFConfigError(f"{source}: model_type {name!r} is not supported; use one of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    errors = [
        f"{key}={raw[key]!r} is not supported (only {only[0]!r})"
        for key, only in family.only.items()
        if key in raw and raw[key] not in only
    ]
    kinds = raw.get("layer_types") or ()
    sliding = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, (list, tuple)) else [kinds]
    if sliding:
        errors.append(f"layer_types holds {sliding[0]!r}; only full_attention is supported")

    fields = {key.field: key.decode(_value(raw, key, errors)) for key in family.keys} | dict(family.fixed)
    fields["head_dim"] = fields["head_dim"] or family.head_dim or fields["hidden"] // max(1, fields["heads"])
    theta, share = _rope(raw, family, fields["head_dim"], errors)
    eos = raw.get("eos_token_id")
    several = tuple(eos) if isinstance(eos, list) else (eos,)
    if eos is not None and not all(_is_int(token) for token in several):
        errors.append(f"eos_token_id must be int or a list of them, got {eos!r}")
    turned = share * fields["head_dim"]
    if turned != int(turned):
        errors.append(f"partial rotary factor {share} of head_dim {fields['head_dim']} is no whole number")
    if errors:
        raise HFConfigError(f"{source}: " + "; ".join(dict.fromkeys(errors)))
    try:
        return HFConfig(
            family=name,
            rotary_dim=0 if turned == fields["head_dim"] else int(turned),
            rope_theta=theta,
            eos_token_id=several if isinstance(eos, list) else eos,
            **fields,
        )
    except HFConfigError as error:
        raise HFConfigError(f"{source}: {error}") from None


def _value(raw: Mapping[str, Any], key: Key, errors: list[str]) -> Any:
    """What ``raw`` says of ``key``, or the default; an entry that is missing or of another type is an error."""
    default = key.kind() if key.default is REQUIRED else key.default
    names = key.names or (key.name,)
    name = next((name for name in names if raw.get(name) is not None), None)
    if name is None:
        if key.default is REQUIRED:
            errors.append(f"{names[0]} is missing")
        return default
    value = raw[name]
    right = _is_number(value) if key.kind is float else type(value) is key.kind
    if not right:
        errors.append(f"{name} must be {key.kind.__name__}, got {value!r}")
        return default
    if key.kind is list and not all(_is_int(item) for item in value):
        errors.append(f"{name} must hold whole numbers, got {value!r}")
        return default
    return float(value) if key.kind is float else value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _rope(raw: Mapping[str, Any], family: Family, head_dim: int, errors: list[str]) -> tuple[float, float]:
    """Rotary base, and the share of a head that turns. Reads the flat form (``rope_theta``, ``rope_scaling``,
    ``partial_rotary_factor``, ``rotary_dim``) and that of transformers 5 (``rope_parameters``)."""
    parameters, scaling = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    for key, form in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(form, dict):
            errors.append(f"{key} must be an object, got {form!r}")
            return 1.0, 1.0
        kind = form.get("rope_type", form.get("type", "default"))
        if kind != "default":
            errors.append(f"{key}.rope_type={kind!r} is not supported (only 'default')")
        if family.rotary_share is None and form.get("partial_rotary_factor", 1.0) != 1.0:
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
    return given.pop(), _rotary_share(raw, parameters, family, head_dim, errors)


def _rotary_share(
    raw: Mapping[str, Any], parameters: Mapping[str, Any], family: Family, head_dim: int, errors: list[str]
) -> float:
    """The share of a head that rotary embeddings turn, however it is said."""
    if family.rotary_share is None:
        return 1.0
    said = {"partial_rotary_factor": raw.get("partial_rotary_factor")}
    said["rope_parameters.partial_rotary_factor"] = parameters.get("partial_rotary_factor")
    if family.rotary_dim and head_dim and _is_number(raw.get("rotary_dim")):
        said["rotary_dim / head_dim"] = raw["rotary_dim"] / head_dim
    held = {name: value for name, value in said.items() if value is not None}
    wrong = {name: value for name, value in held.items() if not _is_number(value) or not 0 < value <= 1}
    if wrong or len({float(value) for value in held.values() if _is_number(value)}) > 1:
        shown = ", ".join(f"{name}={value!r}" for name, value in held.items())
        errors.append(f"{shown}: must be one share above 0 and at most 1")
        return 1.0
    return float(next(iter(held.values()), family.rotary_share))


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
