"""What a run ran on, written beside its results: a number without its machine and versions proves little."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import psutil
import torch

from danlu.version import __version__


def describe_environment() -> dict[str, Any]:
    """Return versions and hardware of this process's machine as plain values."""
    return {
        "danlu": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("numpy", "transformers", "safetensors")},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:  # not Linux
        names = []
    return names[0] if names else platform.processor() or platform.machine()
