"""The run folder: whether it may be used, by whom, and from which checkpoint.

A run owns its folder. What is wrong with the folder's name is said before any work; that a second run is started into
it, by a lock that rank 0 holds until it ends. The checkpoint to continue from is chosen here as well.

The folder is written to before anything is trained: resolved config, machine and tokenizer, so that even a run that
dies at once can be understood, and one whose data is gone can be used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from danlu.base import env
from danlu.base.errors import UserError
from danlu.base.folders import check_folder, lock_folder, make_folder
from danlu.base.log import setup_log
from danlu.checkpoint.store import Checkpoint, find_checkpoints, open_checkpoint
from danlu.config.load import to_toml
from danlu.config.schema import Config
from danlu.data.tokenizer import copy_tokenizer
from danlu.train.environment import describe_environment


def check_run_folder(config: Config) -> Path:
    """Return the run folder.

    Raises:
        UserError: it has no name that a folder can have, something else is in its place, it cannot be written to, or it
            is (or holds) what the run reads.
    """
    folder = Path(config.train.output)
    check_folder(config.train.output, where="train.output")
    place = folder.resolve()
    if place == Path(place.anchor):
        raise UserError("not a folder of its own", where="train.output", seen=place, hint="choose a folder for the run")
    inputs = [*config.data.train, *config.eval.data]
    if (Path(config.model.name) / "config.json").is_file():
        inputs.append(config.model.name)
    for text in inputs:
        if Path(text).resolve().is_relative_to(place):
            raise UserError(
                "the run folder is, or holds, what the run reads",
                where="train.output",
                seen=f"{folder}, which holds {text}",
                hint='choose a folder for this run alone, such as train.output = "runs/first"',
            )
    return folder


@contextmanager
def claim_run_folder(folder: Path, config: Config, *, tokenizer: Path) -> Iterator[None]:
    """Make the run folder and hold it (on rank 0) until the end; the log goes there from now on.

    Raises:
        UserError: the folder cannot be made, or another run holds it.
    """
    if env.ranks().rank != 0:
        setup_log()
        yield
        return
    make_folder(folder / "checkpoints", where="train.output")
    hint = "wait until it ends, or choose another train.output"
    with lock_folder(folder, what="another run is writing into this folder", hint=hint):
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
        text = json.dumps(describe_environment(), indent=2)
        (folder / "environment.json").write_text(text, encoding="utf-8")
        copy_tokenizer(tokenizer, folder / "tokenizer")
        setup_log(folder / "log.txt")
        yield


def find_resume(folder: Path, resume: str) -> Checkpoint | None:
    """Return the checkpoint to continue from, or None for a new run.

    Raises:
        UserError: ``never`` in a folder that holds checkpoints, a path that holds none or an older one than the run
            folder does (its later steps would be taken for this run's), or a damaged record.
    """
    here = find_checkpoints(folder / "checkpoints")
    if resume == "auto":
        return check_record(open_checkpoint(here[-1])) if here else None
    if resume == "never":
        if here:
            raise UserError(
                "the run folder holds checkpoints already",
                where=str(folder),
                seen=here[-1].name,
                hint="choose another train.output, delete the folder, or continue with --resume auto",
            )
        return None
    path = Path(resume)
    below = find_checkpoints(path / "checkpoints") or find_checkpoints(path)
    checkpoint = check_record(open_checkpoint(below[-1] if below else path))
    if here and here[-1].resolve() != checkpoint.folder.resolve():
        raise UserError(
            "the run folder holds other checkpoints than the one to continue from",
            where=str(folder),
            seen=here[-1].name,
            hint="choose another train.output, or delete what is newer there and continue with --resume auto",
        )
    return checkpoint


def check_record(checkpoint: Checkpoint) -> Checkpoint:
    """Return ``checkpoint`` if its record holds what resuming needs."""
    record = checkpoint.record
    wrong = [
        name for name in ("samples_seen", "tokens_seen", "skipped", "world_size") if type(record.get(name)) is not int
    ]
    wrong += [] if isinstance(record.get("identity"), dict) else ["identity"]
    if wrong:
        raise UserError("not the record of a training run", where=str(checkpoint.folder), seen=f"no {', '.join(wrong)}")
    return checkpoint
