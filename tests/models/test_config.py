"""Configs that cannot be run are refused in one line that names the thing; others are read as meant."""

import pytest

from eagle_jax.errors import EagleError
from eagle_jax.models.config import REQUIRED, ModelConfig, ModelConfigError, RopeConfig, token_ids

LLAMA = dict(
    model_type="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)


def refused(*words: str, **changes) -> str:
    """The message for LLAMA with `changes`, checked to be one line that has `words`."""
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_hf(LLAMA | changes)
    assert isinstance(caught.value, EagleError)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
    return message


def test_unknown_family():
    refused("model_type 'mamba'", "llama, mistral, qwen2, qwen3", model_type="mamba")


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_size="16"),
        dict(num_attention_heads="2"),
        dict(num_hidden_layers=2.5),
        dict(rope_scaling="x"),
        dict(model_type=[1]),
    ],
    ids=str,
)
def test_values_of_another_kind(changes):
    refused("of another kind than expected", **changes)


def test_unknown_rope_type():
    known = "default, linear, dynamic, yarn, llama3"
    refused("'longrope'", known, rope_scaling=dict(rope_type="longrope", factor=2.0))
    refused("'su'", known, rope_scaling=dict(type="su", factor=2.0))
    refused("'longrope'", known, rope_parameters=dict(rope_type="longrope", rope_theta=1e4))


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(key):
    config = {k: v for k, v in LLAMA.items() if k != key}
    with pytest.raises(ModelConfigError, match=rf"^the model's config lacks {key}$"):
        ModelConfig.from_hf(config)


def test_every_missing_key_is_named():
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_hf({})
    assert all(key in str(caught.value) for key in REQUIRED)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_rope_scaling_without_a_factor(kind):
    refused(repr(kind), "'factor'", max_position_embeddings=None, rope_scaling=dict(type=kind))


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "llama3"])
def test_rope_scaling_without_an_original_length(kind):
    refused(
        repr(kind),
        "original_max_position_embeddings",
        max_position_embeddings=None,
        rope_scaling=dict(type=kind, factor=2.0),
    )


def test_heads_that_do_not_share_kv_heads_evenly():
    refused("4 heads", "3 KV heads", num_key_value_heads=3)


def test_odd_head_dim():
    refused("head_dim 7", "odd", head_dim=7)
    refused("head_dim 9", hidden_size=36)


def test_unknown_activation():
    refused("'swish7'", "silu, gelu", hidden_act="swish7")


def test_layer_types_of_another_depth():
    refused(
        "3 layer types",
        "4 layers",
        model_type="qwen2",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention"] * 3,
    )


def test_all_problems_in_one_line():
    refused("KV heads", "head_dim", "activation", num_key_value_heads=3, head_dim=7, hidden_act="?")


def test_what_is_absent_has_the_usual_value():
    config = ModelConfig.from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.rope.theta == 10000.0
    assert config.rms_norm_eps == 1e-6
    assert not any((config.tie_word_embeddings, config.qkv_bias, config.output_bias, config.mlp_bias))


def test_layer_types_count_only_with_a_window():
    """Heads carry their target's config, its list of layer types too."""
    config = LLAMA | dict(model_type="qwen3", num_hidden_layers=1, layer_types=["full_attention"] * 36)
    assert ModelConfig.from_hf(config).windows == (None,)


def test_configs_are_values():
    config = ModelConfig.from_hf(LLAMA)
    assert config == ModelConfig.from_hf(dict(LLAMA))
    assert hash(config) == hash(ModelConfig.from_hf(dict(LLAMA)))


def test_a_head_of_a_windowed_target_has_no_window():
    config = ModelConfig.from_hf(LLAMA | dict(model_type="mistral", sliding_window=8)).with_layers(1)
    assert config.windows == (None,)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), (0, (0,)), ([2, 5], (2, 5))])
def test_end_tokens(value, ids):
    assert token_ids(value) == ids
    assert ModelConfig.from_hf(LLAMA | dict(eos_token_id=value)).eos_token_ids == ids


def test_yarn_without_a_factor_takes_the_ratio_of_lengths():
    rope = RopeConfig.from_hf(
        dict(
            max_position_embeddings=131072,
            rope_theta=1e6,
            rope_scaling=dict(type="yarn", factor=None, original_max_position_embeddings=32768),
        )
    )
    assert rope.factor == 4.0


def test_rope_of_one_layer_type():
    rope = RopeConfig.from_hf(
        dict(rope_parameters=dict(full_attention=dict(rope_type="linear", factor=2.0, rope_theta=5e5)))
    )
    assert (rope.kind, rope.factor, rope.theta) == ("linear", 2.0, 5e5)
