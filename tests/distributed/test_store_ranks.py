"""Checkpoints written by several ranks: every rank's random state, every sample once, no rank waits for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from danlu.base.errors import RunError, UserError
from danlu.checkpoint import store as store_module
from danlu.checkpoint.store import CheckpointStore, find_checkpoints, load_tensors
from danlu.data.dataset import PackedDataset
from danlu.data.loader import Loader
from danlu.parallel.mesh import World, open_world
from danlu.parallel.seed import set_seed
from distributed.pool import RankPool
from tiny import read_tensors, write_rows

pytestmark = pytest.mark.timeout(120)


def draw_save_draw(folder: Path) -> tuple[list[float], list[float]]:
    """Draw a different count of numbers on each rank, save, draw, restore, draw again (a job for the pool)."""
    with open_world(device="cpu") as world:
        set_seed(0, data_rank=world.data_rank)
        torch.rand(world.rank + 1)
        with CheckpointStore(folder, group=world.checkpoint_group) as store:
            name = f"rng.{world.rank}.cpu"
            store.save(1, {"model.x": torch.ones(2), name: torch.get_rng_state()}, {})
            uninterrupted = torch.rand(3).tolist()
            store.wait()
            latest = store.latest()
            assert latest is not None
            state = torch.zeros_like(torch.get_rng_state())
            load_tensors(latest, {"model.x": torch.zeros(2), name: state}, unread=("rng.",))
            torch.set_rng_state(state)
            return uninterrupted, torch.rand(3).tolist()


def test_br_050_every_rank_gets_its_own_random_state_back(pool: RankPool, tmp_path: Path) -> None:
    """4 ranks that drew different counts: each continues as if nothing had happened, and all four differ."""
    answers = pool.run(4, draw_save_draw, tmp_path)
    for uninterrupted, restored in answers:
        assert restored == uninterrupted
    assert len({tuple(values) for values, _ in answers}) == 4
    states = read_tensors(tmp_path / "step-00000001", "rng.")
    assert len(states) == 4
    assert len({bytes(state.numpy()) for state in states.values()}) == 4


def save_apart(folder: Path) -> None:
    """Save into a folder that only this rank sees (a job for the pool)."""
    with (
        open_world(device="cpu") as world,
        CheckpointStore(folder / str(world.rank), group=world.checkpoint_group) as store,
    ):
        store.save(1, {f"x.{world.rank}": torch.ones(2)}, {})
        with pytest.raises(RunError, match=r"rank 0 does not see __1_0\.distcp: all machines must share"):
            store.wait()


def test_folders_that_ranks_do_not_share_are_never_committed(pool: RankPool, tmp_path: Path) -> None:
    """What lies on another machine's disk is missed when it is saved, by all ranks, and not at the resume."""
    pool.run(2, save_apart, tmp_path)
    assert find_checkpoints(tmp_path / "0") == []


def save_all(folder: Path, steps: list[int]) -> float:
    """Save at these steps and return the seconds that it took (a job for the pool)."""
    with open_world(device="cpu") as world:
        began = time.monotonic()
        with CheckpointStore(folder, group=world.checkpoint_group, keep_last=9) as store:
            for step in steps:
                store.save(step, {"x": torch.full((4,), float(step))}, {"step_said": step})
        return time.monotonic() - began


def test_br_064_a_half_written_folder_makes_nobody_hang(pool: RankPool, tmp_path: Path) -> None:
    """A partial folder for step 10 is replaced by 2 ranks that reach step 10, in seconds."""
    partial = tmp_path / "step-00000010.partial"
    partial.mkdir()
    (partial / "__0_0.distcp").write_bytes(b"half")
    assert max(pool.run(2, save_all, tmp_path, [10])) < 30
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert torch.equal(read_tensors(tmp_path / "step-00000010")["x"], torch.full((4,), 10.0))


def save_and_load(folder: Path, sizes: list[int]) -> list[list[float]]:
    """Save tensors of these sizes and load them into zeros (a job for the pool)."""
    with open_world(device="cpu") as world, CheckpointStore(folder, group=world.checkpoint_group) as store:
        store.save(1, {str(size): torch.arange(float(size)) for size in sizes}, {})
        store.wait()
        latest = store.latest()
        assert latest is not None
        loaded = {str(size): torch.zeros(size) for size in sizes}
        load_tensors(latest, loaded)
        return [value.tolist() for value in loaded.values()]


def test_br_057_sizes_that_the_world_does_not_divide(pool: RankPool, tmp_path: Path) -> None:
    """Tensors of 7, 5 and 3 elements on 4 ranks: loaded whole, no padding visible, each written once."""
    expected = [[float(value) for value in range(size)] for size in (7, 5, 3)]
    assert pool.run(4, save_and_load, tmp_path, [7, 5, 3]) == [expected] * 4
    assert {name: len(value) for name, value in read_tensors(tmp_path / "step-00000001").items()} == {
        "7": 7,
        "5": 5,
        "3": 3,
    }


def broken_writer(folder: Path, bad_rank: int) -> str:
    """Save with a writer that fails on one rank and return the error's text (a job for the pool)."""

    def write(world: World) -> None:
        with CheckpointStore(folder, group=world.checkpoint_group, asynchronous=False) as store:
            store.save(1, {f"x.{world.rank}": torch.ones(2)}, {})

    def full(self: object, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    plain = store_module._Writer.write_data
    with open_world(device="cpu") as world:
        if world.rank == bad_rank:
            store_module._Writer.write_data = full  # type: ignore[method-assign]
        try:
            write(world)
        except RunError as error:
            return str(error)
        finally:
            store_module._Writer.write_data = plain  # type: ignore[method-assign]
    return ""


def test_br_068_a_writing_error_of_one_rank_reaches_all(pool: RankPool, tmp_path: Path) -> None:
    """The disk of rank 1 is full: both ranks raise, naming rank 1 and the cause, and nothing was committed."""
    for text in pool.run(2, broken_writer, tmp_path, 1):
        assert "rank 1: OSError: [Errno 28] No space left on device" in text
    assert find_checkpoints(tmp_path) == []


def ids_of_steps(data: Path, samples_seen: int, steps: int) -> list[int]:
    """Return the first token of every row that this rank gets (a job for the pool)."""
    with open_world(device="cpu") as world:
        loader = Loader(
            [PackedDataset(data)], seed=3, global_batch_size=4, micro_batch_size=1, data_rank=world.data_rank,
            data_degree=world.data_degree, samples_seen=samples_seen,
        )  # fmt: skip
        batches = iter(loader)
        micro_batches = [micro for _ in range(steps) for micro in next(batches).micro_batches]
        rows = [row for micro in micro_batches for row in zip(micro.tokens_BS, micro.document_ids_BS, strict=True)]
        return [int(tokens[0]) for tokens, documents in rows if int(documents[0]) >= 0]


@pytest.mark.parametrize("after", [4, 2, 1])
def test_br_049_every_sample_once_over_a_resumed_epoch(pool: RankPool, tmp_path: Path, after: int) -> None:
    """12 samples on 4 ranks, saved after 4, resumed on 4, 2 or 1: each id exactly once."""
    data = write_rows(tmp_path / "data", [[[number, 1, 2]] for number in range(12)])
    first = pool.run(4, ids_of_steps, data, 0, 1)
    rest = pool.run(after, ids_of_steps, data, 4, 2)
    assert sorted(number for ranks in (first, rest) for ids in ranks for number in ids) == list(range(12))


def load_damaged(folder: Path) -> tuple[list[str], str]:
    """Save, flip a bit of the last rank's file, load; return the files in the record and the error (for the pool)."""
    with open_world(device="cpu") as world:
        with CheckpointStore(folder, group=world.checkpoint_group) as store:
            store.save(1, {f"x.{world.rank}": torch.full((100,), float(world.rank))}, {})
            store.wait()
            latest = store.latest()
            assert latest is not None
        if world.rank == 0:
            path = latest.folder / f"__{world.size - 1}_0.distcp"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        dist.barrier(world.checkpoint_group)
        try:
            load_tensors(latest, {f"x.{rank}": torch.zeros(100) for rank in range(world.size)})
        except UserError as error:
            return sorted(latest.record["files"]), str(error)
    return [], "no error"


def test_damage_that_one_rank_finds_is_told_by_all(pool: RankPool, tmp_path: Path) -> None:
    """3 ranks sum their own files and check a share each: all raise the same error, none waits for another."""
    answers = pool.run(3, load_damaged, tmp_path)
    assert answers[0] == answers[1] == answers[2]
    files, error = answers[0]
    assert files == [".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp"]
    assert error.startswith(f"{tmp_path / 'step-00000001' / '__2_0.distcp'}: a file of the checkpoint is damaged")
