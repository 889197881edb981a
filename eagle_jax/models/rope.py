"""Rotary position embeddings: cosines and sines straight from positions, so no table can be too short.

The frequencies follow `transformers.modeling_rope_utils`; parity is tested for every kind.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from eagle_jax.models.config import RopeConfig
from eagle_jax.models.cpu.rope import rotate as cpu_rotate
from eagle_jax.models.kernels import cpu_kernels


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequency of each rotated pair, shape [head_dim / 2], float32.

    For `dynamic` these are the frequencies inside the original context; `rotary` rescales them beyond.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.kind == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.kind == "llama3":
        frequencies = _llama3(rope, frequencies)
    elif rope.kind == "yarn":
        frequencies = _yarn(rope, frequencies, head_dim)
    return frequencies.astype(np.float32)


def _llama3(rope: RopeConfig, frequencies: np.ndarray) -> np.ndarray:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    original = float(rope.original_max_position_embeddings or 0)
    wavelengths = 2 * math.pi / frequencies
    ramp = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - ramp) * frequencies / rope.factor + ramp * frequencies
    scaled = np.where(wavelengths > original / rope.low_freq_factor, frequencies / rope.factor, between)
    return np.where(wavelengths < original / rope.high_freq_factor, frequencies, scaled)


def _yarn(rope: RopeConfig, frequencies: np.ndarray, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071): interpolate slow pairs, keep fast ones, ramp between the two betas."""
    original = float(rope.original_max_position_embeddings or 0)

    def pair_turning(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if high == low else high
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)


def rotary(
    rope: RopeConfig,
    head_dim: int,
    positions: Int[Array, "B T"],
    prompt_lengths: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T h"], Float[Array, "B T h"]]:
    """Cosines and sines (float32, one for each pair) of the tokens at `positions`.

    Args:
        positions: absolute positions.
        prompt_lengths: for `dynamic` only. Its frequencies depend on how long the sequence is; here a token
            sees the length max(own position + 1, its row's prompt length). That is what transformers computes
            in a prefill followed by single steps, and it depends neither on chunks nor on what else is
            verified in the same pass.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))[None, None, :]
    if rope.kind == "dynamic":
        original = float(rope.original_max_position_embeddings or 0)
        lengths = positions + 1
        if prompt_lengths is not None:
            lengths = jnp.maximum(lengths, prompt_lengths[:, None])
        lengths = jnp.maximum(lengths.astype(jnp.float32), original)
        growth = rope.factor * lengths / original - (rope.factor - 1)
        base = rope.theta * growth ** (head_dim / (head_dim - 2))
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        frequencies = 1.0 / base[:, :, None] ** exponents
    angles = positions[:, :, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rope.output_scale, jnp.sin(angles) * rope.output_scale


def rotate(
    x: Float[Array, "B T H d"], cosines: Float[Array, "B T h"], sines: Float[Array, "B T h"]
) -> Float[Array, "B T H d"]:
    """Rotates the pairs (i, i + d/2), computed in float32 and returned in x's dtype."""
    if cpu_kernels(x.dtype):
        return cpu_rotate(x, cosines, sines)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosines, sines = cosines[:, :, None, :], sines[:, :, None, :]
    rotated = jnp.concatenate([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return jax.lax.convert_element_type(rotated, x.dtype)
