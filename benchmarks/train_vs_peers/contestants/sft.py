"""TRL's SFTTrainer with its own packing (best-fit decreasing) of the same documents, tokenised already.

Its rows differ from danlu's, so tokens are counted here from what its collator hands to the model. Best-fit decreasing
puts the longest documents first; bins are shuffled so that steps are alike.
"""

from __future__ import annotations

from typing import Any

import torch
from clock import Clock
from datasets import Dataset, disable_progress_bars
from job import ROW, read_job
from trainer import arguments, finish
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


class Counting:
    """Counts a collator's tokens and targets, batch by batch."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate
        self.tokens: list[int] = []
        self.targets: list[int] = []

    def __call__(self, examples: Any) -> Any:
        """Collate and count."""
        batch = self.collate(examples)
        self.tokens.append(int(batch["input_ids"].numel()))
        self.targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch


def main() -> None:
    job, clock = read_job(), Clock()
    disable_progress_bars()
    model = AutoModelForCausalLM.from_pretrained(job.work / "model", dtype=torch.float32)
    documents = Dataset.from_list(job.documents())
    settings = SFTConfig(
        **arguments(job),
        per_device_train_batch_size=job.rows_per_step,
        packing=True,
        max_length=ROW,
        shuffle_dataset=True,
        dataset_num_proc=None,
    )
    trainer = SFTTrainer(
        model, settings, train_dataset=documents, processing_class=AutoTokenizer.from_pretrained(job.work / "model")
    )
    if job.first_batch_only:  # the same documents in one batch, into however many rows they were packed
        trainer.args.per_device_train_batch_size = trainer._train_batch_size = len(trainer.train_dataset)
    counting = trainer.data_collator = Counting(trainer.data_collator)
    trainer.train()
    notes = {"attention": model.config._attn_implementation, "head": "target tokens only, logits in tiles"}
    finish(clock, trainer, notes, tokens=counting.tokens[: job.steps], targets=counting.targets[: job.steps])


if __name__ == "__main__":
    main()
