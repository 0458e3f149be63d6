"""Held-out loss: the same objective as in training, over every row once, whatever the number of ranks.

Losses are summed over target tokens and divided once by their global number. Perplexity is exp(loss); bits per byte is
the total loss over ln 2 times the UTF-8 bytes of the target text, which makes models with different tokenizers
comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from danlu.data.batch import IGNORE
from danlu.data.dataset import RowSource
from danlu.data.loader import EvalLoader
from danlu.parallel.mesh import World, sum_over
from danlu.train.forward import Forward


@torch.no_grad()
def held_out_loss(
    forward: Forward,
    datasets: Sequence[RowSource],
    *,
    world: World,
    micro_batch_size: int,
    max_rows: int | None = None,
) -> dict[str, float]:
    """Return ``loss``, ``perplexity``, ``bits_per_byte``, ``tokens`` (targets) and ``rows`` over all data sets.

    Args:
        forward: gives the summed loss of a micro-batch; its model is left in the mode (training or not) it came in.
        datasets: held-out data.
        world: each data rank evaluates its share, and all ranks get the same numbers.
        micro_batch_size: sequences per forward pass.
        max_rows: only the first rows of each data set.
    """
    was_training = forward.is_training
    forward.set_training(False)
    together = 1 if forward.pipeline is None else 2 * world.degrees.pp  # so that a pipeline fills
    total, targets, num_bytes, rows = 0.0, 0, 0, 0
    for dataset in datasets:
        loader = EvalLoader(
            dataset,
            micro_batch_size=micro_batch_size,
            data_rank=world.data_rank,
            data_degree=world.data_degree,
            max_rows=max_rows,
            trim_padding=True,
        )
        rest = iter(loader)
        while batches := list(islice(rest, together)):
            total += forward.sum_losses(batches)
            targets += sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches)
        num_bytes += dataset.target_bytes(np.arange(loader.num_rows))
        rows += loader.num_rows
    forward.set_training(was_training)
    total, count = sum_over(world.group, total if world.counts_losses else 0.0, targets if world.counts_rows else 0)
    loss = total / max(count, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total / (math.log(2) * num_bytes) if num_bytes else math.nan,
        "tokens": int(count),
        "rows": rows,
    }
