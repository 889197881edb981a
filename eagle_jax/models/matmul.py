"""Products of activations with weights kept [out, in]: the one place that chooses how they are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def matmul(
    x: Float[Array, "*T I"], weight: Float[Array, "O I"], dtype: jnp.dtype | None = None
) -> Float[Array, "*T O"]:
    """x · weightᵀ with float32 accumulation, returned in `dtype` (default: x's).

    The weight stands first in the product: with few rows, XLA on CPU then streams it once, in its own layout.
    """
    flat = x.reshape(-1, x.shape[-1])
    product = jax.lax.dot_general(weight, flat, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return product.T.astype(dtype or x.dtype).reshape(*x.shape[:-1], weight.shape[0])
