"""Products of activations with weights kept [out, in]: the one place that chooses how they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from eagle_jax.models.cpu.matmul import matmul_many as cpu_matmul_many
from eagle_jax.models.kernels import cpu_kernels, on_cpu

_PADDED_ROWS = 8


def matmul(x: Float[Array, "*T I"], weight: Float[Array, "O I"], dtype: Any = None) -> Float[Array, "*T O"]:
    """x · weightᵀ with float32 accumulation, returned in `dtype` (default: x's)."""
    return matmul_many(x, [weight], dtype)[0]


def matmul_many(
    x: Float[Array, "*T I"], weights: Sequence[Float[Array, "O I"]], dtype: Any = None
) -> list[Float[Array, "*T O"]]:
    """`[matmul(x, w) for w in weights]`, in one call where a kernel does it: query, key, value; gate, up."""
    flat, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    if cpu_kernels(x.dtype, flat.shape[0]):
        products = cpu_matmul_many(flat, weights, dtype)
    else:
        products = [_xla(flat, weight).astype(dtype) for weight in weights]
    return [p.reshape(*x.shape[:-1], p.shape[-1]) for p in products]


def _xla(x: Float[Array, "M I"], weight: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """The weight stands first: with few rows, XLA on CPU then streams it once, in its own layout."""
    rows = x.shape[0]
    if on_cpu() and x.dtype.itemsize == 2 and rows < _PADDED_ROWS:
        # A single row of 16 bits falls into a naive loop there, ten times slower than eight rows.
        x = jnp.pad(x, ((0, _PADDED_ROWS - rows), (0, 0)))
    product = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.T[:rows]
