"""The layouts that must give one process's run, as data, and how a layout is measured against it.

A family is a shape of model that stresses other code: grouped or single key heads, biases, tied tables, windows,
vocabularies that no number of ranks divides. A layout is a family, a number of ranks and config words. The test
(`test_layout_parity`) and the page (`parity_page`) both walk `LAYOUTS`, so what is documented is what is tested.

`attention.key.bias` is left out of the comparison of weights: a vector added to every key adds the same number to all
scores of a query, which no softmax sees, so its gradient is zero (nearly zero with rotary positions, which turn the
vector with its key). What is left is rounding noise, which AdamW scales to full steps. That gradient itself is compared
within an absolute tolerance, in one step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import largest_difference, last_tensors, random_rows, read_metrics, tiny_config, write_rows

STEPS = 20
WORDS = (f"train.steps={STEPS}", "optimizer.max_grad_norm=0.5", "schedule.warmup_steps=3", "train.global_batch_size=8")
LOSS_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-5
NORM_TOLERANCE, OPTIMIZER_TOLERANCE = 1e-4, 1e-4
BLIND = "attention.key.bias"
"""Ends the names of parameters whose gradient is rounding noise."""

FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": ("model.vocab_size=65",),
    "wide": ("model.num_heads=8", "model.head_dim=4"),
    "gpt2": ('model.name="gpt2"', "model.tied_embeddings=true", "model.num_kv_heads=4", "model.vocab_size=67"),
    "qwen3": (
        'model.name="qwen3-0.6b"', "model.tied_embeddings=true", "model.vocab_size=67", "model.num_kv_heads=1",
    ),
    "qwen2.5": ('model.name="qwen2.5-0.5b"',),
    "mistral": ("model.init=random",),
    "moe": ('model.name="tiny-moe"', "model.num_experts=4", "model.experts_per_token=2", "model.expert_size=16"),
}  # fmt: skip
MISTRAL_WINDOW = 4
"""Tokens; no preset has a window that rows of a few tokens would notice."""


@dataclass(frozen=True)
class Layout:
    """One way to spread one run."""

    family: str
    ranks: int
    words: str

    @property
    def name(self) -> str:
        """What it is called in tests and on the page: ``llama-4: tp=2 zero=1``."""
        return f"{self.family}-{self.ranks}: {' '.join(word.split('.', 1)[1] for word in self.words.split())}"


@dataclass(frozen=True)
class Deviation:
    """Largest relative distances of a run from one process's."""

    loss: float
    grad_norm: float
    weights: float
    optimizer: float

    @property
    def within(self) -> bool:
        """Whether the run is that of one process."""
        return (
            self.loss < LOSS_TOLERANCE
            and self.grad_norm < NORM_TOLERANCE
            and self.weights < WEIGHT_TOLERANCE
            and self.optimizer < OPTIMIZER_TOLERANCE
        )


def _layouts(family: str, text: str) -> Iterable[Layout]:
    for line in text.strip().splitlines():
        ranks, *words = line.split()
        expanded = (word if word.startswith("train.") else f"parallel.{word}" for word in words)
        yield Layout(family, int(ranks), " ".join(expanded))


_EVERY_AXIS_AND_MIX = """
1 train.micro_batch_size=2
2 dp_replicate=2
2 dp_replicate=2 train.micro_batch_size=2
2 dp_replicate=2 bucket_cap_mb=0.001
2 zero=1
2 zero=1 train.micro_batch_size=1
2 zero=1 bucket_cap_mb=0.001
2 zero=2
2 zero=2 train.micro_batch_size=2 bucket_cap_mb=0.001
2 zero=3
2 zero=3 train.micro_batch_size=2
2 zero=3 reshard_after_forward=false
2 zero=3 prefetch=0
2 zero=3 prefetch=2 train.micro_batch_size=1
2 tp=2
2 tp=2 sp=false
2 tp=2 train.micro_batch_size=2
2 cp=2
2 cp=2 cp_method=ulysses
2 cp=2 zero=3
4 dp_replicate=4 train.micro_batch_size=1
4 dp_replicate=2 dp_shard=2 zero=1
4 dp_replicate=2 dp_shard=2 zero=2 train.micro_batch_size=2
4 dp_replicate=2 dp_shard=2 zero=3 train.micro_batch_size=2
4 dp_replicate=2 tp=2
4 dp_replicate=2 cp=2
4 dp_shard=2 tp=2 zero=1
4 dp_shard=2 tp=2 zero=2 train.micro_batch_size=2
4 dp_shard=2 tp=2 zero=3 sp=false
4 dp_shard=2 cp=2 zero=1
4 dp_shard=2 cp=2 zero=2 cp_method=ulysses
4 dp_shard=2 cp=2 zero=3 train.micro_batch_size=2
4 tp=2 cp=2
4 tp=4
4 tp=4 sp=false
4 cp=4
2 pp=2 train.micro_batch_size=2
2 pp=2 train.micro_batch_size=2 pp_schedule=gpipe
4 pp=2 dp_replicate=2 train.micro_batch_size=2
4 pp=2 dp_shard=2 zero=3 train.micro_batch_size=2
4 pp=2 tp=2 train.micro_batch_size=2
4 pp=2 cp=2 train.micro_batch_size=4
8 pp=2 tp=2 dp_shard=2 zero=2 train.micro_batch_size=2
8 dp_shard=2 cp=2 tp=2 zero=3
8 dp_replicate=2 dp_shard=2 tp=2 zero=1 bucket_cap_mb=0.001
8 dp_replicate=2 dp_shard=2 cp=2 zero=3
"""

LAYOUTS: list[Layout] = [
    *_layouts("llama", _EVERY_AXIS_AND_MIX),
    *_layouts(
        "wide",
        """
        4 cp=4 cp_method=ulysses
        8 tp=8
        8 tp=4 cp=2 cp_method=ulysses
        """,
    ),
    *_layouts(
        "gpt2",
        """
        2 zero=3
        2 cp=2
        4 dp_shard=2 tp=2 zero=2
        4 tp=4
        2 pp=2 train.micro_batch_size=2
        8 dp_shard=2 cp=2 tp=2 zero=1
        """,
    ),
    *_layouts(
        "qwen3",
        """
        2 zero=3 train.micro_batch_size=2
        4 tp=4 sp=false
        4 dp_shard=2 tp=2 zero=3
        4 tp=2 cp=2 cp_method=ulysses
        8 dp_replicate=2 dp_shard=2 tp=2 zero=2
        """,
    ),
    *_layouts(
        "qwen2.5",
        """
        2 tp=2
        4 dp_shard=2 tp=2 zero=3
        4 dp_shard=2 cp=2 zero=2
        """,
    ),
    *_layouts(
        "moe",
        """
        2 ep=2
        2 zero=3
        2 zero=3 ep=2
        4 dp_shard=4 zero=1 ep=2
        4 cp=2 zero=2 ep=4
        4 dp_shard=2 tp=2 zero=3 ep=2
        """,
    ),
    *_layouts(
        "mistral",
        """
        2 tp=2 sp=false
        2 cp=2
        4 dp_shard=2 cp=2 zero=3 cp_method=ulysses
        """,
    ),
]


class Bench:
    """The data, one process's run of each family (made when first asked for), and a pool to run layouts on."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.data = write_rows(folder / "rows", random_rows(28, seed=1))
        self._references: dict[str, Path] = {}
        mistral = folder / "mistral"
        mistral.mkdir()
        (mistral / "config.json").write_text(json.dumps(_mistral_config()), encoding="utf-8")
        self.families = {**FAMILIES, "mistral": (f"model.name={mistral}", *FAMILIES["mistral"])}

    def run(self, name: str, layout: Layout) -> Path:
        """Train in one layout and return the run folder."""
        output = self.folder / name
        words = (*self.families[layout.family], *layout.words.split())
        answers = self.pool.run(layout.ranks, train_layout, self.data, output, *words, timeout=100)
        assert all(losses == answers[0] for losses in answers), "every rank reports the global loss"
        return output

    def reference(self, family: str) -> Path:
        """Return one process's run of a family."""
        if family not in self._references:
            self._references[family] = self.run(f"{family}-reference", Layout(family, 1, ""))
        return self._references[family]

    def measure(self, layout: Layout) -> Deviation:
        """Train in one layout and return how far it is from one process."""
        expected = self.reference(layout.family)
        return compare(self.run(f"layout-{LAYOUTS.index(layout)}", layout), expected)


def train_layout(data: Path, output: Path, *words: str) -> dict[int, float]:
    """Train and return the losses by step (a job for the pool)."""
    return train(tiny_config(data, output, *WORDS, *words)).losses


def compare(run: Path, expected: Path) -> Deviation:
    """Return the largest relative distances of one run folder from another."""
    pairs = list(zip(read_metrics(run), read_metrics(expected), strict=True))
    assert len(pairs) == STEPS
    loss, grad_norm = (max(abs(ours[key] / theirs[key] - 1) for ours, theirs in pairs) for key in ("loss", "grad_norm"))
    weights, optimizer = (
        largest_difference(*({k: v for k, v in last_tensors(folder, prefix).items() if BLIND not in k}
                             for folder in (run, expected)))
        for prefix in ("model.", "optimizer.")
    )  # fmt: skip
    return Deviation(loss, grad_norm, weights, optimizer)


def _mistral_config() -> dict[str, object]:
    return {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "hidden_size": 32,
        "intermediate_size": 64, "max_position_embeddings": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": MISTRAL_WINDOW, "tie_word_embeddings": False, "vocab_size": 64,
    }  # fmt: skip
