from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.checkpoints import CheckpointError, Rule, TensorInfo, load_parameters, save_safetensors
from eagle_jax.checkpoints.huggingface import HuggingFaceSource
from eagle_jax.checkpoints.loading import place

BF16 = ml_dtypes.bfloat16


class Memory:
    """A source in memory that keeps account of what is read."""

    def __init__(self, **tensors):
        self.path, self.config = "memory", {}
        self.tensors = {name.replace("__", "."): np.asarray(t) for name, t in tensors.items()}
        self.infos = {name: TensorInfo(t.shape, t.dtype) for name, t in self.tensors.items()}
        self.reads = []

    def read(self, name):
        self.reads.append(name)
        return self.tensors[name]


def wanted(*shape, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_names_are_translated_and_the_first_rule_decides():
    source = Memory(
        model__layers__3__w=np.ones(2, np.float32), model__layers__3__inv_freq=np.ones(3, np.float32)
    )
    table = [
        (r"model\.layers\.\d+\.inv_freq", None),
        (r"model\.layers\.(\d+)\.(\w+)", r"blocks.\1.\2"),
    ]
    loaded = load_parameters(source, table, {"blocks.3.w": wanted(2)})
    assert list(loaded) == ["blocks.3.w"]
    assert source.reads == ["model.layers.3.w"]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float32, BF16),
        (BF16, np.float32),
        (np.float16, np.float32),
        (np.float64, np.float32),
        (np.int64, np.int32),
    ],
)
def test_conversion(given, dtype):
    values = np.linspace(-9, 9, 12).astype(given)
    loaded = load_parameters(Memory(a=values), [("a", "a")], {"a": wanted(12, dtype=dtype)})["a"]
    assert loaded.dtype == dtype
    assert np.asarray(loaded).tobytes() == values.astype(dtype).tobytes()


def test_cast_concerns_floats_only():
    source = Memory(a=np.ones(2, np.float32), n=np.ones(2, np.int32), t=np.array([True]))
    abstract = {"a": wanted(2), "n": wanted(2, dtype=jnp.int32), "t": wanted(1, dtype=jnp.bool_)}
    loaded = load_parameters(source, [(r"(\w)", r"\1")], abstract, cast=jnp.bfloat16)
    assert [loaded[name].dtype for name in "ant"] == [jnp.bfloat16, jnp.int32, jnp.bool_]


def test_transform():
    source = Memory(a=np.arange(6, dtype=np.float32).reshape(2, 3))
    loaded = load_parameters(source, [Rule("a", "b", np.transpose)], {"b": wanted(3, 2)})
    np.testing.assert_array_equal(loaded["b"], source.tensors["a"].T)


def test_all_problems_come_in_one_error():
    source = Memory(
        a=np.ones(2, np.float32),
        b=np.ones(2, np.float32),
        c=np.ones(2, np.int32),
        turned=np.ones((2, 3), np.float32),
        good=np.ones(2, np.float32),
        stray=np.ones(4, np.float32),
        z1=np.ones(1, np.float32),
        z2=np.ones(1, np.float32),
    )
    abstract = {
        "a": wanted(3),
        "c": wanted(2),
        "turned": wanted(2, 3),
        "good": wanted(2),
        "gone": wanted(7, 8),
        "z": wanted(1),
    }
    table = [("([abc])", r"\1"), ("(good)", r"\1"), Rule("(turned)", r"\1", np.transpose), (r"z\d", "z")]
    with pytest.raises(CheckpointError) as caught:
        load_parameters(source, table, abstract)
    assert str(caught.value).split("\n") == [
        "memory does not hold what is to be filled (7 problems):",
        "  missing: gone float32[7, 8]",
        "  unexpected: b float32[2], since there is no parameter b",
        "  unexpected: stray float32[4], which no rule of the table names",
        "  unexpected: z2 float32[1], since z1 fills z already",
        "  misshapen: a is float32[2]; a needs float32[3]",
        "  misshapen: c is int32[2]; c needs float32[2]",
        "  misshapen: turned is float32[3, 2] after its transform; turned needs float32[2, 3]",
    ]
    assert source.reads == ["turned"]


def test_many_problems_are_counted():
    with pytest.raises(CheckpointError, match=r"100 problems(.|\n)*… and 80 more"):
        load_parameters(Memory(), [], {str(i): wanted(1) for i in range(100)})


def test_integers_that_do_not_fit():
    with pytest.raises(CheckpointError, match="out of range: a has values from 0 to 1099511627776"):
        load_parameters(Memory(a=np.array([0, 2**40])), [("a", "a")], {"a": wanted(2, dtype=jnp.int32)})


def test_subset_leaves_the_rest_unread():
    source = Memory(a=np.ones(2, np.float32), b=np.ones(2, np.float32), stray=np.ones(4, np.float32))
    loaded = load_parameters(source, [("([ab])", r"\1")], {"b": wanted(2)}, subset=True)
    assert list(loaded) == ["b"]
    assert source.reads == ["b"]
    with pytest.raises(CheckpointError, match="missing: c"):
        load_parameters(source, [("([ab])", r"\1")], {"c": wanted(2)}, subset=True)


def test_progress_and_order():
    source = Memory(small=np.ones(2, np.float32), large=np.ones(9, np.float32))
    calls = []
    table = [(r"(\w+)", r"\1")]
    loaded = load_parameters(
        source, table, {"small": wanted(2), "large": wanted(9)}, progress=lambda *call: calls.append(call)
    )
    assert calls == [(36, 44, "large"), (44, 44, "small")]
    assert list(loaded) == ["small", "large"]


@pytest.mark.parametrize(
    "spec", [P(), P("data"), P(None, "tensor"), P("data", "tensor"), P(("data", "tensor"))]
)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_each_device_gets_its_slice(spec, dtype):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    values = np.arange(64, dtype=np.float32).reshape(8, 8)
    loaded = load_parameters(
        Memory(a=values), [("a", "a")], {"a": wanted(8, 8, dtype=dtype, sharding=sharding)}
    )["a"]
    assert loaded.sharding == sharding
    assert loaded.dtype == dtype
    assert len(loaded.addressable_shards) == 8
    for shard in loaded.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index].astype(dtype))


@pytest.mark.parametrize("sharded", [False, True])
def test_result_is_a_copy(sharded):
    buffer = np.zeros(1024 + 16, np.float32)
    start = -buffer.ctypes.data % 64 // 4
    values = buffer[start : start + 1024]  # aligned as jax likes it for sharing memory
    assert values.ctypes.data % 64 == 0
    sharding = None
    if sharded:
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
        sharding = NamedSharding(mesh, P("data"))
    loaded = place(values, wanted(1024, sharding=sharding))
    values[:] = 7
    assert not np.asarray(loaded).any()


def test_unaligned_and_scalar_tensors():
    raw = np.zeros(41, np.uint8)
    source = SimpleNamespace(
        path="memory",
        infos={"a": TensorInfo((10,), np.dtype(np.float32)), "s": TensorInfo((), np.dtype(np.float32))},
        read={"a": raw[1:].view(np.float32), "s": np.array(3, np.float32)}.__getitem__,
    )
    loaded = load_parameters(source, [("(.)", r"\1")], {"a": wanted(10), "s": wanted()})
    assert not np.asarray(loaded["a"]).any()
    assert float(loaded["s"]) == 3


def test_from_a_folder(tmp_path):
    values = np.arange(12, dtype=np.float32).reshape(3, 4).astype(BF16)
    save_safetensors(tmp_path / "m", [("model.w", jnp.asarray(values))], {})
    source = HuggingFaceSource(tmp_path / "m")
    loaded = load_parameters(source, [(r"model\.(\w)", r"\1")], {"w": wanted(3, 4, dtype=BF16)})
    for file in (tmp_path / "m").iterdir():
        file.write_bytes(b"")
    np.testing.assert_array_equal(np.asarray(loaded["w"]), values)
