import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.checkpoints import (
    CheckpointError,
    TensorSource,
    load_parameters,
    open_source,
    orbax,
    save_safetensors,
)
from eagle_jax.checkpoints.orbax import OrbaxSource, read_manifest, restore, save

CONFIG = {"model_type": "llama", "rope_scaling": None}
DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]


def random_bits(shape, dtype):
    """Every pattern of bits may come, infinities, subnormals and NaN too."""
    raw = np.random.default_rng(0).integers(0, 256, (*shape, np.dtype(dtype).itemsize), np.uint8)
    return raw.view(dtype).reshape(shape)


def parameters():
    arrays = {
        f"layers.0.self_attn.{np.dtype(dtype).name}.weight": random_bits((16, 8), dtype) for dtype in DTYPES
    }
    arrays |= {"d2t": np.arange(7, dtype=np.int32), "t2d": np.arange(9) % 2 == 0, "scale": np.float32(0.1)}
    return {path: jnp.asarray(array) for path, array in arrays.items()}


def abstract(params, sharding=None):
    return {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for path, a in params.items()}


def bits(array):
    return np.asarray(array).tobytes()


@pytest.fixture
def params():
    return parameters()


@pytest.fixture
def saved(tmp_path, params):
    save(tmp_path / "m", params, CONFIG, "target")
    return tmp_path / "m"


def test_round_trip_is_exact(saved, params):
    restored = restore(saved, abstract(params))
    assert list(restored) == list(params)
    for path, array in params.items():
        assert restored[path].dtype == array.dtype
        assert restored[path].shape == array.shape
        assert bits(restored[path]) == bits(array)


@pytest.mark.parametrize("spec", [P("data"), P(None, "tensor"), P(("data", "tensor"))])
def test_onto_and_from_a_mesh(tmp_path, params, spec):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    matrices = {path: a for path, a in params.items() if a.ndim == 2}
    placed = {path: jax.device_put(a, NamedSharding(mesh, P("tensor"))) for path, a in matrices.items()}
    save(tmp_path / "m", placed, CONFIG, "head")
    sharding = NamedSharding(mesh, spec)
    for path, array in restore(tmp_path / "m", abstract(matrices, sharding)).items():
        assert array.sharding == sharding
        for shard in array.addressable_shards:
            assert bits(shard.data) == bits(np.asarray(matrices[path])[shard.index])


def test_another_float_dtype(saved, params):
    wanted = abstract(params)
    name = "layers.0.self_attn.float32.weight"
    wanted[name] = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    found = restore(saved, wanted)[name]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.nan_to_num(np.asarray(found)), np.nan_to_num(np.asarray(params[name]).astype(jnp.bfloat16))
    )


def test_manifest(saved, params):
    manifest = read_manifest(saved)
    assert manifest["format_version"] == 1
    assert manifest["kind"] == "target"
    assert manifest["config"] == CONFIG
    assert manifest["params"]["d2t"] == {"shape": [7], "dtype": "int32"}
    assert list(manifest["params"]) == list(params)
    assert sorted(p.name for p in saved.iterdir()) == ["eagle_jax.json", "params"]
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


def test_as_a_source(saved, params, tmp_path):
    source = open_source(saved)
    assert isinstance(source, OrbaxSource)
    assert isinstance(source, TensorSource)
    assert source.kind == "target"
    for path, array in params.items():
        found = source.read(path)
        assert found.dtype == source.infos[path].dtype == array.dtype
        assert found.shape == source.infos[path].shape == array.shape
        assert bits(found) == bits(array)
        assert not found.flags.writeable
    with pytest.raises(CheckpointError, match="no tensor named 'x'"):
        source.read("x")
    # And so to Hugging Face's format and back.
    save_safetensors(tmp_path / "hf", ((path, source.read(path)) for path in source.infos), source.config)
    back = load_parameters(open_source(tmp_path / "hf"), [("(.*)", r"\1")], abstract(params))
    assert all(bits(back[path]) == bits(array) for path, array in params.items())


def test_mismatches_come_in_one_error(saved, params):
    wanted = abstract(params)
    del wanted["scale"]
    wanted["d2t"] = jax.ShapeDtypeStruct((8,), jnp.int32)
    wanted["t2d"] = jax.ShapeDtypeStruct((9,), jnp.float32)
    wanted["norm.weight"] = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(CheckpointError) as caught:
        restore(saved, wanted)
    assert str(caught.value).split("\n")[1:] == [
        "  missing: norm.weight float32[8]",
        "  unexpected: scale float32[]",
        "  misshapen: d2t is int32[7]; expected int32[8]",
        "  misshapen: t2d is bool[9]; expected float32[9]",
    ]


def test_extra_files(tmp_path, params):
    (tmp_path / "tokenizer.json").write_text("{}")
    save(tmp_path / "m", params, CONFIG, "target", {"tokenizer.json": tmp_path / "tokenizer.json"})
    assert (tmp_path / "m/tokenizer.json").read_text() == "{}"
    for bad in ({"t": tmp_path / "nothing"}, {"../t": tmp_path / "tokenizer.json"}):
        with pytest.raises(CheckpointError, match="cop"):
            save(tmp_path / "n", params, CONFIG, "target", bad)
        assert not (tmp_path / "n").exists()


def test_overwriting(saved, params):
    one = {"d2t": params["d2t"] + 1}
    with pytest.raises(CheckpointError, match="is not empty"):
        save(saved, one, CONFIG, "head")
    assert read_manifest(saved)["kind"] == "target"
    save(saved, one, CONFIG, "head", force=True)
    assert bits(restore(saved, abstract(one))["d2t"]) == bits(one["d2t"])
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


def test_unknown_kind(tmp_path, params):
    with pytest.raises(CheckpointError, match="expected 'target' or 'head'"):
        save(tmp_path / "m", params, CONFIG, "body")


@pytest.mark.parametrize("step", ["copy_files", "write_json", "finish"])
def test_killed_save(saved, params, step, monkeypatch):
    def kill(*arguments):
        raise KeyboardInterrupt  # nothing is tidied up after it, as after any kill

    one = {"d2t": params["d2t"]}
    with monkeypatch.context() as patched:
        patched.setattr(orbax, step, kill)
        with pytest.raises(KeyboardInterrupt):
            save(saved, one, CONFIG, "head", force=True)
    # What was there is as it was; what was being written takes no name that is looked at.
    assert list(restore(saved, abstract(params))) == list(params)
    assert sorted(p.name for p in saved.parent.iterdir()) == [".m.partial", "m"]
    save(saved, one, CONFIG, "head", force=True)
    assert [p.name for p in saved.parent.iterdir()] == ["m"]


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_arrays_larger_than_what_is_read_ahead(saved, params, spec, monkeypatch):
    monkeypatch.setattr(orbax, "_READ_AHEAD_BYTES", 1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    wanted = {
        path: jax.ShapeDtypeStruct(
            a.shape,
            jnp.float32 if a.dtype == jnp.float16 else a.dtype,
            sharding=NamedSharding(mesh, spec if a.ndim == 2 else P()),
        )
        for path, a in params.items()
    }
    assert list(restore(saved, wanted)) == list(params)
    assert OrbaxSource(saved).read("d2t").shape == (7,)


@pytest.mark.parametrize("spec", [P(), P("data"), P(None, "data")])
def test_arrays_in_several_chunks(tmp_path, spec, monkeypatch):
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 100)
    monkeypatch.setattr(orbax, "_READ_AHEAD_BYTES", 1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for shape in ((16, 24), (7, 13)):
        array = jnp.arange(shape[0] * shape[1], dtype=jnp.float32).reshape(shape)
        sharding = NamedSharding(mesh, spec if shape == (16, 24) else P())
        save(tmp_path / "m", {"a": array}, CONFIG, "target", force=True)
        assert bits(
            restore(tmp_path / "m", {"a": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)})["a"]
        ) == bits(array)
        assert bits(OrbaxSource(tmp_path / "m").read("a")) == bits(array)


def test_half_a_folder(saved, params):
    (saved / "eagle_jax.json").rename(saved / "elsewhere.json")
    with pytest.raises(CheckpointError, match=r"has no eagle_jax\.json"):
        restore(saved, abstract(params))
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_source(saved)


def test_files_that_are_missing_or_cut(saved, params):
    files = [file for file in (saved / "params").rglob("*") if file.is_file() and file.stat().st_size]
    assert len(files) > 3
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(CheckpointError, match="is missing or does not have its"):
            restore(saved, abstract(params))
        file.unlink()
        with pytest.raises(CheckpointError, match="is missing or does not have its"):
            OrbaxSource(saved)
        file.write_bytes(content)
    restore(saved, abstract(params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 2}, "is of format version 2; this library reads 1"),
        ({"params": None}, "has no params"),
    ],
)
def test_bad_manifest(saved, change, message):
    file = saved / "eagle_jax.json"
    manifest = json.loads(file.read_text()) | change
    file.write_text(json.dumps({key: value for key, value in manifest.items() if value is not None}))
    with pytest.raises(CheckpointError, match=message):
        read_manifest(saved)


def test_nothing_is_printed(tmp_path):
    script = (
        "import sys, jax, jax.numpy as jnp\n"
        "from eagle_jax.checkpoints.orbax import OrbaxSource, restore, save\n"
        "save(sys.argv[1], {'a': jnp.ones(4)}, {}, 'target')\n"
        "restore(sys.argv[1], {'a': jax.ShapeDtypeStruct((4,), jnp.float32)})\n"
        "OrbaxSource(sys.argv[1]).read('a')\n"
    )
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(tmp_path / "m")], capture_output=True, timeout=120
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, b"", b"")
