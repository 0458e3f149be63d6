"""Makes the work that all contestants share, anywhere and without a download.

Text is drawn from a fixed vocabulary of invented words with Zipf frequencies, so that a tokenizer trained on it gives
about one token a word and document lengths can be chosen:

- ``supervised``: a csv of queries and intents whose token counts follow those of banking77 under SmolLM2's tokenizer
  (prompt 8 to 102, median 17, mean 20; answer 4 to 18, mean 7); prompts masked; packed to 512.
- ``text``: running text cut into rows of 512, every token a target.

Both go through danlu's own commands (`data tokenizer`, `data build`). The rows are then also written as plain arrays,
so that every contestant trains on the same tokenised documents. The weights are random, in the shape of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import csv
import random
import shutil
from pathlib import Path

import numpy as np
import torch

from danlu.base.log import setup_log
from danlu.checkpoint.convert import save_hf
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.data.build import build
from danlu.data.dataset import PackedDataset
from danlu.data.tokenizer_train import build_tokenizer
from danlu.model.decoder import Decoder
from danlu.model.presets import PRESETS

ROW = 512
VOCABULARY = 5000
SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in ("a", "e", "i", "o", "u", "an", "er", "is")]


class Speaker:
    """Draws words with Zipf frequencies."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        words: dict[str, None] = {}
        while len(words) < VOCABULARY:
            words["".join(self.random.choices(SYLLABLES, k=self.random.choice((1, 2, 2, 3))))] = None
        self.words = list(words)
        self.weights = [1.0 / (rank + 3) for rank in range(VOCABULARY)]

    def say(self, num_words: int) -> str:
        """Return ``num_words`` words."""
        return " ".join(self.random.choices(self.words, self.weights, k=num_words))

    def draw(self, mean: float, spread: float, low: int, high: int) -> int:
        """Return a log-normal whole number with about this mean and standard deviation, clipped."""
        sigma = np.sqrt(np.log1p((spread / mean) ** 2))
        value = self.random.lognormvariate(float(np.log(mean) - sigma**2 / 2), float(sigma))
        return int(min(max(round(value), low), high))


def write_inputs(folder: Path, num_rows: int) -> None:
    """Write ``supervised.csv`` and ``text.txt`` with enough for ``num_rows`` packed rows each."""
    speaker = Speaker(seed=77)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "supervised.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "category"])
        for _ in range(num_rows * 24):
            # the template adds about 10 tokens to the query, the end-of-text token one to the answer
            query, answer = speaker.draw(10.0, 9.0, 2, 92), speaker.draw(6.0, 2.8, 3, 17)
            writer.writerow([speaker.say(query), speaker.say(answer)])
    (folder / "text.txt").write_text(speaker.say(num_rows * ROW * 2), encoding="utf-8")


def plain_arrays(folder: Path, num_rows: int) -> dict[str, np.ndarray]:
    """Return the first rows of a danlu data set the way transformers wants them.

    Labels are not shifted; the first token of a document is no target, so that no document predicts the next one.
    Padding counts positions of its own, which keeps it apart like a document.
    """
    data = PackedDataset(folder)
    rows = data.rows(np.arange(min(num_rows, len(data))), width=ROW)
    labels = np.where(rows.mask_BS & (rows.positions_BS > 0) & (rows.document_ids_BS >= 0), rows.tokens_BS, -100)
    padding = rows.document_ids_BS < 0
    positions = np.where(padding, np.cumsum(padding, axis=1) - 1, rows.positions_BS)
    return {"tokens": rows.tokens_BS, "labels": labels, "positions": positions, "documents": rows.document_ids_BS}


def write_model(folder: Path, tokenizer: Path) -> None:
    """Write random weights in the shape of SmolLM2-135M as an HF folder."""
    model = Decoder(PRESETS["smollm2-135m"])
    model.init_weights(seed=0)
    save_hf(model, folder, tokenizer_from=tokenizer, dtype=torch.float32, overwrite=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, required=True, help="rows of 512 tokens per case")
    options = parser.parse_args()
    setup_log()
    work: Path = options.folder
    shutil.rmtree(work, ignore_errors=True)
    write_inputs(work / "inputs", options.rows)
    inputs = (str(work / "inputs" / "supervised.csv"), str(work / "inputs" / "text.txt"))
    build_tokenizer(TokenizerTrain(inputs=inputs, output=str(work / "tokenizer"), vocab_size=4000, chat=False))
    common = {"tokenizer": str(work / "tokenizer"), "sequence_length": ROW, "num_workers": 1}
    build(
        DataBuild(
            inputs=inputs[0],
            output=str(work / "supervised"),
            form="prompt_completion",
            prompt_template="Query: {text}\nIntent:",
            completion_template=" {category}",
            **common,
        )
    )
    build(DataBuild(inputs=inputs[1], output=str(work / "text"), form="text", packing="chunk", **common))
    write_model(work / "model", work / "tokenizer")
    for case in ("supervised", "text"):
        np.savez(work / f"{case}.npz", **plain_arrays(work / case, options.rows))


if __name__ == "__main__":
    main()
