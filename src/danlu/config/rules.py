"""Rules that look at more than one field, each a named function.

Training, the planner and the doctor call the same functions, so they cannot disagree about what is legal. A rule
raises `UserError` naming the keys; it never edits. Rules that need the world size take it as an argument: nothing here
knows about processes, so `danlu plan` can ask about a cluster from a laptop.
"""

from __future__ import annotations

from typing import Any

from danlu.base.errors import UserError
from danlu.base.layout import Degrees, solve_degrees
from danlu.config.schema import Config, ModelSection

SIZE_KEYS = (
    "vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size", "max_positions",
    "rope_theta", "tied_embeddings", "num_experts", "experts_per_token", "expert_size",
)  # fmt: skip
EXPERT_KEYS = ("num_experts", "experts_per_token", "expert_size", "router_balance")
ROUTER_BALANCE = 0.001
"""What ``model.router_balance`` is where it is unset: the default of the families in transformers."""


def size_overrides(model: ModelSection) -> dict[str, Any]:
    """Return the size fields that the user set, by name."""
    return {key: value for key in SIZE_KEYS if (value := getattr(model, key)) is not None}


def check_duration(config: Config) -> None:
    """Exactly one of ``train.steps`` and ``train.epochs`` is given."""
    steps, epochs = config.train.steps, config.train.epochs
    if (steps is None) == (epochs is None):
        seen = "neither" if steps is None else f"steps={steps} and epochs={epochs}"
        raise UserError("give exactly one of train.steps and train.epochs", where="train", seen=seen)
    if epochs is not None and config.data.weights is not None:
        raise UserError(
            "a weighted mixture has no epochs",
            where="train.epochs",
            seen=f"data.weights={list(config.data.weights)}",
            hint="give train.steps, or leave data.weights out",
        )


def check_data(config: Config) -> None:
    """There is training data, and one weight per folder where weights are given."""
    if not config.data.train:
        raise UserError(
            "no training data",
            where="data.train",
            seen="[]",
            hint="run `danlu data build` and name the folder it wrote",
        )
    weights = config.data.weights
    if weights is not None and len(weights) != len(config.data.train):
        raise UserError(
            "one weight per folder is needed",
            where="data.weights",
            seen=f"{len(weights)} weights for {len(config.data.train)} folders",
        )


def check_eval(config: Config) -> None:
    """Evaluation data is given or split off, not both."""
    data, fraction = config.eval.data, config.eval.held_out_fraction
    if data and fraction:
        raise UserError(
            "give eval.data or eval.held_out_fraction, not both",
            where="eval.held_out_fraction",
            seen=f"{fraction} beside eval.data={list(data)}",
        )


def check_init(config: Config) -> None:
    """Sizes may be changed only for a model that starts from random weights."""
    changed = size_overrides(config.model)
    if config.model.init == "pretrained" and changed:
        raise UserError(
            "a pretrained model keeps its sizes",
            where=f"model.{next(iter(changed))}",
            seen=changed,
            hint='set model.init = "random", or leave the size out',
        )


def check_experts(model: ModelSection, num_experts: int | None) -> None:
    """Options of experts are given only for a model that has experts (``num_experts``, as the named model has it)."""
    given = [key for key in EXPERT_KEYS if getattr(model, key) is not None]
    if num_experts is None and given:
        raise UserError(
            "this option has no effect: the model has no experts",
            where=f"model.{given[0]}",
            seen=f"{getattr(model, given[0])} for {model.name}",
            legal="unset",
            hint='name a model with experts, such as "tiny-moe"',
        )


def router_balance(model: ModelSection, num_experts: int | None) -> float:
    """Return the coefficient of the balance loss; 0 for a model without experts."""
    if num_experts is None:
        return 0.0
    return ROUTER_BALANCE if model.router_balance is None else model.router_balance


def check_schedule(config: Config) -> None:
    """The warm-up fits into the run."""
    steps, warmup = config.train.steps, config.schedule.warmup_steps
    if steps is not None and warmup > steps:
        raise UserError(
            "the warm-up is longer than the run",
            where="schedule.warmup_steps",
            seen=f"{warmup} of train.steps={steps}",
            legal=f"0 to {steps}",
        )


def check_effect(config: Config) -> None:
    """No option is set that cannot take effect."""
    idle: dict[str, str] = {}
    if not config.eval.data and not config.eval.held_out_fraction:
        why = "there are no rows to evaluate (eval.data, eval.held_out_fraction)"
        idle |= dict.fromkeys(("eval.every_steps", "eval.max_rows"), why)
    if config.schedule.kind != "wsd":
        idle["schedule.decay_fraction"] = f'schedule.kind = "{config.schedule.kind}" has no separate decay'
    if config.schedule.kind == "constant":
        idle["schedule.min_ratio"] = 'schedule.kind = "constant" never decays'
    parallel = config.parallel
    if parallel.tp == 1:
        idle["parallel.sp"] = "it is about tensor parallelism, and parallel.tp = 1"
    if parallel.pp == 1:
        why = "it is about pipeline parallelism, and parallel.pp = 1"
        idle |= dict.fromkeys(
            ("parallel.pp_schedule", "parallel.pp_virtual", "parallel.pp_split", "metrics.trace_schedule"), why
        )
    elif config.train.steps is not None and config.metrics.trace_schedule > config.train.steps:
        idle["metrics.trace_schedule"] = f"the run ends before, with train.steps = {config.train.steps}"
    if parallel.cp == 1:
        idle["parallel.cp_method"] = "it is about context parallelism, and parallel.cp = 1"
    if parallel.zero != 3:
        why = f"it is about parallel.zero = 3, and zero = {parallel.zero}"
        idle |= dict.fromkeys(("parallel.reshard_after_forward", "parallel.prefetch"), why)
    else:
        idle["parallel.bucket_cap_mb"] = "with parallel.zero = 3 a block is the unit of communication"
    for key, why in idle.items():
        section, name = key.split(".")
        value, default = getattr(getattr(config, section), name), getattr(getattr(Config(), section), name)
        if value != default:
            raise UserError(
                f"this option has no effect: {why}",
                where=key,
                seen=value,
                legal="unset" if default is None else f"{default} (the default)",
            )


def solve_layout(config: Config, world_size: int) -> Degrees:
    """Return the ranks on each parallel axis.

    Raises:
        UserError: the degrees do not multiply to ``world_size``, or nothing is split over ``dp_shard``.
    """
    parallel = config.parallel
    wanted = {
        "pp": parallel.pp, "dp_replicate": parallel.dp_replicate, "dp_shard": parallel.dp_shard, "cp": parallel.cp,
        "tp": parallel.tp,
    }  # fmt: skip
    degrees = solve_degrees(wanted, world_size=world_size, zero=parallel.zero, ep=parallel.ep)
    if degrees.dp_shard > 1 and parallel.zero == 0:
        raise UserError(
            "zero = 0 splits nothing over dp_shard",
            where="parallel.dp_shard",
            seen=degrees.dp_shard,
            legal="1 (the default)",
            hint="set parallel.zero to 1, 2 or 3, or use dp_replicate",
        )
    return degrees


def check_batch(config: Config, data_degree: int) -> None:
    """The global batch splits evenly into micro-batches over the data ranks."""
    total, micro = config.train.global_batch_size, config.train.micro_batch_size
    if total % data_degree:
        lower = max(1, total // data_degree) * data_degree
        raise UserError(
            "the global batch does not divide by the number of data ranks",
            where="train.global_batch_size",
            seen=f"{total} sequences on {data_degree} data ranks",
            legal=f"a multiple of {data_degree}, such as {lower} or {lower + data_degree}",
        )
    per_rank = total // data_degree
    if micro > per_rank:
        return  # one pass per step, smaller than allowed
    if per_rank % micro:
        divisors = [size for size in range(1, per_rank + 1) if per_rank % size == 0]
        raise UserError(
            "the rows of one data rank do not divide into micro-batches",
            where="train.micro_batch_size",
            seen=f"micro_batch_size={micro}, {per_rank} rows per rank (global_batch_size={total}, {data_degree} ranks)",
            legal=f"one of {', '.join(map(str, divisors))}",
        )


def micro_batch_size(config: Config, data_degree: int) -> int:
    """Return the rows of one forward pass: the configured number, or all rows of a rank where those are fewer."""
    return min(config.train.micro_batch_size, config.train.global_batch_size // data_degree)


def check_config(config: Config, world_size: int) -> Degrees:
    """Apply every rule for a run on ``world_size`` processes and return its layout."""
    check_duration(config)
    check_data(config)
    check_eval(config)
    check_init(config)
    check_schedule(config)
    check_effect(config)
    degrees = solve_layout(config, world_size)
    check_batch(config, degrees.data)
    return degrees
