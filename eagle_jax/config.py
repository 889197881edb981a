"""Typed configurations: YAML files plus `key=value` overrides.

The sections below are the contract that others script against: the keys, their meaning (the `description`s,
which are also the text of `--help`) and their bounds. This module knows nothing of JAX, so that a command can
explain itself without loading it.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, Field, model_validator

from eagle_jax.errors import ConfigError
from eagle_jax.schema import (
    Bool,
    Float,
    Int,
    NaturalInt,
    PositiveInt,
    S,
    Section,
    Text,
    describe_keys,
    parse,
    show,
)

__all__ = [
    "ChainConfig",
    "ConfigError",
    "DynamicConfig",
    "InferConfig",
    "MeshConfig",
    "SamplingConfig",
    "SpeculativeConfig",
    "StaticConfig",
    "TreeConfig",
    "apply_overrides",
    "data_root",
    "describe_keys",
    "find_config",
    "installed_configs",
    "load_config",
    "parse",
    "read_config",
    "resolve_model",
]


# ----------------------------------------------------------------------------------------------- the contract

MAX_DEPTH = 64  # of a tree: every level is a pass of the draft, and few are ever accepted


def _check_rank_paths(value: Any) -> Any:
    """Accept a name, or rank paths in which every node's parent is a node too."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"got {show(value)}; expected a name such as mc_sim_7b_63, or a list such as [[0], [0, 0]]"
        )
    for path in value:
        ranks = path if isinstance(path, list | tuple) and path else [None]
        if not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in ranks):
            raise ValueError(f"got the path {show(path)}; expected a list of ranks from 0 up, such as [0, 2]")
    paths = tuple(map(tuple, value))
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"the path {list(path)} is listed twice")
        if len(path) > MAX_DEPTH:
            raise ValueError(f"the path {show(list(path))} is deeper than {MAX_DEPTH}")
        if path[:-1] and path[:-1] not in paths:
            raise ValueError(
                f"the path {list(path)} hangs in the air: its parent {list(path[:-1])} is not listed"
            )
    return paths


def _text_as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _null_as_empty(value: Any) -> Any:
    # `sampling:` with every line below it commented out reads as null in YAML.
    return {} if value is None else value


def _expand_home(value: Any) -> Any:
    return os.path.expanduser(value) if isinstance(value, str) else value


class ChainConfig(Section):
    """A chain of drafts, each the draft's continuation of the one before."""

    kind: Literal["chain"] = "chain"
    num_tokens: Annotated[PositiveInt, Field(le=MAX_DEPTH)] = Field(
        description="How many tokens to draft in each step."
    )


class StaticConfig(Section):
    """A tree of one fixed shape, whose nodes are named by their ranks among the draft's choices."""

    kind: Literal["static"] = "static"
    paths: Annotated[str | tuple[tuple[int, ...], ...], BeforeValidator(_check_rank_paths)] = Field(
        description="The name of a tree of the method's, such as mc_sim_7b_63 (EAGLE's has 25 nodes), or "
        "the nodes as paths of ranks: [[0], [1], [0, 0]] drafts the two best first tokens, and the best "
        "second token after the first of them."
    )


class DynamicConfig(Section):
    """A tree shaped anew in each step by the draft's own confidence (EAGLE-2)."""

    kind: Literal["dynamic"] = "dynamic"
    total_tokens: Annotated[Int, Field(ge=2)] = Field(
        description="Nodes that the target verifies in a step, counting the root (the token already emitted)."
    )
    depth: Annotated[NaturalInt, Field(lt=MAX_DEPTH)] = Field(
        description="Levels after the first: at most depth + 1 drafts can be accepted in a step. Each "
        "level costs a pass of the draft."
    )
    top_k: PositiveInt = Field(
        description="Children considered of each node, and nodes expanded on each level."
    )

    @model_validator(mode="after")
    def _fits_in_pool(self) -> "DynamicConfig":
        pool = self.top_k + self.depth * self.top_k**2
        if self.total_tokens - 1 > pool:
            raise ValueError(
                f"total_tokens {self.total_tokens} is more than the tree can grow: depth {self.depth} and "
                f"top_k {self.top_k} give {pool} drafts to choose from, so at most {pool + 1} fit"
            )
        return self


TreeConfig = ChainConfig | StaticConfig | DynamicConfig


class SpeculativeConfig(Section):
    """What drafts, and how."""

    model: Text = Field(
        description="The draft head: a folder, an Orbax folder or a hub id. A relative path is looked for "
        "in the current folder, beside the config, and in the installed data (heads/…)."
    )
    method: Literal["eagle", "eagle3"] = Field(
        default="eagle3",
        description="eagle: EAGLE-1 and EAGLE-2 heads. eagle3: EAGLE-3 heads; 3.1 follows from the head's "
        "own config.",
    )
    tree: TreeConfig = Field(
        default=ChainConfig(num_tokens=3),
        discriminator="kind",
        description="The shape of the drafts: {kind: chain, num_tokens: n}, {kind: static, paths: NAME} or "
        "{kind: dynamic, total_tokens: n, depth: d, top_k: k}. num_speculative_tokens: n in its stead is a "
        "chain of n.",
    )
    draft_sampling: Literal["coupled", "deterministic"] = Field(
        default="coupled",
        description="How drafts are chosen when sampling. coupled: with the target's own noise, of which "
        "far more is accepted; deterministic: the draft's most likely tokens. The text is the same either "
        "way, and at temperature 0 so are the drafts.",
    )
    taps: Annotated[tuple[NaturalInt, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Overrides which of the target's hidden states the head is fed: those before the "
        "layers listed, such as [2, 15, 27]. null: as the head's own config says.",
    )
    head_overrides: dict[str, Any] = Field(
        default={},
        description="Flags of the head's config that its checkpoint states wrongly, such as "
        "{norm_output: false}.",
    )

    also_accepts: ClassVar[tuple[str, ...]] = ("num_speculative_tokens",)

    @model_validator(mode="before")
    @classmethod
    def _accept_num_speculative_tokens(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = {key: value for key, value in data.items() if (key, value) != ("tree", None)}
        count = data.pop("num_speculative_tokens", None)
        if count is None:
            return data
        if "tree" in data:
            raise ValueError(
                f"both tree and num_speculative_tokens are given; keep one: num_speculative_tokens={count} "
                f"means tree={{kind: chain, num_tokens: {count}}}"
            )
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise ValueError(
                f"num_speculative_tokens: got {show(count)}; expected a whole number, at least 1"
            )
        return data | {"tree": {"kind": "chain", "num_tokens": count}}


class SamplingConfig(Section):
    """How tokens are chosen and when an answer ends; the names are those of `SamplingParams`."""

    temperature: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="0: greedy, always the most likely token."
    )
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=1.0, description="Keep the most likely tokens that together have this probability. 1: all."
    )
    top_k: NaturalInt = Field(default=0, description="Keep this many of the most likely tokens. 0: all.")
    min_p: Annotated[Float, Field(ge=0, le=1)] = Field(
        default=0.0, description="Keep tokens at least this likely, relative to the most likely one. 0: all."
    )
    repetition_penalty: Annotated[Float, Field(gt=0)] = Field(
        default=1.0, description="Above 1: tokens of the prompt and the answer are less likely to come again."
    )
    max_new_tokens: PositiveInt = Field(default=128, description="End after this many tokens.")
    min_new_tokens: NaturalInt = Field(default=0, description="Do not end before this many tokens.")
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = Field(
        default=0,
        description="Holds for every prompt: one seed gives one text, in any batch and with any drafts.",
    )
    n: PositiveInt = Field(default=1, description="Answers per prompt; answer j draws from (seed, j).")
    stop: Annotated[tuple[Text, ...], BeforeValidator(_text_as_list)] = Field(
        default=(), description="Texts that end the answer; they are not part of it."
    )
    stop_token_ids: tuple[NaturalInt, ...] = Field(
        default=(), description="Token ids that end the answer, besides the model's own."
    )
    ignore_eos: Bool = Field(default=False, description="Go on past the model's end-of-sequence token.")
    logprobs: NaturalInt | None = Field(
        default=None,
        description="Report the log-probabilities of the chosen token and of this many best ones. null: "
        "none.",
    )

    @model_validator(mode="after")
    def _minimum_below_maximum(self) -> "SamplingConfig":
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}"
            )
        return self


class MeshConfig(Section):
    """How many devices share the work, and along which axes; their product is the number of devices used."""

    data: PositiveInt = Field(default=1, description="Devices that share the rows of a batch.")
    fsdp: PositiveInt = Field(default=1, description="Devices that share the storage of each weight.")
    tensor: PositiveInt = Field(
        default=1, description="Devices that share each matrix product; must divide the model's heads."
    )


def default_compilation_cache() -> str:
    """The folder that keeps compiled programs between runs, in the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "eagle_jax", "compiled")


class InferConfig(Section):
    """Everything that inference needs to know."""

    model: Text = Field(
        description="The target: a Hugging Face folder, a .gguf file, an Orbax folder, a hub id, or "
        "package:<package>/<file> for a file in an installed Python package. A relative path is looked for "
        "in the current folder, beside the config, and in the installed data."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="What weights are kept in and products are computed in."
    )
    max_model_len: PositiveInt | None = Field(
        default=None,
        description="Longest prompt and answer together, in tokens: the capacity of the caches. null: the "
        "model's own limit.",
    )
    speculative: SpeculativeConfig | None = Field(default=None, description="Drafting. null: no speculation.")
    sampling: Annotated[SamplingConfig, BeforeValidator(_null_as_empty)] = Field(
        default=SamplingConfig(), description="How tokens are chosen and when an answer ends."
    )
    mesh: Annotated[MeshConfig, BeforeValidator(_null_as_empty)] = Field(
        default=MeshConfig(), description="How many devices share the work."
    )
    batch_size: PositiveInt = Field(default=1, description="How many answers are generated at a time.")
    prefill_chunk: PositiveInt = Field(
        default=512, description="Prompts are read this many tokens at a time."
    )
    compilation_cache: Annotated[str | None, BeforeValidator(_expand_home)] = Field(
        default_factory=default_compilation_cache,
        description="Folder that keeps compiled programs between runs. null: compile anew in every run.",
    )


# ------------------------------------------------------------------------------------------ files and folders


def data_root() -> Path:
    """The folder that holds `configs/` and `heads/`: in a wheel the package, else the checkout around it."""
    package = Path(__file__).resolve().parent
    return package if (package / "configs").is_dir() else package.parent


def installed_configs(task: str = "infer") -> list[str]:
    """The names that `--config NAME` knows for a task, sorted."""
    return sorted(path.stem for path in (data_root() / "configs").glob(f"{task}-*.yaml"))


def find_config(name_or_path: str | os.PathLike[str], task: str = "infer") -> Path:
    """The file that a `--config` argument means: a path to a file, or the name of an installed config.

    Raises:
        ConfigError: it is neither; lists the installed names and the nearest one.
    """
    given = os.fspath(name_or_path)
    path = Path(given).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise ConfigError(
            f"config {given!r} is a folder; expected a YAML file or the name of an installed config"
        )
    name = given.removesuffix(".yaml")
    installed = data_root() / "configs" / f"{name}.yaml"
    if "/" not in name and os.sep not in name and installed.is_file():
        return installed
    names = installed_configs(task)
    near = difflib.get_close_matches(Path(name).name, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise ConfigError(
        f"config {given!r}: no such file, and no installed config of that name; {hint}"
        f"installed: {', '.join(names) or 'none'}"
    )


def resolve_model(value: str, key: str, folder: Path) -> str:
    """Turn a relative path into the place where it is; leave hub ids and `package:` names as they are."""
    if value.startswith("package:"):
        return value
    expanded = os.path.expanduser(value)
    roots = [Path.cwd(), folder, data_root()]
    for root in roots:
        if (root / expanded).exists():  # an absolute path stands for itself
            return str((root / expanded).absolute())
    # A hub id is "owner/name". What cannot be one was meant as a path, and a look-up would hide the mistake.
    if value.startswith((".", "/", "~", "heads/")) or value.endswith(".gguf") or value.count("/") > 1:
        looked = ", ".join(dict.fromkeys(map(str, roots)))
        where = "" if os.path.isabs(expanded) else f"; looked in {looked}"
        raise ConfigError(f"{key}: no such file or folder: {value!r}{where}")
    return value


# ----------------------------------------------------------------------------------------- YAML and overrides


class _Loader(yaml.SafeLoader):
    """Safe YAML in which giving a key twice is an error: plain YAML quietly keeps the last one."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key.value!r} is given twice", problem_mark=key.start_mark
                )
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        data = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise ConfigError(f"{path}{place}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:  # such as a month 99, or a list as a key
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of keys to values, got {show(data)}")
    return data


def _split_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise ConfigError(
            f"{override!r} is not an override; expected key=value with a dotted key, such as "
            "sampling.top_p=0.9"
        )
    try:
        return key, yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError) as error:
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else error
        raise ConfigError(f"{key}: {text!r} is not valid YAML: {' '.join(str(problem).split())}") from None


def apply_overrides(data: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `data` with `key=value` overrides applied in turn: dotted keys, YAML values.

    An override replaces the whole value: `speculative.tree={kind: chain, num_tokens: 3}` leaves nothing of
    the tree that was there.

    Raises:
        ConfigError: an override is not of the form `key=value`, its value is not YAML, or its key
            leads through a plain value.
    """
    data = dict(data)
    for key, value in map(_split_override, overrides):
        *parents, leaf = key.split(".")
        here = data
        for i, part in enumerate(parents):
            child = here.get(part)
            if child is not None and not isinstance(child, dict):
                raise ConfigError(f"{key}: {'.'.join(parents[: i + 1])} is {show(child)}, which has no keys")
            here[part] = dict(child or {})  # copied on the way down: the caller's data stays as it was
            here = here[part]
        here[leaf] = value
    return data


def read_config(
    schema: type[S], name_or_path: str | os.PathLike[str], overrides: Sequence[str], task: str
) -> tuple[S, Path]:
    """A checked config of any schema, and the folder that its relative paths may mean.

    Args:
        schema: what it must hold.
        name_or_path: a YAML file, or the name of an installed config of `task`.
        overrides: `key=value` settings with dotted keys and YAML values, applied in turn.

    Raises:
        ConfigError: one line that names the key, what was given and what is allowed.
    """
    path = find_config(name_or_path, task)
    data = apply_overrides(_read_yaml(path), overrides)
    overridden = [override.partition("=")[0].strip().split(".") for override in overrides]

    def source(key: str) -> str:
        # The file is not named where the command line had a part in it: above the key, at it or below it.
        steps = re.split(r"[.\[]", key)
        touched = any(name[: len(steps)] == steps[: len(name)] for name in overridden)
        return "" if touched else f"{path}: "

    return parse(schema, data, source=source), path.resolve().parent


def load_config(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> InferConfig:
    """Read an inference config; see `read_config`.

    Returns:
        The checked config. Relative paths of models in it are resolved against the current folder, the
        config's folder and the installed data, in this order.
    """
    config, folder = read_config(InferConfig, name_or_path, overrides, "infer")
    update: dict[str, Any] = {"model": resolve_model(config.model, "model", folder)}
    if config.speculative is not None:
        head = resolve_model(config.speculative.model, "speculative.model", folder)
        update["speculative"] = config.speculative.model_copy(update={"model": head})
    return config.model_copy(update=update)
