"""The parts depend on each other in one direction only, and no file knows the machine it was written on."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PURE = ("credit", "losses", "trajectory")
DRIVER_SIDE = ("trajectory", "environments", "harness", "rewards", "rollout")
SKIPPED = {".git", ".venv", "runs", "outputs", "build", "dist", "__pycache__"}


def imported(source: str, package: str = "") -> Iterator[tuple[str, bool]]:
    """Dotted names imported anywhere in ``source``, and whether importing the module alone imports them."""

    def visit(node: ast.AST, runs: bool) -> Iterator[tuple[str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((alias.name, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from ((f"{module}.{alias.name}", runs) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, False)
            for statement in node.orelse:
                yield from visit(statement, runs)
        else:
            inner = runs and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner)

    return visit(ast.parse(source), True)


def files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def package_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).parent.parts)


def offences(file: Path, forbidden: tuple[str, ...], *, only_at_import: bool = False) -> list[str]:
    found = imported(file.read_text(encoding="utf-8"), package_of(file))
    return [
        f"{file.relative_to(ROOT)} imports {name}"
        for name, runs in found
        if (runs or not only_at_import) and any(name == f or name.startswith(f"{f}.") for f in forbidden)
    ]


def test_the_reader_of_imports_sees_every_form() -> None:
    source = """
import a.b
from . import c
from ..d import e
if TYPE_CHECKING:
    import f
def g():
    import h
class I:
    import j
try:
    import k
except ImportError:
    pass
"""
    assert dict(imported(source, "p.q")) == {
        "a.b": True,
        "p.q.c": True,
        "p.d.e": True,
        "f": False,
        "h": False,
        "j": True,
        "k": True,
    }


def test_the_library_imports_neither_recipes_nor_commands() -> None:
    assert files("megatron_ext")
    assert [line for file in files("megatron_ext") for line in offences(file, ("recipes", "launch", "tests"))] == []


def test_recipes_import_neither_commands_nor_one_another() -> None:
    slugs = sorted(folder.name for folder in (ROOT / "recipes").iterdir() if folder.is_dir())
    assert slugs
    found = []
    for file in files("recipes"):
        own = file.relative_to(ROOT / "recipes").parts[0]
        others = tuple(f"recipes.{slug}" for slug in slugs if slug != own)
        found += offences(file, ("launch", "tests", *others))
    assert found == []


@pytest.mark.parametrize("folder", PURE)
def test_pure_parts_import_neither_megatron_nor_an_engine(folder: str) -> None:
    engines = ("megatron", "sglang", "megatron_ext.models", "megatron_ext.training", "megatron_ext.rollout")
    assert files(f"megatron_ext/{folder}")
    assert [line for file in files(f"megatron_ext/{folder}") for line in offences(file, engines)] == []


def driver_side() -> list[Path]:
    found = [file for folder in DRIVER_SIDE for file in files(f"megatron_ext/{folder}")]
    return [file for file in found if "embedded" not in file.parts]


def test_the_driver_side_names_no_torch_at_import() -> None:
    assert driver_side()
    found = [line for file in driver_side() for line in offences(file, ("torch", "megatron"), only_at_import=True)]
    assert found == []


def test_the_driver_side_loads_no_torch_through_others() -> None:
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in driver_side()]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'importing {name} loads torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_no_file_holds_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.$}~-])/(?:home|root|work|tmp|Users)/[\w.-]+")
    found = []
    for folder, inside, names in os.walk(ROOT):
        # Not walked: what is no part of the repository comes and goes while the checks run beside each other.
        inside[:] = [name for name in inside if name not in SKIPPED and (not name.startswith(".") or name == ".ci")]
        for file in sorted(Path(folder, name) for name in names):
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            found += [f"{file.relative_to(ROOT)}: {match.group()}" for match in pattern.finditer(text)]
    assert found == []
