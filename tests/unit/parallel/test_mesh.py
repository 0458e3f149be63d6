"""The only place that makes process groups: one process, errors inside, nesting, exact counting."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from danlu.base.errors import UserError
from danlu.base.layout import Degrees
from danlu.parallel import mesh
from danlu.parallel.data import parameter_hash
from danlu.parallel.mesh import open_world, pick_device, sum_over
from tiny import tiny_model


def test_one_process_is_a_world_of_one() -> None:
    """Nothing above asks whether it is distributed: there is always a group, and it is left at the end."""
    with open_world(device="cpu") as world:
        assert (world.rank, world.size, world.data_rank, world.data_degree) == (0, 1, 0, 1)
        assert world.group.size() == 1
        assert world.checkpoint_group.size() == 1
        assert world.checkpoint_group is not world.group
    assert not dist.is_initialized()


def test_an_error_inside_leaves_no_group_behind() -> None:
    """The next run of this process can start."""
    with pytest.raises(ZeroDivisionError), open_world(device="cpu"):
        raise ZeroDivisionError
    with open_world(device="cpu") as world:
        assert world.size == 1


def test_a_training_inside_a_training_is_refused() -> None:
    """A group that somebody else has opened is not taken over."""
    with open_world(device="cpu"):
        with pytest.raises(UserError, match=r"joined a torch\.distributed job already"), open_world(device="cpu"):
            pass
        assert dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there_is_refused() -> None:
    """Asking for CUDA by name where there is none names the key; `auto` takes the CPU."""
    with pytest.raises(UserError, match=r"train\.device"):
        pick_device("cuda", 0)
    assert pick_device("auto", 5) == torch.device("cpu")


def test_counts_are_summed_exactly() -> None:
    """Token counts beyond fp32 keep their last digit."""
    with open_world(device="cpu") as world:
        assert sum_over(world.group, 2**53 - 1, 0.5) == [2**53 - 1, 0.5]


def test_the_hash_sees_every_bit_name_and_shape() -> None:
    """Equal models hash equally; one changed bit, or another shape with the same bytes, does not."""
    model = tiny_model()
    assert parameter_hash(list(model.named_parameters())) == parameter_hash(list(tiny_model().named_parameters()))
    assert parameter_hash(list(tiny_model(1).named_parameters())) != parameter_hash(list(model.named_parameters()))
    with torch.no_grad():
        model.final_norm.weight.view(torch.int32)[0] ^= 1
    assert parameter_hash(list(model.named_parameters())) != parameter_hash(list(tiny_model().named_parameters()))
    wide, high = (torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (2, 3)))
    assert parameter_hash([("weight", wide)]) != parameter_hash([("weight", high)])


def test_tensor_ranks_on_several_machines_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rank placement keeps tp inside a machine; where its degree does not divide the machine, rank 0 says so."""
    monkeypatch.setattr(mesh, "_make_world", lambda *_: None)
    for local, heard in (("2", 1), ("4", 0), ("8", 0)):
        caplog.clear()
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        with open_world(Degrees(dp_replicate=2, tp=4), device="cpu"):
            pass
        assert (
            len([text for text in caplog.messages if "tensor parallel ranks lie on several machines" in text]) == heard
        )
