"""Stdout of the commands: clean for ``--json`` (JSON lines there, everything else on stderr), and readers that leave.

Invariant (``tests/launch/test_output.py``): inside ``json_lines`` whatever this process, its libraries or its children
write to file descriptor 1 goes to stderr; only the writer reaches the real stdout, one object a line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

Write = Callable[[Mapping[str, Any]], None]


def printing(command: Callable[[], int]) -> int:
    """The exit status of a command that prints; 0 where who reads has seen enough (``| head``)."""
    try:
        status = command()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered is written at exit
        return 0
    return status


@contextmanager
def json_lines() -> Iterator[Write]:
    """Redirects descriptor 1 to stderr and yields a writer of JSON objects to the real stdout."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(real), "w", encoding="utf-8") as stream, redirect_stdout(sys.stderr):

            def write(value: Mapping[str, Any]) -> None:
                # NaN and infinity are not JSON: a number that could not be measured must not pass for one.
                stream.write(json.dumps(value, allow_nan=False) + "\n")
                stream.flush()

            yield write
    finally:
        os.dup2(real, 1)
        os.close(real)
