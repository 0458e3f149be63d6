"""What a result must say to be worth anything: hardware, versions, command, date, load.

Nothing here names the machine: no host, no path, no user. Used by every benchmark, imports only the standard library.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """Return the CPU's model name with what matters for matrix products (AVX-512, AMX)."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    flags = fields.get("flags", "").split()
    kinds = [name for flag, name in (("avx512f", "AVX-512"), ("amx_bf16", "AMX bf16")) if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(kinds) or 'no AVX-512'})"


def describe() -> dict[str, Any]:
    """Return hardware and date as plain JSON values."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def versions(*names: str) -> dict[str, str]:
    """Return the installed versions of ``names`` in this environment; absent ones are left out."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def wait_for_quiet(limit: float, seconds: float) -> None:
    """Wait until the one-minute load is below ``limit``, at most ``seconds``; 0 does not wait."""
    end = time.monotonic() + seconds
    while os.getloadavg()[0] >= limit and time.monotonic() < end:
        time.sleep(15)


def machine_lines(machine: dict[str, Any]) -> list[str]:
    """Return the lines of a results page that say where and when it was measured."""
    return [
        f"- Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB; {machine['system']}, "
        f"Python {machine['python']}; {machine['date']}; load before the run {machine['load_before']}",
    ]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
