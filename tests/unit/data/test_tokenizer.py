"""The tokenizer wrapper agrees with `transformers`, counts bytes, and what it trains opens there."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from danlu.base import env
from danlu.base.errors import UserError
from danlu.config.data_build import TokenizerTrain
from danlu.data import tokenizer as module
from danlu.data.tokenizer import Tokenizer
from danlu.data.tokenizer_train import build_tokenizer, train_tokenizer

MIXED = "Transfer 1024 元 to 张三。\n  tabs\tand 😀 emoji\u00a0and\u2028odd spaces  "


def test_trained_tokenizer_opens_in_transformers(tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
    """AutoTokenizer has EOS, PAD, BOS and the template, and gives the same ids."""
    reference = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (reference.eos_token, reference.pad_token, reference.bos_token) == (
        "<|im_end|>", "<|endoftext|>", "<|endoftext|>",
    )  # fmt: skip
    assert reference.eos_token_id == tokenizer.eos_id
    assert reference.chat_template == tokenizer.core.chat_template
    assert reference(MIXED)["input_ids"] == tokenizer.encode(MIXED)
    assert tokenizer.decode(tokenizer.encode(MIXED)) == MIXED
    assert tokenizer.vocab_size == len(reference)


def test_digits_stay_apart(tokenizer: Tokenizer) -> None:
    """A number has one token per digit."""
    assert len(tokenizer.encode("1024")) == 4


def test_whole_numbers_are_one_token_of_digits_only(tmp_path: Path) -> None:
    """On request a frequent number is one token, the same one after a space as after a Chinese character."""
    own = train_tokenizer(["fee 75 yuan", "费75元", "75"] * 50, tmp_path, vocab_size=300, whole_numbers=True)
    (number,) = own.encode("75")
    assert number in own.encode("fee 75 yuan")
    assert number in own.encode("费75元")


def test_bytes_of_tokens_are_bytes_of_text(tokenizer: Tokenizer) -> None:
    """The byte table sums to the text's UTF-8 length; special tokens count zero."""
    assert int(tokenizer.token_bytes[tokenizer.encode(MIXED)].sum()) == len(MIXED.encode())
    assert tokenizer.token_bytes[tokenizer.eos_id] == 0


def test_long_texts_are_cut_without_changing_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text beyond the batch size has the ids of the whole, also where runs of line breaks are tokens."""
    text = (MIXED + "\nnext line\n\nparagraph\r\n  indented\n我的卡\nlast.\n\n\nnew\nline") * 40
    own = train_tokenizer([text], tmp_path, vocab_size=400)
    assert "ĊĊ" in own.vocab
    whole = own.encode(text)
    for limit in (40, 400, 1000):
        monkeypatch.setattr(module, "_LONG_CHARS", limit)
        assert len(module._cut(text)) > 5
        assert own.encode(text) == whole


def test_a_long_text_is_encoded_a_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rust's encodings take hundreds of bytes a token: those of one document never exist all at once."""
    text = "a short line\n" * 400
    own = train_tokenizer([text], tmp_path, vocab_size=300)
    monkeypatch.setattr(module, "_LONG_CHARS", 400)
    monkeypatch.setattr(module, "_BATCH_CHARS", 1000)
    whole, sizes = own.backend, []

    class Spy:
        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            sizes.append(sum(map(len, texts)))
            return whole.encode_batch_fast(texts, **options)

    own.backend = Spy()
    own.encode(text)
    assert len(sizes) > 3
    assert max(sizes) <= 1000


@pytest.mark.real
def test_real_long_text_has_the_ids_of_transformers(data_folder: Path) -> None:
    """A million characters in one document get the ids that transformers gives (SmolLM2's tokenizer)."""
    folder = env.cache_folder() / "smollm2-135m"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("SmolLM2 is not in danlu's cache")
    text = (data_folder / "tinyshakespeare" / "input.txt").read_text()
    own = Tokenizer.load(folder)
    ids = own.encode(text)
    assert ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert int(own.token_bytes[ids].sum()) == len(text.encode())


def test_wrapper_pickles_and_rebuilds(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A pickled wrapper and one rebuilt from its core give the same ids."""
    (tmp_path / "core.json").write_bytes(tokenizer.core_bytes())
    for other in (pickle.loads(pickle.dumps(tokenizer)), Tokenizer.read_core(tmp_path / "core.json")):
        assert other.encode(MIXED) == tokenizer.encode(MIXED)
        assert other.hash == tokenizer.hash


def test_bos_is_used_only_where_the_tokenizer_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A post-processor that adds BOS makes `bos_id` known, and BOS is added once."""
    assert tokenizer.bos_id is None
    reference = AutoTokenizer.from_pretrained(tokenizer.folder)
    from tokenizers.processors import TemplateProcessing

    bos = reference.bos_token_id
    reference.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    reference.save_pretrained(tmp_path)
    own = Tokenizer.load(tmp_path)
    assert own.bos_id == bos
    assert own.encode("a", bos=True) == [bos, *tokenizer.encode("a")]
    assert own.encode("<|endoftext|>a", bos=True) == [bos, *tokenizer.encode("a")]


def test_training_reads_all_formats(tmp_path: Path) -> None:
    """`danlu data tokenizer` learns from the strings of any input, or from the chosen fields."""
    (tmp_path / "a.json").write_text(json.dumps([{"title": "春", "lines": ["春眠不觉晓"] * 50, "n": 3}]))
    result = build_tokenizer(
        TokenizerTrain(inputs=str(tmp_path / "a.json"), output=str(tmp_path / "t"), vocab_size=275, chat=False),
        progress=False,
    )
    assert result["characters_read"] == 1 + 50 * 5
    own = Tokenizer.load(tmp_path / "t")
    assert own.core.eos == "<|endoftext|>"
    assert len(own.encode("春眠不觉晓")) < 10


@pytest.mark.parametrize(("options", "text"), [({"vocab_size": 200}, "too small"), ({"fields": "x"}, "no text")])
def test_training_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, object], text: str) -> None:
    """A vocabulary below its fixed part and inputs without text are errors."""
    (tmp_path / "a.txt").write_text("some text")
    settings = {"inputs": str(tmp_path / "a.txt"), "output": str(tmp_path / "t")} | options
    with pytest.raises(UserError, match=text):
        build_tokenizer(TokenizerTrain(**settings), progress=False)


def test_folders_without_a_tokenizer_are_named(tmp_path: Path) -> None:
    """A missing folder and one without a tokenizer say so."""
    with pytest.raises(UserError, match="no such tokenizer folder"):
        Tokenizer.load(tmp_path / "x")
    with pytest.raises(UserError, match="no tokenizer could be opened"):
        Tokenizer.load(tmp_path)


def test_missing_eos_is_named(tmp_path: Path) -> None:
    """A tokenizer without EOS is refused when EOS is needed."""
    train_tokenizer(["a b"], tmp_path, vocab_size=300, chat=False)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": None}))
    with pytest.raises(UserError, match="no EOS"):
        _ = Tokenizer.load(tmp_path).eos_id
