"""Where a model comes from: names, hubs and GGUF files."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from danlu.base.errors import UserError
from danlu.checkpoint.convert import load_decoder, load_hf, save_hf
from danlu.checkpoint.gguf import cached_gguf, convert_gguf
from danlu.checkpoint.hub import DOWNLOAD_PATTERNS, ModelSource, local_folder, resolve_model
from danlu.model.generate import generate
from tiny_models import T1, build, logits, random_tokens


def test_each_kind_of_name_is_told_apart(tmp_path: Path) -> None:
    """Presets, folders, GGUF files, hub ids and ModelScope ids, by rules and without the network."""
    save_hf(build(T1), tmp_path / "model")
    (tmp_path / "x.gguf").touch()
    assert resolve_model("qwen-7b") == ModelSource("preset", "qwen-7b")
    assert resolve_model(str(tmp_path / "model")).kind == "folder"
    assert resolve_model(str(tmp_path / "x.gguf")).kind == "gguf"
    assert resolve_model("Qwen/Qwen3-0.6B") == ModelSource("hub", "Qwen/Qwen3-0.6B")
    assert resolve_model("hf:gpt/gpt2") == ModelSource("hub", "gpt/gpt2")
    assert resolve_model("modelscope:Qwen/Qwen3-0.6B") == ModelSource("modelscope", "Qwen/Qwen3-0.6B")
    assert local_folder(str(tmp_path / "model")) == tmp_path / "model"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen2.5-0.5", r"did you mean the preset 'qwen2\.5-0\.5b'"),
        ("/nowhere/model", "presets: "),
        ("some/missing.gguf", "no such model"),
        ("modelscope:qwen", "modelscope:owner/name"),
        ("hf:../x", "hf:owner/name"),
    ],
)
def test_other_names_are_refused_with_the_nearest_preset(name: str, text: str) -> None:
    """A misspelt preset or a missing path says what would be legal."""
    with pytest.raises(UserError, match=text):
        resolve_model(name)


def test_a_folder_without_config_and_a_preset_hold_no_weights(tmp_path: Path) -> None:
    """Neither is mistaken for a model on disk."""
    with pytest.raises(UserError, match="holds no model"):
        resolve_model(str(tmp_path))
    with pytest.raises(UserError, match="no weights"):
        local_folder("qwen-7b")


def test_the_hub_is_asked_for_weights_and_text_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Downloads go through huggingface_hub with patterns that match no code and no pickle."""
    import fnmatch

    import huggingface_hub

    asked: dict[str, Any] = {}

    def fake(model_id: str, **options: Any) -> str:
        asked.update(options, id=model_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert local_folder("owner/name", revision="main") == tmp_path
    assert (asked["id"], asked["revision"]) == ("owner/name", "main")
    refused = ["modeling.py", "pytorch_model.bin", "model.pt", "x.pkl", "training_args.bin", "sub/tokenizer.py"]
    assert not any(fnmatch.fnmatch(name, pattern) for name in refused for pattern in asked["allow_patterns"])
    needed = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in DOWNLOAD_PATTERNS) for name in needed)

    def fail(model_id: str, **options: Any) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match="no route"):
        local_folder("owner/name")


def test_modelscope_is_an_extra_that_names_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package the hint says what to install; with it, it is called."""
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(UserError, match=r"danlu\[modelscope\]"):
        local_folder("modelscope:owner/name")
    module = ModuleType("modelscope")
    module.snapshot_download = lambda model_id, **options: str(tmp_path / model_id)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)
    assert local_folder("modelscope:owner/name") == tmp_path / "owner/name"


def write_gguf(path: Path, *, rope_scaling: bool = False) -> None:
    """The tiny tied Llama as llama.cpp would store it: its own names, q and k rows interleaved."""
    from gguf import GGUFWriter

    writer, spec = GGUFWriter(path, "llama"), T1
    writer.add_name("tiny")
    writer.add_context_length(spec.max_positions)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.mlp_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_vocab_size(spec.vocab_size)
    tokens = [chr(ord("!") + i) for i in range(62)] + ['"#', "<end>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 63 + [3])
    writer.add_token_merges([f"{tokens[1]} {tokens[2]}"])
    writer.add_eos_token_id(63)
    writer.add_chat_template("{{ messages[0].content }}<end>")
    names = {
        "attention_norm": "attn_norm", "attention.query": "attn_q", "attention.key": "attn_k",
        "attention.value": "attn_v", "attention.output": "attn_output", "mlp_norm": "ffn_norm", "mlp.gate": "ffn_gate",
        "mlp.up": "ffn_up", "mlp.down": "ffn_down",
    }  # fmt: skip
    for fqn, tensor in build(spec).state_dict().items():
        module = fqn.removesuffix(".weight")
        if module.startswith("blocks."):
            _, layer, inner = module.split(".", 2)
            name = f"blk.{layer}.{names[inner]}.weight"
            if inner in ("attention.query", "attention.key"):
                halves = tensor.view(-1, 2, spec.head_dim // 2, spec.hidden_size)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        else:
            name = {"embedding": "token_embd.weight", "final_norm": "output_norm.weight"}[module]
        writer.add_tensor(name, tensor.numpy())
    if rope_scaling:
        writer.add_tensor("rope_freqs.weight", torch.ones(4).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_becomes_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights (llama.cpp's row order undone), tokenizer, template and ids come along; the cache is keyed by content."""
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("DANLU_CACHE", str(tmp_path / "cache"))
    folder = local_folder(str(tmp_path / "tiny.gguf"))
    model, tokens = load_decoder(folder), random_tokens(1, 9)
    assert torch.equal(logits(model, tokens), logits(build(T1), tokens))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == 63
    assert tokenizer.chat_template.endswith("<end>")
    assert '"eos_token_id": 63' in (folder / "config.json").read_text()
    before = (folder / "config.json").stat().st_mtime_ns
    assert cached_gguf(tmp_path / "tiny.gguf") == folder
    assert (folder / "config.json").stat().st_mtime_ns == before
    with pytest.raises(UserError, match="exists"):
        convert_gguf(tmp_path / "tiny.gguf", folder)


def test_gguf_files_that_would_lose_something_are_refused(tmp_path: Path) -> None:
    """Context stretching kept in a tensor, and files that are no GGUF at all, are named."""
    write_gguf(tmp_path / "long.gguf", rope_scaling=True)
    with pytest.raises(UserError, match=r"rope_freqs\.weight"):
        convert_gguf(tmp_path / "long.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"no")
    with pytest.raises(UserError, match="not a GGUF file"):
        convert_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, dequantised from its 4-bit GGUF into an HF folder."""
    folder = Path(os.environ.get("DANLU_SMOLLM2") or Path.home() / ".cache/danlu/smollm2-135m")
    if not (folder / "config.json").is_file():
        pytest.skip(f"SmolLM2-135M is not in {folder} (set DANLU_SMOLLM2)")
    return folder


@pytest.mark.real
@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    """Real weights: logits within 1e-5 of their largest value, no farther from fp64 than transformers, same text."""
    ours = load_decoder(smollm2)
    theirs = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert load_hf(smollm2).num_parameters() == 134_515_008
    questions = ("What is the capital of France?", "Why is the sky blue? Answer in one sentence.")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in questions
    ]
    tokens = torch.tensor(prompts[:1])
    with torch.no_grad():
        a, b = logits(ours, tokens), theirs(tokens).logits
        exact = load_decoder(smollm2, dtype=torch.float64)
        truth = exact(tokens) @ exact.head_weight_VD.T
    assert (a - b).abs().max() < 1e-5 * b.abs().max()
    assert (a - truth).abs().max() < 2 * (b - truth).abs().max()
    expected = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=24, do_sample=False,
            eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
        expected.append([token for token in out[0, len(prompt) :].tolist() if token != 2])
    assert generate(ours, prompts, max_new_tokens=24, stop_ids=[2]) == expected
