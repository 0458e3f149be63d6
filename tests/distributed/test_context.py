"""Context parallelism on several ranks: attention, whole models, losses and bytes are those of whole rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from danlu.base.errors import RunError, UserError
from danlu.data.batch import MicroBatch
from danlu.model.attention import RowPlan
from danlu.model.cache import KVCache
from danlu.model.decoder import Decoder
from danlu.model.spec import RopeScaling
from danlu.objective.cross_entropy import CrossEntropy
from danlu.parallel import ring_attention
from danlu.parallel.context import Method, RingPlan, UlyssesPlan, apply_context, slots_of, split_batch
from danlu.parallel.data import Reducer, ReplicaReducer
from danlu.parallel.mesh import open_world, sum_over
from danlu.train.step import StepResult, count_tokens, forward_backward, reduce_losses
from distributed.pool import RankPool
from tiny import T0_SPEC, Document, gradients, language_loss, micro_batch, tiny_model

pytestmark = pytest.mark.timeout(120)
PLANS = {"ulysses": UlyssesPlan, "ring": RingPlan}
LAYOUTS = [("ulysses", 2), ("ulysses", 4), ("ring", 2), ("ring", 3), ("ring", 4)]
S = 48


def _row(*documents: int) -> list[int]:
    """Return ids of documents of these lengths, padded to S."""
    ids = [number for number, length in enumerate(documents) for _ in range(length)]
    return ids + [-1] * (S - len(ids))


ROWS: dict[str, list[list[int]] | None] = {
    "causal": None,
    "one document": [[0] * S, [7] * S],
    "packed": [_row(11, 30, 7), _row(2, 2, 2, 2, 38, 2)],
    "short documents": [_row(*[3] * 16), _row(*[4] * 12)],
    "padding": [_row(20, 9), _row(5)],
    "left padding": [[-1] * 9 + [0] * 39, [-1] * 20 + [0] * 10 + [1] * 18],
    "a row of padding": [[-1] * S, _row(48)],
    "ids in any order": [[5, 0, 5, 3] * 12, [9] * 10 + [1] * 20 + [9] * 18],
}
HEADS = [(4, 4), (4, 2), (8, 1)]
WINDOWS = [None, 1, 5, 30]
# a window counts slots or a document's own tokens: the same where documents lie side by side, as rows are made
CASES = [(name, window) for name in ROWS for window in WINDOWS if window is None or name != "ids in any order"]


def _inputs(dtype: torch.dtype, num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """Return query, key, value and the output's gradient of whole rows; rank after rank the same."""
    generator = torch.Generator().manual_seed(num_heads * 10 + num_kv_heads)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    return [torch.randn(2, S, n, 6, generator=generator, dtype=torch.float64).to(dtype) for n in heads]


def attention_errors(method: Method, dtype: torch.dtype, names: list[str], tile_bytes: int) -> dict[str, float]:
    """Return the largest error of output and gradients by case (a job for the pool)."""
    errors: dict[str, float] = {}
    with open_world(device="cpu") as world, mock.patch.object(ring_attention, "_TILE_BYTES", tile_bytes):
        group = world.group
        slots = slots_of(world.rank, world.size, method, S)
        for (name, window), heads in product(CASES, HEADS):
            if name not in names:
                continue
            rows = ROWS[name]
            ids = None if rows is None else torch.tensor(rows)
            part_ids = None if ids is None else ids[:, slots]
            *whole, grad = _inputs(dtype, *heads)
            if ids is not None:
                grad = grad * (ids >= 0)[:, :, None, None]
            expected = _attend(RowPlan(ids, torch.arange(S)[None], None), whole, grad, window)
            plan = PLANS[method](torch.zeros(2, len(slots), dtype=torch.int64), None, part_ids, group)
            found = _attend(plan, [x[:, slots] for x in whole], grad[:, slots], window)
            assert all(x.dtype == dtype and bool(x.isfinite().all()) for x in found)
            pairs = zip(found, expected, strict=True)
            label = f"{name}, {heads} heads, window {window}"
            errors[label] = max(float((x - y[:, slots]).abs().max()) for x, y in pairs)
    return errors


def _attend(plan: Any, inputs: list[Tensor], grad: Tensor, window: int | None) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = plan.attend(*leaves, layer=0, window=window)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize(("method", "ranks"), LAYOUTS)
def test_br_076_attention_is_that_of_whole_rows(
    pool: RankPool, method: Method, ranks: int, dtype: torch.dtype, limit: float
) -> None:
    """Output and gradients of q, k, v for every mask, window and head grouping; key heads may be fewer than ranks."""
    names = list(ROWS) if dtype is torch.float64 else ["causal", "packed", "padding"]
    for errors in pool.run(ranks, attention_errors, method, dtype, names, 2**26):
        assert len(errors) == sum(name in names for name, _ in CASES) * len(HEADS)
        assert {label: error for label, error in errors.items() if not error < limit} == {}


def test_tiles_of_every_size_give_the_same(pool: RankPool) -> None:
    """One query at a time, or some that do not divide a chunk: nothing changes."""
    for tile_bytes in (1, 8 * 2 * 4 * 12 * 5):
        for errors in pool.run(2, attention_errors, "ring", torch.float64, ["causal", "packed"], tile_bytes):
            assert max(errors.values()) < 1e-12


def bf16_errors(method: Method) -> list[float]:
    """Return relative errors against fp64 of output and gradients (a job for the pool)."""
    with open_world(device="cpu") as world:
        slots = slots_of(world.rank, world.size, method, S)
        *whole, grad = _inputs(torch.bfloat16, 4, 2)
        exact = [x.double() for x in whole]
        expected = _attend(RowPlan(None, torch.arange(S)[None], None), exact, grad.double(), None)
        plan = PLANS[method](torch.zeros(2, len(slots), dtype=torch.int64), None, None, world.group)
        found = _attend(plan, [x[:, slots] for x in whole], grad[:, slots], None)
        pairs = zip(found, [y[:, slots] for y in expected], strict=True)
        return [float((x - y).norm() / y.norm()) for x, y in pairs]


@pytest.mark.parametrize("method", PLANS)
def test_bf16_sums_are_fp32(pool: RankPool, method: Method) -> None:
    """Errors are those of rounding inputs and outputs to 8 bits, not of adding up in bf16."""
    for errors in pool.run(4, bf16_errors, method):
        assert max(errors) < 5e-3


def _batch() -> MicroBatch:
    """Two rows of 22 tokens: packed documents, a mask, and padding."""
    rows: list[list[Document]] = [
        [list(range(1, 12)), ([20, 21, 22, 23, 24], [False, False, True, True, True]), [30, 31, 32]],
        [list(range(40, 57))],
    ]
    return micro_batch(rows, width=22)


def decoder_parts(method: Method, changes: dict[str, Any], plain: bool, recompute: bool) -> tuple[Any, ...]:
    """Return this rank's slots, hidden states, and gradients summed over ranks, fp64 (a job for the pool)."""
    with open_world(device="cpu") as world:
        model = tiny_model(**changes).double()
        model.compute_dtype = torch.float64
        apply_context(model, world.group, method)
        if recompute:
            for block in model.blocks:
                block.forward = _recomputed(block.forward)
        whole = split_batch(_batch(), 0, 1, "ulysses", multiple_of=24)
        part = split_batch(whole, world.rank, world.size, method)
        slots = slots_of(world.rank, world.size, method, whole.tokens_BS.shape[1])
        options = {} if plain else {"document_ids_BS": part.document_ids_BS}
        hidden = model(part.tokens_BS, **options)
        weight = torch.linspace(-1, 1, hidden.shape[2], dtype=torch.float64) * (1 + part.positions_BS[..., None])
        (hidden * weight * (part.document_ids_BS >= 0)[..., None]).sum().backward()
        grads = gradients(model)
        for grad in grads.values():
            dist.all_reduce(grad)
        return slots, hidden.detach(), grads


def _recomputed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


VARIANTS: dict[str, tuple[dict[str, Any], bool, bool]] = {
    "rope": ({}, False, False),
    "one key head": ({"num_kv_heads": 1}, False, False),
    "window": ({"sliding_window": 5}, False, False),
    "learned positions": ({"positions": "learned"}, False, False),
    "dynamic rope": (
        {"max_positions": 8, "rope_scaling": RopeScaling(kind="dynamic", factor=2.0)}, False, False
    ),
    "one document a row": ({}, True, False),
    "recompute": ({}, False, True),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("method", "ranks"), [("ulysses", 2), ("ulysses", 4), ("ring", 3), ("ring", 4)])
def test_br_076_a_decoder_on_parts_of_rows_is_the_decoder(
    pool: RankPool, method: Method, ranks: int, variant: str
) -> None:
    """Hidden states and summed gradients equal one process's; positions and lengths count over whole rows."""
    changes, plain, recompute = VARIANTS[variant]
    ((_, expected, expected_grads),) = pool.run(1, decoder_parts, method, changes, plain, False)
    real = _batch().document_ids_BS >= 0
    for slots, hidden, grads in pool.run(ranks, decoder_parts, method, changes, plain, recompute):
        kept = torch.nn.functional.pad(real, (0, 2))[:, slots]
        torch.testing.assert_close(hidden[kept], expected[:, slots][kept], rtol=1e-6, atol=1e-6)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-6, atol=1e-6)


def step(
    rows: list[list[Document]], method: Method, cp: int, chunk_tokens: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return reduced loss and gradients of one step on dp x cp ranks (a job for the pool)."""
    with open_world(device="cpu") as world:
        mesh = init_device_mesh("cpu", (world.size // cp, cp), mesh_dim_names=("dp", "cp"))
        data_rank, context_rank = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
        model = apply_context(tiny_model(), mesh.get_group("cp"), method)
        named = list(model.named_parameters())
        reducer = ReplicaReducer({0: named}, world.group, bucket_cap_mb=0.01) if world.size > 1 else Reducer(named)
        mine = rows[data_rank :: world.size // cp]
        batches = [split_batch(micro_batch([row]), context_rank, cp, method) for row in mine]
        targets = int(sum_over(world.group, count_tokens(batches)[0])[0])
        objective = CrossEntropy(max_chunk_bytes=chunk_tokens * 4 * T0_SPEC.vocab_size)
        with mock.patch("tiny.CrossEntropy", return_value=objective):
            loss_sum, parts = forward_backward(
                partial(language_loss, model), batches, reducer, valid_tokens=targets, device=torch.device("cpu")
            )
        result = StepResult(loss_sum, targets, 0.0, False, parts)
        return {**reduce_losses(result, world), "targets": targets}, gradients(model)


def check_step(
    pool: RankPool, rows: list[list[Document]], method: Method, dp: int, cp: int, chunk_tokens: int = 64
) -> dict[str, float]:
    """Assert that all ranks hold one process's loss, target count and gradients; return the former."""
    ((expected, expected_grads),) = pool.run(1, step, rows, "ulysses", 1, 64)
    for loss, grads in pool.run(dp * cp, step, rows, method, cp, chunk_tokens):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert grads.keys() == expected_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected_grads[name], rtol=1e-5, atol=1e-6)
    return expected


@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize(("dp", "cp"), [(1, 2), (2, 2), (4, 2), (1, 4)])
def test_br_248_the_loss_is_not_scaled_by_the_layout(pool: RankPool, method: Method, dp: int, cp: int) -> None:
    """The same 4 sequences: summed losses over the global count, gradients summed over cp x dp, are one process's."""
    check_step(pool, [[[1, 2, 3, 4, 5, 6, 7]], [[8, 9], [10, 11, 12]], [[13] * 20], [[14, 15]]], method, dp, cp)


@pytest.mark.parametrize("method", PLANS)
def test_br_251_the_chunked_loss_knows_its_part_of_the_mask(pool: RankPool, method: Method) -> None:
    """Chunks of 2 tokens, targets only in the second half of the row (one Ulysses rank has none): the same loss."""
    masked: Document = ([3 * place % 64 for place in range(24)], [False] * 12 + [True] * 12)
    assert check_step(pool, [[masked]], method, 1, 2, chunk_tokens=2)["targets"] == 12


@pytest.mark.parametrize("method", PLANS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_br_252_packed_documents_keep_their_own_labels(pool: RankPool, method: Method, ranks: int) -> None:
    """Documents of 5 and 6 tokens side by side: 4 + 5 = 9 targets and the loss of one process."""
    assert check_step(pool, [[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]], method, 1, ranks)["targets"] == 9


@contextmanager
def counting(sent: Counter[str], events: list[str]) -> Iterator[None]:
    """Count the bytes that this rank sends to others, and write down when transfers and tiles begin."""
    all_to_all, batch, tile = dist.all_to_all_single, dist.batch_isend_irecv, ring_attention._tile_forward

    def count_all_to_all(output: Tensor, x: Tensor, *args: Any, group: Any) -> Any:
        sent["bytes"] += x.numel() * x.element_size() * (group.size() - 1) // group.size()
        return all_to_all(output, x, *args, group=group)

    def count_batch(operations: list[dist.P2POp]) -> Any:
        tensors = [x.tensor for x in operations if x.op is dist.isend]
        sent["bytes"] += sum(x.numel() * x.element_size() for x in tensors)
        events.append("transfer")
        return batch(operations)

    def note_tile(*args: Any) -> Any:
        events.append("tile")
        return tile(*args)

    with (
        mock.patch.object(dist, "all_to_all_single", count_all_to_all),
        mock.patch.object(dist, "batch_isend_irecv", count_batch),
        mock.patch.object(ring_attention, "_tile_forward", note_tile),
    ):
        yield


def traffic(method: Method, dtype: torch.dtype, heads: tuple[int, int], rows: str) -> tuple[int, int, list[str]]:
    """Return the bytes sent in one layer's forward and backward and the forward's events (a job for the pool)."""
    sent: Counter[str] = Counter()
    events: list[str] = []
    with open_world(device="cpu") as world, counting(sent, events):
        slots = slots_of(world.rank, world.size, method, S)
        ids = None if ROWS[rows] is None else torch.tensor(ROWS[rows])[:, slots]
        plan = PLANS[method](torch.zeros(2, len(slots), dtype=torch.int64), None, ids, world.group)
        *inputs, grad = (x[:, slots] for x in _inputs(dtype, *heads))
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = plan.attend(*leaves, layer=0, window=None)
        forward, seen = sent["bytes"], list(events)
        out.backward(grad)
        return forward, sent["bytes"] - forward, seen


@pytest.mark.parametrize("rows", ["causal", "short documents"])
@pytest.mark.parametrize("heads", [(8, 4), (8, 1)])
@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_on_the_wire_are_those_of_the_formulas(
    pool: RankPool, ranks: int, dtype: torch.dtype, size: int, heads: tuple[int, int], rows: str
) -> None:
    """What each rank sends in one layer equals the formulas to the byte, whatever the mask."""
    part, (num_heads, num_kv_heads), width = 2 * S // ranks, heads, 6
    one_way = (ranks - 1) * part * width * (2 * num_heads + 2 * max(num_kv_heads, ranks)) * size // ranks
    for forward, backward, _ in pool.run(ranks, traffic, "ulysses", dtype, heads, rows):
        assert (forward, backward) == (one_way, one_way)
    elements = (ranks - 1) * 2 * part * num_kv_heads * width
    for forward, backward, _ in pool.run(ranks, traffic, "ring", dtype, heads, rows):
        assert (forward, backward) == (elements * size, elements * (size + 4))


def test_the_ring_computes_while_it_sends_and_shares_the_work(pool: RankPool) -> None:
    """Each transfer begins before the step's products; under a causal mask every rank has 2 c + 1 blocks."""
    for _, _, events in pool.run(3, traffic, "ring", torch.float32, (4, 2), "causal"):
        assert events == ["transfer", *["tile"] * 3, "transfer", *["tile"] * 2, *["tile"] * 2]


def test_blocks_that_nothing_is_seen_in_are_not_computed(pool: RankPool) -> None:
    """Documents of 3 or 4 tokens in chunks of 12 meet only themselves; the transfers are made all the same."""
    for _, _, events in pool.run(2, traffic, "ring", torch.float32, (4, 2), "short documents"):
        assert events == ["transfer", "tile", "tile"]


def refusals() -> list[str]:
    """Return what a split model refuses (a job for the pool)."""
    said = []
    with open_world(device="cpu") as world:
        model: Decoder = apply_context(tiny_model(), world.group, "ring")
        cache = KVCache(T0_SPEC, batch_size=1, capacity=8, dtype=torch.float32)
        for tokens, options in ((4, {"cache": cache}), (3, {})):
            with pytest.raises(RunError) as caught:
                model(torch.zeros(1, tokens, dtype=torch.int64), **options)
            said.append(str(caught.value))
        apply_context(tiny_model(), world.group, "ulysses", tensor_degree=2)
        with pytest.raises(UserError) as refused:
            apply_context(tiny_model(), world.group, "ulysses", tensor_degree=4)
        said.append(str(refused.value))
    return said


def test_what_a_part_cannot_do_is_refused(pool: RankPool) -> None:
    """A KV cache, parts that are not two chunks, too few heads beside tensor parallelism: errors on every rank."""
    for cache, odd, few in pool.run(2, refusals):
        assert "KV cache" in cache
        assert "split_batch" in odd
        assert "2 ranks for 1 query heads" in few


def test_a_split_model_of_one_rank_is_the_model(pool: RankPool) -> None:
    """A group of one rank leaves the plain plan in place."""
    (same,) = pool.run(1, plain_plan)
    assert same


def plain_plan() -> bool:
    """Return whether the plan's factory is untouched (a job for the pool)."""
    with open_world(device="cpu") as world:
        model = Decoder(replace(T0_SPEC))
        before = model.plan_attention
        return apply_context(model, world.group, "ring").plan_attention is before
