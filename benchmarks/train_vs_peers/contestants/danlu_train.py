"""danlu: `danlu train` as it is (the function behind the command), with its log, metrics and TensorBoard."""

from __future__ import annotations

import json

from clock import Clock
from job import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, read_job

from danlu.config.load import load
from danlu.config.schema import Config
from danlu.train.loop import train


def main() -> None:
    job, clock = read_job(), Clock()
    values = {
        "model.name": job.work / "model",
        "data.train": job.work / job.case,
        "data.shuffle": "false",
        "data.num_workers": 0,
        "train.output": job.output,
        "train.steps": job.steps,
        "train.global_batch_size": job.rows_per_step,
        "train.micro_batch_size": job.rows_per_step,
        "optimizer.learning_rate": LEARNING_RATE,
        "optimizer.beta1": BETAS[0],
        "optimizer.beta2": BETAS[1],
        "optimizer.eps": EPS,
        "optimizer.weight_decay": WEIGHT_DECAY,
        "optimizer.max_grad_norm": MAX_GRAD_NORM,
        "schedule.kind": "constant",
        "precision.compute_dtype": job.dtype,
        "checkpoint.save_last": "false",
    }
    train(load(Config, None, [f"{key}={value}" for key, value in values.items()]).config)
    records = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    clock.finish(
        losses=[record["loss"] for record in records],
        grad_norms=[record["grad_norm"] for record in records],
        notes={"attention": "document by document", "head": "target tokens only, logits in chunks"},
    )


if __name__ == "__main__":
    main()
