"""What every contestant is told: paths of the prepared work, dtype, number of steps, and the same hyperparameters."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE = 1e-4
BETAS = (0.9, 0.95)
EPS = 1e-8
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
ROW = 512
"""Slots of a packed row."""


@dataclass(frozen=True)
class Job:
    """One contestant's task."""

    work: Path
    """Folder of the prepared work: ``model/``, ``<case>/`` (danlu's shards), ``<case>.npz`` (the same rows, plain)."""
    case: str
    dtype: str
    steps: int
    rows_per_step: int
    output: Path
    first_batch_only: bool
    """Train on the documents of the first batch only (to compare first-step losses whatever the packing)."""

    def rows(self) -> dict[str, np.ndarray]:
        """Return [rows, 512] arrays: ``tokens``, ``labels`` (not shifted, -100), ``positions``, ``documents`` (-1)."""
        with np.load(self.work / f"{self.case}.npz") as file:
            arrays = dict(file)
        last = self.rows_per_step if self.first_batch_only else self.rows_per_step * self.steps
        return {name: array[:last] for name, array in arrays.items()}

    def documents(self) -> list[dict[str, Any]]:
        """Return the same documents one by one, in the order of the rows: ``input_ids``, ``labels``."""
        rows = self.rows()
        found = []
        for tokens, labels, ids in zip(rows["tokens"], rows["labels"], rows["documents"], strict=True):
            for document in np.unique(ids[ids >= 0]):
                here = ids == document
                found.append({"input_ids": tokens[here].tolist(), "labels": labels[here].tolist()})
        return found


def read_job() -> Job:
    """Read the job from the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rows-per-step", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--first-batch-only", action="store_true")
    return Job(**vars(parser.parse_args()))
