"""Rotary embeddings against those of `transformers`, and the golden llama3 target."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.loading import rename
from eagle_jax.models.config import ModelConfig, RopeConfig
from eagle_jax.models.decoder import TARGET_NAMES, Target
from eagle_jax.models.rope import inverse_frequencies, rotate
from eagle_jax.models.rope import rotary as eager_rotary
from models.families import COMPILE_FAST

rotary = jax.jit(eager_rotary, static_argnums=(0, 1), compiler_options=COMPILE_FAST)

GOLDEN = Path(__file__).parents[1] / "golden" / "rope_llama3"
HEAD_DIM = 64
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768, rope_theta=1000000.0)

# As released models have them, and the options that few of them use.
ROPES = {
    "default": dict(rope_type="default", rope_theta=10000.0),
    "linear": dict(rope_type="linear", factor=4.0, rope_theta=10000.0),  # Vicuna 1.5 16k
    "llama3.1": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "llama3.2": dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
        rope_theta=500000.0,
    ),
    "yarn": YARN,  # Qwen2.5
    "yarn-attention-factor": YARN | dict(attention_factor=0.8),
    "yarn-mscale": YARN | dict(mscale=0.707, mscale_all_dim=1.0),
    "yarn-mscale-alone": YARN | dict(mscale=0.707),  # both or none count
    "yarn-betas": YARN | dict(beta_fast=16.0, beta_slow=2.0),
    "yarn-not-truncated": YARN | dict(truncate=False),
    "yarn-one-pair-wide": YARN | dict(beta_fast=1.0, beta_slow=1.0, truncate=False),
    "yarn-shrinking": YARN | dict(factor=0.5),
    "dynamic": dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0),
}


def hf_config(name: str, max_positions: int = 131072) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=max_positions,
        rope_parameters=dict(ROPES[name]),
    )


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_and_scale(name):
    config = hf_config(name)
    rope = RopeConfig.from_hf(config.to_dict())
    expected = LlamaRotaryEmbedding(config)
    # A few units in the last place: powers of float32 are rounded differently by each library.
    np.testing.assert_allclose(inverse_frequencies(rope, HEAD_DIM), expected.inv_freq.numpy(), rtol=4e-7)
    assert rope.output_scale == pytest.approx(expected.attention_scaling, rel=1e-7)


@pytest.mark.parametrize("name", ROPES)
def test_cosines_and_sines(name):
    config = hf_config(name)
    positions = np.array([[0, 1, 2, 3, 100], [5, 4, 1000, 8191, 32000]])
    cosines, sines = rotary(RopeConfig.from_hf(config.to_dict()), HEAD_DIM, jnp.asarray(positions))
    assert cosines.dtype == sines.dtype == jnp.float32
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.tensor(positions))
    # A frequency's last place is worth 1e-7 of the angle.
    tolerance = np.maximum(1e-6, 4e-7 * positions)[:, :, None]
    for actual, theirs in zip((cosines, sines), expected, strict=True):
        assert (abs(np.asarray(actual) - theirs[..., : HEAD_DIM // 2].numpy()) <= tolerance).all()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 300])
def test_dynamic_depends_on_the_length(length):
    """A prefill of `length` tokens, then a single step."""
    config = hf_config("dynamic", max_positions=16)
    rope = RopeConfig.from_hf(config.to_dict())
    theirs = LlamaRotaryEmbedding(config)
    prompt = np.arange(length)[None]
    for positions in (prompt, np.array([[length]])):
        actual = rotary(rope, HEAD_DIM, jnp.asarray(positions), jnp.array([length]))
        expected = theirs(torch.zeros(1), torch.tensor(positions))
        for ours, other in zip(actual, expected, strict=True):
            np.testing.assert_allclose(ours, other[..., : HEAD_DIM // 2].numpy(), rtol=0, atol=1e-4)


def test_dynamic_knows_neither_chunks_nor_neighbours():
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=16)
    lengths = np.array([40, 3])
    positions = np.broadcast_to(np.arange(40), (2, 40))
    whole = rotary(rope, HEAD_DIM, positions, lengths)
    chunk = rotary(rope, HEAD_DIM, positions[:, 10:20], lengths)
    alone = rotary(rope, HEAD_DIM, positions[1:], lengths[1:])
    for all_at_once, part, row in zip(whole, chunk, alone, strict=True):
        np.testing.assert_allclose(np.asarray(all_at_once)[:, 10:20], part, rtol=0, atol=1e-6)
        np.testing.assert_allclose(np.asarray(all_at_once)[1:], row, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotation_pairs_dimensions_half_a_head_apart(dtype):
    x = np.random.default_rng(0).standard_normal((2, 5, 3, HEAD_DIM)).astype(np.float32)
    positions = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 5)))
    cosines, sines = rotary(RopeConfig(), HEAD_DIM, positions)
    rotated = rotate(jnp.asarray(x, dtype), cosines, sines)
    assert rotated.dtype == jnp.dtype(dtype)
    full = [torch.tensor(np.concatenate([part, part], axis=-1)) for part in (cosines, sines)]
    given = torch.tensor(np.asarray(jnp.asarray(x, dtype), np.float32)).transpose(1, 2)
    expected, _ = apply_rotary_pos_emb(given, given, *full)
    expected = expected.transpose(1, 2).numpy()
    # float32 inside, rounded once at the end: half an ulp of values below 8.
    tolerance = {"float32": 1e-6, "bfloat16": 4 * 2**-8, "float16": 4 * 2**-11}[dtype]
    np.testing.assert_allclose(np.asarray(rotated, np.float32), expected, rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "prefill.npz") as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def golden_config() -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / "target" / "config.json").read_text()))


def test_golden_frequencies(golden, golden_config):
    actual = inverse_frequencies(golden_config.rope, golden_config.head_dim)
    np.testing.assert_allclose(actual, golden["inv_freq"], rtol=1e-6)


def test_golden_prefill(golden, golden_config):
    """200 tokens in chunks: logits, and the hidden states that an EAGLE-3 head reads."""
    target, chunk = Target(golden_config, "float32"), 40
    params = {
        rename(name, TARGET_NAMES): jnp.asarray(value)
        for name, value in load_file(GOLDEN / "target" / "model.safetensors").items()
    }

    def forward(params, tokens, cache, start):
        decoder, positions = target.bind(params), start + jnp.arange(chunk)[None]
        mask = jnp.tril(jnp.ones((1, chunk, chunk), bool))
        out = decoder(tokens, positions, cache, start[None], mask, (2, 3, 4))
        return decoder.logits(out.hidden), out.taps, cache.commit(out.rows, start[None])

    forward = jax.jit(forward, compiler_options=COMPILE_FAST)
    tokens = golden["input_ids"].astype(np.int32)
    size = tokens.shape[1]
    cache = ContiguousCache.zeros(
        golden_config.num_layers, 1, golden_config.num_kv_heads, size, golden_config.head_dim, jnp.float32
    )
    logits, taps = [], []
    for start in range(0, size, chunk):
        out = forward(params, tokens[:, start : start + chunk], cache, np.int32(start))
        logits.append(out[0])
        taps.append(out[1])
        cache = out[2]
    np.testing.assert_allclose(np.concatenate(logits, axis=1), golden["logits"], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(np.concatenate(taps, axis=1), golden["aux_hidden"], rtol=1e-3, atol=1e-3)
