from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.models import cpu_platform
from megatron_ext.models.cpu_platform import CpuPlatformError, rewrite
from megatron_ext.models.parallel import ParallelContext


def test_inert_when_cuda_is_available() -> None:
    before = list(sys.meta_path)
    assert cpu_platform.install(cuda_available=lambda: True) is False
    assert sys.meta_path == before


def test_install_is_idempotent() -> None:
    assert cpu_platform.install() is True
    before = list(sys.meta_path)
    assert cpu_platform.install() is True
    assert sys.meta_path == before


def test_what_torch_says_of_the_collectives_that_megatron_calls_is_left_out(rank: ParallelContext) -> None:
    one = torch.ones(2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dist.all_gather_into_tensor(torch.empty(2), one)
        dist.reduce_scatter_tensor(torch.empty(2), one)
        assert len(said) == 2
        cpu_platform.install()
        dist.all_gather_into_tensor(torch.empty(2), one)
        dist.reduce_scatter_tensor(torch.empty(2), one)
        assert len(said) == 2
        warnings.warn("`torch.distributed.reduce_op` is deprecated, please use another", FutureWarning, stacklevel=1)
        assert len(said) == 3, "nothing else is"


def test_refuses_after_a_plain_import(tmp_path: Path) -> None:
    code = (
        "import sys, types\n"
        "sys.modules['megatron.core'] = types.ModuleType('megatron.core')\n"
        "from megatron_ext.models import cpu_platform\n"
        "cpu_platform.install()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "imported before cpu_platform.install()" in done.stderr


@pytest.mark.parametrize("name", sorted(cpu_platform._REPAIRS))
def test_a_repair_that_no_longer_fits_is_an_error(name: str) -> None:
    repairs = cpu_platform._REPAIRS[name]
    whole = "\n".join(repair.old for repair in repairs)
    rewrite(name, whole)
    with pytest.raises(CpuPlatformError, match=name.replace(".", r"\.")):
        rewrite(name, whole.replace(repairs[0].old, "pass"))
    with pytest.raises(CpuPlatformError, match="found 2"):
        rewrite(name, whole + "\n" + repairs[0].old)


def test_no_cuda_call_survives_in_what_training_imports() -> None:
    with cpu_platform.quiet_import():
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    modules = {name: m for name, m in list(sys.modules.items()) if name.startswith("megatron.core")}
    checked = 0
    for name, module in modules.items():
        file = getattr(module, "__file__", None)
        if file is None or not file.endswith(".py"):
            continue
        for line in rewrite(name, Path(file).read_text(encoding="utf-8")).splitlines():
            code = line.split("#")[0]
            if "torch.cuda." in code and "import" not in code and '"""' not in code:
                raise AssertionError(f"{name}: {line}")
        checked += 1
    assert checked > 100


@pytest.mark.slow
def test_tune_allocator_reuses_pages() -> None:
    code = (
        "import resource, sys, torch\n"
        "from megatron_ext.models import cpu_platform\n"
        "if sys.argv[1] == 'on': assert cpu_platform.tune_allocator()\n"
        "for _ in range(8): torch.ones(8 << 20)\n"
        "start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(20): torch.ones(8 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)\n"
    )
    faults = {}
    for mode in ("off", "on"):
        done = subprocess.run([sys.executable, "-c", code, mode], capture_output=True, text=True, check=True)
        faults[mode] = int(done.stdout)
    assert faults["on"] * 4 < faults["off"], faults


def test_rng_tracker_forks_the_cpu_generator(rank: object) -> None:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    with get_cuda_rng_tracker().fork():
        inside = torch.rand(2)
    assert not torch.equal(inside, want)
    assert torch.equal(torch.rand(2), want), "the fork leaked into the default generator"
