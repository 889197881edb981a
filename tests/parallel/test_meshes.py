"""The same tokens on every mesh, and refusals of those that a model cannot be split over."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from eagle_jax import LLM, SamplingParams
from eagle_jax.drafters.eagle3 import Eagle3Head
from eagle_jax.drafters.head_config import read_head_config
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Functional
from eagle_jax.parallel.mesh import MeshError, MeshShape, check_mesh, make_mesh

TARGET = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=7,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=8,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    eos_token_id=2,
)
HEAD = TARGET | dict(
    architectures=["LlamaForCausalLMEagle3"],
    num_hidden_layers=1,
    draft_vocab_size=128,
    fc_norm=True,
    norm_output=True,
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A random target, and a random head whose draft vocabulary is every second token."""
    rng = np.random.default_rng(0)
    root = tmp_path_factory.mktemp("mesh")
    config = ModelConfig.from_hf(TARGET)
    names = frozenset({"fc.weight", "layers.0.hidden_norm.weight", "d2t", "fc_norm.0.weight"})
    head_config = read_head_config(HEAD, names, config, "eagle3")
    head = Functional.of(lambda: Eagle3Head(head_config, np.float32))
    for folder, specs, written in (
        ("target", Target(config, "float32").functional.specs, TARGET),
        ("head", head.specs, HEAD),
    ):
        tensors = {}
        for path, spec in specs.items():
            name = path if folder == "head" or path.startswith("lm_head") else f"model.{path}"
            if path == "d2t":
                tensors[name] = np.arange(spec.shape[0], dtype=np.int64)
            elif len(spec.shape) == 1:
                tensors[name] = np.ones(spec.shape, np.float32)
            else:
                tensors[name] = rng.normal(0, 2.0 / np.sqrt(spec.shape[1]), spec.shape).astype(np.float32)
        (root / folder).mkdir()
        save_file(tensors, root / folder / "model.safetensors")
        (root / folder / "config.json").write_text(json.dumps(written))
    return root


def run(checkpoints, **mesh):
    llm = LLM(
        str(checkpoints / "target"),
        speculative_config=dict(
            model=str(checkpoints / "head"), tree=dict(kind="dynamic", total_tokens=8, depth=2, top_k=3)
        ),
        mesh=mesh,
        batch_size=8,
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 256, size=n).tolist() for n in (1, 5, 9, 17, 33, 40, 64, 70)]
    params = [SamplingParams(temperature=t, seed=i, max_new_tokens=24) for i, t in enumerate([0.0, 1.0] * 4)]
    outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
    return llm, outputs


@pytest.fixture(scope="module")
def on_one_device(checkpoints):
    return run(checkpoints)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [dict(data=8), dict(data=2, tensor=4), dict(tensor=8), dict(data=2, fsdp=2, tensor=2)], ids=str
)
def test_same_tokens_on_every_mesh(checkpoints, on_one_device, mesh):
    llm, outputs = run(checkpoints, **mesh)
    for ours, reference in zip(outputs, on_one_device, strict=True):
        assert ours.token_ids == reference.token_ids
        assert ours.accept_lengths == reference.accept_lengths
    placed = llm.loaded.params["layers.0.self_attn.q_proj.weight"].sharding
    assert placed.shard_shape((128, 64)) == (128 // mesh.get("tensor", 1), 64 // mesh.get("fsdp", 1))


@pytest.mark.slow
def test_caches_are_split_over_batch_and_kv_heads(checkpoints):
    llm, _ = run(checkpoints, data=2, tensor=4)
    _, rows = llm._rows([[5, 6, 7]] * 8, SamplingParams(temperature=0.0))
    _, state, _, _ = llm._start(rows)
    for buffer in (state.cache.keys[0], state.drafter.cache.keys[0]):
        batch, heads, *_ = buffer.sharding.shard_shape(buffer.shape)
        assert (batch, heads) == (4, 2)


SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192)


@pytest.mark.parametrize(
    ("shape", "batch_size", "complaint", "nearest"),
    [
        (MeshShape(tensor=2), 1, "tensor 2 does not divide the target's heads 9", "tensor: 1"),
        (MeshShape(tensor=8), 1, "KV heads 3", "tensor: 3"),
        (MeshShape(data=4), 6, "data 4 does not divide the target's batch size 6", "data: 3"),
        (MeshShape(data=2, fsdp=2), 6, "data x fsdp = 4", "{data: 1, fsdp: 2, tensor: 1}"),
    ],
)
def test_illegal_meshes_name_the_nearest_legal_one(shape, batch_size, complaint, nearest):
    with pytest.raises(MeshError) as raised:
        check_mesh(shape, SMOLLM2, batch_size)
    message = str(raised.value)
    assert complaint in message
    assert nearest in message.split("nearest legal mesh is")[1]
    assert "\n" not in message


def test_more_devices_than_there_are():
    with pytest.raises(MeshError, match=f"takes 64 devices, and there are {len(jax.devices())}"):
        make_mesh(MeshShape(data=64))
