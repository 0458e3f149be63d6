"""A hand-written loop over transformers' LlamaForCausalLM, as people write it, on rows that are packed already.

It gets the best of what such a loop can have without leaving the library: rows packed ahead of time, positions that
restart (from which transformers makes the mask that keeps documents apart), autocast for bf16, fused AdamW.
"""

from __future__ import annotations

import torch
from clock import Clock
from job import BETAS, EPS, LEARNING_RATE, MAX_GRAD_NORM, WEIGHT_DECAY, read_job
from transformers import AutoModelForCausalLM


def main() -> None:
    job, clock = read_job(), Clock()
    rows = {name: torch.from_numpy(array) for name, array in job.rows().items()}
    model = AutoModelForCausalLM.from_pretrained(job.work / "model", dtype=torch.float32)
    model.train()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True)
    packed = bool((rows["documents"] != rows["documents"][:, :1]).any())
    losses, norms = [], []
    for step in range(job.steps):
        part = slice(step * job.rows_per_step, (step + 1) * job.rows_per_step)
        inputs = {"input_ids": rows["tokens"][part], "labels": rows["labels"][part]}
        if packed:
            inputs["position_ids"] = rows["positions"][part]
        with torch.autocast("cpu", torch.bfloat16, enabled=job.dtype == "bf16"):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        losses.append(loss.item())
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    clock.finish(
        losses=losses,
        grad_norms=norms,
        notes={"attention": model.config._attn_implementation, "head": "all tokens, whole fp32 logits"},
    )


if __name__ == "__main__":
    main()
