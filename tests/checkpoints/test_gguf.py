import math

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants

from eagle_jax.checkpoints import CheckpointError, TensorSource
from eagle_jax.checkpoints.gguf import GgufSource
from eagle_jax.checkpoints.gguf_container import read_container

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCABULARY = 4, 2, 8, 32, 64, 96


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head's first half and row i of its second stand side by side, as llama.cpp wants them."""
    out, head_dim = np.zeros_like(rows), len(rows) // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in range(2):
                out[head * head_dim + 2 * i + half] = rows[head * head_dim + half * (head_dim // 2) + i]
    return out


def weights(architecture: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layer = {
        "input_layernorm": normal(HIDDEN),
        "post_attention_layernorm": normal(HIDDEN),
        "self_attn.q_proj": normal(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": normal(KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.o_proj": normal(HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": normal(FFN, HIDDEN),
        "mlp.up_proj": normal(FFN, HIDDEN),
        "mlp.down_proj": normal(HIDDEN, FFN),
    }
    if architecture == "qwen3":
        layer |= {"self_attn.q_norm": normal(HEAD_DIM), "self_attn.k_norm": normal(HEAD_DIM)}
    tensors = {f"model.layers.1.{name}.weight": tensor for name, tensor in layer.items()}
    if architecture == "qwen2":
        tensors["model.layers.1.self_attn.q_proj.bias"] = normal(HEADS * HEAD_DIM)
    return tensors | {
        "model.embed_tokens.weight": normal(VOCABULARY, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
        "lm_head.weight": normal(VOCABULARY, HIDDEN),
    }


PARTS = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    *_, part, kind = name.split(".")
    return f"blk.1.{PARTS[part]}.{kind}" if "layers" in name else f"{PARTS[part]}.{kind}"


def write(path, architecture="llama", tensors=None, metadata=(), raw=None):
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for method, *arguments in metadata:
        getattr(writer, method)(*arguments)
    for name, tensor in (tensors or {}).items():
        if architecture == "llama" and ".q_proj." in name:
            tensor = interleaved(tensor, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            tensor = interleaved(tensor, KV_HEADS)
        writer.add_tensor(gguf_name(name), tensor)
    for name, tensor, kind in raw or ():
        writer.add_tensor(name, tensor, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


EMBEDDING = {"model.embed_tokens.weight": np.zeros((VOCABULARY, HIDDEN), np.float32)}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_reads_as_the_checkpoint_it_was_made_from(tmp_path, architecture):
    tensors = weights(architecture, np.random.default_rng(0))
    source = GgufSource(write(tmp_path / "m.gguf", architecture, tensors))
    assert isinstance(source, TensorSource)
    assert set(source.infos) == set(tensors)
    for name, expected in tensors.items():
        assert source.infos[name].shape == expected.shape
        assert source.infos[name].dtype == np.float32
        np.testing.assert_array_equal(source.read(name), expected)
        assert not source.read(name).flags.writeable


def test_config(tmp_path):
    source = GgufSource(
        write(tmp_path / "m.gguf", "llama", EMBEDDING, [("add_rope_dimension_count", HEAD_DIM)])
    )
    assert source.config == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize(
    ("architecture", "metadata", "expected"),
    [
        ("qwen3", [("add_key_length", 16)], {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16}),
        ("qwen2", [("add_eot_token_id", 7)], {"model_type": "qwen2", "eos_token_id": [2, 7]}),
        ("llama", [("add_eot_token_id", 2)], {"eos_token_id": 2}),
        (
            "llama",
            [("add_sliding_window", 64)],
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
        ),
        (
            "llama",
            [("add_rope_scaling_type", "linear"), ("add_rope_scaling_factor", 4.0)],
            {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ),
        (
            "qwen2",
            [
                ("add_rope_scaling_type", "yarn"),
                ("add_rope_scaling_factor", 4.0),
                ("add_rope_scaling_orig_ctx_len", 32),
            ],
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
        ),
    ],
)
def test_config_variants(tmp_path, architecture, metadata, expected):
    if ("add_rope_scaling_type", "linear") in metadata or ("add_rope_scaling_type", "yarn") in metadata:
        from gguf import RopeScalingType

        metadata = [(m, RopeScalingType(a) if m == "add_rope_scaling_type" else a) for m, a in metadata]
    config = GgufSource(write(tmp_path / "m.gguf", architecture, EMBEDDING, metadata)).config
    assert {key: config[key] for key in expected} == expected


def llama3_divisors(head_dim, theta, factor):
    """Llama 3's scaling frequency by frequency: short waves stay, long ones stretch, in between both are
    mixed."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            mix = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - mix) / factor + mix))
    return np.array(divisors, np.float32)


def test_llama3_scaling_is_recovered_from_its_factors(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    factors = llama3_divisors(64, 500000.0, 32.0)
    size = [("add_rope_dimension_count", 64)]
    raw = [("rope_freqs.weight", factors, None)]
    source = GgufSource(write(tmp_path / "m.gguf", "llama", EMBEDDING, size, raw))
    assert source.config["rope_scaling"] == scaling
    assert set(source.infos) == set(EMBEDDING)
    raw = [("rope_freqs.weight", factors * 2, None)]
    with pytest.raises(CheckpointError, match="not Llama 3's rotary scaling"):
        GgufSource(write(tmp_path / "n.gguf", "llama", EMBEDDING, size, raw))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantised_tensors_come_out_as_float32(tmp_path, kind, monkeypatch):
    monkeypatch.setattr("eagle_jax.checkpoints.gguf._ROWS_AT_ONCE_BYTES", 5 * 4 * FFN)
    quantised = GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(HIDDEN, FFN)).astype(np.float32)
    stored = quants.quantize(values, quantised)
    source = GgufSource(
        write(tmp_path / "m.gguf", "llama", EMBEDDING, raw=[("blk.0.ffn_down.weight", stored, quantised)])
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert source.infos[name].shape == values.shape
    found = source.read(name)
    np.testing.assert_array_equal(found, quants.dequantize(stored, quantised))
    np.testing.assert_allclose(found, values, atol=0.2 if kind == "Q4_1" else 0.02)


def test_tensors_of_unknown_purpose_keep_their_names(tmp_path):
    raw = [
        ("blk.0.attn_sinks.weight", np.zeros(4, np.float32), None),
        ("v.odd", np.zeros(4, np.float32), None),
    ]
    source = GgufSource(write(tmp_path / "m.gguf", "llama", EMBEDDING, raw=raw))
    assert {"blk.0.attn_sinks.weight", "v.odd"} <= set(source.infos)


@pytest.mark.parametrize(
    ("architecture", "tensors", "metadata", "message"),
    [
        ("gemma", EMBEDDING, [], "architecture 'gemma'; expected one of llama"),
        ("llama", EMBEDDING, [("add_expert_count", 8)], "mixture of 8 experts"),
        ("llama", EMBEDDING, [("add_uint16", "split.count", 3)], "one of 3 splits"),
        ("llama", {}, [], r"no token_embd\.weight"),
        ("llama", EMBEDDING, [("add_head_count_kv", [1, 2])], r"head_count_kv is \[1, 2\]"),
    ],
)
def test_what_cannot_be_read(tmp_path, architecture, tensors, metadata, message):
    with pytest.raises(CheckpointError, match=message):
        GgufSource(write(tmp_path / "m.gguf", architecture, tensors, metadata))


def test_missing_metadata(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count is None"):
        GgufSource(tmp_path / "m.gguf")


def test_every_truncation_is_noticed(tmp_path):
    whole = write(tmp_path / "m.gguf", "llama", EMBEDDING).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1000, 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf") as caught:
            GgufSource(cut)
        assert "\n" not in str(caught.value)


def test_damage(tmp_path):
    file = tmp_path / "m.gguf"
    with pytest.raises(CheckpointError, match="is missing"):
        GgufSource(file)
    file.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="GGUF version 1"):
        GgufSource(file)
    file.write_bytes(b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100)
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        GgufSource(file)
    with pytest.raises(CheckpointError, match="no tensor named"):
        GgufSource(write(file, "llama", EMBEDDING)).read("x")


def test_metadata_of_every_type(tmp_path):
    values = {
        "uint8": 2**8 - 1,
        "int8": -(2**7),
        "uint16": 2**16 - 1,
        "int16": -(2**15),
        "uint32": 2**32 - 1,
        "int32": -(2**31),
        "uint64": 2**64 - 1,
        "int64": -(2**63),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "héllo",
        "array": [1, -2, 3],
    }
    metadata = [(f"add_{kind}", f"x.{kind}", value) for kind, value in values.items()]
    metadata += [("add_array", "x.words", ["a", "", "ü"]), ("add_array", "x.flags", [True, False])]
    found = read_container(write(tmp_path / "m.gguf", "llama", EMBEDDING, metadata)).metadata
    assert {kind: found[f"x.{kind}"] for kind in values} == values
    assert found["x.words"] == ["a", "", "ü"]
    assert found["x.flags"] == [True, False]
