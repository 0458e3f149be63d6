"""transformers' Trainer on rows that are packed already (positions restart at each document).

The Trainer itself does not pack; this spares it the padding it would otherwise compute. Evaluation, saving and
reporting are off; the loss is logged at every step, as danlu does.
"""

from __future__ import annotations

from typing import Any

import torch
from clock import Clock
from job import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, Job, read_job
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """The packed rows as the dictionaries that the Trainer's default collator stacks."""

    def __init__(self, job: Job) -> None:
        rows = {name: torch.from_numpy(array) for name, array in job.rows().items()}
        names = {"tokens": "input_ids", "labels": "labels"}
        if bool((rows["documents"] != rows["documents"][:, :1]).any()):
            names["positions"] = "position_ids"
        self.columns = {new: rows[old] for old, new in names.items()}

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self.columns.items()}


def arguments(job: Job) -> dict[str, Any]:
    """Return the arguments that the Trainer and TRL's SFTTrainer share."""
    return {
        "output_dir": str(job.output),
        "max_steps": job.steps,
        "learning_rate": LEARNING_RATE,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "adam_epsilon": EPS,
        "weight_decay": WEIGHT_DECAY,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "lr_scheduler_type": "constant",
        "bf16": job.dtype == "bf16",
        "use_cpu": True,
        "gradient_checkpointing": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def finish(clock: Clock, trainer: Trainer, notes: dict[str, Any], **counts: Any) -> None:
    """Report what the trainer logged."""
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    clock.finish(
        losses=[float(entry["loss"]) for entry in logs],
        grad_norms=[float(entry["grad_norm"]) for entry in logs],
        notes=notes,
        **counts,
    )


def main() -> None:
    job, clock = read_job(), Clock()
    model = AutoModelForCausalLM.from_pretrained(job.work / "model", dtype=torch.float32)
    settings = TrainingArguments(**arguments(job), per_device_train_batch_size=job.rows_per_step)
    trainer = Trainer(model, settings, train_dataset=Rows(job))
    trainer.train()
    notes = {"attention": model.config._attn_implementation, "head": "all tokens, whole fp32 logits"}
    finish(clock, trainer, notes)


if __name__ == "__main__":
    main()
