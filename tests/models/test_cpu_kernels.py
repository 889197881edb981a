"""The CPU kernels: right for any shape and dtype, and the bits of a row its own affair."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eagle_jax.models import cpu, rope
from eagle_jax.models.attention import attend
from eagle_jax.models.cpu import MAX_ROWS, pages
from eagle_jax.models.cpu.attention import attention
from eagle_jax.models.cpu.embedding import embedding
from eagle_jax.models.cpu.matmul import matmul, matmul_many
from eagle_jax.models.cpu.norm import rms_norm
from eagle_jax.models.cpu.pages import use_large_pages
from eagle_jax.models.cpu.rope import rotate

DTYPES = ["float32", "bfloat16", "float16"]


@pytest.fixture
def kernel():
    pytest.importorskip("numba")
    if not cpu.supported():
        pytest.skip("the kernel does not run on this machine")


def operands(rows, out, width, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, width)).astype(jnp.dtype(dtype))
    return x, rng.standard_normal((out, width)).astype(jnp.dtype(dtype))


def products_of(inputs, weight, dtype=None):
    return jax.jit(lambda inputs, w: [matmul(x, w, dtype) for x in inputs])(inputs, weight)


def traced(x, weight):
    return str(jax.make_jaxpr(lambda x, w: matmul(x, w))(x, weight))  # a new function: not traced before


def exact(x, weight):
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def bits(array):
    return np.asarray(array).view(np.uint32 if array.dtype == jnp.float32 else np.uint16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (5, 7), (13, 33), (577, 100), (600, 576), (48, 3072)])
def test_products_are_right_for_any_shape(kernel, dtype, out, width):
    x, weight = operands(MAX_ROWS, out, width, dtype)
    counts = (1, 2, 3, 4, 7, MAX_ROWS)
    products = products_of([x[:rows] for rows in counts], weight, jnp.float32)
    for rows, product in zip(counts, products, strict=True):
        assert product.shape == (rows, out)
        assert product.dtype == jnp.float32
        np.testing.assert_allclose(product, exact(x[:rows], weight), rtol=1e-5, atol=2e-6 * width)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out", "width"), [(600, 576), (577, 203)])
def test_bits_of_a_row_depend_on_that_row_only(kernel, dtype, out, width):
    x, weight = operands(32, out, width, dtype)
    parts = [(row, row + 1) for row in range(0, 32, 3)] + [
        (32 - rows, 32) for rows in (2, 3, 4, 5, 6, 7, 8, 13, 32)
    ]
    products = products_of([x[low:high] for low, high in parts], weight)
    together = products[-1]
    for (low, high), product in zip(parts, products, strict=True):
        assert product.dtype == x.dtype
        np.testing.assert_array_equal(bits(product), bits(together[low:high]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_how_the_weight_is_divided_among_threads(kernel, dtype):
    x, weight = operands(5, 4001, 576, dtype)
    run = jax.jit(matmul)
    whole = run(x, weight)
    for low, high in [(0, 1), (7, 18), (1000, 1013), (3990, 4001)]:  # too little work to share
        np.testing.assert_array_equal(bits(matmul(x, weight[low:high])), bits(whole[:, low:high]))
    for _ in range(20):
        np.testing.assert_array_equal(bits(run(x, weight)), bits(whole))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_results_are_rounded_to_nearest_even(kernel, dtype):
    x, weight = operands(4, 300, 70, dtype)
    np.testing.assert_array_equal(bits(matmul(x, weight)), bits(matmul(x, weight, jnp.float32).astype(dtype)))
    special = jnp.asarray([[jnp.inf, -jnp.inf, jnp.nan, -0.0, 0.0, 1.0, -1.5]], dtype).T
    one = jnp.ones((1, 1), dtype)
    np.testing.assert_array_equal(matmul(special, one).astype(jnp.float32), special.astype(jnp.float32))
    ties = jnp.asarray([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [1.0, 2.0**-11], [1.0, 3 * 2.0**-11]], dtype)
    expected = jnp.sum(ties.astype(jnp.float32), axis=1, keepdims=True).astype(dtype)
    np.testing.assert_array_equal(matmul(ties, jnp.ones((1, 2), dtype)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_weights_give_what_each_gives_alone(kernel, dtype):
    x, weight = operands(6, 900, 576, dtype)
    weights = [weight[:576], weight[576:768], weight[768:]]
    for together, w in zip(jax.jit(matmul_many)(x, weights), weights, strict=True):
        np.testing.assert_array_equal(bits(together), bits(matmul(x, w)))


def test_runs_inside_loops_and_branches(kernel):
    x, weight = operands(3, 576, 576)
    weight = weight / 24

    def step(x):
        return matmul(x, weight)

    expected = step(step(step(x)))
    _, looped = jax.jit(
        lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, step(c[1])), (0, x))
    )(x)
    np.testing.assert_array_equal(looped, expected)
    np.testing.assert_array_equal(
        jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, x: step(x), x))(x), expected
    )
    chosen = jax.jit(lambda p, x: lax.cond(p, lambda x: step(step(step(x))), lambda x: x, x))
    np.testing.assert_array_equal(chosen(True, x), expected)
    np.testing.assert_array_equal(chosen(False, x), x)


def test_concurrent_executions_do_not_disturb_each_other(kernel):
    x, weight = operands(8, 1500, 576)
    run = jax.jit(lambda x: lax.fori_loop(0, 20, lambda _, y: y + matmul(x, weight), jnp.zeros((8, 1500))))
    inputs = [x + i for i in range(8)]
    expected = [np.asarray(run(x)) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for result, alone in zip(pool.map(run, inputs * 3), expected * 3, strict=True):
            np.testing.assert_array_equal(result, alone)


def test_kernel_and_xla_agree(kernel, monkeypatch):
    x, weight = operands(4, 576, 192)
    ours = matmul(x, weight)
    assert "ffi_call" in traced(x, weight)
    monkeypatch.setenv("EAGLE_JAX_CPU_KERNEL", "0")
    assert not cpu.supported()
    assert "ffi_call" not in traced(x, weight)
    np.testing.assert_allclose(matmul(x, weight), ours, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "dtype"), [(MAX_ROWS + 1, "float32"), (0, "float32"), (2, "int8")], ids=["many", "none", "int8"]
)
def test_what_the_kernel_does_not_do_is_left_to_xla(rows, dtype):
    x, weight = jnp.ones((rows, 8), dtype), jnp.ones((5, 8), dtype)
    assert "ffi_call" not in traced(x, weight)
    np.testing.assert_array_equal(matmul(x, weight), np.full((rows, 5), 8, dtype))


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="expected x"):
        matmul(jnp.ones((2, 3)), jnp.ones((4, 5)))
    with pytest.raises(ValueError, match="expected weights in the dtype"):
        matmul(jnp.ones((2, 3)), jnp.ones((4, 3), jnp.bfloat16))


# ---------------------------------------------------------------- attention

ROUNDING = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}  # an ulp of values up to 2 and some


def attention_case(B=2, T=4, H=6, K=2, d=64, E=6, S=70, dtype="float32", seed=0):
    """Operands in which a token sees itself and a random choice of the rows before it; and their positions."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(dtype))

    mask = rng.random((B, T, E)) < 0.5
    mask[:, np.arange(T), np.arange(E - T, E)] = True
    lengths = rng.integers(0, S + 1, B).astype(np.int32)
    operands = [normal(B, T, H, d), normal(B, E, K, d), normal(B, E, K, d), mask]
    return [*operands, normal(B, K, S, d), normal(B, K, S, d), lengths]


def dense_attention(q, keys, values, mask, cache_keys, cache_values, lengths, first):
    """In float64, one token and head at a time."""
    q, keys, values, cache_keys, cache_values = (
        np.asarray(x, np.float64) for x in (q, keys, values, cache_keys, cache_values)
    )
    B, T, H, d = q.shape
    output = np.zeros(q.shape)
    for b, t, h in np.ndindex(B, T, H):
        k = h // (H // keys.shape[2])
        past = slice(max(first[b, t], 0), lengths[b])
        seen_keys = np.concatenate([cache_keys[b, k, past], keys[b, mask[b, t], k]])
        seen_values = np.concatenate([cache_values[b, k, past], values[b, mask[b, t], k]])
        scores = seen_keys @ q[b, t, h] / np.sqrt(d)
        weights = np.exp(scores - scores.max())
        output[b, t, h] = weights / weights.sum() @ seen_values
    return output


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        dict(B=1, T=1, H=9, K=3, E=1, S=256),
        dict(B=3, T=5, H=8, K=1, d=80, E=9, S=64),
        dict(B=1, T=7, H=4, K=4, d=128, E=7, S=33),
        dict(B=2, T=3, H=6, K=2, d=7, E=3, S=40),
        dict(B=2, T=2, H=2, K=1, d=20, E=5, S=3),
    ],
    ids=str,
)
def test_attention_is_right_for_any_shape(kernel, dtype, shape):
    operands = attention_case(dtype=dtype, **shape)
    for window in (None, 20):
        first = np.zeros(operands[3].shape[:2], np.int32)
        if window is not None:
            first += operands[-1][:, None] + np.arange(shape["T"]) - window + 1
        output = attention(*operands, first.astype(np.int32))
        assert output.dtype == dtype
        expected = dense_attention(*operands, first)
        np.testing.assert_allclose(
            np.asarray(output, np.float64), expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_node_is_that_of_a_step_of_its_own(kernel, dtype):
    """A tree of two branches against steps of one token, each with its ancestors in the cache."""
    q, keys, values, _, cache_keys, cache_values, _ = attention_case(B=1, T=6, E=6, S=90, dtype=dtype)
    parents = [-1, 0, 0, 1, 3, 2]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    mask = np.zeros((1, 6, 6), bool)
    for node, path in enumerate(paths):
        mask[0, node, path] = True
    step = jax.jit(attention)
    for length, first in [(0, 0), (17, 0), (80, 0), (80, 41)]:
        lengths, starts = np.full(1, length, np.int32), np.full((1, 6), first, np.int32)
        tree = step(q, keys, values, mask, cache_keys, cache_values, lengths, starts)
        for node, path in enumerate(paths):
            committed, own = np.array(cache_keys), np.array(cache_values)
            for i, ancestor in enumerate(path[:-1]):
                committed[:, :, length + i] = keys[:, ancestor]
                own[:, :, length + i] = values[:, ancestor]
            one = slice(node, node + 1)
            lengths = np.full(1, length + len(path) - 1, np.int32)
            alone = step(
                q[:, one],
                keys[:, one],
                values[:, one],
                np.ones((1, 1, 1), bool),
                committed,
                own,
                lengths,
                starts[:, :1],
            )
            np.testing.assert_array_equal(bits(alone)[0, 0], bits(tree)[0, node])


def test_attention_bits_do_not_depend_on_threads(kernel):
    operands = attention_case(B=4, T=4, H=9, K=3, S=700)
    run = jax.jit(attention)
    first = np.zeros((4, 4), np.int32)
    expected = bits(run(*operands, first))
    for _ in range(20):
        np.testing.assert_array_equal(bits(run(*operands, first)), expected)
    for b in range(4):
        alone = run(*(x[b : b + 1] for x in (*operands, first)))
        np.testing.assert_array_equal(bits(alone)[0], expected[b])


def test_attention_passes_on_what_is_not_a_number(kernel):
    q, *rest = attention_case(B=1, T=2, S=8)
    q[0, 1, 0, 3] = np.nan
    output = np.asarray(attention(q, *rest, np.zeros((1, 2), np.int32)))
    assert np.isnan(output[0, 1, 0]).all()
    assert np.isfinite(output[0, 0]).all()
    assert np.isfinite(output[0, 1, 1:]).all()


def test_models_use_the_kernels_for_one_cpu_only(kernel):
    from eagle_jax.models.kernels import kernels_for
    from eagle_jax.parallel.mesh import MeshShape, make_mesh

    operands = attention_case(B=1, T=2, E=2)
    positions = operands[-1][:, None] + np.arange(2)

    def traced(shape):
        with kernels_for(make_mesh(shape)):
            return str(jax.make_jaxpr(lambda *a: attend(*a, positions))(*operands))  # not traced before

    assert "ffi_call" in traced(MeshShape())
    assert "ffi_call" not in traced(MeshShape(data=2))
    assert "ffi_call" not in str(jax.make_jaxpr(lambda *a: attend(*a, positions))(*operands))


# ---------------------------------------------------------------- norm, rope, embeddings


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 577), (7, 5), (150, 1000)])
def test_norm_is_right_for_any_shape(kernel, dtype, shape):
    rng = np.random.default_rng(0)
    x, weight = (3 * rng.standard_normal(s).astype(jnp.dtype(dtype)) for s in (shape, shape[1:]))
    wide = np.asarray(x, np.float64)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    output = rms_norm(x, weight, 1e-5)
    assert output.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(output, np.float64),
        normed * np.asarray(weight, np.float64),
        rtol=2 * ROUNDING[dtype],
        atol=1e-6,
    )
    for row in (0, shape[0] - 1):
        np.testing.assert_array_equal(bits(rms_norm(x[row : row + 1], weight, 1e-5))[0], bits(output)[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 9, 64), (2, 5, 3, 20), (1, 1, 1, 2), (1, 200, 9, 80)])
def test_rotation_is_that_of_the_plain_code(kernel, dtype, shape):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    angles = rng.standard_normal((*shape[:2], shape[3] // 2)).astype(np.float32)
    output = rotate(x, np.cos(angles), np.sin(angles))
    expected = rope.rotate(jnp.asarray(x), np.cos(angles), np.sin(angles))
    assert output.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(output, np.float64),
        np.asarray(expected, np.float64),
        rtol=ROUNDING[dtype],
        atol=ROUNDING[dtype],
    )
    last = rotate(x[:, -1:], np.cos(angles[:, -1:]), np.sin(angles[:, -1:]))
    np.testing.assert_array_equal(bits(last), bits(output)[:, -1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_rows_of_the_table(kernel, dtype):
    table = np.random.default_rng(0).standard_normal((11, 37)).astype(jnp.dtype(dtype))
    tokens = np.asarray([3, 0, 10, 3, -1, 11], np.int32)
    np.testing.assert_array_equal(bits(embedding(table, tokens)), bits(table[[3, 0, 10, 3, 0, 10]]))


@pytest.mark.parametrize("refusals", [0, 1])
def test_large_pages_are_asked_for_around_an_array_or_within_it(monkeypatch, refusals):
    asked, page = [], 2 << 20

    def madvise(begin, size, advice):
        asked.append((begin, size, advice))
        return -(advice == 25 and sum(a == 25 for *_, a in asked) <= refusals)

    monkeypatch.setattr(pages.sys, "platform", "linux")
    monkeypatch.setattr(pages.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(madvise=madvise))
    array = jnp.zeros((3000, 1000))
    begin = array.unsafe_buffer_pointer()
    end = begin + array.nbytes
    use_large_pages([jnp.zeros(8), array])
    assert [advice for *_, advice in asked] == [14, 25] * (1 + refusals)
    assert all(place % page == size % page == 0 for place, size, _ in asked)
    outer, inner = asked[0], asked[-1]
    assert outer[0] <= begin
    assert end <= outer[0] + outer[1] < end + page
    if refusals:
        assert begin <= inner[0] < inner[0] + inner[1] <= end


def test_large_pages_change_no_value():
    table = np.random.default_rng(0).standard_normal((3000, 1000)).astype(np.float32)
    arrays = [jnp.asarray(table), jnp.asarray(table[:7]), jnp.asarray(table[:2500])]
    use_large_pages(arrays)
    for array, rows in zip(arrays, (3000, 7, 2500), strict=True):
        np.testing.assert_array_equal(array, table[:rows])
