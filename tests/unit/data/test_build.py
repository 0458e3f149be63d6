"""A build gives the same bytes however it runs, counts what it leaves out, resumes, and is done once."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild
from danlu.data.build import build
from danlu.data.dataset import PackedDataset
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer_train import train_tokenizer
from tiny import documents_of

Run = Callable[..., dict[str, Any]]


def lines(rows: list[Any]) -> str:
    """Return JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def texts(number: int) -> list[dict[str, str]]:
    """Return some bilingual records of different lengths."""
    return [{"text": f"{i} 我的卡还没有到。" + "how long " * (i % 7)} for i in range(number)]


def content(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a data set."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_text_comes_back(run_build: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Decoded documents are the texts, each with one EOS, in order; counts and bytes are right."""
    rows = texts(20)
    manifest = run_build({"a.jsonl": lines(rows)}, sequence_length=256, packing="documents")
    found = documents_of(tmp_path / "out")
    decoded = sorted(tokenizer.decode(ids[:-1]) for ids in found)
    assert decoded == sorted(row["text"] for row in rows)
    assert all(ids[-1] == tokenizer.eos_id for ids in found)
    assert manifest["num_samples"] == manifest["num_documents"] == 20
    assert manifest["target_tokens"] == sum(map(len, found)) - 20
    first = sum(int(tokenizer.token_bytes[ids[0]]) for ids in found)
    assert manifest["target_bytes"] == sum(len(row["text"].encode()) for row in rows) - first


def test_output_does_not_depend_on_workers(run_build: Run, tmp_path: Path) -> None:
    """One process and three write the same bytes, manifest included."""
    for output, workers in (("one", 1), ("three", 3)):
        run_build({"a.jsonl": lines(texts(300))}, output=output, num_workers=workers, bytes_per_shard=2000)
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert len(list((tmp_path / "one").glob("shard-*.tar"))) > 3


def test_finished_build_is_skipped_and_a_changed_one_redone(run_build: Run, tmp_path: Path) -> None:
    """The same inputs and options write nothing; another option or another input builds anew."""
    first = run_build({"a.jsonl": lines(texts(9))})
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir() if path.suffix == ".tar"}
    assert run_build({"a.jsonl": lines(texts(9))}) == first
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    assert run_build({"a.jsonl": lines(texts(9))}, num_workers=2) == first
    longer = run_build({"a.jsonl": lines(texts(9))}, sequence_length=32)
    assert longer["fingerprint"] != first["fingerprint"]
    assert run_build({"a.jsonl": lines(texts(10))})["num_samples"] == 10
    PackedDataset(tmp_path / "out").verify()


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped", "manifest"])
def test_a_damaged_build_is_built_again(run_build: Run, tmp_path: Path, damage: str) -> None:
    """What a run refuses with "build it again" is built again by the same command, not called unchanged."""
    first = run_build({"a.jsonl": '{"text": "some words"}\n' * 9})
    shard = tmp_path / "out" / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    if damage == "manifest":
        (tmp_path / "out" / "manifest.json").write_text('{"format_version": 1}')
    else:
        content[600] ^= 1
        shard.write_bytes(content[:1000] if damage == "cut" else content)
        shard.unlink() if damage == "gone" else None
    again = run_build({"a.jsonl": '{"text": "some words"}\n' * 9})
    assert again["fingerprint"] == first["fingerprint"]
    PackedDataset(tmp_path / "out").verify()


def test_a_rebuild_leaves_no_file_of_the_old_tokenizer(run_build: Run, tmp_path: Path, tokenizer_folder: Path) -> None:
    """A chat template of an earlier build would turn every later chat with the model into another language."""
    plain = tmp_path / "plain"
    train_tokenizer(["some words"], plain, vocab_size=280, chat=False)
    run_build({"a.jsonl": '{"prompt": "some", "completion": "words"}\n'}, tokenizer=str(tokenizer_folder))
    assert (tmp_path / "out" / "tokenizer" / "chat_template.jinja").exists()
    run_build({"a.jsonl": '{"prompt": "some", "completion": "words"}\n'}, tokenizer=str(plain))
    assert not (tmp_path / "out" / "tokenizer" / "chat_template.jinja").exists()
    train_tokenizer(["some words"], plain, vocab_size=280)
    train_tokenizer(["some words"], plain, vocab_size=280, chat=False)
    assert not (plain / "chat_template.jinja").exists()
    (plain / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds a model"):
        train_tokenizer(["some words"], plain, vocab_size=280)


def test_interrupted_build_resumes(run_build: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure in the third unit only the missing units are done, and the bytes are those of one run."""
    from danlu.data import build as module

    data = {"a.jsonl": lines(texts(300))}
    run_build(data, output="whole", bytes_per_shard=4000)
    real, done = module.build_unit, []

    def failing(job: Any, number: int, unit: Any) -> dict[str, Any]:
        if number == 2 and not resuming:
            raise KeyboardInterrupt
        done.append(number)
        return real(job, number, unit)

    monkeypatch.setattr(module, "build_unit", failing)
    resuming = False
    with pytest.raises(KeyboardInterrupt):
        run_build(data, bytes_per_shard=4000)
    with pytest.raises(UserError, match="not a data set"):
        PackedDataset(tmp_path / "out")
    resuming = True
    run_build(data, bytes_per_shard=4000)
    assert done == list(range(len(done)))
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def _build(options: dict[str, Any]) -> None:
    build(DataBuild(**options), progress=False)


def test_killed_build_resumes(run_build: Run, tokenizer_folder: Path, tmp_path: Path) -> None:
    """A build killed at some moment (SIGKILL) is completed by the next one, with the bytes of one run."""
    data = {"a.jsonl": lines(texts(3000))}
    run_build(data, output="whole", bytes_per_shard=1000)
    options = {
        "inputs": [str(tmp_path / "a.jsonl")], "output": str(tmp_path / "out"), "tokenizer": str(tokenizer_folder),
        "sequence_length": 64, "num_workers": 1, "bytes_per_shard": 1000,
    }  # fmt: skip
    process = multiprocessing.get_context("spawn").Process(target=_build, args=(options,))
    process.start()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("unit-*5.json")) and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert not (tmp_path / "out" / "manifest.json").exists()
    _build(options)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_killed_build_leaves_no_workers(tokenizer_folder: Path, tmp_path: Path) -> None:
    """SIGKILL to the process that builds (the kernel, for its memory): its workers end by themselves."""
    (tmp_path / "a.jsonl").write_text(lines(texts(3000)))
    options = {
        "inputs": [str(tmp_path / "a.jsonl")], "output": str(tmp_path / "out"), "tokenizer": str(tokenizer_folder),
        "sequence_length": 64, "num_workers": 2, "bytes_per_shard": 1000,
    }  # fmt: skip
    process = multiprocessing.get_context("spawn").Process(target=_build, args=(options,))
    process.start()
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out").glob("unit-*.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.kill()
    process.join()
    _, alive = psutil.wait_procs(workers, timeout=20)
    for worker in alive:
        worker.kill()
    assert not alive


def test_br_182_processes_that_build_the_same_do_not_race(
    run_build: Run, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Four processes building into the same empty folder all succeed, and there is one data set."""
    data = {"a.jsonl": lines(texts(200))}
    expected = run_build(data, output="whole", bytes_per_shard=1000)
    options = {
        "inputs": [str(tmp_path / "a.jsonl")], "output": str(tmp_path / "out"), "tokenizer": str(tokenizer_folder),
        "sequence_length": 64, "num_workers": 1, "bytes_per_shard": 1000,
    }  # fmt: skip
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_build, args=(options,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert PackedDataset(tmp_path / "out").fingerprint == expected["fingerprint"]
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_foreign_folder_is_left_alone(run_build: Run, tmp_path: Path) -> None:
    """A folder with other files is refused and keeps them."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds other files"):
        run_build({"a.jsonl": lines(texts(3))})
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


def test_malformed_line_is_fatal_or_counted(run_build: Run) -> None:
    """`fail` names file and line; `skip` leaves the row out, counts its reason and names it in the manifest."""
    data = {"a.jsonl": '{"text": "a b c"}\n{"text": \n{"text": "d e f"}\n'}
    with pytest.raises(UserError, match=r"a\.jsonl:2: malformed json[\s\S]*on_error"):
        run_build(data)
    manifest = run_build(data, on_error="skip")
    assert manifest["bad_rows"] == {"malformed json": 1}
    assert manifest["bad_examples"][0].endswith("a.jsonl:2: malformed json")
    assert (manifest["rows_read"], manifest["num_samples"]) == (3, 2)


def test_worker_error_is_the_first_in_input_order(run_build: Run) -> None:
    """With several processes the error of the earliest bad line ends the build, as the same `UserError`."""
    rows = [lines([row]) for row in texts(200)]
    rows[40] = rows[150] = "broken\n"
    with pytest.raises(UserError, match=r"a\.jsonl:41: malformed json"):
        run_build({"a.jsonl": "".join(rows)}, num_workers=2, bytes_per_shard=1000)


def test_br_166_extra_fields_are_ignored_and_counted(run_build: Run) -> None:
    """Five rows, the third with an extra key, are five samples."""
    rows: list[dict[str, Any]] = texts(5)
    rows[2]["source"] = {"a": 1}
    manifest = run_build({"a.jsonl": lines(rows)})
    assert manifest["num_samples"] == 5
    assert manifest["ignored_fields"] == {"source": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_br_167_null_first_string_later(run_build: Run, name: str, tmp_path: Path) -> None:
    """2000 rows with a null field then one with text give the same samples as the reversed order."""
    rows = [{"instruction": f"i{n}", "input": None, "output": "o"} for n in range(2000)]
    rows.append({"instruction": "last", "input": "some text", "output": "o"})
    found = []
    for output, ordered in (("a", rows), ("b", rows[::-1])):
        text = lines(ordered) if name == "a.jsonl" else json.dumps(ordered)
        assert run_build({name: text}, output=output)["num_samples"] == 2001
        found.append(sorted(documents_of(tmp_path / output)))
    assert found[0] == found[1]


@pytest.mark.parametrize("text", ["", "\n \n\t\n", "{}\n", '{"text": ""}\n'])
def test_br_185_nothing_to_train_on_is_an_error(run_build: Run, text: str, tmp_path: Path) -> None:
    """Empty, blank and useless files end in an error that names them; no data set is left behind."""
    with pytest.raises(UserError, match="no samples"):
        run_build({"a.jsonl": text}, form="text", on_error="skip")
    with pytest.raises(UserError, match="not a data set"):
        PackedDataset(tmp_path / "out")


def test_br_185_empty_file_among_others_is_said(run_build: Run, caplog: pytest.LogCaptureFixture) -> None:
    """An empty tar and an empty jsonl among good inputs are warned about and change nothing."""
    manifest = run_build({"a.jsonl": lines(texts(3)), "b.tar": bytes(1024), "c.jsonl": ""})
    assert manifest["num_samples"] == 3
    assert "b.tar: holds no rows" in caplog.text
    assert "c.jsonl: holds no rows" in caplog.text


def test_br_185_bad_rows_name_their_line(run_build: Run) -> None:
    """An empty object, empty text and a row with only a prompt are named, or counted by reason."""
    data = {
        "a.jsonl": '{"prompt": "p", "completion": "c d e"}\n\n{}\n{"prompt": "p"}\n{"prompt": "p", "completion": ""}\n'
    }
    with pytest.raises(UserError, match=r"a\.jsonl:3: field 'prompt' is missing"):
        run_build(data)
    manifest = run_build(data, on_error="skip")
    assert manifest["bad_rows"] == {
        "field 'prompt' is missing": 1, "field 'completion' is missing": 1, "completion is empty": 1,
    }  # fmt: skip


def test_br_161_skip_mode_counts_undecodable_lines(run_build: Run) -> None:
    """One GB18030 line among UTF-8 lines is counted once."""
    good = lines(texts(2)).encode()
    manifest = run_build({"a.jsonl": good + '{"text": "二"}\n'.encode("gb18030")}, on_error="skip")
    assert manifest["bad_rows"] == {"bytes are not utf-8": 1}
    assert manifest["num_samples"] == 2


def test_br_031_no_label_in_any_sample(run_build: Run) -> None:
    """When truncation removes every label the build fails with the count; when it removes some they are counted."""
    long = {"prompt": "a b c d e f g h i j " * 4, "completion": "ok"}
    with pytest.raises(UserError, match=r"no sample has a target token \(2 of 2"):
        run_build({"a.jsonl": lines([long, long])}, sequence_length=16)
    manifest = run_build({"a.jsonl": lines([long, {"prompt": "a", "completion": "b"}])}, sequence_length=16)
    assert manifest["dropped"] == {"no target token": 1}
    assert manifest["num_documents"] == 1
    assert run_build({"a.jsonl": lines([long])}, sequence_length=16, overlong="truncate_left")["truncated"] == 1


def test_br_147_policies_reach_the_manifest(run_build: Run) -> None:
    """`drop` counts, `error` names file and line, `split` is for text."""
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a " * 30, "completion": "b " * 30}]
    assert run_build({"a.jsonl": lines(rows)}, sequence_length=16, overlong="drop")["dropped"] == {
        "longer than a row": 1
    }
    with pytest.raises(UserError, match=r"a\.jsonl:2: sample is longer than a row"):
        run_build({"a.jsonl": lines(rows)}, sequence_length=16, overlong="error")
    with pytest.raises(UserError, match="has no effect on form"):
        run_build({"a.jsonl": lines(rows)}, overlong="split")


def test_auto_choices_are_said_and_recorded(run_build: Run, caplog: pytest.LogCaptureFixture) -> None:
    """What `auto` became is in the log and in the manifest."""
    with caplog.at_level(logging.INFO, logger="danlu"):
        manifest = run_build({"a.jsonl": lines(texts(3))})
    assert "form = text" in caplog.text
    assert "packing = chunk" in caplog.text
    chosen = {name: manifest["config"][name] for name in ("form", "train_on", "packing", "overlong")}
    assert chosen == {"form": "text", "train_on": "all", "packing": "chunk", "overlong": "split"}


def test_chat_needs_a_template(run_build: Run, tmp_path: Path) -> None:
    """Messages with a tokenizer that has no chat template say how to give one; `chatml` is one."""
    from danlu.data.tokenizer_train import train_tokenizer

    train_tokenizer(["user assistant hello"], tmp_path / "plain", vocab_size=300, chat=False)
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}]
    data = {"a.jsonl": lines([{"messages": chat}])}
    with pytest.raises(UserError, match=r"no chat template[\s\S]*chatml"):
        run_build(data, tokenizer=str(tmp_path / "plain"))
    assert run_build(data, tokenizer=str(tmp_path / "plain"), chat_template="chatml")["num_samples"] == 1
    kept = Tokenizer.load(tmp_path / "out")
    assert "<|im_start|>" in kept.render([chat])[0]


def test_data_set_carries_its_tokenizer(run_build: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The folder can be moved: its tokenizer is inside and has the same hash."""
    manifest = run_build({"a.jsonl": lines(texts(3))})
    (tmp_path / "out").rename(tmp_path / "moved")
    assert Tokenizer.load(tmp_path / "moved").hash == tokenizer.hash == manifest["tokenizer_hash"]


def test_several_inputs_follow_each_other(run_build: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Files are read in the order given, whatever their formats."""
    run_build({"b.jsonl": '{"text": "first"}\n', "a.csv": "text\nsecond\n"}, packing="none")
    assert [tokenizer.decode(ids[:-1]) for ids in documents_of(tmp_path / "out")] == ["first", "second"]


def test_target_bytes_follow_truncation(run_build: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Bytes are those of the tokens that are left."""
    manifest = run_build({"a.jsonl": lines([{"text": "银行卡 " * 50}])}, packing="documents", overlong="truncate_right")
    ids = documents_of(tmp_path / "out")[0]
    assert len(ids) == 64
    assert manifest["target_bytes"] == int(np.sum(tokenizer.token_bytes[ids[1:]]))


@pytest.mark.real
def test_real_banking77_as_generation(run_build: Run, tokenizer: Tokenizer, tmp_path: Path, data_folder: Path) -> None:
    """The recipe's templates turn the real csv into prompts and completions whose targets are the intents."""
    manifest = run_build(
        [str(data_folder / "banking77" / "test.csv")],
        prompt_template="Query: {text}\nIntent:",
        completion_template=" {category}",
        sequence_length=512,
    )
    assert manifest["num_samples"] == 3080
    dataset = PackedDataset(tmp_path / "out")
    rows = dataset.rows([0])
    document = rows.document_ids_BS[0] == 0
    prompt = tokenizer.decode(rows.tokens_BS[0][document & ~rows.mask_BS[0]])
    completion = tokenizer.decode(rows.tokens_BS[0][document & rows.mask_BS[0]])
    assert prompt == "Query: How do I locate my card?\nIntent:"
    assert completion == " card_arrival<|im_end|>"


@pytest.mark.real
def test_real_chinese_poetry(run_build: Run, tokenizer: Tokenizer, tmp_path: Path, data_folder: Path) -> None:
    """A json array of poems with lists of lines becomes text."""
    run_build(
        [str(data_folder / "chinese_poetry" / "poet.tang.0.json")],
        text_template="{title}\n{author}\n{paragraphs}",
        packing="documents",
        sequence_length=2048,
    )
    texts = [tokenizer.decode(ids) for ids in documents_of(tmp_path / "out")]
    assert any("太宗皇帝\n秦川雄帝宅，函谷壯皇居。" in text for text in texts)
