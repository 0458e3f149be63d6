"""The config of one data build as frozen data.

Used by `danlu data build`, by pipelines and from Python. ``auto`` values are decided from the first rows and the
tokenizer, said in the log and written into the manifest as what they became. Everything but ``output`` and
``num_workers`` can change the result, so everything but those two is part of the build's key.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from danlu.config.schema import Paths, Section

Form = Literal["text", "alpaca", "sharegpt", "messages", "prompt_completion"]


class DataBuild(Section):
    """From files to packed shards."""

    inputs: Paths
    """Files, folders (searched recursively) or glob patterns."""
    output: str
    """Folder of the data set; must be new, empty, or an earlier build."""
    tokenizer: str
    """Folder with `tokenizer.json`."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Slots of a row, in tokens."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text", "tar"] = "auto"
    """Format of the inputs; `auto` goes by each file's suffix (before .gz or .zst)."""
    encoding: Literal["utf-8", "gb18030"] = "utf-8"
    """Encoding of text files; a byte order mark is never part of the text."""
    text_unit: Literal["file", "paragraph", "line"] = "file"
    """What one document is in a plain text file: all of it, what lies between blank lines, or a line."""
    form: Literal["auto", "text", "alpaca", "sharegpt", "messages", "prompt_completion"] = "auto"
    """What the fields of a row mean; `auto` looks at the first rows."""
    text_field: str = "text"
    """Field with the document (form text)."""
    text_template: str | None = None
    """Document made of several fields, such as "{title}\\n{paragraphs}" (form text; lists join by line breaks)."""
    prompt_field: str | None = None
    """Field with the prompt (form prompt_completion); unset: prompt, question or query."""
    completion_field: str | None = None
    """Field with the completion (form prompt_completion); unset: completion, response, answer or output."""
    prompt_template: str | None = None
    """Prompt made of fields, such as "Query: {text}\\nIntent:" (form prompt_completion)."""
    completion_template: str | None = None
    """Completion made of fields, such as " {category}" (form prompt_completion)."""
    layout: Literal["auto", "chat", "plain"] = "auto"
    """Alpaca and prompt_completion rows as chat or as plain text; `auto`: alpaca as chat where there is a template."""
    chat_template: str | None = None
    """`chatml`, or a Jinja file; unset: the tokenizer's own."""
    system: str | None = None
    """System message for chats that have none."""
    train_on: Literal["auto", "all", "completion", "last", "flags"] = "auto"
    """Targets: every token, completions (assistant turns), the last turn, or turns flagged `train`/`weight`."""
    packing: Literal["auto", "documents", "chunk", "none"] = "auto"
    """Whole samples side by side, a cut stream (text only), or one sample a row; `auto`: chunk for text."""
    overlong: Literal["auto", "truncate_right", "truncate_left", "drop", "error", "split"] = "auto"
    """What to do with a sample longer than a row; `auto`: split for text, else truncate_right."""
    on_error: Literal["fail", "skip"] = "fail"
    """A malformed row ends the build, or is left out and counted."""
    bytes_per_shard: PositiveInt = 8 << 20
    """Input bytes (after decompression) that become one shard: the unit of parallel work and of resuming."""
    num_workers: Annotated[int, Field(ge=0)] = 0
    """Processes; 0: one per core. The result does not depend on it."""


class TokenizerTrain(Section):
    """From text to a tokenizer."""

    inputs: Paths
    """Files, folders (searched recursively) or glob patterns, as for `data build`."""
    output: str
    """Folder of the tokenizer."""
    vocab_size: PositiveInt = 8000
    """Entries, the 256 bytes and the special tokens included."""
    format: Literal["auto", "jsonl", "json", "csv", "tsv", "parquet", "text", "tar"] = "auto"
    """Format of the inputs; `auto` goes by each file's suffix."""
    encoding: Literal["utf-8", "gb18030"] = "utf-8"
    """Encoding of text files."""
    fields: Paths = ()
    """Fields to learn from; unset: all text of each row."""
    special_tokens: Paths = ()
    """Further special tokens."""
    digits: Literal["single", "whole"] = "single"
    """Each digit a token, or frequent numbers as one token."""
    chat: bool = True
    """Add the ChatML turn tokens and template; `<|im_end|>` is then EOS, else `<|endoftext|>`."""
