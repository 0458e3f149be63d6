"""The checkpoint store: what is saved comes back, strictly by name, and only what was committed is ever found."""

from __future__ import annotations

import errno
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from danlu.base.errors import RunError, UserError
from danlu.checkpoint import store as store_module
from danlu.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    find_checkpoints,
    load_tensors,
    open_checkpoint,
    tensor_names,
)
from danlu.model.decoder import Decoder
from danlu.parallel.mesh import World, open_world
from danlu.train.optimizer import HybridOptimizer
from tiny import language_loss, micro_batch, random_rows, read_tensors, state_of, tiny_model, tiny_optimizer

Maker = Callable[..., CheckpointStore]


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(device="cpu") as joined:
        yield joined


@pytest.fixture
def make(world: World, tmp_path: Path) -> Iterator[Maker]:
    """Make stores in ``tmp_path``; they are closed at the end."""
    made = []

    def maker(**options: Any) -> CheckpointStore:
        made.append(CheckpointStore(tmp_path, group=world.checkpoint_group, **options))
        return made[-1]

    yield maker
    for store in made:
        store.close()


def steps(folder: Path) -> list[int]:
    return [open_checkpoint(path).step for path in find_checkpoints(folder)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_is_saved_comes_back(make: Maker, asynchronous: bool) -> None:
    """Tensors of several dtypes and sizes (also empty and 0-dimensional) and the record, bit for bit."""
    tensors = {
        "a": torch.randn(7, 5), "b.c": torch.tensor(3.5), "bytes": torch.arange(9, dtype=torch.uint8),
        "half": torch.randn(3).bfloat16(), "none": torch.zeros(0, 4),
    }  # fmt: skip
    store = make(asynchronous=asynchronous)
    store.save(12, tensors, {"samples_seen": 96, "名": [1, 2]})
    store.wait()
    latest = store.latest()
    assert latest is not None
    assert (latest.step, latest.record["samples_seen"], latest.record["名"]) == (12, 96, [1, 2])
    assert tensor_names(latest) == sorted(tensors)
    loaded = {name: torch.empty_like(value).fill_(1) for name, value in tensors.items()}
    load_tensors(latest, loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    on_disk = read_tensors(latest.folder)
    assert all(torch.equal(on_disk[name], tensors[name]) for name in tensors)


def test_saving_takes_the_values_of_the_moment(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while the thread writes: later updates do not leak into the checkpoint."""
    gate, plain = threading.Event(), dcp.save
    monkeypatch.setattr(dcp, "save", lambda *args, **kwargs: gate.wait(10) and plain(*args, **kwargs))
    value = torch.ones(4)
    store = make()
    store.save(1, {"value": value}, {})
    value.fill_(2.0)
    assert store.latest() is None
    gate.set()
    store.wait()
    latest = store.latest()
    assert latest is not None
    assert torch.equal(read_tensors(latest.folder)["value"], torch.ones(4))


def test_only_the_last_checkpoints_are_kept(make: Maker, tmp_path: Path) -> None:
    """Older ones go after a newer one is there; nothing else in the folder is touched."""
    (tmp_path / "notes.txt").write_text("mine")
    store = make(keep_last=2)
    for step in (1, 2, 3, 10, 20):
        store.save(step, {"x": torch.zeros(1)}, {})
    store.wait()
    assert steps(tmp_path) == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000010", "step-00000020"]


def test_saving_a_step_again_replaces_it(make: Maker, tmp_path: Path) -> None:
    """The newer attempt's tensors are what is found."""
    store = make()
    for value in (1.0, 2.0):
        store.save(5, {"x": torch.full((2,), value)}, {})
    store.wait()
    assert torch.equal(read_tensors(tmp_path / "step-00000005")["x"], torch.full((2,), 2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_br_064_a_half_written_folder_is_replaced(make: Maker, tmp_path: Path) -> None:
    """What a killed run left is never found, never opened, and gone after the next save."""
    for name in ("step-00000010.partial", "step-00000007.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "danlu.json").write_text('{"format": 1, "step": 10}')
    (tmp_path / "step-00000011").mkdir()  # no record: not ours
    store = make()
    assert store.latest() is None
    with pytest.raises(UserError, match="never completed"):
        open_checkpoint(tmp_path / "step-00000010.partial")
    store.save(10, {"x": torch.zeros(1)}, {})
    store.wait()
    assert steps(tmp_path) == [10]
    assert not list(tmp_path.glob("*.partial"))


def test_br_065_the_old_checkpoint_stays_until_the_new_one_is_durable(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an asynchronous save is under way with keep_last=1, the newest is still the old one, and complete."""
    store = make(keep_last=1)
    store.save(1, {"x": torch.zeros(1)}, {})
    store.wait()
    gate, plain = threading.Event(), store_module._write_durably
    monkeypatch.setattr(store_module, "_write_durably", lambda *args: gate.wait(10) and plain(*args))
    store.save(2, {"x": torch.ones(1)}, {})
    assert steps(tmp_path) == [1]
    assert torch.equal(read_tensors(tmp_path / "step-00000001")["x"], torch.zeros(1))
    gate.set()
    store.wait()
    assert steps(tmp_path) == [2]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_br_068_a_writing_error_surfaces_with_path_and_cause(
    make: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """An OSError in DCP's writer becomes a RunError that names folder and cause; the last complete one is untouched."""
    store = make(asynchronous=asynchronous)
    store.save(1, {"x": torch.zeros(1)}, {})
    store.wait()

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(RunError, match="No space left on device") as caught:  # noqa: PT012 (either may raise)
        store.save(2, {"x": torch.zeros(1)}, {})
        store.wait()
    assert str(caught.value).startswith(f"{tmp_path}: ")
    assert steps(tmp_path) == [1]


def test_br_068_the_next_save_or_the_end_reports_an_earlier_error(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """An asynchronous error cannot be lost: `save` and `close` both raise it, once."""

    def broken(*args: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(store_module, "_write_durably", broken)
    store = make()
    store.save(1, {"x": torch.zeros(1)}, {})
    with pytest.raises(RunError, match="read-only"):
        store.save(2, {"x": torch.zeros(1)}, {})
    store.save(3, {"x": torch.zeros(1)}, {})
    with pytest.raises(RunError, match="read-only"):
        store.close()


def test_br_068_a_run_that_cannot_save_exits_with_1(tmp_path: Path, tiny_rows: Path) -> None:
    """A real write error (a file size limit) at the only save: exit code 1, path and cause on stderr, no traceback."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom tiny import tiny_config\nfrom danlu.base.errors import DanluError\n"
        "from danlu.train.loop import train\n"
        "try:\n    train(tiny_config(sys.argv[1], sys.argv[2], 'train.steps=2', 'model.hidden_size=64'))\n"
        "except DanluError as error:\n    print(error, file=sys.stderr)\n    sys.exit(error.exit_code)\n"
    )

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    done = subprocess.run(
        [sys.executable, "-c", script, str(tiny_rows), str(tmp_path / "run")], cwd=Path(__file__).parents[2],
        preexec_fn=limit, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "could not be written" in done.stderr
    assert str(tmp_path / "run" / "checkpoints") in done.stderr
    assert "File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert find_checkpoints(tmp_path / "run" / "checkpoints") == []


def saved(make: Maker, tensors: dict[str, Tensor]) -> Any:
    store = make()
    store.save(1, tensors, {})
    store.wait()
    return store.latest()


def test_br_056_save_then_load_with_no_step_between(make: Maker) -> None:
    """A fresh model and optimizer save and load at step 0: parameters equal, optimizer step 0."""

    def build(seed: int) -> dict[str, Tensor]:
        model = tiny_model(seed)
        optimizer = tiny_optimizer(model, fused=True)
        return {**{name: value.detach() for name, value in model.named_parameters()}, **state_of(optimizer)}

    first, second = build(0), build(1)
    assert not torch.equal(first["head.weight"], second["head.weight"])
    load_tensors(saved(make, first), second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert float(second["head.weight.step"]) == 0.0


def test_br_057_sizes_that_divide_by_nothing(make: Maker) -> None:
    """Tensors of 7, 5 and 3 elements come back with their own sizes."""
    tensors = {str(size): torch.arange(float(size)) for size in (7, 5, 3)}
    loaded = {name: torch.zeros_like(value) for name, value in tensors.items()}
    load_tensors(saved(make, tensors), loaded)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


def test_br_058_state_follows_its_name_not_its_position(make: Maker) -> None:
    """Two equal-shaped layers registered in swapped order at load: each gets the state of its own name."""
    layers = {name: torch.nn.Linear(4, 4) for name in ("first", "second")}

    def state(order: list[str]) -> dict[str, Tensor]:
        model = torch.nn.ModuleDict({name: layers[name] for name in order})
        optimizer = tiny_optimizer(model, fused=False)
        return state_of(optimizer)

    before = state(["first", "second"])
    for number, value in enumerate(before.values()):
        value.fill_(number + 1)
    after = state(["second", "first"])
    load_tensors(saved(make, before), after)
    assert list(after) != list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_br_059_state_reaches_an_optimizer_that_has_never_stepped(make: Maker) -> None:
    """After three steps the moments and the step count load into a fresh optimizer, non-zero and equal."""

    def build() -> tuple[Decoder, HybridOptimizer]:
        model = tiny_model()
        return model, tiny_optimizer(model, fused=True)

    model, optimizer = build()
    for _ in range(3):
        language_loss(model, micro_batch(random_rows(2, seed=0))).total.backward()
        optimizer.step()
    _, fresh = build()
    load_tensors(saved(make, state_of(optimizer)), state_of(fresh))
    state = state_of(fresh)
    assert all(float(value) == 3.0 for name, value in state.items() if name.endswith(".step"))
    for name, value in state_of(optimizer).items():
        assert torch.equal(state[name], value)
        assert value.any()


def test_br_060_names_that_differ_are_listed_in_both_directions(make: Maker) -> None:
    """One extra and one missing key: the error lists both, and nothing was loaded; prefixes may be left unread."""
    checkpoint = saved(make, {"model.a": torch.ones(2), "model.b": torch.ones(2), "optimizer.a": torch.ones(2)})
    wanted = {"model.a": torch.zeros(2), "model.c": torch.zeros(2)}
    with pytest.raises(UserError) as caught:
        load_tensors(checkpoint, wanted)
    assert "missing in the checkpoint: model.c" in str(caught.value)
    assert "not known to this run: model.b, optimizer.a" in str(caught.value)
    assert not wanted["model.a"].any()
    with pytest.raises(UserError, match=r"not known to this run: model\.b$"):
        load_tensors(checkpoint, {"model.a": torch.zeros(2)}, unread=("optimizer.",))
    both = {"model.a": torch.zeros(2), "model.b": torch.zeros(2)}
    load_tensors(checkpoint, both, unread=("optimizer.",))
    assert all(value.all() for value in both.values())


def test_a_shape_that_differs_is_named(make: Maker) -> None:
    """Name, both shapes, and the folder."""
    checkpoint = saved(make, {"x": torch.ones(2, 3)})
    with pytest.raises(UserError, match=r"the shape of x differs") as caught:
        load_tensors(checkpoint, {"x": torch.zeros(3, 2)})
    assert "(2, 3) in the checkpoint" in str(caught.value)
    assert "(3, 2)" in str(caught.value)


def forget_sums(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint as an older danlu would have written it."""
    return Checkpoint(checkpoint.folder, {key: value for key, value in checkpoint.record.items() if key != "files"})


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 64
    path.write_bytes(content)


@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_flipped_bit_is_noticed_and_its_file_named(make: Maker, place: float) -> None:
    """One bit anywhere in a tensor file: refused with the file and both checksums, and nothing is loaded."""
    checkpoint = saved(make, {"x": torch.ones(1000)})
    path = next(checkpoint.folder.glob("*.distcp"))
    flip(path, int(path.stat().st_size * place))
    into = torch.zeros(1000)
    with pytest.raises(UserError, match="a file of the checkpoint is damaged") as caught:
        load_tensors(checkpoint, {"x": into})
    text = str(caught.value)
    assert text.startswith(str(path))
    assert f"legal: crc32 {checkpoint.record['files'][path.name]['crc32']:08x}" in text
    assert "hint:" in text
    assert not into.any()


def test_the_hint_names_the_newest_sound_checkpoint(make: Maker, tmp_path: Path) -> None:
    """Of three checkpoints the last two are damaged: the hint is the first."""
    store = make(keep_last=3)
    for step in (1, 2, 3):
        store.save(step, {"x": torch.ones(10)}, {})
    store.wait()
    for path in find_checkpoints(tmp_path)[1:]:
        flip(next(path.glob("*.distcp")), 600)
    with pytest.raises(UserError, match=r"continue from step-00000001, which is sound"):
        load_tensors(open_checkpoint(tmp_path / "step-00000003"), {"x": torch.zeros(10)})
    load_tensors(open_checkpoint(tmp_path / "step-00000001"), {"x": torch.zeros(10)})


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_file_that_was_cut_or_lost_is_named(make: Maker, listed: bool, damage: str) -> None:
    """A bad copy: the file, what is there and what should be, with and without checksums in the record."""
    checkpoint = saved(make, {"x": torch.ones(1000)})
    path = next(checkpoint.folder.glob("*.distcp"))
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:100])
    else:
        path.unlink()
    with pytest.raises(UserError, match=rf"^{path}: a file of the checkpoint is damaged") as caught:
        load_tensors(checkpoint if listed else forget_sums(checkpoint), {"x": torch.zeros(1000)})
    assert ("seen:  100 bytes" if damage == "cut" else "seen:  no such file") in str(caught.value)


def test_checkpoints_without_checksums_still_load(make: Maker) -> None:
    """Those that an older danlu has written."""
    checkpoint = forget_sums(saved(make, {"x": torch.ones(10)}))
    into = torch.zeros(10)
    load_tensors(checkpoint, {"x": into})
    assert into.all()


def test_an_unknown_format_is_refused(make: Maker) -> None:
    """A checkpoint of a newer danlu says so."""
    checkpoint = saved(make, {"x": torch.ones(1)})
    record = json.loads((checkpoint.folder / "danlu.json").read_text())
    (checkpoint.folder / "danlu.json").write_text(json.dumps({**record, "format": 99}))
    with pytest.raises(UserError, match="unknown checkpoint format"):
        open_checkpoint(checkpoint.folder)
