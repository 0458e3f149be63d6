"""Generation: batching, padding, stopping and sampling change speed, never the text."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from danlu.base.errors import RunError, UserError
from danlu.model.cache import KVCache
from danlu.model.decoder import Decoder
from danlu.model.generate import generate, stream
from danlu.model.spec import ModelSpec, RopeScaling
from tiny_models import GPT, T0, T1, build, logits, random_tokens

PROMPTS = [random_tokens(length, seed=length).tolist() for length in (5, 1, 9, 3, 7)]
SPECS = {
    "llama": T0,
    "tied": T1,
    "window": replace(T0, sliding_window=4),
    "gpt": GPT,
    "qk": replace(T0, family="qwen3", qk_norm=True, head_dim=12),
}


def naive(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without a cache: the whole text again for every token."""
    text = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(logits(model, torch.tensor([text]))[0, -1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("name", SPECS)
def test_batched_cached_decoding_equals_recomputing_everything(name: str) -> None:
    """Ragged prompts in one batch give what each gives alone without a cache."""
    model = build(SPECS[name])
    expected = [naive(model, prompt, 12) for prompt in PROMPTS]
    for batch_size in (1, 2, 16):
        assert generate(model, PROMPTS, max_new_tokens=12, batch_size=batch_size) == expected


def test_cached_logits_equal_uncached_ones() -> None:
    """A prefill, a chunk of several tokens and single steps reproduce the full forward's hidden states."""
    model, tokens = build(T0), random_tokens(2, 12)
    cache = KVCache(T0, batch_size=2, capacity=12, dtype=torch.float32)
    positions = torch.arange(12)[None]
    parts = []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 9), (9, 10), (10, 12)):
            parts.append(model(tokens[:, start:stop], positions_BS=positions[:, start:stop], cache=cache))
        whole = model(tokens)
        assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5 * whole.abs().max()
    with pytest.raises(RunError, match="12 \\+ 1"):
        model(tokens[:, :1], positions_BS=positions[:, :1], cache=cache)


def test_finished_rows_stop_and_the_others_go_on() -> None:
    """Each row ends at its own stop id, which is not returned; several ids may stop."""
    model = build(T0)
    free = generate(model, PROMPTS, max_new_tokens=12)
    stops = {free[0][3], free[2][6]}
    cut = [next((i for i, token in enumerate(row) if token in stops), len(row)) for row in free]
    assert generate(model, PROMPTS, max_new_tokens=12, stop_ids=stops) == [
        row[:end] for row, end in zip(free, cut, strict=True)
    ]
    assert len(set(cut)) > 1


def test_streaming_yields_the_same_tokens_one_by_one() -> None:
    """The chat's stream is generate for one prompt, greedy and sampled, and can be left early."""
    model = build(T0)
    assert list(stream(model, PROMPTS[0], max_new_tokens=8)) == generate(model, PROMPTS[:1], max_new_tokens=8)[0]
    options = {"max_new_tokens": 8, "temperature": 1.0, "seed": 3}
    assert list(stream(model, PROMPTS[0], **options)) == generate(model, PROMPTS[:1], **options)[0]  # type: ignore[arg-type]
    assert next(stream(model, PROMPTS[0], max_new_tokens=8)) == generate(model, PROMPTS[:1], max_new_tokens=1)[0][0]


def test_samples_do_not_depend_on_the_batch() -> None:
    """A row's generator is its own: any batch size gives the same samples; another seed gives others."""
    model = build(T0, spread=3.0)
    options = {"max_new_tokens": 10, "temperature": 1.0, "top_p": 0.9, "seed": 7}
    one = generate(model, PROMPTS, batch_size=1, **options)  # type: ignore[arg-type]
    assert generate(model, PROMPTS, batch_size=4, **options) == one  # type: ignore[arg-type]
    assert generate(model, PROMPTS, **{**options, "seed": 8}) != one  # type: ignore[arg-type]
    same_prompt = generate(model, [PROMPTS[0]] * 4, **options)  # type: ignore[arg-type]
    assert len({tuple(row) for row in same_prompt}) > 1


@pytest.mark.parametrize(("top_k", "top_p"), [(None, None), (3, None), (None, 0.6), (5, 0.7)])
def test_sampled_frequencies_follow_the_distribution(top_k: int | None, top_p: float | None) -> None:
    """4000 draws match softmax(logits / temperature), cut to the top-k and then to the nucleus."""
    model = build(T0, spread=2.0)
    prompt = PROMPTS[0]
    draws = generate(
        model, [prompt] * 4000, max_new_tokens=1, temperature=1.5, top_k=top_k, top_p=top_p, batch_size=4000
    )
    with torch.no_grad():
        scores = logits(model, torch.tensor([prompt]))[0, -1] / 1.5
    order = scores.argsort(descending=True)[:top_k]
    probability = scores[order].softmax(0)
    kept = int((probability.cumsum(0) - probability < (top_p or 2.0)).sum())
    probability = probability[:kept] / probability[:kept].sum()
    counts = Counter(row[0] for row in draws)
    assert set(counts) <= set(order[:kept].tolist())
    assert len(counts) > 1
    for token, expected in zip(order.tolist(), probability.tolist(), strict=False):
        assert abs(counts[token] / 4000 - expected) < 5 * (expected * (1 - expected) / 4000) ** 0.5 + 1e-9


def test_generation_leaves_the_model_as_it_was() -> None:
    """Training mode returns, dropout is off while generating, and no gradient is recorded."""
    model = Decoder(T0, dropout=0.5)
    model.load_state_dict(build(T0).state_dict())
    model.train()
    assert generate(model, PROMPTS, max_new_tokens=6) == generate(build(T0), PROMPTS, max_new_tokens=6)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_dynamic_scaling_generates_without_documents() -> None:
    """A model with dynamic scaling decodes beyond its trained length in a batch without failing."""
    spec: ModelSpec = replace(T0, max_positions=8, rope_scaling=RopeScaling(kind="dynamic", factor=2.0))
    assert [len(row) for row in generate(build(spec), PROMPTS, max_new_tokens=12)] == [12] * len(PROMPTS)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompts": [[]]}, "prompt 0"),
        ({"prompts": [[1], [64]]}, "prompt 1: 64"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p = 0.0"),
        ({"temperature": 1.0, "top_k": 0}, "top_k = 0"),
        ({"top_k": 5}, "need sampling"),
        ({"batch_size": 0}, "batch_size = 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, object], text: str) -> None:
    """Every wrong argument is named with the value seen; none is ignored."""
    options = {"prompts": PROMPTS, "max_new_tokens": 4, **changes}
    with pytest.raises(UserError, match=text):
        generate(build(T0), **options)  # type: ignore[arg-type]


def test_learned_positions_bound_the_text() -> None:
    """Prompt and continuation must fit the position table; the last token needs no position."""
    model = build(GPT)
    assert len(generate(model, [[1] * 60], max_new_tokens=5)[0]) == 5
    with pytest.raises(UserError, match="<= 65 together"):
        generate(model, [[1] * 60], max_new_tokens=6)
