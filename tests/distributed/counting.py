"""What a step of a short training sends, counted, beside what the formulas say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from danlu.base import env
from danlu.base.layout import Degrees
from danlu.config.rules import micro_batch_size, solve_layout
from danlu.config.schema import Config
from danlu.data.dataset import PackedDataset
from danlu.model.spec import ModelSpec
from danlu.parallel.schedule import build_schedule
from danlu.parallel.volume import count_volume
from danlu.plan.communication import Flow, Work
from danlu.train.layout import length_multiple, num_virtual_stages, plan_layers, reshards_after_forward
from danlu.train.loop import train
from danlu.train.start import plan_start
from distributed.pool import RankPool
from tiny import tiny_config

OBJECTS = ("uint8", "int64")
"""Dtypes of pickled Python objects and their sizes: a pipeline's ranks agree on the names of losses."""
Traffic = dict[tuple[tuple[str, ...], str, str], float]
"""(axes, operation, dtype) -> bytes that a rank sends in a step."""


def run_traffic(data: Path, output: Path, steps: int, *words: str) -> Traffic:
    """Return what this rank sends in a training of so many steps (a job for the pool)."""
    config = tiny_config(data, output, f"train.steps={steps}", "checkpoint.save_last=false", *words)
    degrees = solve_layout(config, env.ranks().world_size)
    with count_volume() as volume:
        train(config)
    counted = volume.by_axes(degrees)
    return {(*key[:2], str(key[2]).removeprefix("torch.")): sent for key, sent in counted.items()}


def mean_traffic(pool: RankPool, num_ranks: int, data: Path, output: Path, *words: str) -> Traffic:
    """Return the mean over all ranks of what each sends in a step: what three steps send beyond one, halved."""
    once, thrice = (
        pool.run(num_ranks, run_traffic, data, output / str(steps), steps, *words, timeout=100) for steps in (1, 3)
    )
    totals: Counter[tuple[tuple[str, ...], str, str]] = Counter()
    for answers, sign in ((thrice, 1), (once, -1)):
        for answer in answers:
            for key, sent in answer.items():
                totals[key] += sign * sent / (2 * num_ranks)
    return {key: sent for key, sent in totals.items() if sent}


def split_bookkeeping(traffic: Traffic) -> tuple[dict[tuple[tuple[str, ...], str], float], float]:
    """Return the bytes of tensors by (axes, operation), and of what ranks agree on beside: counts, the norm, losses.

    Those are fp64, which no tensor of these trainings is. Objects are not counted here.
    """
    tensors: Counter[tuple[tuple[str, ...], str]] = Counter()
    other = 0.0
    for (axes, operation, dtype), sent in traffic.items():
        if dtype == "float64":
            other += sent
        elif dtype in OBJECTS and "pp" in axes:
            assert sent < 2000
        else:
            tensors[axes, operation] += sent  # type: ignore[assignment]
    return dict(tensors), other


def by_operation(flows: list[Flow]) -> dict[tuple[tuple[str, ...], str], float]:
    """Return the bytes of flows by (axes, operation)."""
    totals: Counter[tuple[tuple[str, ...], str]] = Counter()
    for flow in flows:
        totals[flow.axes, flow.operation] += flow.sent_bytes  # type: ignore[assignment]
    return dict(totals)


def work_of(config: Config, spec: ModelSpec, degrees: Degrees, *, tokens: int) -> Work:
    """Return one step of ``config`` over rows that are one document of ``tokens`` tokens each."""
    rows = micro_batch_size(config, degrees.data)
    multiple = length_multiple(config, degrees)
    parallel, micro_batches = config.parallel, config.train.global_batch_size // degrees.data // rows
    places = None
    if degrees.pp > 1:
        virtual = num_virtual_stages(config)
        places = build_schedule(parallel.pp_schedule, degrees.pp, virtual, micro_batches).stage_to_rank
    return Work(
        micro_batches=micro_batches,
        rows=rows,
        length=-(-tokens // multiple) * multiple,
        targets=rows * (tokens - 1),
        zero=parallel.zero,
        reshard_after_forward=reshards_after_forward(config),
        sp=parallel.sp,
        cp_method=parallel.cp_method,
        stages=None if places is None else plan_layers(config, spec, degrees, tokens),
        stage_to_rank=places,
        activation_bytes=2 if config.precision.compute_dtype == "bf16" else 4,
        bucket_cap_mb=parallel.bucket_cap_mb,
    )


def spec_of(config: Config) -> ModelSpec:
    """Return the model that ``config`` trains."""
    return plan_start(config.model, [PackedDataset(path) for path in config.data.train]).spec
