"""Tensor parallelism: one step's loss, gradients and norm are those of one rank, for every family."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from danlu.checkpoint.convert import save_hf
from danlu.config.load import load
from danlu.config.schema import Config
from danlu.model.decoder import Decoder, initial_value
from danlu.parallel.mesh import open_world
from danlu.parallel.placement import Piece
from danlu.parallel.tensor import apply_tensor
from distributed.one_step import Prepared, Share, assert_same_step, step, whole_gradients
from distributed.parity_layouts import FAMILIES
from distributed.pool import RankPool
from tiny import PLAIN, T0_SPEC, micro_batch, tiny_model

pytestmark = pytest.mark.timeout(120)
SPLIT = [name for name in FAMILIES if name != "mistral"]


@pytest.fixture(scope="module")
def alone(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Share]:
    """One process's step of each family."""
    folder = tmp_path_factory.mktemp("alone")
    return {name: pool.run(1, step, folder, FAMILIES[name])[0] for name in SPLIT}


@pytest.mark.parametrize("family", SPLIT)
@pytest.mark.parametrize(("ranks", "sp"), [(2, True), (2, False), (4, True), (4, False)])
def test_br_018_074_085_a_step_is_that_of_one_rank(
    pool: RankPool, tmp_path: Path, alone: dict[str, Share], family: str, ranks: int, sp: bool
) -> None:
    """Key heads fewer than ranks, head norms, biases, tied tables, odd vocabularies: every gradient, once."""
    words = (*FAMILIES[family], f"parallel.tp={ranks}", f"parallel.sp={str(sp).lower()}")
    assert_same_step(pool.run(ranks, step, tmp_path, words), alone[family])


def test_br_018_the_norm_counts_copies_once(pool: RankPool, tmp_path: Path, alone: dict[str, Share]) -> None:
    """Norms and key heads that tensor parallel ranks share, on two data ranks: the norm and what is clipped."""
    words = (*FAMILIES["llama"], "parallel.tp=2", "parallel.dp_replicate=2")
    shares = pool.run(4, step, tmp_path, words, 0.1)
    for share in shares:
        assert share.norm == pytest.approx(alone["llama"].norm, rel=1e-5)
    clipped = whole_gradients(shares)
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in clipped.values()))
    assert norm == pytest.approx(0.1, rel=1e-4)


def hidden(sp: bool) -> tuple[torch.Tensor, list[str]]:
    """Return the decoder's output and the names whose gradients are partial (a job for the pool)."""
    with open_world(device="cpu") as world:
        with torch.device("meta"):
            model = Decoder(T0_SPEC)
        blocks = apply_tensor(model, world.group, sp=sp)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                piece = Piece(blocks[name], parameter)
                piece.copy_(initial_value(T0_SPEC, name, piece.shape, 0))
        batch = micro_batch([[[1, 2, 3, 4, 5], [6, 7, 8]], [[9, 10, 11, 12]]])
        out = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
        return out.detach(), [name for name, block in blocks.items() if block.gradient != "full"]


@pytest.mark.parametrize("sp", [True, False])
def test_the_forward_pass_is_that_of_one_rank(pool: RankPool, sp: bool) -> None:
    """Hidden states at the end are whole on every rank, and equal; norms are partial only under sp."""
    ((expected, none),) = pool.run(1, hidden, sp)
    assert none == []
    for out, partial in pool.run(2, hidden, sp):
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        assert any("norm" in name for name in partial) is sp


def padding(folder: Path, words: Sequence[str]) -> tuple[float, int]:
    """Return the largest number in the vocabulary's padding, and its rows (a job for the pool)."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # fresh memory holds NaN
    try:
        with Prepared(folder, words) as (_, built, _, _):
            (part,) = built.parts.values()
            rows = built.blocks["embedding.weight"].extent[0]
            beyond = part.embedding.weight.detach()[rows:]
            return float(beyond.abs().sum()), len(beyond)
    finally:
        torch.use_deterministic_algorithms(False)


def test_padding_of_the_vocabulary_is_zero(pool: RankPool, tmp_path: Path) -> None:
    """Fresh memory may hold NaN, and 0 x NaN would reach every gradient: what no piece fills is zero."""
    found = pool.run(2, padding, tmp_path, (*FAMILIES["gpt2"], "parallel.tp=2"))
    assert found == [(0.0, 0), (0.0, 1)]


def opened(folder: Path, words: Sequence[str]) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """Return the boxes of this rank's parameters after a start from a Hugging Face folder (a job for the pool)."""
    with Prepared(folder, words) as (_, built, _, _):
        return [(name, starts, view.clone()) for name, piece in built.pieces().items() for starts, view in piece.boxes]


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, ""), (2, "tp=2"), (4, "tp=4"), (4, "tp=2 zero=1"), (4, "tp=2 zero=3"), (2, "zero=3")]
)
def test_br_082_a_hugging_face_folder_opens_in_any_layout(
    pool: RankPool, tmp_path: Path, ranks: int, layout: str
) -> None:
    """Tp = 1, 2 and 4 with 2 key heads and 65 rows: what the ranks hold together is the file, bit for bit."""
    model = tiny_model(seed=5, vocab_size=65)
    save_hf(model, tmp_path / "model")
    spread = tuple(f"parallel.{word}" for word in layout.split())
    wholes = {name: torch.full(value.shape, torch.nan) for name, value in model.named_parameters()}
    for boxes in pool.run(ranks, opened_from, tmp_path, spread):
        for name, starts, view in boxes:
            wholes[name][tuple(slice(at, at + size) for at, size in zip(starts, view.shape, strict=True))] = view
    for name, value in model.named_parameters():
        assert torch.equal(wholes[name], value.detach()), name


def opened_from(folder: Path, words: Sequence[str]) -> list[tuple[str, tuple[int, ...], torch.Tensor]]:
    """`opened` without the sizes of T0, which a pretrained model brings itself (a job for the pool)."""
    import distributed.one_step as here

    plain = here.tiny_config
    here.tiny_config = lambda data, output, *more: (
        load(  # type: ignore[assignment]
            Config,
            None,
            [*PLAIN, f"data.train={data}", f"train.output={output}", *more, f"model.name={folder / 'model'}"],
        ).config
    )
    try:
        return opened(folder, words)
    finally:
        here.tiny_config = plain
