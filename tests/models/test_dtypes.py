"""bfloat16 and float16: the same models with their weights cast, against `transformers` in the same dtype.

Two programs that round at different places differ by rounding errors and by nothing else. How large those are
is measured: the judge of both is `transformers` in float32 with the same cast weights, and ours may be no
further from it than `transformers` in 16 bits is (rotary embeddings, softmax sums and logits stay float32).
"""

import copy

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from models.families import VOCAB, build

# Those that compute differently; other kinds of rotary embedding differ in float32 constants only.
FAMILIES = (
    "llama2",
    "smollm2",
    "llama-yarn",
    "llama-dynamic",
    "llama-bias",
    "mistral",
    "qwen2-window",
    "qwen3",
)
ROWS, CHUNK = 3, 8
TOKENS = np.random.default_rng(1).integers(3, VOCAB, (ROWS, 2 * CHUNK))
EPSILON = {"bfloat16": 2**-8, "float16": 2**-11}  # half an ulp of 1
# Two runs of some thirty roundings each, at logits of up to 10, whose own half ulp is 4 to 8 epsilons: the
# largest difference among 4656 logits measures 44 to 112 epsilons, alike in both dtypes.
TOLERANCE = 160


def run_hf(hf) -> np.ndarray:
    with torch.no_grad():
        return hf(torch.tensor(TOKENS)).logits.float().numpy()


@pytest.mark.parametrize("dtype", EPSILON)
@pytest.mark.parametrize("name", FAMILIES)
def test_sixteen_bits(name, dtype):
    model = build(name, dtype)
    assert {value.dtype for value in model.params.values()} == {jnp.dtype(dtype)}
    assert {spec.dtype for spec in model.target.functional.specs.values()} == {jnp.dtype(dtype)}

    cache, parts = model.empty_cache(ROWS, 2 * CHUNK), []
    mask = np.broadcast_to(np.tril(np.ones((CHUNK, CHUNK), bool)), (ROWS, CHUNK, CHUNK))
    for start in (0, CHUNK):
        lengths = np.full(ROWS, start, np.int32)
        tokens = TOKENS[:, start : start + CHUNK].astype(np.int32)
        positions = lengths[:, None] + np.arange(CHUNK, dtype=np.int32)
        prompt_lengths = np.full(ROWS, 2 * CHUNK, np.int32)
        part, cache = model.forward(model.params, tokens, positions, cache, lengths, mask, prompt_lengths)
        parts.append(part)
    logits = np.concatenate(parts, axis=1)

    assert logits.dtype == np.float32
    assert {buffer.dtype for buffer in (*cache.keys, *cache.values)} == {jnp.dtype(dtype)}
    assert np.isfinite(logits).all()

    same_dtype = run_hf(model.hf)
    exact = run_hf(copy.deepcopy(model.hf).float())
    ours, theirs = logits - exact, same_dtype - exact
    assert ours.std() <= 1.25 * theirs.std()
    assert abs(logits - same_dtype).max() <= TOLERANCE * EPSILON[dtype]
