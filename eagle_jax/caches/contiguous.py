"""A KV cache with one stretch of `capacity` rows for each sequence and layer.

Kept [B, K, S, d], one buffer a layer: that is the order in which attention reads it, and separate donated
buffers are updated in place, where one stacked array scanned over layers would be copied every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ContiguousCache:
    """Keys and values of every layer. Which rows are committed is not its business: callers pass lengths."""

    keys: tuple[Float[Array, "B K S d"], ...]
    values: tuple[Float[Array, "B K S d"], ...]

    @classmethod
    def zeros(
        cls, num_layers: int, batch: int, num_kv_heads: int, capacity: int, head_dim: int, dtype: Any
    ) -> ContiguousCache:
        """An empty cache (zeros, so that masked rows never hold NaN)."""
        shape = (batch, num_kv_heads, capacity, head_dim)
        return cls(
            tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        )

    def layer(self, index: int) -> tuple[Float[Array, "B K S d"], Float[Array, "B K S d"]]:
        """Keys and values of one layer."""
        return self.keys[index], self.values[index]

    def commit(
        self, rows: Sequence[tuple[Float[Array, "B T K d"], Float[Array, "B T K d"]]], start: Int[Array, " B"]
    ) -> ContiguousCache:
        """Writes T rows of every layer at [start, start + T) of each sequence.

        Rows past those that count are written too and must be covered by later writes, or lie past the
        length; start + T must not exceed the capacity (XLA would shift the write over committed rows).
        """
        return ContiguousCache(
            tuple(_write(buffer, k, start) for buffer, (k, _) in zip(self.keys, rows, strict=True)),
            tuple(_write(buffer, v, start) for buffer, (_, v) in zip(self.values, rows, strict=True)),
        )


def _write(
    buffer: Float[Array, "B K S d"], rows: Float[Array, "B T K d"], start: Int[Array, " B"]
) -> Float[Array, "B K S d"]:
    rows = rows.transpose(0, 2, 1, 3).astype(buffer.dtype)
    if buffer.shape[0] == 1:  # a plain slice update: XLA on CPU runs a batched one as a slow scatter
        return jax.lax.dynamic_update_slice(buffer, rows, (0, 0, start[0], 0))
    return jax.vmap(lambda b, r, s: jax.lax.dynamic_update_slice(b, r, (0, s, 0)))(buffer, rows, start)


def select_rows(
    rows: Sequence[tuple[Float[Array, "B N K d"], Float[Array, "B N K d"]]], index: Int[Array, "B T"]
) -> list[tuple[Float[Array, "B T K d"], Float[Array, "B T K d"]]]:
    """The rows of tree nodes `index`, for every layer: the accepted path, ready to be committed."""
    gather = index[:, :, None, None]
    return [(jnp.take_along_axis(k, gather, axis=1), jnp.take_along_axis(v, gather, axis=1)) for k, v in rows]


def after_reads(start: Int[Array, " B"], computed: Int[Array, " B"]) -> Int[Array, " B"]:
    """`start`, known to XLA only once `computed` is.

    New rows may be known before all of the pass has read the cache, and XLA then copies every buffer rather than write
    over what is still to be read. Waiting for a result of the pass makes all reads come first.

    Args:
        computed: never negative, and not known before the pass has ended; such as the choices made from it.
    """
    return start + jnp.minimum(computed, 0)
