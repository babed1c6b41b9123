"""Messages of an Arrow IPC stream that can be checked: what a shard of the store consists of.

Invariants (``tests/trajectory/test_framing.py`` asserts each):

1. A shard is a plain Arrow IPC stream: a schema message, record batch messages, at last an end mark. Stock readers read
   it up to where it was torn, if it was.
2. Any changed byte of a record batch message is found, and any of the schema it was written under.
3. Scanning finds every whole message, whatever is wrong with others: a damaged one is stepped over.

The check stands in the message's own metadata, behind ``MARK``: sizes, checksums and a JSON text, so that a scan reads
only headers. Checksums are XXH3: 64 bits of header and schema, 128 bits of the body.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import xxhash

Buffer = bytes | memoryview
Scanned = bytes | mmap.mmap
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
MARK = "§megatron_ext:".encode()  # the text behind it is ASCII, so that it cannot hold a second one
_CONTINUED = END[:4]
_PREFIX = struct.Struct("<4si")  # continuation mark, bytes of metadata
_LARGEST_HEADER = 1 << 28
_CHECK = re.compile(MARK + rb"([0-9a-f]{16})([0-9a-f]{16})([0-9a-f]{32})([0-9a-f]{16})([0-9a-f]{16})")
_KEY = "megatron_ext"


class FramingError(ValueError):
    """Bytes that are no whole, unchanged message."""


@dataclass(frozen=True)
class Header:
    """A message's checked header: bytes of the header and of all, checksums of schema and body, and its JSON value."""

    size: int
    length: int
    schema: int
    body: str
    about: Any


@dataclass(frozen=True)
class Message:
    """A message to write: ``schema`` (the bytes a shard must start with), then ``parts`` of ``length`` bytes in all."""

    schema: bytes
    parts: list[Buffer]
    length: int


class _Parts:
    """A file that keeps what is written to it, without copying."""

    closed = False

    def __init__(self) -> None:
        self.parts: list[Buffer] = []

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        self.parts.append(view)
        return view.nbytes

    def flush(self) -> None:
        pass


def _check(schema: int, header: int, body: str, length: int, about: bytes) -> bytes:
    return MARK + f"{schema:016x}{header:016x}{body}{length:016x}{len(about):016x}".encode() + about


def encode(rows: pa.RecordBatch, about: Any) -> Message:
    """The message of these rows; ``about`` is a JSON value that travels in its header. Bodies are not copied."""
    text = json.dumps(about).encode()
    schema = rows.schema.serialize().to_pybytes()
    schema_sum = xxhash.xxh3_64_intdigest(schema)
    blank = _check(schema_sum, 0, "0" * 32, 0, text)
    sink = _Parts()
    writer = pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), rows.schema)
    writer.write_batch(rows, custom_metadata={_KEY: blank})
    cut, seen = 0, 0
    while seen < len(schema):
        seen += memoryview(sink.parts[cut]).nbytes
        cut += 1
    head = b"".join(sink.parts[cut : cut + 3])  # continuation mark, size, metadata
    body = sink.parts[cut + 3 :]
    if b"".join(sink.parts[:cut]) != schema or len(head) != _header_size(head, 0) or head.count(blank) != 1:
        raise FramingError(f"pyarrow {pa.__version__} writes a stream in other pieces than expected")
    body_sum, body_size = xxhash.xxh3_128(), 0
    for part in body:
        body_sum.update(part)
        body_size += memoryview(part).nbytes
    length = len(head) + body_size
    known = head.replace(blank, _check(schema_sum, 0, body_sum.hexdigest(), length, text))
    check = _check(schema_sum, xxhash.xxh3_64_intdigest(known), body_sum.hexdigest(), length, text)
    return Message(schema, [head.replace(blank, check), *body], length)


def _header_size(data: Buffer | mmap.mmap, at: int) -> int | None:
    """Bytes of the header that starts at ``at``, as its prefix has it; None where no header can start."""
    prefix = bytes(data[at : at + _PREFIX.size])
    if len(prefix) < _PREFIX.size:
        return None
    mark, size = _PREFIX.unpack(prefix)
    return _PREFIX.size + size if mark == _CONTINUED and 0 < size <= _LARGEST_HEADER else None


def read_header(data: Buffer | mmap.mmap, at: int) -> Header | None:
    """The header of the record batch message at byte ``at`` of ``data``; None unless it is there and unchanged."""
    size = _header_size(data, at)
    if size is None or at + size > len(data):
        return None
    head = bytes(data[at : at + size])
    found = _CHECK.search(head)
    if found is None:
        return None
    schema, header, length, chars = (int(found[i], 16) for i in (1, 2, 4, 5))
    about = head[found.end() : found.end() + chars]
    blank = head[: found.start(2)] + b"0" * 16 + head[found.end(2) :]
    if xxhash.xxh3_64_intdigest(blank) != header:
        return None
    return Header(size, length, schema, found[3].decode(), json.loads(about))


def schema_message(data: Buffer | mmap.mmap) -> bytes:
    """The schema message that a shard starts with. Raises ``FramingError`` when it is cut short."""
    size = _header_size(data, 0)
    if size is None or size > len(data):
        raise FramingError("the schema at its start is damaged or cut short")
    return bytes(data[:size])


def decode(data: memoryview, schema: bytes) -> tuple[pa.RecordBatch, Any]:
    """Rows and JSON value of the one message that ``data`` is; the rows share its memory. Every byte is checked.

    Raises ``FramingError``.
    """
    header = read_header(data, 0)
    if header is None or header.length != data.nbytes:
        raise FramingError("the header is damaged")
    if xxhash.xxh3_128_hexdigest(data[header.size :]) != header.body:
        raise FramingError("the data are damaged (checksum differs)")
    if xxhash.xxh3_64_intdigest(schema) != header.schema:
        raise FramingError("the schema of the shard is damaged (checksum differs)")
    message = pa.ipc.read_message(pa.py_buffer(data))
    return pa.ipc.read_record_batch(message, pa.ipc.read_schema(pa.py_buffer(schema))), header.about


def intact(data: Scanned, at: int, header: Header) -> bool:
    """Whether the body of the message at ``at`` is what was written."""
    with memoryview(data) as view, view[at + header.size : at + header.length] as body:
        return xxhash.xxh3_128_hexdigest(body) == header.body


def scan(data: Scanned) -> Iterator[tuple[int, Header]]:
    """Position and header of every record batch message whose header is unchanged and whose body is all there."""
    at = _header_size(data, 0) or 0  # behind the schema
    if read_header(data, at) is None:
        at = _PREFIX.size  # the schema itself may be damaged
    while at < len(data):
        header = read_header(data, at)
        if header is None:
            at, header = _next(data, at)
        if header is None:
            return
        if at + header.length <= len(data):
            yield at, header
        at += header.length


def _next(data: Scanned, at: int) -> tuple[int, Header | None]:
    """The first message behind ``at`` that has an unchanged header, which its mark gives away."""
    mark = data.find(MARK, at)
    while mark >= 0:
        start = data.rfind(_CONTINUED, at, mark)
        while start >= max(at, mark - _LARGEST_HEADER):
            header = read_header(data, start)
            if header is not None:
                return start, header
            start = data.rfind(_CONTINUED, at, start)
        mark = data.find(MARK, mark + 1)
    return len(data), None
