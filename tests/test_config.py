import os
from pathlib import Path

import pytest

from eagle_jax import config as config_module
from eagle_jax.config import (
    ChainConfig,
    ConfigError,
    DynamicConfig,
    InferConfig,
    MeshConfig,
    SamplingConfig,
    SpeculativeConfig,
    StaticConfig,
    apply_overrides,
    data_root,
    describe_keys,
    find_config,
    installed_configs,
    load_config,
    parse,
)

FULL = """\
model: owner/target
dtype: bfloat16
max_model_len: 2048
speculative:
  model: owner/head
  method: eagle3
  tree: {kind: dynamic, total_tokens: 32, depth: 5, top_k: 8}
  draft_sampling: coupled
  taps: null
  head_overrides: {norm_output: false}
sampling: {temperature: 1e-1, top_p: 0.9, top_k: 0, min_p: 0.0, repetition_penalty: 1.0,
           max_new_tokens: 128, min_new_tokens: 0, seed: 0, n: 1, stop: ["###"], stop_token_ids: [5],
           ignore_eos: false, logprobs: null}
mesh: {data: 1, fsdp: 1, tensor: 8}
batch_size: 4
"""


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "run.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write):
    def load(*overrides: str, text: str = FULL) -> InferConfig:
        return load_config(write(text), overrides)

    return load


def error_of(function, *arguments, **keywords) -> str:
    with pytest.raises(ConfigError) as caught:
        function(*arguments, **keywords)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_key_of_the_contract(load):
    config = load()
    assert config.speculative == SpeculativeConfig(
        model="owner/head",
        method="eagle3",
        tree=DynamicConfig(total_tokens=32, depth=5, top_k=8),
        head_overrides={"norm_output": False},
    )
    assert config.sampling == SamplingConfig(temperature=0.1, top_p=0.9, stop=("###",), stop_token_ids=(5,))
    assert config.mesh == MeshConfig(tensor=8)
    assert (config.dtype, config.max_model_len, config.batch_size) == ("bfloat16", 2048, 4)


def test_defaults(load):
    config = load(text="model: owner/target\nsampling:\nmesh:\n")
    assert config.speculative is None
    assert config.sampling == SamplingConfig()
    assert config.mesh == MeshConfig()
    assert (config.dtype, config.max_model_len, config.batch_size, config.prefill_chunk) == (
        "float32",
        None,
        1,
        512,
    )


def test_a_config_survives_a_round_trip(load):
    config = load()
    assert parse(InferConfig, config.model_dump()) == config


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("sampling.top_p=0.5", lambda c: c.sampling.top_p, 0.5),
        ("sampling.temperature=1e-5", lambda c: c.sampling.temperature, 1e-5),
        ("sampling.stop=END", lambda c: c.sampling.stop, ("END",)),
        ('sampling.stop=["a=b", "c"]', lambda c: c.sampling.stop, ("a=b", "c")),
        ("sampling={seed: 3}", lambda c: c.sampling, SamplingConfig(seed=3)),
        ("speculative=null", lambda c: c.speculative, None),
        (
            "speculative.tree={kind: chain, num_tokens: 3}",
            lambda c: c.speculative.tree,
            ChainConfig(num_tokens=3),
        ),
        ("speculative.tree.depth=7", lambda c: c.speculative.tree.depth, 7),
        ("speculative.taps=[1, 2, 3]", lambda c: c.speculative.taps, (1, 2, 3)),
        (
            "speculative.tree={kind: static, paths: mc_sim_7b_63}",
            lambda c: c.speculative.tree,
            StaticConfig(paths="mc_sim_7b_63"),
        ),
        (
            "speculative.tree={kind: static, paths: [[0], [1], [0, 0]]}",
            lambda c: c.speculative.tree,
            StaticConfig(paths=((0,), (1,), (0, 0))),
        ),
        (
            "speculative={model: owner/head, num_speculative_tokens: 4}",
            lambda c: c.speculative.tree,
            ChainConfig(num_tokens=4),
        ),
        ("compilation_cache=null", lambda c: c.compilation_cache, None),
        ("compilation_cache=~/x", lambda c: c.compilation_cache, os.path.expanduser("~/x")),
    ],
)
def test_overrides(load, override, read, expected):
    assert read(load(override)) == expected


def test_overrides_apply_in_turn_and_leave_their_input_alone():
    data = {"speculative": None, "sampling": {"seed": 1}}
    changed = apply_overrides(data, ["sampling.seed=2", "speculative.model=a/b", "sampling.seed=3"])
    assert changed == {"speculative": {"model": "a/b"}, "sampling": {"seed": 3}}
    assert data == {"speculative": None, "sampling": {"seed": 1}}


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("samplng.top_p=1", ["samplng: unknown key; did you mean sampling?", "allowed: model, dtype,"]),
        ("temperature=1", ["temperature: unknown key; did you mean sampling.temperature?"]),
        (
            "sampling.max_tokens=1",
            ["sampling.max_tokens: unknown key; did you mean sampling.max_new_tokens?"],
        ),
        ("speculative.qqq=1", ["speculative.qqq: unknown key; allowed: model, method, tree"]),
        (
            "speculative.tree.num_tokens=1",
            ["speculative.tree.num_tokens: unknown key; it belongs to {kind: chain}"],
        ),
        (
            "speculative.tree.kind=chian",
            ["speculative.tree.kind: got 'chian'; expected one of chain, static"],
        ),
        ("speculative.tree={num_tokens: 1}", ["without its kind; expected {kind: chain, num_tokens} or"]),
        ("speculative.tree=chain", ["speculative.tree: got 'chain'; expected {kind: chain, num_tokens} or"]),
        (
            "speculative.tree={kind: chain}",
            ["speculative.tree.num_tokens is missing; expected a whole number"],
        ),
        ("speculative={method: eagle}", ["speculative.model is missing; expected text"]),
        ("speculative=on", ["speculative: got true; expected a mapping with the keys model", "or null"]),
        ("speculative.tree.total_tokens=400", ["speculative.tree: total_tokens 400", "at most 329 fit"]),
        ("speculative.tree={kind: static, paths: [[0, 1]]}", ["[0, 1] hangs in the air: its parent [0]"]),
        ("speculative.tree={kind: static, paths: [[0], [0]]}", ["[0] is listed twice"]),
        ("speculative.tree={kind: static, paths: [[-1]]}", ["got the path [-1]; expected a list of ranks"]),
        ("speculative.tree={kind: chain, num_tokens: 65}", ["num_tokens: got 65; expected a whole number"]),
        ("sampling.seed=2001-99-01", ["sampling.seed: '2001-99-01' is not valid YAML: month"]),
        ("speculative.tree={kind: static, paths: 3}", ["speculative.tree.paths: got 3; expected a name"]),
        ("speculative.num_speculative_tokens=3", ["both tree and num_speculative_tokens", "kind: chain"]),
        (
            "speculative.taps=[1, true]",
            ["speculative.taps[1]: got true; expected a whole number, at least 0"],
        ),
        (
            "speculative.taps=[]",
            ["speculative.taps: got []; expected a list of whole numbers, not empty, or null"],
        ),
        ("dtype=float8", ["dtype: got 'float8'; expected one of float32, bfloat16, float16"]),
        ("model=3", ["model: got 3; expected text"]),
        ("batch_size=true", ["batch_size: got true; expected a whole number, at least 1"]),
        ("batch_size=1.5", ["batch_size: got 1.5; expected a whole number"]),
        ("sampling.top_p=0", ["sampling.top_p: got 0; expected a number, above 0 and at most 1"]),
        ("sampling.temperature=.nan", ["sampling.temperature: got nan; expected a number"]),
        ("sampling.temperature=true", ["sampling.temperature: got true; expected a number"]),
        ("sampling.ignore_eos=1", ["sampling.ignore_eos: got 1; expected true or false"]),
        ("sampling.stop=[1]", ["sampling.stop[0]: got 1; expected text"]),
        ("sampling.min_new_tokens=200", ["sampling: min_new_tokens 200 is more than max_new_tokens 128"]),
        ("mesh.tensor=0", ["mesh.tensor: got 0; expected a whole number, at least 1"]),
        ("dtype.x=3", ["dtype.x: dtype is 'bfloat16', which has no keys"]),
        ("sampling.stop=[", ["sampling.stop: '[' is not valid YAML"]),
        ("sampling", ["'sampling' is not an override; expected key=value"]),
        ("--seed=3", ["is not an override"]),
    ],
)
def test_wrong_overrides_are_explained(load, override, parts):
    message = error_of(load, override)
    for part in parts:
        assert part in message
    assert "run.yaml" not in message  # the file is not to blame


def test_errors_name_the_file_and_every_wrong_key(load):
    message = error_of(load, text="model: m\nbatch_size: 0\nmesh: {tensr: 1}\n")
    assert "run.yaml: batch_size: got 0" in message
    assert "run.yaml: mesh.tensr: unknown key; did you mean mesh.tensor?" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("model: a\nmesh: {data: 1\n", "run.yaml:3:1: not valid YAML"),
        ("model: a\nmodel: b\n", "run.yaml:2:1: not valid YAML: the key 'model' is given twice"),
        ("model: !thing a\n", "run.yaml:1:8: not valid YAML"),
        ("model: 2001-99-99\n", "run.yaml: not valid YAML: month must be in 1..12"),
        ("model: a\nbatch_size: 0b_\n", "run.yaml: not valid YAML: invalid literal"),
        ("? [1, 2]\n: 3\n", "run.yaml: not valid YAML: unhashable"),
        ("- a\n", "run.yaml: expected a mapping of keys to values, got ['a']"),
        ("", "model is missing"),
    ],
)
def test_bad_files(load, text, part):
    assert part in error_of(load, text=text)


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in error_of(load_config, path)


def test_python_configs_are_explained_too():
    message = error_of(
        parse, SpeculativeConfig, {"model": "m", "metod": "eagle"}, prefix="speculative_config"
    )
    assert message.startswith(
        "speculative_config.metod: unknown key; did you mean speculative_config.method?"
    )


def test_configs_are_frozen(load):
    with pytest.raises(ValueError, match="frozen"):
        load().batch_size = 2


def test_find_config(write, tmp_path):
    assert find_config(write("model: m")) == tmp_path / "run.yaml"
    assert find_config("infer-smollm2") == data_root() / "configs" / "infer-smollm2.yaml"
    assert find_config("infer-smollm2.yaml") == find_config("infer-smollm2")
    assert "did you mean infer-smollm2?" in error_of(find_config, "infer-smolm2")
    assert "no such file" in error_of(find_config, tmp_path / "missing.yaml")
    assert "is a folder" in error_of(find_config, tmp_path)


def test_data_root_in_a_wheel(tmp_path, monkeypatch):
    package = tmp_path / "eagle_jax"
    (package / "configs").mkdir(parents=True)
    monkeypatch.setattr(config_module, "__file__", str(package / "config.py"))
    assert data_root() == package
    (package / "configs").rmdir()
    assert data_root() == tmp_path


def test_where_models_are_looked_for(tmp_path, monkeypatch):
    here, beside, installed = (tmp_path / name for name in ("here", "beside", "installed"))
    for folder in (here, beside, installed):
        (folder / "heads").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(config_module, "data_root", lambda: installed)
    file = beside / "run.yaml"
    file.write_text("model: ./target\nspeculative: {model: heads/h}\n", encoding="utf-8")

    assert "model: no such file or folder: './target'; looked in" in error_of(load_config, file)
    (beside / "target").mkdir()
    assert "speculative.model: no such file or folder: 'heads/h'" in error_of(load_config, file)
    (installed / "heads" / "h").mkdir()
    config = load_config(file)
    assert Path(config.model) == beside / "target"
    assert Path(config.speculative.model) == installed / "heads" / "h"

    (here / "target").mkdir()
    assert Path(load_config(file).model) == here / "target"
    for name in ("owner/name", "package:pack/a.gguf"):
        assert load_config(file, [f"model={name}"]).model == name
    assert Path(load_config(file, [f"model={beside}/target"]).model) == beside / "target"
    for name in ("x.gguf", "/no/such", "a/b/c"):
        assert f"no such file or folder: {name!r}" in error_of(load_config, file, [f"model={name}"])


@pytest.mark.parametrize("name", installed_configs())
def test_installed_configs_load(name):
    if name == "infer-smollm2-eagle3.1" and not (data_root() / "heads").is_dir():
        pytest.skip("the folder of heads is not here")
    config = load_config(name)
    assert (config.speculative is None) == (name == "infer-smollm2")
    assert find_config(name).read_text(encoding="utf-8").startswith("# ")


def test_the_configs_that_are_promised():
    targets = ["llama3.1-8b-eagle3", "qwen3-8b-eagle3", "vicuna-13b-eagle"]
    promised = {f"infer-{target}-{machine}" for target in targets for machine in ("v5e-8", "v6e-8", "h100")}
    assert promised | {"infer-smollm2", "infer-smollm2-eagle3.1"} <= set(installed_configs())


def test_help_explains_every_key():
    text = describe_keys(InferConfig)
    for key in ("model", "speculative.tree.total_tokens (kind: dynamic)", "sampling.logprobs", "mesh.fsdp"):
        assert f"  {key}\n" in text
    assert "[a whole number, at least 1; default 128]" in text
    assert "[one of eagle, eagle3; default eagle3]" in text
    assert "None" not in text
    assert max(map(len, text.splitlines())) <= 100
