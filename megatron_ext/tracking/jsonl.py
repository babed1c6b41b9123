"""``metrics.jsonl``: one JSON object a step, ``{"step": 3, "reward/mean": 0.4, ...}``.

Invariants (``tests/tracking/test_contract.py`` and ``test_jsonl.py`` assert each):

1. Every step is on disk when ``log`` returns, as one line; a second ``log`` of the same step joins that line.
2. Steps only grow. On resume the lines of later, undone steps are dropped in one atomic replacement of the file.
3. A line torn by a crash is dropped when the file is opened again; other damage is an error that names the line.
4. Values that are not finite are written as null, so that every line is valid JSON.
5. A full disk is a ``MetricsFileError``; the steps before the refused one can still be read.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

FILE_NAME = "metrics.jsonl"


class MetricsFileError(ValueError):
    """A metrics file that cannot be read or written, or a step out of order."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, in order. A last line without its newline (a crash while writing) is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise MetricsFileError(
                f"{path}, line {number}: not JSON ({error.msg}); restore or delete the line"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise MetricsFileError(f"{path}, line {number}: no integer 'step'; restore or delete the line")
        rows.append(row)
    return rows


class JsonlTracker:
    """Appends to ``<run_dir>/metrics.jsonl``."""

    def __init__(self) -> None:
        self._file: FileIO | None = None
        self._last: dict[str, Any] = {}
        self._last_at = 0

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        path = run_dir / FILE_NAME
        last = -1 if resumed_from is None else resumed_from
        kept = [row for row in read_metrics(path) if row["step"] <= last] if path.exists() else []
        partial = path.with_name(f".{FILE_NAME}.partial")
        with partial.open("wb") as file:
            for row in kept:
                file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        self._file = path.open("r+b", buffering=0)  # unbuffered: what a full disk refuses must not be tried again
        self._last = kept[-1] if kept else {}
        self._last_at = self._file.seek(0, os.SEEK_END) - (len(_line(self._last)) if kept else 0)

    def phase(self, name: str, total: int | None = None) -> None:
        """Phases are not recorded; their durations are metrics (``time/<phase>``)."""

    def advance(self, done: int, note: str = "") -> None:
        """Progress is not recorded."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        file = self._open()
        if self._last and step < self._last["step"]:
            raise MetricsFileError(f"metrics of step {step} after those of step {self._last['step']}")
        if not self._last or step > self._last["step"]:
            self._last_at, self._last = file.seek(0, os.SEEK_END), {"step": step}
        self._last |= {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        # A joined line is longer than the one it replaces, or as long: writing over it leaves nothing behind.
        file.seek(self._last_at)
        view = memoryview(_line(self._last))
        try:
            while view.nbytes:
                view = view[file.write(view) :]
            file.truncate()
        except OSError as error:
            raise MetricsFileError(
                f"{file.name}: step {step} not written: {error.strerror}; free space and continue the run"
            ) from error

    def finish(self, summary: Mapping[str, Any]) -> None:
        file = self._open()
        os.fsync(file.fileno())
        file.close()
        self._file = None

    def _open(self) -> FileIO:
        if self._file is None:
            raise RuntimeError("the metrics file is not open: call start() first")
        return self._file


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
