"""Tiny data sets of known rows, tiny configs, and readers of what a run leaves: the vocabulary of the tests.

The model is the T0 of the case list: Llama style, 2 layers, hidden 32, 4 query and 2 key/value heads, vocabulary 64,
untied, fp32. Its data is written row by row, so a test knows every token.
"""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from danlu.checkpoint.store import find_checkpoints
from danlu.config.load import load
from danlu.config.schema import Config
from danlu.data import shards
from danlu.data.batch import MicroBatch, stack_rows, to_micro_batch
from danlu.data.dataset import PackedDataset, Rows
from danlu.model.decoder import Decoder
from danlu.model.experts import MoE
from danlu.model.presets import PRESETS
from danlu.model.router import RouterRecord
from danlu.objective.balance import add_balance
from danlu.objective.cross_entropy import CrossEntropy, Loss
from danlu.parallel.data import Reducer
from danlu.train.optimizer import HybridOptimizer

VOCAB = 64
SENTENCES = [
    f"the fee of card {number} is {number * 7} yuan; 卡 {number} 的年费是 {number * 7} 元" for number in range(40)
]

T0 = (
    'model.name="tiny"', "model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2",
    "model.head_dim=8", "model.mlp_size=64", f"model.vocab_size={VOCAB}", "model.max_positions=64",
    "model.tied_embeddings=false",
)  # fmt: skip
T0_SPEC = replace(
    PRESETS["tiny"], num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64,
    vocab_size=VOCAB, max_positions=64, tied_embeddings=False,
)  # fmt: skip
MOE = (
    *T0, 'model.name="tiny-moe"', "model.num_experts=4", "model.experts_per_token=2", "model.expert_size=24",
)  # fmt: skip
MOE_SPEC = replace(
    PRESETS["tiny-moe"], num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64,
    vocab_size=VOCAB, max_positions=64, tied_embeddings=False, num_experts=4, experts_per_token=2, expert_size=24,
)  # fmt: skip
PLAIN = (
    'train.device="cpu"', "data.num_workers=0", "metrics.tensorboard=false", "metrics.progress=false",
    "schedule.min_ratio=0.1", "optimizer.learning_rate=0.003",
)  # fmt: skip

Document = Sequence[int] | tuple[Sequence[int], Sequence[bool]]
"""Token ids, every one but the first a target; or ids and which of them are targets."""


def write_rows(
    folder: Path, rows: Sequence[Sequence[Document]], *, sequence_length: int = 24, per_shard: int = 100
) -> Path:
    """Write rows (lists of documents) as a data set and return its folder."""
    folder.mkdir(parents=True)
    packed = [_pack_row(row) for row in rows]
    listed, pieces = [], []
    for number, first in enumerate(range(0, len(packed), per_shard)):
        content, index = shards.shard_bytes(number, packed[first : first + per_shard])
        shards.write_file(folder / shards.shard_name(number), content)
        digest = hashlib.sha256(content).hexdigest()
        listed.append({"name": shards.shard_name(number), "bytes": len(content), "sha256": digest})
        pieces.append(index)
    manifest = {
        "format_version": 1, "num_rows": len(rows), "sequence_length": sequence_length, "vocab_size": VOCAB,
        "shards": listed, "tokenizer_hash": "t",
        "fingerprint": shards.content_fingerprint(listed, "t", sequence_length),
    }  # fmt: skip
    shards.write_file(folder / shards.INDEX, shards.npy_bytes(np.concatenate(pieces)))
    shards.write_file(folder / shards.MANIFEST, shards.json_bytes(manifest))
    (folder / "tokenizer").mkdir()  # a run copies it; nothing here opens it
    return folder


def _pack_row(row: Sequence[Document]) -> shards.PackedRow:
    ids: list[int] = []
    mask: list[bool] = []
    lengths = []
    for document in row:
        tokens, targets = as_document(document)
        ids += tokens
        mask += targets
        lengths.append(len(tokens))
    return shards.PackedRow(np.array(ids, "<u2"), np.array(mask, np.bool_), np.array(lengths, "<i4"), sum(mask))


def random_rows(num_rows: int, *, seed: int, max_documents: int = 3, longest: int = 8) -> list[list[list[int]]]:
    """Return rows of one to ``max_documents`` documents of 2 to ``longest`` tokens that follow a learnable rule."""
    draw = random.Random(seed)

    def document() -> list[int]:
        start, stride = draw.randrange(VOCAB), draw.choice([1, 3])
        return [(start + stride * place) % VOCAB for place in range(draw.randint(2, longest))]

    return [[document() for _ in range(draw.randint(1, max_documents))] for _ in range(num_rows)]


def tiny_config(data: Path | str, output: Path | str, *words: str) -> Config:
    """Return a config that trains T0 on ``data`` into ``output``; ``words`` win over everything."""
    return load(Config, None, [*T0, *PLAIN, f"data.train={data}", f"train.output={output}", *words]).config


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the records of ``metrics.jsonl``."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_tensors(checkpoint: Path, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return a checkpoint's tensors by plain DCP: what is on disk, without danlu's own reader."""
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if name.startswith(prefix)
    }
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # that there is no process group
        dcp.load(tensors, checkpoint_id=checkpoint, no_dist=True)
    return tensors


def last_tensors(folder: Path, prefix: str = "model.") -> dict[str, torch.Tensor]:
    """Return the tensors of a run's newest checkpoint."""
    return read_tensors(find_checkpoints(folder / "checkpoints")[-1], prefix)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Return the largest relative difference of any tensor: |left - right| / |right| in the Euclidean norm."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).norm() / right[name].norm().clamp_min(1e-12)) for name in right)


def micro_batch(rows: Sequence[Sequence[Document]], *, width: int = 24) -> MicroBatch:
    """Return rows as the loader would, without a data set on disk."""
    arrays = Rows.padding(len(rows), width)
    for row, documents in enumerate(rows):
        start = 0
        for number, document in enumerate(documents):
            tokens, targets = as_document(document)
            place = slice(start, start := start + len(tokens))
            arrays.tokens_BS[row, place] = tokens
            arrays.mask_BS[row, place] = targets
            arrays.positions_BS[row, place] = np.arange(len(tokens))
            arrays.document_ids_BS[row, place] = number
    return to_micro_batch(stack_rows(arrays))


def as_document(document: Document) -> tuple[list[int], list[bool]]:
    """Return a document's ids and targets."""
    if isinstance(document, tuple):
        tokens, targets = document
        return list(tokens), list(targets)
    return list(document), [place > 0 for place in range(len(document))]


def tiny_model(seed: int = 0, *, dropout: float = 0.0, **changes: Any) -> Decoder:
    """Return T0 (with ``changes`` to its spec) in training mode."""
    model = Decoder(replace(T0_SPEC, **changes), dropout=dropout)
    model.init_weights(seed)
    return model.train()


def language_loss(model: Decoder, batch: MicroBatch) -> Loss:
    """Return the summed cross-entropy of one micro-batch, as the training loop computes it."""
    hidden_BSD = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
    return CrossEntropy()(hidden_BSD, model.head_weight_VD, batch)


def tiny_optimizer(model: nn.Module, **changes: Any) -> HybridOptimizer:
    """Return the optimizer of one process over ``model``."""
    settings = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "fused": False}
    return HybridOptimizer(Reducer(list(model.named_parameters())), **{**settings, **changes})


def state_of(optimizer: HybridOptimizer) -> dict[str, torch.Tensor]:
    """Return the live state of an optimizer whose shards are whole parameters, by parameter and state name."""
    return {name: piece.boxes[0][1] for name, piece in optimizer.tensors().items()}


def moe_model(seed: int = 0, **changes: Any) -> Decoder:
    """Return T0 with experts (and ``changes`` to its spec) in training mode, its routers far from even."""
    model = Decoder(replace(MOE_SPEC, **changes))
    model.init_weights(seed)
    with torch.no_grad():
        for block in model.blocks:
            if isinstance(block.mlp, MoE):
                block.mlp.router.weight.mul_(5)
    return model.train()


def balanced_loss(model: Decoder, batch: MicroBatch, *, coefficient: float = 0.5) -> Loss:
    """Return the summed loss of one micro-batch with the balance loss, as the training loop computes it."""
    routers = RouterRecord(batch.document_ids_BS)
    hidden_BSD = model(
        batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS, routers=routers
    )
    loss = CrossEntropy()(hidden_BSD, model.head_weight_VD, batch)
    layers = model.spec.num_expert_layers
    return add_balance(loss, routers, batch, coefficient=coefficient, num_layers=layers)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all gradients by parameter name."""
    return {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}


def documents_of(folder: Path) -> list[list[int]]:
    """Return all documents of a data set as lists of ids, in row order."""
    dataset = PackedDataset(folder)
    found = []
    for row in range(len(dataset)):
        rows = dataset.rows([row])
        for document in range(int(rows.document_ids_BS.max()) + 1):
            found.append(rows.tokens_BS[rows.document_ids_BS == document].tolist())
    return found


HOLD = """
import sys
from pathlib import Path
from danlu.base.folders import lock_folder
with lock_folder(Path(sys.argv[1]), what="held"):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Hold the lock of ``folder`` in another process."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()
