"""The other side of the end-to-end bench: TRL's ``GRPOTrainer``, in the peers' environment.

``python -m launch.benches._e2e_trl FOLDER NAME SIZE`` trains FOLDER/model and writes FOLDER/NAME.json. A step's seconds
run from one ``on_step_end`` to the next.

What is set, and why:

- the same work: per-device batch of all completions and one optimizer step a batch, ``num_generations`` a group,
  temperature 1 without truncation, ``beta`` 0, ``num_iterations`` 1, AdamW with the same rate, betas and clip, no
  auxiliary loss, the DAPO loss (token mean, clip 0.2 / 0.28), and the same reward function;
- the end token is off: generation has none and the trainer masks after none, so every completion has all its tokens;
- nothing slows it: CPU, fp32, no gradient checkpointing, no logging, saving, evaluation or reporting, fused AdamW,
  PyTorch's SDPA, and grouped products for the experts (`EXPERTS`, the fastest of what transformers offers here). TRL
  itself leaves the scoring of old log-probs out when a batch is used once; that stays so.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from launch.benches._e2e_setup import Side, Size, differences, letters, prompts

EXPERTS = "grouped_mm"


class Clock(TrainerCallback):
    """Notes when each optimizer step ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        self.times.append(time.monotonic())


def arguments(folder: Path, name: str, size: Size) -> GRPOConfig:
    return GRPOConfig(
        output_dir=str(folder / name),
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=size.completions,
        gradient_accumulation_steps=1,
        num_generations=size.samples,
        max_completion_length=size.new_tokens,
        generation_kwargs={"eos_token_id": None},
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        router_aux_loss_coef=0.0,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        warmup_steps=0,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        max_steps=size.warmup + size.steps,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=1,
    )


def main() -> None:
    folder, name, size = Path(sys.argv[1]), sys.argv[2], Size.from_json(sys.argv[3])
    torch.set_num_threads(size.threads)
    tokens: list[int] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [letters(text.strip(), {}) for text in completions]

    clock = Clock()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32, attn_implementation="sdpa", experts_implementation=EXPERTS
        ),
        reward_funcs=reward,
        args=arguments(folder, name, size),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts(size)]),
        processing_class=AutoTokenizer.from_pretrained(folder / "tokenizer", padding_side="left"),
        callbacks=[clock],
    )
    trainer.eos_token_ids = [-1]
    trainer.train()
    Side(
        seconds=differences(clock.times)[-size.steps :],
        phases=({},) * size.steps,
        tokens=tuple(tokens[-size.steps :]),
    ).write(folder / f"{name}.json")


if __name__ == "__main__":
    main()
