"""Build a data set: files in, shards out, on all cores, at most once.

The reader cuts the inputs into units of about ``bytes_per_shard`` input bytes, by content alone. A worker turns one
unit into one shard: parse, tokenize, pack, write. So the bytes of a shard depend on the inputs and the config, never
on the number of workers, and a unit is also the step of resuming: its shard, its piece of the index and last its
counts appear by rename, and a unit whose counts are there is not done again. The index and then the manifest are
written when all units are; before that the folder is not a data set.

The key of a build is the hash of the inputs' content, the tokenizer and every option that matters. The same key over a
finished folder is nothing to do; over an unfinished one it resumes; another key starts over, in a folder that is
danlu's own. A lock file lets processes that start the same build together wait for the first instead of racing.
"""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import hashlib
import json
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from danlu.base import env
from danlu.base.errors import RunError, UserError
from danlu.base.folders import make_folder
from danlu.base.log import log
from danlu.config.data_build import DataBuild
from danlu.data import shards
from danlu.data.dataset import PackedDataset
from danlu.data.forms import detect_form, make_reader
from danlu.data.sources import Chunk, find_files, parse_chunk, read_chunks
from danlu.data.streams import BLOCK_BYTES, SourceFile
from danlu.data.tokenizer import Tokenizer
from danlu.data.unit import CORE, MAX_EXAMPLES, Job, Unit, build_unit, unit_name
from danlu.version import __version__

_FIRST_ROWS = 100
_STATE, _LOCK = "build.json", ".lock"


def build(config: DataBuild, *, progress: bool = True) -> dict[str, Any]:
    """Build the data set of ``config``, or find that it is there.

    Args:
        config: what to build.
        progress: show a progress bar on a terminal.

    Returns:
        The manifest.

    Raises:
        UserError: wrong input (naming file and line), no samples, samples without a single target, or a folder that
            holds something else.
    """
    files = find_files(config.inputs, config.format)
    tokenizer = Tokenizer.load(config.tokenizer, chat_template=config.chat_template)
    inputs = [_describe(file) for file in files]
    key = _key(config, tokenizer, inputs)
    folder = Path(config.output)
    _claim(folder)
    with filelock.FileLock(folder / _LOCK):
        if (built := _finished(folder, key)) is not None:
            log.info("%s: unchanged, nothing to build", folder)
            return built
        job = _prepare(config, key, files, tokenizer)
        results = _run(job, files, progress)
        return _finish(job, tokenizer, inputs, results)


def _finished(folder: Path, key: str) -> dict[str, Any] | None:
    """Return the manifest of a finished build of ``key``; None where there is none, or its files are not what it says.

    A damaged build is one to replace: the error that a training run gives for it advises to build it again.
    """
    if not (folder / shards.MANIFEST).is_file():
        return None
    try:
        manifest = shards.read_manifest(folder)
        if manifest.get("build_key") != key:
            return None
        PackedDataset(folder).verify()
    except UserError as error:
        log.warning("%s: what is there is damaged and is built anew\n%s", folder, error)
        (folder / shards.MANIFEST).unlink()
        return None
    return manifest


def _describe(file: SourceFile) -> dict[str, Any]:
    try:
        with Path(file.path).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=file.path) from None
    name, size = Path(file.path).name, Path(file.path).stat().st_size
    return {"name": name, "format": file.format, "compression": file.compression, "bytes": size, "sha256": digest}


def _key(config: DataBuild, tokenizer: Tokenizer, inputs: list[dict[str, Any]]) -> str:
    options = config.model_dump(mode="json", exclude={"inputs", "output", "tokenizer", "num_workers"})
    files = [[one["format"], one["sha256"]] for one in inputs]
    text = json.dumps([shards.FORMAT_VERSION, __version__, options, tokenizer.core_bytes().decode(), files])
    return hashlib.sha256(text.encode()).hexdigest()


def _own_files(folder: Path) -> list[Path]:
    names = ("shard-*.tar", "unit-*.npy", "unit-*.json", ".*.tmp", shards.INDEX, CORE, _STATE)
    return [path for pattern in names for path in folder.glob(pattern)]


def _claim(folder: Path) -> None:
    """Make the folder; refuse one that holds anything but an earlier build."""
    make_folder(folder)
    if not any((folder / name).exists() for name in (shards.MANIFEST, _STATE, _LOCK)) and any(folder.iterdir()):
        raise UserError("folder holds other files", where="output", seen=folder, legal="a new or empty folder")


def _prepare(config: DataBuild, key: str, files: list[SourceFile], tokenizer: Tokenizer) -> Job:
    """Clear away another build's files, decide the ``auto`` values, and write what workers and a resume need."""
    folder = Path(config.output)
    state = folder / _STATE
    if not state.is_file() or shards.read_json(state).get("key") != key:
        if (folder / shards.MANIFEST).is_file():
            log.warning("%s: inputs or options changed, building it anew", folder)
            (folder / shards.MANIFEST).unlink()
        for path in _own_files(folder):
            path.unlink(missing_ok=True)
    else:
        done = len(list(folder.glob("unit-*.json")))
        log.info("%s: resuming, %d shards are there", folder, done)
    shards.write_file(state, shards.json_bytes({"key": key}))
    shards.write_file(folder / CORE, tokenizer.core_bytes())
    first = _first_rows(files, config)
    resolved = _resolve(config, first, tokenizer)
    return Job(resolved, key, tuple(first))


def _first_rows(files: list[SourceFile], config: DataBuild) -> list[dict[str, Any]]:
    def rows() -> Iterator[dict[str, Any]]:
        for file in files:
            for chunk in read_chunks(file, encoding=config.encoding, text_unit=config.text_unit):
                if isinstance(chunk, Chunk):
                    for _, row in parse_chunk(chunk, config.encoding):
                        if isinstance(row, dict) and row:
                            yield row

    return list(islice(rows(), _FIRST_ROWS))


def _resolve(config: DataBuild, first: list[dict[str, Any]], tokenizer: Tokenizer) -> DataBuild:
    if not first:
        return config
    form = detect_form(first, config) if config.form == "auto" else config.form
    reader = make_reader(config, form, first, tokenizer.core.chat_template is not None)
    if reader.chat and tokenizer.core.chat_template is None:
        tokenizer.render([])  # raises: a chat needs a template
    text = form == "text"
    choices = {
        "form": form,
        "layout": ("chat" if reader.chat else "plain") if form in ("alpaca", "prompt_completion") else config.layout,
        "train_on": ("all" if text else "completion") if config.train_on == "auto" else config.train_on,
        "packing": ("chunk" if text else "documents") if config.packing == "auto" else config.packing,
        "overlong": ("split" if text else "truncate_right") if config.overlong == "auto" else config.overlong,
    }
    if choices["packing"] == "chunk" and config.overlong not in ("auto", "split"):
        raise UserError(
            'has no effect with packing = "chunk", which cuts the stream of tokens into rows',
            where="overlong",
            seen=config.overlong,
            legal="auto, split",
        )
    if config.chat_template and not reader.chat:
        raise UserError("has no effect: these rows are no chats", where="chat_template", seen=config.chat_template)
    decided = {name: value for name, value in choices.items() if "auto" == getattr(config, name) != value}
    if decided:
        log.info("decided from the first rows: %s", ", ".join(f"{k} = {v}" for k, v in decided.items()))
    return config.model_copy(update=choices)


def _units(job: Job, files: list[SourceFile]) -> Iterator[tuple[int, Unit]]:
    """Yield the numbered units; where one ends depends on the inputs alone."""
    number, unit, size = 0, Unit(), 0
    config, block = job.config, min(BLOCK_BYTES, job.config.bytes_per_shard)
    for file in files:
        empty = True
        for chunk in read_chunks(file, encoding=config.encoding, text_unit=config.text_unit, block_bytes=block):
            empty = False
            unit.append(chunk)
            size += chunk.num_bytes if isinstance(chunk, Chunk) else 0
            if size >= config.bytes_per_shard:
                yield number, unit
                number, unit, size = number + 1, Unit(), 0
        if empty:
            log.warning("%s: holds no rows", file.path)
    if unit:
        yield number, unit


def _run(job: Job, files: list[SourceFile], progress: bool) -> list[dict[str, Any]]:
    """Build all units that are not there; return the counts of all, in order."""
    workers = job.config.num_workers or (os.cpu_count() or 1)
    total = sum(Path(file.path).stat().st_size for file in files)
    results: dict[int, dict[str, Any]] = {}
    with _Bar(total, progress) as bar:
        todo = _todo(job, files, results)
        if workers == 1 or total <= job.config.bytes_per_shard:
            for number, unit in todo:
                results[number] = build_unit(job, number, unit)
                bar.update(results)
        else:
            _run_pool(job, todo, workers, results, bar)
    return [results[number] for number in sorted(results)]


def _todo(job: Job, files: list[SourceFile], results: dict[int, dict[str, Any]]) -> Iterator[tuple[int, Unit]]:
    for number, unit in _units(job, files):
        path = job.folder / unit_name(number, "json")
        if path.is_file():
            results[number] = shards.read_json(path)
        else:
            yield number, unit


def _run_pool(
    job: Job, todo: Iterator[tuple[int, Unit]], workers: int, results: dict[int, dict[str, Any]], bar: _Bar
) -> None:
    """Keep two units per worker in flight; the first error in input order ends the build."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker) as pool:
        waiting: list[tuple[int, concurrent.futures.Future[dict[str, Any]]]] = []
        try:
            while True:
                for number, unit in islice(todo, 2 * workers - len(waiting)):
                    waiting.append((number, pool.submit(build_unit, job, number, unit)))
                if not waiting:
                    return
                number, future = waiting.pop(0)
                results[number] = future.result()
                bar.update(results)
        except concurrent.futures.process.BrokenProcessPool:
            hint = "out of memory? lower num_workers or bytes_per_shard; the next start resumes"
            raise RunError("a worker process died", where=str(job.folder), hint=hint) from None
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _start_worker() -> None:
    env.set_default("TOKENIZERS_PARALLELISM", "false")  # one process per core already
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A build that is killed cannot tell its workers, and each keeps the queue open that the others wait at."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _finish(
    job: Job, tokenizer: Tokenizer, inputs: list[dict[str, Any]], results: list[dict[str, Any]]
) -> dict[str, Any]:
    """Write the index, the tokenizer and last the manifest; remove what only an unfinished build needs."""
    folder, config = job.folder, job.config
    counts: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for result in results:
        counts.update(result["counts"])
        bad.update(result["bad_rows"])
    listed = [result["shard"] for result in results if result["shard"]["num_rows"]]
    _check_any(job, counts, bad, sum(shard["num_rows"] for shard in listed))
    pieces: list[np.ndarray] = []
    for number in range(len(results)):
        piece = np.load(folder / unit_name(number, "npy"), allow_pickle=False)
        if len(piece):
            piece["shard"] = len(pieces)  # its place in the manifest: units without rows have no shard
            pieces.append(piece)
    sums = {name: sum(result[name] for result in results) for name in
            ("num_documents", "num_tokens", "target_tokens", "target_bytes")}  # fmt: skip
    num_rows = sum(len(piece) for piece in pieces)
    manifest = {
        "format_version": shards.FORMAT_VERSION,
        "danlu_version": __version__,
        "build_key": job.key,
        "fingerprint": shards.content_fingerprint(listed, tokenizer.hash, config.sequence_length),
        "tokenizer_hash": tokenizer.hash,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "sequence_length": config.sequence_length,
        "num_rows": num_rows,
        **sums,
        "padding_slots": num_rows * config.sequence_length - sums["num_tokens"],
        **_sorted_counts(counts),
        "bad_rows": dict(bad),
        "bad_examples": [text for result in results for text in result["bad_examples"]][:MAX_EXAMPLES],
        "inputs": inputs,
        "config": config.model_dump(mode="json", exclude={"output", "num_workers"}),
        "shards": listed,
    }
    tokenizer.save(folder / "tokenizer")
    shards.write_file(folder / shards.INDEX, shards.npy_bytes(np.concatenate(pieces)))
    shards.write_file(folder / shards.MANIFEST, shards.json_bytes(manifest))
    for path in [*folder.glob("unit-*"), *folder.glob(".*.tmp"), folder / CORE, folder / _STATE]:
        path.unlink(missing_ok=True)
    _report(folder, manifest)
    return manifest


def _sorted_counts(counts: Counter[str]) -> dict[str, Any]:
    """Split the flat counts of the units into the manifest's groups."""
    groups: dict[str, Any] = {"num_samples": counts["samples"], "rows_read": counts["rows read"]}
    for name in ("truncated", "split"):
        groups[name] = counts[name]
    for group, prefix in (("dropped", "dropped: "), ("ignored_fields", "ignored field: ")):
        groups[group] = {k.removeprefix(prefix): v for k, v in sorted(counts.items()) if k.startswith(prefix)}
    return groups


def _check_any(job: Job, counts: Counter[str], bad: Counter[str], num_rows: int) -> None:
    if num_rows:
        return
    for path in _own_files(job.folder):
        path.unlink(missing_ok=True)
    where = ", ".join(job.config.inputs)
    if without := counts["dropped: no target token"]:
        raise UserError(
            f"no sample has a target token ({without} of {counts['samples']} samples have none)",
            where=where,
            hint='prompts may fill the rows: raise sequence_length, or set overlong = "truncate_left"',
        )
    seen = dict(bad) or {k: v for k, v in counts.items() if k.startswith("dropped")} or "no rows"
    raise UserError("no samples", where=where, seen=seen)


def _report(folder: Path, manifest: dict[str, Any]) -> None:
    names = ("num_samples", "num_rows", "sequence_length", "num_tokens", "target_tokens")
    padding = 100 * manifest["padding_slots"] / (manifest["num_rows"] * manifest["sequence_length"])
    values = [manifest[name] for name in names]
    log.info("%s: %d samples in %d rows of %d, %d tokens (%d targets), %.1f %% padding", folder, *values, padding)
    for name, number in manifest["dropped"].items():
        log.warning("dropped %d samples: %s", number, name)
    for name, number in manifest["bad_rows"].items():
        log.warning("left out %d rows: %s", number, name)
    if manifest["truncated"]:
        log.warning("truncated %d samples to %d tokens", manifest["truncated"], manifest["sequence_length"])
    if manifest["ignored_fields"]:
        log.info("fields not used: %s", ", ".join(f"{k} ({v})" for k, v in manifest["ignored_fields"].items()))


class _Bar:
    """A progress bar over input bytes, on stderr, where that is a terminal."""

    def __init__(self, total: int, show: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        self.progress = Progress(
            TextColumn("building"), BarColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn(),
            console=console, disable=not (show and console.is_terminal),
        )  # fmt: skip
        self.task = self.progress.add_task("", total=total, tokens=0)

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def update(self, results: dict[int, dict[str, Any]]) -> None:
        """Show what the finished units add up to."""
        done = sum(result["input_bytes"] for result in results.values())
        tokens = sum(result["num_tokens"] for result in results.values())
        self.progress.update(self.task, completed=done, tokens=f"{tokens:,}")
