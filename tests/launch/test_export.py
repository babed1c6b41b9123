"""What ``transformers`` loads from an export is the model that was trained; bad input is one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import export
from megatron_ext.harness.template import load_codec
from megatron_ext.models.forward import packed_logits, vocab_of
from megatron_ext.training.run import RunResult
from megatron_ext.training.saved_run import loaded_model, open_saved

pytestmark = pytest.mark.slow


def training_logits(run: Path, step: int, ids: torch.Tensor) -> torch.Tensor:
    """[T, V] of the checkpoint under the forward that training uses."""
    with loaded_model(open_saved(run, step)) as chunks, torch.no_grad():
        logits = packed_logits(chunks[0], ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
        return logits[:, : vocab_of(chunks[0])]


def test_transformers_loads_it_with_the_same_logits_and_generates(
    walk_run: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = walk_run.run_dir, tmp_path / "hf"
    assert export.main([str(run), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out

    tokenizer = AutoTokenizer.from_pretrained(out)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "walk 3 at 0"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(ids).logits[0]
    last, first = (training_logits(run, step, ids[0]) for step in (2, 0))
    assert (theirs - last).abs().max() <= 1e-5
    assert (theirs - first).abs().max() > 1e-4, "the step must matter, or the wrong weights would pass"

    codec = load_codec(out)
    assert tokenizer.eos_token_id == codec.end_id == model.generation_config.eos_token_id
    # A model that wants nothing but its end token stops after one: the id is the one that generation looks for.
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(
            torch.zeros_like(model.get_output_embeddings().weight)
        )
        model.get_output_embeddings().weight[codec.end_id] = model(ids, output_hidden_states=True).hidden_states[-1][
            0, -1
        ]
    reply = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert reply[0, ids.shape[1] :].tolist() == [codec.end_id]


def test_step_and_default_folder(walk_run: RunResult, capsys: pytest.CaptureFixture[str]) -> None:
    run = walk_run.run_dir
    assert export.main([str(run), "--step", "1"]) == 0
    assert (run / "export" / "step_1" / "model.safetensors").is_file()
    assert export.main([str(run), "--step", "1"]) == 2
    assert "exists" in capsys.readouterr().err
    shutil.rmtree(run / "export")


def test_an_export_needs_nothing_outside_the_run(
    walk_run: RunResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(walk_run.run_dir, moved, ignore=shutil.ignore_patterns("store", "logs", "warm_start", "*.jsonl"))
    config = moved / "config.yaml"
    config.write_text(
        "\n".join(
            "  hf_config: /gone/config.json" if line.strip().startswith("hf_config:") else line
            for line in config.read_text().splitlines()
        )
    )
    monkeypatch.chdir(tmp_path)
    assert export.main([str(moved), "--out", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] > 0


def errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a refused command prints."""
    assert export.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_bad_input_is_one_line(walk_run: RunResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such run folder" in errors([str(tmp_path / "none")], capsys)
    assert "config.yaml" in errors([str(tmp_path)], capsys)
    assert "has no checkpoint of step 7; it has: 0 (before training), 1, 2" in errors(
        [str(walk_run.run_dir), "--step", "7"], capsys
    )

    broken = tmp_path / "broken"
    shutil.copytree(walk_run.run_dir, broken)
    weights = broken / "checkpoints" / "step_2" / "__0_0.distcp"
    weights.write_bytes(weights.read_bytes()[:1000])
    out = tmp_path / "hf"
    line = errors([str(broken), "--out", str(out)], capsys)
    assert "step_2" in line and "has 1000 bytes" in line and "it has: 0 (before training), 1, 2" in line
    assert not out.exists()
    weights.unlink()
    assert "__0_0.distcp cannot be read" in errors([str(broken)], capsys)

    shutil.rmtree(broken / "checkpoints")
    shutil.rmtree(broken / "warm_start")
    assert "holds no weights yet" in errors([str(broken)], capsys)
    (broken / "model_config.json").unlink()
    assert "holds no model yet" in errors([str(broken)], capsys)
