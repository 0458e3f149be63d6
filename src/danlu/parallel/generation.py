"""Generation by several ranks: a decoder whose layers, heads and vocabulary are spread, and that still finds one token.

Every rank runs the same loop over the same prompts (`danlu.model.generate`) and differs in one call: its own layers run
with a cache of their own keys, hidden states go from stage to stage, and the logits of the last position, a row of V
numbers a prompt, are gathered from the vocabulary's parts and sent to all stages. So all ranks pick the same token
from the same numbers, and none needs to be told.

One token at a time leaves a pipeline's other stages idle: this makes a model usable that fits on no single device, not
one that fits faster. For that, give each rank the whole model and a share of the prompts.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from danlu.model.cache import KVCache
from danlu.model.decoder import Decoder
from danlu.model.spec import ModelSpec
from danlu.parallel.collectives import all_gather
from danlu.parallel.pipeline import Channels


class SpreadDecoder(Decoder):
    """This rank's stage of a decoder, after `apply_tensor`, that generates together with the others."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range,
        compute_dtype: torch.dtype,
        channels: Channels | None,
        pipeline_group: dist.ProcessGroup,
        tensor_group: dist.ProcessGroup,
    ) -> None:
        """Build the stage.

        Args:
            spec: the whole model.
            layers: this stage's.
            compute_dtype: dtype of the activations.
            channels: to the other stages; None where there is one.
            pipeline_group: the ranks of the other stages.
            tensor_group: the ranks of the other heads and parts of the vocabulary.
        """
        super().__init__(spec, compute_dtype=compute_dtype, layers=layers)
        self.channels, self.pipeline_group, self.tensor_group = channels, pipeline_group, tensor_group

    def next_logits(self, tokens_BS: Tensor, positions_BS: Tensor, last_B: Tensor, cache: KVCache) -> Tensor:
        """See `Decoder.next_logits`; every rank gets the same numbers."""
        hidden_BSD: Tensor | None = None
        (num_rows, length), channels = tokens_BS.shape, self.channels
        if channels is not None and not self.is_first:
            shape = (num_rows, length, self.spec.hidden_size)
            hidden_BSD = torch.empty(shape, dtype=self.compute_dtype, device=tokens_BS.device)
            channels.receive(hidden_BSD, channels.place - 1).wait()
        out_BSD = self(tokens_BS, positions_BS=positions_BS, cache=cache, hidden_BSD=hidden_BSD)
        if channels is not None and not self.is_last:
            channels.send(out_BSD.contiguous(), channels.place + 1).wait()
        logits_BV = torch.empty(num_rows, self.spec.vocab_size, dtype=torch.float32, device=tokens_BS.device)
        if self.is_last:
            logits_BV.copy_(self._join(out_BSD[torch.arange(num_rows, device=last_B.device), last_B]))
        if channels is not None:
            dist.broadcast(logits_BV, group=self.pipeline_group, group_src=self.pipeline_group.size() - 1)
        return logits_BV

    def _join(self, hidden_BD: Tensor) -> Tensor:
        """Return the logits over the whole vocabulary, from this rank's part and the others'."""
        own_BV = F.linear(hidden_BD, self.head_weight_VD.to(hidden_BD.dtype)).float()
        size = self.tensor_group.size()
        if size == 1:
            return own_BV
        parts = own_BV.new_empty(size, *own_BV.shape)
        all_gather(parts.view(-1), own_BV.contiguous().view(-1), self.tensor_group)
        return torch.cat(parts.unbind(0), dim=1)[:, : self.spec.vocab_size]
