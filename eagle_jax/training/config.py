"""The config of `python -m eagle_jax.train`: keys, bounds and their meaning, which is also the text of `--help`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eagle_jax.config import ChainConfig, MeshConfig, TreeConfig, read_config, resolve_model
from eagle_jax.schema import Bool, Float, Int, NaturalInt, PositiveInt, Section, Text, show
from eagle_jax.training.metrics import LoggingConfig

Share = Annotated[Float, Field(ge=0, le=1)]
PositiveFloat = Annotated[Float, Field(gt=0)]


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _check_length(value: Any) -> Any:
    """A number of steps, or a mapping from the update where each number begins."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {0: value}
    expected = "expected a whole number from 1 to 16, or a mapping such as {0: 2, 500: 4}"
    if not isinstance(value, dict) or not value:
        raise ValueError(f"got {show(value)}; {expected}")
    # JSON has no other keys than text.
    value = {int(key) if isinstance(key, str) and key.isdecimal() else key: n for key, n in value.items()}
    for start, length in value.items():
        whole = all(isinstance(x, int) and not isinstance(x, bool) for x in (start, length))
        if not whole or start < 0 or not 1 <= length <= 16:
            raise ValueError(f"got {show(value)}; {expected}")
    if 0 not in value:
        raise ValueError(f"got {show(value)}, which does not say what holds from update 0 on")
    return dict(sorted(value.items()))


class HeadSection(Section):
    """The head to train."""

    method: Literal["eagle", "eagle3"] = Field(
        default="eagle3",
        description="eagle: an EAGLE-1 head (for EAGLE-2 too). eagle3: an EAGLE-3 head, by default in its 3.1 form.",
    )
    warm_start: Text | None = Field(
        default=None,
        description="A head in any layout to start from. It keeps its own shapes, flags, taps and vocabulary map; "
        "the keys below are then not read. null: a new head.",
    )
    fc_norm: Bool = Field(default=True, description="EAGLE-3.1: norm each of the target's states before fc.")
    norm_output: Bool = Field(default=True, description="EAGLE-3.1: feed the normed output back.")
    norm_before_fc: Bool = Field(default=False, description="One norm over the states together, before fc.")
    norm_before_residual: Bool = Field(
        default=False, description="The residual stream starts from the normed state."
    )
    taps: Annotated[tuple[NaturalInt, ...], Field(min_length=1)] | None = Field(
        default=None,
        description="Which of the target's states the head reads: those before the layers listed. null: "
        "[2, L / 2, L - 3], as in EAGLE-3.",
    )
    draft_vocab_size: PositiveInt | None = Field(
        default=32000,
        description="The most frequent supervised tokens that the head can draft. null: the whole vocabulary.",
    )
    num_attention_heads: PositiveInt | None = Field(default=None, description="null: as many as the target.")
    num_key_value_heads: PositiveInt | None = Field(default=None, description="null: as many as the target.")
    intermediate_size: PositiveInt | None = Field(
        default=None, description="Width of the feed-forward layer. null: the target's."
    )
    start: Literal["linear", "random"] = Field(
        default="linear",
        description="linear: as the best linear guess of the target's next state, fitted on some of the data. random: "
        "at random, but for norm and language-model head, which are the target's.",
    )


class ObjectiveSection(Section):
    """What the head is taught with."""

    loss: Literal["forward_kl", "lk_alpha", "lk_lambda"] = Field(
        default="forward_kl",
        description="forward_kl: soft cross-entropy with the target's distribution. lk_alpha, lk_lambda: the "
        "acceptance rate itself (arXiv 2602.23881).",
    )
    length: Annotated[dict[int, int], BeforeValidator(_check_length)] = Field(
        default={0: 7},
        description="Steps of the training-time test: a number, or a mapping from the update where each number "
        "begins, such as {0: 2, 500: 4}. EAGLE-1 heads have one step.",
    )
    step_decay: PositiveFloat = Field(default=0.8, description="Weight of step i is step_decay^i.")
    lk_decay: PositiveFloat = Field(
        default=3.0, description="How fast lk_lambda turns from KL to acceptance."
    )
    mask_alignment: Literal["both", "next", "slot"] = Field(
        default="both",
        description="A slot counts when the token that it is given and the one that it predicts are supervised "
        "(both), when the given one is (next), or when the one before is (slot, as in EAGLE's code).",
    )
    denominator: Literal["supervised", "all"] = Field(
        default="supervised", description="Losses are means over supervised rows, or over all rows."
    )
    regression_weight: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="EAGLE-1: weight of the distance to the target's next state."
    )
    distillation_weight: Annotated[Float, Field(ge=0)] = Field(
        default=0.1, description="EAGLE-1: weight of the loss on tokens."
    )
    feature_noise: Annotated[Float, Field(ge=0)] = Field(
        default=0.2, description="EAGLE-1: width of the noise on the states that the head reads."
    )


class OptimizerSection(Section):
    """AdamW on float32 parameters, and its learning rate over time."""

    learning_rate: PositiveFloat = Field(default=1e-4, description="The highest learning rate.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="After the warm-up: down to final_share along a cosine; constant, then down along a line over "
        "decay_share of the run (wsd); or constant.",
    )
    warmup_share: Share = Field(default=0.015, description="Share of the run in which the rate rises from 0.")
    decay_share: Share = Field(default=0.2, description="wsd: share of the run in which the rate falls.")
    final_share: Share = Field(default=0.0, description="The last learning rate, as a share of the highest.")
    beta1: Share = Field(default=0.9, description="Decay of the mean of gradients.")
    beta2: Share = Field(default=0.95, description="Decay of the mean of their squares.")
    epsilon: PositiveFloat = Field(default=1e-8, description="Added to the root of the latter.")
    weight_decay: Annotated[Float, Field(ge=0)] = Field(
        default=0.0, description="Decoupled, on matrices only."
    )
    clip_norm: PositiveFloat | None = Field(
        default=0.5, description="Longest gradient, by its norm over all parameters. null: any."
    )
    clip_value: PositiveFloat | None = Field(
        default=None, description="Largest entry of a gradient (EAGLE-1's clipping). null: any."
    )


class BatchSection(Section):
    """What one update sees: `accumulate` times `rows` rows of `length` tokens."""

    rows: PositiveInt = Field(default=8, description="Rows in one pass; divisible by data x fsdp.")
    length: PositiveInt = Field(
        default=2048,
        description="Tokens in a row. Samples are packed into rows; longer ones are cut.",
    )
    accumulate: PositiveInt = Field(default=1, description="Passes whose gradients make up one update.")
    pack: Bool = Field(
        default=True, description="Several samples in a row, which do not see each other; false: one a row."
    )


class EvaluationSection(Section):
    """How it is told whether the head gets better."""

    every: PositiveInt = Field(default=500, description="Updates between two evaluations.")
    batches: PositiveInt | None = Field(
        default=None, description="Batches of the held-out data that losses are taken on. null: all."
    )
    prompts: NaturalInt = Field(
        default=16,
        description="Held-out prompts that are answered with the head, by this library's own decoding, to measure "
        "its mean acceptance length. 0: that is not measured, and the loss chooses the best head.",
    )
    max_new_tokens: PositiveInt = Field(default=128, description="Longest of those answers.")
    batch_size: PositiveInt = Field(default=8, description="Answers made side by side.")
    temperature: Annotated[Float, Field(ge=0)] = Field(default=0.0, description="Of those answers.")
    tree: TreeConfig = Field(
        default=ChainConfig(num_tokens=3), discriminator="kind", description="What is drafted for them."
    )
    patience: PositiveInt | None = Field(
        default=None, description="End after so many evaluations without a better one. null: never."
    )


class CheckpointSection(Section):
    """What is kept to go on from."""

    every: PositiveInt = Field(default=500, description="Updates between two checkpoints.")
    keep: PositiveInt = Field(default=2, description="Latest checkpoints that are kept, beside the best one.")


class TrainConfig(Section):
    """Everything that training needs to know."""

    model: Text = Field(
        description="The target: a Hugging Face folder, a .gguf file, an Orbax folder, a hub id, or "
        "package:<package>/<file>."
    )
    data: Annotated[tuple[Text, ...], BeforeValidator(_as_tuple), Field(min_length=1)] = Field(
        description="Folders that `python -m eagle_jax.prepare` has written: one, or a list."
    )
    output: Text = Field(
        description="The folder of the run. One that holds an unfinished run of the same config is gone on with."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="bfloat16",
        description="Of the target and of products. Parameters in training, sums and losses are float32.",
    )
    head: HeadSection = Field(default=HeadSection(), description="The head to train.")
    objective: ObjectiveSection = Field(default=ObjectiveSection(), description="What it is taught with.")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="How it learns.")
    batch: BatchSection = Field(default=BatchSection(), description="What one update sees.")
    steps: PositiveInt | None = Field(
        default=None, description="Updates in all. null: as many as `epochs` passes over the data take."
    )
    epochs: PositiveInt = Field(default=1, description="Passes over the data; not read when steps is given.")
    remat: Bool = Field(
        default=True, description="Compute activations again for gradients, instead of keeping them."
    )
    evaluation: EvaluationSection = Field(default=EvaluationSection(), description="How it is measured.")
    checkpoints: CheckpointSection = Field(default=CheckpointSection(), description="What is kept.")
    logging: LoggingConfig = Field(default=LoggingConfig(), description="What is written down.")
    mesh: MeshConfig = Field(default=MeshConfig(), description="How many devices share the work.")
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = Field(
        default=0, description="Of the start, the order of the data and noise."
    )
    compilation_cache: Text | None = Field(
        default=None, description="Folder that keeps compiled programs between runs. null: none."
    )

    @model_validator(mode="after")
    def _one_step_for_eagle1(self) -> TrainConfig:
        if self.head.method == "eagle" and set(self.objective.length.values()) != {1}:
            if "length" in self.objective.model_fields_set:
                raise ValueError("objective.length: EAGLE-1 heads have one step; leave it out or set 1")
            return self.model_copy(update={"objective": self.objective.model_copy(update={"length": {0: 1}})})
        return self


def load_train_config(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a training config; see `read_config`.

    Returns:
        The checked config. Relative paths of models in it are resolved against the current folder, the config's folder
        and the installed data, in this order; `data` and `output` are the current folder's.
    """
    config, folder = read_config(TrainConfig, name_or_path, overrides, "train")
    update: dict[str, Any] = {"model": resolve_model(config.model, "model", folder)}
    if config.head.warm_start is not None:
        head = resolve_model(config.head.warm_start, "head.warm_start", folder)
        update["head"] = config.head.model_copy(update={"warm_start": head})
    return config.model_copy(update=update)
