"""Losses, accuracies, states and gradients of EAGLE-3's own training code."""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import GOLDEN, head, read_json, read_npz
from safetensors.numpy import load_file

from eagle_jax.drafters.head_config import HEAD_NAMES
from eagle_jax.loading import rename
from eagle_jax.training.losses import Objective, distillation, supervised, total
from eagle_jax.training.unroll import training_time_test

META = read_json("eagle3_training/meta.json")
BATCH = read_npz("eagle3_training/batch.npz")
LENGTH = META["trained"] and META["length"]
OBJECTIVE = Objective.of_reference()
WEIGHTS = {"trained": "eagle3/head/model.safetensors", "random": "eagle3_training/random_head.safetensors"}


def read_head(name):
    tensors = {rename(k, HEAD_NAMES): v for k, v in load_file(GOLDEN / name).items()}
    return {k: jnp.asarray(v.astype(np.int32) if v.dtype == np.int64 else v) for k, v in tensors.items() if k}


@lru_cache
def run(case):
    """(sums, states and logits of every step, loss, gradients)."""
    functional = head("eagle3/head", "eagle3").functional
    params = read_head(WEIGHTS[case])
    tokens = jnp.asarray(BATCH["input_ids"], jnp.int32)
    mask = jnp.asarray(BATCH["loss_mask"], bool)
    segments = 1 - jnp.asarray(BATCH["attention_mask"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    embeddings = head("eagle3/head", "eagle3").params.embeddings
    fixed = {name: value for name, value in params.items() if name == "d2t"}

    def loss(trained):
        module = functional.bind(trained | fixed)
        outputs = training_time_test(
            module, embeddings, tokens, jnp.asarray(BATCH["aux_hidden"]), segments, positions, LENGTH
        )
        # The recorded logits stand for states, with the identity as the target's head.
        logits = jnp.asarray(BATCH["target_logits"])
        sums = distillation(
            [module.normed(x) for x in outputs],
            module.lm_head.weight[...],
            logits,
            jnp.eye(logits.shape[-1]),
            module.token_ids(),
            supervised(mask, segments, LENGTH, OBJECTIVE),
            OBJECTIVE,
        )
        return total(sums, sums.rows, float(tokens.size), OBJECTIVE), (
            sums,
            outputs,
            [module.logits(x) for x in outputs],
        )

    trained = {name: value for name, value in params.items() if name != "d2t"}
    (value, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(trained)
    return *aux, value, grads


@pytest.mark.parametrize("case", WEIGHTS)
def test_losses_and_accuracies(case):
    sums, _, _, value, _ = run(case)
    expected = META[case]
    np.testing.assert_allclose(sums.loss / BATCH["input_ids"].size, expected["plosses"], rtol=1e-4)
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-4)
    shifted = [BATCH["loss_mask"][:, i:].sum() for i in range(LENGTH)]
    np.testing.assert_array_equal(sums.rows, shifted)
    np.testing.assert_allclose(sums.correct / sums.rows, expected["acces"], atol=1e-5)


@pytest.mark.parametrize("case", WEIGHTS)
def test_states_and_logits(case):
    _, outputs, logits, _, _ = run(case)
    golden = read_npz(f"eagle3_training/{case}_steps.npz")
    valid = BATCH["attention_mask"].astype(bool)
    for i in range(LENGTH):
        for ours, theirs in ((outputs[i], golden["step_hidden"][i]), (logits[i], golden["step_logits"][i])):
            np.testing.assert_allclose(np.asarray(ours)[valid], theirs[valid], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", WEIGHTS)
def test_gradients(case):
    *_, grads = run(case)
    golden = {
        rename(name, HEAD_NAMES): value
        for name, value in load_file(GOLDEN / f"eagle3_training/{case}_grads.safetensors").items()
    }
    assert set(grads) == set(golden)
    for name, expected in golden.items():
        np.testing.assert_allclose(grads[name], expected, rtol=1e-3, atol=2e-5, err_msg=name)
