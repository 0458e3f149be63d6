"""The loss of a micro-batch on this rank's layout: what training and evaluation both call.

Everything that a layout changes about one micro-batch is here: which part of each row this rank has, which layers, and
what of the loss it can see. Sums over ranks are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from danlu.data.batch import MicroBatch
from danlu.model.decoder import Decoder
from danlu.model.router import RouterRecord
from danlu.objective.balance import add_balance
from danlu.objective.cross_entropy import Loss, Objective
from danlu.parallel.pipeline import Pipeline


class Forward:
    """A micro-batch's summed loss: moved to the device, laid out for this rank, through model and objective.

    A pipeline's rank has some stages of the model; then it is the pipeline that calls `stage` for each.
    """

    def __init__(
        self,
        parts: Mapping[int, Decoder],
        objective: Objective,
        *,
        device: torch.device,
        lay_out: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
        router_balance: float = 0.0,
        join_routers: Callable[[RouterRecord], None] = lambda _: None,
        pipeline: Pipeline | None = None,
        sequence_parts: int = 1,
    ) -> None:
        """Bind what stays the same.

        Args:
            parts: the model, as stage 0, or this rank's stages of it.
            objective: gives the summed loss; it owns the head.
            device: where the model is.
            lay_out: cuts or pads a micro-batch for this rank.
            router_balance: coefficient of the routers' balance loss in training; 0 leaves it out.
            join_routers: makes a record of this rank's parts of rows one of whole rows.
            pipeline: runs the stages; None where this rank has the whole model.
            sequence_parts: ranks that split the hidden states of a laid-out row between stages (sequence parallelism).
        """
        self.parts, self.objective, self.device, self.lay_out = parts, objective, device, lay_out
        self.router_balance, self.join_routers = router_balance, join_routers
        self.pipeline, self.sequence_parts = pipeline, sequence_parts

    @property
    def is_training(self) -> bool:
        """Whether the model is in training mode."""
        return next(iter(self.parts.values())).training

    def set_training(self, on: bool) -> None:
        """Put all parts into training or evaluation mode."""
        for part in self.parts.values():
            part.train(on)

    def __call__(self, batch: MicroBatch) -> Loss:
        """Return the loss of one micro-batch (host tensors), summed over its target tokens."""
        loss = self.stage(0, self.prepare(batch), None)[1]
        assert loss is not None
        return loss

    def prepare(self, batch: MicroBatch) -> MicroBatch:
        """Return this rank's part of a micro-batch, on the device."""
        return MicroBatch(*(tensor.to(self.device, non_blocking=True) for tensor in self.lay_out(batch)))

    def stage(self, stage: int, batch: MicroBatch, hidden_BSD: Tensor | None) -> tuple[Tensor, Loss | None]:
        """Run one stage on a prepared micro-batch; return its hidden states and what it has of the loss."""
        part = self.parts[stage]
        routers = RouterRecord(batch.document_ids_BS) if self.router_balance and part.training else None
        hidden_BSD = part(
            batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS, routers=routers,
            hidden_BSD=hidden_BSD,
        )  # fmt: skip
        assert hidden_BSD is not None
        loss = self.objective(hidden_BSD, part.head_weight_VD, batch) if part.is_last else None
        if routers is None or not routers.layers:
            return hidden_BSD, loss
        self.join_routers(routers)
        num_layers = part.spec.num_expert_layers
        return hidden_BSD, add_balance(loss, routers, batch, coefficient=self.router_balance, num_layers=num_layers)

    def sum_losses(self, batches: Sequence[MicroBatch]) -> float:
        """Return the summed loss of micro-batches without gradients; on a pipeline's other ranks 0."""
        if self.pipeline is None:
            return sum(float(self(batch).total) for batch in batches)
        losses: list[Tensor] = []
        prepared = [self.prepare(batch) for batch in batches]

        def run(stage: int, index: int, hidden_BSD: Tensor | None) -> tuple[Tensor, None]:
            hidden_BSD, loss = self.stage(stage, prepared[index], hidden_BSD)
            losses.extend([] if loss is None else [loss.total])
            return hidden_BSD, None

        self.pipeline.run(lambda index: self.empty(prepared[index]), len(prepared), run)
        return sum(float(loss) for loss in losses)

    def empty(self, batch: MicroBatch) -> Tensor:
        """Return memory for the hidden states between stages of a prepared micro-batch."""
        part = next(iter(self.parts.values()))
        rows, length = batch.tokens_BS.shape
        shape = (rows, length // self.sequence_parts, part.spec.hidden_size)
        return torch.empty(shape, dtype=part.compute_dtype, device=self.device)
