"""Attention by parts against one dense softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.models import attention
from eagle_jax.models.attention.xla import BLOCK
from models.families import COMPILE_FAST

prefix_xla = jax.jit(attention.prefix_xla, compiler_options=COMPILE_FAST)
attend = jax.jit(attention.attend, compiler_options=COMPILE_FAST)

HEAD_DIM = 8
# float32 rounds sums of a few hundred terms. In 16 bits the reference reads the same rounded inputs: what is
# left is the rounding of scaled queries, softmax weights and the result, half an ulp of values up to 4.
TOLERANCES = {"float32": 2e-6, "bfloat16": 4 * 2**-8, "float16": 4 * 2**-11}
DTYPES = tuple(TOLERANCES)


def softmax_attention(q, keys, values, visible):
    """Dense, in float64: q [R, d], keys and values [S, d], visible [R, S]. Rows that see nothing are zero."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    scores = np.where(visible, q @ keys.T, -np.inf)
    with np.errstate(divide="ignore"):
        lse = np.log(np.exp(scores).sum(axis=-1))
    weights = np.exp(scores - np.where(np.isinf(lse), 0, lse)[:, None])
    return weights @ values, lse


def random(seed: int, *shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def filled(x: np.ndarray, where: np.ndarray, value: float) -> np.ndarray:
    """x with `value` wherever `where` says."""
    return np.where(where, np.asarray(value, x.dtype), x)


def prefix_case(seed, lengths, capacity, rows=6, heads=2, dtype="float32"):
    B = len(lengths)
    shape = (B, heads, capacity, HEAD_DIM)
    return random(seed, (B, heads, rows, HEAD_DIM), shape, shape, dtype=dtype)


def check_prefix(q, keys, values, lengths, first=None, tolerance=TOLERANCES["float32"]):
    output, lse = map(np.asarray, prefix_xla(q, keys, values, np.asarray(lengths), first))
    assert output.dtype == lse.dtype == np.float32
    index = np.arange(keys.shape[2])
    for b, length in enumerate(lengths):
        visible = np.broadcast_to(index < length, (q.shape[2], len(index)))
        if first is not None:
            visible = visible & (index >= np.asarray(first)[b][:, None])
        for k in range(q.shape[1]):
            expected, expected_lse = softmax_attention(q[b, k], keys[b, k], values[b, k], visible)
            np.testing.assert_allclose(output[b, k], expected, rtol=0, atol=tolerance)
            np.testing.assert_allclose(lse[b, k], expected_lse, rtol=1e-6, atol=tolerance)
    return output, lse


class TestPrefix:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_of_unequal_lengths(self, dtype):
        lengths = [5, 16, 1]
        check_prefix(*prefix_case(0, lengths, 16, dtype=dtype), lengths, tolerance=TOLERANCES[dtype])

    def test_an_empty_prefix_is_zero_with_weight_zero(self):
        output, lse = check_prefix(*prefix_case(1, [0, 3, 16], 16), [0, 3, 16])
        assert not output[0].any()
        assert np.isneginf(lse[0]).all()
        assert np.isfinite(lse[1]).all()

    def test_a_window_hides_early_rows_of_each_query(self):
        lengths = [20, 9]
        first = np.array([[-3, 0, 4, 15, 19, 20], [0, 1, 8, 9, 12, 40]])  # the last of each row see nothing
        output, lse = check_prefix(*prefix_case(2, lengths, 24), lengths, first)
        assert np.isneginf(lse[0, :, 5]).all()
        assert np.isneginf(lse[1, :, 3:]).all()
        assert np.isfinite(output).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_rows_beyond_the_length_are_never_seen(self, dtype):
        lengths = np.array([5, 0, 12])
        q, keys, values = prefix_case(3, lengths, 16, dtype=dtype)
        beyond = (np.arange(16) >= lengths[:, None])[:, None, :, None]
        huge = float(jnp.finfo(dtype).max) / 4
        clean = prefix_xla(q, keys, values, lengths)
        dirty = prefix_xla(q, filled(keys, beyond, huge), filled(values, beyond, -huge), lengths)
        for expected, actual in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(actual, expected)

    def test_scores_may_be_large(self):
        """Without the maximum taken out, exp(±2000) would be infinite or nothing at all."""
        q, keys, values = prefix_case(4, [16, 7, 3], 16)
        for sign in (1, -1):
            shifted = keys + sign * np.float32(1000) * (np.arange(HEAD_DIM) == 0)
            output, lse = prefix_xla(q, shifted.astype(np.float32), values, np.array([16, 7, 3]))
            assert np.isfinite(output).all()
            assert np.isfinite(lse).all()


class TestLongPrefix:
    """Beyond two blocks the cache is read block by block."""

    CAPACITY = 2 * BLOCK + 200  # the last block overlaps the one before it
    LENGTHS = (0, 1, BLOCK, BLOCK + 1, 2 * BLOCK - 7, 2 * BLOCK + 200)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_equals_one_softmax(self, dtype):
        case = prefix_case(5, self.LENGTHS, self.CAPACITY, rows=3, dtype=dtype)
        check_prefix(*case, self.LENGTHS, tolerance=TOLERANCES[dtype])

    def test_equals_the_same_rows_in_a_short_cache(self):
        lengths = np.array([3, 700, 1000])
        q, keys, values = prefix_case(6, lengths, self.CAPACITY)
        short = 2 * BLOCK
        blocks = prefix_xla(q, keys, values, lengths)
        at_once = prefix_xla(q, keys[:, :, :short], values[:, :, :short], lengths)
        for actual, expected in zip(blocks, at_once, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6)

    def test_a_window_may_leave_whole_blocks_empty(self):
        lengths = [self.CAPACITY, 2 * BLOCK, 40]
        first = np.array([[1100, 1200, 0], [BLOCK, BLOCK - 1, 2 * BLOCK], [39, 40, -5]])
        check_prefix(*prefix_case(7, lengths, self.CAPACITY, rows=3), lengths, first)

    def test_rows_beyond_the_length_are_never_seen(self):
        lengths = np.array([5, BLOCK + 3, 2 * BLOCK + 1])
        q, keys, values = prefix_case(8, lengths, self.CAPACITY)
        beyond = (np.arange(self.CAPACITY) >= lengths[:, None])[:, None, :, None]
        clean = prefix_xla(q, keys, values, lengths)
        dirty = prefix_xla(q, filled(keys, beyond, 1e38), filled(values, beyond, -1e38), lengths)
        for expected, actual in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(actual, expected)

    def test_reads_no_further_than_the_longest_sequence(self):
        """A whole block that no sequence reaches is not even loaded: NaN there would show."""
        lengths = np.array([10, 7, BLOCK])
        q, keys, values = prefix_case(9, lengths, self.CAPACITY)
        unread = (np.arange(self.CAPACITY) >= BLOCK)[:, None]
        clean = prefix_xla(q, keys, values, lengths)
        dirty = prefix_xla(q, filled(keys, unread, np.nan), filled(values, unread, np.nan), lengths)
        for expected, actual in zip(clean, dirty, strict=True):
            np.testing.assert_array_equal(actual, expected)


B, T, H, K, CAPACITY = 3, 5, 6, 2, 24
PREFIXES = np.array([0, 7, 24])
TREE = np.array([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 1, 0, 1, 1]], bool)
DEPTHS = np.array([0, 1, 1, 2, 3])


def attend_case(seed, dtype="float32", earlier=0, heads=H):
    new, old = (B, T + earlier, K, HEAD_DIM), (B, K, CAPACITY, HEAD_DIM)
    return random(seed, (B, T, heads, HEAD_DIM), new, new, old, old, dtype=dtype)


def check_attend(
    q, keys, values, cache_keys, cache_values, mask, window=None, tolerance=TOLERANCES["float32"]
):
    """Against one softmax over the cached and the new rows of each head."""
    positions = PREFIXES[:, None] + DEPTHS
    masks = np.broadcast_to(mask, (B, *mask.shape))
    key_positions = None if window is None else positions
    output = np.asarray(
        attend(q, keys, values, masks, cache_keys, cache_values, PREFIXES, positions, window, key_positions)
    )
    assert output.dtype == q.dtype
    assert output.shape == q.shape
    for b, length in enumerate(PREFIXES):
        visible = np.concatenate([np.ones((T, length), bool), mask], axis=1)
        if window is not None:
            visible &= np.concatenate([np.arange(length), positions[b]]) > positions[b][:, None] - window
        for head in range(q.shape[2]):
            k = head // (q.shape[2] // K)  # neighbouring heads share a KV head
            all_keys, all_values = (
                np.concatenate(
                    [np.asarray(cache[b, k, :length], np.float64), np.asarray(new[b, :, k], np.float64)]
                )
                for cache, new in ((cache_keys, keys), (cache_values, values))
            )
            query = np.asarray(q[b, :, head], np.float64) / np.sqrt(HEAD_DIM)
            expected, _ = softmax_attention(query, all_keys, all_values, visible)
            np.testing.assert_allclose(
                np.asarray(output[b, :, head], np.float64), expected, rtol=0, atol=tolerance
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [K, H])
def test_attend_is_one_softmax(dtype, heads):
    check_attend(*attend_case(10, dtype, heads=heads), TREE, tolerance=TOLERANCES[dtype])


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 100])
def test_attend_under_a_window(window):
    """Windows shorter than the tree is deep cut among the new rows too; one of 1 leaves each token itself."""
    check_attend(*attend_case(11), TREE, window)


def test_attend_with_rows_of_earlier_passes():
    """More new rows than queries: the upper levels of a draft tree."""
    earlier = np.random.default_rng(12).random((T, 4)) < 0.5
    mask = np.concatenate([earlier, np.eye(T, dtype=bool)], axis=1)
    check_attend(*attend_case(12, earlier=4), mask)


def test_attend_ignores_garbage_behind_the_length():
    q, keys, values, cache_keys, cache_values = attend_case(13)
    beyond = (np.arange(CAPACITY) >= PREFIXES[:, None])[:, None, :, None]
    check_attend(q, keys, values, filled(cache_keys, beyond, 1e38), filled(cache_values, beyond, -1e38), TREE)
