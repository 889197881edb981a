"""Converting leaves every bit as it was: targets and heads of all formats, to Orbax, to Hugging Face."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGUFWriter, TokenType
from golden_data import GOLDEN, TARGET, mesh
from models.families import Model, build
from safetensors.numpy import load_file, save_file
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from eagle_jax.checkpoints import load_tokenizer, open_source
from eagle_jax.checkpoints.gguf import GgufSource
from eagle_jax.convert import main
from eagle_jax.loading import LoadedTarget, load_head, load_target
from eagle_jax.models.config import ModelConfig
from eagle_jax.models.decoder import Target

SHIPPED = Path(__file__).parents[1] / "heads" / "smollm2-135m-eagle3.1"
EAGLE3, EAGLE1 = GOLDEN / "eagle3" / "head", GOLDEN / "eagle1" / "head_bias"
TAPS = "eagle_aux_hidden_state_layer_ids"
D, V, VD = 64, 199, 97


def command(*arguments):
    return main([str(argument) for argument in arguments])


def converted(source, folder, *options):
    """Source → Orbax → Hugging Face; returns both folders. Options are for the first step."""
    assert command(source, folder / "orbax", "--to", "orbax", *options) == 0
    assert command(folder / "orbax", folder / "hf", "--to", "hf") == 0
    assert sorted(p.name for p in folder.iterdir() if p.name.startswith(".")) == []
    return folder / "orbax", folder / "hf"


def tensors_of(path):
    source = open_source(path)
    return {name: source.read(name) for name in source.infos}


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name


def read_json(path):
    return json.loads(path.read_text())


# ---------------------------------------------------------------- targets


def safetensors(folder, name="llama3", dtype="float32", **options):
    build(name, dtype).hf.save_pretrained(folder, **options)


def shards(folder):
    safetensors(folder, "qwen2", "bfloat16", max_shard_size="8KB")
    assert len(list(folder.glob("*.safetensors"))) > 2


def torch_file(folder):
    model = build("qwen2", "float16").hf  # tied: the file has the embeddings twice
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def older_config(folder):
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)


def two_dtypes(folder):
    """Norms in float32 between matrices in bfloat16."""
    tensors = tensors_of(TARGET)
    bfloat16 = {n: t if t.ndim == 1 else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    save_file(bfloat16, folder / "model.safetensors")
    config = read_json(TARGET / "config.json") | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("make", [safetensors, shards, torch_file, older_config, two_dtypes])
def test_targets_come_back_as_they_were(tmp_path, make):
    folder = tmp_path / "source"
    folder.mkdir()
    make(folder)
    orbax, hf = converted(folder, tmp_path)
    expected, config = tensors_of(folder), read_json(folder / "config.json")
    if config["tie_word_embeddings"]:
        expected.pop("lm_head.weight", None)
    assert_same_tensors(tensors_of(hf), expected)
    assert read_json(hf / "config.json") == open_source(orbax).config == config


HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 4, 2, 8, 32, 48
WORDS = ["<unk>", "<s>", "</s>", "<|user|>"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"


def byte_level(writer):
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    tokens = [*WORDS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_merges(merges)
    return tokens, [TokenType.CONTROL] * 4 + [TokenType.NORMAL] * (len(tokens) - 4)


def sentence_piece(writer):
    pieces = ["\u2581he", "ll", "he", "llo", "\u2581", *"helo 12", "\u2581hello"]
    tokens = [*WORDS, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    writer.add_tokenizer_model("llama")
    writer.add_token_scores([0.0] * 260 + [-float(i) for i in range(len(pieces))])
    types = [TokenType.UNKNOWN, *[TokenType.CONTROL] * 3, *[TokenType.BYTE] * 256]
    return tokens, types + [TokenType.NORMAL] * len(pieces)


def gguf(path, tokenizer, tied):
    """A GGUF file of a Llama of two layers, and its weights under Hugging Face's names."""
    rng = np.random.default_rng(0)
    writer = GGUFWriter(path, "llama")
    tokens, types = tokenizer(writer)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_chat_template(TEMPLATE)
    writer.add_block_count(2)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    tensors = {}

    def add(file_name, name, *shape, heads=None):
        scale = 0.5 if len(shape) == 2 else 1.0
        value = tensors[name] = (scale * rng.normal(size=shape)).astype(np.float32)
        if heads is not None:  # llama.cpp has the two halves of a head side by side
            value = value.reshape(heads, 2, HEAD_DIM // 2, -1).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(file_name, np.ascontiguousarray(value))

    add("token_embd.weight", "model.embed_tokens.weight", len(tokens), HIDDEN)
    for i in range(2):
        layer, block = f"model.layers.{i}", f"blk.{i}"
        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        add(f"{block}.attn_norm.weight", f"{layer}.input_layernorm.weight", HIDDEN)
        add(f"{block}.ffn_norm.weight", f"{layer}.post_attention_layernorm.weight", HIDDEN)
        add(f"{block}.attn_q.weight", f"{layer}.self_attn.q_proj.weight", q, HIDDEN, heads=HEADS)
        add(f"{block}.attn_k.weight", f"{layer}.self_attn.k_proj.weight", kv, HIDDEN, heads=KV_HEADS)
        add(f"{block}.attn_v.weight", f"{layer}.self_attn.v_proj.weight", kv, HIDDEN)
        add(f"{block}.attn_output.weight", f"{layer}.self_attn.o_proj.weight", HIDDEN, q)
        add(f"{block}.ffn_gate.weight", f"{layer}.mlp.gate_proj.weight", FFN, HIDDEN)
        add(f"{block}.ffn_up.weight", f"{layer}.mlp.up_proj.weight", FFN, HIDDEN)
        add(f"{block}.ffn_down.weight", f"{layer}.mlp.down_proj.weight", HIDDEN, FFN)
    add("output_norm.weight", "model.norm.weight", HIDDEN)
    if not tied:
        add("output.weight", "lm_head.weight", len(tokens), HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def assert_same_tokenizer(found, expected):
    for text in ("hello hello 12\n\n1. hell", " he<|user|>llo</s>", "ü 世\t", ""):
        ids = expected(text).input_ids
        assert found(text).input_ids == ids
        assert found.decode(ids) == expected.decode(ids)
    messages = [{"role": "user", "content": "hello 1"}]
    assert found.apply_chat_template(messages, tokenize=False) == "<|user|>hello 1"
    for token in ("bos_token", "eos_token", "unk_token"):
        assert getattr(found, token) == getattr(expected, token)


@pytest.mark.parametrize(("tokenizer", "tied"), [(byte_level, True), (sentence_piece, False)])
def test_gguf_with_its_tokenizer(tmp_path, tokenizer, tied):
    file = tmp_path / "m.gguf"
    expected = gguf(file, tokenizer, tied)
    orbax, hf = converted(file, tmp_path)
    assert_same_tensors(tensors_of(hf), expected)
    assert read_json(hf / "config.json") == open_source(orbax).config == GgufSource(file).config
    for folder in (orbax, hf):
        assert_same_tokenizer(load_tokenizer(folder), load_tokenizer(file))
    assert_same_tokenizer(AutoTokenizer.from_pretrained(hf), load_tokenizer(file))


def logits(model, tokens):
    """The first pass over one prompt."""
    T = len(tokens)
    mask = np.tril(np.ones((1, T, T), bool))
    cache, lengths = model.empty_cache(1, T), np.zeros(1, np.int32)
    arguments = tokens[None], np.arange(T)[None], cache, lengths, mask, np.array([T])
    found, _ = model.forward(model.params, *arguments)
    return np.asarray(found[0])


@pytest.mark.parametrize("make", [lambda path: gguf(path, sentence_piece, tied=False), None])
def test_transformers_runs_what_is_written(tmp_path, make):
    """A GGUF file, and a tied model in shards; transformers reads what we write and we what it came from."""
    source = tmp_path / ("source" if make is None else "m.gguf")
    if make is None:
        safetensors(source, "qwen2", max_shard_size="8KB")
    else:
        make(source)
    assert command(source, tmp_path / "hf", "--to", "hf") == 0
    loaded = load_target(source, "float32", mesh())
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    model = Model(hf, loaded.target, loaded.params)
    tokens = np.random.default_rng(0).integers(0, loaded.target.config.vocab_size, 20)
    np.testing.assert_allclose(logits(model, tokens), model.hf_logits(tokens), atol=1e-4)


def test_tokenizer_files_are_copied(tmp_path):
    gguf(tmp_path / "m.gguf", byte_level, tied=True)
    source = tmp_path / "source"
    assert command(tmp_path / "m.gguf", source, "--to", "hf") == 0
    (source / "generation_config.json").write_text('{"temperature": 0.6}')
    (source / "notes.txt").write_text("not part of a checkpoint")
    orbax, hf = converted(source, tmp_path)
    assert isinstance(load_tokenizer(orbax), PreTrainedTokenizerFast)
    assert {p.name for p in hf.iterdir()} == {p.name for p in source.iterdir()} - {"notes.txt"}
    for file in hf.glob("*.json*"):
        if file.name != "config.json":
            assert file.read_bytes() == (source / file.name).read_bytes()


# ---------------------------------------------------------------- heads


def golden(folder=EAGLE3):
    return load_file(folder / "model.safetensors"), read_json(folder / "config.json")


def random(seed, *shape, around=0.0):
    return (around + 0.1 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def norms(*names):
    return {f"{name}.weight": random(i, D, around=1.0) for i, name in enumerate(names)}


def cast(tensors, dtype):
    return {name: t if t.dtype.kind in "ib" else t.astype(dtype) for name, t in tensors.items()}


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def eagle31():
    tensors, config = golden()
    tensors |= norms("fc_norm.0", "fc_norm.1", "fc_norm.2")
    return tensors, config | {"fc_norm": True, "norm_output": True, TAPS: [1, 4, 8]}


def older_sglang():
    tensors, config = golden()
    tensors |= norms("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    nested = {TAPS: [0, 3, 7], "norm_output": True, "target_hidden_size": D}
    return {f"model.{n}": t for n, t in tensors.items()}, config | {
        "use_aux_norm": True,
        "eagle_config": nested,
    }


def speculators():
    """Its layer is nested, null means the layer's or target's, and `norm_before_residual` is true."""
    tensors, config = golden()
    tensors = {n.replace("midlayer", "layers.0"): t for n, t in tensors.items()}
    tensors |= norms("verifier_norm") | {"input_norm.weight": random(9, 3 * D, around=1.0)}
    layer = without(config, "draft_vocab_size", "architectures", "rope_theta", "torch_dtype")
    layer |= {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}}
    return tensors, {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": layer,
        "draft_vocab_size": VD,
        "norm_before_fc": True,
        "target_hidden_size": None,
        "hidden_size": None,
        "dtype": "float32",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "t"}},
    }


def own_width():
    """Half as wide as its target, with embeddings of its own."""
    tensors, config = golden()
    tensors = {n: t if t.dtype.kind in "ib" else _narrowed(n, t) for n, t in tensors.items()}
    tensors["embed_tokens.weight"] = random(3, V, D // 2)
    return tensors, config | {"hidden_size": D // 2, "head_dim": 16, "target_hidden_size": D}


def _narrowed(name, tensor):
    rows, *columns = tensor.shape
    narrow = ("fc.", "norm", "o_proj", "down_proj")
    rows = rows // 2 if any(part in name for part in narrow) else rows
    if columns and not any(part in name for part in ("fc.", "o_proj", "down_proj")):
        columns = [columns[0] // 2]
    return np.ascontiguousarray(tensor[:rows, : columns[0]] if columns else tensor[:rows])


def qwen3():
    """No head_dim: 128 in that family. Norms on queries and keys, and biases."""
    tensors, config = golden()
    for name, rows in (("q", 512), ("k", 256), ("v", 256)):
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = random(rows, rows, 2 * D)
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = random(rows + 1, rows)
    tensors["midlayer.self_attn.o_proj.weight"] = random(4, D, 512)
    tensors |= {f"midlayer.self_attn.{n}_norm.weight": random(5, 128, around=1.0) for n in "qk"}
    return tensors, config | {"model_type": "qwen3"}


def one_vocabulary():
    tensors, config = golden()
    return without(tensors, "d2t", "t2d") | {"lm_head.weight": random(6, V, D)}, without(
        config, "draft_vocab_size", "vocab_size"
    )


def bfloat16():
    tensors, config = golden()
    return {
        n: t if t.dtype.kind in "ib" else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()
    }, config


def hass():
    tensors, config = golden(EAGLE1)
    return tensors | norms("embedding_layernorm", "hidden_states_layernorm"), config


HEADS_OF_OTHERS = {
    "eagle3": golden,
    "eagle3.1": eagle31,
    "older SGLang": older_sglang,
    "speculators": speculators,
    "own width": own_width,
    "qwen3": qwen3,
    "one vocabulary": one_vocabulary,
    "bfloat16": bfloat16,
    "eagle1": lambda: golden(EAGLE1),
    "eagle1 without bias": lambda: golden(EAGLE1.with_name("head_nobias")),
    "hass": hass,
}


def written(folder, tensors, config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def a_target(config, dtype):
    """As much of a target as loading a head needs."""
    model = ModelConfig.from_hf(config)
    return LoadedTarget(Path(), Target(model, dtype), {"embed_tokens.weight": jnp.zeros(())})


def assert_same_head(folder, expected, loaded, method):
    found = load_head(folder, loaded, method, mesh())
    assert found.config == expected.config
    assert_same_tensors(found.params.head, expected.params.head)


@pytest.mark.parametrize("name", HEADS_OF_OTHERS)
def test_heads_come_back_as_they_were(tmp_path, name):
    tensors, config = HEADS_OF_OTHERS[name]()
    source = written(tmp_path / "source", tensors, config)
    method = "eagle" if name.startswith(("eagle1", "hass")) else "eagle3"
    loaded = a_target(read_json(TARGET / "config.json"), "bfloat16" if name == "bfloat16" else "float32")
    expected = load_head(source, loaded, method, mesh())
    orbax, hf = converted(source, tmp_path, *(("--target", TARGET) if method == "eagle3" else ()))
    assert_same_head(orbax, expected, loaded, method)
    assert_same_head(hf, expected, loaded, method)
    found, new_config = tensors_of(hf), read_json(hf / "config.json")
    if method == "eagle":
        assert_same_tensors(found, tensors)
        assert new_config == open_source(orbax).config == config
        return
    # What vLLM and SGLang look for.
    assert found.keys() - {"t2d"} == expected.params.head.keys()
    assert ("embed_tokens.weight" in found) == ("embed_tokens.weight" in tensors)
    for mapping in {"d2t", "t2d"} & tensors.keys():
        assert found[mapping].dtype == (np.int64 if mapping == "d2t" else np.bool_)
        np.testing.assert_array_equal(found[mapping], tensors[mapping.removeprefix("model.")])
    assert new_config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert new_config[TAPS] == list(expected.config.taps)
    assert new_config["eagle_config"][TAPS] == [tap - 1 for tap in expected.config.taps]
    assert new_config["torch_dtype" if "dtype" not in config else "dtype"] == loaded.target.dtype
    assert not new_config.keys() & {"transformer_layer_config", "speculators_model_type", "auto_map"}
    for switch in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"):
        assert new_config.get(switch, False) == getattr(expected.config, switch)
    # Once more, and now without the target.
    assert command(hf, tmp_path / "again", "--to", "hf") == 0
    assert_same_tensors(tensors_of(tmp_path / "again"), found)
    assert read_json(tmp_path / "again" / "config.json") == new_config


def test_the_shipped_head(tmp_path):
    """Both tap lists stand in its config, so its target is not needed."""
    orbax, hf = converted(SHIPPED, tmp_path)
    config = read_json(SHIPPED / "config.json")
    assert_same_tensors(tensors_of(hf), tensors_of(SHIPPED))
    assert read_json(hf / "config.json") == open_source(orbax).config == config | {"target_hidden_size": 576}
    loaded = a_target(config | {"num_hidden_layers": 30}, "bfloat16")
    assert_same_head(orbax, load_head(SHIPPED, loaded, "eagle3", mesh()), loaded, "eagle3")


def test_pytorch_heads(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(EAGLE1 / name, source)
    _, hf = converted(source, tmp_path)
    assert_same_tensors(tensors_of(hf), tensors_of(EAGLE1))
    assert read_json(hf / "config.json") == read_json(EAGLE1 / "config.json")


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtype_changes_floats_only(tmp_path, dtype):
    source = written(tmp_path / "source", *golden())
    orbax, hf = converted(source, tmp_path, "--dtype", dtype, "--target", TARGET)
    original = {n.replace("midlayer", "layers.0"): t for n, t in golden()[0].items()}
    kept = cast(original, dtype)
    assert_same_tensors(tensors_of(hf), kept)
    assert read_json(hf / "config.json")["torch_dtype"] == dtype
    assert command(orbax, tmp_path / "back", "--to", "hf", "--dtype", "float32") == 0
    widened = {n: t.astype(np.float32) if t.dtype == dtype else t for n, t in kept.items()}
    assert_same_tensors(tensors_of(tmp_path / "back"), widened)


def test_what_float16_cannot_hold(tmp_path, capsys):
    tensors, config = golden(EAGLE1)
    tensors["fc.bias"] = np.full_like(tensors["fc.bias"], 1e5)
    source = written(tmp_path / "source", tensors, config)
    assert command(source, tmp_path / "out", "--to", "hf", "--dtype", "float16") == 2
    assert capsys.readouterr().err == "error: fc.bias has values that float16 cannot hold; choose bfloat16\n"


def test_float64(tmp_path, capsys):
    tensors, config = golden(EAGLE1)
    source = written(
        tmp_path / "source", tensors | {"fc.bias": tensors["fc.bias"].astype(np.float64)}, config
    )
    assert command(source, tmp_path / "out", "--to", "hf") == 2
    assert "fc.bias is stored as float64; choose one of float32" in capsys.readouterr().err
    _, hf = converted(source, tmp_path, "--dtype", "float32")
    assert_same_tensors(tensors_of(hf), tensors)


# ---------------------------------------------------------------- refusals


def error_of(capsys, folder, *arguments):
    """The one line that a refused command says; nothing may have been written."""
    before = sorted(folder.rglob("*"))
    assert command(*arguments) == 2
    assert sorted(folder.rglob("*")) == before
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    return captured.err


def head_without(*names):
    def make(folder):
        tensors, config = golden()
        return written(folder, without(tensors, *names), config)

    return make


def head_with(tensors=None, **config):
    def make(folder):
        own_tensors, own = golden()
        return written(folder, own_tensors | (tensors or {}), own | config)

    return make


def empty(folder):
    folder.mkdir()
    return folder


def other_model(folder):
    folder.mkdir()
    shutil.copy(TARGET / "model.safetensors", folder)
    (folder / "config.json").write_text('{"model_type": "mamba"}')
    return folder


D2T = np.arange(VD, dtype=np.int64) * 2


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda folder: folder, (), "does not exist; expected a folder, a .gguf file"),
        (empty, (), "has neither config.json and weights"),
        (other_model, (), "model_type 'mamba' is not supported"),
        (head_with(), (), "its config lists none: name the target with --target"),
        (head_with(**{TAPS: [1, 3, 4]}), (), "its config gives [1, 3, 4], in one numbering or the other"),
        (head_with(**{TAPS: [1, 3, 4], "eagle_config": {TAPS: [1, 3, 4]}}), (), "name the target with --tar"),
        (head_with(), ("--target", "nowhere"), "nowhere does not exist"),
        (head_with(vocab_size=200), ("--target", TARGET), "its vocabulary is 200, the target's 199"),
        (head_without("fc.weight"), ("--target", TARGET), "has no fc.weight: this is no EAGLE head"),
        (head_with({"d2t": D2T + 8}), ("--target", TARGET), "the token ids 8 … 296; the target's vocab"),
        (head_with({"d2t": D2T - 1}), ("--target", TARGET), "the token ids -1 … 287; the target's vocab"),
        (lambda folder: TARGET, ("--target", TARGET), "--target is for heads, and"),
        (lambda folder: TARGET, ("--dtype", "int8"), "argument --dtype: invalid choice"),
        (lambda folder: TARGET, ("--frce",), "unrecognized arguments: --frce (--help explains)"),
    ],
)
def test_refusals(tmp_path, capsys, make, options, message):
    source = make(tmp_path / "source")
    error = error_of(capsys, tmp_path, source, tmp_path / "out", "--to", "hf", *options)
    assert message in error
    assert error.count("\n") == 1


def test_wrong_tensors_are_listed(tmp_path, capsys):
    tensors, config = golden(EAGLE1)
    tensors = without(tensors, "layers.0.mlp.up_proj.weight") | {"odd.weight": random(0, 3)}
    source = written(tmp_path / "source", tensors, config)
    error = error_of(capsys, tmp_path, source, tmp_path / "out", "--to", "orbax")
    assert "missing: layers.0.mlp.up_proj.weight float32[96, 64]" in error
    assert "unexpected: odd.weight float32[3]" in error


def test_a_head_that_leaves_its_vocabulary_open(tmp_path, capsys):
    tensors, config = golden(EAGLE1)
    source = written(tmp_path / "source", tensors, without(config, "vocab_size"))
    error = error_of(capsys, tmp_path, source, tmp_path / "out", "--to", "hf")
    assert "this head's config lacks vocab_size; if these are its target's" in error
    assert command(source, tmp_path / "out", "--to", "hf", "--target", TARGET) == 0


def test_what_is_there_is_replaced_by_force_only(tmp_path, capsys):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be written
    assert command(EAGLE1, out, "--to", "orbax") == 0
    capsys.readouterr()
    assert "is not empty" in error_of(capsys, tmp_path, TARGET, out, "--to", "hf")
    assert command(TARGET, out, "--to", "hf", "--force") == 0
    assert_same_tensors(tensors_of(out), tensors_of(TARGET))
    assert not (out / "eagle_jax.json").exists()
    assert command(out, out, "--to", "orbax", "--force") == 0  # in place
    assert command(out, tmp_path / "hf", "--to", "hf") == 0
    assert_same_tensors(tensors_of(tmp_path / "hf"), tensors_of(TARGET))
    capsys.readouterr()
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("")
    error = error_of(capsys, tmp_path, TARGET, other, "--to", "hf", "--force")
    assert "holds no checkpoint and will not be replaced, even by force" in error
    error = error_of(capsys, tmp_path, TARGET, other / "thesis.txt", "--to", "hf", "--force")
    assert "is a file" in error
    error = error_of(capsys, tmp_path, TARGET, other / "thesis.txt" / "out", "--to", "hf")
    assert "cannot be written: " in error


@pytest.mark.parametrize(("to", "module"), [("hf", "huggingface"), ("orbax", "orbax")])
def test_a_full_disk_leaves_nothing(tmp_path, capsys, monkeypatch, to, module):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"eagle_jax.checkpoints.{module}.write_json", full)
    error = error_of(capsys, tmp_path, EAGLE1, tmp_path / "out", "--to", to)
    assert error == f"error: {tmp_path / 'out'} cannot be written: No space left on device\n"


def test_the_command_says_what_it_wrote(tmp_path, capsys):
    assert command(EAGLE1, tmp_path / "out", "--to", "hf") == 0
    assert capsys.readouterr() == (f"{tmp_path / 'out'}: head, 11 parameters, 0.2 MiB, hf\n", "")


def test_help_is_instant():
    code = (
        "import sys\nfrom eagle_jax.convert import main\n"
        "try:\n    main(['--help'])\n"
        "except SystemExit as e:\n    assert e.code == 0\n"
        "assert not {'jax', 'numpy', 'rich'} & sys.modules.keys()\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for word in ("--to {orbax,hf}", "--dtype", "--target", "--force", "GGUF", "Memory"):
        assert word in result.stdout
