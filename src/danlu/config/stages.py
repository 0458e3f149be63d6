"""Options of the pipeline stages that have no config file of their own on the command line."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from danlu.config.schema import Paths, Section


class FinanceOptions(Section):
    """The generated bilingual finance question set."""

    seed: NonNegativeInt = 0
    """Seed of the fictional world and of every question."""
    train: PositiveInt = 24_000
    """Training questions with a passage; a multiple of 24."""
    validation: PositiveInt = 600
    """Validation questions; a multiple of 24."""
    test: PositiveInt = 1_200
    """Test questions; a multiple of 24."""
    documents: PositiveInt = 1_200
    """Documents about the products that are asked for without a passage."""


class EvalOptions(Section):
    """Held-out loss and exact match of generated answers."""

    model: str
    """Run folder, checkpoint folder, HF folder, GGUF file or hub id."""
    data: Paths = ()
    """Folders of packed rows, for the held-out loss."""
    questions: str | None = None
    """File of questions and answers."""
    prompt_template: str | None = None
    """Prompt made of a question file's fields, such as "Query: {text}\\nIntent:"."""
    completion_template: str | None = None
    """Answer made of a question file's fields, such as " {category}"."""
    layout: Literal["auto", "chat", "plain"] = "auto"
    """Prompts as a chat or as plain text; `auto`: as the training data were, else plain unless the rows are chats."""
    system: str | None = None
    """System message for chats that have none; unset: that of the training data."""
    answer_marker: str | None = None
    """Compare only what follows the last such text (`####` of gsm8k, `=>`): what stands before it is working."""
    majority_from: str | None = None
    """Training file from which the majority baseline's answers are taken; unset: from the questions themselves."""
    limit: PositiveInt | None = None
    """Ask only a seeded sample of so many questions."""
    batch_size: PositiveInt = 64
    """Answers generated at a time."""
    max_new_tokens: PositiveInt = 32
    """Longest answer in tokens."""
    max_rows: PositiveInt | None = None
    """Rows of each data set for the held-out loss; unset: all."""
    seed: NonNegativeInt = 0
    """Seed of the sample."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of weights and computation."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes CUDA where there is a device."""
    tp: PositiveInt = 1
    """Ranks that split every matrix, for a model that is too large for one; the others share the work."""
    pp: PositiveInt = 1
    """Ranks that hold consecutive layers, for a model that is too large for one."""


class ExportOptions(Section):
    """A Hugging Face folder."""

    model: str
    """Run folder, checkpoint folder, HF folder, GGUF file or hub id."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the written weights."""
    verify: bool = True
    """Open the folder with `transformers` and compare its logits with ours."""
