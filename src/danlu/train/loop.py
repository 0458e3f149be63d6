"""The training loop. There is one; fine-tuning, pretraining and distillation differ by objective and data.

Order of a run: check the config, open the data and find the model (all before a process group exists, so a typing slip
costs a second), join the other ranks, build, resume, then steps until the end or a signal. The state that a checkpoint
must hold is exactly `_Run.tensors` and `_Run.record`: model, optimizer, random generators of every rank, and a few
numbers. The schedule is a function of the step and the data order one of the samples seen; neither has state.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from danlu.base import env
from danlu.base.errors import UserError
from danlu.base.host_memory import ask_for_huge_pages, keep_freed_memory
from danlu.base.log import log
from danlu.checkpoint.store import Checkpoint, CheckpointStore, load_tensors
from danlu.config.rules import check_config
from danlu.config.schema import Config
from danlu.data.batch import StepBatch
from danlu.data.dataset import RowSource
from danlu.model.spec import ModelSpec
from danlu.parallel.mesh import World, open_world, sum_over
from danlu.parallel.pipeline import Traced
from danlu.parallel.placement import Piece
from danlu.parallel.seed import set_seed
from danlu.train import build
from danlu.train.evaluate import held_out_loss
from danlu.train.layout import check_layout
from danlu.train.metrics import MetricsWriter, peak_memory_bytes
from danlu.train.optimizer import learning_rate_at
from danlu.train.pipeline_trace import write_trace
from danlu.train.run_folder import check_run_folder, claim_run_folder, find_resume
from danlu.train.start import Start, hold_out, open_sources, plan_start
from danlu.train.step import (
    StepResult,
    count_tokens,
    find_culprits,
    forward_backward,
    forward_backward_pipelined,
    nonfinite_error,
    reduce_losses,
)
from danlu.train.stop import StopSignal


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    folder: Path
    step: int
    """Optimizer steps done."""
    finished: bool
    """False where a signal stopped it early."""
    losses: dict[int, float] = field(default_factory=dict)
    """Loss of each step that was logged in this process, by step."""
    held_out: dict[str, float] | None = None
    """Last evaluation: ``loss``, ``perplexity``, ``bits_per_byte``; None without ``eval.data``."""

    def as_json(self) -> dict[str, Any]:
        """Return the result as a JSON document."""
        return {**dataclasses.asdict(self), "folder": str(self.folder)}


def train(config: Config, *, resume: str = "auto") -> TrainResult:
    """Train as ``config`` says, alone or as one rank of a launched job.

    Args:
        config: the run.
        resume: ``auto`` continues from the newest checkpoint of the run folder where there is one; ``never`` insists on
            a new run; else a checkpoint or run folder to continue from.

    Raises:
        UserError: the config or the data is wrong; raised before any process group or model exists.
        RunError: training failed (non-finite loss, checkpoint not writable).
    """
    degrees = check_config(config, env.ranks().world_size)
    folder = check_run_folder(config)
    checkpoint = find_resume(folder, resume)
    folders = open_sources(config.data.train, config.data.on_corrupt)
    other = open_sources(config.eval.data, config.data.on_corrupt)
    evaluated = [*folders, *other] if config.eval.held_out_fraction else other
    start = plan_start(config.model, folders, evaluated)
    check_layout(config, start.spec, degrees, max(source.sequence_length for source in folders))
    sources, split_off = hold_out(folders, config.eval.held_out_fraction, seed=config.train.seed)
    held_out = [*other, *split_off]
    if checkpoint is not None:
        check_same_run(checkpoint, config, start, sources)
    with (
        claim_run_folder(folder, config, tokenizer=folders[0].folder / "tokenizer"),
        open_world(degrees, device=config.train.device, timeout_seconds=config.parallel.timeout_seconds) as world,
    ):
        if world.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = config.precision.tf32
        else:  # before the first large tensor
            ask_for_huge_pages()
            keep_freed_memory()
        run = _Run(config, start, sources, held_out, world, data_config=folders[0].manifest.get("config", {}))
        if checkpoint is not None:
            run.restore(checkpoint)
        with run.store:
            return run.train()


def check_same_run(checkpoint: Checkpoint, config: Config, start: Start, sources: Sequence[RowSource]) -> None:
    """Refuse to continue with another model, seed or data: the loss would go on without a word, and mean nothing."""
    before = checkpoint.record["identity"]
    for name, value in identity(config, start.spec, sources).items():
        if (old := before.get(name)) != value:
            if isinstance(value, dict) and isinstance(old, dict):  # of a whole model, what differs
                changed = [key for key in value if old.get(key) != value[key]]
                value, old = ({key: side.get(key) for key in changed} for side in (value, old))
            raise UserError(
                f"cannot resume: {name} is not what the checkpoint was trained with",
                where=str(checkpoint.folder),
                seen=value if name != "data" else "other rows or another tokenizer",
                legal=str(old) if name != "data" else None,
                hint="restore the old value, or start a new run from this one's weights with model.name = RUN_FOLDER",
            )


def identity(config: Config, spec: ModelSpec, sources: Sequence[RowSource]) -> dict[str, Any]:
    """Return, as plain JSON values, what must not change between a checkpoint and the run that continues it."""
    values = {
        "model": dataclasses.asdict(spec),
        "seed": config.train.seed,
        "data": [source.fingerprint for source in sources],
        "weights": config.data.weights,
        "shuffle": config.data.shuffle,
    }
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


class _Run:
    """One run on one rank: everything built, and the counters."""

    def __init__(
        self,
        config: Config,
        start: Start,
        sources: Sequence[RowSource],
        held_out: Sequence[RowSource],
        world: World,
        data_config: dict[str, Any],
    ) -> None:
        self.data_config = data_config  # how prompts were made: evaluation and chat make them alike
        self.config, self.world, self.sources, self.held_out = config, world, sources, held_out
        self.folder = Path(config.train.output)
        self.spec = start.spec
        self.step = self.samples_seen = self.tokens_seen = self.skipped = 0
        self.skipped_before = 0  # at the last record
        self._set_seed()
        sequence_length = max(source.sequence_length for source in sources)
        self.built = build.build_model(config, start, world, sequence_length)
        self.optimizer = build.build_optimizer(config, self.built, world)
        objective = build.build_objective(config, self.spec, world)
        self.forward = build.build_forward(config, self.built, objective, world)
        self.rates = build.build_rates(config, self.spec, sequence_length, world)
        self.total_steps = self._total_steps()
        self.losses: dict[int, float] = {}
        self.store = CheckpointStore(
            self.folder / "checkpoints",
            group=world.checkpoint_group,
            keep_last=config.checkpoint.keep_last,
            asynchronous=config.checkpoint.async_save,
        )
        log.info(
            "%s, %s parameters%s, %s on %d x %s (%s); %d steps",
            self.spec.family,
            f"{self.spec.num_parameters():,}",
            "" if self.spec.num_experts is None else f" ({self.spec.num_active_parameters():,} a token)",
            str(self.built.compute_dtype).removeprefix("torch."),
            world.size,
            world.device.type,
            world.degrees,
            self.total_steps,
        )
        if world.rank == 0 and config.schedule.warmup_steps > self.total_steps:  # known so late only where epochs count
            log.warning(
                "the warm-up is longer than the run: schedule.warmup_steps = %d of %d steps, so the learning rate "
                "never reaches its peak",
                config.schedule.warmup_steps,
                self.total_steps,
            )

    def _total_steps(self) -> int:
        train = self.config.train
        if train.steps is not None:
            return train.steps
        rows = sum(len(source) for source in self.sources)
        assert train.epochs is not None
        return train.epochs * -(-rows // train.global_batch_size)

    def _set_seed(self) -> None:
        world = self.world
        parts = (world.place("pp"), world.place("cp"), world.place("tp") if self.config.parallel.sp else 0)
        set_seed(self.config.train.seed, data_rank=world.data_rank, parts=parts, step=self.step)

    # --- state -------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor | Piece]:
        """Return the live pieces that a checkpoint holds; random states are copies, under this rank's name."""
        tensors: dict[str, Tensor | Piece] = {f"model.{name}": piece for name, piece in self.built.pieces().items()}
        tensors |= {f"optimizer.{name}": piece for name, piece in self.optimizer.tensors().items()}
        tensors[f"rng.{self.world.rank}.cpu"] = torch.get_rng_state()
        if self.world.device.type == "cuda":
            tensors[f"rng.{self.world.rank}.cuda"] = torch.cuda.get_rng_state(self.world.device)
        return tensors

    def record(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint holds, equal on every rank."""
        return {
            "samples_seen": self.samples_seen,
            "skipped": self.skipped,
            "tokens_seen": self.tokens_seen,
            "world_size": self.world.size,
            "layout": dataclasses.asdict(self.world.degrees),
            "device": self.world.device.type,
            "identity": identity(self.config, self.spec, self.sources),
            "data_config": self.data_config,
            "config": self.config.model_dump(mode="json"),
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a checkpoint in place. Its random states are used where the world is the same, else made anew."""
        record = checkpoint.record
        self.step, self.samples_seen = int(record["step"]), int(record["samples_seen"])
        self.tokens_seen, self.skipped = int(record["tokens_seen"]), int(record["skipped"])
        self.skipped_before = self.skipped
        tensors = self.tensors()
        # with sequence parallelism tensor parallel peers draw other numbers, without it they must draw the same
        was_split = record.get("config", {}).get("parallel", {}).get("sp")
        same_world = (record.get("layout"), record.get("device"), was_split) == (
            dataclasses.asdict(self.world.degrees), self.world.device.type, self.config.parallel.sp
        )  # fmt: skip
        if not same_world:
            tensors = {name: value for name, value in tensors.items() if not name.startswith("rng.")}
        load_tensors(checkpoint, tensors, unread=("rng.",), group=self.world.checkpoint_group)
        if same_world:
            torch.set_rng_state(cast(Tensor, tensors[f"rng.{self.world.rank}.cpu"]))
            if self.world.device.type == "cuda":
                torch.cuda.set_rng_state(cast(Tensor, tensors[f"rng.{self.world.rank}.cuda"]), self.world.device)
        else:
            self._set_seed()
            log.info("another layout than the checkpoint's: the random states of its ranks are drawn anew")
        log.info("resumed from %s: step %d of %d", checkpoint.folder, self.step, self.total_steps)
        if self.step >= self.total_steps and self.world.rank == 0:
            log.warning("nothing is left to train; for more steps raise train.steps or train.epochs")

    def save(self) -> None:
        """Save the state as it is now."""
        self.store.save(self.step, self.tensors(), self.record())

    # --- training ----------------------------------------------------------------------------------------------

    def train(self) -> TrainResult:
        """Run the remaining steps."""
        config, metrics = self.config, self.config.metrics
        loader = build.build_loader(config, self.sources, self.world, self.samples_seen)
        held_out: dict[str, float] | None = None
        saved = self.step if self.step else -1
        stopped = False
        folder = self.folder if self.world.rank == 0 else None
        with (
            StopSignal() as stop,
            MetricsWriter(
                folder,
                total_steps=self.total_steps,
                first_step=self.step,
                tensorboard=metrics.tensorboard,
                progress=metrics.progress,
            ) as writer,
        ):
            batches = iter(loader) if self.step < self.total_steps else iter(())
            while self.step < self.total_steps:
                began = time.perf_counter()
                batch = next(batches)
                waited = time.perf_counter() - began
                own = count_tokens(batch.micro_batches) if self.world.counts_rows else (0, 0)
                valid_tokens, tokens, stops = map(int, sum_over(self.world.group, *own, stop.received is not None))
                if stops:
                    stopped = True
                    log.warning("stopping after step %d (%s)", self.step, stop.received or "a signal to another rank")
                    break
                self._step(batch, valid_tokens, tokens, began, waited, writer)
                if config.eval.every_steps and self.step % config.eval.every_steps == 0:
                    held_out = self._evaluate(writer)
                if config.checkpoint.every_steps and self.step % config.checkpoint.every_steps == 0:
                    self.save()
                    saved = self.step
            if saved != self.step and (stopped or config.checkpoint.save_last):
                self.save()
            self.store.wait()  # an evaluation that fails must not cost the run
            if self.held_out and not stopped and (held_out is None or self.step % max(1, config.eval.every_steps)):
                held_out = self._evaluate(writer)
        return TrainResult(self.folder, self.step, not stopped, self.losses, held_out)

    def _step(
        self, batch: StepBatch, valid_tokens: int, tokens: int, began: float, waited: float, writer: MetricsWriter
    ) -> None:
        config, reducer = self.config, self.built.reducer
        rate = self._learning_rate()
        self.optimizer.set_learning_rate(rate)
        loss_sum, parts = self._forward_backward(batch, valid_tokens)
        norm = self.optimizer.clip(config.optimizer.max_grad_norm)
        bad = not abs(norm) < float("inf")
        if bad:
            samples = range(batch.first_sample, batch.first_sample + batch.num_samples)
            culprits = find_culprits(loss_sum, samples, self.world)
            error = nonfinite_error(self.step + 1, norm, culprits)
            if config.train.on_nonfinite == "stop":
                raise error
            self.skipped += 1
            log.warning("update skipped on all ranks: %s", error)
        else:
            self.optimizer.step()
        reducer.zero()
        self.step += 1
        self.samples_seen = batch.first_sample + batch.num_samples
        self.tokens_seen += tokens
        result = StepResult(loss_sum, valid_tokens, norm, bad, parts)
        self._log(result, rate, writer, tokens=tokens, began=began, waited=waited)

    def _forward_backward(self, batch: StepBatch, valid_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        passed = (self.forward, batch.micro_batches, self.built.reducer)
        device, pipeline, step = self.world.device, self.built.pipeline, self.step + 1
        if pipeline is None:
            return forward_backward(*passed, valid_tokens=valid_tokens, device=device)
        if step != self.config.metrics.trace_schedule:
            return forward_backward_pipelined(*passed, valid_tokens=valid_tokens, device=device)
        trace: list[Traced] = []
        sums = forward_backward_pipelined(*passed, valid_tokens=valid_tokens, device=device, trace=trace)
        write_trace(self.folder, trace, pipeline.schedule(len(batch.micro_batches)), self.world, step=step)
        return sums

    def _learning_rate(self) -> float:
        schedule = self.config.schedule
        return learning_rate_at(
            self.step - self.skipped,  # a skipped update does not move the schedule
            kind=schedule.kind,
            peak=self.config.optimizer.learning_rate,
            total_steps=self.total_steps,
            warmup_steps=schedule.warmup_steps,
            min_ratio=schedule.min_ratio,
            decay_fraction=schedule.decay_fraction,
        )

    def _log(
        self, result: StepResult, rate: float, writer: MetricsWriter, *, tokens: int, began: float, waited: float
    ) -> None:
        self.rates.add(tokens=tokens, seconds=time.perf_counter() - began, data_wait=waited)
        if self.step % self.config.metrics.log_every and self.step != self.total_steps:
            return
        losses = reduce_losses(result, self.world)
        self.losses[self.step] = losses["loss"]
        record = {
            "step": self.step,
            **losses,
            "grad_norm": result.grad_norm,
            "lr": rate,
            "valid_tokens": result.valid_tokens,
            "tokens_seen": self.tokens_seen,
            **self.rates.take(),
            "peak_memory_bytes": peak_memory_bytes(self.world.device),
            "skipped": self.skipped - self.skipped_before,
        }
        self.skipped_before = self.skipped
        writer.write(record)

    def _evaluate(self, writer: MetricsWriter) -> dict[str, float]:
        evaluation = self.config.eval
        numbers = held_out_loss(
            self.forward,
            self.held_out,
            world=self.world,
            micro_batch_size=evaluation.micro_batch_size,
            max_rows=evaluation.max_rows,
        )
        self.built.reducer.release()
        writer.write({"step": self.step, **{f"eval_{name}": value for name, value in numbers.items()}})
        log.info("held-out loss %.4f, perplexity %.2f", numbers["loss"], numbers["perplexity"])
        return numbers
