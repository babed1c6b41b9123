from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config.schema import ModelConfig
from megatron_ext.models.fresh import FreshReader
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_io import SafetensorsReader, save_hf
from megatron_ext.models.hf_tensors import WeightError, hf_shapes
from megatron_ext.models.hf_weights import export_tensors, load_tensors


def fresh(hf: HFConfig) -> Iterator[tuple[str, torch.Tensor]]:
    reader = FreshReader(hf, ModelConfig(hf_config=""), seed=3)
    for name, shape in hf_shapes(hf).items():
        yield name, reader.read(name, 0, 0, shape[0])


@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 20_000])
def test_write_then_read_is_bit_exact(moe: HFConfig, tmp_path: Path, max_shard_bytes: int) -> None:
    folder = save_hf(tmp_path / "out", moe, fresh(moe), max_shard_bytes=max_shard_bytes)
    shards = sorted(folder.glob("*.safetensors"))
    assert (len(shards) > 3) is (max_shard_bytes == 20_000)
    reader = SafetensorsReader(folder)
    reader.check(moe)
    for name, tensor in fresh(moe):
        assert torch.equal(reader.read(name, 0, 0, tensor.size(0)), tensor)
        if tensor.dim() == 2:
            assert torch.equal(reader.read(name, 1, 3, 7), tensor[:, 3:7])
    assert [p.name for p in tmp_path.iterdir()] == ["out"], "a temporary folder stayed behind"


def test_transformers_loads_and_generates_from_an_export(build: Any, moe: HFConfig, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    hf = replace(moe, tie_word_embeddings=True, eos_token_id=95, pad_token_id=95)
    chunks = build(hf, seed=9)
    model = AutoModelForCausalLM.from_pretrained(save_hf(tmp_path / "out", hf, export_tensors(chunks, hf)))
    state = model.state_dict()
    for name, tensor in export_tensors(chunks, hf):
        if ".experts." not in name:  # transformers keeps experts stacked
            assert torch.equal(state[name], tensor), name
    out = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > 3


def test_the_tokenizer_travels(moe: HFConfig, tmp_path: Path) -> None:
    source = tmp_path / "tokenizer"
    source.mkdir()
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        save_hf(tmp_path / "out", moe, fresh(moe), source)
    assert not (tmp_path / "out").exists()
    (source / "tokenizer.json").write_text("{}")
    folder = save_hf(tmp_path / "out", moe, fresh(moe), source)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_a_failed_export_leaves_nothing(moe: HFConfig, tmp_path: Path) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(fresh(moe))[:5]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        save_hf(tmp_path / "out", moe, broken(), max_shard_bytes=1000)
    with pytest.raises(WeightError, match="were not given"):
        save_hf(tmp_path / "out", moe, list(fresh(moe))[:-1])
    with pytest.raises(WeightError, match="written twice"):
        save_hf(tmp_path / "out", moe, [next(fresh(moe))] * 2)
    assert list(tmp_path.iterdir()) == []
    save_hf(tmp_path / "out", moe, fresh(moe))
    with pytest.raises(FileExistsError, match="choose another folder"):
        save_hf(tmp_path / "out", moe, fresh(moe))


def test_missing_extra_and_misshapen_tensors_are_one_error(moe: HFConfig, tmp_path: Path) -> None:
    tensors = dict(fresh(moe))
    del tensors["model.norm.weight"]
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(7, 32)
    tensors["surprise"] = torch.zeros(1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as error:
        SafetensorsReader(tmp_path).check(moe)
    text = str(error.value)
    assert "model.norm.weight is missing" in text and "surprise is not part" in text
    assert "model.layers.1.mlp.gate.weight has shape (7, 32), the config says (8, 32)" in text


def test_a_field_that_no_shape_shows_is_named(moe: HFConfig, tmp_path: Path) -> None:
    reader = SafetensorsReader(save_hf(tmp_path / "out", moe, fresh(moe)))
    reader.check(replace(moe, eos_token_id=3, max_position_embeddings=7))
    with pytest.raises(WeightError, match="does not fit") as error:
        reader.check(replace(moe, top_k=3, rope_theta=5.0))
    first, *lines = str(error.value).splitlines()
    assert first.endswith(f"; set model.hf_config={(tmp_path / 'out' / 'config.json').resolve()}, which is its own:")
    assert lines == [
        "rope_theta: 5.0 and 10000.0 in its config.json",
        "top_k: 3 and 2 in its config.json",
    ]


def test_a_tied_head_may_be_stored_when_it_is_the_embedding(moe: HFConfig, tmp_path: Path) -> None:
    hf = replace(moe, tie_word_embeddings=True)
    tensors = dict(fresh(hf))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    SafetensorsReader(tmp_path).check(hf)
    tensors["lm_head.weight"][5, 5] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="lm_head.weight is not part"):
        SafetensorsReader(tmp_path).check(hf)


def test_bad_folders_are_named(moe: HFConfig, tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="is not a folder"):
        SafetensorsReader(tmp_path / "none")
    with pytest.raises(WeightError, match="holds neither"):
        SafetensorsReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file at all")
    with pytest.raises(WeightError, match="not a readable safetensors file"):
        SafetensorsReader(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(WeightError, match=r"gone\.safetensors"):
        SafetensorsReader(tmp_path)


def test_building_from_a_folder_reads_its_weights(
    build: Any, hf_twin: Callable[[HFConfig], tuple[Any, Path]], moe: HFConfig
) -> None:
    _, folder = hf_twin(moe)
    chunks = build(moe, weights=str(folder))
    stored = load_file(folder / "model.safetensors")
    for name, tensor in export_tensors(chunks, moe):
        assert torch.equal(tensor, stored[name])
    with pytest.raises(WeightError, match="does not fit the HF config"):
        build(moe.with_vocab(100), weights=str(folder))


def _anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def test_loading_holds_the_shard_and_one_parameter(build: Any, moe: HFConfig, tmp_path: Path) -> None:
    hf = replace(moe, hidden=512, vocab=8192, layers=2, num_experts=16, moe_intermediate=512, head_dim=64)
    folder = save_hf(tmp_path / "out", hf, fresh(hf))
    size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert size > 80 << 20
    chunks = build(hf)
    peak = start = _anonymous_bytes()

    class Probe(SafetensorsReader):
        def read(self, name: str, dim: int, a: int, b: int) -> torch.Tensor:
            nonlocal peak
            part = super().read(name, dim, a, b)
            peak = max(peak, _anonymous_bytes())
            return part

    load_tensors(chunks, hf, Probe(folder))
    largest = 8192 * 512 * 4
    # The parameters exist already; on top at most one parameter's tensors (and a little interpreter noise).
    assert peak - start <= largest + (8 << 20), f"{(peak - start) >> 20} MiB above the shard"
