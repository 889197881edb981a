"""Logits agree with `transformers` in float32, for every family and every way of running a model.

All passes run three rows of unequal lengths, right-padded; the judge is each row's own run in `transformers`.
"""

from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.draft_tree import ancestor_mask
from eagle_jax.models.config import REQUIRED, ModelConfig
from models.families import FAMILIES, VOCAB, Model, build, hf_config

TOLERANCE = 1e-4
LENGTHS = np.array([24, 17, 9])  # of the prompts; the limit of llama-dynamic is 12
CHUNK, STEPS, CAPACITY = 8, 7, 40
PARENTS = np.array([0, 0, 0, 1, 1, 2, 3, 6])  # eight nodes, four levels below the root
PATHS = ([0, 1, 4], [0, 2, 5], [0, 1, 3, 6, 7])  # to every leaf
DEPTHS = np.array([0, 1, 1, 2, 2, 2, 3, 4])

BATCH = len(LENGTHS)
_random = np.random.default_rng(0)
PROMPTS = _random.integers(3, VOCAB, (BATCH, max(LENGTHS)))  # what stands behind a length is garbage
CONTINUATIONS = _random.integers(3, VOCAB, (BATCH, STEPS))
NODES = _random.integers(3, VOCAB, (BATCH, len(PARENTS)))


@dataclass(frozen=True)
class Run:
    """One model with its prompts taken in."""

    model: Model

    def forward(self, tokens, cache, lengths, mask, depths=None):
        T = tokens.shape[1]
        positions = lengths[:, None] + (np.arange(T) if depths is None else depths)
        logits, cache = self.model.forward(
            self.model.params,
            jnp.asarray(tokens, jnp.int32),
            jnp.asarray(positions, jnp.int32),
            cache,
            jnp.asarray(lengths, jnp.int32),
            jnp.broadcast_to(mask, (BATCH, T, T)),
            jnp.asarray(LENGTHS, jnp.int32),
        )
        return np.asarray(logits), cache

    @cached_property
    def prefilled(self) -> tuple[np.ndarray, ContiguousCache]:
        """Logits and cache after prefill in chunks."""
        cache, parts = self.model.empty_cache(BATCH, CAPACITY), []
        for start in range(0, PROMPTS.shape[1], CHUNK):
            part, cache = self.forward(
                PROMPTS[:, start : start + CHUNK], cache, np.full(BATCH, start), causal(CHUNK)
            )
            parts.append(part)
        return np.concatenate(parts, axis=1), cache

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """For each row the logits of its prompt and of its continuation."""
        return [
            self.model.hf_logits(PROMPTS[row, : LENGTHS[row]], CONTINUATIONS[row]) for row in range(BATCH)
        ]


def causal(size: int) -> np.ndarray:
    return np.tril(np.ones((size, size), bool))


@pytest.fixture(scope="module", params=FAMILIES)
def run(request) -> Run:
    return Run(build(request.param))


def agree(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


def test_checkpoint_names_fill_the_decoder(run):
    specs = run.model.target.functional.specs
    assert {name: spec.shape for name, spec in specs.items()} == {
        name: value.shape for name, value in run.model.params.items()
    }


def test_the_models_are_worth_comparing(run):
    logits = np.concatenate(run.expected)
    assert logits.std() > 1.5
    assert abs(logits).max() < 50


def test_whole_prefill(run):
    size = PROMPTS.shape[1]
    logits, _ = run.forward(
        PROMPTS, run.model.empty_cache(BATCH, CAPACITY), np.zeros(BATCH, int), causal(size)
    )
    for row, length in enumerate(LENGTHS):
        agree(logits[row, :length], run.expected[row][:length])


def test_prefill_in_chunks(run):
    logits, _ = run.prefilled
    for row, length in enumerate(LENGTHS):
        agree(logits[row, :length], run.expected[row][:length])


def test_decoding_token_by_token(run):
    _, cache = run.prefilled
    for step in range(STEPS):
        logits, cache = run.forward(CONTINUATIONS[:, step : step + 1], cache, LENGTHS + step, causal(1))
        for row, length in enumerate(LENGTHS):
            agree(logits[row, 0], run.expected[row][length + step])


def test_a_tree_in_one_pass_is_its_paths_one_by_one(run):
    _, cache = run.prefilled
    mask = ancestor_mask(jnp.asarray(PARENTS)[None], max(DEPTHS))
    logits, _ = run.forward(NODES, cache, LENGTHS, mask, DEPTHS)
    for row, length in enumerate(LENGTHS):
        for path in PATHS:
            expected = run.model.hf_logits(PROMPTS[row, :length], NODES[row, path])
            agree(logits[row, path], expected[length:])


def test_windows_are_read():
    windows = {name: ModelConfig.from_hf(hf_config(name).to_dict()).windows for name in FAMILIES}
    assert windows.pop("mistral") == (4, 4)
    assert windows.pop("qwen2-window") == (None, 6, 6)
    assert set(windows.values()) == {(None,) * 2}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_generations_of_configs_say_the_same(name, key):
    new = hf_config(name).to_dict()
    old = {k: v for k, v in new.items() if k not in ("rope_parameters", "layer_types")}
    rope = dict(new["rope_parameters"])
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    old["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    assert ModelConfig.from_hf(old) == ModelConfig.from_hf(new)


@pytest.mark.parametrize("name", FAMILIES)
def test_absent_keys_mean_what_transformers_takes_them_for(name):
    kind, overrides = FAMILIES[name]
    hf = hf_config(name)
    given = {key: getattr(hf, key) for key in (*REQUIRED, "num_key_value_heads", "max_position_embeddings")}
    given |= {key: overrides[key] for key in ("use_sliding_window", "attention_bias") if key in overrides}
    for extra in ({}, {"sliding_window": 6}, {"sliding_window": None}):
        sparse = given | extra | {"model_type": hf.model_type}
        ends = dict(bos_token_id=None, eos_token_id=None)  # there, defaults of one released tokenizer
        full = kind(**given | extra, **ends).to_dict()
        assert ModelConfig.from_hf(sparse) == ModelConfig.from_hf(full)
