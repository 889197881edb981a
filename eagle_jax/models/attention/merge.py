"""One attention for prefill chunks, tree verification and drafting: prefix part + new rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.models.attention.xla import prefix_xla
from eagle_jax.models.cpu.attention import attention as cpu_attention
from eagle_jax.models.kernels import cpu_kernels


def attend(
    q: Float[Array, "B T H d"],
    keys: Float[Array, "B E K d"],
    values: Float[Array, "B E K d"],
    mask: Bool[Array, "B T E"],
    cache_keys: Float[Array, "B K S d"],
    cache_values: Float[Array, "B K S d"],
    lengths: Int[Array, " B"],
    positions: Int[Array, "B T"],
    window: int | None = None,
    key_positions: Int[Array, "B E"] | None = None,
) -> Float[Array, "B T H d"]:
    """Attention of T new tokens to the committed prefix and to E uncommitted rows (their own among them).

    Args:
        mask: which of the E rows each token sees: causal in a prefill chunk, ancestors and itself in a tree.
            Every token must see at least one row.
        lengths: committed rows of the cache for each sequence.
        positions: absolute positions of the T tokens; used under a sliding window only.
        window: a token sees the last `window` positions, its own included.
        key_positions: absolute positions of the E rows; needed under a window only.
    """
    B, T, H, d = q.shape
    K = keys.shape[2]
    G = H // K
    first_visible = None
    if window is not None:
        first_visible = positions - window + 1
        if key_positions is not None:
            mask = mask & (key_positions[:, None, :] > positions[:, :, None] - window)
    if cpu_kernels(q.dtype, B * T):
        first = jnp.zeros((B, T), jnp.int32) if first_visible is None else first_visible
        return cpu_attention(q, keys, values, mask, cache_keys, cache_values, lengths, first)

    # [B, T, K, G, d] -> [B, K, G * T, d]: the queries of a group share their KV head's rows.
    grouped = (q * (1.0 / math.sqrt(d))).astype(q.dtype).reshape(B, T, K, G, d)
    grouped = grouped.transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, d)
    if first_visible is not None:
        first_visible = jnp.tile(first_visible, (1, G))  # row g * T + t belongs to token t
    prefix, prefix_lse = prefix_xla(grouped, cache_keys, cache_values, lengths, first_visible)

    scores = jnp.einsum("BKRd,BEKd->BKRE", grouped, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(jnp.tile(mask, (1, G, 1))[:, None], scores, -jnp.inf)
    # The new rows are never empty, so the joint maximum is finite and an empty prefix weighs exp(-inf) = 0.
    maximum = jnp.maximum(jnp.max(scores, axis=-1), prefix_lse)
    weights = jnp.exp(scores - maximum[..., None])
    prefix_weight = jnp.exp(prefix_lse - maximum)
    new = jnp.einsum(
        "BKRE,BEKd->BKRd", weights.astype(values.dtype), values, preferred_element_type=jnp.float32
    )
    total = jnp.sum(weights, axis=-1) + prefix_weight
    output = (new + prefix * prefix_weight[..., None]) / total[..., None]
    output = output.astype(q.dtype).reshape(B, K, G, T, d)
    return output.transpose(0, 3, 1, 2, 4).reshape(B, T, H, d)


@dataclass(frozen=True)
class OverCache:
    """Attention of a pass's tokens over a committed cache and over uncommitted rows; never writes the cache.

    Attributes:
        cache: committed keys and values.
        lengths: how many of them each sequence has.
        mask: which uncommitted rows each token sees: those of `earlier`, then the pass's own.
        positions: absolute positions of the tokens.
        window: see `attend`.
        earlier: uncommitted rows of earlier passes: a draft tree's upper levels.
    """

    cache: tuple[Float[Array, "B K S d"], Float[Array, "B K S d"]]
    lengths: Int[Array, " B"]
    mask: Bool[Array, "B T E"]
    positions: Int[Array, "B T"]
    window: int | None = None
    earlier: tuple[Float[Array, "B F K d"], Float[Array, "B F K d"]] | None = None

    def __call__(
        self, q: Float[Array, "B T H d"], keys: Float[Array, "B T K d"], values: Float[Array, "B T K d"]
    ) -> Float[Array, "B T H d"]:
        """The weighted values for rotated queries and keys."""
        key_positions: Any = self.positions
        if self.earlier is not None:
            keys, values = (
                jnp.concatenate([old, own], axis=1)
                for old, own in zip(self.earlier, (keys, values), strict=True)
            )
            key_positions = None
        return attend(
            q, keys, values, self.mask, *self.cache, self.lengths, self.positions, self.window, key_positions
        )
