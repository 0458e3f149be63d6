"""What expert dispatch costs the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from danlu.parallel.expert import ExpertDispatch
from danlu.parallel.mesh import open_world


def test_the_host_waits_for_the_counts_once() -> None:
    """A repeat whose length is left to the device to find would make the host wait again."""
    lengths = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.repeat_interleave.Tensor:
                lengths.append((kwargs or {}).get("output_size"))
            return func(*args, **(kwargs or {}))

    with open_world(device="cpu") as world:
        dispatch = ExpertDispatch(world.group)
        with Watch():
            rows, counts, receipt = dispatch.send(torch.arange(6.0).view(3, 2), torch.tensor([2, 0, 1]))
    assert lengths == [3]
    assert torch.equal(rows, torch.arange(6.0).view(3, 2))
    assert counts.tolist() == [2, 0, 1]
    assert receipt.sent == [3]
