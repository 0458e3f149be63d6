"""Peaks against the vendors' data sheets, by the names that drivers report."""

from __future__ import annotations

import pytest

from danlu.base.devices import DEVICES, find_device, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-PCIE-40GB", "fp16", 312e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 NVL", "bf16", 835e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H20", "bf16", 148e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
    ],
)
def test_dense_peaks_by_driver_name(name: str, dtype: str, peak: float) -> None:
    """The dense figure of the right product: PCIe is not SXM, A10 is not A100, H20 is not H200."""
    assert peak_flops(name, dtype) == peak


@pytest.mark.parametrize("name", ["Some GPU", "", "NVIDIA A1000", "AMD EPYC 9654"])
def test_an_unknown_device_has_no_peak(name: str) -> None:
    """No guess: an unknown name, also one that begins like a known one, gives None."""
    assert find_device(name) is None
    assert peak_flops(name, "bf16") is None


def test_fp32_is_tf32_only_while_tf32_is_on() -> None:
    """The denominator follows the switch; a device without the format has no peak for it."""
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32") == 156e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "fp32", tf32=False) == 19.5e12
    assert peak_flops("Tesla V100-SXM2-32GB", "fp32") == 15.7e12
    assert peak_flops("Tesla V100-SXM2-32GB", "bf16") is None


def test_every_row_can_be_reached() -> None:
    """No row stands behind a more general one that takes its names."""
    for device in DEVICES:
        assert find_device(" ".join(device.words)) is device
