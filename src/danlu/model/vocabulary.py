"""More token ids, or a head of its own: the two changes of a model's tables after it was loaded.

Checkpoints pad their tables beyond the tokenizer (Qwen: 151,665 ids used, 151,936 rows), so new tokens usually land in
rows that exist and hold noise. Which rows are new is therefore said by id, never inferred from the table's end. They
start as the mean of the rows in use: a new token then has the logit of an average one instead of dominating or
vanishing (John Hewitt, "Initializing new word embeddings for pretrained language models", 2021).

A tied model stays tied (there is one table) until `untie_head` is called; the spec always says which it is.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from danlu.base.errors import UserError
from danlu.model.decoder import Decoder, Embedding


@torch.no_grad()
def add_tokens(model: Decoder, *, num_used: int, num_new: int, multiple: int = 8) -> None:
    """Give ids ``num_used .. num_used + num_new - 1`` a fresh start, growing the tables where they are too short.

    Every row below ``num_used`` and every old padding row beyond the new ids keeps its bits. Growing replaces the
    parameters, so do it before the optimizer is built.

    Args:
        model: changed in place, its spec included.
        num_used: ids of the tokenizer before the addition.
        num_new: tokens added.
        multiple: a grown table has a multiple of this many rows.

    Raises:
        UserError: counts out of range.
    """
    rows, last = model.spec.vocab_size, num_used + num_new
    if not 0 < num_used <= rows or num_new < 1 or multiple < 1:
        raise UserError(
            "cannot add these tokens",
            seen=f"num_used = {num_used}, num_new = {num_new}, multiple = {multiple}",
            legal=f"0 < num_used <= {rows}, num_new >= 1, multiple >= 1",
        )
    grown = rows if last <= rows else -(-last // multiple) * multiple
    for table in (model.embedding, model.head):
        if table is None:
            continue
        mean = table.weight[:num_used].float().mean(0).to(table.weight.dtype)
        if grown > rows:
            extra = mean.expand(grown - rows, -1)
            table.weight = nn.Parameter(torch.cat([table.weight, extra]), requires_grad=table.weight.requires_grad)
        table.weight[num_used:last] = mean
    model.spec = replace(model.spec, vocab_size=grown)


@torch.no_grad()
def untie_head(model: Decoder) -> None:
    """Give a tied model a head of its own, a copy of the embedding; nothing happens where it has one."""
    if model.head is not None or model.embedding is None:
        return
    model.head = Embedding(*model.embedding.weight.shape)
    model.head.weight = nn.Parameter(model.embedding.weight.clone())
    model.spec = replace(model.spec, tied_embeddings=False)
