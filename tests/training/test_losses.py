"""Losses against plain formulas, the masks' alignments, and sums that add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle_jax.training import losses
from eagle_jax.training.losses import Objective, distillation, supervised, total

B, T, D, V, VD, N = 2, 11, 6, 40, 17, 3


def case(seed=0, vocabulary=VD):
    rng = np.random.default_rng(seed)
    outputs = [jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32) for _ in range(N)]
    token_ids = np.sort(rng.choice(V, vocabulary, replace=False)).astype(np.int32)
    return dict(
        outputs=outputs,
        draft_weight=jnp.asarray(rng.standard_normal((vocabulary, D)), jnp.float32),
        hidden=jnp.asarray(rng.standard_normal((B, T, D)), jnp.float32),
        target_weight=jnp.asarray(rng.standard_normal((V, D)), jnp.float32),
        token_ids=jnp.asarray(token_ids) if vocabulary < V else None,
        counts=jnp.asarray(rng.random((N, B, T)) < 0.6) & (jnp.arange(T) >= jnp.arange(N)[:, None])[:, None],
    )


def by_formula(outputs, draft_weight, hidden, target_weight, token_ids, counts, objective):
    """Row by row, in float64."""
    ids = np.arange(V) if token_ids is None else np.asarray(token_ids)
    softmax = lambda x: np.exp(x - x.max()) / np.exp(x - x.max()).sum()  # noqa: E731
    loss, correct, accepted = np.zeros(N), np.zeros(N), np.zeros(N)
    for i, b, j in np.ndindex(N, B, T):
        if not counts[i, b, j]:
            continue
        state = np.asarray(hidden[b, j + 1], np.float64) if j + 1 < T else np.zeros(D)
        target = np.asarray(target_weight, np.float64) @ state
        best = int(target.argmax())
        if best not in ids:
            continue
        p = softmax(target[ids])
        q = softmax(np.asarray(draft_weight, np.float64) @ np.asarray(outputs[i][b, j - i], np.float64))
        overlap = np.minimum(p, q).sum()
        if objective.kind == "forward_kl":
            loss[i] -= p @ np.log(q)
        elif objective.kind == "lk_alpha":
            loss[i] -= np.log(overlap)
        else:
            w = np.exp(-objective.lk_decay * overlap)
            loss[i] += w * (p @ np.log(p / q)) + (1 - w) * (1 - overlap)
        correct[i] += ids[q.argmax()] == best
        accepted[i] += overlap
    return loss, correct, accepted


@pytest.mark.parametrize("vocabulary", [VD, V])
@pytest.mark.parametrize("kind", ["forward_kl", "lk_alpha", "lk_lambda"])
def test_losses_are_their_formulas(kind, vocabulary):
    objective, inputs = Objective(kind), case(vocabulary=vocabulary)
    sums = jax.jit(lambda x: distillation(**x, objective=objective))(inputs)
    loss, correct, accepted = by_formula(**inputs, objective=objective)
    assert 0 < correct.sum() < inputs["counts"].sum()
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-5)
    np.testing.assert_array_equal(sums.correct, correct)
    np.testing.assert_allclose(sums.accepted, accepted, rtol=1e-5)
    np.testing.assert_array_equal(sums.rows, inputs["counts"].sum(axis=(1, 2)))


@pytest.mark.parametrize("kind", ["forward_kl", "lk_alpha", "lk_lambda"])
def test_chunks_change_neither_losses_nor_gradients(kind, monkeypatch):
    objective, inputs = Objective(kind), case()

    def run():
        def loss(outputs, weight):
            sums = distillation(**inputs | dict(outputs=outputs, draft_weight=weight), objective=objective)
            return total(sums, sums.rows, B * T, objective), sums

        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        return grad(inputs["outputs"], inputs["draft_weight"])

    whole = run()
    monkeypatch.setattr(losses, "_ELEMENTS", 5 * (V + N * VD))  # five rows at a time, the last chunk not full
    for a, b in zip(jax.tree.leaves(run()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_the_overlap_that_weighs_lk_lambda_has_no_gradient_of_its_own():
    inputs = case()

    def value(weight, objective):
        return distillation(**inputs | dict(draft_weight=weight), objective=objective).loss.sum()

    grads = {
        decay: jax.grad(value)(inputs["draft_weight"], Objective("lk_lambda", lk_decay=decay))
        for decay in (0.0, 1e9)
    }
    divergence = jax.grad(value)(inputs["draft_weight"], Objective("forward_kl"))
    np.testing.assert_allclose(grads[0.0], divergence, rtol=1e-4, atol=1e-5)  # its weight is 1: KL alone
    overlap = jax.grad(
        lambda w: -distillation(**inputs | dict(draft_weight=w), objective=Objective()).accepted.sum()
    )(inputs["draft_weight"])
    assert not np.asarray(overlap).any()  # the metric is none that learns
    assert np.abs(grads[1e9]).max() > 1e-3


def test_softmax_is_float32_when_weights_are_not():
    inputs = case()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, inputs)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, narrow)
    sums = [jax.jit(lambda x: distillation(**x, objective=Objective()))(x) for x in (narrow, wide)]
    np.testing.assert_allclose(sums[0].loss, sums[1].loss, rtol=1e-5)


def test_mask_alignments():
    mask = jnp.asarray([[0, 0, 1, 1, 1, 0, 1]], bool)
    segments = jnp.zeros((1, 7), jnp.int32)

    def slots(alignment, length=1, **options):
        counts = supervised(mask, segments, length, Objective(mask_alignment=alignment, **options))
        # Row j of step i belongs to slot j - i.
        return [[j - i for j in np.flatnonzero(counts[i, 0])] for i in range(length)]

    # Slot p sees token p + 1 and predicts token p + 2.
    assert slots("both") == [[1, 2]]  # pairs (2, 3) and (3, 4)
    assert slots("next") == [[1, 2, 3, 5]]
    assert slots("slot") == [[2, 3, 4]]
    assert slots("slot", count_last_row=True) == [[2, 3, 4, 6]]
    # In later steps the same tokens are predicted from earlier slots.
    assert slots("both", length=3) == [[1, 2], [0, 1], [0]]


def test_masks_end_with_their_document():
    mask = jnp.ones((1, 8), bool)
    segments = jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 1]])
    counts = supervised(mask, segments, 3, Objective())
    slots = [[j - i for j in np.flatnonzero(counts[i, 0])] for i in range(3)]
    assert slots == [[0, 1, 4, 5], [0, 4], []]


def test_prefixes_are_those_of_slots():
    """A draft is right up to step i when it is right in all steps up to i, from the same slot."""
    inputs = case(vocabulary=V)
    counts = (
        jnp.broadcast_to(jnp.arange(T) < T - 1, (N, B, T))
        & (jnp.arange(T) >= jnp.arange(N)[:, None])[:, None]
    )
    weight, hidden = inputs["target_weight"], inputs["hidden"]
    rng = np.random.default_rng(3)
    right = rng.random((N, B, T)) < 0.6
    # Step i of slot p is right when its state is the target's own at p + i + 1, wrong when it is that state's opposite.
    outputs = []
    for i in range(N):
        ahead = np.zeros((B, T, D), np.float32)
        ahead[:, : T - 1 - i] = hidden[:, 1 + i :]
        outputs.append(jnp.asarray(np.where(right[i][..., None], ahead, -ahead)))
    inputs |= dict(outputs=outputs, draft_weight=weight, counts=counts)
    sums = distillation(**inputs, objective=Objective())
    live = np.stack([np.arange(T) < T - 1 - i for i in range(N)])
    expected = [(right[: i + 1].all(axis=0) & live[i]).sum() for i in range(N)]
    np.testing.assert_array_equal(sums.prefix, expected)
    np.testing.assert_array_equal(sums.slots, [B * (T - 1 - i) for i in range(N)])
    assert 0 < expected[-1] < expected[0]


def test_sums_of_parts_are_the_sum_of_the_whole():
    inputs, objective = case(), Objective()
    whole = distillation(**inputs, objective=objective)
    parts = []
    for b in range(B):
        one = inputs | dict(
            outputs=[x[b : b + 1] for x in inputs["outputs"]],
            hidden=inputs["hidden"][b : b + 1],
            counts=inputs["counts"][:, b : b + 1],
        )
        parts.append(distillation(**one, objective=objective))
    added = jax.tree.map(lambda *x: sum(x), *parts)
    for a, b in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_what_losses_are_means_over():
    sums = distillation(**case(), objective=Objective())
    weights = 0.8 ** np.arange(N)
    for denominator, rows in (("supervised", sums.rows), ("all", B * T)):
        value = total(sums, sums.rows, B * T, Objective(denominator=denominator))
        np.testing.assert_allclose(value, np.sum(weights * sums.loss / rows), rtol=1e-6)


def test_nothing_to_learn_gives_zero():
    inputs = case()
    inputs["counts"] = jnp.zeros_like(inputs["counts"])
    value, grads = jax.value_and_grad(
        lambda w: (lambda s: total(s, s.rows, B * T, Objective()))(
            distillation(**inputs | dict(draft_weight=w), objective=Objective())
        )
    )(inputs["draft_weight"])
    assert value == 0.0
    assert not np.asarray(grads).any()
