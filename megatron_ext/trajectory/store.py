"""Store of finished groups on disk: a folder of append-only Arrow files.

Invariants (``tests/trajectory/test_store.py`` asserts each):

1. Round trip is exact, bit for bit, dtypes included.
2. A reference is returned only after the data are durable; it points to the same data until they are deleted, whoever
   writes that group again.
3. Data that changed on disk are never returned: every read checks every byte. What else is in the file stays readable,
   before and behind the damage.
4. A write that failed or was killed leaves everything before it as it was; nothing is ever written behind its remains.
5. A deletion is durable. A shard goes when it has ended and everything in it was deleted.
6. Any number of processes may use one folder at once; each writes to shards of its own.
7. Shards are Arrow IPC streams that stock tools open: a row a trajectory (``columns.py`` lists the columns).

Reads map the file: arrays of the batch are views of it (read-only) and cost memory only where they are touched. They
stay valid after the shard was deleted. ``framing.py`` says how damage is found, ``shard.py`` how files are written.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NewType

from megatron_ext.trajectory import shard as files
from megatron_ext.trajectory.columns import Groups, from_arrow, to_arrow
from megatron_ext.trajectory.framing import (
    END,
    FramingError,
    Message,
    decode,
    encode,
    intact,
    read_header,
    scan,
    schema_message,
)
from megatron_ext.trajectory.record import RecordError, TrajectoryBatch

SHARD_BYTES = 256 << 20
_REF = re.compile(rf"([\w-]+{re.escape(files.SUFFIX)})@(\d+)\+([1-9]\d*)")


class StoreError(RuntimeError):
    """Data that cannot be written or read back; the message names the file."""


Ref = NewType("Ref", str)
"""Where a batch lies: ``shard@position+length`` within the store's folder. A string, so that metadata can carry it."""


class TrajectoryStore:
    """A folder of shards. ``shard_bytes``: a shard that has grown to this size is ended, and a new one begun.

    Batches of one schema (names of rewards and labels, routing recorded or not) share a shard.
    """

    def __init__(self, folder: Path | str, shard_bytes: int = SHARD_BYTES) -> None:
        if shard_bytes <= 0:
            raise ValueError(f"shard_bytes must be > 0, got {shard_bytes}")
        self.folder = Path(folder)
        self._shard_bytes = shard_bytes
        self._shards: dict[bytes, files.Shard] = {}  # by schema
        self._lock = threading.Lock()
        with _refused(self.folder, "store: cannot make the folder"):
            new = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in new:
                files.sync_folder(path.parent)

    def write(self, batch: TrajectoryBatch) -> Ref:
        """Makes a batch (usually one group) durable. Raises ``StoreError``, on a full disk too."""
        return self.write_many([batch])[0]

    def write_many(self, batches: Sequence[TrajectoryBatch]) -> list[Ref]:
        """``write`` for several batches, with one sync for those of one schema. When it fails none has a reference."""
        messages: list[Message] = []
        for batch in batches:
            try:
                rows, groups = to_arrow(batch)
            except RecordError as error:
                raise StoreError(f"{self.folder}: not written: {error}") from error
            messages.append(encode(rows, groups.to_json()))
        places: dict[bytes, list[int]] = {}
        for index, message in enumerate(messages):
            places.setdefault(message.schema, []).append(index)
        refs: dict[int, Ref] = {}
        with self._lock, _refused(self.folder, "not written"):
            for schema, members in places.items():
                group = [messages[index] for index in members]
                # A failure forgets the shard: nothing is written behind what it may have left.
                shard = self._shards.pop(schema, None)
                grown = files.append(shard, group, self._shard_bytes) if shard is not None else None
                shard, spans = grown or files.create(self.folder, group, self._shard_bytes)
                if not shard.ended:
                    self._shards[schema] = shard
                for index, (at, length) in zip(members, spans, strict=True):
                    refs[index] = Ref(f"{shard.path.name}@{at}+{length}")
        return [refs[index] for index in range(len(messages))]

    def read(self, ref: Ref) -> TrajectoryBatch:
        """The batch exactly as written. Raises ``StoreError`` when it is missing, was deleted or was damaged."""
        place = _parse(ref)
        if place is None:
            raise StoreError(f"{self.folder}: {ref!r} cannot be read: it is no reference of this store")
        name, at, length = place
        path = self.folder / name
        with _refused(path, "cannot be read"):
            if (at, length) in files.deleted(path):
                raise StoreError(f"{path}: {ref} was deleted")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < at + length:
                    raise StoreError(f"{path}: {ref} was cut short: the file ends at byte {size}")
                data = mmap.mmap(file.fileno(), at + length, access=mmap.ACCESS_READ)
        try:
            rows, about = decode(memoryview(data)[at:], schema_message(data))
            return from_arrow(rows, Groups.from_json(about))
        except (FramingError, RecordError) as error:
            raise StoreError(f"{path}: {ref}: {error}") from error

    def exists(self, ref: Ref) -> bool:
        """Whether a batch is there, whole and not deleted. Its data are checked when they are read."""
        place = _parse(ref)
        if place is None:
            return False
        name, at, length = place
        path = self.folder / name
        with _refused(path, "cannot be read"):
            try:
                if (at, length) in files.deleted(path):
                    return False
                with files.mapped(path) as data:
                    header = read_header(data, at)
                    return header is not None and header.length == length and at + length <= len(data)
            except FileNotFoundError:
                return False

    def delete(self, ref: Ref) -> bool:
        """Removes a batch; False when it was gone already (deleting again after a crash is no error)."""
        place = _parse(ref)
        if place is None or not self.exists(ref):
            return False
        name, at, length = place
        path = self.folder / name
        with _refused(path, "not deleted"):
            files.mark_deleted(path, (at, length))
            if _is_spent(path):
                files.remove(path)
        return True

    def list(self) -> list[Ref]:
        """References of everything stored, shard by shard in the order of writing."""
        return [Ref(f"{path.name}@{at}+{length}") for path in self._paths() for at, length in _live(path)]

    def sweep(self) -> int:
        """Tidies up after killed writers: ends their shards behind the last whole batch, and removes those that hold
        nothing any more. Call it only while nobody writes; returns how many files were cut or removed."""
        changed = 0
        with self._lock:
            self._shards.clear()
            for path in self._paths():
                with _refused(path, "not swept"):
                    size = path.stat().st_size
                    whole = _whole_bytes(path)
                    if whole:
                        files.end(path, whole)
                    if whole == 0 or not _live(path):
                        files.remove(path)
                        changed += 1
                    elif whole is not None:
                        changed += whole < size
            for marks in self.folder.glob(f"*{files.SUFFIX}{files.MARKS_SUFFIX}"):
                if not marks.with_suffix("").exists():
                    marks.unlink(missing_ok=True)
        return changed

    def _paths(self) -> Iterator[Path]:
        return iter(sorted(self.folder.glob(f"*{files.SUFFIX}")))


def _parse(ref: Ref) -> tuple[str, int, int] | None:
    found = _REF.fullmatch(ref)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


@contextlib.contextmanager
def _refused(path: Path, what: str) -> Iterator[None]:
    """Names the file in what the operating system says."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "the disk is full; free space and go on" if full else str(error.strerror)
        raise StoreError(f"{path}: {what}: {advice}") from error


def _live(path: Path) -> list[files.Span]:
    """What a shard holds and was not deleted; nothing when another process just removed it."""
    try:
        gone = files.deleted(path)
        with files.mapped(path) as data:
            return [(at, header.length) for at, header in scan(data) if (at, header.length) not in gone]
    except FileNotFoundError:
        return []


def _is_spent(path: Path) -> bool:
    """Whether a shard has ended and all its bytes were deleted: only then nobody writes to it any more."""
    with files.mapped(path) as data:
        if data[-len(END) :] != END:
            return False
        held = len(data) - len(schema_message(data)) - len(END)
    return sum(length for _, length in files.deleted(path)) == held


def _whole_bytes(path: Path) -> int | None:
    """Bytes of a shard without its end mark up to the end of the last whole batch; None when it has ended."""
    with files.mapped(path) as data:
        found = list(scan(data))
        whole = max((at + header.length for at, header in found), default=0)
        if found and data[whole:] == END:
            return None
        # only the last write can have been torn: the one before it was durable when it began
        if found and not intact(data, *found[-1]):
            whole = found[-1][0]
    return whole
