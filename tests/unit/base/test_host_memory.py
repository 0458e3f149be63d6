"""Freed host memory stays with the process."""

import resource
import subprocess
import sys

import pytest

from danlu.base.host_memory import keep_freed_memory

PROGRAM = """
import resource, sys
from danlu.base.host_memory import ask_for_huge_pages, keep_freed_memory
if sys.argv[1] == "keep":
    ask_for_huge_pages()
    assert keep_freed_memory()
import torch
torch.set_num_threads(1)
torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    run = subprocess.run([sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True)
    return int(run.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_freed_memory_is_used_again_without_page_faults():
    """Four tensors of 64 MiB after a first one map no pages, where the default maps thousands."""
    kept, default = page_faults("keep"), page_faults("default")
    assert kept < 100
    assert default > 4 * 2**26 / resource.getpagesize() / 512 / 2  # even where the system hands out huge pages


def test_keeping_is_repeatable():
    """Asking twice is as good as once."""
    assert keep_freed_memory() == keep_freed_memory()
