"""Recorded experts as an engine sends them, and as the record keeps them. Pure numpy: the rollout driver has no torch.

SGLang answers ``return_routed_experts`` with base64 of little-endian int32 ``(prompt + completion - 1, layers, k)``: a
row for every token that it ran, the last sampled one excluded, and a column for every layer of the model, dense ones
included, where what stands in it means nothing. The record (``trajectory.record``) keeps the MoE layers in the smallest
unsigned integers, and says of each token whether its experts are known.

Invariants (``tests/moe/test_wire.py``):

1. Row i is the forward of token i of (prompt + completion); the last token has no row, and none is made up.
2. Columns are the model's MoE layers in order: dense layers, leading ones too, are left out and shift nothing
   (verl 5037).
3. What is short, long, of another model or no expert is an error that names the request and the token, never a guess.
4. ``encode(decode(text))`` gives the ids back; a stored id takes one byte up to 256 experts, two up to 65,536.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIRE_DTYPE = np.dtype("<i4")


class WireError(ValueError):
    """Recorded experts that cannot be those of the request; one line."""


@dataclass(frozen=True)
class RoutedModel:
    """What a model's recordings look like: ``moe_pattern``, for each layer whether it has experts; ``top_k`` of
    ``experts`` a token."""

    moe_pattern: tuple[bool, ...]
    top_k: int
    experts: int

    def __post_init__(self) -> None:
        if not any(self.moe_pattern) or not 1 <= self.top_k <= self.experts:
            raise WireError(
                f"routed experts of a model of {sum(self.moe_pattern)} MoE layers, {self.experts} experts, top "
                f"{self.top_k}"
            )

    @property
    def layers(self) -> int:
        """MoE layers."""
        return sum(self.moe_pattern)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned integers that hold every expert's number."""
        return smallest(self.experts)


@dataclass(frozen=True, eq=False)
class Recording:
    """Experts of the ``tokens`` of one request: ``rows`` unsigned [m, L, k], of tokens 0 .. m, and which of these rows
    are known, ``valid`` bool [m]; m = tokens - 1."""

    rows: NDArray[Any]
    valid: NDArray[np.bool_]

    @property
    def tokens(self) -> int:
        return len(self.rows) + 1

    def padded(self) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """``routed`` [tokens, L, k] and ``routed_valid`` [tokens] as the record keeps them: the last token has none."""
        none = np.zeros((1, *self.rows.shape[1:]), dtype=self.rows.dtype)
        return np.concatenate([self.rows, none]), np.concatenate([self.valid, [False]])


def smallest(experts: int) -> np.dtype[Any]:
    """The smallest unsigned integer type that numbers ``experts`` experts."""
    for kind in (np.uint8, np.uint16, np.uint32):
        if experts - 1 <= np.iinfo(kind).max:
            return np.dtype(kind)
    raise WireError(f"{experts} experts are more than 32 bits number")


def decode(
    text: str | bytes | None, model: RoutedModel, *, tokens: int, name: str = "request", moe_alone: bool = False
) -> Recording:
    """What SGLang sent for a request of ``tokens`` prompt and completion tokens.

    ``moe_alone``: the engine leaves dense layers out. It must be said: of a model with both, the columns of all layers
    of a few tokens are as many as those of the MoE layers of more. A row of negative ids stands for a token whose
    experts the engine did not keep; it is not valid, and whoever trains on it decides (``rollout.replay_missing``).
    Raises ``WireError``, its line opening with ``name``, also where nothing was sent (None).
    """
    if text is None:
        raise WireError(
            f"{name}: no routed experts were sent; start SGLang with --enable-return-routed-experts and ask with "
            "return_routed_experts=true"
        )
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"{name}: routed experts are not base64: {error}") from error
    return from_int32(_array(raw, model, tokens, name, moe_alone), model, name)


def _array(raw: bytes, model: RoutedModel, tokens: int, name: str, moe_alone: bool) -> NDArray[np.int32]:
    """int32 [tokens - 1, L, k]: MoE layers only."""
    if tokens < 1:
        raise WireError(f"{name}: routed experts of {tokens} tokens")
    sent = model.layers if moe_alone else len(model.moe_pattern)
    row = model.top_k * WIRE_DTYPE.itemsize
    if len(raw) != (tokens - 1) * sent * row:
        ids, rest = divmod(len(raw), row)
        other = (tokens - 1) * model.layers * row == len(raw)
        raise WireError(
            f"{name}: routed experts are {len(raw)} bytes, {ids} times {model.top_k} ids"
            f"{f' and {rest} bytes' if rest else ''}; expected {tokens - 1} tokens (prompt + completion - 1) of "
            f"{sent} layers{'; pass moe_alone=True if the engine leaves dense layers out' if other else ''}"
        )
    values = np.frombuffer(raw, dtype=WIRE_DTYPE).reshape(tokens - 1, sent, model.top_k)
    return values if moe_alone else values[:, np.array(model.moe_pattern)]


def from_int32(values: NDArray[np.integer[Any]], model: RoutedModel, name: str = "request") -> Recording:
    """The record's form of signed ids [m, L, k] of the MoE layers. Raises ``WireError`` for ids that are no experts, or
    twice the same in a token."""
    if values.ndim != 3 or values.shape[1:] != (model.layers, model.top_k):
        raise WireError(f"{name}: routed experts {values.shape}, expected [m, {model.layers}, {model.top_k}]")
    valid: NDArray[np.bool_] = np.asarray((values >= 0).all(axis=(1, 2)))
    wrong = (values >= model.experts) | ((values < 0) & (values >= 0).any(axis=(1, 2), keepdims=True))
    if wrong.any():
        token, layer, at = (int(x[0]) for x in np.nonzero(wrong))
        raise WireError(
            f"{name}: token {token}, MoE layer {layer}: expert {int(values[token, layer, at])} of {model.experts}"
        )
    ordered = np.sort(values[valid], axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if twice.any():
        row, layer = (int(x[0]) for x in np.nonzero(twice))
        token = int(np.flatnonzero(valid)[row])
        raise WireError(f"{name}: token {token}, MoE layer {layer}: {values[token, layer].tolist()} names one twice")
    return Recording(np.where(valid[:, None, None], values, 0).astype(model.dtype), valid)


def encode(recording: Recording, model: RoutedModel) -> str:
    """SGLang's wire form of a recording: dense layers hold 0, unknown tokens -1."""
    values = np.zeros((len(recording.rows), len(model.moe_pattern), model.top_k), dtype=WIRE_DTYPE)
    values[:, np.array(model.moe_pattern)] = recording.rows
    values[~recording.valid] = -1
    return base64.b64encode(values.tobytes()).decode("ascii")


def routed_model(moe_pattern: Sequence[bool], top_k: int, experts: int) -> RoutedModel:
    """``RoutedModel`` of an HF configuration's fields (``models.hf_config.HFConfig``)."""
    return RoutedModel(tuple(bool(moe) for moe in moe_pattern), top_k, experts)
