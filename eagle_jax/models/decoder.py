"""The target: one decoder-only transformer for every family in `models.config`, read from its config.

It reads a cache and never writes it: a pass returns the keys and values of its own tokens, and whoever knows
which of them are kept (all of a prefill chunk, the accepted path of a tree) commits those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.models.attention import OverCache
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.functional import Functional, Params
from eagle_jax.models.layers import Attend, DecoderLayer, Embedding, Linear, RMSNorm, Rows
from eagle_jax.models.matmul import matmul
from eagle_jax.models.rope import rotary

FINAL_HIDDEN = -1  # the tap that EAGLE-1 heads read: the hidden state after the final norm


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TargetOutput:
    """What one pass over T tokens leaves behind.

    Attributes:
        hidden: after the final norm; `Decoder.logits` turns rows of it into logits.
        taps: the hidden states that the drafter asked for, concatenated in its order; width 0 when it asked
            for none.
        rows: for each layer the keys and values of the T tokens.
    """

    hidden: Float[Array, "B T D"]
    taps: Float[Array, "B T M"]
    rows: tuple[Rows, ...]


class Decoder(nnx.Module):
    """A stack of decoder layers between embeddings and the language-model head."""

    def __init__(self, config: ModelConfig, dtype: Any):
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(config.vocab_size, config.hidden_size, dtype, ("vocab", "embed"))
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: ContiguousCache,
        lengths: Int[Array, " B"],
        mask: Bool[Array, "B T T"],
        taps: tuple[int, ...] = (),
        prompt_lengths: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """Runs T tokens after the `lengths` committed ones.

        Args:
            mask: which of the T tokens each of them sees (itself included): causal for a chunk, ancestors for
                a tree.
            taps: see `run`.
            prompt_lengths: see `rope.rotary`; for rope type `dynamic` only.
        """

        def over_cache(layer: int, window: int | None) -> Attend:
            return OverCache(cache.layer(layer), lengths, mask, positions, window)

        return self.run(tokens, positions, over_cache, taps, prompt_lengths)

    def run(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attend: Callable[[int, int | None], Attend],
        taps: tuple[int, ...] = (),
        prompt_lengths: Int[Array, " B"] | None = None,
    ) -> TargetOutput:
        """Runs T tokens, wherever their attention goes.

        Args:
            attend: from a layer's index and sliding window to what its queries attend to.
            taps: hidden states to return, in boundary numbering: i is the residual stream before layer i, L
                the one after the last layer, `FINAL_HIDDEN` the normed one.
            prompt_lengths: see `rope.rotary`; for rope type `dynamic` only.
        """
        config = self.config
        angles = rotary(config.rope, config.head_dim, positions, prompt_lengths)
        x = self.embed_tokens(tokens)
        captured, rows = {}, []
        for index, layer in enumerate(self.layers):
            if index in taps:
                captured[index] = x
            x, layer_rows = layer(x, angles, attend(index, config.windows[index]))
            rows.append(layer_rows)
        captured[config.num_layers] = x
        hidden = captured[FINAL_HIDDEN] = self.norm(x)
        tapped = [captured[tap] for tap in taps] or [hidden[..., :0]]
        return TargetOutput(hidden, jnp.concatenate(tapped, axis=-1), tuple(rows))

    def logits(self, hidden: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """Next-token logits, float32."""
        return matmul(hidden, self.output_weight, jnp.float32)

    @property
    def output_weight(self) -> Float[Array, "V D"]:
        """The language-model head's weight: the embeddings' own when they are tied."""
        return (self.embed_tokens if self.lm_head is None else self.lm_head).weight[...]


@dataclass(frozen=True)
class Target:
    """The static half of a target: its config and its module without parameters.

    Attributes:
        config: what the model is.
        dtype: of its parameters and activations.
    """

    config: ModelConfig
    dtype: str

    @cached_property
    def functional(self) -> Functional[Decoder]:
        """The module's structure, traced once."""
        return Functional.of(lambda: Decoder(self.config, jnp.dtype(self.dtype)))

    def bind(self, params: Params) -> Decoder:
        """The decoder with these parameters."""
        return self.functional.bind(params)


# Hugging Face's names are ours behind "model."; older checkpoints also store what rotary embeddings
# recompute.
TARGET_NAMES: tuple[tuple[str, str | None], ...] = (
    (r".*\.rotary_emb\.inv_freq", None),
    (r"(?:model\.)?(.*)", r"\1"),
)
