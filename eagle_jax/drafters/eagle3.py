"""The EAGLE-3 head (arXiv 2503.01840) and its EAGLE-3.1 form (arXiv 2605.09992).

Row p pairs a fusion g_p of several hidden states of the target with the embedding of the next token t_{p+1}.
The head's own output is fed back in g's place when it drafts on: raw in EAGLE-3, normed in EAGLE-3.1
(`norm_output`), which also norms each captured state before the fusion (`fc_norm`).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from eagle_jax.drafters.head_config import HeadConfig
from eagle_jax.models.layers import MLP, Angles, Attend, Attention, Embedding, Linear, RMSNorm, Rows
from eagle_jax.models.matmul import matmul
from eagle_jax.models.rope import rotary


class Eagle3Layer(nnx.Module):
    """A layer whose attention reads norm(embedding) ‖ norm(hidden), 2D wide; the hidden is the residual."""

    def __init__(self, config: HeadConfig, dtype: Any):
        model = config.model
        D, eps = model.hidden_size, model.rms_norm_eps
        self.input_layernorm = RMSNorm(D, eps, dtype)
        self.hidden_norm = RMSNorm(D, eps, dtype)
        self.self_attn = Attention(model, dtype, in_features=2 * D)
        self.post_attention_layernorm = RMSNorm(D, eps, dtype)
        self.mlp = MLP(model, dtype)
        self.norm_before_residual = config.norm_before_residual

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        rotary: Angles,
        attend: Attend,
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """See `DecoderLayer`."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        attended, rows = self.self_attn(
            jnp.concatenate([self.input_layernorm(embeddings), normed], axis=-1), rotary, attend
        )
        x = residual + attended
        return x + self.mlp(self.post_attention_layernorm(x)), rows


class Eagle3Head(nnx.Module):
    """Fusion of the taps, one layer, and a language-model head of its own over a draft vocabulary."""

    def __init__(self, config: HeadConfig, dtype: Any):
        model, taps = config.model, len(config.taps)
        D, eps = model.hidden_size, model.rms_norm_eps
        width = config.target_hidden_size
        self.config = config
        self.embed_tokens = Embedding(model.vocab_size, D, dtype) if config.own_embeddings else None
        self.input_norm = RMSNorm(taps * width, eps, dtype, None) if config.norm_before_fc else None
        self.fc_norm = (
            nnx.List([RMSNorm(width, eps, dtype, None) for _ in range(taps)]) if config.fc_norm else None
        )
        self.fc = Linear(D, taps * width, dtype, ("embed", None), config.fc_bias)
        self.layers = nnx.List([Eagle3Layer(config, dtype)])
        self.norm = RMSNorm(D, eps, dtype)
        self.lm_head = Linear(config.draft_vocab_size, D, dtype, ("vocab", "embed"))
        mapped = config.draft_vocab_size != model.vocab_size or config.own_vocabulary_map
        self.d2t = (
            nnx.Param(jnp.zeros((config.draft_vocab_size,), jnp.int32), logical_axes=(None,))
            if mapped
            else None
        )

    def fuse(self, taps: Float[Array, "B T M"]) -> Float[Array, "B T D"]:
        """g, from states of the target only; fed-back states never pass here."""
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        if self.fc_norm is not None:
            parts = jnp.split(taps, len(self.fc_norm), axis=-1)
            taps = jnp.concatenate([norm(x) for norm, x in zip(self.fc_norm, parts, strict=True)], axis=-1)
        return self.fc(taps)

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        hidden: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """The state that is fed back (and that `logits` takes), and the rows' keys and values."""
        angles = rotary(self.config.model.rope, self.config.model.head_dim, positions)
        out, rows = self.layers[0](embeddings, hidden.astype(embeddings.dtype), angles, attend)
        return (self.norm(out) if self.config.norm_output else out), rows

    def logits(self, hidden: Float[Array, "*T D"], output_weight: Any = None) -> Float[Array, "*T Vd"]:
        """Next-token logits in the draft vocabulary, float32. The target's own head is not used."""
        return matmul(self.normed(hidden), self.lm_head.weight[...], jnp.float32)

    def normed(self, hidden: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """What the language-model head reads: the state that is fed back, normed once."""
        return hidden if self.config.norm_output else self.norm(hidden)

    def token_ids(self) -> Int[Array, " Vd"] | None:
        """Target id of every draft id; None where the vocabularies are one."""
        return None if self.d2t is None else jnp.arange(self.d2t.shape[0], dtype=jnp.int32) + self.d2t[...]
