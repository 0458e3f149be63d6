"""Who sees whom: document isolation, padding and windows, on every attention path, against a dense fp64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.base.errors import RunError
from danlu.model import attention, cpu_attention
from danlu.model.attention import RowPlan
from danlu.model.cache import KVCache
from danlu.model.cpu_attention import plan_pieces
from danlu.model.documents import count_lengths, count_positions
from tiny_models import GPT, T0, build, logits, random_tokens

PATHS = ["pieces", "mask"]
PACKED = torch.tensor([[0] * 3 + [1] * 5])


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a test on the document-by-document path (CPU) and on the masked path (what CUDA takes)."""
    if request.param == "mask":
        original = RowPlan.__init__

        def masked(self: RowPlan, *args: object) -> None:
            original(self, *args)  # type: ignore[arg-type]
            self.in_pieces = False

        monkeypatch.setattr(RowPlan, "__init__", masked)
    return str(request.param)


def dense(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, window: int | None) -> Tensor:
    """Attention by its definition: one big softmax with a mask, heads repeated, in the dtype of the inputs."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    order = torch.arange(q.shape[1])
    distance = order[:, None] - order
    seen = (ids[:, :, None] == ids[:, None]) & (distance >= 0) & (distance < (window or 10**9))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / q.shape[3] ** 0.5
    return torch.einsum("bnqk,bknh->bqnh", scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1), v)


def documents(rows: int, length: int, longest: int, seed: int, *, padding: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.full((rows, length), -1)
    for row in range(rows):
        start = number = 0
        while start < length - padding:
            size = int(torch.randint(1, longest + 1, (1,), generator=generator))
            ids[row, start : min(start + size, length - padding)] = number
            start, number = start + size, number + 1
    return ids


@pytest.mark.parametrize("window", [None, 1, 7, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (3, 1, 6), (2, 2, 5)])
@pytest.mark.parametrize(("rows", "length", "longest"), [(3, 40, 12), (2, 300, 300), (1, 33, 33)])
def test_every_path_equals_the_definition(
    path: str, rows: int, length: int, longest: int, heads: int, kv_heads: int, width: int, window: int | None
) -> None:
    """Outputs and all three gradients equal dense attention for packed rows of any document lengths."""
    torch.manual_seed(0)
    ids = documents(rows, length, longest, seed=length)
    q, k, v = (torch.randn(rows, length, n, width, requires_grad=True) for n in (heads, kv_heads, kv_heads))
    plan = RowPlan(ids, count_positions(ids, ids), None)
    mixed = plan.attend(q, k, v, layer=0, window=window)
    expected = dense(q.double(), k.double(), v.double(), ids, window)
    grad = torch.randn_like(mixed)
    assert (mixed - expected).abs().max() < 1e-5
    for ours, theirs in zip(
        torch.autograd.grad(mixed, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad.double()),
        strict=True,
    ):
        assert (ours - theirs).abs().max() < 1e-5


@pytest.mark.parametrize("limit", [2**8, 2**12, 2**30])
def test_pieces_of_every_size_give_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cutting by heads, documents or query blocks changes nothing."""
    monkeypatch.setattr(cpu_attention, "_SCORE_BYTES", limit)
    monkeypatch.setattr(cpu_attention, "_QUERY_BLOCK", 16)
    test_every_path_equals_the_definition("pieces", 2, 90, 70, 6, 3, 4, None)
    test_every_path_equals_the_definition("pieces", 2, 90, 70, 6, 3, 4, 9)


def test_pieces_cover_every_real_token_once() -> None:
    """Work is shared out exactly: each token and key head in one piece, padding in none."""
    ids = documents(3, 50, 9, seed=4, padding=6)
    seen = torch.zeros(3 * 50 + 1, 2, dtype=torch.int64)
    for piece in plan_pieces(ids, 4, 2):
        index = piece.scatter if isinstance(piece.scatter, slice) else piece.scatter.unique()
        seen[index, piece.heads] += 1
    assert torch.equal(seen[:-1], (ids.flatten() >= 0).long()[:, None].expand(-1, 2))


def test_ids_that_return_after_a_gap_are_one_document(path: str) -> None:
    """Documents are sets of equal ids, also where another document lies between their tokens."""
    torch.manual_seed(0)
    ids = torch.tensor([[0, 1, 0, 1, 1, 0, 2, 0]])
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    mixed = RowPlan(ids, torch.arange(8)[None], None).attend(q, k, v, layer=0, window=None)
    assert (mixed - dense(q, k, v, ids, None)).abs().max() < 1e-6


@pytest.mark.parametrize("spec", [T0, replace(T0, sliding_window=2), GPT], ids=["full", "window", "learned"])
def test_br_141_br_142_changing_one_document_leaves_the_others_bit_equal(path: str, spec: object) -> None:
    """(a) Documents of 3 and 5 tokens in a row: new tokens in the first change the second's logits by 0.0."""
    model = build(spec)  # type: ignore[arg-type]
    tokens = random_tokens(1, 8)
    changed = tokens.clone()
    changed[:, :3] = (changed[:, :3] + 7) % 64
    with torch.no_grad():
        before, after = (logits(model, x, document_ids_BS=PACKED) for x in (tokens, changed))
    assert (before[:, 3:] - after[:, 3:]).abs().max() == 0.0
    assert (before[:, :3] - after[:, :3]).abs().max() > 0.1


def test_resetting_positions_alone_would_leak() -> None:
    """The isolation above is the mask's doing: without document ids the second document changes."""
    model, tokens = build(T0), random_tokens(1, 8)
    changed = tokens.clone()
    changed[:, :3] = (changed[:, :3] + 7) % 64
    positions = count_positions(tokens, PACKED)
    with torch.no_grad():
        before, after = (logits(model, x, positions_BS=positions) for x in (tokens, changed))
    assert (before[:, 3:] - after[:, 3:]).abs().max() > 1e-3


@pytest.mark.parametrize("spec", [T0, GPT], ids=["rope", "learned"])
def test_br_141_br_143_a_packed_row_has_the_losses_of_its_documents(path: str, spec: object) -> None:
    """(b) The sum over 2 + 4 = 6 targets is loss(A) + loss(B); the last token of A predicts nothing."""
    model, tokens = build(spec), random_tokens(1, 8)  # type: ignore[arg-type]
    labels = tokens.roll(-1, 1)
    labels[PACKED.roll(-1, 1) != PACKED] = -100
    assert (labels != -100).sum() == 6

    def loss(x: Tensor, y: Tensor, **kwargs: Tensor) -> Tensor:
        return F.cross_entropy(logits(model, x, **kwargs).flatten(0, 1), y.flatten(), reduction="sum")

    packed = loss(tokens, labels, document_ids_BS=PACKED)
    apart = loss(tokens[:, :3], labels[:, :3]) + loss(tokens[:, 3:], labels[:, 3:])
    assert abs(packed - apart) < 1e-5 * apart


@pytest.mark.parametrize("spec", [T0, replace(T0, sliding_window=3), GPT], ids=["full", "window", "learned"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_br_035_padding_changes_nothing_and_makes_no_nan(path: str, spec: object, side: str) -> None:
    """A row padded by 3 has the unpadded run's logits and gradients, and no NaN anywhere."""
    model, tokens = build(spec), random_tokens(2, 8)  # type: ignore[arg-type]
    ids = torch.zeros(2, 8, dtype=torch.int64)
    real = slice(3, None) if side == "left" else slice(0, 5)
    ids[1] = -1
    ids[1, real] = 0
    weight = (ids >= 0)[..., None].float()
    padded = logits(model, tokens, document_ids_BS=ids)
    (padded * weight).pow(2).sum().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    alone = [logits(model, tokens[:1]), logits(model, tokens[1:, real])]
    sum(x.pow(2).sum() for x in alone).backward()  # type: ignore[union-attr]
    assert padded.isfinite().all()
    assert (padded[0] - alone[0][0]).abs().max() < 1e-5
    assert (padded[1, real] - alone[1][0]).abs().max() < 1e-5
    # Against the largest gradient: a key's bias has none but rounding (softmax does not see it).
    largest = max(float(parameter.grad.abs().max()) for parameter in model.parameters() if parameter.grad is not None)
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert grad.isfinite().all()
        assert (grad - parameter.grad).abs().max() < 1e-5 * max(1.0, largest)


def test_a_row_of_padding_alone_is_finite(path: str) -> None:
    """Rows that only fill up a batch give finite hidden states and finite gradients."""
    model = build(T0)
    hidden = model(random_tokens(2, 6), document_ids_BS=torch.full((2, 6), -1))
    hidden.sum().backward()
    assert hidden.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_bf16_scores_are_as_precise_as_the_fused_kernel() -> None:
    """bf16 inputs keep fp32 scores: errors against fp64 are those of rounding the inputs and outputs."""
    torch.manual_seed(0)
    ids = documents(2, 64, 30, seed=1)
    q, k, v = (torch.randn(2, 64, 4, 16).mul(3).bfloat16().requires_grad_() for _ in range(3))
    mixed = RowPlan(ids, count_positions(ids, ids), None).attend(q, k, v, layer=0, window=None)
    expected = dense(q.double(), k.double(), v.double(), ids, None)
    grad = torch.randn_like(mixed)
    assert mixed.dtype == torch.bfloat16
    assert (mixed - expected).abs().max() < 2e-2 * expected.abs().max()
    for ours, theirs in zip(
        torch.autograd.grad(mixed, (q, k, v), grad),
        torch.autograd.grad(expected, (q, k, v), grad.double()),
        strict=True,
    ):
        assert (ours - theirs).norm() < 1e-2 * theirs.norm()


def test_the_precision_switch_is_restored() -> None:
    """The CPU path leaves torch's global matmul precision as it found it, also after an error."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(KeyError), cpu_attention._products_in(torch.bfloat16):
        raise KeyError
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_positions_and_lengths_follow_the_documents() -> None:
    """Positions restart with every document; a token's document length is known for dynamic scaling."""
    ids = torch.tensor([[-1, -1, 0, 0, 0, 1, 1, -1]])
    positions = count_positions(ids, ids)
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 0]]
    assert count_lengths(positions, ids)[0, 2:7].tolist() == [3, 3, 3, 2, 2]


def test_dynamic_scaling_does_not_depend_on_the_neighbours() -> None:
    """With dynamic NTK, a short document packed beside a long one keeps the base of its own length."""
    from danlu.model.spec import RopeScaling

    model = build(replace(T0, max_positions=8, rope_scaling=RopeScaling(kind="dynamic", factor=2.0)))
    tokens = random_tokens(1, 25)
    ids = torch.tensor([[0] * 20 + [1] * 5])
    with torch.no_grad():
        packed = logits(model, tokens, document_ids_BS=ids)
        alone = torch.cat([logits(model, tokens[:, :20]), logits(model, tokens[:, 20:])], 1)
    assert (packed - alone).abs().max() < 1e-5


def test_a_cache_refuses_documents() -> None:
    """A cache holds one document a row; ids beside it would be ignored, so they raise."""
    cache = KVCache(T0, batch_size=1, capacity=8, dtype=torch.float32)
    with pytest.raises(RunError, match="one document"):
        build(T0)(random_tokens(1, 8), document_ids_BS=PACKED, cache=cache)


def test_one_document_a_row_takes_the_kernel_without_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids that say nothing cost nothing: the plain causal kernel runs."""
    monkeypatch.setattr(attention, "attend_documents", None)
    build(T0)(random_tokens(2, 8), document_ids_BS=torch.tensor([[0] * 8, [5] * 8]))


def test_grouped_heads_under_a_mask_are_given_to_the_kernel_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused CUDA kernels that take a mask refuse grouped heads; the one that is left makes all S x S scores."""
    calls = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        calls.append((query.shape[1], key.shape[1], value.shape[1], options["enable_gqa"]))
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", kernel)
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    query, key = torch.empty(1, 8, 4, 8, device="meta"), torch.empty(1, 8, 2, 8, device="meta")
    for documents in (ids, None):
        RowPlan(documents, ids, None).attend(query, key, key, layer=0, window=None)
    assert calls == [(4, 4, 4, False), (4, 2, 2, True)]
