"""Freed host memory stays with the process. What it saves is measured in the benchmarks: page faults depend on load."""

from __future__ import annotations

import ctypes
import os

import pytest

from danlu.base.host_memory import ask_for_huge_pages, keep_freed_memory


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="mallopt is glibc's")
def test_keeping_is_possible_and_repeatable() -> None:
    """The C library accepts both switches, as often as it is asked."""
    assert keep_freed_memory()
    assert keep_freed_memory()


def test_the_users_choice_of_huge_pages_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Huge pages are asked for unless the variable is set already."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    ask_for_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    ask_for_huge_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
