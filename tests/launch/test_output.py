"""stdout holds JSON lines only, whoever else writes to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import os, subprocess, sys
from launch.output import json_lines
with json_lines() as write:
    print("printed")
    os.write(1, b"written\\n")
    subprocess.run(["echo", "child"], check=True)
    write({"a": 1})
    write({"b": "x"})
print("after")
"""


def test_only_the_writer_reaches_stdout(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [json.loads(line) for line in lines] == [{"a": 1}, {"b": "x"}]
    assert last == "after"
    assert {"printed", "written", "child"} <= set(done.stderr.splitlines())


def test_what_is_no_number_is_no_json(root: Path) -> None:
    script = "from launch.output import json_lines\nwith json_lines() as write: write({'a': float('nan')})"
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0 and done.stdout == ""


def test_a_reader_that_leaves_is_no_error(root: Path) -> None:
    script = "from launch.output import printing\nraise SystemExit(printing(lambda: print('line\\n' * 100_000) or 3))"
    done = subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert done.stdout is not None and done.stderr is not None
    assert done.stdout.readline() == b"line\n"
    done.stdout.close()
    assert done.wait(timeout=300) == 0 and done.stderr.read() == b""
    done.stderr.close()
