"""danlu from Python: the same functions that the commands call.

>>> from danlu import Config, export, load_model, train
>>> config = Config(
...     model={"name": "tiny", "vocab_size": 512},
...     data={"train": "shards"},  # a folder written by `danlu data build`
...     train={"steps": 2, "output": "runs/first"},
... )
>>> result = train(config)
>>> result.step
2
>>> model = load_model("runs/first")
>>> len(model.generate(["What does a transfer cost?"], max_new_tokens=8))
1
>>> written = export("runs/first", "first-hf", dtype="bf16")
>>> written["files"][0]
'chat_template.jinja'

Errors in what was given are `danlu.base.errors.UserError`, failures on the way are `danlu.base.errors.RunError`.
"""

from __future__ import annotations

from danlu.config.schema import Config
from danlu.train.export import export
from danlu.train.load import TrainedModel, load_model
from danlu.train.loop import TrainResult, train

__all__ = ["Config", "TrainResult", "TrainedModel", "export", "load_model", "train"]
