"""HF folders in and out: names, ties, dtypes, shards, and what is refused."""

from __future__ import annotations

import errno
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from danlu.base.errors import RunError, UserError
from danlu.checkpoint.convert import export_hf, load_decoder, load_hf, load_hf_weights, save_hf
from danlu.checkpoint.hf_files import write_folder
from danlu.model.decoder import Decoder
from danlu.model.spec import ModelSpec, RopeScaling
from danlu.model.vocabulary import add_tokens, untie_head
from tiny_models import GPT, T0, T1, build, logits, random_tokens


def equal(a: Decoder, b: Decoder) -> bool:
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(name_a == name_b and torch.equal(x, y) for (name_a, x), (name_b, y) in pairs)


def edit_weights(folder: Path, **changes: Any) -> None:
    """Rewrite model.safetensors; None removes a tensor."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hf(build(T0), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("spec", [T0, T1, GPT], ids=["untied", "tied", "gpt"])
@pytest.mark.parametrize("limit", [1, 5000, 2**30])
def test_shards_and_their_index_hold_every_tensor_once(spec: ModelSpec, limit: int, tmp_path: Path) -> None:
    """Any shard size gives the same model back, here and in transformers; small limits give an index."""
    model = build(spec)
    save_hf(model, tmp_path / "out", max_shard_bytes=limit)
    assert equal(load_decoder(tmp_path / "out"), model)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / name).values()) for name in files]
    assert sum(sizes) == 4 * spec.num_parameters()
    if limit == 2**30:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(sizes)
        assert sorted(set(index["weight_map"].values())) == files
    tokens = random_tokens(1, 6)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
        assert (theirs - logits(model, tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_are_cast_on_the_way_out_and_in(dtype: torch.dtype, tmp_path: Path) -> None:
    """An export in half precision halves the file, says so in config.json, and loads into either dtype."""
    model = build(T0)
    save_hf(model, tmp_path / "out", dtype=dtype)
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {dtype}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    wide, narrow = load_decoder(tmp_path / "out"), load_decoder(tmp_path / "out", dtype=dtype)
    for original, a, b in zip(model.parameters(), wide.parameters(), narrow.parameters(), strict=True):
        assert (a.dtype, b.dtype) == (torch.float32, dtype)
        assert torch.equal(a, original.to(dtype).float())
        assert torch.equal(b, original.to(dtype))
    assert narrow(random_tokens(1, 4)).dtype == dtype


def test_loading_materialises_a_meta_model(folder: Path) -> None:
    """A model on meta gets memory, the wanted dtype and the values in one call."""
    with torch.device("meta"):
        model = Decoder(load_hf(folder))
    load_hf_weights(model, folder, dtype=torch.bfloat16)
    assert equal(model, build(T0).to(torch.bfloat16))


def test_br_234_missing_and_unexpected_tensors_are_listed_together(folder: Path) -> None:
    """Both lists, exact names, in one message; nothing is loaded halfway."""
    edit_weights(folder, **{"model.norm.weight": None, "model.layers.1.mlp.up_proj.weight": None,
                            "model.layers.7.mlp.up_proj.weight": torch.zeros(2)})  # fmt: skip
    with pytest.raises(UserError) as caught:
        load_decoder(folder)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in str(caught.value)
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in str(caught.value)


def test_br_244_an_export_with_missing_or_foreign_parameters_fails(tmp_path: Path) -> None:
    """Adapters, lost layers and wrong shapes stop the export before a folder exists."""
    parameters = dict(build(T0).named_parameters())
    adapter = {**parameters, "blocks.0.attention.query.lora_a": torch.zeros(1)}
    lost = {name: tensor for name, tensor in parameters.items() if name != "blocks.1.mlp.up.weight"}
    for broken, text in ((adapter, "unexpected: blocks.0.attention.query.lora_a"), (lost, "missing: blocks.1.mlp.up")):
        with pytest.raises(UserError, match=text):
            export_hf(T0, broken, tmp_path / "out")
    with pytest.raises(UserError, match="contradict"):
        export_hf(T0, {**parameters, "final_norm.weight": torch.zeros(3)}, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_known_buffers_are_passed_over_by_exact_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Old checkpoints carry rotary frequencies; they are named in the log and left out. Others are not."""
    edit_weights(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with caplog.at_level(logging.INFO, "danlu"):
        logging.getLogger("danlu").propagate = True
        assert equal(load_decoder(folder), build(T0))
    assert "inv_freq" in caplog.text
    edit_weights(folder, **{"model.layers.9.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.raises(UserError, match=r"unexpected: model\.layers\.9"):
        load_decoder(folder)


def test_bare_gpt2_checkpoints_load(tmp_path: Path) -> None:
    """The published GPT-2 files lack the `transformer.` prefix and carry causal masks."""
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=20, n_layer=1, n_head=2, n_positions=16,
                                        bos_token_id=0, eos_token_id=0))  # fmt: skip
    theirs.transformer.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["GPT2LMHeadModel"])
    edit_weights(tmp_path, **{"h.0.attn.bias": torch.ones(1, 1, 16, 16).tril()})
    tokens = random_tokens(1, 9)
    with torch.no_grad():
        assert (logits(load_decoder(tmp_path), tokens) - theirs.eval()(tokens).logits).abs().max() < 1e-5


def test_a_shape_that_contradicts_the_config_is_named(folder: Path) -> None:
    """BR-081: rows come from config.json; a file with other rows is an error with both shapes."""
    edit_config(folder, vocab_size=60)
    with pytest.raises(UserError, match=r"(?s)embed_tokens.weight: \(64, 32\).*\(60, 32\)"):
        load_decoder(folder)


def test_br_081_padding_rows_beyond_the_tokenizer_are_the_models(tmp_path: Path) -> None:
    """Tokenizer of 60 entries, checkpoint of 64 rows: the model has 64 and nobody sets anything."""
    save_hf(build(T0), tmp_path / "out")
    assert load_decoder(tmp_path / "out").embedding.weight.shape[0] == 64


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model.bin.index.json"])
def test_weights_only_pickles_load(name: str, folder: Path) -> None:
    """A .bin of plain tensors, single or with an index, is read without running code."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    if name.endswith("json"):
        (folder / "pytorch_model.bin").rename(folder / "a.bin")
        (folder / name).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.bin")}))
    assert equal(load_decoder(folder), build(T0))


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return (Path.touch, (self.marker,))


def test_br_245_a_pickle_with_code_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    """Nothing in it runs, and the message says which file."""
    marker = tmp_path / "marker"
    (folder / "model.safetensors").unlink()
    torch.save({"x": Bomb(marker)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin.*refusing"):
        load_decoder(folder)
    assert not marker.exists()


def test_damaged_folders_are_refused(folder: Path) -> None:
    """Ghost index keys, missing shards, paths outside, broken files: each is named."""
    index = folder / "model.safetensors.index.json"
    for weight_map, text in (
        ({"ghost": "model.safetensors"}, "ghost"),
        ({"x": "gone.safetensors"}, "gone.safetensors"),
        ({"x": "../model.safetensors"}, "outside"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=text):
            load_decoder(folder)
    index.unlink()
    (folder / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(UserError, match="not a safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="no weights"):
        load_decoder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="not a JSON file"):
        load_hf(folder)
    with pytest.raises(UserError, match="file not found"):
        load_hf(folder / "nowhere")


def test_br_117_the_tie_is_written_from_the_tensors(tmp_path: Path) -> None:
    """Tied, grown, untied, trained apart: logits survive the reload and the flag says what is true."""
    model, tokens = build(T1), random_tokens(1, 8)
    add_tokens(model, num_used=64, num_new=4, multiple=4)
    untie_head(model)
    save_hf(model, tmp_path / "equal")
    assert load_hf(tmp_path / "equal").tied_embeddings
    with torch.no_grad():
        model.head_weight_VD.add_(0.1 * torch.randn(68, 32, generator=torch.Generator().manual_seed(0)))
        before = logits(model, tokens)
        save_hf(model, tmp_path / "apart")
        again = load_decoder(tmp_path / "apart")
        assert (logits(again, tokens) - before).abs().max() < 1e-6
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "apart").eval()
        assert (theirs(tokens).logits - before).abs().max() < 1e-5
    assert not load_hf(tmp_path / "apart").tied_embeddings


def test_a_tied_config_with_another_head_is_an_error(tmp_path: Path) -> None:
    """Nobody's trained head is dropped because of a flag; an equal one is fine."""
    model = build(T1)
    save_hf(model, tmp_path / "out")
    edit_weights(tmp_path / "out", **{"lm_head.weight": model.embedding.weight.detach().clone()})
    assert equal(load_decoder(tmp_path / "out"), model)
    edit_weights(tmp_path / "out", **{"lm_head.weight": torch.zeros(64, 32)})
    with pytest.raises(UserError, match="tie_word_embeddings"):
        load_decoder(tmp_path / "out")


def test_br_240_slices_of_one_flat_buffer_export_contiguously(tmp_path: Path) -> None:
    """Parameters that are views of one storage become files of exactly their own size."""
    model = build(T0)
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    start, views = 0, {}
    for name, parameter in model.named_parameters():
        views[name] = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    export_hf(T0, views, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert sum(tensor.nbytes for tensor in tensors.values()) == 4 * T0.num_parameters()
    assert equal(load_decoder(tmp_path / "out"), model)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32),
        RopeScaling(kind="yarn", factor=4.0, original_max_positions=32, beta_fast=16.0),
    ],
    ids=["none", "llama3", "yarn"],
)
def test_br_235_rope_settings_survive_both_schemas(scaling: RopeScaling | None, tmp_path: Path) -> None:
    """The exported config.json says theta and scaling to old and new readers, and reloads with equal logits."""
    model = build(replace(T0, rope_theta=1e6, rope_scaling=scaling))
    save_hf(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    new = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    tokens = random_tokens(1, 20)
    for schema in (config, old, new):
        (tmp_path / "out" / "config.json").write_text(json.dumps(schema))
        assert load_hf(tmp_path / "out") == model.spec
        with torch.no_grad():
            theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(tokens).logits
            assert (theirs - logits(model, tokens)).abs().max() < 1e-5


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export that dies leaves nothing, an existing folder is kept unless told otherwise."""

    def die(part: Path) -> None:
        (part / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", die)
    assert not any(tmp_path.iterdir())
    save_hf(build(T0), tmp_path / "out")
    with pytest.raises(UserError, match="exists"):
        save_hf(build(T0, seed=1), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        write_folder(tmp_path / "out", die, overwrite=True)
    assert equal(load_decoder(tmp_path / "out"), build(T0))
    save_hf(build(T0, seed=1), tmp_path / "out", overwrite=True)
    assert equal(load_decoder(tmp_path / "out"), build(T0, seed=1))

    plain = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.suffix == ".part":
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(RunError, match="No space left on device"):  # after the old one has stepped aside
        save_hf(build(T0), tmp_path / "out", overwrite=True)
    assert equal(load_decoder(tmp_path / "out"), build(T0, seed=1))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
