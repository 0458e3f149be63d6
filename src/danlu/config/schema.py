"""The config of a training run as frozen data.

A section is one concern; a field is one line of documentation, with its unit. `danlu config schema`, the key reference
in the docs and the error messages are all generated from this file, so there is nothing to keep in step. Validation
here is per field; rules that look at several fields live in `danlu.config.rules`. Nothing is ever edited by
validation: what `danlu config show` prints is what the user wrote plus the defaults below.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, descriptions taken from the fields' docstrings."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("a degree is -1 or at least 1")
    return value


Paths = Annotated[tuple[str, ...], BeforeValidator(_one_or_many, json_schema_input_type=str | tuple[str, ...])]
"""One path or a list of paths."""
Degree = Annotated[int, Field(ge=-1), AfterValidator(_not_zero)]
"""Ranks on one parallel axis; -1 is what is left."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelSection(Section):
    """What is trained, and from which weights."""

    name: str = "tiny"
    """Preset name, HF folder, GGUF file, run folder, hub id (`org/name`) or `modelscope:org/name`."""
    init: Literal["auto", "random", "pretrained"] = "auto"
    """`random` starts from scratch; `pretrained` needs weights; `auto` takes weights where the name has them."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding; unset: as the named model has it (random init only)."""
    num_layers: PositiveInt | None = None
    """Number of blocks, instead of the named model's (random init only)."""
    hidden_size: PositiveInt | None = None
    """Model width D, instead of the named model's (random init only)."""
    num_heads: PositiveInt | None = None
    """Query heads N, instead of the named model's (random init only)."""
    num_kv_heads: PositiveInt | None = None
    """Key/value heads G, instead of the named model's (random init only)."""
    head_dim: PositiveInt | None = None
    """Head width H, instead of the named model's (random init only)."""
    mlp_size: PositiveInt | None = None
    """MLP width F, instead of the named model's (random init only)."""
    max_positions: PositiveInt | None = None
    """Longest sequence the model is built for, instead of the named model's (random init only)."""
    rope_theta: PositiveFloat | None = None
    """Base of the rotary frequencies, instead of the named model's (random init only); small for short rows."""
    tied_embeddings: bool | None = None
    """Whether embedding and head share their weight, instead of the named model's choice (random init only)."""
    num_experts: PositiveInt | None = None
    """Experts E of a layer, instead of the named model's (random init only; models with experts only)."""
    experts_per_token: PositiveInt | None = None
    """Experts K that each token passes through, instead of the named model's (random init only)."""
    expert_size: PositiveInt | None = None
    """MLP width of one expert, instead of the named model's (random init only)."""
    router_balance: Annotated[float, Field(ge=0.0)] | None = None
    """Weight of the loss that spreads tokens over experts; unset: 0.001 for a model with experts; 0 leaves it out."""
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Residual dropout probability while training."""


class DataSection(Section):
    """Where the training rows come from, and in which order."""

    train: Paths = ()
    """Folders written by `danlu data build`."""
    weights: tuple[PositiveFloat, ...] | None = None
    """Share of each folder in the stream; unset: all rows of all folders once an epoch."""
    shuffle: bool = True
    """Visit the rows of an epoch in a seeded random order; false: in the order of the files."""
    num_workers: NonNegativeInt = 2
    """Loader processes per rank; 0 loads in the training process."""
    prefetch: PositiveInt = 4
    """Steps that each loader process prepares ahead."""
    trim_padding: bool = True
    """Cut each micro-batch to its longest row, so that padding costs nothing."""
    on_corrupt: Literal["fail", "skip"] = "fail"
    """What to do with a damaged shard: stop, or leave out its bad rows and count them."""


class OptimizerSection(Section):
    """AdamW (arXiv 1711.05101)."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """Decoupled decay of matrices and embeddings; norms and biases are never decayed."""
    max_grad_norm: Annotated[float, Field(ge=0.0)] = 1.0
    """Clip the global gradient norm to this value; 0 switches clipping off."""
    fused: Literal["auto", "on", "off"] = "auto"
    """One fused kernel per update; `auto` takes it where device and dtype have it."""


class ScheduleSection(Section):
    """Learning rate over the steps of the run."""

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Shape after the warm-up; `wsd` (warm-up, stable, decay; arXiv 2404.06395) decays only at the end."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up from 0."""
    min_ratio: Fraction = 0.1
    """Final learning rate as a share of the peak."""
    decay_fraction: Fraction = 0.1
    """Share of the run that `wsd` spends decaying."""


class TrainSection(Section):
    """The loop: how long, how big, what to do when something is wrong."""

    output: str = "runs/train"
    """Run folder: config, log, metrics, checkpoints, report."""
    seed: NonNegativeInt = 0
    """Seed of initial weights, data order and dropout."""
    steps: PositiveInt | None = None
    """Optimizer steps of the whole run (give this or `epochs`)."""
    epochs: PositiveInt | None = None
    """Passes over the data (give this or `steps`); an epoch's last step takes the rows that are left."""
    global_batch_size: PositiveInt = 8
    """Sequences per optimizer step, over all ranks and micro-batches."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass of one data rank; what does not fit into one pass is accumulated."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a device."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When loss or gradient is NaN or infinite on any rank: stop and name it, or skip the update on all ranks."""


class ParallelSection(Section):
    """How the work is split over ranks."""

    dp_replicate: Degree | None = None
    """Copies of the model that share the batch; -1: what is left. Unset: what is left with `zero = 0`, else 1."""
    dp_shard: Degree | None = None
    """Ranks that split what a copy holds, as far as `zero` says; -1: what is left. Unset: what is left with `zero`."""
    zero: Literal[0, 1, 2, 3] = 0
    """What `dp_shard` and `cp` ranks split (arXiv 1910.02054): 1 optimizer state, 2 + gradients, 3 + parameters."""
    reshard_after_forward: bool | None = None
    """`zero = 3`: free a block's parameters between its forward and backward pass; unset: where there is no `pp`."""
    prefetch: NonNegativeInt = 1
    """`zero = 3`: blocks that are gathered ahead of the one at work."""
    pp: Degree = 1
    """Ranks that hold consecutive layers (pipeline parallelism); -1: what is left."""
    pp_schedule: Literal[
        "gpipe", "1f1b", "interleaved", "looped_bfs", "zero_bubble", "interleaved_zero_bubble", "zbv", "dualpipev"
    ] = "1f1b"
    """With `pp`: the order of forward and backward passes; `danlu plan schedule` draws them."""
    pp_virtual: PositiveInt | None = None
    """With `pp`: stages that each rank holds; unset: the fewest that the schedule takes."""
    pp_split: tuple[PositiveInt, ...] | None = None
    """With `pp`: blocks of each stage, first stage first; unset: so that the slowest stage is fastest."""
    tp: Degree = 1
    """Ranks that split every matrix (tensor parallelism, arXiv 1909.08053); -1: what is left."""
    sp: bool = True
    """With `tp`: split norms and residuals by sequence between the matrices (arXiv 2205.05198)."""
    cp: Degree = 1
    """Ranks that split every row through attention (context parallelism); -1: what is left."""
    cp_method: Literal["ring", "ulysses"] = "ring"
    """With `cp`: keys travel round the ranks (arXiv 2310.01889), or heads go for tokens (arXiv 2309.14509)."""
    ep: PositiveInt = 1
    """Ranks that experts are spread over (arXiv 2006.16668), among those that would hold the same ones."""
    bucket_cap_mb: PositiveFloat = 25.0
    """Size of a gradient bucket in MiB; a bucket is reduced while the backward pass goes on."""
    timeout_seconds: PositiveInt = 600
    """A collective that takes longer ends the run."""


class PrecisionSection(Section):
    """Number formats."""

    compute_dtype: Literal["fp32", "bf16", "auto"] = "fp32"
    """Matmuls and activations; parameters, optimizer state and reductions stay fp32. `auto`: bf16 where it is fast."""
    tf32: bool = True
    """Let CUDA multiply fp32 matrices in TF32."""
    loss_chunk_mib: PositiveFloat = 64.0
    """Most memory that one chunk of logits may take, in MiB; the whole logits never exist."""


class CheckpointSection(Section):
    """Saving and resuming."""

    every_steps: NonNegativeInt = 0
    """Save after every so many steps; 0: only at the end (and when told to stop)."""
    keep_last: PositiveInt = 2
    """Complete checkpoints to keep; older ones are deleted after a newer one is durable."""
    async_save: bool = True
    """Write while training goes on."""
    save_last: bool = True
    """Save at the end of the run."""


class MetricsSection(Section):
    """What is written down while training."""

    log_every: PositiveInt = 1
    """Steps between lines of `metrics.jsonl` and TensorBoard."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    progress: bool = True
    """Show the progress line on a terminal."""
    trace_schedule: NonNegativeInt = 0
    """With `pp`: the step whose timeline is written to `schedule.json` and `schedule.svg`; 0: none."""


class EvalSection(Section):
    """Held-out loss during training."""

    data: Paths = ()
    """Folders written by `danlu data build`, of rows that are not trained on."""
    held_out_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the training rows that is kept out and evaluated on instead of `data`."""
    every_steps: NonNegativeInt = 0
    """Steps between evaluations; 0: only at the end."""
    max_rows: PositiveInt | None = None
    """Evaluate only the first rows; unset: all."""
    micro_batch_size: PositiveInt = 8
    """Sequences per forward pass."""


class Config(Section):
    """One training run."""

    model: ModelSection = ModelSection()
    """What is trained, and from which weights."""
    data: DataSection = DataSection()
    """Where the training rows come from."""
    optimizer: OptimizerSection = OptimizerSection()
    """AdamW."""
    schedule: ScheduleSection = ScheduleSection()
    """Learning rate over the steps."""
    train: TrainSection = TrainSection()
    """The loop."""
    parallel: ParallelSection = ParallelSection()
    """How the work is split over ranks."""
    precision: PrecisionSection = PrecisionSection()
    """Number formats."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Saving and resuming."""
    metrics: MetricsSection = MetricsSection()
    """What is written down."""
    eval: EvalSection = EvalSection()
    """Held-out loss during training."""
