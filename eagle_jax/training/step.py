"""One update of a head: features, the training-time test, losses, gradients and AdamW in one jitted function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from eagle_jax.drafters.head_config import HeadConfig
from eagle_jax.models.decoder import Target
from eagle_jax.models.functional import Functional, Params
from eagle_jax.parallel.sharding import TARGET_RULES, shardings
from eagle_jax.training.losses import (
    Objective,
    Sums,
    distillation,
    feature_noise,
    feature_regression,
    supervised,
    total,
)
from eagle_jax.training.teacher import teach
from eagle_jax.training.unroll import teacher_forced, training_time_test

FROZEN = ("d2t", "embed_tokens.weight")  # a head's parameters that are not trained


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """`A` passes of `B` packed rows; see `packing.Rows`.

    Attributes:
        taps, hidden: the target's states, where they were captured before; None: the target runs along.
    """

    tokens: Int[Array, "A B T"]
    mask: Bool[Array, "A B T"]
    segments: Int[Array, "A B T"]
    positions: Int[Array, "A B T"]
    taps: Float[Array, "A B T M"] | None = None
    hidden: Float[Array, "A B T D"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """What changes from update to update.

    Attributes:
        step: updates made.
        params: the head's trained parameters, float32.
        optimizer: Optax's state.
    """

    step: Int[Array, ""]
    params: dict[str, jax.Array]
    optimizer: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Fixed:
    """What does not change: the target's parameters, and the head's that are not trained."""

    target: Params
    head: Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Metrics:
    """Of one update or of an evaluation: sums over rows, the loss, and the gradient's norm before it is clipped."""

    sums: Sums
    regression: Float[Array, ""]
    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


@dataclass(frozen=True)
class Training:
    """The static choices of a run; everything jitted closes over one.

    Attributes:
        target: the target's static half.
        head: the head's.
        config: the head's config.
        objective: what is learned.
        method: `eagle` or `eagle3`.
        dtype: of products.
        remat: see `training_time_test`.
        regression_weight, distillation_weight, noise: EAGLE-1's.
        seed: of noise.
    """

    target: Target
    head: Functional[Any]
    config: HeadConfig
    objective: Objective
    method: Literal["eagle", "eagle3"] = "eagle3"
    dtype: str = "float32"
    remat: bool = False
    regression_weight: float = 1.0
    distillation_weight: float = 0.1
    noise: float = 0.2
    seed: int = 0

    def counts(self, batch: Batch, length: int) -> Bool[Array, "A n B T"]:
        """Which rows count in each step."""
        return jax.vmap(lambda mask, segments: supervised(mask, segments, length, self.objective))(
            batch.mask, batch.segments
        )

    def loss(
        self,
        trained: Params,
        fixed: Fixed,
        batch: Batch,
        counts: Bool[Array, "n B T"],
        rows: Float[Array, " n"],
        all_rows: Any,
        key: Array | None,
    ) -> tuple[Float[Array, ""], tuple[Sums, Float[Array, ""]]]:
        """The loss of one pass, a part of that of its update.

        Args:
            batch: one pass: [B, T].
            rows, all_rows: what is divided by; see `total`.
            key: of EAGLE-1's noise; None: none.
        """
        cast = {path: value.astype(self.dtype) for path, value in trained.items()}
        head = self.head.bind({**cast, **fixed.head})
        embeddings = fixed.target["embed_tokens.weight"]
        output_weight = fixed.target.get("lm_head.weight", embeddings)
        place = (batch.segments, batch.positions)
        if batch.taps is None or batch.hidden is None:
            taps, hidden = teach(self.target, fixed.target, batch.tokens, *place, self.config.taps)
        else:
            taps, hidden = batch.taps.astype(self.dtype), batch.hidden.astype(self.dtype)
        if self.method == "eagle":
            features = taps if key is None else feature_noise(key, taps, self.noise)
            predicted = teacher_forced(head, embeddings, batch.tokens, features, *place)
            sums = distillation(
                [predicted], output_weight, hidden, output_weight, None, counts, self.objective
            )
            divisor = jnp.maximum(rows[0], 1.0) if self.objective.denominator == "supervised" else all_rows
            distance = feature_regression(predicted, hidden, counts[0])
            loss = self.regression_weight * distance / divisor
            return loss + self.distillation_weight * total(sums, rows, all_rows, self.objective), (
                sums,
                distance,
            )
        outputs = training_time_test(
            head, embeddings, batch.tokens, taps, *place, length=counts.shape[0], remat=self.remat
        )
        sums = distillation(
            [head.normed(x) for x in outputs],
            head.lm_head.weight[...],
            hidden,
            output_weight,
            head.token_ids(),
            counts,
            self.objective,
        )
        return total(sums, rows, all_rows, self.objective), (sums, jnp.zeros(()))

    def train_step(
        self,
        optimizer: optax.GradientTransformation,
        length: int,
        state: TrainState,
        fixed: Fixed,
        batch: Batch,
    ) -> tuple[TrainState, Metrics]:
        """One update from `A` passes, whose gradients add up in float32."""
        counts = self.counts(batch, length)
        rows = jnp.sum(counts, axis=(0, 2, 3), dtype=jnp.float32)
        all_rows = jnp.asarray(batch.tokens.size, jnp.float32)
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(self.seed), state.step), batch.tokens.shape[0]
        )
        gradient = jax.value_and_grad(self.loss, has_aux=True)

        def one(item):
            part, count, key = item
            return gradient(state.params, fixed, part, count, rows, all_rows, key)

        if batch.tokens.shape[0] == 1:
            (loss, (sums, distance)), gradients = one(jax.tree.map(lambda x: x[0], (batch, counts, keys)))
        else:
            zeros = jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, _first(batch, counts, keys))
            )

            def body(carry, item):
                return jax.tree.map(jnp.add, carry, one(item)), None

            ((loss, (sums, distance)), gradients), _ = jax.lax.scan(body, zeros, (batch, counts, keys))
        updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(state.step + 1, params, optimizer_state)
        return new, Metrics(sums, distance, loss, optax.tree.norm(gradients))

    def eval_step(self, length: int, params: Params, fixed: Fixed, batch: Batch) -> tuple[Sums, Any]:
        """Sums over one batch of held-out rows; without noise."""
        counts = self.counts(batch, length)
        ones = jnp.ones((length,))

        def one(item):
            part, count = item
            return self.loss(params, fixed, part, count, ones, 1.0, None)[1]

        return jax.tree.map(lambda x: x.sum(axis=0), jax.lax.map(one, (batch, counts)))


def _first(*trees: Any) -> Any:
    return jax.tree.map(lambda x: x[0], trees)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Where `Batch` lives: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(None, TARGET_RULES["batch"]))


def state_shardings(
    training: Training, optimizer: optax.GradientTransformation, mesh: Mesh
) -> tuple[Any, Any]:
    """The shapes of a run's state, and where its arrays live: as the head's, and the optimizer's alike."""
    specs = {path: spec for path, spec in training.head.specs.items() if path not in FROZEN}
    placed: Any = shardings({path: spec.axes for path, spec in specs.items()}, mesh, TARGET_RULES)
    shapes = {
        path: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=placed[path])
        for path, spec in specs.items()
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    moments = jax.eval_shape(optimizer.init, shapes)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return placed[names[-1]] if names and names[-1] in placed else everywhere

    moment_shardings = jax.tree_util.tree_map_with_path(place, moments)
    make: Any = TrainState
    abstract = make(jax.ShapeDtypeStruct((), jnp.int32), shapes, moments)
    return abstract, make(everywhere, placed, moment_shardings)
