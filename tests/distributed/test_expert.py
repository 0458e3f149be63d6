"""Experts on several ranks: tokens arrive where their experts are, come back, and gradients go to whom they belong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from danlu.base.errors import UserError
from danlu.base.layout import Degrees, check_expert
from danlu.model.decoder import Decoder, initial_value
from danlu.model.experts import MoE
from danlu.model.presets import PRESETS
from danlu.parallel.expert import ExpertDispatch, apply_expert
from danlu.parallel.mesh import open_world
from danlu.parallel.placement import Block, Piece
from distributed.pool import RankPool

pytestmark = pytest.mark.timeout(120)
SPEC = replace(
    PRESETS["tiny-moe"], num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=2, head_dim=8, num_experts=8,
    experts_per_token=2, expert_size=12, vocab_size=64,
)  # fmt: skip


def travel(counts: list[list[int]]) -> tuple[list[tuple[int, int]], list[int], bool]:
    """Send rows that name their rank and expert; return what arrived, its counts, and whether they came back."""
    with open_world(device="cpu") as world:
        mine = counts[world.rank]
        named = [(world.rank, expert) for expert, count in enumerate(mine) for _ in range(count)]
        rows = torch.tensor(named, dtype=torch.float32).reshape(-1, 2)
        dispatch = ExpertDispatch(world.group)
        here, local, receipt = dispatch.send(rows, torch.tensor(mine))
        back = dispatch.back(here, receipt)
        return [(int(rank), int(expert)) for rank, expert in here.tolist()], local.tolist(), torch.equal(back, rows)


@pytest.mark.parametrize(
    "counts",
    [
        [[1, 2, 0, 3], [2, 0, 1, 1]],
        [[0, 0, 0, 0], [1, 1, 1, 1]],  # a rank without tokens
        [[3, 2, 0, 0], [1, 4, 0, 0]],  # a rank whose experts get nothing
        [[0, 0, 0, 0], [0, 0, 0, 0]],
    ],
)
def test_tokens_arrive_sorted_by_expert_and_come_back_in_order(pool: RankPool, counts: list[list[int]]) -> None:
    """2 ranks with 2 experts each: who sent what to which expert, in which order, and the way back undoes it."""
    for rank, (arrived, local, undone) in enumerate(pool.run(2, travel, counts)):
        own = (2 * rank, 2 * rank + 1)
        assert arrived == [
            (source, expert) for expert in own for source in (0, 1) for _ in range(counts[source][expert])
        ]
        assert local == [counts[0][expert] + counts[1][expert] for expert in own]
        assert undone


def layer_gradients(tokens: list[int], forced: list[int] | None) -> dict[str, torch.Tensor]:
    """Run one layer of experts spread over the ranks; return output and gradients, experts under their numbers."""
    with open_world(device="cpu") as world:
        with torch.device("meta"):
            model = Decoder(SPEC)
        blocks = {name: Block.of(value.shape) for name, value in model.named_parameters()}
        blocks = apply_expert(model, blocks, world.group)
        model.to_empty(device="cpu")
        for name, value in model.named_parameters():
            with torch.no_grad():
                Piece(blocks[name], value).copy_(initial_value(SPEC, name, blocks[name].whole, 0))
        moe = model.blocks[0].mlp
        assert isinstance(moe, MoE)
        if forced is not None:  # the router sends every token to these experts
            with torch.no_grad():
                moe.router.weight.zero_()
                moe.router.weight[forced, 0] = 5.0
        draw = torch.Generator().manual_seed(1)
        every = torch.randn(sum(tokens), 16, generator=draw)
        every[:, 0] = every[:, 0].abs() + 0.1
        start = sum(tokens[: world.rank])
        mine = every[start : start + tokens[world.rank]].unsqueeze(0).requires_grad_()
        out = moe(mine)
        (out.square().sum() + 0.0 * sum(value.sum() for value in moe.parameters())).backward()
        found = {"out": out.detach()[0], "grad": mine.grad[0]}  # type: ignore[index]
        for name, value in moe.named_parameters():
            assert value.grad is not None
            if value.dim() == 3:
                first = world.rank * value.shape[0]
                found |= {f"{name}.{first + index}": grad for index, grad in enumerate(value.grad)}
            else:
                found[name] = value.grad
        return found


@pytest.mark.parametrize(
    ("tokens", "forced"), [([7, 7], None), ([3, 11], None), ([0, 9], None), ([5, 4], [0, 1]), ([2, 3, 1, 6], [6, 7])]
)
def test_br_257_a_layer_equals_one_ranks_layer(pool: RankPool, tokens: list[int], forced: list[int] | None) -> None:
    """Outputs, input gradients and expert gradients are one process's; idle experts have zero gradients, no hang."""
    (expected,) = pool.run(1, layer_gradients, [sum(tokens)], forced)
    answers = pool.run(len(tokens), layer_gradients, tokens, forced)
    for name in ("out", "grad"):
        torch.testing.assert_close(
            torch.cat([answer[name] for answer in answers]), expected[name], rtol=1e-5, atol=1e-6
        )
    experts = [name for name in expected if name.startswith("experts.")]
    assert len(experts) == 3 * 8
    for name in experts:
        (held,) = [answer[name] for answer in answers if name in answer]
        torch.testing.assert_close(held, expected[name], rtol=1e-5, atol=1e-6)
    router = sum(answer["router.weight"] for answer in answers)
    torch.testing.assert_close(router, expected["router.weight"], rtol=1e-4, atol=1e-5)
    if forced is not None:
        assert all(not expected[f"experts.down.weight.{expert}"].any() for expert in set(range(8)) - set(forced))


@pytest.mark.parametrize(
    ("degrees", "num_experts", "zero", "words"),
    [
        (Degrees(dp_replicate=2, ep=2), None, 0, ["no experts to spread", "ep", "1 (the default)"]),
        (Degrees(dp_replicate=4, ep=3), 8, 0, ["ep=3", "8 experts", "dp_replicate x cp = 4", "1, 2, 4"]),
        (Degrees(dp_replicate=2, dp_shard=2, ep=4), 8, 1, ["ep=4", "dp_shard x cp = 2", "1, 2"]),
        (Degrees(dp_replicate=4, ep=4), 6, 0, ["6 experts", "1, 2"]),
    ],
)
def test_what_cannot_be_spread_is_refused(
    degrees: Degrees, num_experts: int | None, zero: int, words: list[str]
) -> None:
    """The error names the key, the numbers and the legal degrees."""
    with pytest.raises(UserError) as caught:
        check_expert(degrees, num_experts=num_experts, zero=zero)
    assert [word for word in ["parallel.ep", *words] if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("degrees", "shape"),
    [
        (Degrees(dp_replicate=4, ep=2), (1, 2, 1, 2, 1)),
        (Degrees(dp_shard=4, ep=2), (1, 1, 2, 2, 1)),
        (Degrees(dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=4), (1, 2, 1, 4, 2)),
        (Degrees(dp_replicate=2, cp=2, ep=4), (1, 1, 1, 4, 1)),
        (Degrees(pp=2, dp_shard=2, ep=2, tp=2), (2, 1, 1, 2, 2)),
    ],
)
def test_experts_reuse_the_ranks_of_other_axes(degrees: Degrees, shape: tuple[int, ...]) -> None:
    """The world does not grow: what ep takes, copies and shards of an expert lose."""
    assert degrees.expert_shape == shape
