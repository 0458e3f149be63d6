"""Text out of a model: batched generation over a KV cache, greedy or sampled.

Prompts are sorted by length so that a batch pads little, run once in parallel (the prefill), then extended one token a
step. A row that is finished leaves the batch, so late steps pay only for the rows that still talk.

Invariant: what a prompt yields does not depend on its neighbours. Padding is on the right and invisible (see `cache`),
and a sampled row draws from a generator of its own, seeded by (seed, index of the prompt); so the batch size and the
order of work change nothing but speed. (Floating-point sums may differ in the last bit between batch shapes, which
matters only where two tokens tie.)

Sampling: logits / temperature, cut to the ``top_k`` largest, then to the smallest set whose probability reaches
``top_p`` (nucleus sampling, arXiv:1904.09751), renormalised, drawn by inverting the cumulative sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from danlu.base.errors import UserError
from danlu.model.cache import KVCache
from danlu.model.decoder import Decoder

Pick = Callable[[Tensor, list[int]], Tensor]


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    batch_size: int = 16,
) -> list[list[int]]:
    """Return the continuation of every prompt, without the prompt and without the stop token.

    Args:
        model: the decoder; put into eval mode for the call.
        prompts: token ids, at least one each.
        max_new_tokens: longest continuation.
        stop_ids: ids that end a continuation.
        temperature: 0 takes the likeliest token; above 0 samples.
        top_k: sample among this many likeliest tokens.
        top_p: sample among the likeliest tokens that together reach this probability.
        seed: with the prompt's index it determines the samples.
        batch_size: prompts that run together.

    Raises:
        UserError: an empty prompt, an id outside the vocabulary, too long for the model, or settings out of range.
    """
    if batch_size < 1:
        raise UserError("a batch holds at least one prompt", seen=f"batch_size = {batch_size}", legal=">= 1")
    _check_prompts(model, prompts, max_new_tokens)
    continuations: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        pick = _build_pick(temperature, top_k, top_p, seed, batch)
        for step in _decode(model, [prompts[index] for index in batch], pick, set(stop_ids), max_new_tokens):
            for row, token in step:
                continuations[batch[row]].append(token)
    return continuations


def stream(
    model: Decoder,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int] = (),
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[int]:
    """Yield the continuation of one prompt token by token; the arguments and the result are those of `generate`."""
    _check_prompts(model, [prompt], max_new_tokens)
    pick = _build_pick(temperature, top_k, top_p, seed, [0])
    for step in _decode(model, [prompt], pick, set(stop_ids), max_new_tokens):
        for _, token in step:
            yield token


def _decode(
    model: Decoder, prompts: list[Sequence[int]], pick: Pick, stop_ids: set[int], max_new_tokens: int
) -> Iterator[list[tuple[int, int]]]:
    """Yield for each step the (row, token) pairs of the rows that got one."""
    device = next(model.parameters()).device
    longest = max(len(prompt) for prompt in prompts)
    cache = model.new_cache(len(prompts), longest + max_new_tokens)
    tokens = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens_BS = torch.tensor(tokens, device=device)
    positions_BS = torch.arange(longest, device=device).unsqueeze(0)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    last_B, rows = lengths_B - 1, list(range(len(prompts)))
    for _ in range(max_new_tokens):
        next_B = _step(model, tokens_BS, positions_BS, last_B, cache, pick, rows)
        chosen = next_B.tolist()
        yield [(row, token) for row, token in zip(rows, chosen, strict=True) if token not in stop_ids]
        alive = [index for index, token in enumerate(chosen) if token not in stop_ids]
        if not alive:
            return
        if len(alive) < len(rows):
            keep = torch.tensor(alive, device=device)
            cache.keep_rows(keep)
            rows = [rows[index] for index in alive]
            next_B, lengths_B = next_B[keep], lengths_B[keep]
        tokens_BS, positions_BS = next_B.unsqueeze(1), lengths_B.unsqueeze(1)
        last_B, lengths_B = torch.zeros_like(lengths_B), lengths_B + 1


@torch.no_grad()
def _step(
    model: Decoder, tokens_BS: Tensor, positions_BS: Tensor, last_B: Tensor, cache: KVCache, pick: Pick, rows: list[int]
) -> Tensor:
    """Run one chunk in eval mode and return the next token of each row, [B]."""
    was_training = model.training
    model.eval()
    try:
        logits_BV = model.next_logits(tokens_BS, positions_BS, last_B, cache)
    finally:
        model.train(was_training)
    return pick(logits_BV, rows)


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise `UserError` unless the settings are legal together; costs nothing, so ask before loading a model."""
    if temperature < 0 or (top_k is not None and top_k < 1) or (top_p is not None and not 0 < top_p <= 1):
        raise UserError(
            "sampling settings out of range",
            seen=f"temperature = {temperature}, top_k = {top_k}, top_p = {top_p}",
            legal="temperature >= 0, top_k >= 1, 0 < top_p <= 1",
        )
    if temperature == 0 and (top_k is not None or top_p is not None):
        seen = f"temperature = 0, top_k = {top_k}, top_p = {top_p}"
        raise UserError("top_k and top_p need sampling", seen=seen, hint="set temperature above 0 or leave them out")


def _build_pick(temperature: float, top_k: int | None, top_p: float | None, seed: int, indices: list[int]) -> Pick:
    """Return the function that turns logits [B, V] of some rows into token ids [B]."""
    check_sampling(temperature, top_k, top_p)
    if temperature == 0:
        return lambda logits_BV, rows: logits_BV.argmax(-1)
    generators = [torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63) for index in indices]

    def sample(logits_BV: Tensor, rows: list[int]) -> Tensor:
        sorted_BV, ids_BV = logits_BV.div(temperature).sort(dim=-1, descending=True)
        if top_k is not None:
            sorted_BV = sorted_BV[:, :top_k]
        probability_BV = sorted_BV.double().softmax(-1)
        if top_p is not None:
            before_BV = probability_BV.cumsum(-1) - probability_BV
            probability_BV = probability_BV.masked_fill(before_BV >= top_p, 0.0)
        cumulative_BV = probability_BV.cumsum(-1)
        draws = torch.cat([torch.rand(1, dtype=torch.float64, generator=generators[row]) for row in rows])
        target_B1 = draws.to(cumulative_BV.device).unsqueeze(1) * cumulative_BV[:, -1:]
        choice_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
        return ids_BV.gather(1, choice_B1.clamp_(max=cumulative_BV.shape[1] - 1)).squeeze(1)

    return sample


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise UserError("nothing to generate", seen=f"max_new_tokens = {max_new_tokens}", legal=">= 1")
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError("an empty prompt has nothing to continue", seen=f"prompt {index}", hint="begin with bos")
        if not 0 <= min(prompt) <= max(prompt) < model.spec.vocab_size:
            outside = [token for token in prompt if not 0 <= token < model.spec.vocab_size]
            raise UserError(
                "a prompt's token id lies outside the vocabulary",
                seen=f"prompt {index}: {outside[0]}",
                legal=f"0 .. {model.spec.vocab_size - 1}",
            )
    longest = max((len(prompt) for prompt in prompts), default=0)
    limit = model.spec.max_positions if model.spec.positions == "learned" else model.spec.eval_max_positions
    if limit is not None and longest + max_new_tokens - 1 > limit:
        raise UserError(
            "prompt and continuation are longer than the model's positions",
            seen=f"{longest} + {max_new_tokens} tokens",
            legal=f"<= {limit + 1} together",
            hint="lower max_new_tokens or shorten the prompt",
        )
