"""What the training-time test computes is what decoding will: each step against the drafter's own passes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import head

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.models.attention import OverCache
from eagle_jax.training import unroll
from eagle_jax.training.unroll import shift_left, teacher_forced, training_time_test

T, LENGTH, SEED = 13, 4, 5


def inputs(name="eagle3/head", method="eagle3", T=T):
    loaded = head(name, method)
    module = loaded.functional.bind(loaded.params.head)
    rng = np.random.default_rng(SEED)
    tokens = jnp.asarray(rng.integers(3, 199, (1, T)), jnp.int32)
    width = 192 if method == "eagle3" else 64
    taps = jnp.asarray(rng.standard_normal((1, T, width)), jnp.float32)
    return loaded, module, tokens, taps


def one_document(tokens):
    return jnp.zeros_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)


def unrolled(module, loaded, tokens, taps, segments, positions, length=LENGTH, **options):
    @jax.jit
    def run(tokens, taps, segments, positions):
        return training_time_test(
            module, loaded.params.embeddings, tokens, taps, segments, positions, length, **options
        )

    return run(tokens, taps, segments, positions)


def incremental(module, loaded, tokens, taps, slot):
    """States of a draft that runs from `slot`: the stable rows in a cache, then one token a pass."""
    model, embeddings = module.config.model, loaded.params.embeddings
    cache = ContiguousCache.zeros(1, 1, model.num_kv_heads, 32, model.head_dim, jnp.float32)
    count = slot + 1
    positions = jnp.arange(count)[None]
    causal = jnp.tril(jnp.ones((1, count, count), bool))
    hidden, rows = module(
        jnp.take(embeddings, tokens[:, 1 : count + 1], axis=0),
        module.fuse(taps[:, :count]),
        positions,
        OverCache(cache.layer(0), jnp.zeros((1,), jnp.int32), causal, positions),
    )
    cache = cache.commit([rows], jnp.zeros((1,), jnp.int32))
    outputs, state, memory = [hidden[:, -1]], hidden[:, -1:], None
    for i in range(1, LENGTH):
        positions = jnp.full((1, 1), slot + i)
        seen = jnp.ones((1, 1, i), bool)
        state, rows = module(
            jnp.take(embeddings, tokens[:, slot + 1 + i][:, None], axis=0),
            state,
            positions,
            OverCache(cache.layer(0), jnp.full((1,), count, jnp.int32), seen, positions, earlier=memory),
        )
        outputs.append(state[:, 0])
        memory = (
            rows
            if memory is None
            else tuple(jnp.concatenate(pair, axis=1) for pair in zip(memory, rows, strict=True))
        )
    return outputs


@pytest.mark.parametrize("slot", [0, 3, T - LENGTH - 1])
def test_steps_are_those_of_incremental_decoding(slot):
    loaded, module, tokens, taps = inputs()
    outputs = unrolled(module, loaded, tokens, taps, *one_document(tokens))
    for ours, expected in zip(outputs, incremental(module, loaded, tokens, taps, slot), strict=True):
        logits, decoded = module.logits(ours[:, slot]), module.logits(expected)
        np.testing.assert_allclose(logits, decoded, atol=1e-4, rtol=0)


def test_packed_documents_are_as_if_alone():
    loaded, module, tokens, taps = inputs(T=24)
    cuts = [(0, 7), (7, 18), (18, 24)]
    segments = jnp.asarray(np.repeat([0, 1, 2], [b - a for a, b in cuts]))[None]
    positions = jnp.concatenate([jnp.arange(b - a) for a, b in cuts])[None]
    packed = unrolled(module, loaded, tokens, taps, segments, positions)
    for a, b in cuts:
        own, states = tokens[:, a:b], taps[:, a:b]
        alone = unrolled(module, loaded, own, states, *one_document(own))
        for i in range(LENGTH):
            last = b - a - 1 - i  # later slots read tokens past the document
            np.testing.assert_allclose(
                packed[i][:, a : a + last], alone[i][:, :last], atol=2e-5, rtol=1e-5, err_msg=f"{(a, b)} {i}"
            )


@pytest.mark.parametrize("options", [dict(remat=True), dict()], ids=["remat", "blocks"])
def test_saving_memory_changes_nothing(options, monkeypatch):
    loaded, module, tokens, taps = inputs(T=21)
    expected = unrolled(module, loaded, tokens, taps, *one_document(tokens))
    if not options:
        monkeypatch.setattr(unroll, "QUERY_BLOCK", 8)
    for ours, plain in zip(
        unrolled(module, loaded, tokens, taps, *one_document(tokens), **options), expected, strict=True
    ):
        np.testing.assert_allclose(ours, plain, atol=1e-5, rtol=1e-5)


def test_steps_beyond_the_sequence_are_harmless():
    loaded, module, tokens, taps = inputs(T=3)
    outputs = unrolled(module, loaded, tokens, taps, *one_document(tokens), length=6)
    assert all(np.isfinite(x).all() for x in outputs)


def test_an_eagle1_head_sees_the_past_only():
    loaded, module, tokens, taps = inputs("eagle1/head_bias", "eagle")
    run = jax.jit(lambda t, f: teacher_forced(module, loaded.params.embeddings, t, f, *one_document(tokens)))
    expected = run(tokens, taps)
    changed = run(tokens.at[0, 8].set(5), taps.at[0, 7].set(0.0))
    np.testing.assert_array_equal(changed[:, :7], expected[:, :7])
    assert np.abs(changed[:, 7:] - expected[:, 7:]).max() > 1e-3


def test_shifts():
    x = jnp.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(shift_left(x, 1), [[1, 2, 0], [4, 5, 0]])
    np.testing.assert_array_equal(shift_left(x, 5), np.zeros((2, 3)))
