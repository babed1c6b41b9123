"""launch/env on locks of tiny wheels made here: the same script, installing in seconds and from no index."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

WITHIN_S = 600.0  # making environments takes seconds, and minutes beside others that do

PACKAGES = {"torch": "2.13.0", "other": "1.0", "checker": "3.0", "megatron-core": "0.19.2", "pycosat": "0.6.6"}
LOCKS = {
    "base": "torch==2.13.0\nother==1.0\n",
    "compiled": "pycosat==0.6.6\n",
    "megatron": "megatron-core==0.19.2\n",
    "test": "checker==3.0\n",
    "peers": "peer==2.0\n",
}


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{module}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{module}/__init__.py", "")
        need = f"Requires-Dist: {requires}\n" if requires else ""
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{need}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


class Machine:
    """A home folder, a set of wheels, and clones that hold launch/env and the locks."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.folder, self.root = folder, root
        self.home, self.wheels = folder / "home", folder / "wheels"
        self.home.mkdir()
        self.wheels.mkdir()
        for name, version in PACKAGES.items():
            wheel(self.wheels, name, version)
        wheel(self.wheels, "peer", "2.0", "other")
        kept = {k: v for k, v in os.environ.items() if k not in ("XDG_CACHE_HOME", "PYTHONPATH", "VIRTUAL_ENV")}
        pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels)}
        # A locale that this machine does not have would make bash say so, on the stream that is looked at here.
        self.variables = {**kept, **pip, "HOME": str(self.home), "LC_ALL": "C"}

    def clone(self, name: str = "clone") -> Path:
        clone = self.folder / name
        (clone / "launch").mkdir(parents=True)
        shutil.copy(self.root / "launch/env", clone / "launch/env")
        (clone / "requirements").mkdir()
        for lock, text in LOCKS.items():
            (clone / f"requirements/{lock}.txt").write_text(text)
        return clone

    def start(self, clone: Path, *command: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(clone / "launch/env"), *command],
            env={**self.variables, **variables},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, clone: Path, *command: str, **variables: str) -> tuple[int, str, str]:
        process = self.start(clone, *command, **variables)
        out, err = process.communicate(timeout=WITHIN_S)
        return process.returncode, out, err


@pytest.fixture
def machine(tmp_path: Path, root: Path) -> Machine:
    return Machine(tmp_path, root)


SHOW = "import os, sys, torch, other, megatron_core; print(sys.prefix, os.environ['PYTHONPATH'], os.getcwd())"


@pytest.mark.slow
def test_two_callers_at_once_install_once_and_a_second_clone_not_at_all(machine: Machine) -> None:
    clone = machine.clone()
    both = [machine.start(clone, "python", "-c", SHOW) for _ in range(2)]
    results = [process.communicate(timeout=WITHIN_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert sorted(("creating" in err, "waiting for" in err) for _, err in results) == [(False, True), (True, False)]
    prefix, path, cwd = results[0][0].split()
    assert results[0][0] == results[1][0]
    assert Path(prefix).parent == machine.home / ".cache/megatron-ext"
    assert (path, cwd) == (str(clone), str(machine.folder))
    assert (clone / ".venv").resolve() == Path(prefix)

    second = machine.clone("second")
    code, out, err = machine.run(second, "python", "-c", SHOW)
    assert (code, err) == (0, "") and out.split() == [prefix, str(second), str(machine.folder)]

    code, out, err = machine.run(second, "bash", "-c", "echo out; echo err >&2; exit 7")
    assert (code, out, err) == (7, "out\n", "err\n")

    # One lock more: another environment, into which nothing old leaks.
    (second / "requirements/test.txt").write_text("checker==3.0\n\n")
    code, out, err = machine.run(second)
    assert code == 0 and "creating" in err and Path(out.strip()) != Path(prefix)
    assert (second / ".venv").resolve() == Path(out.strip())

    # The peers' environment sees the base one's packages and installs only its own.
    code, out, err = machine.run(clone, "--peers", "python", "-c", "import sys, peer, torch; print(sys.prefix)")
    assert code == 0, err
    assert "peers-" in out and not list(Path(out.strip()).glob("lib/*/site-packages/torch"))
    assert (clone / ".venv").resolve() == Path(prefix)


@pytest.mark.slow
def test_a_failure_is_one_line_with_the_log_and_the_next_call_starts_afresh(machine: Machine) -> None:
    clone = machine.clone()
    hidden = machine.wheels / "checker-3.0-py3-none-any.whl"
    hidden.rename(machine.folder / hidden.name)
    code, out, err = machine.run(clone, "true")
    assert code == 1 and out == ""
    last = err.splitlines()[-1]
    assert "other packages failed" in last and "checker" in last and "log:" in last
    assert Path(last.split("log: ")[1].rstrip(")")).is_file()

    (machine.folder / hidden.name).rename(hidden)
    code, _, err = machine.run(clone, "python", "-c", "import checker")
    assert code == 0 and "creating" in err


@pytest.mark.slow
def test_packages_that_do_not_fit_are_refused(machine: Machine) -> None:
    wheel(machine.wheels, "other", "1.0", "torch<2")
    code, _, err = machine.run(machine.clone(), "true")
    assert code == 1 and "consistency failed" in err and "torch" in err.splitlines()[-1]


def test_a_folder_that_cannot_be_written_is_named(machine: Machine) -> None:
    (machine.folder / "file").write_text("")
    code, _, err = machine.run(machine.clone(), "true", XDG_CACHE_HOME=str(machine.folder / "file"))
    assert code == 1 and len(err.splitlines()) == 1 and "XDG_CACHE_HOME" in err


TOOLS = ["bash", "dirname", "cut", "id", "getent", "mkdir", "cat", "sha256sum", "uname"]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({}, "no Python 3.11 or later on PATH: apt-get install python3 python3-venv"),
        ({"python3": "3.9.2 0 1"}, "no Python 3.11 or later"),
        ({"python3": "3.12.3 1 0"}, "python3.12 cannot make virtual environments: apt-get install python3.12-venv"),
    ],
)
def test_a_machine_without_a_python_is_told_what_to_install(
    machine: Machine, answers: dict[str, str], words: str
) -> None:
    tools = machine.folder / "bin"
    tools.mkdir()
    for tool in TOOLS:
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    for name, answer in answers.items():
        (tools / name).write_text(f"#!{tools}/bash\necho {answer}\n")
        (tools / name).chmod(0o755)
    code, _, err = machine.run(machine.clone(), "true", PATH=str(tools))
    assert code == 1 and words in err and len(err.splitlines()) == 1


def test_options(machine: Machine) -> None:
    clone = machine.clone()
    code, out, _ = machine.run(clone, "--help")
    assert code == 0 and "--peers" in out and "set -euo" not in out
    assert machine.run(clone, "--pears")[0] == 1
