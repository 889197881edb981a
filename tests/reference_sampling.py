"""What sampling parameters mean, in float64 numpy with sorts: what the library is tested against."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from eagle_jax import SamplingParams


def softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, in float64."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def prepare(
    logits: np.ndarray, seen: Iterable[int], banned: Iterable[int], params: SamplingParams
) -> np.ndarray:
    """Penalty, bans and temperature for the logits [V] of one position."""
    logits = np.array(logits, np.float64)
    index = np.unique(np.fromiter(seen, int))
    score = logits[index]
    logits[index] = np.where(score > 0, score / params.repetition_penalty, score * params.repetition_penalty)
    logits[[t for t in banned if 0 <= t < logits.size]] = -np.inf
    return logits if params.temperature == 0 else logits / params.temperature


def kept_and_margin(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, float]:
    """Which tokens [V] survive min-p, then top-k, then top-p, and how close the nearest cut is.

    The margin is what a log-probability (min-p, top-k) or the mass (top-p) would have to change by for another
    token to survive. Tokens that tie with the last one kept are kept.
    """
    p = softmax(logits)
    margin = np.inf
    kept = np.ones(p.size, bool)
    if params.temperature == 0:
        return kept, margin
    with np.errstate(divide="ignore"):
        log_p = np.log(p)
    if params.min_p > 0:
        floor = params.min_p * p.max()
        kept = p >= floor
        margin = min(margin, np.abs(log_p - np.log(floor))[p < p.max()].min(initial=np.inf))
    if 0 < params.top_k < kept.sum():
        ranked = np.sort(np.where(kept, log_p, -np.inf))[::-1]
        kept &= log_p >= ranked[params.top_k - 1]
        margin = min(margin, ranked[params.top_k - 1] - ranked[params.top_k])
    if params.top_p < 1:
        rest = np.where(kept, p, 0.0)
        rest /= rest.sum()
        ranked = np.sort(rest)[::-1]
        mass = np.cumsum(ranked)
        last = int(np.argmax(mass >= params.top_p * (1 - 1e-15)))
        kept &= rest >= ranked[last]
        margin = min(margin, np.abs(mass - params.top_p).min())
        if last + 1 < ranked.size and ranked[last + 1] > 0:  # a tie is broken by rounding
            margin = min(margin, np.log(ranked[last] / ranked[last + 1]))
    return kept, float(margin)


def distribution(
    logits: np.ndarray, params: SamplingParams, seen: Iterable[int] = (), banned: Iterable[int] = ()
) -> np.ndarray:
    """The probabilities [V] that a sampled token is drawn from."""
    logits = prepare(logits, seen, banned, params)
    kept, _ = kept_and_margin(logits, params)
    p = np.where(kept, softmax(logits), 0.0)
    return p / p.sum()
