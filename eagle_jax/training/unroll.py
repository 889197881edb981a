"""The training-time test of EAGLE-3 (arXiv 2503.01840): the head runs on its own output, as it will when it drafts.

Slot p starts from the target's states at p and the token at p + 1. Step i teaches it with the token at p + 1 + i in the
place of the one that it would have drafted, and predicts the token at p + 2 + i. Slots run side by side: in every step
a query sees the keys of step 0 up to its own slot, which come from the target's states, and of the later steps those of
its own slot only. That is what a draft sees that has run i steps from there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from eagle_jax.drafters.eagle import EagleHead
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.models.layers import Rows

QUERY_BLOCK = 512  # slots whose scores exist at once


def training_time_test(
    head: Eagle3Head,
    embeddings: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    taps: Float[Array, "B T M"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    length: int,
    remat: bool = False,
) -> list[Float[Array, "B T D"]]:
    """The states that `head.logits` takes, of every slot in every step.

    Args:
        embeddings: the target's table; the head's own takes precedence.
        tokens: token ids. The slots at a segment's end read tokens beyond it, and are for the loss to leave out.
        taps: the target's states, as `head.fuse` takes them.
        segments: which document a slot belongs to; documents packed into one row do not see each other.
        positions: absolute positions in the document.
        length: number of steps.
        remat: recompute each step in the backward pass rather than keep what it computed.
    """
    embed = head.embed_tokens
    hidden, first = head.fuse(taps), None
    later: list[Rows] = []
    outputs = []

    def run(hidden, shifted, offset, first, later):
        vectors = embed(shifted) if embed is not None else jnp.take(embeddings, shifted, axis=0, mode="clip")
        return head(vectors, hidden, positions + offset, OverSteps(segments, first, tuple(later)))

    if remat:
        run = jax.checkpoint(run, static_argnums=2)
    for i in range(length):
        hidden, rows = run(hidden, shift_left(tokens, i + 1), i, first, later)
        outputs.append(hidden)
        if first is None:
            first = rows
        else:
            later = [*later, rows]
    return outputs


def shift_left(x: Array, by: int) -> Array:
    """x[:, p + by] at p, zeros at the end."""
    T = x.shape[1]
    return jnp.pad(x[:, min(by, T) :], ((0, 0), (0, min(by, T)), *[(0, 0)] * (x.ndim - 2)))


@dataclass(frozen=True)
class OverSteps:
    """Attention in one step of the training-time test.

    Attributes:
        segments: documents do not see each other.
        first: keys and values of step 0; None in step 0 itself.
        later: those of the later steps before this one.
        window: slots that a query sees at most, its own included; None: all.
    """

    segments: Int[Array, "B T"]
    first: Rows | None = None
    later: tuple[Rows, ...] = ()
    window: int | None = None

    def __call__(
        self, q: Float[Array, "B T H d"], keys: Float[Array, "B T K d"], values: Float[Array, "B T K d"]
    ) -> Float[Array, "B T H d"]:
        """One softmax over step 0's causal keys and the slot's own later ones."""
        own = (*self.later, (keys, values)) if self.first is not None else ()
        causal_keys, causal_values = (keys, values) if self.first is None else self.first
        B, T, H, d = q.shape
        K = keys.shape[2]
        q = q.reshape(B, T, K, H // K, d)
        size = T if T <= QUERY_BLOCK else QUERY_BLOCK
        blocks = -(-T // size)
        padded = blocks * size - T

        def split(x):  # [B, T, ...] -> [blocks, B, size, ...]
            x = jnp.pad(x, ((0, 0), (0, padded), *[(0, 0)] * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(B, blocks, size, *x.shape[2:]), 1, 0)

        queries = (
            split(q),
            split(jnp.broadcast_to(jnp.arange(T), (B, T))),
            split(self.segments),
            [(split(k), split(v)) for k, v in own],
        )
        block = partial(_attend_block, causal_keys, causal_values, self.segments, self.window)
        if blocks == 1:
            out = block(jax.tree.map(lambda x: x[0], queries))[None]
        else:
            out = jax.lax.map(jax.checkpoint(block), queries)
        out = jnp.moveaxis(out, 0, 1).reshape(B, blocks * size, H, d)
        return out[:, :T]


def _attend_block(keys, values, segments, window, queries):
    """Scores in float32. Padding attends to slot 0, and is cut off again."""
    q, index, segment, own = queries
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = jnp.einsum("BQKGd,BSKd->BKGQS", q, keys, preferred_element_type=jnp.float32) * scale
    seen = (jnp.arange(keys.shape[1]) <= index[:, :, None]) & (segments[:, None, :] == segment[:, :, None])
    if window is not None:
        seen &= jnp.arange(keys.shape[1]) > index[:, :, None] - window
    seen |= jnp.arange(keys.shape[1]) == index[:, :, None]  # padding of a block has no document
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    diagonal = [
        jnp.einsum("BQKGd,BQKd->BKGQ", q, k, preferred_element_type=jnp.float32) * scale for k, _ in own
    ]
    maximum = jnp.max(scores, axis=-1)
    for score in diagonal:
        maximum = jnp.maximum(maximum, score)
    maximum = jax.lax.stop_gradient(maximum)
    weights = jnp.exp(scores - maximum[..., None])
    total = jnp.sum(weights, axis=-1)
    output = jnp.einsum(
        "BKGQS,BSKd->BQKGd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    for score, (_, v) in zip(diagonal, own, strict=True):
        weight = jnp.exp(score - maximum)
        total += weight
        output += jnp.einsum("BKGQ,BQKd->BQKGd", weight, v.astype(jnp.float32))
    total = jnp.moveaxis(total, 3, 1)  # [B, Q, K, G]
    output = (output / total[..., None]).astype(q.dtype)
    return output.reshape(*output.shape[:2], -1, output.shape[-1])


def teacher_forced(
    head: EagleHead,
    embeddings: Float[Array, "V D"],
    tokens: Int[Array, "B T"],
    features: Float[Array, "B T D"],
    segments: Int[Array, "B T"],
    positions: Int[Array, "B T"],
) -> Float[Array, "B T D"]:
    """An EAGLE-1 head over the target's features: what it predicts for the feature at p + 1, at p.

    Arguments as in `training_time_test`.
    """
    shifted, table = shift_left(tokens, 1), head.embed_tokens
    vectors = table(shifted) if table is not None else jnp.take(embeddings, shifted, axis=0, mode="clip")
    return head(vectors, features, positions, OverSteps(segments))[0]
