import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import CheckpointError, TensorSource, save_safetensors
from eagle_jax.checkpoints.huggingface import HuggingFaceSource, download
from eagle_jax.checkpoints.weight_files import SafetensorsFile

CONFIG = {"model_type": "llama", "hidden_size": 4}
TENSORS = {
    "model.norm.weight": np.arange(6, dtype=np.float32).reshape(2, 3) / 7,
    "half": np.linspace(-3, 3, 10).astype(np.float16),
    "brain": np.linspace(-3, 3, 12).astype(ml_dtypes.bfloat16).reshape(3, 4),
    "d2t": np.arange(5, dtype=np.int64) + 2**40,
    "t2d": np.array([True, False, True]),
    "scalar": np.array(2.5, np.float32),
    "empty": np.zeros((0, 4), np.float32),
}


def assert_holds(source: TensorSource, tensors: dict[str, np.ndarray]) -> None:
    assert isinstance(source, TensorSource)
    assert source.config == CONFIG
    assert set(source.infos) == set(tensors)
    for name, expected in tensors.items():
        found = source.read(name)
        assert found.dtype == expected.dtype == source.infos[name].dtype
        assert found.shape == expected.shape == source.infos[name].shape
        assert found.tobytes() == expected.tobytes()
        assert not found.flags.writeable


def write_config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(params=["whole", "shards"])
def saved(request, tmp_path):
    folder = tmp_path / "model"
    limit = 5_000_000_000 if request.param == "whole" else 40
    save_safetensors(folder, TENSORS.items(), CONFIG, max_shard_bytes=limit)
    return folder


def test_round_trip_of_every_dtype(saved):
    assert_holds(HuggingFaceSource(saved), TENSORS)


def test_others_read_what_is_written(saved):
    found = {}
    for file in saved.glob("*.safetensors"):
        found |= load_file(file)
    assert set(found) == set(TENSORS)
    np.testing.assert_array_equal(found["model.norm.weight"], TENSORS["model.norm.weight"])


def test_reads_what_others_write(tmp_path):
    write_config(tmp_path)
    tensors = {name: t for name, t in TENSORS.items() if name not in ("scalar", "empty")}
    save_file(tensors, tmp_path / "weights-of-a-head.safetensors", metadata={"format": "pt"})
    assert_holds(HuggingFaceSource(tmp_path), tensors)


def test_shards_stay_below_their_limit_and_are_indexed(tmp_path):
    save_safetensors(tmp_path / "m", TENSORS.items(), CONFIG, max_shard_bytes=40)
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "m").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 1
    assert set(index["weight_map"].values()) == set(files)
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in TENSORS.values())
    for file in files:
        infos = SafetensorsFile(tmp_path / "m" / file).infos.values()
        assert sum(info.nbytes for info in infos) <= 40 or len(infos) == 1


def test_saving_leaves_nothing_but_the_checkpoint(saved):
    assert {p.suffix for p in saved.iterdir()} == {".json", ".safetensors"}
    assert [p.name for p in saved.parent.iterdir()] == ["model"]


def test_a_failed_save_leaves_nothing(tmp_path):
    def tensors():
        yield "a", np.zeros(3, np.float32)
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="fire"):
        save_safetensors(tmp_path / "m", tensors(), CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_saving_over_something(tmp_path):
    folder = tmp_path / "m"
    save_safetensors(folder, [("a", np.zeros(3, np.float32))], CONFIG)
    with pytest.raises(CheckpointError, match="is not empty"):
        save_safetensors(folder, [("b", np.ones(3, np.float32))], CONFIG)
    save_safetensors(folder, [("b", np.ones(3, np.float32))], CONFIG, force=True)
    assert_holds(HuggingFaceSource(folder), {"b": np.ones(3, np.float32)})
    other = tmp_path / "photographs"
    other.mkdir()
    (other / "cat.png").write_text("meow")
    with pytest.raises(CheckpointError, match="will not be replaced"):
        save_safetensors(other, [], CONFIG, force=True)
    assert (other / "cat.png").exists()


def test_saving_copies_extra_files(tmp_path):
    (tmp_path / "tok.json").write_text("{}")
    save_safetensors(tmp_path / "m", [], CONFIG, extra_files={"tokenizer.json": tmp_path / "tok.json"})
    assert (tmp_path / "m/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", np.zeros(1, np.float32))] * 2, "'a' was given twice"),
        ([("a", np.zeros(1, np.complex64))], "'a' has dtype complex64"),
    ],
)
def test_what_cannot_be_saved(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        save_safetensors(tmp_path / "m", tensors, CONFIG)


def test_truncated_file(saved):
    file = max(saved.glob("*.safetensors"), key=lambda p: p.stat().st_size)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"{file.name} is not a whole safetensors file.*truncated"):
        HuggingFaceSource(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 64,
        (5).to_bytes(8, "little") + b"hello",
        (2).to_bytes(8, "little") + b"[]",
        (12).to_bytes(8, "little") + b'{"a": "oops"',
        (11).to_bytes(8, "little") + b'{"a": "no"}',
    ],
)
def test_damaged_file(tmp_path, content):
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="not a whole safetensors file") as caught:
        HuggingFaceSource(tmp_path)
    assert "\n" not in str(caught.value)


def test_file_that_vanishes_while_open(saved):
    source = HuggingFaceSource(saved)
    for file in saved.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match="was it replaced"):
        source.read("half")


def test_missing_shard(tmp_path):
    save_safetensors(tmp_path / "m", TENSORS.items(), CONFIG, max_shard_bytes=40)
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=rf"{shard.name} is missing"):
        HuggingFaceSource(tmp_path / "m")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"zz": "FIRST"}}', "puts 'zz' in .*, which does not have it"),
        ('{"weight_map": {"zz": "../x.safetensors"}}', "expected a file in the same folder"),
    ],
)
def test_bad_index(tmp_path, index, message):
    folder = tmp_path / "m"
    save_safetensors(folder, TENSORS.items(), CONFIG, max_shard_bytes=40)
    first = min(p.name for p in folder.glob("*.safetensors"))
    (folder / "model.safetensors.index.json").write_text(index.replace("FIRST", first))
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceSource(folder)


def test_tensor_in_two_shards(tmp_path):
    write_config(tmp_path)
    for file in ("a", "b"):
        save_file({file: np.zeros(2), "both": np.zeros(2)}, tmp_path / f"{file}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"'both' is both in a\.safetensors and in b\.safetensors"):
        HuggingFaceSource(tmp_path)


def test_missing_parts(tmp_path):
    with pytest.raises(CheckpointError, match="not a folder"):
        HuggingFaceSource(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        HuggingFaceSource(tmp_path)
    write_config(tmp_path)
    with pytest.raises(CheckpointError, match="has no weights"):
        HuggingFaceSource(tmp_path)
    save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    save_file({"b": np.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="several weight files"):
        HuggingFaceSource(tmp_path)


def test_unknown_tensor(saved):
    with pytest.raises(CheckpointError, match="no tensor named 'nothing'"):
        HuggingFaceSource(saved).read("nothing")


# PyTorch files


def torch_tensors():
    torch = pytest.importorskip("torch")
    return {
        name: torch.from_numpy(t.astype(np.float32)).to(torch.bfloat16)
        if t.dtype == ml_dtypes.bfloat16
        else torch.from_numpy(t.copy())
        for name, t in TENSORS.items()
    }


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_file(tmp_path, name, zipped):
    torch = pytest.importorskip("torch")
    write_config(tmp_path)
    torch.save(torch_tensors(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    torch.save({"lr": 1}, tmp_path / "training_args.bin")
    assert_holds(HuggingFaceSource(tmp_path), TENSORS)


def test_torch_shards_and_views(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr("eagle_jax.checkpoints.weight_files._REOPEN_BYTES", 8)
    write_config(tmp_path)
    turned = torch.arange(12.0).reshape(3, 4).t()
    torch.save({"half": torch_tensors()["half"], "turned": turned}, tmp_path / "a.bin")
    torch.save({"brain": torch_tensors()["brain"]}, tmp_path / "b.bin")
    index = {"weight_map": {"half": "a.bin", "turned": "a.bin", "brain": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    expected = {"half": TENSORS["half"], "turned": turned.numpy(), "brain": TENSORS["brain"]}
    assert_holds(HuggingFaceSource(tmp_path), expected)


def test_safetensors_are_preferred(tmp_path):
    torch = pytest.importorskip("torch")
    write_config(tmp_path)
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    assert_holds(HuggingFaceSource(tmp_path), {"b": np.ones(2, np.float32)})


def test_torch_not_installed(tmp_path, monkeypatch):
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"pip install eagle_jax\[torch\]"):
        HuggingFaceSource(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "cannot be read as PyTorch weights"),
        (lambda data: b"", "cannot be read as PyTorch weights"),
    ],
)
def test_damaged_torch_file(tmp_path, damage, message):
    torch = pytest.importorskip("torch")
    write_config(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(200)}, file)
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match=message) as caught:
        HuggingFaceSource(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds a list"),
        ({"a": 3}, "'a' is a int"),
        ({"a": Path("x")}, "cannot be read as PyTorch weights"),
    ],
)
def test_torch_file_of_other_things(tmp_path, content, message):
    torch = pytest.importorskip("torch")
    write_config(tmp_path)
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        HuggingFaceSource(tmp_path)


# The hub


def test_download_takes_torch_files_only_without_safetensors(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []

    def snapshot(repository, allow_patterns, ignore_patterns):
        asked.append("*.bin" in allow_patterns)
        if repository == "org/new":
            (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert download("org/old") == tmp_path
    assert asked == [False, True]
    asked.clear()
    download("org/new")
    assert asked == [False]


def test_download_without_network(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="org/nothing is neither a local path nor") as caught:
        download("org/nothing")
    assert "\n" not in str(caught.value)
