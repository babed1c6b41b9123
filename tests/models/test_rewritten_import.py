"""Invariants of ``megatron_ext/models/rewritten_import.py``."""

from __future__ import annotations

import importlib
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_ext.models.rewritten_import import BytecodeCache, RewritingFinder


def test_the_package_alone_runs_its_rewritten_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 1, and 2: the second import takes the code from the cache."""
    for name in ("rewritten", "rewritten_not"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "part.py").write_text("old = 1\nplace = __file__\ndef fails():\n    raise KeyError(old)\n")
    seen = []

    def rewrite(name: str, source: str) -> str:
        seen.append(name)
        return source.replace("old = 1", "old = given + 1")

    cache = BytecodeCache(tmp_path / "cache")
    monkeypatch.setattr(sys, "meta_path", [RewritingFinder("rewritten", rewrite, {"given": 41}, cache), *sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    for again in (False, True):
        for name in ("rewritten", "rewritten.part", "rewritten_not", "rewritten_not.part"):
            sys.modules.pop(name, None)
        part, other = importlib.import_module("rewritten.part"), importlib.import_module("rewritten_not.part")
        assert (part.old, other.old, part.place) == (42, 1, str(tmp_path / "rewritten" / "part.py")), again
        with pytest.raises(KeyError) as error:
            part.fails()
        assert (error.traceback[-1].path, error.traceback[-1].lineno) == (Path(part.place), 3)
    assert seen == ["rewritten", "rewritten.part"]


def test_cache_keys_by_content_and_survives_concurrency_and_damage(tmp_path: Path) -> None:  # invariant 2
    cache = BytecodeCache(tmp_path / "cache")
    code = compile("x = 1", "m.py", "exec")
    assert cache.load("m", b"x = 1") is None
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: cache.save("m", b"x = 1", code), range(64)))
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 1, "temporary files stay behind"
    namespace: dict[str, int] = {}
    loaded = cache.load("m", b"x = 1")
    assert loaded is not None
    exec(loaded, namespace)
    assert namespace["x"] == 1
    assert cache.load("m", b"x = 2") is None
    assert BytecodeCache(tmp_path / "cache", salt=b"other rules").load("m", b"x = 1") is None
    files[0].write_bytes(files[0].read_bytes()[:-1])
    assert cache.load("m", b"x = 1") is None


def test_an_unwritable_cache_says_so_once(tmp_path: Path) -> None:  # invariant 3
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache = BytecodeCache(blocked / "cache")
    with pytest.warns(UserWarning, match="not writable"):
        cache.save("m", b"", compile("", "m.py", "exec"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.save("m", b"", compile("", "m.py", "exec"))
