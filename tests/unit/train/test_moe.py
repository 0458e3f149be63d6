"""A model with experts through the whole of training: it learns, resumes, is refused what it cannot do, and leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from danlu.base.errors import UserError
from danlu.config.rules import ROUTER_BALANCE
from danlu.config.stages import EvalOptions
from danlu.train.evaluation import evaluate
from danlu.train.export import export
from danlu.train.load import load_model
from danlu.train.loop import train
from tiny import MOE, last_tensors, read_metrics, tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> Path:
    """Twenty steps of a tiny model with experts."""
    folder = tmp_path_factory.mktemp("moe") / "run"
    words = ("train.steps=20", "train.micro_batch_size=4", "checkpoint.every_steps=10", "checkpoint.keep_last=9")
    train(tiny_config(tiny_rows, folder, *MOE, *words))
    return folder


def test_it_learns_and_says_what_the_loss_is_made_of(run: Path) -> None:
    """The loss falls; loss = loss_ce + 0.001 * loss_balance, and the balance lies between K and E."""
    records = read_metrics(run)
    assert records[-1]["loss_ce"] < 0.9 * records[0]["loss_ce"]
    for record in records:
        assert record["loss"] == pytest.approx(record["loss_ce"] + ROUTER_BALANCE * record["loss_balance"], rel=1e-6)
        assert 1.5 < record["loss_balance"] < 4


def test_a_large_coefficient_spreads_the_tokens(tmp_path: Path, run: Path, tiny_rows: Path) -> None:
    """The option has its effect: more of it, more evenly used experts; none of it, no such part."""
    words = ("train.steps=20", "train.micro_batch_size=4")
    train(tiny_config(tiny_rows, tmp_path / "much", *MOE, *words, "model.router_balance=1"))
    assert read_metrics(tmp_path / "much")[-1]["loss_balance"] < read_metrics(run)[-1]["loss_balance"]
    train(tiny_config(tiny_rows, tmp_path / "none", *MOE, "train.steps=1", "model.router_balance=0"))
    assert not {"loss_balance", "loss_ce"} & read_metrics(tmp_path / "none")[0].keys()


def test_accumulation_gives_the_same_run(tmp_path: Path, run: Path, tiny_rows: Path) -> None:
    """20 steps in passes of 1 row end in the weights of passes of 4 to 1e-5."""
    train(tiny_config(tiny_rows, tmp_path / "run", *MOE, "train.steps=20", "train.micro_batch_size=1"))
    ours, reference = last_tensors(tmp_path / "run"), last_tensors(run)
    for name, value in reference.items():
        assert (ours[name] - value).norm() <= 1e-5 * value.norm(), name


def test_resume_is_bit_equal(tmp_path: Path, run: Path, tiny_rows: Path) -> None:
    """From step 10 on another folder's run ends in the same weights."""
    words = ("train.steps=20", "train.micro_batch_size=4")
    half = run / "checkpoints" / "step-00000010"
    train(tiny_config(tiny_rows, tmp_path / "run", *MOE, *words), resume=str(half))
    ours, reference = last_tensors(tmp_path / "run"), last_tensors(run)
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []


def test_it_is_exported_and_read_back(tmp_path: Path, run: Path, tiny_rows: Path) -> None:
    """The run's logits are those of transformers on the export, and of danlu on the export; it generates."""
    opened = load_model(run, device="cpu")
    tokens_BS = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        expected = opened.model(tokens_BS) @ opened.model.head_weight_VD.T
    export(run, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens_BS).logits, expected, rtol=1e-5, atol=1e-5)
    again = load_model(tmp_path / "hf", device="cpu").model
    assert again.spec == opened.spec
    with torch.no_grad():
        assert torch.equal(again(tokens_BS) @ again.head_weight_VD.T, expected)
    options = EvalOptions(model=str(run), data=(str(tiny_rows),), device="cpu")
    assert evaluate(options)["held_out"]["loss"] > 0


@pytest.mark.parametrize(
    "word", ["router_balance=0.01", "router_balance=0", "num_experts=4", "expert_size=8", "experts_per_token=1"]
)
def test_a_dense_model_refuses_options_of_experts(tmp_path: Path, tiny_rows: Path, word: str) -> None:
    """No option without effect."""
    with pytest.raises(UserError, match=r"(?s)no experts.*tiny-moe") as caught:
        train(tiny_config(tiny_rows, tmp_path / "run", "train.steps=1", f"model.{word}"))
    assert f"model.{word.split('=')[0]}" in str(caught.value)


def test_sizes_that_cannot_be_exported_are_refused_before_training(tmp_path: Path, tiny_rows: Path) -> None:
    """Mixtral has no key for a width of experts; the run ends before it begins, not at its export."""
    words = (*MOE, 'model.name="mixtral-8x7b"', "train.steps=1")
    with pytest.raises(UserError, match="expert_size = 24"):
        train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert not (tmp_path / "run").exists()
