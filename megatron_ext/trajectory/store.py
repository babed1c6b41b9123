"""Store of finished groups on disk: write, read, delete, list.

Invariants (``tests/trajectory/test_store.py`` asserts each):

1. Round trip is exact, bit for bit, dtypes included.
2. A reference is returned only after the data are durable (file and folder synced); a file appears whole or not at all.
3. Data that changed on disk are never returned: every read checks length and checksum.
4. A failed write leaves no file behind and everything written before as it was.
5. A name is never used for two contents: it ends in the checksum, so a late second writer of a group cannot replace
   what a reference already points to.

File: magic, length and CRC-32 of the header, CRC-32 of the data, the header (JSON: strings, and name, dtype, shape and
offset of each array), then the arrays as they lie in memory, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NewType
from urllib.parse import quote, unquote

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.record import ARRAY_FIELDS, TUPLE_FIELDS, RecordError, TrajectoryBatch

MAGIC = b"MXTRAJ1\n"
_FIXED = struct.Struct("<8sQLL")  # magic, header bytes, header crc, payload crc
_ALIGN = 64
_SUFFIX = ".group"
_TEMP = ".writing-"
_MAPS = ("reward_parts", "turn_labels")
_MAX_NAME = 200


class StoreError(RuntimeError):
    """Data that cannot be written or read back; the message names the file."""


Ref = NewType("Ref", str)
"""Where a batch lies: a file name inside the store's folder. A string, so that metadata can carry it."""


def group_of(ref: Ref) -> str:
    """Id of the (first) group that a reference points to."""
    return unquote(ref.removesuffix(_SUFFIX).rsplit("-", 1)[0])


class TrajectoryStore:
    """A folder of groups. Several processes may write to one folder; each file has one writer."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"store {self.folder}: cannot make the folder: {error.strerror}") from error

    def write(self, batch: TrajectoryBatch) -> Ref:
        """Makes a batch (usually one group) durable. Raises ``StoreError`` on a full disk; nothing is left behind."""
        if batch.num_groups == 0:
            raise StoreError("store: a batch without groups has no name")
        parts, checksum = _encode(batch)
        stem = quote(batch.group_id[0], safe="")
        if len(stem) > _MAX_NAME:
            raise StoreError(f"store: group id of {len(stem)} characters is too long for a file name: {stem[:40]}...")
        name = f"{stem}-{checksum:08x}{_SUFFIX}"
        path, temp = self.folder / name, self.folder / f"{_TEMP}{uuid.uuid4().hex}"
        try:
            with temp.open("wb", buffering=0) as file:
                _write_all(file.fileno(), parts)
                os.fsync(file.fileno())
            temp.replace(path)
            self._sync_folder()
        except OSError as error:
            temp.unlink(missing_ok=True)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "the disk is full; free space and go on" if full else str(error.strerror)
            raise StoreError(f"{path}: not written: {advice}") from error
        return Ref(name)

    def read(self, ref: Ref) -> TrajectoryBatch:
        """The batch exactly as written. Raises ``StoreError`` when it is missing or was damaged."""
        path = self.folder / ref
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
        try:
            return _decode(data)
        except (RecordError, StoreError) as error:
            raise StoreError(f"{path}: {error}") from error

    def exists(self, ref: Ref) -> bool:
        return (self.folder / ref).is_file()

    def delete(self, ref: Ref) -> bool:
        """Removes a batch; False when it was gone already (deleting again after a crash is no error)."""
        try:
            (self.folder / ref).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreError(f"{self.folder / ref}: not deleted: {error.strerror}") from error
        return True

    def list(self) -> list[Ref]:
        """References of everything stored, by name."""
        return sorted(Ref(path.name) for path in self.folder.glob(f"*{_SUFFIX}"))

    def sweep(self) -> int:
        """Removes what killed writers left half-written. Call it only while nobody writes; returns how many."""
        left = list(self.folder.glob(f"{_TEMP}*"))
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def _sync_folder(self) -> None:
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


Buffer = bytes | memoryview


def _write_all(handle: int, parts: list[Buffer]) -> None:
    """Writes all parts; a short write is continued, so that it ends in success or in the error that stopped it."""
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            view = view[os.write(handle, view) :]


def _arrays(batch: TrajectoryBatch) -> dict[str, NDArray[Any]]:
    found = {name: getattr(batch, name) for name in ARRAY_FIELDS}
    arrays = {name: array for name, array in found.items() if array is not None}
    for group in _MAPS:
        values: Mapping[str, NDArray[Any]] = getattr(batch, group)
        arrays |= {f"{group}/{key}": value for key, value in values.items()}
    return arrays


def _encode(batch: TrajectoryBatch) -> tuple[list[Buffer], int]:
    """The file as parts to write in order, and the checksum that names it."""
    entries, payload, position, payload_crc = [], [], 0, 0
    for name, array in _arrays(batch).items():
        pad = -position % _ALIGN
        data: Buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
        entries.append([name, array.dtype.str, list(array.shape), position + pad])
        for part in (bytes(pad), data):
            payload.append(part)
            payload_crc = zlib.crc32(part, payload_crc)
        position += pad + array.nbytes
    strings = {name: list(getattr(batch, name)) for name in TUPLE_FIELDS}
    header = json.dumps({"arrays": entries, "strings": strings, "bytes": position}).encode()
    header += b" " * (-(_FIXED.size + len(header)) % _ALIGN)
    header_crc = zlib.crc32(header)
    fixed = _FIXED.pack(MAGIC, len(header), header_crc, payload_crc)
    return [fixed + header, *payload], zlib.crc32(fixed)


def _decode(data: bytes) -> TrajectoryBatch:
    if len(data) < _FIXED.size:
        raise StoreError(f"cut short: {len(data)} bytes")
    magic, size, header_crc, payload_crc = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise StoreError(f"not a trajectory file (starts with {magic!r})")
    start = _FIXED.size + size
    header = data[_FIXED.size : start]
    if len(header) != size or zlib.crc32(header) != header_crc:
        raise StoreError("the header is damaged")
    meta = json.loads(header)
    payload = memoryview(data)[start:]
    if payload.nbytes != meta["bytes"]:
        raise StoreError(f"cut short: {payload.nbytes} of {meta['bytes']} bytes")
    if zlib.crc32(payload) != payload_crc:
        raise StoreError("the data are damaged (checksum differs)")
    values: dict[str, Any] = {name: tuple(entries) for name, entries in meta["strings"].items()}
    maps: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in _MAPS}
    for name, code, shape, offset in meta["arrays"]:
        dtype = np.dtype(code)
        count = int(np.prod(shape))
        array = np.frombuffer(payload, dtype=dtype, count=count, offset=offset if count else 0).reshape(shape)
        group, _, key = name.partition("/")
        if group in maps:
            maps[group][key] = array
        else:
            values[name] = array
    values |= maps
    return TrajectoryBatch(**values)
