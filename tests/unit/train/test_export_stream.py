"""The memory of an export: a model of many layers passes through a window of one tensor and one file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from danlu.checkpoint.convert import export_hf, load_hf
from danlu.checkpoint.hf_files import open_tensors
from danlu.checkpoint.saved import SavedWeights
from danlu.checkpoint.store import find_checkpoints, open_checkpoint
from danlu.train.export import export
from danlu.train.load import load_model
from danlu.train.loop import train
from tiny import MOE, read_tensors, tiny_config

SHARD_BYTES = 2**16


@pytest.fixture(scope="module", params=["dense", "experts"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> Path:
    """One step of 12 layers."""
    folder = tmp_path_factory.mktemp("deep") / "run"
    experts = (*MOE, "model.num_experts=8") if request.param == "experts" else ()
    train(tiny_config(tiny_rows, folder, *experts, "model.num_layers=12", "train.steps=1"))
    return folder


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the most memory that torch's allocator held at once for what ``work`` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    changes: Sequence[int] = [event.nbytes() for event in results.events() if event.name() == "[memory]"]
    return max(accumulate(changes))


def test_an_export_holds_a_tensor_and_a_file(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peak below twice the largest tensor and one file; the model loaded as a whole is far above that."""
    checkpoint = find_checkpoints(run / "checkpoints")[-1]
    sizes = [tensor.numel() * 4 for tensor in read_tensors(checkpoint, "model.").values()]
    allowed = 2 * max(sizes) + SHARD_BYTES
    assert sum(sizes) > 3 * allowed, "too small a model to tell"

    small = partial(export_hf, max_shard_bytes=SHARD_BYTES)
    monkeypatch.setattr("danlu.train.export.export_hf", small)
    # it reads the files through maps, which count as memory here and take none
    monkeypatch.setattr("danlu.train.export.check_export", lambda part, dtype, where: None)
    streamed = peak_bytes(lambda: export(run, tmp_path / "a", verify=False))
    assert max(sizes) < streamed < allowed
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3

    def load_all() -> None:
        model = load_model(run, device="cpu").model
        small(model.spec, dict(model.named_parameters()), tmp_path / "b")

    assert peak_bytes(load_all) > sum(sizes), "the measurement sees a model that is loaded"


def test_streamed_tensors_are_those_of_the_loaded_model(run: Path, tmp_path: Path) -> None:
    """Every tensor is looked up once, and its value is that of the model in memory, in every shard."""
    model, looked_up = load_model(run, device="cpu").model, []

    class Counted(SavedWeights):
        def __getitem__(self, fqn: str):  # type: ignore[no-untyped-def]
            looked_up.append(fqn)
            return super().__getitem__(fqn)

    weights = Counted(open_checkpoint(find_checkpoints(run / "checkpoints")[-1]))
    export_hf(model.spec, weights, tmp_path / "hf", max_shard_bytes=SHARD_BYTES)
    again = load_model(tmp_path / "hf", device="cpu").model
    theirs = dict(again.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.equal(theirs[name]), name
    twice = {"embedding.weight": 3, "head.weight": 2}  # to see whether they are tied, and the dtype
    assert {fqn: looked_up.count(fqn) for fqn in weights} == {fqn: twice.get(fqn, 1) for fqn in weights}
    assert open_tensors(tmp_path / "hf").names
    assert load_hf(tmp_path / "hf") == model.spec


def test_logits_are_compared_only_where_the_model_fits(
    learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Less free memory than two models need: a warning with both numbers, and an export without that check."""
    needed = 57_072 * 8
    monkeypatch.setattr("danlu.train.export.free_memory_bytes", lambda: needed - 1)
    assert export(learned_run, tmp_path / "a")["logits_difference"] is None
    assert "not verified: comparing logits with transformers takes the whole model twice, 0.0 GiB" in caplog.text
    monkeypatch.setattr("danlu.train.export.free_memory_bytes", lambda: needed)
    assert export(learned_run, tmp_path / "b")["logits_difference"] < 1e-4
