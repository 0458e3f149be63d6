"""Layer 4: the recipe, the loop, one step, the optimizer, metrics, evaluation and pipelines of stages.

``from danlu import train`` promises a function, but Python binds a package's name in its parent as soon as any of its
modules is imported, and from then on that line gives this package. So the package can be called, and calling it trains:
whichever of the two one gets, it is used alike.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danlu.config.schema import Config
    from danlu.train.loop import TrainResult


class _CallablePackage(ModuleType):
    def __call__(self, config: Config, *, resume: str = "auto") -> TrainResult:
        """Train; see `danlu.train.loop.train`."""
        from danlu.train.loop import train

        return train(config, resume=resume)


sys.modules[__name__].__class__ = _CallablePackage
