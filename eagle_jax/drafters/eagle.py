"""The EAGLE-1 head (arXiv 2401.15077), which EAGLE-2 (arXiv 2406.16858) uses with a dynamic tree.

Row p pairs the target's feature f_p (its hidden state after the final norm) with the embedding of the next
token t_{p+1}, and predicts f_{p+1}. Logits are the target's own language-model head on the prediction.
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


class EagleLayer(nnx.Module):
    """A decoder layer of the target's kind without the input norm: fc's output goes straight in."""

    def __init__(self, config: HeadConfig, dtype: Any):
        model = config.model
        self.self_attn = Attention(model, dtype)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps, dtype)
        self.mlp = MLP(model, dtype)

    def __call__(
        self, x: Float[Array, "B T D"], rotary: Angles, attend: Attend
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """See `DecoderLayer`."""
        attended, rows = self.self_attn(x, rotary, attend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), rows


class EagleHead(nnx.Module):
    """fc(embedding ‖ feature), one layer. HASS heads (arXiv 2408.15766) norm both inputs first."""

    def __init__(self, config: HeadConfig, dtype: Any):
        D, model = config.model.hidden_size, config.model
        self.config = config
        self.embed_tokens = Embedding(model.vocab_size, D, dtype) if config.own_embeddings else None
        self.embedding_layernorm = RMSNorm(D, model.rms_norm_eps, dtype) if config.input_norms else None
        self.hidden_states_layernorm = RMSNorm(D, model.rms_norm_eps, dtype) if config.input_norms else None
        self.fc = Linear(D, 2 * D, dtype, ("embed", None), config.fc_bias)
        self.layers = nnx.List([EagleLayer(config, dtype)])

    def fuse(self, taps: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """What the head's rows are built from: the feature itself."""
        return taps

    def __call__(
        self,
        embeddings: Float[Array, "B T D"],
        features: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        attend: Attend,
    ) -> tuple[Float[Array, "B T D"], Rows]:
        """Predicted features and the rows' keys and values."""
        if self.embedding_layernorm is not None and self.hidden_states_layernorm is not None:
            embeddings = self.embedding_layernorm(embeddings)
            features = self.hidden_states_layernorm(features)
        x = self.fc(jnp.concatenate([embeddings, features.astype(embeddings.dtype)], axis=-1))
        angles = rotary(self.config.model.rope, self.config.model.head_dim, positions)
        return self.layers[0](x, angles, attend)

    def logits(
        self, hidden: Float[Array, "*T D"], output_weight: Float[Array, "V D"]
    ) -> Float[Array, "*T V"]:
        """Next-token logits in the target's vocabulary, float32."""
        return matmul(hidden, output_weight, jnp.float32)
