"""Text to ids and back, with the few facts about a tokenizer that training needs.

A tokenizer folder is opened once by `transformers` (which knows every folder layout and never runs code from it here);
what is kept is its Rust `tokenizers` backend and four strings. That core pickles and starts in build workers without
importing `transformers`, and its batch calls avoid the per-call cost of the wrapper.

Sequences begin with BOS only if the tokenizer itself would put it there, and end with exactly one EOS. The byte length
of each token is a table, so the text behind any set of target tokens can be counted (for bits per byte) however rows
were truncated or packed; special tokens count as zero bytes.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from danlu.base.errors import UserError
from danlu.base.folders import make_folder

CHATML = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The ChatML layout (OpenAI, 2023) as a Jinja template."""

_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "vocab.json", "merges.txt", "tokenizer.model", "vocab.txt",
)  # fmt: skip
_BATCH_CHARS = 1 << 19
_LONG_CHARS = 1 << 17

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Core:
    """All that a worker needs to rebuild a `Tokenizer`; plain text, so it crosses process borders."""

    backend: str
    eos: str | None
    bos: str | None
    pad: str | None
    chat_template: str | None


class Tokenizer:
    """A fast tokenizer.

    Attributes:
        core: the plain data it is made of.
        folder: where it was loaded from, if it was.
    """

    def __init__(self, core: Core, folder: Path | None = None) -> None:
        self.core, self.folder = core, folder
        self.backend = tokenizers.Tokenizer.from_str(core.backend)
        self.backend.no_padding()
        self.backend.no_truncation()

    @classmethod
    def load(cls, folder: str | Path, *, chat_template: str | None = None) -> Tokenizer:
        """Open a tokenizer folder (or a folder that has one in ``tokenizer/``, such as a data set).

        Args:
            folder: holds ``tokenizer.json`` or files that `transformers` converts to it.
            chat_template: ``chatml``, a Jinja file, or None for the tokenizer's own.

        Raises:
            UserError: no such folder, no tokenizer in it, or only a slow one.
        """
        path = Path(folder)
        if not path.is_dir():
            hint = "give a local folder; `danlu data tokenizer` trains one"
            raise UserError("no such tokenizer folder", where=str(folder), hint=hint)
        if not any((path / name).is_file() for name in _FILES) and (path / "tokenizer").is_dir():
            path = path / "tokenizer"
        from transformers import AutoTokenizer

        try:
            loaded = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
        except (OSError, ValueError, KeyError, ImportError, AttributeError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"no tokenizer could be opened: {first}", where=str(path)) from None
        if not loaded.is_fast:
            raise UserError(
                "only fast tokenizers are supported",
                where=str(path),
                seen=type(loaded).__name__,
                hint="convert it to tokenizer.json",
            )
        template = read_chat_template(chat_template) if chat_template else loaded.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        backend = loaded.backend_tokenizer.to_str()
        return cls(Core(backend, loaded.eos_token, loaded.bos_token, loaded.pad_token, template), path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.core, self.folder)

    @classmethod
    def read_core(cls, path: Path) -> Tokenizer:
        """Rebuild from the file that `write_core` wrote."""
        return cls(Core(**json.loads(path.read_bytes())))

    def core_bytes(self) -> bytes:
        """Return the core as JSON (for `read_core`)."""
        return json.dumps(asdict(self.core)).encode()

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token to id, added tokens included."""
        return self.backend.get_vocab(with_added_tokens=True)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return max(self.vocab.values()) + 1

    @cached_property
    def hash(self) -> str:
        """Hash of what ids mean: the vocabulary and the EOS token."""
        content = json.dumps([sorted(self.vocab.items()), self.core.eos], ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.vocab.get(token)

    @cached_property
    def eos_id(self) -> int:
        """Id of the end-of-sequence token.

        Raises:
            UserError: the tokenizer has none.
        """
        found = self._id(self.core.eos)
        if found is None:
            raise UserError("tokenizer has no EOS token", where=str(self.folder or ""), seen=self.core.eos)
        return found

    @cached_property
    def bos_id(self) -> int | None:
        """Id of the token that begins every sequence, or None where the tokenizer adds none."""
        bos, begun = self._id(self.core.bos), self.backend.encode("a").ids
        return bos if bos is not None and begun[:1] == [bos] else None

    @cached_property
    def pad_id(self) -> int:
        """Id for padding: PAD, else EOS; padding is never recognised by it."""
        found = self._id(self.core.pad)
        return self.eos_id if found is None else found

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """Special tokens and their ids."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        return tuple(self.special_tokens)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """Bytes of text that each id stands for, int64 [V]; special tokens stand for none."""
        added = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        byte_level = self.is_byte_level
        table = np.zeros(self.vocab_size, np.int64)
        for token, number in self.vocab.items():
            if token in self.special_tokens:
                continue
            if byte_level and token not in added:
                table[number] = len(token)  # the byte-level alphabet has one character per byte
            elif re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
                table[number] = 1
            else:
                table[number] = len(token.replace("▁", " ").encode("utf-8", "surrogatepass"))
        return table

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are written in the byte-level alphabet of GPT-2."""
        return "ByteLevel" in json.dumps(json.loads(self.core.backend)["decoder"])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, without BOS or EOS (special tokens written in the text are recognised)."""
        ids: list[list[int]] = []
        for batch in _batches(texts):
            if len(batch) == 1 and len(batch[0]) > _LONG_CHARS and self.is_byte_level:
                long: list[int] = []
                for pieces in _batches(_cut(batch[0])):  # an encoding takes some hundred bytes a token
                    for part in self.backend.encode_batch_fast(pieces, add_special_tokens=False):
                        long += part.ids
                ids.append(long)
            else:
                ids += [one.ids for one in self.backend.encode_batch_fast(batch, add_special_tokens=False)]
        return ids

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return ids and, for each id, the characters [start, end) of the text it stands for."""
        return [
            (one.ids, one.offsets)
            for batch in _batches(texts)
            for one in self.backend.encode_batch(batch, add_special_tokens=False)
        ]

    def encode(self, text: str, *, bos: bool = False, eos: bool = False) -> list[int]:
        """Return the ids of one text; BOS is added only where the tokenizer uses it, EOS only if not already there."""
        ids = self.encode_batch([text])[0]
        if bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if eos and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = False) -> str:
        """Return the text of some ids."""
        return self.backend.decode([int(number) for number in ids], skip_special_tokens=skip_special)

    def render(self, chats: Sequence[Sequence[Message]], *, generation_prompt: bool = False) -> list[str]:
        """Return chats as text by the chat template.

        Raises:
            UserError: there is no chat template.
            jinja2.TemplateError: the template refuses a chat.
        """
        if self.core.chat_template is None:
            raise UserError(
                "tokenizer has no chat template",
                where=str(self.folder or ""),
                hint='set chat_template = "chatml" or name a Jinja file',
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        specials = {"eos_token": self.core.eos, "bos_token": self.core.bos, "pad_token": self.core.pad}
        rendered, _ = render_jinja_template(
            [list(chat) for chat in chats],
            chat_template=self.core.chat_template,
            add_generation_prompt=generation_prompt,
            **{name: token for name, token in specials.items() if token is not None},
        )
        return list(rendered)

    @property
    def has_generation_prompt(self) -> bool:
        """Whether the chat template can end in the header of the assistant's turn."""
        return "add_generation_prompt" in (self.core.chat_template or "")

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files into ``folder`` (and the chat template that is in use)."""
        if self.folder is None:
            raise UserError("tokenizer was not loaded from a folder, so it cannot be copied")
        copy_tokenizer(self.folder, folder)
        if self.core.chat_template is not None:
            (folder / "chat_template.jinja").write_text(self.core.chat_template, encoding="utf-8")


def copy_tokenizer(source: Path, target: Path) -> None:
    """Make the tokenizer files in ``target`` those of ``source``: what is left of another tokenizer there goes."""
    make_folder(target)
    for name in _FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
        else:
            (target / name).unlink(missing_ok=True)


def read_chat_template(name: str) -> str:
    """Return the template ``chatml`` or the text of a Jinja file."""
    if name == "chatml":
        return CHATML
    try:
        return Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"chat template cannot be read: {error.strerror}",
            where="chat_template",
            seen=name,
            legal="chatml, or a Jinja file",
        ) from None


def _batches(texts: Sequence[str]) -> Iterable[list[str]]:
    """Group texts so that the Rust encodings of a group stay small in memory; a long text is a group of its own."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and (size + len(text) > _BATCH_CHARS or len(text) > _LONG_CHARS):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
        if len(text) > _LONG_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _cut(text: str) -> list[str]:
    """Cut a long text behind single line breaks between a visible character and a letter or digit.

    Byte-level pre-tokenizers split there anyway, so the ids are those of the whole; pieces encode in parallel. Behind
    several white characters it would not be so: at the end of a text they stay together, elsewhere the last one parts.
    """
    pieces, start = [], 0
    for found in re.finditer(r"(?<=\S)\n(?=\w)", text):
        if found.end() - start > _LONG_CHARS // 4:
            pieces.append(text[start : found.end()])
            start = found.end()
    return [*pieces, text[start:]]
