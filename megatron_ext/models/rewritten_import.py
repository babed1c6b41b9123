"""Imports a package from rewritten source text, with the compiled code cached on disk. How is the caller's business.

Invariants (``tests/models/test_rewritten_import.py``):

1. Modules of the package, and no others, run their rewritten source, with the names that the caller gives in their
   namespace; line numbers and file names are those of the original.
2. Compiled code is cached by the content of the source, the caller's salt and the interpreter. Files appear by rename,
   so that concurrent processes see a whole file or none; a damaged one is compiled anew.
3. A cache that cannot be written costs time alone, and says so once.
"""

from __future__ import annotations

import hashlib
import importlib.abc
import importlib.util
import marshal
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path

Rewrite = Callable[[str, str], str]  # a module's name and its source -> the source to run


class BytecodeCache:
    """Code objects on disk, one file a (module content, salt, interpreter). Safe under concurrency.

    ``salt``: whatever else decides what the source becomes.
    """

    def __init__(self, root: Path, salt: bytes = b"") -> None:
        self.root = root
        interpreter = str(sys.implementation.cache_tag).encode() + sys.version.encode()
        self._salt = hashlib.sha256(salt + interpreter).digest()
        self._warned = False

    def path(self, name: str, source: bytes) -> Path:
        key = hashlib.sha256(self._salt + name.encode() + b"\0" + source).hexdigest()[:32]
        return self.root / f"{name}-{key}.bin"

    def load(self, name: str, source: bytes) -> types.CodeType | None:
        """The code of a module; None when it is not there, or damaged."""
        try:
            payload = self.path(name, source).read_bytes()
        except OSError:
            return None
        digest, body = payload[:32], payload[32:]
        if hashlib.sha256(body).digest() != digest:
            return None
        code = marshal.loads(body)
        return code if isinstance(code, types.CodeType) else None

    def save(self, name: str, source: bytes, code: types.CodeType) -> None:
        body = marshal.dumps(code)
        target = self.path(name, source)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            fd, temporary = tempfile.mkstemp(dir=self.root, prefix=f"{target.name}.")
            with os.fdopen(fd, "wb") as f:
                f.write(hashlib.sha256(body).digest() + body)
            Path(temporary).replace(target)
        except OSError as error:
            if not self._warned:
                warnings.warn(f"bytecode cache {self.root} is not writable ({error}); imports stay slow", stacklevel=2)
                self._warned = True


class RewritingLoader(SourceFileLoader):
    """Loads one module from its rewritten source."""

    def __init__(
        self, name: str, path: str, rewrite: Rewrite, names: Mapping[str, object], cache: BytecodeCache
    ) -> None:
        super().__init__(name, path)
        self._rewrite, self._names, self._cache = rewrite, names, cache

    def get_code(self, fullname: str) -> types.CodeType:
        source = self.get_data(self.path)
        code = self._cache.load(fullname, source)
        if code is None:
            text = self._rewrite(fullname, importlib.util.decode_source(source))
            code = compile(text, self.path, "exec", dont_inherit=True)
            self._cache.save(fullname, source, code)
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self._names)
        super().exec_module(module)


class RewritingFinder(importlib.abc.MetaPathFinder):
    """Finds ``package`` and everything below it; ``names`` are put into the namespace of each of its modules."""

    def __init__(self, package: str, rewrite: Rewrite, names: Mapping[str, object], cache: BytecodeCache) -> None:
        self.package = package
        self._rewrite, self._names, self._cache = rewrite, names, cache

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.package and not fullname.startswith(f"{self.package}."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = RewritingLoader(fullname, spec.loader.path, self._rewrite, self._names, self._cache)
        return spec
