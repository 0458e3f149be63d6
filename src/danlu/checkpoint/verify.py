"""The proof of an export: `transformers` opens the folder and computes the same logits.

The only place outside the tests where a `transformers` model runs. It reads what was written, not what is in memory, so
a wrong name, a lost rope setting or a cut tensor shows as a difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from danlu.base.errors import RunError
from danlu.model.decoder import Decoder


def can_verify(folder: Path) -> bool:
    """Return whether `transformers` has code for the exported model (for the first Qwen it has none)."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] in CONFIG_MAPPING


@torch.no_grad()
def verify_export(
    folder: Path, model: Decoder, *, num_tokens: int = 32, tolerance: float | None = None, where: Path | None = None
) -> float:
    """Return the largest difference between danlu's and `transformers`' logits of a fixed token sequence.

    Args:
        folder: the exported HF folder.
        model: the model that was exported, in fp32.
        num_tokens: length of the probe.
        tolerance: largest difference that passes; None: 1e-4 of the largest logit for fp32 weights, 5 % for narrower
            ones, whose rounding is part of the export.
        where: what errors call the folder (while it has another name); None is its own.

    Raises:
        RunError: the logits differ by more.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    stored = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    rounded = stored.dtype != torch.float32
    spec = model.spec
    length = min(num_tokens, spec.max_positions)
    tokens_BS = torch.randint(spec.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    theirs_BSV = stored.float().eval()(input_ids=tokens_BS).logits
    was_training = model.training
    hidden_BSD = model.eval()(tokens_BS.to(model.head_weight_VD.device))
    model.train(was_training)
    ours_BSV = (hidden_BSD.float() @ model.head_weight_VD.float().T).cpu()
    difference = float((ours_BSV - theirs_BSV).abs().max())
    limit = tolerance if tolerance is not None else float(ours_BSV.abs().max()) * (0.05 if rounded else 1e-4)
    if not difference <= limit:
        raise RunError(
            "transformers computes other logits from the exported folder",
            where=str(where or folder),
            seen=f"largest difference {difference:.3g}",
            legal=f"at most {limit:.3g}",
        )
    return difference
