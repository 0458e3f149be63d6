"""Which experts a token goes to, and with which weights.

A router is one matrix: logits = W h, in fp32 whatever the model computes in, because a logit rounded to bf16 makes ties
and sends tokens elsewhere than the weights say. The K largest logits win; of equal ones the expert with the lower index
(a stable sort, where ``topk`` promises nothing). So the choice is a function of the logits alone, and a forward pass
that is run again for recompute sends every token where it went the first time. There is no noise and no capacity: no
token is dropped.

A token's weights are softmax over its K logits where they are normalised (Mixtral, arXiv:2401.04088; Qwen3-MoE with
``norm_topk_prob``), else its K entries of the softmax over all E logits.

Routers that are only trained through the tokens they favour can collapse onto a few experts, so training adds a loss
(`danlu.objective.balance`). What it needs is sums over a row's tokens, and the sums leave the decoder in a record that
the caller of one forward pass makes and keeps: no state in the modules, so several forward passes may be under way,
and a recomputed block writes the same entry again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def route(logits_TE: Tensor, experts_per_token: int, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Return each token's experts [T, K], the strongest first, and their weights [T, K] in fp32.

    Args:
        logits_TE: fp32 router logits.
        experts_per_token: K.
        normalize: the K weights add up to 1.
    """
    experts_TK = logits_TE.detach().argsort(dim=-1, descending=True, stable=True)[:, :experts_per_token]
    if normalize:
        return experts_TK, logits_TE.gather(1, experts_TK).softmax(-1)
    return experts_TK, logits_TE.softmax(-1).gather(1, experts_TK)


@dataclass(frozen=True, slots=True)
class RouterSums:
    """What one layer's router did with the real tokens of each row.

    Attributes:
        counts_BE: how many were sent to each expert (each token counts K times), fp32, without gradient.
        shares_BE: sum of their softmax probabilities over all experts, fp32; the gradient goes through these.
    """

    counts_BE: Tensor
    shares_BE: Tensor


class RouterRecord:
    """The routers' sums of one forward pass: made by the caller, filled by the decoder.

    Args:
        document_ids_BS: document of each token; -1 is padding, which does not count.

    Attributes:
        layers: layer -> sums. A layer that runs again (recompute) replaces its entry by an equal one.
        num_tokens_B: real tokens of each row.
    """

    def __init__(self, document_ids_BS: Tensor) -> None:
        self.is_real_BS = document_ids_BS >= 0
        self.num_tokens_B = self.is_real_BS.sum(1)
        self.layers: dict[int, RouterSums] = {}

    def add(self, layer: int, logits_TE: Tensor, experts_TK: Tensor) -> None:
        """Write down one layer's choices for the tokens of all rows, row after row."""
        (num_rows, length), num_experts = self.is_real_BS.shape, logits_TE.shape[1]
        real_BS1 = self.is_real_BS.unsqueeze(-1).float()
        shares_BE = (logits_TE.softmax(-1).view(num_rows, length, num_experts) * real_BS1).sum(1)
        with torch.no_grad():
            chosen_BX = experts_TK.reshape(num_rows, -1)
            weight_BX = real_BS1.expand(-1, -1, experts_TK.shape[1]).reshape(num_rows, -1)
            counts_BE = torch.zeros_like(shares_BE).scatter_add_(1, chosen_BX, weight_BX)
        self.layers[layer] = RouterSums(counts_BE, shares_BE)
