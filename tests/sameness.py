"""The library's promise as a check: with speculation on, every request gets the tokens that it gets without.

Rounding differs between a pass over one token and one over a tree, so a difference is excused where, at the first
one, the two best noisy scores differ by less than `TOLERANCE` or a top-p, top-k or min-p cut is that close;
`compare` tells such cases apart by a plain prefill of what both texts share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from reference_sampling import kept_and_margin, prepare

from eagle_jax import SamplingParams
from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.decoding.generate import Generator
from eagle_jax.decoding.state import DecodeState
from eagle_jax.decoding.step import DecodeParams
from eagle_jax.models.decoder import Target
from eagle_jax.sampling import RowSampling, gumbel_noise

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Request:
    """One row of a batch: what to continue, how, and as which of n samples."""

    prompt: list[int]
    params: SamplingParams
    sample: int = 0


@dataclass(frozen=True)
class Answer:
    """What a row came back with; see `DecodeState`."""

    token_ids: list[int]
    accept_lengths: list[int]
    drafted: list[bool]
    finish: int


@dataclass
class Comparison:
    """Rows whose texts are not the same, by whether rounding excuses it."""

    differences: list[str] = field(default_factory=list)
    excused: list[str] = field(default_factory=list)


def row_sampling(requests: Sequence[Request], eos: Iterable[int] = (), stop_slots: int = 4) -> RowSampling:
    """The device's form of the rows' parameters."""

    def column(values: Iterable[Any], dtype: Any) -> np.ndarray:
        return np.asarray(list(values), dtype)

    params = [r.params for r in requests]
    stops = [[*p.stop_token_ids, *(() if p.ignore_eos else eos)] for p in params]
    return RowSampling(
        temperature=column((p.temperature for p in params), np.float32),
        top_p=column((p.top_p for p in params), np.float32),
        top_k=column((p.top_k for p in params), np.int32),
        min_p=column((p.min_p for p in params), np.float32),
        repetition_penalty=column((p.repetition_penalty for p in params), np.float32),
        seed=column((p.seed for p in params), np.uint32),
        sample=column((r.sample for r in requests), np.int32),
        min_new_tokens=column((p.min_new_tokens for p in params), np.int32),
        max_new_tokens=column((p.max_new_tokens for p in params), np.int32),
        stop_ids=column((ids + [-1] * (stop_slots - len(ids)) for ids in stops), np.int32),
    )  # type: ignore[arg-type]


def decode(
    generator: Generator,
    params: DecodeParams,
    requests: Sequence[Request],
    capacity: int,
    chunk: int,
    eos: Iterable[int] = (),
    rows: int | None = None,
) -> list[Answer]:
    """One batch through the compiled loop, filled up to `rows` rows by repeating the first request."""
    padded = [*requests, *[requests[0]] * ((rows or 0) - len(requests))]
    history = np.zeros((len(padded), capacity), np.int32)
    for i, request in enumerate(padded):
        history[i, : len(request.prompt)] = request.prompt
    lengths = np.asarray([len(r.prompt) for r in padded], np.int32)
    sampling = row_sampling(padded, eos)
    state = generator.start(params, history, lengths, sampling, chunk)
    return read(generator.run(params, state, sampling))[: len(requests)]


def read(state: DecodeState) -> list[Answer]:
    """The rows of a finished state."""
    host: dict[str, np.ndarray] = {
        name: np.asarray(getattr(state, name))
        for name in ("history", "prompt_lengths", "lengths", "accept_lengths", "steps", "drafted", "finish")
    }
    spans = [slice(a, b) for a, b in zip(host["prompt_lengths"], host["lengths"], strict=True)]
    return [
        Answer(
            host["history"][i, span].tolist(),
            host["accept_lengths"][i, : host["steps"][i]].tolist(),
            host["drafted"][i, span].tolist(),
            int(host["finish"][i]),
        )
        for i, span in enumerate(spans)
    ]


_noise = jax.jit(gumbel_noise, static_argnums=2)


@partial(jax.jit, static_argnums=(0, 3))
def _next_logits(target: Target, params: Any, tokens: jax.Array, size: int, length: jax.Array) -> jax.Array:
    model, decoder = target.config, target.bind(params)
    cache = ContiguousCache.zeros(model.num_layers, 1, model.num_kv_heads, 16, model.head_dim, target.dtype)
    positions = jnp.arange(size)[None]
    causal = jnp.tril(jnp.ones((1, size, size), bool))
    out = decoder(tokens, positions, cache, jnp.zeros((1,), jnp.int32), causal, (), length[None])
    return decoder.logits(out.hidden[0, length - 1])


def next_logits(target: Target, params: Any, token_ids: Sequence[int], size: int) -> np.ndarray:
    """Raw logits [V] after `token_ids`, by a plain pass over all of them, padded to `size`."""
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(token_ids)] = token_ids
    return np.asarray(_next_logits(target, params, tokens, size, np.int32(len(token_ids))))


def margin(
    target: Target, params: Any, request: Request, common: Sequence[int], eos: Iterable[int], size: int
) -> float:
    """How close the choice after prompt + `common` is: between the two best tokens, or at the nearest cut."""
    prefix, p = [*request.prompt, *common], request.params
    stops = [*p.stop_token_ids, *(() if p.ignore_eos else eos)]
    banned = stops if len(common) < p.min_new_tokens else []
    scores = prepare(next_logits(target, params, prefix, size), prefix, banned, p)
    kept, nearest = kept_and_margin(scores, p)
    noise = _noise(row_sampling([request]), np.asarray([[len(prefix)]], np.int32), scores.size)
    second, first = np.sort(np.where(kept, scores + np.asarray(noise)[0, 0], -np.inf))[-2:]
    return float(min(nearest, first - second))


def compare(
    target: Target,
    params: Any,
    requests: Sequence[Request],
    plain: Sequence[Answer],
    speculative: Sequence[Answer],
    eos: Iterable[int],
    size: int,
) -> Comparison:
    """Holds answers against those of plain decoding, token by token and in how they ended.

    Args:
        target, params: the target that gave them.
        eos: its end-of-sequence tokens.
        size: no row is longer.
    """
    result = Comparison()
    for row, (request, a, b) in enumerate(zip(requests, plain, speculative, strict=True)):
        if (a.token_ids, a.finish) == (b.token_ids, b.finish):
            continue
        pairs = zip(a.token_ids, b.token_ids, strict=False)
        at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
        if at is None:  # the same tokens, and not the same end
            ends = [(len(answer.token_ids), answer.finish) for answer in (a, b)]
            result.differences.append(f"row {row}: lengths and finishes are {ends}")
            continue
        close = margin(target, params, request, a.token_ids[:at], eos, size)
        line = (
            f"row {row}, token {at}: {a.token_ids[at]}, then {b.token_ids[at]}; margin {close:.2g}; {request}"
        )
        (result.excused if close < TOLERANCE else result.differences).append(line)
    return result


def assert_same(*args: Any) -> Comparison:
    """`compare`, printing what rounding excuses and failing on anything else."""
    result = compare(*args)
    for line in result.excused:
        print(f"excused: {line}")
    assert not result.differences, "\n".join(result.differences)
    return result
