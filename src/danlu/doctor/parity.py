"""``danlu doctor parity``: do two configs train the same model?

Whoever changes a layout (another parallel axis, accumulation, a kernel, a number format) wants to know that only the
speed has changed. So both configs are trained for a few steps from the same seed, on local ranks and in temporary
folders, and what they leave is compared: the loss and the gradient norm of every step, and the weights at the end, read
from the checkpoints.

Distances are relative. A loss or norm: |a - b| / |b|. A parameter: |a - b| / |b| in the Euclidean norm. In fp32 two
layouts differ by the order of their sums alone, 1e-7 to 1e-6. Gradient norms may differ ten times as much as losses:
they feel every rounding of every parameter's gradient, and losses only what the updates make of it.

Biases of keys are left out: a vector added to every key adds one number to all scores of a query, which softmax does
not see, so their gradient is rounding noise (with rotary positions nearly so), and AdamW makes full steps of it.

Not compared: held-out loss, speed, memory. Configs that would not train the same model on the same batches in any
layout are refused; dropout too, because ranks draw their own masks.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from danlu.base import env
from danlu.base.errors import RunError, UserError
from danlu.base.log import log

if TYPE_CHECKING:
    from danlu.base.layout import Degrees
    from danlu.config.schema import Config

TOLERANCE = 1e-5
"""Largest relative distance of losses and weights that counts as the same run, in fp32."""
NORM_FACTOR = 10.0
"""How many times as far gradient norms may be apart."""
_SAME_SECTIONS = ("model", "optimizer", "schedule")
_SAME_KEYS = (
    "data.train", "data.weights", "data.shuffle", "data.on_corrupt", "train.seed", "train.global_batch_size",
    "train.on_nonfinite", "eval.held_out_fraction",
)  # fmt: skip
_FREE_KEYS = ("optimizer.fused",)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two runs."""

    path: Path
    ranks: int
    layout: str

    def __str__(self) -> str:
        return f"{self.path} on {self.ranks} rank{'s' if self.ranks > 1 else ''} ({self.layout})"


@dataclass(frozen=True, slots=True)
class Parity:
    """How far apart two runs are.

    Attributes:
        first: the one that is measured.
        second: the one that distances are relative to.
        tolerance: of losses and weights.
        losses: relative distance by step.
        grad_norms: relative distance by step.
        weights: relative distance by parameter, in the model's order.
        left_out: parameters that cannot be compared.
    """

    first: Side
    second: Side
    tolerance: float
    losses: dict[int, float]
    grad_norms: dict[int, float]
    weights: dict[str, float]
    left_out: tuple[str, ...] = ()

    @property
    def first_step(self) -> int | None:
        """The first step whose loss or gradient norm is beyond the tolerance."""
        beyond = [step for step, value in self.losses.items() if not value <= self.tolerance]
        beyond += [step for step, value in self.grad_norms.items() if not value <= self.tolerance * NORM_FACTOR]
        return min(beyond, default=None)

    @property
    def first_parameter(self) -> str | None:
        """The first parameter, in the order of the model, that is beyond the tolerance."""
        return next((name for name, value in self.weights.items() if not value <= self.tolerance), None)

    @property
    def same(self) -> bool:
        """Whether nothing is beyond the tolerance."""
        return self.first_step is None and self.first_parameter is None


def check_parity(
    first: Path, second: Path, *, steps: int = 10, nproc_first: int | None = None, nproc_second: int | None = None,
    tolerance: float = TOLERANCE,
) -> Parity:  # fmt: skip
    """Train both configs and compare what they leave.

    Args:
        first: TOML file of a training.
        second: the one to compare with.
        steps: optimizer steps of each.
        nproc_first: ranks; None takes the product of the config's parallel degrees (an unset one is 1).
        nproc_second: the same for the second.
        tolerance: largest relative distance of losses and weights.

    Raises:
        UserError: a config is wrong, or the two would train different models or batches.
        RunError: one of the trainings failed.
    """
    from danlu.config.load import load
    from danlu.config.schema import Config

    if env.ranks().launched:
        raise UserError("this process is a rank of a launched job already; the doctor starts ranks of its own")
    if not tolerance > 0:
        raise UserError("the tolerance is a positive number", where="--tolerance", seen=tolerance)
    configs = [load(Config, path).config for path in (first, second)]
    check_comparable(*configs)
    with tempfile.TemporaryDirectory(prefix="danlu-parity-") as name:
        sides, folders = [], []
        asked = ((first, nproc_first, "a"), (second, nproc_second, "b"))
        prepared = []
        for (path, nproc, label), config in zip(asked, configs, strict=True):  # both are checked before either runs
            short = _shortened(config, Path(name) / label, steps)
            degrees = _layout(short, path, nproc, f"--nproc-{label}")
            sides.append(Side(path, degrees.world_size, str(degrees)))
            prepared.append(short)
        for side, short in zip(sides, prepared, strict=True):
            folders.append(_train(short, side))
        return compare_runs(folders[0], folders[1], sides[0], sides[1], tolerance=tolerance)


def check_comparable(first: Config, second: Config) -> None:
    """Raise `UserError` where two configs train different models or batches whatever their layout."""
    left, right = dict(_flat(first.model_dump())), dict(_flat(second.model_dump()))
    different = [
        key
        for key in left
        if (key.split(".")[0] in _SAME_SECTIONS or key in _SAME_KEYS)
        and key not in _FREE_KEYS
        and left[key] != right[key]
    ]
    if different:
        raise UserError(
            "these two configs do not train the same thing in any layout",
            where=", ".join(different),
            seen="; ".join(f"{key} = {left[key]} and {right[key]}" for key in different),
            legal="the same model, data, seed, batch, optimizer and schedule in both",
        )
    if first.model.dropout:
        raise UserError(
            "dropout draws other masks on every rank, so no two layouts train alike",
            where="model.dropout",
            seen=first.model.dropout,
            hint="compare with model.dropout = 0",
        )


def compare_runs(
    first: Path, second: Path, first_side: Side, second_side: Side, *, tolerance: float = TOLERANCE
) -> Parity:
    """Compare two run folders that end with a checkpoint of the same step.

    Raises:
        UserError: they have not logged the same steps, or their models differ.
    """
    records = [_records(folder) for folder in (first, second)]
    if records[0].keys() != records[1].keys():
        raise UserError(
            "the two runs have not logged the same steps", seen=f"{len(records[0])} and {len(records[1])} steps"
        )
    losses, norms = (
        {step: _apart(ours[key], records[1][step][key]) for step, ours in records[0].items()}
        for key in ("loss", "grad_norm")
    )
    weights, left_out = _compare_weights(first, second)
    return Parity(first_side, second_side, tolerance, losses, norms, weights, left_out)


def as_json(parity: Parity) -> dict[str, Any]:
    """Return the result as a JSON document; a distance that is no number is null."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    def side(one: Side) -> dict[str, Any]:
        return {"config": str(one.path), "ranks": one.ranks, "layout": one.layout}

    return {
        "same": parity.same,
        "tolerance": parity.tolerance,
        "grad_norm_tolerance": parity.tolerance * NORM_FACTOR,
        "steps": len(parity.losses),
        "a": side(parity.first),
        "b": side(parity.second),
        "first_step_beyond": parity.first_step,
        "first_parameter_beyond": parity.first_parameter,
        "loss": {str(step): plain(value) for step, value in parity.losses.items()},
        "grad_norm": {str(step): plain(value) for step, value in parity.grad_norms.items()},
        "weights": {name: plain(value) for name, value in parity.weights.items()},
        "left_out": list(parity.left_out),
    }


def as_text(parity: Parity) -> str:
    """Return the result as a table with a verdict."""
    limit = parity.tolerance
    rows: list[tuple[str, Mapping[Any, float], float, str]] = [
        ("loss", parity.losses, limit, "step "),
        ("gradient norm", parity.grad_norms, limit * NORM_FACTOR, "step "),
        ("weights", parity.weights, limit, ""),
    ]
    lines = [f"A: {parity.first}", f"B: {parity.second}", "", f"{'':14}{'largest':>12}{'allowed':>12}  where"]
    for name, values, allowed, prefix in rows:
        place, value = max(values.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])
        lines.append(f"{name:14}{value:12.1e}{allowed:12.1e}  {prefix}{place}")
    if parity.left_out:
        lines.append(f"left out, their gradient is rounding noise: {', '.join(parity.left_out)}")
    lines.append("")
    if parity.same:
        lines.append(f"the same training over {len(parity.losses)} steps")
    if parity.first_step is not None:
        lines.append(f"first step beyond what is allowed: {parity.first_step}")
    if parity.first_parameter is not None:
        lines.append(f"first parameter beyond what is allowed: {parity.first_parameter}")
    return "\n".join(lines)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shortened(config: Config, output: Path, steps: int) -> Config:
    """Return the config for a few steps into ``output``, without what the comparison does not look at."""
    sections = config.model_dump()
    sections["train"] |= {"output": str(output), "steps": steps, "epochs": None}
    sections["schedule"]["warmup_steps"] = min(config.schedule.warmup_steps, steps)
    sections["checkpoint"] = {"async_save": False}
    sections["metrics"] = {"tensorboard": False, "progress": False}
    held_out = config.eval.held_out_fraction  # decides which rows are trained on
    sections["eval"] = {"held_out_fraction": held_out, "max_rows": 1 if held_out else None}
    return type(config).model_validate(sections)


def _layout(config: Config, path: Path, nproc: int | None, flag: str) -> Degrees:
    from danlu.config.rules import check_config

    parallel = config.parallel
    if nproc is None:
        degrees = {axis: getattr(parallel, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")}
        rest = [axis for axis, size in degrees.items() if size == -1]
        if rest:
            raise UserError(
                "the number of ranks is open",
                where=f"{path}: parallel.{rest[0]}",
                seen=-1,
                hint=f"give {flag} N, or a number instead of -1",
            )
        nproc = math.prod(size or 1 for size in degrees.values())
    return check_config(config, nproc)


def _train(config: Config, side: Side) -> Path:
    from danlu.config.load import to_toml
    from danlu.train.local import run_local_ranks

    folder = Path(config.train.output)
    file = folder.with_suffix(".toml")
    file.write_text(to_toml(config), encoding="utf-8")
    log.info("training %s", side)
    result = run_local_ranks(["train", str(file), "--resume", "never"], nproc=side.ranks)
    if result.stopped_by is not None or result.exit_code:
        error = UserError if result.exit_code == 2 else RunError
        why = f"stopped by {result.stopped_by}" if result.stopped_by else f"exit code {result.exit_code}, cause above"
        raise error("this training did not end well", where=str(side.path), seen=why)
    return folder


def _records(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {int(record["step"]): record for record in records if "loss" in record}


def _apart(ours: float | None, theirs: float | None) -> float:
    if ours == theirs:
        return 0.0
    if ours is None or theirs is None or not math.isfinite(ours) or not math.isfinite(theirs):
        return math.inf
    return abs(ours - theirs) / max(abs(theirs), 1e-30)


def _compare_weights(first: Path, second: Path) -> tuple[dict[str, float], tuple[str, ...]]:
    import torch

    from danlu.train.load import fill_from_checkpoint, find_checkpoint, spec_from_record

    sides: list[dict[str, torch.Tensor]] = []
    blind: tuple[str, ...] = ()
    for folder in (first, second):
        saved = find_checkpoint(str(folder))
        if saved is None:
            raise UserError("the run has left no checkpoint", where=str(folder))
        spec = spec_from_record(saved.record["identity"]["model"], str(folder))
        tensors = {name: torch.empty(shape) for name, shape in spec.parameter_shapes().items()}
        fill_from_checkpoint(tensors, saved)
        sides.append(tensors)
        key_biases = [f"blocks.{layer}.attention.key.bias" for layer in range(spec.num_layers)]
        blind = tuple(name for name in key_biases if name in tensors)
    if sides[0].keys() != sides[1].keys():
        raise UserError("the two runs have trained different models", seen=f"{first} and {second}")
    return {name: _distance(sides[0][name], sides[1][name]) for name in sides[0] if name not in blind}, blind


def _distance(ours: Any, theirs: Any) -> float:
    apart, size = float((ours - theirs).double().norm()), float(theirs.double().norm())
    return 0.0 if apart == 0.0 else apart / max(size, 1e-30)
