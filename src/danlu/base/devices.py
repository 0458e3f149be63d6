"""What the hardware can do at best: dense matmul peaks per device, from the vendors' data sheets.

`mfu` divides by these numbers, so they are the *dense* figures (the sheets print twice as much "with sparsity").
Devices are matched by the exact words of their names; an unknown device has no peak and its `mfu` is null, because a
guessed denominator is worse than none.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one accelerator: TFLOP/s by compute dtype (tf32 stands for fp32 matmuls with TF32 on), memory in GiB."""

    words: tuple[str, ...]
    """All of these words must occur in the name that the driver reports."""
    bf16: float | None
    fp16: float
    tf32: float | None
    fp32: float
    memory_gib: float


# Longer word lists first: 'H100 PCIe' must not be taken for the SXM part.
# Sources: NVIDIA data sheets of each product (A100 2020, H100 2022, H200 2023, L40S 2023, Blackwell 2024).
DEVICES: tuple[Device, ...] = (
    Device(("H100", "PCIe"), bf16=756, fp16=756, tf32=378, fp32=51, memory_gib=80),
    Device(("H100", "NVL"), bf16=835, fp16=835, tf32=417, fp32=60, memory_gib=94),
    Device(("H100",), bf16=989, fp16=989, tf32=494, fp32=67, memory_gib=80),
    Device(("H200",), bf16=989, fp16=989, tf32=494, fp32=67, memory_gib=141),
    Device(("H800",), bf16=989, fp16=989, tf32=494, fp32=67, memory_gib=80),
    Device(("H20",), bf16=148, fp16=148, tf32=74, fp32=44, memory_gib=96),
    Device(("B200",), bf16=2250, fp16=2250, tf32=1100, fp32=75, memory_gib=180),
    Device(("A100", "40GB"), bf16=312, fp16=312, tf32=156, fp32=19.5, memory_gib=40),
    Device(("A100",), bf16=312, fp16=312, tf32=156, fp32=19.5, memory_gib=80),
    Device(("A800",), bf16=312, fp16=312, tf32=156, fp32=19.5, memory_gib=80),
    Device(("L40S",), bf16=362, fp16=362, tf32=183, fp32=91.6, memory_gib=48),
    Device(("A10",), bf16=125, fp16=125, tf32=62.5, fp32=31.2, memory_gib=24),
    Device(("4090",), bf16=165, fp16=165, tf32=82.6, fp32=82.6, memory_gib=24),
    Device(("3090",), bf16=71, fp16=71, tf32=35.6, fp32=35.6, memory_gib=24),
    Device(("V100",), bf16=None, fp16=125, tf32=None, fp32=15.7, memory_gib=32),
)


def find_device(name: str) -> Device | None:
    """Return the table's row for a driver's device name such as ``NVIDIA A100-SXM4-40GB``, or None."""
    words = set(name.replace("-", " ").split()) | set(name.split("-"))
    return next((device for device in DEVICES if set(device.words) <= words), None)


def peak_flops(name: str, compute_dtype: str, *, tf32: bool = True) -> float | None:
    """Return the dense matmul peak in FLOP/s of the named device for ``fp32``, ``bf16`` or ``fp16``, or None."""
    device = find_device(name)
    if device is None:
        return None
    table = {"bf16": device.bf16, "fp16": device.fp16, "fp32": device.tf32 if tf32 and device.tf32 else device.fp32}
    peak = table[compute_dtype]
    return None if peak is None else peak * 1e12
