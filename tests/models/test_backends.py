from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_ext.config.schema import BackendConfig
from megatron_ext.models.backends import BackendError, ResolvedBackend, resolve_backend


def resolve(config: BackendConfig, cuda: bool, packages: tuple[str, ...] = ()) -> ResolvedBackend:
    return resolve_backend(config, cuda_available=lambda: cuda, installed=lambda name: name in packages)


def test_auto_is_the_fast_choice_of_the_device() -> None:
    cpu = resolve(BackendConfig(), cuda=False)
    assert (cpu.device, cpu.layer_spec, cpu.optimizer, cpu.communication) == ("cpu", "local", "torch", "gloo")
    assert cpu.dtype is torch.float32
    gpu = resolve(BackendConfig(dtype="bfloat16"), cuda=True, packages=("transformer_engine",))
    assert (gpu.device, gpu.layer_spec, gpu.optimizer, gpu.communication) == ("cuda", "te", "fused", "nccl")
    assert gpu.dtype is torch.bfloat16


def test_missing_packages_name_the_package_and_the_key() -> None:
    with pytest.raises(BackendError) as error:
        resolve(BackendConfig(), cuda=True)
    lines = str(error.value).splitlines()
    assert len(lines) == 2
    assert "transformer_engine" in lines[0] and "backend.layer_spec=local" in lines[0]
    assert "apex" in lines[1] and "backend.optimizer=torch" in lines[1]
    assert resolve(BackendConfig(layer_spec="local"), cuda=True, packages=("apex",)).optimizer == "fused"


def test_gpu_choices_on_a_cpu_are_all_reported() -> None:
    with pytest.raises(BackendError) as error:
        resolve(BackendConfig(device="cpu", layer_spec="te", optimizer="fused", communication="nccl"), cuda=True)
    text = str(error.value)
    assert len(text.splitlines()) == 3
    for key in ("backend.layer_spec=local", "backend.optimizer=torch", "backend.communication=gloo"):
        assert key in text


def test_unknown_values_and_absent_devices() -> None:
    with pytest.raises(BackendError, match="backend.dtype='fp8'"):
        resolve(BackendConfig(dtype="fp8"), cuda=False)
    with pytest.raises(BackendError, match="no CUDA device"):
        resolve(BackendConfig(device="cuda", layer_spec="local", optimizer="torch"), cuda=False)


def test_nothing_of_a_gpu_back_end_or_megatron_is_imported() -> None:
    code = (
        "import sys\nfrom megatron_ext.config.schema import BackendConfig\n"
        "from megatron_ext.models.backends import resolve_backend\n"
        "resolve_backend(BackendConfig(), lambda: True, lambda name: True)\n"
        "assert not {'megatron.core', 'transformer_engine', 'apex'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
