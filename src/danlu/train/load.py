"""Open a trained model, wherever it lies: run folder, checkpoint, HF folder, GGUF file, hub id.

Evaluation, chat and export all begin here, so they accept the same names and mean the same weights by them. A run
folder stands for its newest complete checkpoint (or the one whose step is given), a checkpoint folder for itself;
every other name is resolved as for training.

A checkpoint holds weights and, in its record, the shape of the model; the tokenizer lies in the run folder, or in the
data set that the run was trained on where the run has no copy. A model can be opened without a tokenizer (a held-out
loss needs none); asking for one that is not there is an error that says where it was looked for.

What is known about the training data (whether prompts were chats, which templates made them) comes from the manifest
of that data set, so that questions can be asked in the words the model was trained on.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import torch
import torch.distributed as dist
from torch import Tensor

from danlu.base import env
from danlu.base.errors import UserError, unknown_name
from danlu.checkpoint.convert import load_decoder
from danlu.checkpoint.hub import local_folder, resolve_model
from danlu.checkpoint.store import Checkpoint, find_checkpoints, load_tensors, open_checkpoint
from danlu.data.tokenizer import Tokenizer
from danlu.model.decoder import Decoder
from danlu.model.generate import generate
from danlu.model.spec import ModelSpec, RopeScaling
from danlu.parallel.mesh import pick_device
from danlu.parallel.placement import Piece

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainedModel:
    """A model ready to be used.

    Attributes:
        model: in eval mode.
        name: what the user called it.
        weights: folder that the weights were read from.
        run: run folder that the weights belong to, if any.
        step: optimizer steps behind the weights, where they come from a checkpoint.
        tokenizer_folder: where the tokenizer lies, or None where none was found.
        data_config: options of the data build behind the training data (`danlu.config.data_build`), empty if unknown.
    """

    model: Decoder
    name: str
    weights: Path
    run: Path | None
    step: int | None
    tokenizer_folder: Path | None
    data_config: Mapping[str, Any]

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.model.spec

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UserError: there is none.
        """
        if self.tokenizer_folder is None:
            raise UserError(
                "this model has no tokenizer",
                where=str(self.run or self.weights),
                seen="neither a tokenizer/ beside it nor the data set it was trained on",
                hint="copy the tokenizer folder of the training data to RUN/tokenizer",
            )
        return Tokenizer.load(self.tokenizer_folder)

    @property
    def max_tokens(self) -> int:
        """Longest prompt and continuation together, in tokens."""
        return self.spec.longest_input

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id of the special token that ends an assistant turn in the chat template, or None."""
        return find_end_of_turn(self.tokenizer)

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end an answer: EOS, the template's end of turn, and those of generation_config.json."""
        found = {self.tokenizer.eos_id, *_generation_stops(self.weights)}
        return frozenset(found if self.end_of_turn is None else found | {self.end_of_turn})

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int = 0,
        batch_size: int = 16,
    ) -> list[str]:
        """Return the continuation of each prompt as text, without the prompt.

        Args:
            prompts: plain text; BOS is added where the tokenizer uses it, no chat template is applied.
            max_new_tokens: longest continuation in tokens.
            temperature: 0 takes the likeliest token, above 0 samples.
            top_p: sample among the likeliest tokens that together reach this probability.
            seed: with a prompt's index it determines its samples.
            batch_size: prompts that run together; changes nothing but speed.

        Raises:
            UserError: no tokenizer, an empty prompt, or settings out of range.
        """
        ids = [self.tokenizer.encode(prompt, bos=True) for prompt in prompts]
        answers = generate(
            self.model, ids, max_new_tokens=max_new_tokens, stop_ids=self.stop_ids, temperature=temperature,
            top_p=top_p, seed=seed, batch_size=batch_size,
        )  # fmt: skip
        return [self.tokenizer.decode(answer, skip_special=True) for answer in answers]


def load_model(
    name: str | Path, *, checkpoint: int | None = None, dtype: str = "fp32", device: str = "auto"
) -> TrainedModel:
    """Open a trained model in eval mode.

    Args:
        name: run folder, checkpoint folder, HF folder, GGUF file, hub id (``owner/name``) or ``modelscope:owner/name``.
        checkpoint: step of a run's checkpoint; None takes the newest.
        dtype: of parameters and computation: ``fp32``, ``bf16`` or ``fp16``.
        device: ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UserError: nothing there, no complete checkpoint, an unsupported model, or damaged weights.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    place = pick_device(device, env.ranks().local_rank)
    saved = find_checkpoint(str(name), checkpoint)
    if saved is not None:
        return _from_checkpoint(str(name), saved, DTYPES[dtype], place)
    folder = local_folder(resolve_model(str(name)))
    model = load_decoder(folder, dtype=DTYPES[dtype], device=place)
    return TrainedModel(model, str(name), folder, None, None, folder if has_tokenizer(folder) else None, {})


def find_checkpoint(name: str, step: int | None = None) -> Checkpoint | None:
    """Return the checkpoint that ``name`` stands for, or None where it is neither a run nor a checkpoint.

    Raises:
        UserError: a run without (that) checkpoint, a checkpoint that was never completed, or a step for anything else.
    """
    path = Path(name)
    if not is_run(path):
        if step is not None:
            raise UserError("only a run folder has checkpoints to choose from", where=name, seen=f"step {step}")
        is_checkpoint = path.is_dir() and (path.name.startswith("step-") or (path / "danlu.json").is_file())
        return open_checkpoint(path) if is_checkpoint else None
    found = find_checkpoints(path / "checkpoints")
    if not found:
        raise UserError(
            "this run has no complete checkpoint yet", where=name, hint="let it train on, or set checkpoint.every_steps"
        )
    if step is None:
        return open_checkpoint(found[-1])
    by_step = {int(folder.name.removeprefix("step-")): folder for folder in found}
    if step not in by_step:
        raise UserError("the run has no checkpoint of this step", where=name, seen=step, legal=by_step)
    return open_checkpoint(by_step[step])


def is_run(path: Path) -> bool:
    """Return whether ``path`` is a run folder."""
    return (path / "checkpoints").is_dir()


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds a tokenizer in one of the layouts that can be opened."""
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json"))


def spec_from_record(record: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the shape that a checkpoint's record holds.

    Raises:
        UserError: fields that this version does not know, or lacks.
    """
    values = dict(record)
    scaling = values.get("rope_scaling")
    try:
        values["rope_scaling"] = None if scaling is None else RopeScaling(**scaling)
        for name in ("sliding_layers", "dense_layers"):
            values[name] = None if values.get(name) is None else tuple(values[name])
        return ModelSpec(**values)
    except TypeError as error:
        raise UserError(
            f"the checkpoint describes its model otherwise than this version: {error}",
            where=where,
            hint="export it with the version of danlu that trained it",
        ) from None


def is_chat_data(data_config: Mapping[str, Any]) -> bool:
    """Return whether a data build made chats; False where nothing is known about it."""
    return data_config.get("form") in ("messages", "sharegpt") or data_config.get("layout") == "chat"


def find_end_of_turn(tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token behind an assistant's words in the chat template, or None."""
    if tokenizer.core.chat_template is None:
        return None
    words = "danlu"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": words}]
    try:
        text = tokenizer.render([chat])[0]
    except jinja2.TemplateError:  # a template for other roles only
        return None
    behind = text[text.rfind(words) + len(words) :].lstrip()
    found = [number for token, number in tokenizer.special_tokens.items() if behind.startswith(token)]
    return found[0] if found else None


def fill_from_checkpoint(
    targets: Mapping[str, Tensor | Piece], saved: Checkpoint, group: dist.ProcessGroup | None = None
) -> None:
    """Fill ``targets`` (FQN -> parameter, or this rank's piece of it) with a checkpoint's weights, and nothing else.

    Args:
        targets: what this rank holds.
        saved: a committed checkpoint.
        group: ranks that together hold the model; None where this one does.
    """
    tensors = {f"model.{fqn}": held if isinstance(held, Piece) else held.detach() for fqn, held in targets.items()}
    with warnings.catch_warnings():
        # One process may read alone, and DCP warns about just that.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load_tensors(saved, tensors, unread=("optimizer.", "rng."), group=group)


def describe_checkpoint(
    name: str, saved: Checkpoint, *, dtype: torch.dtype = torch.float32, model: Decoder | None = None
) -> TrainedModel:
    """Return what a checkpoint holds.

    Args:
        name: what the user called it.
        saved: a committed checkpoint.
        dtype: of parameters and computation.
        model: with the checkpoint's weights; None describes one on meta, without them.
    """
    spec = spec_from_record(saved.record["identity"]["model"], str(saved.folder))
    if model is None:
        with torch.device("meta"):
            model = Decoder(spec, compute_dtype=dtype).to(dtype)
    inside_run = saved.folder.resolve().parent
    run = inside_run.parent if inside_run.name == "checkpoints" else None
    data = Path(saved.record["config"]["data"]["train"][0])
    places = [data / "tokenizer", data] if run is None else [run / "tokenizer", data / "tokenizer", data]
    tokenizer_folder = next((place for place in places if has_tokenizer(place)), None)
    data_config = saved.record["data_config"]
    return TrainedModel(model.eval(), name, saved.folder, run, saved.step, tokenizer_folder, data_config)


def _from_checkpoint(name: str, saved: Checkpoint, dtype: torch.dtype, device: torch.device) -> TrainedModel:
    described = describe_checkpoint(name, saved, dtype=dtype)
    described.model.to_empty(device=device)  # in its dtype already: fp32 first would take twice as much
    fill_from_checkpoint(dict(described.model.named_parameters()), saved)
    return described


def _generation_stops(folder: Path) -> list[int]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return []
    try:
        ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from None
    return ids if isinstance(ids, list) else [] if ids is None else [ids]
