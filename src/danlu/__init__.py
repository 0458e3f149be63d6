"""danlu trains, shrinks and ships large language models on the GPUs you have.

The names below are loaded when they are first used, so ``import danlu`` (and ``danlu --help``) costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from danlu.version import __version__

if TYPE_CHECKING:
    from danlu.api import Config, export, load_model, train

__all__ = ["Config", "__version__", "export", "load_model", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from danlu import api

        return getattr(api, name)
    raise AttributeError(f"module 'danlu' has no attribute {name!r}")
