"""What a layout means for a model: what cannot be laid out so, and which layers are where. Needs no processes."""

from __future__ import annotations

from danlu.base.errors import UserError
from danlu.base.layout import Degrees, check_expert, check_pipeline, check_tensor
from danlu.config.schema import Config
from danlu.model.spec import ModelSpec
from danlu.parallel.context import check_context, row_multiple
from danlu.parallel.schedule import schedule_facts
from danlu.parallel.stages import plan_stages


def check_layout(config: Config, spec: ModelSpec, degrees: Degrees, sequence_length: int) -> None:
    """Raise `UserError` where this model, or its rows, cannot be laid out so."""
    for width in {spec.mlp_size, spec.expert_width if spec.num_experts else spec.mlp_size}:
        check_tensor(degrees.tp, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, mlp_size=width)
    if degrees.cp > 1:
        heads = (spec.num_heads // degrees.tp, max(1, spec.num_kv_heads // degrees.tp))
        check_context(config.parallel.cp_method, degrees.cp, *heads)
    multiple = length_multiple(config, degrees)
    plan_layers(config, spec, degrees, sequence_length)
    check_expert(degrees, num_experts=spec.num_experts, zero=config.parallel.zero)
    padded = -(-sequence_length // multiple) * multiple
    if spec.positions == "learned" and padded > spec.max_positions:
        raise UserError(
            "rows are padded beyond the model's positions, so that every rank has an equal part",
            where="parallel.cp" if degrees.cp > 1 else "parallel.sp",
            seen=f"rows of {sequence_length} tokens, {spec.max_positions} positions",
            legal=f"rows of at most {spec.max_positions // multiple * multiple} tokens",
            hint=f"build rows whose length is a multiple of {multiple}",
        )


def length_multiple(config: Config, degrees: Degrees) -> int:
    """Return what the length of a row is padded to a multiple of, so that cp and sp ranks have equal parts."""
    tokens = degrees.tp if config.parallel.sp else 1
    return row_multiple(degrees.cp, config.parallel.cp_method, tokens) if degrees.cp > 1 else tokens


def num_virtual_stages(config: Config) -> int:
    """Return the pipeline stages of each rank."""
    facts, wanted = schedule_facts(config.parallel.pp_schedule), config.parallel.pp_virtual
    if wanted is not None and not facts.takes(wanted):
        raise UserError(
            f'pp_schedule = "{config.parallel.pp_schedule}" has another number of stages a rank',
            where="parallel.pp_virtual",
            seen=wanted,
            legal=facts.legal_virtual,
        )
    return facts.min_virtual if wanted is None else wanted


def reshards_after_forward(config: Config) -> bool:
    """Return whether ZeRO-3 frees a block's whole parameters after its forward pass."""
    wanted = config.parallel.reshard_after_forward
    return config.parallel.pp == 1 if wanted is None else wanted


def plan_layers(config: Config, spec: ModelSpec, degrees: Degrees, sequence_length: int) -> list[range]:
    """Return the blocks of each pipeline stage (one stage without a pipeline)."""
    if degrees.pp == 1:
        return [range(spec.num_layers)]
    num_virtual = num_virtual_stages(config)
    check_pipeline(degrees.pp, num_layers=spec.num_layers, num_virtual=num_virtual)
    return plan_stages(spec, degrees.pp * num_virtual, sequence_length=sequence_length, split=config.parallel.pp_split)
