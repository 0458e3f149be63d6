"""Exports: what transformers opens is what was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from danlu.base.errors import RunError, UserError
from danlu.train.export import check_export, export
from danlu.train.load import TrainedModel, load_model


def logits_of(opened: TrainedModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return opened.model(tokens_BS) @ opened.model.head_weight_VD.T


@pytest.fixture(scope="session")
def gpt2_run(make_run: Callable[..., Path]) -> Path:
    """A GPT-2 style run of two steps."""
    return make_run(2, {"name": "tiny-gpt2", "num_layers": 2, "max_positions": 96, "vocab_size": 300})


@pytest.mark.parametrize("run", ["learned_run", "gpt2_run"])
def test_transformers_computes_the_same_logits(run: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Tied Llama and GPT-2 exports load in transformers with equal logits and tokens; danlu reads them back as well."""
    folder: Path = request.getfixturevalue(run)
    result = export(folder, tmp_path / "hf")
    opened = load_model(folder, device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "问：蓝卡的年费是多少？ What is the fee?"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == opened.tokenizer.encode(text)
    tokens_BS = torch.tensor([ids])
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens_BS).logits
    torch.testing.assert_close(logits_of(opened, tokens_BS), expected, atol=1e-5, rtol=1e-5)
    again = load_model(tmp_path / "hf", device="cpu")
    assert torch.equal(logits_of(again, tokens_BS), logits_of(opened, tokens_BS))
    assert result["logits_difference"] < 1e-4
    assert result["parameters"] == opened.spec.num_parameters()
    assert result["bytes"] >= 4 * result["parameters"]


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_dtype_of_the_written_weights(learned_run: Path, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every tensor has the wanted dtype and the rounded value, and the config says so."""
    export(learned_run, tmp_path / "hf", dtype=name, verify=False)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {dtype}
    trained = load_model(learned_run, device="cpu").model
    assert torch.equal(tensors["model.embed_tokens.weight"], trained.embedding.weight.to(dtype))
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == str(dtype).removeprefix("torch.")


def test_br_158_eos_of_chats_is_the_end_of_turn(learned_chat_run: Path, tmp_path: Path) -> None:
    """Config, generation config and tokenizer of an export name the token at which the model was taught to stop."""
    export(learned_chat_run, tmp_path / "hf", verify=False)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    files = [json.loads((tmp_path / "hf" / name).read_text()) for name in ("config.json", "generation_config.json")]
    assert [file["eos_token_id"] for file in files] == [end, end]
    assert tokenizer.eos_token_id == end
    assert tokenizer.chat_template


def test_br_241_a_run_from_scratch_exports_its_tokenizer(learned_run: Path, tmp_path: Path) -> None:
    """Config, generation config and tokenizer files are there although no HF model was the source."""
    files = export(learned_run, tmp_path / "hf", verify=False)["files"]
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert expected <= set(files)


def test_the_tokenizer_of_the_run_outlives_the_data(
    make_run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run whose data set is gone still knows its tokenizer and prompts; without one, export says so."""
    run = make_run(1)
    (run.parent / "data").rename(tmp_path / "moved")
    assert load_model(run, device="cpu").tokenizer.eos_id is not None
    (run / "tokenizer").rename(tmp_path / "tokenizer")
    files = export(run, tmp_path / "hf", verify=False)["files"]
    assert "tokenizer.json" not in files
    with pytest.raises(UserError, match="this model has no tokenizer"):
        _ = load_model(run, device="cpu").tokenizer


def test_a_checkpoint_is_chosen_by_step(make_run: Callable[..., Path], tmp_path: Path) -> None:
    """The newest is taken unless a step or a checkpoint folder is named; an unknown step lists those there are."""
    run = make_run(2)
    assert export(run, tmp_path / "a", verify=False)["step"] == 2
    assert export(run, tmp_path / "b", checkpoint=2, verify=False)["step"] == 2
    assert export(run / "checkpoints" / "step-00000002", tmp_path / "c", verify=False)["step"] == 2
    with pytest.raises(UserError, match=r"no checkpoint of this step\n  seen:  7\n  legal: 2"):
        export(run, tmp_path / "d", checkpoint=7)
    with pytest.raises(UserError, match="only a run folder has checkpoints to choose from"):
        export(tmp_path / "a", tmp_path / "d", checkpoint=2)


def test_a_full_folder_is_left_alone(learned_run: Path, tmp_path: Path) -> None:
    """Nothing is replaced without being told to, and then it is replaced as a whole."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine.txt").write_text("precious")
    from danlu.cli import export as command

    with pytest.raises(UserError, match=r"(?s)not empty.*hint:.*or overwrite=True$"):
        export(learned_run, tmp_path / "hf")
    with pytest.raises(UserError, match=r"(?s)not empty.*hint:.*or --overwrite$"):
        command.command(str(learned_run), tmp_path / "hf")
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["mine.txt"]
    export(learned_run, tmp_path / "hf", overwrite=True, verify=False)
    assert not (tmp_path / "hf" / "mine.txt").exists()


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("limit", [4_000, 100_000], ids=["no room for json", "no room for weights"])
def test_a_full_disk_leaves_what_was_there(learned_run: Path, tmp_path: Path, limit: int) -> None:
    """No file may grow beyond a limit, as on a full disk: exit 1, the reason in words, the old export bit for bit."""
    export(learned_run, tmp_path / "hf", verify=False)
    before = all_files(tmp_path)
    lines = (
        "import resource, signal, sys",
        "from danlu.cli import main",
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)",
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))",
        "main()",
    )
    for output, more in (("hf", ["--overwrite"]), ("other", [])):
        words = ["export", str(learned_run), str(tmp_path / output), "--no-verify", *more]
        done = subprocess.run([sys.executable, "-c", "\n".join(lines), *words], capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        assert f"error: {tmp_path / output}: the folder could not be written" in done.stderr
        assert "File too large" in done.stderr
        assert "hint:" in done.stderr
        assert all_files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_an_export_that_fails_its_check_never_appears(
    learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other logits in transformers: the old folder stays, and without one there is none."""
    export(learned_run, tmp_path / "hf", verify=False)
    before = all_files(tmp_path)

    def differs(folder: Path, model: Any, *, where: Path) -> float:
        raise RunError("transformers computes other logits", where=str(where))

    monkeypatch.setattr("danlu.train.export.verify_export", differs)
    for output in ("hf", "other"):
        with pytest.raises(RunError, match=rf"^{tmp_path / output}: transformers computes other logits"):
            export(learned_run, tmp_path / output, overwrite=True)
        assert all_files(tmp_path) == before


def test_models_that_are_not_there(learned_run: Path, tmp_path: Path) -> None:
    """A run without checkpoints, an unfinished checkpoint, a preset and an unknown name each get their own words."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "step-00000001.partial").mkdir()
    for name, words in [
        (tmp_path / "run", "no complete checkpoint yet"),
        (tmp_path / "step-00000001.partial", "never completed"),
        ("gpt2-medium", "a preset is only a shape"),
        (tmp_path / "nothing", "no such model"),
    ]:
        with pytest.raises(UserError, match=words):
            load_model(name)
    with pytest.raises(UserError, match="unknown dtype"):
        load_model(learned_run, dtype="fp8")


def test_weights_that_do_not_fit_the_dtype_are_refused(learned_run: Path, tmp_path: Path) -> None:
    """fp16 ends at 65504: a larger weight would silently become infinite; nothing is written."""
    export(learned_run, tmp_path / "hf", verify=False)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"too large for fp16\n  seen:  final_norm.weight: 100000"):
        export(tmp_path / "hf", tmp_path / "half", dtype="fp16")
    assert not (tmp_path / "half").exists()
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match="not finite"):
        export(tmp_path / "hf", tmp_path / "broken")


def test_br_234_a_missing_or_wrong_tensor_fails_the_check(learned_run: Path, tmp_path: Path) -> None:
    """What was written is read back: a lost, a surplus and a misshapen tensor are found by name."""
    export(learned_run, tmp_path / "hf", verify=False)
    file = tmp_path / "hf" / "model.safetensors"
    good = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    shorter: Any = {**good, name: good[name][:-1].clone()}
    for tensors in ({k: v for k, v in good.items() if k != name}, {**good, "more": good[name].clone()}, shorter):
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(RunError, match=rf"{name}|more"):
            check_export(tmp_path / "hf", torch.float32)
    save_file(good, file, metadata={"format": "pt"})
    check_export(tmp_path / "hf", torch.float32)
    with pytest.raises(RunError, match="is wrong"):
        check_export(tmp_path / "hf", torch.bfloat16)


def test_command_reports_size_and_check(learned_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """People get one line with folder, parameters, dtype, size and the difference to transformers; machines JSON."""
    from danlu.cli import export as command

    command.command(str(learned_run), tmp_path / "a")
    line = capsys.readouterr().out
    assert "57,072 parameters, fp32" in line
    assert "of transformers" in line
    command.command(str(learned_run), tmp_path / "b", verify=False, json=True)
    assert json.loads(capsys.readouterr().out)["logits_difference"] is None
