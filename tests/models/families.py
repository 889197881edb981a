"""Tiny random models of every family, built with `transformers`, and the same weights in our decoder.

Every parameter is random, norms and biases too: at their initial ones and zeros a bias left out or two norms
exchanged would not show. Scales are such that attention is peaked and logits spread over several units.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.loading import rename
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import TARGET_NAMES, Target

VOCAB = 97
# LLVM's optimizations take longer than everything else that is done with such tiny models.
COMPILE_FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
torch.set_num_threads(1)  # more threads only wait for each other at this size

SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=32)

# With 8 dimensions a head and these bases, the frequencies fall on every branch of llama3's and yarn's ramps.
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama2": (LlamaConfig, dict(num_key_value_heads=4)),
    "llama3": (
        LlamaConfig,
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=100.0,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
    ),
    "smollm2": (
        LlamaConfig,
        dict(
            hidden_size=24,
            num_attention_heads=3,
            num_key_value_heads=1,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=100000.0),
        ),
    ),
    "vicuna": (
        LlamaConfig,
        dict(num_key_value_heads=4, rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    ),
    "llama-yarn": (LlamaConfig, dict(rope_parameters=YARN)),
    "llama-yarn-mscale": (
        LlamaConfig,
        dict(
            rope_parameters=YARN
            | dict(mscale=0.707, mscale_all_dim=1.5, beta_fast=4.0, beta_slow=0.5, truncate=False)
        ),
    ),
    "llama-dynamic": (
        LlamaConfig,
        dict(
            max_position_embeddings=12,
            rope_parameters=dict(rope_type="dynamic", rope_theta=10000.0, factor=3.0),
        ),
    ),
    "llama-bias": (LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "mistral": (MistralConfig, dict(sliding_window=4)),  # below the depth of the tree that is verified
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2-window": (
        Qwen2Config,
        dict(num_hidden_layers=3, use_sliding_window=True, sliding_window=6, max_window_layers=1),
    ),
    "qwen3": (Qwen3Config, dict(head_dim=16)),
}


@dataclass(frozen=True)
class Model:
    """One model twice: as `transformers` runs it and as we do."""

    hf: Any
    target: Target
    params: dict[str, jax.Array]

    @functools.cached_property
    def forward(self) -> Any:
        """Jitted: tokens and where they stand to logits and the cache with their rows."""
        return jax.jit(functools.partial(_forward, self.target), compiler_options=COMPILE_FAST)

    def empty_cache(self, batch: int, capacity: int) -> ContiguousCache:
        config = self.target.config
        dtype = jnp.dtype(self.target.dtype)
        return ContiguousCache.zeros(
            config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim, dtype
        )

    def hf_logits(self, prompt: np.ndarray, continuation: Sequence[int] = ()) -> np.ndarray:
        """What `transformers` computes for one sequence: a prefill, then single steps with its own cache."""
        # A short call takes back what `dynamic` remembers of the longest sequence so far.
        self.hf.model.rotary_emb(torch.zeros(1), torch.zeros((1, 1), dtype=torch.long))
        name = "cache" if "cache" in inspect.signature(self.hf.forward).parameters else "past_key_values"
        with torch.no_grad():
            out = self.hf(torch.tensor(prompt[None]), use_cache=True)
            logits = [out.logits[0]]
            for token in continuation:
                out = self.hf(torch.tensor([[int(token)]]), use_cache=True, **{name: out[name]})
                logits.append(out.logits[0])
        return torch.cat(logits).float().numpy()


def hf_config(name: str) -> Any:
    kind, overrides = FAMILIES[name]
    return kind(**SHAPE | overrides)


@functools.cache
def build(name: str, dtype: str = "float32") -> Model:
    config = hf_config(name)
    kind = getattr(torch, dtype)
    # As loading a checkpoint does, this keeps rotary frequencies in float32; `.to(dtype)` would round them.
    hf = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for path, parameter in hf.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in path:
                parameter.copy_(1 + 0.3 * noise)
            elif path.startswith(("model.embed_tokens", "lm_head")) or path.endswith("bias"):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.5 * noise / parameter.shape[1] ** 0.5)
    target = Target(ModelConfig.from_hf(config.to_dict()), dtype)
    params = {}
    for path, tensor in hf.state_dict().items():
        renamed = rename(path, TARGET_NAMES)
        if renamed is not None and not (config.tie_word_embeddings and path == "lm_head.weight"):
            params[renamed] = jnp.asarray(tensor.float().numpy(), jnp.dtype(dtype))
    return Model(hf, target, params)


def _forward(target, params, tokens, positions, cache, lengths, mask, prompt_lengths):
    decoder = target.bind(params)
    out = decoder(tokens, positions, cache, lengths, mask, prompt_lengths=prompt_lengths)
    return decoder.logits(out.hidden), cache.commit(out.rows, lengths)
