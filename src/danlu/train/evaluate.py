"""Held-out loss: the same objective as in training, over every row once, whatever the number of ranks.

Losses are summed over target tokens and divided once by their global number. Perplexity is exp(loss); bits per byte is
the total loss over ln 2 times the UTF-8 bytes of the target text, which makes models with different tokenizers
comparable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from danlu.data.batch import IGNORE, MicroBatch
from danlu.data.dataset import RowSource
from danlu.data.loader import EvalLoader
from danlu.model.decoder import Decoder
from danlu.objective.cross_entropy import Objective
from danlu.parallel.mesh import sum_over


@torch.no_grad()
def held_out_loss(
    model: Decoder,
    objective: Objective,
    datasets: Sequence[RowSource],
    *,
    group: dist.ProcessGroup,
    device: torch.device,
    micro_batch_size: int,
    max_rows: int | None = None,
) -> dict[str, float]:
    """Return ``loss``, ``perplexity``, ``bits_per_byte``, ``tokens`` (targets) and ``rows`` over all data sets.

    Args:
        model: unwrapped; left in the mode (training or not) it came in.
        objective: gives the summed loss of a micro-batch.
        datasets: held-out data.
        group: the data ranks; each evaluates its share, and all get the same numbers.
        device: where the model is.
        micro_batch_size: sequences per forward pass.
        max_rows: only the first rows of each data set.
    """
    was_training = model.training
    model.eval()
    total, targets, num_bytes, rows = 0.0, 0, 0, 0
    for dataset in datasets:
        loader = EvalLoader(
            dataset,
            micro_batch_size=micro_batch_size,
            data_rank=group.rank(),
            data_degree=group.size(),
            max_rows=max_rows,
            trim_padding=True,
        )
        for batch in loader:
            moved = MicroBatch(*(tensor.to(device) for tensor in batch))
            hidden_BSD = model(moved.tokens_BS, positions_BS=moved.positions_BS, document_ids_BS=moved.document_ids_BS)
            total += float(objective(hidden_BSD, model.head_weight_VD, moved).total)
            targets += int((batch.labels_BS != IGNORE).sum())
        num_bytes += dataset.target_bytes(np.arange(loader.num_rows))
        rows += loader.num_rows
    model.train(was_training)
    total, count = sum_over(group, total, targets)
    loss = total / max(count, 1)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": total / (math.log(2) * num_bytes) if num_bytes else math.nan,
        "tokens": int(count),
        "rows": rows,
    }
