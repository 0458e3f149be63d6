"""The small files beside exported weights: token ids that agree, tokenizer files that travel."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig

from danlu.checkpoint.convert import save_hf
from danlu.checkpoint.hf_files import write_json
from danlu.checkpoint.sidecars import TOKENIZER_FILES, special_token_ids
from tiny_models import T0, build


def make_tokenizer(folder: Path, eos: str | dict[str, str]) -> None:
    """A tokenizer of 64 whole words w0 .. w63 whose end of sequence is ``eos``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "w3"}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", {"eos_token": eos})
    (folder / "chat_template.jinja").write_text("{{ messages }}")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("danlu"), "propagate", True)
    caplog.set_level(logging.WARNING, "danlu")
    return caplog


def export(source: Path | None, out: Path, eos_id: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    save_hf(build(T0), out, tokenizer_from=source, eos_id=eos_id)
    return tuple(json.loads((out / name).read_text()) for name in ("config.json", "generation_config.json"))  # type: ignore[return-value]


@pytest.mark.parametrize(("eos_id", "settled"), [(None, 62), (61, 61), (62, 62), (63, 63)])
def test_br_158_three_different_ends_of_sequence_are_listed_and_settled(
    eos_id: int | None, settled: int, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """Config 61, tokenizer 62, generation 61: the warning lists them and every exported file agrees."""
    source = tmp_path / "source"
    make_tokenizer(source, "w62")
    write_json(source / "config.json", {"eos_token_id": 61, "bos_token_id": 1})
    write_json(source / "generation_config.json", {"eos_token_id": 61, "temperature": 0.7})
    config, generation = export(source, tmp_path / "out", eos_id)
    assert all(part in warnings.text for part in ("config.json: 61", "generation_config.json: 61", "tokenizer: 62"))
    assert config["eos_token_id"] == generation["eos_token_id"] == settled
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == settled
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == settled
    assert (config["bos_token_id"], generation["temperature"]) == (1, 0.7)


def test_agreeing_ids_are_kept_with_further_stops(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    """A list that contains the tokenizer's end is agreement: it stays whole and nothing is warned of."""
    source = tmp_path / "source"
    make_tokenizer(source, {"content": "w62"})
    write_json(source / "config.json", {"eos_token_id": 62})
    write_json(source / "generation_config.json", {"eos_token_id": [62, 60]})
    config, generation = export(source, tmp_path / "out")
    assert (config["eos_token_id"], generation["eos_token_id"]) == (62, [62, 60])
    assert "differ" not in warnings.text


def test_br_241_a_model_from_scratch_exports_a_whole_folder(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    """Without an HF source, the trained tokenizer's folder gives tokenizer files and ids for both configs."""
    source = tmp_path / "source"
    make_tokenizer(source, "w62")
    config, generation = export(source, tmp_path / "out")
    present = {path.name for path in (tmp_path / "out").iterdir()}
    assert present == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                       "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"}  # fmt: skip
    assert (config["eos_token_id"], generation["eos_token_id"], config["pad_token_id"]) == (62, 62, 3)
    assert not warnings.records


def test_without_a_tokenizer_the_export_says_so(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    """No tokenizer given: a clear notice, and ids are null so that readers do not fall back to their own defaults."""
    config, generation = export(None, tmp_path / "out")
    assert "without tokenizer files" in warnings.text
    assert config["eos_token_id"] is None
    assert generation == {}


def test_only_listed_files_travel(tmp_path: Path) -> None:
    """Code and weights beside the tokenizer stay where they are."""
    source = tmp_path / "source"
    make_tokenizer(source, "w62")
    for name in ("tokenization_custom.py", "model-00001-of-00002.safetensors", "notes.txt"):
        (source / name).write_text("x")
    export(source, tmp_path / "out")
    written = {"config.json", "generation_config.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "out").iterdir()} <= {*TOKENIZER_FILES, *written}


def test_special_ids_are_found_in_every_kind_of_tokenizer_file(tmp_path: Path) -> None:
    """Ids come from tokenizer.json, added tokens or the older vocabulary files; unknown texts give none."""
    write_json(tmp_path / "tokenizer_config.json", {
        "eos_token": "a", "bos_token": "b", "pad_token": "nowhere", "added_tokens_decoder": {"9": {"content": "b"}},
    })  # fmt: skip
    write_json(tmp_path / "vocab.json", {"a": 4})
    assert special_token_ids(tmp_path) == {"eos_token_id": 4, "bos_token_id": 9}
    assert special_token_ids(tmp_path / "none") == {}
