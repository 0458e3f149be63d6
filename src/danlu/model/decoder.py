"""The decoder: embedding, pre-norm blocks, final norm. Plain torch, every supported family, one device.

    hidden = hidden + attention(norm(hidden));  hidden = hidden + mlp(norm(hidden))

It returns the hidden states after the final norm. The head belongs to the objective, which works in token chunks, so
that no [tokens x vocabulary] tensor exists; `head_weight_VD` is what it multiplies by. Tied embeddings are one
parameter under one name, not two that are tied afterwards, so that neither ``to_empty`` nor an optimizer can separate
them.

Blocks are the unit later techniques work on (recompute, sharding, pipeline stages): a block is called with the hidden
states and two values that are made once a forward, the attention plan and the rotary angles, and returns hidden states.

Mixed precision is explicit: parameters keep their dtype, the embedding's output is cast to ``compute_dtype``, and each
Linear computes in the dtype of its input (see `linear`). Norm statistics and softmax are fp32.

Initial values: normal with standard deviation s = sqrt(2 / (5 D)) (small init, arXiv:1910.05895: it follows the width,
where a fixed 0.02 is too small for narrow models and too large for wide ones), and s / sqrt(2 * layers) for the two
projections of a block that write into the residual stream (GPT-2, Radford et al. 2019, section 2.3), so that its
variance does not grow with depth; biases 0, norms 1. Each parameter draws from its own CPU generator seeded by
(seed, FQN), each matrix of a stack of experts from (seed, FQN, number of the expert): its values do not depend on
device, order, world size or on which other parameters exist.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.base.errors import UserError
from danlu.model.attention import Attention, AttentionPlan, PlanAttention, plan_attention
from danlu.model.cache import KVCache
from danlu.model.experts import MoE
from danlu.model.mlp import MLP
from danlu.model.norm import LayerNorm, RMSNorm
from danlu.model.rope import Rotation, rotation
from danlu.model.router import RouterRecord
from danlu.model.spec import ModelSpec


def _build_norm(spec: ModelSpec) -> nn.Module:
    if spec.norm == "rmsnorm":
        return RMSNorm(spec.hidden_size, spec.norm_eps)
    return LayerNorm(spec.hidden_size, spec.norm_eps, bias=spec.norm_bias)


RESIDUAL_WRITERS = (".attention.output", ".mlp.down", ".mlp.experts.down")


class Embedding(nn.Module):
    """A table of ``rows`` vectors; the parameter is uninitialised until loaded or drawn."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows at ``index``, [..., width]."""
        return F.embedding(index, self.weight)


class Block(nn.Module):
    """One pre-norm residual block."""

    def __init__(self, spec: ModelSpec, layer: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = _build_norm(spec)
        self.attention = Attention(spec, layer)
        self.mlp_norm = _build_norm(spec)
        self.mlp = MoE(spec, layer) if spec.has_experts(layer) else MLP(spec)
        self.dropout = dropout

    def forward(
        self, hidden_BSD: Tensor, plan: AttentionPlan, turn: Rotation | None, routers: RouterRecord | None = None
    ) -> Tensor:
        """Return the hidden states after this block, [B, S, D]; a router writes what it did into ``routers``."""
        hidden_BSD = hidden_BSD + self._drop(self.attention(self.attention_norm(hidden_BSD), plan, turn))
        normed_BSD = self.mlp_norm(hidden_BSD)
        branch_BSD = self.mlp(normed_BSD, routers) if isinstance(self.mlp, MoE) else self.mlp(normed_BSD)
        return hidden_BSD + self._drop(branch_BSD)

    def _drop(self, branch_BSD: Tensor) -> Tensor:
        return F.dropout(branch_BSD, self.dropout, self.training) if self.dropout else branch_BSD


class Blocks(nn.Module):
    """Blocks under their numbers in the whole model, so that a part of it has the whole one's names."""

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        super().__init__()
        for layer, block in blocks.items():
            self.add_module(str(layer), block)

    def __iter__(self) -> Iterator[Block]:
        return iter(cast(dict[str, Block], self._modules).values())

    def __len__(self) -> int:
        return len(self._modules)

    def items(self) -> list[tuple[str, Block]]:
        """Return each block with its number in the whole model, as text."""
        return list(cast(dict[str, Block], self._modules).items())

    def __getitem__(self, layer: int) -> Block:
        return cast(Block, self._modules[str(layer)])


class Decoder(nn.Module):
    """A decoder-only language model without its head, or consecutive layers of one (a pipeline stage).

    Args:
        spec: sizes and choices of the whole model.
        compute_dtype: dtype of the activations and of every matrix product.
        dropout: probability on the embedding and on each residual branch, in training mode only.
        layers: the blocks that are here; None is all. With the first come the embeddings, with the last the final norm
            and the head (and where embeddings are tied, a copy of the table).

    Attributes:
        plan_attention: makes the plan of each forward pass; what spreads rows over ranks replaces it.
        borrowed_head: what has the head's weight where another stage on the same rank owns it, in a tuple so that it is
            no module of this one.

    Parameters are allocated on the current default device and uninitialised: call `init_weights` or load a checkpoint.
    Under ``torch.device("meta")`` nothing is allocated; ``to_empty`` then `init_weights` gives the same values.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        compute_dtype: torch.dtype = torch.float32,
        dropout: float = 0.0,
        layers: range | None = None,
    ) -> None:
        super().__init__()
        layers = range(spec.num_layers) if layers is None else layers
        self.is_first, self.is_last = 0 in layers, spec.num_layers - 1 in layers
        self.spec, self.compute_dtype, self.dropout = spec, compute_dtype, dropout
        self.plan_attention: PlanAttention = plan_attention
        table = self.is_first or (self.is_last and spec.tied_embeddings)
        learned = self.is_first and spec.positions == "learned"
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size) if table else None
        self.position_embedding = Embedding(spec.max_positions, spec.hidden_size) if learned else None
        self.blocks = Blocks({layer: Block(spec, layer, dropout) for layer in layers})
        self.final_norm = _build_norm(spec) if self.is_last else None
        self.head = Embedding(spec.vocab_size, spec.hidden_size) if self.is_last and not spec.tied_embeddings else None
        self.borrowed_head: tuple[Embedding, ...] = ()

    @property
    def head_weight_VD(self) -> nn.Parameter:
        """The output head [V, D]: the embedding itself where the spec ties them. Only the last layers have one."""
        holder = self.head or self.embedding or self.borrowed_head[0]
        return holder.weight

    def borrow_head(self, embedding: Embedding) -> None:
        """Take a tied head's weight from ``embedding``, which another part of the model on this rank owns."""
        self.embedding, self.borrowed_head = None, (embedding,)

    def forward(
        self,
        tokens_BS: Tensor,
        *,
        positions_BS: Tensor | None = None,
        document_ids_BS: Tensor | None = None,
        cache: KVCache | None = None,
        routers: RouterRecord | None = None,
        hidden_BSD: Tensor | None = None,
    ) -> Tensor:
        """Return hidden_BSD after the final norm (after the last block here, for a part), in ``compute_dtype``.

        Args:
            tokens_BS: token ids, int64.
            positions_BS: position of each token in its document; None counts from each document's start.
            document_ids_BS: tokens see only tokens with their own id; -1 is padding. None is one document a row.
            cache: keys and values of earlier tokens; needs ``positions_BS`` (a token's slot is its position) and
                excludes ``document_ids_BS``.
            routers: is filled with what the routers did with these tokens, for the balance loss; None leaves it out.
            hidden_BSD: what the layers before these gave; for parts that do not begin with the first.

        Raises:
            UserError: more tokens a row than the model has positions for.
        """
        self.check_length(tokens_BS.shape[1] + (0 if cache is None else cache.num_filled))
        plan = self.plan_attention(tokens_BS, positions_BS, document_ids_BS, cache)
        if hidden_BSD is None:
            hidden_BSD = self._embed(tokens_BS, plan)
        turn = self._rotation(plan) if self.spec.positions == "rope" else None
        for block in self.blocks:
            hidden_BSD = block(hidden_BSD, plan, turn, routers)
        return hidden_BSD if self.final_norm is None else self.final_norm(hidden_BSD)

    def _embed(self, tokens_BS: Tensor, plan: AttentionPlan) -> Tensor:
        assert self.embedding is not None, "only the part with the first layer can begin with tokens"
        hidden_BSD = self.embedding(tokens_BS)
        if self.position_embedding is not None:
            hidden_BSD = hidden_BSD + self.position_embedding(plan.positions_BS)
        hidden_BSD = hidden_BSD.to(self.compute_dtype)
        return F.dropout(hidden_BSD, self.dropout, self.training) if self.dropout else hidden_BSD

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every parameter anew: the same values for the same seed, whatever device or world the model lives in."""
        for name, parameter in self.named_parameters():
            parameter.copy_(initial_value(self.spec, name, parameter.shape, seed))

    def new_cache(self, batch_size: int, capacity: int) -> KVCache:
        """Return an empty cache for the layers and key/value heads that are here."""
        layers = [int(layer) for layer, _ in self.blocks.items()]
        block = self.blocks[layers[0]]
        return KVCache(
            self.spec, batch_size=batch_size, capacity=capacity, dtype=self.compute_dtype,
            device=next(self.parameters()).device, layers=range(layers[0], layers[-1] + 1),
            num_kv_heads=block.attention.key.out_features // self.spec.head_dim,
        )  # fmt: skip

    def next_logits(self, tokens_BS: Tensor, positions_BS: Tensor, last_B: Tensor, cache: KVCache) -> Tensor:
        """Run one more chunk of tokens and return the logits behind the last real token of each row, [B, V] in fp32.

        Args:
            tokens_BS: the chunk; rows may be padded on the right.
            positions_BS: their positions, which are their slots in the cache.
            last_B: index of each row's last real token in the chunk.
            cache: keys and values of earlier tokens; grows by the chunk.
        """
        hidden_BSD = self(tokens_BS, positions_BS=positions_BS, cache=cache)
        hidden_BD = hidden_BSD[torch.arange(tokens_BS.shape[0], device=last_B.device), last_B]
        return F.linear(hidden_BD, self.head_weight_VD.to(hidden_BD.dtype)).float()

    def check_length(self, length: int) -> None:
        """Raise `UserError` where a row of ``length`` tokens has no positions in this model."""
        limit = self.spec.max_positions if self.spec.positions == "learned" else None
        if not self.training and self.spec.eval_max_positions is not None:
            limit = self.spec.eval_max_positions
        if limit is not None and length > limit:
            raise UserError(
                "the input is longer than the model's positions",
                seen=f"{length} tokens",
                legal=f"<= {limit}",
                hint="shorten the rows or use a model with a longer context",
            )

    def _rotation(self, plan: AttentionPlan) -> Rotation:
        scaling, lengths_BS = self.spec.rope_scaling, None
        if scaling is not None and scaling.kind == "dynamic":
            lengths_BS = plan.document_lengths()
        return rotation(self.spec, plan.positions_BS, self.compute_dtype, lengths_BS)


def initial_value(spec: ModelSpec, name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return what the parameter ``name`` of a whole model starts as, fp32 on the CPU, [shape].

    Expert e of a stacked matrix ``name`` is drawn as if it were the parameter ``name.e``.
    """
    module, _, leaf = name.rpartition(".")
    if leaf == "bias":
        return torch.zeros(*shape)
    if len(shape) == 1:
        return torch.ones(*shape)
    if len(shape) == 3:
        return torch.stack([initial_value(spec, f"{name}.{expert}", shape[1:], seed) for expert in range(shape[0])])
    std = math.sqrt(2 / (5 * spec.hidden_size))
    if module.removesuffix(".weight").endswith(RESIDUAL_WRITERS):
        std /= math.sqrt(2 * spec.num_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(*shape).normal_(0.0, std, generator=generator)
