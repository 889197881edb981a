from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from eagle_jax.models import cpu
from eagle_jax.models.cpu import MAX_ROWS
from eagle_jax.models.cpu.matmul import matmul, matmul_many

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
