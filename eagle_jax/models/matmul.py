"""Products of activations with weights kept [out, in]: the one place that chooses how they are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float

from eagle_jax.models import cpu_matmul

_ON_CPU: ContextVar[bool] = ContextVar("on_cpu", default=False)
_PADDED_ROWS = 8


@contextlib.contextmanager
def products_for(mesh: Mesh) -> Iterator[None]:
    """While tracing for `mesh`: on a single CPU device, products of few rows go to the kernel of `cpu_matmul`.

    A custom call cannot be partitioned, so on several devices they stay XLA's.
    """
    token = _ON_CPU.set(mesh.size == 1 and mesh.devices.flat[0].platform == "cpu")
    try:
        yield
    finally:
        _ON_CPU.reset(token)


def matmul(x: Float[Array, "*T I"], weight: Float[Array, "O I"], dtype: Any = None) -> Float[Array, "*T O"]:
    """x · weightᵀ with float32 accumulation, returned in `dtype` (default: x's)."""
    return matmul_many(x, [weight], dtype)[0]


def matmul_many(
    x: Float[Array, "*T I"], weights: Sequence[Float[Array, "O I"]], dtype: Any = None
) -> list[Float[Array, "*T O"]]:
    """`[matmul(x, w) for w in weights]`, in one call where a kernel does it: query, key, value; gate, up."""
    flat, dtype = x.reshape(-1, x.shape[-1]), dtype or x.dtype
    if _ON_CPU.get() and cpu_matmul.supported() and flat.shape[0] <= cpu_matmul.MAX_ROWS:
        products = cpu_matmul.matmul_many(flat, weights, dtype)
    else:
        products = [_xla(flat, weight).astype(dtype) for weight in weights]
    return [p.reshape(*x.shape[:-1], p.shape[-1]) for p in products]


def _xla(x: Float[Array, "M I"], weight: Float[Array, "O I"]) -> Float[Array, "M O"]:
    """The weight stands first: with few rows, XLA on CPU then streams it once, in its own layout."""
    rows = x.shape[0]
    if _ON_CPU.get() and x.dtype.itemsize == 2 and rows < _PADDED_ROWS:
        # A single row of 16 bits falls into a naive loop there, ten times slower than eight rows.
        x = jnp.pad(x, ((0, _PADDED_ROWS - rows), (0, 0)))
    product = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.T[:rows]
