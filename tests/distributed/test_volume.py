"""What ranks really send is what the formulas say, to the byte, for every technique and for mixes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from danlu.base.errors import RunError
from danlu.base.layout import Degrees
from danlu.config.rules import solve_layout
from danlu.parallel.collectives import all_gather, reduce_scatter
from danlu.parallel.mesh import open_world
from danlu.parallel.volume import axes_of, count_volume
from danlu.plan.communication import bookkeeping_bytes, plan_communication
from distributed.counting import by_operation, mean_traffic, spec_of, split_bookkeeping, work_of
from distributed.pool import RankPool
from tiny import VOCAB, tiny_config, write_rows

pytestmark = pytest.mark.timeout(120)
TOKENS = 22  # no multiple of any part: rows are padded
WIDE_KEYS = "model.num_kv_heads=1"
GPT = 'model.name="gpt2" model.tied_embeddings=true model.num_kv_heads=4 model.vocab_size=67'
QWEN = 'model.name="qwen3-0.6b" model.tied_embeddings=true model.vocab_size=67 model.num_kv_heads=1'
TIED = "model.tied_embeddings=true"
ACCUMULATE = "train.micro_batch_size=1"
BUCKETS = "parallel.bucket_cap_mb=0.01"
LAYOUTS = [
    (2, ""),
    (4, ACCUMULATE),
    (3, f"parallel.zero=1 train.global_batch_size=6 {BUCKETS}"),
    (4, f"parallel.zero=1 {ACCUMULATE}"),
    (2, "parallel.zero=2"),
    (4, f"parallel.zero=2 {ACCUMULATE} {BUCKETS}"),
    (2, "parallel.zero=3"),
    (4, f"parallel.zero=3 {ACCUMULATE} {GPT}"),
    (4, "parallel.zero=3 parallel.reshard_after_forward=false model.vocab_size=67"),
    (4, f"parallel.zero=1 parallel.dp_replicate=2 {ACCUMULATE}"),
    (4, f"parallel.zero=2 parallel.dp_replicate=2 {ACCUMULATE}"),
    (4, f"parallel.zero=3 parallel.dp_replicate=2 {ACCUMULATE}"),
    (2, "parallel.tp=2 parallel.sp=false"),
    (2, f"parallel.tp=2 {ACCUMULATE}"),
    (4, f"parallel.tp=4 {QWEN}"),
    (4, f"parallel.tp=4 parallel.sp=false {QWEN}"),
    (4, f"parallel.tp=4 {GPT}"),
    (2, "parallel.cp=2"),
    (4, f"parallel.cp=4 {ACCUMULATE}"),
    (2, "parallel.cp=2 parallel.cp_method=ulysses"),
    (4, f"parallel.cp=4 parallel.cp_method=ulysses {ACCUMULATE} {WIDE_KEYS}"),
    (4, f"parallel.cp=2 parallel.zero=3 {ACCUMULATE}"),
    (4, "parallel.tp=2 parallel.cp=2"),
    (4, f"parallel.tp=2 parallel.zero=1 {QWEN}"),
    (8, f"parallel.tp=2 parallel.cp=2 parallel.zero=2 parallel.cp_method=ulysses {ACCUMULATE}"),
    (8, f"parallel.tp=2 parallel.zero=3 parallel.dp_replicate=2 {ACCUMULATE} {QWEN}"),
    (2, f"parallel.pp=2 {ACCUMULATE}"),
    (4, f"parallel.pp=2 parallel.tp=2 {ACCUMULATE} {TIED}"),
    (4, f"parallel.pp=2 parallel.zero=2 parallel.pp_schedule=zbv model.num_layers=4 {ACCUMULATE} {TIED}"),
    (4, f"parallel.pp=2 parallel.cp=2 parallel.pp_schedule=interleaved model.num_layers=5 {ACCUMULATE}"),
    (4, f"parallel.pp=2 parallel.zero=1 {ACCUMULATE} {GPT}"),
    (4, f"parallel.pp=2 parallel.zero=3 {ACCUMULATE} {TIED}"),
    (8, f"parallel.pp=2 parallel.tp=2 parallel.zero=2 parallel.cp=2 {ACCUMULATE} {TIED}"),
    (2, "parallel.tp=2 precision.compute_dtype=bf16"),
    (2, "parallel.cp=2 precision.compute_dtype=bf16"),
    (2, "parallel.zero=3 precision.compute_dtype=bf16"),
]


@pytest.fixture(scope="module")
def even_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rows of one document, all of the same length: every step is alike."""
    rows = [[[(row + place) % VOCAB for place in range(TOKENS)]] for row in range(24)]
    return write_rows(tmp_path_factory.mktemp("even") / "data", rows)


@pytest.mark.parametrize(("ranks", "words"), LAYOUTS, ids=[f"{ranks} {words}" for ranks, words in LAYOUTS])
def test_a_step_sends_what_the_formulas_say(
    pool: RankPool, tmp_path: Path, even_rows: Path, ranks: int, words: str
) -> None:
    """Each axis and operation, mean over ranks: ratio 1; nothing more is sent, but some numbers on the host."""
    config = tiny_config(even_rows, tmp_path / "run", *words.split())
    degrees = solve_layout(config, ranks)
    spec = spec_of(config)
    work = work_of(config, spec, degrees, tokens=TOKENS)
    planned = by_operation(plan_communication(spec, degrees, work))
    traffic = mean_traffic(pool, ranks, even_rows, tmp_path / "run", *words.split())
    counted, other = split_bookkeeping(traffic)
    assert counted == pytest.approx(planned, rel=1e-9)
    assert other == pytest.approx(bookkeeping_bytes(ranks))
    assert other <= 80


def every_collective() -> tuple[dict[str, float], str]:
    """Return bytes by operation of one collective of each kind, and the message for one that is unknown."""
    with open_world(Degrees(dp_replicate=2, tp=2), device="cpu") as world:
        group, rank = world.axis_group("tp"), world.place("tp")
        with count_volume() as volume:
            data = torch.zeros(8)
            dist.all_reduce(data, group=group)
            dist.broadcast(data, group=group, group_src=0)
            all_gather(torch.zeros(16), data, group)
            dist.all_gather([torch.zeros(8), torch.zeros(8)], data, group=group)
            reduce_scatter(torch.zeros(4), data, group)
            dist.all_to_all_single(torch.zeros(8), data, group=group)
            each = (6, 2)[rank]
            dist.all_to_all_single(torch.zeros(2 * each), data, [each, each], [6, 2], group=group)
            message = dist.isend(data, group=group, group_dst=1 - rank)
            dist.recv(torch.zeros(8), group=group, group_src=1 - rank)
            assert message is not None
            message.wait()
            dist.barrier(group=group)
            seen = ""
            try:
                dist.gather(data, [torch.zeros(8)] * 2 if rank == 0 else None, group=group, group_dst=0)
            except RunError as error:
                seen = str(error)
        assert sum(volume.calls.values()) == 8
        assert all(message.ranks == tuple(dist.get_process_group_ranks(group)) for message in volume.sent)
        dist.all_reduce(data, group=group)
        assert sum(volume.calls.values()) == 8, "nothing is counted outside of the block"
        return {message.operation: sent for message, sent in volume.sent.items()}, seen


def test_each_collective_counts_what_a_ring_sends(pool: RankPool) -> None:
    """32 bytes over two ranks, each by hand; a collective without a formula is refused, not left out."""
    for rank, (sent, seen) in enumerate(pool.run(4, every_collective)):
        uneven = (2 if rank % 2 == 0 else 6) * 4
        assert sent == {
            "all_reduce": 32, "broadcast": 16, "all_gather": 64, "reduce_scatter": 16, "all_to_all": 16 + uneven,
            "send": 32,
        }  # fmt: skip
        assert "gather_" in seen


def test_axes_are_read_off_the_ranks() -> None:
    """Every group of a layout names the axes that it spans; a group of one names none."""
    degrees = Degrees(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    assert axes_of([0, 1], degrees) == ("tp",)
    assert axes_of([0, 16], degrees) == ("pp",)
    assert axes_of([1, 3, 5, 7], degrees) == ("dp_shard", "cp")
    assert axes_of(range(32), degrees) == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    assert axes_of([5], degrees) == ()
