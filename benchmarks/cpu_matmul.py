"""Time products of M rows with a small model's weights on this CPU: XLA's and eagle_jax.models.cpu's.

    python benchmarks/cpu_matmul.py --rows 1 4 8 --layers 24

Prints milliseconds for each set of matrices, medians of runs that take turns, and each kernel's price against
XLA's float32 at the same number of rows. Weights come from memory when a set is larger than the last cache.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
from jax import lax

from eagle_jax.models import cpu
from eagle_jax.models.cpu.matmul import matmul


def xla_matmul(x, weight):
    """What the models run without the kernel: the weight first."""
    return lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32).T.astype(
        x.dtype
    )


def chain(product):
    """Apply the weights one after the other, as layers do, so that none can run beside the next."""

    @jax.jit
    def run(x, weights):
        for weight in weights:
            x = product(x, weight) * jnp.asarray(0.05, x.dtype)
        return x

    return run


def times(calls: dict, repeats: int) -> dict:
    """Median milliseconds of each call; they take turns, so that a busy moment meets all of them."""
    for call in calls.values():
        call()
    seen = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seen[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in seen.items()}


def table(
    title: str, shapes: list[tuple[int, int]], rows: list[int], dtypes: list[str], repeats: int
) -> None:
    """Print one line for each number of rows."""
    key = jax.random.key(0)
    weights = [jax.random.normal(jax.random.fold_in(key, i), s, jnp.float32) for i, s in enumerate(shapes)]
    weights = {dtype: [w.astype(dtype) for w in weights] for dtype in dtypes}
    xla, kernel = chain(xla_matmul), chain(matmul)
    names = ["xla float32", *(f"kernel {dtype}" for dtype in dtypes)]
    print(f"\n{title}: milliseconds (and price against xla float32)")
    print("rows  " + "".join(f"{name:>22}" for name in names), flush=True)
    for m in rows:
        x = jax.random.normal(key, (m, shapes[0][1]), jnp.float32)

        def call(function, dtype, x=x):
            inputs = x.astype(dtype), weights[dtype]
            return lambda: function(*inputs).block_until_ready()

        calls = {"xla float32": call(xla, "float32")}
        calls |= {f"kernel {dtype}": call(kernel, dtype) for dtype in dtypes}
        ms = times(calls, repeats)
        cells = (f"{ms[name]:.2f} ({ms[name] / ms['xla float32']:.2f})" for name in names)
        print(f"{m:<6}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 32])
    parser.add_argument(
        "--layers", type=int, default=24, help="matrices, [ffn, width] and [width, ffn] in turn"
    )
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--ffn", type=int, default=3072)
    parser.add_argument("--vocabulary", type=int, default=49152, help="rows of the head; 0 leaves it out")
    parser.add_argument(
        "--small", type=int, default=192, help="rows of a small matrix, 48 of them; 0 leaves them out"
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if not cpu.supported():
        parser.error("the kernel does not run here: it needs a CPU backend and `pip install numba`")
    if "float32" not in options.dtypes:
        options.dtypes.insert(0, "float32")
    up, down = (options.ffn, options.width), (options.width, options.ffn)
    pairs = [up if i % 2 == 0 else down for i in range(options.layers)]
    table(
        f"{options.layers} matrices of {up} and {down}", pairs, options.rows, options.dtypes, options.repeats
    )
    if options.vocabulary:
        head = (options.vocabulary, options.width)
        table(f"head {head}", [head], options.rows, options.dtypes, options.repeats)
    if options.small:
        small = [(options.small, options.width), (options.width, options.small)] * 24
        table(
            f"48 matrices of {small[0]} and {small[1]}", small, options.rows, options.dtypes, options.repeats
        )


if __name__ == "__main__":
    main()
