"""Files of the store: shards that only ever grow, written by one writer each, and the marks of what was deleted.

Invariants (``tests/trajectory/test_shard.py`` asserts each):

1. ``create`` and ``append`` return after the data are durable (file, and folder for a new file). When they fail the
   shard is as it was, or there is none.
2. A shard is continued only by the process that made it, and only as long as it is as that process left it: never
   behind a torn tail, never after its end mark.
3. A deletion is durable when ``mark_deleted`` returns; a mark that was torn counts as not made and spoils no other.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import xxhash

from megatron_ext.trajectory.framing import END, Buffer, Message, Scanned

SUFFIX = ".arrows"
MARKS_SUFFIX = ".deleted"
_MARK = re.compile(rb"([0-9a-f]{16}) ([0-9a-f]{16}) ([0-9a-f]{16})\n")

Span = tuple[int, int]
"""Position and length of a message, in bytes."""


@dataclass(frozen=True)
class Shard:
    """A shard that this process may continue, as it left it."""

    path: Path
    size: int
    ended: bool
    process: int


def create(folder: Path, messages: Sequence[Message], limit: int) -> tuple[Shard, list[Span]]:
    """A new shard with its first messages, ended at once if they alone reach ``limit`` bytes. Raises ``OSError``."""
    path = folder / f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%S%f')}-{uuid.uuid4().hex[:12]}{SUFFIX}"
    schema = messages[0].schema
    spans, end = _spans(messages, len(schema))
    ended = end >= limit
    try:
        with path.open("xb", buffering=0) as file:
            _write_all(file.fileno(), [schema, *_parts(messages, ended)])
            os.fsync(file.fileno())
        sync_folder(folder)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return Shard(path, end + len(END) * ended, ended, os.getpid()), spans


def append(shard: Shard, messages: Sequence[Message], limit: int) -> tuple[Shard, list[Span]] | None:
    """The shard with more messages, made durable by one sync, and ended when they bring it to ``limit`` bytes; None
    when it must not go on.

    Raises ``OSError``.
    """
    if shard.ended or shard.process != os.getpid():
        return None
    spans, end = _spans(messages, shard.size)
    ended = end >= limit
    try:
        file = shard.path.open("r+b", buffering=0)
    except FileNotFoundError:
        return None
    with file:
        if file.seek(0, os.SEEK_END) != shard.size:
            return None
        try:
            _write_all(file.fileno(), _parts(messages, ended))
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # what cannot be cut off is seen to be torn
                file.truncate(shard.size)
            raise
    return Shard(shard.path, end + len(END) * ended, ended, shard.process), spans


def _spans(messages: Sequence[Message], at: int) -> tuple[list[Span], int]:
    """Where messages written one after another from ``at`` lie, and where the last one ends."""
    spans = []
    for message in messages:
        spans.append((at, message.length))
        at += message.length
    return spans, at


def _parts(messages: Sequence[Message], ended: bool) -> list[Buffer]:
    return [*(part for message in messages for part in message.parts), *([END] if ended else [])]


def end(path: Path, size: int) -> None:
    """Cuts a shard that nobody writes to its first ``size`` bytes and ends it there."""
    with path.open("r+b", buffering=0) as file:
        file.truncate(size)
        file.seek(size)
        _write_all(file.fileno(), [END])
        os.fsync(file.fileno())


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Scanned]:
    """The bytes of a file, as it is now."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_all(handle: int, parts: list[Buffer]) -> None:
    """Writes all parts; a short write is continued, so that it ends in success or in the error that stopped it."""
    for part in parts:
        view = memoryview(part)
        while view.nbytes:
            view = view[os.write(handle, view) :]


# -- deletions ------------------------------------------------------------------------------------------------------
def marks_of(shard: Path) -> Path:
    return shard.with_name(shard.name + MARKS_SUFFIX)


def deleted(shard: Path) -> frozenset[Span]:
    """Messages of a shard that are marked as deleted."""
    try:
        data = marks_of(shard).read_bytes()
    except FileNotFoundError:
        return frozenset()
    spans = ((int(m[1], 16), int(m[2], 16), m[3]) for m in _MARK.finditer(data))
    return frozenset((at, length) for at, length, check in spans if check == _mark(at, length)[1])


def mark_deleted(shard: Path, span: Span) -> None:
    """Makes the deletion of a message durable. Raises ``OSError``."""
    path = marks_of(shard)
    new = not path.exists()
    with path.open("ab", buffering=0) as file:
        _write_all(file.fileno(), [b" ".join(_mark(*span)) + b"\n"])
        os.fsync(file.fileno())
    if new:
        sync_folder(path.parent)


def _mark(at: int, length: int) -> tuple[bytes, bytes]:
    text = f"{at:016x} {length:016x}".encode()
    return text, xxhash.xxh3_64_hexdigest(text).encode()


def remove(shard: Path) -> None:
    """Removes a shard, then its marks: never the other way round, which would bring back what was deleted."""
    shard.unlink(missing_ok=True)
    marks_of(shard).unlink(missing_ok=True)
