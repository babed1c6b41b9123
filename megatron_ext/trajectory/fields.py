"""The words of the record: its enums, the arrays it consists of, and the error that names a bad one.

``record.py`` holds the batch itself and passes these names on; ``validation.py`` checks a batch against them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class RecordError(ValueError):
    """A batch that breaks an invariant; the message names trajectory, session and position."""


class Role(IntEnum):
    SYSTEM = 0
    USER = 1
    TOOL = 2
    MODEL = 3


class SessionKind(IntEnum):
    NORMAL = 0
    COMPRESS = 1
    SUBAGENT = 2


class Field(IntEnum):
    """What a token is part of; methods that weigh thinking and tool use apart read this."""

    OTHER = 0
    THINKING = 1
    TOOL_USE = 2
    TEXT = 3


class Status(IntEnum):
    """How a trajectory ended. Everything from ``ENV_ERROR`` on is masked and counted, never punished."""

    DONE = 0
    MAX_TURNS = 1
    MAX_CONTEXT = 2
    ENV_ERROR = 3
    ENV_DEADLINE = 4
    REWARD_INVALID = 5
    ABORTED = 6

    @property
    def trainable(self) -> bool:
        return self < Status.ENV_ERROR


TOKEN_DTYPES: dict[str, Any] = {
    "ids": np.int32,
    "loss_mask": np.bool_,
    "turn": np.int32,
    "field": np.int8,
    "rollout_logp": np.float32,
    "version": np.int64,
    "weight": np.float32,
}
TURN_DTYPES: dict[str, Any] = {
    "turn_role": np.int8,
    "turn_start": np.int64,
    "turn_end": np.int64,
    "turn_number": np.int32,
    "turn_state_key": np.int64,
    "turn_action_key": np.int64,
    "turn_reward": np.float32,
}
SESSION_DTYPES: dict[str, Any] = {"session_kind": np.int8, "session_parent": np.int32, "session_return": np.int64}
TRAJECTORY_DTYPES: dict[str, Any] = {"sample": np.int32, "reward": np.float32, "success": np.bool_, "status": np.int8}
OFFSETS = ("segment_tokens", "segment_turns", "session_segments", "trajectory_sessions", "group_trajectories")
DTYPES: dict[str, Any] = {
    **TOKEN_DTYPES,
    **TURN_DTYPES,
    **dict.fromkeys(OFFSETS, np.int64),
    **SESSION_DTYPES,
    **TRAJECTORY_DTYPES,
    "routed_valid": np.bool_,
}
MAP_DTYPES: dict[str, Any] = {"reward_parts": np.float32, "turn_labels": np.int16}
MAP_FIELDS = (*MAP_DTYPES, "prepared")
ROUTED_DTYPES = (np.dtype(np.uint8), np.dtype(np.uint16), np.dtype(np.uint32))
ARRAY_FIELDS = (*DTYPES, "routed")
TUPLE_FIELDS = ("trajectory_id", "harness", "group_id", "task_id")


def frozen(name: str, value: Any, dtype: Any) -> Array:
    """A read-only contiguous array of ``dtype`` (None: its own). One that is handed over whole is frozen in place,
    without a copy: the giver's later write fails loudly. A view of an array that can still be written is copied.

    Raises ``RecordError`` when an integer or boolean array would not keep every value (floats may round).
    """
    array = np.ascontiguousarray(value, dtype=dtype)
    if dtype is not None and array.dtype.kind in "iub":
        given = np.asarray(value)
        if given.dtype != array.dtype and not np.array_equal(given, array):
            bad = np.broadcast_to(given != array, array.shape)
            at = np.unravel_index(int(np.argmax(bad)), bad.shape)
            raise RecordError(f"{name}: {given[at]} at {', '.join(map(str, at))} is no {array.dtype} value")
    if _writable_behind(array):
        array = array.copy()
    array.flags.writeable = False
    return array


def _writable_behind(array: Array) -> bool:
    """Whether a view, itself read-only or not, shows memory that can be written through it or the arrays it is of."""
    if array.flags.owndata:
        return False
    view: Any = array
    while isinstance(view, np.ndarray):
        if view.flags.writeable:
            return True
        view = view.base
    return False
