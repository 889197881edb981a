"""From paths to parameters on devices: formats agree, progress adds up, what does not belong is refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from golden_data import GOLDEN, TARGET, mesh
from golden_data import target as golden_target
from random_models import random_pair
from safetensors.numpy import load_file, save_file

from eagle_jax import LLM, SamplingParams
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.convert import convert
from eagle_jax.loading import HEAD_MODULES, load_head, load_target, read_target_config, rename
from eagle_jax.models.decoder import TARGET_NAMES
from eagle_jax.parallel.mesh import MeshShape, make_mesh

EAGLE3 = GOLDEN / "eagle3" / "head"


@pytest.fixture(scope="module")
def orbax(tmp_path_factory):
    """The golden target and its head as our own checkpoints."""
    folder = tmp_path_factory.mktemp("orbax")
    convert(str(TARGET), folder / "target", "orbax")
    convert(str(EAGLE3), folder / "head", "orbax", target=str(TARGET))
    return folder


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [MeshShape(), MeshShape(fsdp=2, tensor=2)])
def test_our_own_checkpoints_load_alike(tmp_path, dtype, shape):
    """As Hugging Face folders do, on any mesh."""
    pair, placed = random_pair(16, 8), make_mesh(shape)
    target_folder, head_folder = pair.save(tmp_path)
    convert(str(target_folder), tmp_path / "own" / "target", "orbax")
    convert(str(head_folder), tmp_path / "own" / "head", "orbax", target=str(target_folder))
    target = load_target(target_folder, dtype, placed)
    own = load_target(tmp_path / "own" / "target", dtype, placed)
    assert own.target == target.target
    assert_same(own.params, target.params)
    head = load_head(head_folder, target, "eagle3", placed)
    own_head = load_head(tmp_path / "own" / "head", own, "eagle3", placed)
    assert own_head.config == head.config
    assert_same(own_head.params.head, head.params.head)
    for name, value in {**target.params, **head.params.head}.items():
        other = own.params.get(name) if value is target.params.get(name) else own_head.params.head[name]
        assert other.sharding.is_equivalent_to(value.sharding, value.ndim), name


@pytest.mark.slow
def test_our_own_checkpoints_generate_alike(tmp_path):
    """The interface takes them wherever it takes a Hugging Face folder."""
    target, head = random_pair(16, 8).save(tmp_path)
    own_target, own_head = tmp_path / "own" / "target", tmp_path / "own" / "head"
    convert(str(target), own_target, "orbax")
    convert(str(head), own_head, "orbax", target=str(target))
    answers = []
    for paths in ((target, head), (own_target, own_head)):
        speculative = {"model": str(paths[1]), "method": "eagle3", "num_speculative_tokens": 2}
        llm = LLM(str(paths[0]), speculative_config=speculative, max_model_len=64)
        params = SamplingParams(max_new_tokens=8, ignore_eos=True)
        (answer,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs
        answers.append((answer.token_ids, answer.accept_lengths))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("own", [False, True])
def test_progress(orbax, own):
    calls = []
    path = orbax / "target" if own else TARGET
    params = load_target(path, "float32", mesh(), lambda *call: calls.append(call)).params
    size = sum(p.nbytes for p in params.values())
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert done[-1] == size
    assert {call[1] for call in calls} == {size}
    assert len(calls) == (1 if own else len(params))


def test_the_kind_of_our_own_checkpoints(orbax):
    with pytest.raises(CheckpointError, match="is a head; expected a target"):
        load_target(orbax / "head", "float32", mesh())
    with pytest.raises(CheckpointError, match="is a target; expected a head"):
        load_head(orbax / "target", golden_target(), "eagle3", mesh())


def test_what_a_target_need_not_have(tmp_path):
    """A tied head stored all the same, and rotary tables."""
    tensors = load_file(TARGET / "model.safetensors")
    config = json.loads((TARGET / "config.json").read_text()) | {"tie_word_embeddings": True}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_target(tmp_path, "float32", mesh())
    assert "lm_head.weight" not in loaded.params
    assert loaded.params.keys() | {"lm_head.weight"} == golden_target().params.keys()


def test_wrong_tensors_are_listed_together(tmp_path):
    shutil.copy(TARGET / "config.json", tmp_path)
    tensors = load_file(TARGET / "model.safetensors")
    del tensors["model.norm.weight"]
    tensors |= {"model.odd.weight": np.ones(3, np.float32), "lm_head.weight": np.ones((3, 64), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as refused:
        load_target(tmp_path, "float32", mesh())
    for part in (
        "missing: norm.weight float32[64]",
        "unexpected: model.odd.weight float32[3]",
        "misshapen: lm_head.weight is float32[3, 64]; lm_head.weight needs float32[199, 64]",
    ):
        assert part in str(refused.value)


def test_a_head_shares_its_targets_embeddings():
    target = golden_target()
    params = load_head(EAGLE3, target, "eagle3", mesh()).params
    assert params.embeddings is target.params["embed_tokens.weight"]
    assert params.output_weight is target.params["lm_head.weight"]


def test_config_of_a_target(orbax):
    assert read_target_config(TARGET) == read_target_config(orbax / "target") == golden_target().target.config


def test_names():
    assert rename("model.layers.3.mlp.up_proj.weight", TARGET_NAMES) == "layers.3.mlp.up_proj.weight"
    assert rename("lm_head.weight", TARGET_NAMES) == "lm_head.weight"
    assert rename("model.layers.0.self_attn.rotary_emb.inv_freq", TARGET_NAMES) is None
    assert rename("a", (("b", "c"),)) == "a"
    assert HEAD_MODULES.keys() == {"eagle", "eagle3"}
