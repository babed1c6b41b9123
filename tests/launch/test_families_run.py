"""The quickstart with a model of another family: trained, saved, exported, and loaded by ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch import export
from launch.paths import RECIPES
from launch.prepare import prepare
from megatron_ext.models.forward import packed_logits, vocab_of
from megatron_ext.training.run import train
from megatron_ext.training.saved_run import loaded_model, open_saved
from tests.helpers.hf_models import config_of

pytestmark = [pytest.mark.slow, pytest.mark.integration]

SMALL = (
    "recipe=quickstart",
    "run.name=small",
    "run.steps=3",
    "tokenizer.corpus_tasks=60",
    "tasks.train_tasks=200",
    "tasks.dev_tasks=8",
    "batch.tasks_per_step=4",
    "batch.trajectories_per_task=4",
    "rollout.replay_routing=true",
    "rollout.max_turns=4",
    # Nothing is won after so little: what moves the weights must not wait for a reward.
    "loss.terms.entropy={_target_: megatron_ext.losses.entropy.EntropyBonus, coefficient: 0.1}",
    "credit.filter.constant_groups=false",
    "warm_start.demonstrations=64",
    "warm_start.min_epochs=0",
    "warm_start.max_epochs=1",
    "warm_start.target_success=0",
    "warm_start.gate_tasks=8",
    "evaluation.before=false",
    "evaluation.after=false",
    "profile.peak=false",
)


@pytest.mark.parametrize("kind", ["glm4_moe", "minimax_m2"])
def test_three_steps_an_export_and_what_transformers_loads(kind: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config_of(kind) | {"max_position_embeddings": 1024}))
    result = train(prepare([*SMALL, f"model.hf_config={model}", f"run.root={tmp_path}"]), RECIPES)
    assert result.steps == 3
    lines = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("train/grad_norm", 0) > 0] == [1, 2, 3]

    out = tmp_path / "hf"
    assert export.main([str(result.run_dir), "--out", str(out)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert theirs.config.model_type == kind
    ids = torch.tensor(AutoTokenizer.from_pretrained(out)("You take the red lamp.").input_ids)
    ends = torch.tensor([0, len(ids)], dtype=torch.int32)
    with loaded_model(open_saved(result.run_dir, 3)) as chunks, torch.no_grad():
        ours = packed_logits(chunks[0], ids, torch.arange(len(ids)), ends)
        assert (theirs(ids[None]).logits[0] - ours[:, : vocab_of(chunks[0])]).abs().max() <= 1e-5
