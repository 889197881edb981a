"""The prefix part of attention in plain XLA: runs everywhere, and every kernel is tested against it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 512  # cache rows that one pass over a long prefix reads


def prefix_xla(
    q: Float[Array, "B K R d"],
    keys: Float[Array, "B K S d"],
    values: Float[Array, "B K S d"],
    lengths: Int[Array, " B"],
    first_visible: Int[Array, "B R"] | None = None,
) -> tuple[Float[Array, "B K R d"], Float[Array, "B K R"]]:
    """Attention of R query rows a KV head to the first `lengths` rows of the cache.

    Args:
        q: scaled queries, grouped by KV head (R = heads of the group x new tokens).
        lengths: committed rows of each sequence; may be 0.
        first_visible: under a sliding window, the first cache row that each query sees.

    Returns:
        The softmax-weighted values (float32, zeros where nothing is visible) and the log-sum-exp of the
        scores (−inf there). A long cache is read block by block, only as far as the longest sequence of the
        batch goes.
    """
    capacity = keys.shape[2]
    if capacity <= 2 * BLOCK:
        return _finish(*_block(q, keys, values, _visible(0, capacity, lengths, first_visible)))

    def body(state):
        block, (total, weighted, maximum) = state
        start = jnp.minimum(block * BLOCK, capacity - BLOCK)  # the last block may overlap the one before it
        sizes = (keys.shape[0], keys.shape[1], BLOCK, keys.shape[3])
        visible = _visible(start, BLOCK, lengths, first_visible)
        visible &= (start + jnp.arange(BLOCK) >= block * BLOCK)[None, None, :]
        new_total, new_weighted, new_maximum = _block(
            q,
            jax.lax.dynamic_slice(keys, (0, 0, start, 0), sizes),
            jax.lax.dynamic_slice(values, (0, 0, start, 0), sizes),
            visible,
        )
        joint = jnp.maximum(maximum, new_maximum)
        safe = jnp.where(joint == -jnp.inf, 0.0, joint)
        old, new = jnp.exp(maximum - safe), jnp.exp(new_maximum - safe)
        return block + 1, (
            total * old + new_total * new,
            weighted * old[..., None] + new_weighted * new[..., None],
            joint,
        )

    rows = q.shape[:3]
    empty = (
        jnp.zeros(rows, jnp.float32),
        jnp.zeros((*rows, values.shape[-1]), jnp.float32),
        jnp.full(rows, -jnp.inf, jnp.float32),
    )
    blocks = (jnp.max(lengths) + BLOCK - 1) // BLOCK
    _, totals = jax.lax.while_loop(lambda state: state[0] < blocks, body, (jnp.int32(0), empty))
    return _finish(*totals)


def _visible(start, size: int, lengths, first_visible):
    index = start + jnp.arange(size)
    visible = (index[None, :] < lengths[:, None])[:, None, :]
    if first_visible is not None:
        visible = visible & (index[None, None, :] >= first_visible[:, :, None])
    return visible  # [B, 1 or R, size]


def _block(q, keys, values, visible):
    """Sum of weights, weighted values and maximum of one stretch of the cache."""
    scores = jnp.einsum("BKRd,BKSd->BKRS", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, None], scores, -jnp.inf)
    maximum = jnp.max(scores, axis=-1)
    safe = jnp.where(maximum == -jnp.inf, 0.0, maximum)
    weights = jnp.exp(scores - safe[..., None])
    weighted = jnp.einsum(
        "BKRS,BKSd->BKRd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    return jnp.sum(weights, axis=-1), weighted, maximum


def _finish(total, weighted, maximum):
    empty = total == 0.0
    output = weighted / jnp.where(empty, 1.0, total)[..., None]
    return output, jnp.where(empty, -jnp.inf, maximum + jnp.log(jnp.where(empty, 1.0, total)))
