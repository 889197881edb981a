"""The layers of targets and draft heads. Attribute names are those of Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle_jax.models.config import ModelConfig
from eagle_jax.models.cpu.embedding import embedding
from eagle_jax.models.cpu.norm import rms_norm
from eagle_jax.models.kernels import cpu_kernels
from eagle_jax.models.matmul import matmul, matmul_many
from eagle_jax.models.rope import rotate

Rows = tuple[Float[Array, "B T K d"], Float[Array, "B T K d"]]  # keys and values of a pass's own tokens
Angles = tuple[Float[Array, "B T h"], Float[Array, "B T h"]]  # cosines and sines
Attend = Callable[
    [Float[Array, "B T H d"], Float[Array, "B T K d"], Float[Array, "B T K d"]], Float[Array, "B T H d"]
]


class Linear(nnx.Module):
    """y = W x + b, the weight kept [out, in] as checkpoints have it."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: Any,
        axes: tuple[str | None, str | None],
        bias: bool = False,
    ):
        self.weight = nnx.Param(jnp.zeros((out_features, in_features), dtype), logical_axes=axes)
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype), logical_axes=axes[:1]) if bias else None

    def __call__(self, x: Float[Array, "*T I"]) -> Float[Array, "*T O"]:
        """The product with the weight, plus the bias if there is one."""
        y = matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


def project(x: Float[Array, "*T I"], *layers: Linear) -> list[Float[Array, "*T O"]]:
    """Several linear layers on one input."""
    products = matmul_many(x, [layer.weight[...] for layer in layers])
    return [
        y if layer.bias is None else y + layer.bias[...] for layer, y in zip(layers, products, strict=True)
    ]


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: Any, axis: str | None = "embed"):
        self.weight = nnx.Param(jnp.zeros((size,), dtype), logical_axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """x over its root mean square, times the weight."""
        if cpu_kernels(x.dtype):
            return rms_norm(x.reshape(-1, x.shape[-1]), self.weight[...], self.eps).reshape(x.shape)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return self.weight[...] * wide.astype(x.dtype)


class Embedding(nnx.Module):
    """Token embeddings [V, D]."""

    def __init__(self, vocab_size: int, size: int, dtype: Any):
        self.weight = nnx.Param(jnp.zeros((vocab_size, size), dtype), logical_axes=("vocab", "embed"))

    def __call__(self, tokens: Int[Array, "*T"]) -> Float[Array, "*T D"]:
        """The tokens' rows."""
        return embed(self.weight[...], tokens)


def embed(table: Float[Array, "V D"], tokens: Int[Array, "*T"]) -> Float[Array, "*T D"]:
    """Rows of a table of embeddings."""
    if cpu_kernels(table.dtype):
        return embedding(table, tokens.reshape(-1)).reshape(*tokens.shape, -1)
    return jnp.take(table, tokens, axis=0, mode="clip")


class MLP(nnx.Module):
    """Gated feed-forward: down(act(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, dtype: Any):
        D, F, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(F, D, dtype, ("ffn", "embed"), bias)
        self.up_proj = Linear(F, D, dtype, ("ffn", "embed"), bias)
        self.down_proj = Linear(D, F, dtype, ("embed", "ffn"), bias)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Each token on its own."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        return self.down_proj(activate(self.activation, gate) * up)


def activate(kind: str, x: Float[Array, "*T F"]) -> Float[Array, "*T F"]:
    """The activation that a config names (`gelu` is the exact one)."""
    if kind == "silu":
        return jax.nn.silu(x)
    if kind == "relu":
        return jax.nn.relu(x)
    return jax.nn.gelu(x, approximate=kind == "gelu_pytorch_tanh")


class Attention(nnx.Module):
    """Grouped-query attention. Over what its queries go is the caller's to say."""

    def __init__(self, config: ModelConfig, dtype: Any, in_features: int | None = None):
        D, H, K, d = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        I = in_features or D  # noqa: E741 (EAGLE-3's first layer reads 2D)
        self.q_proj = Linear(H * d, I, dtype, ("heads", "embed"), config.qkv_bias)
        self.k_proj = Linear(K * d, I, dtype, ("kv_heads", "embed"), config.qkv_bias)
        self.v_proj = Linear(K * d, I, dtype, ("kv_heads", "embed"), config.qkv_bias)
        self.o_proj = Linear(D, H * d, dtype, ("embed", "heads"), config.output_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps, dtype, None) if config.qk_norm else None
        self.k_norm = RMSNorm(d, config.rms_norm_eps, dtype, None) if config.qk_norm else None
        self.num_heads, self.num_kv_heads, self.head_dim = H, K, d

    def __call__(
        self, x: Float[Array, "B T I"], rotary: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """The layer's output, and the keys and values of x.

        Args:
            rotary: cosines and sines of the tokens' positions.
            attend: from the rotated queries, keys and values of x to the weighted values; such as `OverCache`.
        """
        B, T, _ = x.shape
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q = q.reshape(B, T, self.num_heads, self.head_dim)
        k = k.reshape(B, T, self.num_kv_heads, self.head_dim)
        v = v.reshape(B, T, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.o_proj(attend(q, k, v).reshape(B, T, -1)), (k, v)


class DecoderLayer(nnx.Module):
    """Pre-norm decoder layer: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, dtype: Any):
        D, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """The residual stream after the layer, and its keys and values; see `Attention`."""
        attended, rows = self.self_attn(self.input_layernorm(x), rotary, attend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), rows
