"""Rules over several fields: what is refused, with which words, and what passes."""

from __future__ import annotations

import pytest

from danlu.base.errors import UserError
from danlu.config.load import load
from danlu.config.rules import check_config, micro_batch_size, size_overrides
from danlu.config.schema import Config

GOOD = ("data.train=folder", "train.steps=10")


def make(*words: str) -> Config:
    return load(Config, None, [*GOOD, *words]).config


@pytest.mark.parametrize(
    ("words", "world_size", "where", "parts"),
    [
        (["train.epochs=1"], 1, "train:", ["exactly one of train.steps and train.epochs", "steps=10 and epochs=1"]),
        (["data.train=[]"], 1, "data.train:", ["no training data", "danlu data build"]),
        (["data.weights=[1.0, 2.0]"], 1, "data.weights:", ["one weight per folder", "2 weights for 1 folders"]),
        (['model.init="pretrained"', "model.num_layers=3"], 1, "model.num_layers:", ["keeps its sizes"]),
        (["schedule.warmup_steps=11"], 1, "schedule.warmup_steps:", ["longer than the run", "0 to 10"]),
        (["parallel.dp_replicate=3"], 2, "parallel.dp_replicate:", ["multiply", "=3 on 2 proc", "dp_replicate = 2"]),
        (["parallel.tp=2"], 3, "parallel.tp:", ["multiply", "tp=2 on 3", "tp = 1, 3"]),
        (["parallel.tp=-1", "parallel.dp_replicate=-1"], 4, "parallel.tp:", ["only one axis", "= tp = -1"]),
        (["parallel.dp_shard=2"], 2, "parallel.dp_shard:", ["zero = 0 splits nothing", "dp_replicate"]),
        (["parallel.sp=false"], 1, "parallel.sp:", ["no effect", "parallel.tp = 1"]),
        (["parallel.pp_schedule=zbv"], 1, "parallel.pp_schedule:", ["no effect", "pp = 1", "1f1b (the default)"]),
        (["parallel.pp_virtual=2"], 1, "parallel.pp_virtual:", ["no effect", "parallel.pp = 1", "unset"]),
        (["parallel.pp_split=[1,1]"], 1, "parallel.pp_split:", ["no effect", "parallel.pp = 1", "unset"]),
        (["metrics.trace_schedule=2"], 1, "metrics.trace_schedule:", ["no effect", "parallel.pp = 1", "0 (the def"]),
        (["metrics.trace_schedule=11", "parallel.pp=2"], 2, "metrics.trace_schedule:", ["no effect", "steps = 10"]),
        (["parallel.prefetch=2", "parallel.zero=2"], 2, "parallel.prefetch:", ["no effect", "zero = 2"]),
        (["parallel.zero=3", "parallel.bucket_cap_mb=1"], 2, "parallel.bucket_cap_mb:", ["no effect", "block"]),
        (["train.global_batch_size=7"], 2, "train.global_batch_size:", ["7 sequences on 2", "such as 6 or 8"]),
        (["train.global_batch_size=1"], 2, "train.global_batch_size:", ["1 sequences on 2", "such as 2 or 4"]),
        (["train.micro_batch_size=3"], 1, "train.micro_batch_size:", ["size=3, 8 rows", "one of 1, 2, 4, 8"]),
        (["eval.every_steps=5"], 1, "eval.every_steps:", ["no effect", "eval.data", "0 (the default)"]),
        (["eval.max_rows=5"], 1, "eval.max_rows:", ["no effect", "unset"]),
        (["schedule.decay_fraction=0.5"], 1, "schedule.decay_fraction:", ["no effect", "cosine"]),
        (['schedule.kind="constant"', "schedule.min_ratio=0.5"], 1, "schedule.min_ratio:", ["no effect", "constant"]),
    ],
)  # fmt: skip
def test_broken_rules_name_key_value_and_what_is_legal(
    words: list[str], world_size: int, where: str, parts: list[str]
) -> None:
    """Each rule raises before any work, exit code 2, with words that can be acted on."""
    with pytest.raises(UserError) as caught:
        check_config(make(*words), world_size)
    text = str(caught.value)
    assert text.startswith(where)
    for part in parts:
        assert part in text


def test_neither_steps_nor_epochs_and_epochs_of_a_mixture_are_refused() -> None:
    """A run has exactly one length, and a weighted mixture has no epochs."""
    with pytest.raises(UserError, match="seen:  neither"):
        check_config(load(Config, None, ["data.train=x"]).config, 1)
    with pytest.raises(UserError, match="a weighted mixture has no epochs"):
        check_config(load(Config, None, ["data.train=x", "data.weights=[1]", "train.epochs=1"]).config, 1)


@pytest.mark.parametrize(
    ("total", "micro", "world_size", "expected"), [(8, 8, 1, 8), (8, 2, 1, 2), (8, 8, 4, 2), (8, 1, 8, 1), (6, 3, 2, 3)]
)
def test_a_micro_batch_never_exceeds_the_rows_of_a_rank(total: int, micro: int, world_size: int, expected: int) -> None:
    """More ranks need no change of the config: a pass takes what there is."""
    config = make(f"train.global_batch_size={total}", f"train.micro_batch_size={micro}")
    degrees = check_config(config, world_size)
    assert degrees.data == world_size
    assert micro_batch_size(config, degrees.data) == expected


def test_validation_never_edits() -> None:
    """Checking returns numbers and leaves the config as it was written."""
    config = make()
    before = config.model_dump()
    check_config(config, 2)
    assert config.model_dump() == before


def test_size_overrides_are_those_that_were_set() -> None:
    """False and small numbers count as set; unset ones do not appear."""
    config = make("model.tied_embeddings=false", "model.num_layers=1")
    assert size_overrides(config.model) == {"tied_embeddings": False, "num_layers": 1}
