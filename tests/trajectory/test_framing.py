"""The numbered invariants of ``trajectory/framing.py``."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from megatron_ext.trajectory.framing import (
    END,
    MARK,
    FramingError,
    Message,
    decode,
    encode,
    intact,
    read_header,
    scan,
    schema_message,
)


def rows(seed: int) -> pa.RecordBatch:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-1, 1, 40)  # whole runs of 0xff, as headers start
    return pa.RecordBatch.from_pydict({"a": numbers, "b": [f"{seed}", None] * 20})


ABOUT = [{"n": seed, "text": MARK.decode() * 2} for seed in range(4)]
MESSAGES: list[Message] = [encode(rows(seed), ABOUT[seed]) for seed in range(4)]
STARTS = np.cumsum([len(MESSAGES[0].schema), *(m.length for m in MESSAGES)]).tolist()


def joined() -> bytes:
    return MESSAGES[0].schema + b"".join(bytes(part) for m in MESSAGES for part in m.parts)


def found(data: bytes) -> list[int]:
    """Which of the four messages a scan finds."""
    places = [STARTS.index(at) for at, _ in scan(data)]
    assert places == sorted(set(places))
    return places


def test_stock_readers_read_it_with_and_without_an_end() -> None:  # invariant 1
    for data in (joined(), joined() + END):
        table = pa.ipc.open_stream(data).read_all()
        assert table.equals(pa.Table.from_batches([rows(seed) for seed in range(4)]))
    torn = pa.ipc.open_stream(joined()[:-1])
    assert [torn.read_next_batch().equals(rows(seed)) for seed in range(3)] == [True] * 3
    with pytest.raises(OSError, match="Expected to be able to read"):
        torn.read_next_batch()


def test_encoding_shares_memory_and_says_its_size() -> None:
    numbers = np.arange(10_000)
    message = encode(pa.RecordBatch.from_pydict({"a": numbers}), None)
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), numbers) for part in message.parts)
    assert sum(memoryview(part).nbytes for part in message.parts) == message.length
    assert message.length % 8 == len(message.schema) % 8 == 0, "aligned in the file"


def test_every_changed_byte_is_found() -> None:  # invariant 2
    message = MESSAGES[1]
    good = b"".join(bytes(part) for part in message.parts)
    again, about = decode(memoryview(good), message.schema)
    assert again.equals(rows(1)) and about == ABOUT[1]
    rng = np.random.default_rng(0)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(FramingError, match="damaged"):
            decode(memoryview(bytes(bad)), message.schema)
    for at in range(len(message.schema)):
        bad = bytearray(message.schema)
        bad[at] ^= 1 << int(rng.integers(8))
        with pytest.raises(FramingError, match="the schema of the shard is damaged"):
            decode(memoryview(good), bytes(bad))
    for cut in (good[:-1], good + b"\0", good[:100], b""):
        with pytest.raises(FramingError, match="the header is damaged"):
            decode(memoryview(cut), message.schema)
    with pytest.raises(FramingError, match="the schema at its start is damaged or cut short"):
        schema_message(message.schema[:-1])


def test_a_scan_finds_what_is_whole_wherever_it_was_cut() -> None:  # invariant 3
    data = joined()
    assert found(data) == found(data + END) == [0, 1, 2, 3]
    for size in range(len(data)):
        assert found(data[:size]) == [n for n in range(4) if STARTS[n + 1] <= size]
        zeros = data[:size] + bytes(len(data) - size)  # what a crash leaves when only the size was written
        whole = [n for n in range(4) if STARTS[n + 1] <= size]
        assert found(zeros)[: len(whole)] == whole
        for at, header in scan(zeros):
            n = STARTS.index(at)
            assert intact(zeros, at, header) == (zeros[at : at + header.length] == data[at : STARTS[n + 1]])


def test_a_scan_steps_over_damage() -> None:  # invariant 3
    data = joined()
    header = read_header(data, STARTS[1])
    assert header is not None
    for at in range(STARTS[1], STARTS[1] + header.size):
        bad = bytearray(data)
        bad[at] ^= 0x55
        assert found(bytes(bad)) == [0, 2, 3]
    for at in (*range(len(MESSAGES[0].schema)), *range(STARTS[1] + header.size, STARTS[2])):
        bad = bytearray(data)
        bad[at] ^= 0x55
        assert found(bytes(bad)) == [0, 1, 2, 3], "bodies are checked when they are read"
