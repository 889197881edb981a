"""Every layout in which heads are released: what it becomes and computes, and which heads are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import GOLDEN, ROWS, TARGET, TOLERANCE, ListeningDrafter, greedy, mesh, target
from head_in_numpy import NumpyHead
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.draft_tree import StaticTree
from eagle_jax.drafters.head_config import HeadError, read_head_config, resolve_taps
from eagle_jax.drafters.protocol import Context, Seen
from eagle_jax.loading import load_head

D, V, VD = 64, 199, 97
EAGLE3, EAGLE1 = GOLDEN / "eagle3" / "head", GOLDEN / "eagle1" / "head_nobias"


def golden(folder):
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())


def load(tmp_path, tensors, config, method="eagle3", **options):
    """Writes a head folder and loads it."""
    folder = tmp_path / "head"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(t) for name, t in tensors.items()}, folder / "model.safetensors")
    return load_head(folder, target(), method, mesh(), **options)


def rng_tensor(seed, *shape, around=0.0, scale=0.1):
    return (around + scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def norm_weight(seed, size=D):
    return rng_tensor(seed, size, around=1.0, scale=0.3)


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


def assert_same_head(loaded, expected):
    assert loaded.config == expected.config
    assert loaded.params.head.keys() == expected.params.head.keys()
    for name, value in expected.params.head.items():
        np.testing.assert_array_equal(loaded.params.head[name], value, err_msg=name)


@pytest.fixture(scope="module")
def plain():
    return load_head(EAGLE3, target(), "eagle3", mesh())


# ---------------------------------------------------------------- layouts that mean the same


def renamed(prefix, layer):
    def layout(tensors, config):
        return {prefix + name.replace("midlayer.", layer): t for name, t in tensors.items()}, config

    return layout


def with_verifier(tensors, config):
    extra = {"verifier_lm_head.weight": rng_tensor(0, V, D), "verifier_norm.weight": norm_weight(0)}
    return tensors | extra, config


def without_t2d(tensors, config):
    return without(tensors, "t2d"), config


def with_rotary_table(tensors, config):
    return tensors | {"midlayer.self_attn.rotary_emb.inv_freq": rng_tensor(0, 8)}, config


def transformers_5(tensors, config):
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"]}
    config = without(config, "torch_dtype", "rope_theta")
    return tensors, config | {"dtype": "float32", "rope_parameters": rope, "head_dim": 16}


def architecture(name):
    def layout(tensors, config):
        return tensors, config | {"architectures": [name]}

    return layout


@pytest.mark.parametrize(
    "layout",
    [
        renamed("", "layers.0."),
        renamed("model.", "midlayer."),
        renamed("model.", "layers.0."),
        with_verifier,
        without_t2d,
        with_rotary_table,
        transformers_5,
        architecture("LlamaForCausalLMEagle3"),
        architecture("Eagle3LlamaForCausalLM"),
        lambda tensors, config: (tensors, without(config, "rope_theta")),  # 10000 where it is omitted
        lambda tensors, config: (tensors, without(config, "vocab_size")),  # then the target's
    ],
)
def test_layouts_that_mean_the_same(tmp_path, plain, layout):
    assert_same_head(load(tmp_path, *layout(*golden(EAGLE3))), plain)


@pytest.mark.parametrize(("folder", "method"), [("eagle3/head", "eagle3"), ("eagle1/head_bias", "eagle")])
def test_pytorch_files(tmp_path, folder, method):
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(GOLDEN / folder / name, tmp_path)
    assert_same_head(
        load_head(tmp_path, target(), method, mesh()), load_head(GOLDEN / folder, target(), method, mesh())
    )


def speculators(config, **more):
    """The same config as the speculators library writes it."""
    layer = without(config, "draft_vocab_size", "architectures")
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "draft_vocab_size": config["draft_vocab_size"],
        "target_hidden_size": None,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [],
            "verifier": {"name_or_path": "t"},
        },
    } | more


def test_speculators(tmp_path, plain):
    """There `norm_before_residual` is true unless stated."""
    tensors, config = renamed("", "layers.0.")(*golden(EAGLE3))
    tensors, _ = with_verifier(tensors, config)
    nested = speculators(config)
    implicit = load(tmp_path, tensors, nested)
    assert implicit.config == replace(plain.config, norm_before_residual=True)
    explicit = load(tmp_path, tensors, speculators(config, norm_before_residual=False))
    assert_same_head(explicit, plain)
    ids = speculators(config, eagle_aux_hidden_state_layer_ids=[1, 3, 8], target_hidden_size=D)
    assert load(tmp_path, tensors, ids).config.taps == (1, 3, 8)


def fc_norms(tensors, names=("fc_norm.0", "fc_norm.1", "fc_norm.2")):
    return tensors | {f"{name}.weight": norm_weight(i) for i, name in enumerate(names)}


def test_legacy_names_of_the_fusion_norms(tmp_path):
    tensors, config = golden(EAGLE3)
    expected = load(tmp_path, fc_norms(tensors), config | {"fc_norm": True})
    legacy = fc_norms(tensors, ("aux_norm_low", "aux_norm_mid", "aux_norm_high"))
    assert expected.config.fc_norm
    assert_same_head(load(tmp_path, legacy, config | {"use_aux_norm": True}), expected)
    prefixed = {f"model.{name}": t for name, t in legacy.items()}
    assert_same_head(load(tmp_path, prefixed, config | {"use_aux_norm": True}), expected)


@pytest.mark.parametrize("switch", ["fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"])
def test_switches_stand_at_either_level_and_can_be_overridden(switch):
    _, config = golden(EAGLE3)
    names = frozenset({"fc.weight", "layers.0.hidden_norm.weight"})

    def read(config, **overrides):
        return getattr(
            read_head_config(config, names, target().target.config, "eagle3", None, overrides), switch
        )

    assert read(config) is False
    assert read(config | {switch: True}) is True
    assert read(config | {"eagle_config": {switch: True}}) is True
    assert read(config | {switch: False, "eagle_config": {switch: True}}) is False
    assert read(config | {switch: True}, **{switch: False}) is False
    assert read(config, **{switch: True}) is True


# ---------------------------------------------------------------- layouts that compute something else


def drafted(loaded, states, history, steps=2):
    """Our head's passes: over rows of true features, then down a chain from what it feeds back."""
    T = states.shape[1]
    drafter = ListeningDrafter(loaded.functional, loaded.config, StaticTree.chain(steps), True, "float32")

    count, zeros, params = jnp.full((ROWS,), T), jnp.zeros((ROWS,), jnp.int32), loaded.params
    noise, presence = jnp.zeros((ROWS, steps + 1, V)), jnp.zeros((ROWS, V), bool)
    with jax.disable_jit():  # one operation at a time, most of which the variants share
        state = drafter.absorb(params, drafter.init_state(ROWS, 2 * T), Seen(history, zeros, count, states))
        drafter.propose(params, state, Context(history, count + 1, greedy(), noise, presence))
    assert len(drafter.heard) == steps
    return drafter.heard


def compare(loaded, tensors, T=7, **reference):
    """Hidden states, logits and drafts of the library against a few lines of numpy."""
    rng = np.random.default_rng(5)
    states = rng.standard_normal((ROWS, T, D * len(loaded.config.taps))).astype(np.float32)
    history = rng.integers(3, V, (ROWS, 2 * T)).astype(np.int32)
    levels = drafted(loaded, states, history)
    table = load_file(TARGET / "model.safetensors")
    for row in range(ROWS):
        head = NumpyHead(tensors, table["model.embed_tokens.weight"], table["lm_head.weight"], **reference)
        fed, logits = head.step(history[row, 1 : T + 1], head.fuse(states[row]))
        for level in levels:
            np.testing.assert_allclose(level.hidden[row, 0], fed[-1], **TOLERANCE)
            np.testing.assert_allclose(level.logits[row, 0], logits[-1], **TOLERANCE)
            draft = int(np.argmax(logits[-1]))
            token = draft if "d2t" not in tensors else draft + int(tensors["d2t"][draft])
            assert level.tokens[row, 0, 0] == token
            fed, logits = head.step(np.array([token]), fed[-1:])


def variant(**changes):
    """The golden EAGLE-3 head with other switches, and the tensors that these need."""

    def make():
        tensors, config = renamed("", "layers.0.")(*golden(EAGLE3))
        if changes.get("fc_norm"):
            tensors = fc_norms(tensors)
        if changes.get("norm_before_fc"):
            tensors = tensors | {"input_norm.weight": norm_weight(7, 3 * D)}
        return tensors, config, changes, changes

    return make


def nested_switches():
    tensors, config, switches, _ = variant(norm_before_fc=True, norm_before_residual=True)()
    return tensors, config, {"eagle_config": switches}, switches


def speculators_default():
    tensors, config, _, _ = variant()()
    return tensors, speculators(config), {}, {"norm_before_residual": True}


def other_head_dim(norms=False):
    """Four heads of 24 in a head 64 wide."""

    def make():
        tensors, config, _, _ = variant()()
        for name, heads in (("q", 4), ("k", 2), ("v", 2)):
            tensors[f"layers.0.self_attn.{name}_proj.weight"] = rng_tensor(heads, heads * 24, 2 * D)
        tensors["layers.0.self_attn.o_proj.weight"] = rng_tensor(9, D, 4 * 24)
        more = {"head_dim": 24}
        if norms:
            tensors["layers.0.self_attn.q_norm.weight"] = norm_weight(1, 24)
            tensors["layers.0.self_attn.k_norm.weight"] = norm_weight(2, 24)
            more |= {"model_type": "qwen3", "architectures": ["Eagle3Qwen3ForCausalLM"]}
        return tensors, config, more, {}

    return make


def own_width():
    """32 wide, over a target of 64, with embeddings of its own."""
    _, config, _, _ = variant()()
    W, F = 32, 48
    shapes = {
        "fc.weight": (W, 3 * D),
        "lm_head.weight": (VD, W),
        "embed_tokens.weight": (V, W),
        "layers.0.self_attn.q_proj.weight": (W, 2 * W),
        "layers.0.self_attn.k_proj.weight": (W // 2, 2 * W),
        "layers.0.self_attn.v_proj.weight": (W // 2, 2 * W),
        "layers.0.self_attn.o_proj.weight": (W, W),
        "layers.0.mlp.gate_proj.weight": (F, W),
        "layers.0.mlp.up_proj.weight": (F, W),
        "layers.0.mlp.down_proj.weight": (W, F),
    }
    tensors = {name: rng_tensor(i, *shape, scale=0.3) for i, (name, shape) in enumerate(shapes.items())}
    for i, name in enumerate(("input_layernorm", "hidden_norm", "post_attention_layernorm")):
        tensors[f"layers.0.{name}.weight"] = norm_weight(20 + i, W)
    tensors["norm.weight"] = norm_weight(23, W)
    tensors["d2t"] = golden(EAGLE3)[0]["d2t"]
    return tensors, config, {"hidden_size": W, "intermediate_size": F, "target_hidden_size": D}, {}


def full_vocabulary(mapped):
    def make():
        tensors, config, _, _ = variant()()
        tensors = without(tensors, "d2t", "t2d") | {"lm_head.weight": rng_tensor(3, V, D)}
        if mapped:  # in an order of its own
            tensors["d2t"] = (V - 1 - 2 * np.arange(V)).astype(np.int64)
        return tensors, config, {"draft_vocab_size": V if mapped else None}, {}

    return make


def other_rotary_base():
    tensors, config, _, _ = variant()()
    config = without(config, "rope_theta", "torch_dtype")
    nested = {"rope_type": "default", "rope_theta": 500.0}
    return tensors, config, {"rope_parameters": nested, "dtype": "float32"}, {"theta": 500.0}


def own_embeddings():
    tensors, config, _, _ = variant()()
    return tensors | {"embed_tokens.weight": rng_tensor(4, V, D)}, config, {}, {}


VARIANTS = {
    "plain": variant(),
    "3.1": variant(fc_norm=True, norm_output=True),
    "norm_output": variant(norm_output=True),
    "fc_norm": variant(fc_norm=True),
    "norm_before_fc": variant(norm_before_fc=True),
    "norm_before_residual": variant(norm_before_residual=True),
    "nested switches": nested_switches,
    "all at once": variant(fc_norm=True, norm_output=True, norm_before_fc=True, norm_before_residual=True),
    "speculators": speculators_default,
    "head_dim": other_head_dim(),
    "qwen3": other_head_dim(norms=True),
    "own width": own_width,
    "own embeddings": own_embeddings,
    "one vocabulary": full_vocabulary(mapped=False),
    "one vocabulary, mapped": full_vocabulary(mapped=True),
    "rope_parameters": other_rotary_base,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_eagle3_variants_compute_what_they_say(tmp_path, name):
    tensors, config, more, reference = VARIANTS[name]()
    compare(load(tmp_path, tensors, config | more), tensors, **reference)


def hass():
    tensors, config = golden(EAGLE1)
    norms = {"embedding_layernorm.weight": norm_weight(1), "hidden_states_layernorm.weight": norm_weight(2)}
    return tensors | norms, config


def eagle1_with_biases():
    tensors, config = golden(EAGLE1)
    sizes = {"q": 64, "k": 32, "v": 32}
    biases = {f"layers.0.self_attn.{n}_proj.bias": rng_tensor(s, s, scale=1.0) for n, s in sizes.items()}
    return tensors | biases, config | {"qkv_bias": True}


def eagle1_of_a_qwen2_target():
    """Such heads copy their target's config, whose family has biases, and have none."""
    tensors, config = golden(EAGLE1)
    return tensors, config | {"model_type": "qwen2"}


@pytest.mark.parametrize("make", [lambda: golden(EAGLE1), hass, eagle1_with_biases, eagle1_of_a_qwen2_target])
def test_eagle1_variants_compute_what_they_say(tmp_path, make):
    tensors, config = make()
    loaded = load(tmp_path, tensors, config, "eagle")
    assert loaded.config.input_norms == (make is hass)
    compare(loaded, tensors)


# ---------------------------------------------------------------- taps

KEY = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("config", "layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),  # the default
        ({}, 7, (2, 3, 4)),  # the shallowest target with three distinct ones
        ({KEY: [2, 16, 29]}, 32, (2, 16, 29)),  # the default itself, numbered by boundary …
        ({KEY: [1, 15, 28]}, 32, (2, 16, 29)),  # … or by the layer whose output it is,
        ({"eagle_config": {KEY: [2, 16, 29]}}, 32, (2, 16, 29)),  # wherever it stands
        ({"eagle_config": {KEY: [1, 15, 28]}}, 32, (2, 16, 29)),
        ({KEY: [3, 10, 20]}, 32, (3, 10, 20)),  # another list: by boundary at the top,
        ({"eagle_config": {KEY: [3, 10, 20]}}, 32, (4, 11, 21)),  # by output when nested
        ({KEY: [3, 10, 20], "eagle_config": {KEY: [2, 9, 19]}}, 32, (3, 10, 20)),  # both: the top is read
        ({KEY: [2, 16, 29], "eagle_config": {KEY: [1, 15, 28]}}, 32, (2, 16, 29)),
        ({KEY: None, "eagle_config": {KEY: [3, 10, 20]}}, 32, (4, 11, 21)),
        ({KEY: [24, 30, 36]}, 36, (24, 30, 36)),  # after the last layer
        ({"eagle_config": {KEY: [23, 29, 35]}}, 36, (24, 30, 36)),
        ({"eagle_config": None}, 8, (2, 4, 5)),
        ({KEY: [1, 2, 3]}, 4, (1, 2, 3)),  # a shallow target with a list of its own
    ],
)
def test_taps(config, layers, taps):
    assert resolve_taps(config, layers) == taps


@pytest.mark.parametrize("layers", [1, 2, 4, 5, 6])
def test_shallow_targets_have_no_default_taps(layers):
    with pytest.raises(HeadError, match=r"not three distinct states; set speculative\.taps"):
        resolve_taps({}, layers)


def test_taps_given_by_the_user_win():
    _, config = golden(EAGLE3)
    names = frozenset({"fc.weight", "layers.0.hidden_norm.weight"})
    for given in (config, config | {KEY: [1, 2, 3]}):
        read = read_head_config(given, names, target().target.config, "eagle3", taps=(0, 4, 8))
        assert read.taps == (0, 4, 8)
    shallow = replace(target().target.config.with_layers(4))
    assert read_head_config(config, names, shallow, "eagle3", taps=(1, 2, 3)).taps == (1, 2, 3)


# ---------------------------------------------------------------- refusals


def mla(tensors, config):
    extra = {"midlayer.self_attn.kv_a_proj_with_mqa.weight": rng_tensor(0, 24, 2 * D)}
    return tensors | extra, config | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}


def whole_model(tensors, config):
    return golden(TARGET)


def one_layer_model(tensors, config):
    tensors, config = golden(TARGET)
    return {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}, config


def changed(**more):
    return lambda tensors, config: (tensors, config | more)


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        (changed(vocab_size=200), {}, "another target: its vocabulary is 200, the target's 199"),
        (
            changed(target_hidden_size=128),
            {},
            "another target: it reads states 128 wide, the target's are 64",
        ),
        (
            changed(hidden_size=32, target_hidden_size=64),
            {},
            "32 wide, the target 64, and it brings no embedd",
        ),
        (changed(draft_vocab_size=300), {}, "draft vocabulary 300 is larger than the target's 199"),
        (changed(), {"method": "eagle"}, "is an EAGLE-3 head, but the method is 'eagle'; use eagle3"),
        (lambda *_: golden(EAGLE1), {}, "is an EAGLE-1 head, but the method is 'eagle3'; use eagle"),
        (changed(), {"method": "medusa"}, "'medusa' has no head; methods with one: eagle, eagle3"),
        (mla, {}, "Eagle3DeepseekV2ForCausalLM is an MLA head, which is not supported"),
        (whole_model, {}, "has several layers; EAGLE heads have one. Is this a whole model?"),
        (one_layer_model, {}, "no fc.weight: this is no EAGLE head"),
        (
            changed(),
            {"overrides": {"norm_outputs": False}},
            "unknown norm_outputs; allowed: fc_norm, norm_out",
        ),
        (changed(), {"taps": (2, 4, 9)}, r"taps \[2, 4, 9\] reach outside the target's boundaries 0 … 8"),
        (changed(), {"taps": (-1, 4, 8)}, r"taps \[-1, 4, 8\] reach outside"),
        (changed(**{KEY: [2, 4, 30]}), {}, r"taps \[2, 4, 30\] reach outside"),
    ],
)
def test_refusals(tmp_path, layout, options, message):
    with pytest.raises(HeadError, match=message):
        load(tmp_path, *layout(*golden(EAGLE3)), **options)


def test_eagle1_reads_the_final_state_only(tmp_path):
    with pytest.raises(
        HeadError, match=r"taps \[2, 4, 5\] given, but an EAGLE-1 head reads the final hidden"
    ):
        load(tmp_path, *golden(EAGLE1), "eagle", taps=(2, 4, 5))
    tensors, config = golden(EAGLE1)
    with pytest.raises(HeadError, match="as wide as its target"):
        load(tmp_path, tensors, config | {"hidden_size": 32, "target_hidden_size": 64}, "eagle")


def test_wrong_tensors_are_listed_together(tmp_path):
    tensors, config = golden(EAGLE3)
    tensors = without(tensors, "norm.weight", "midlayer.mlp.up_proj.weight")
    tensors |= {"surprise.weight": rng_tensor(0, 3), "fc.weight": rng_tensor(0, D, 2 * D)}
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, tensors, config)
    message = str(refused.value)
    for part in (
        "missing: norm.weight float32[64]",
        "missing: layers.0.mlp.up_proj.weight float32[128, 64]",
        "unexpected: surprise.weight float32[3]",
        "misshapen: fc.weight is float32[64, 128]; fc.weight needs float32[64, 192]",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda t: without(t, "d2t"), "missing: d2t int32[97]"),
        (lambda t: fc_norms(t, ("fc_norm.0", "fc_norm.1")), "missing: fc_norm.2.weight float32[64]"),
        (
            lambda t: t | {"midlayer.self_attn.q_proj.bias": rng_tensor(0, D)},
            "missing: layers.0.self_attn.k_proj.bias",
        ),
        (
            lambda t: t | {"layers.0.hidden_norm.weight": norm_weight(0)},
            "fills layers.0.hidden_norm.weight already",
        ),
        (
            lambda t: t | {"lm_head.weight": rng_tensor(0, 96, D)},
            "misshapen: lm_head.weight is float32[96, 64]",
        ),
    ],
)
def test_heads_with_parts_missing(tmp_path, change, part):
    tensors, config = golden(EAGLE3)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path, change(tensors), config)
    assert part in str(refused.value)
