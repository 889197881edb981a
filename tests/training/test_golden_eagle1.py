"""EAGLE-1's regression and cross-entropy, with gradients, from its own training code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_data import GOLDEN, head, read_json, read_npz, target
from safetensors.numpy import load_file

from eagle_jax.drafters.head_config import HEAD_NAMES
from eagle_jax.loading import rename
from eagle_jax.training.losses import Objective, distillation, feature_noise, feature_regression, supervised
from eagle_jax.training.unroll import teacher_forced

META = read_json("eagle1/train_meta.json")
BATCH = read_npz("eagle1/train_batch.npz")
OBJECTIVE = Objective(mask_alignment="slot", count_last_row=True)


@pytest.mark.parametrize("case", META["cases"])
def test_losses_and_gradients(case):
    expected = META["cases"][case]
    loaded = head(f"eagle1/{expected['head']}", "eagle")
    features = BATCH["hidden_states_noisy" if case.endswith("noisy") else "hidden_states"]
    tokens = jnp.asarray(BATCH["raw_input_ids"], jnp.int32)
    segments = 1 - jnp.asarray(BATCH["attention_mask"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    counts = supervised(jnp.asarray(BATCH["loss_mask"], bool), segments, 1, OBJECTIVE)
    weight = target().params["lm_head.weight"]
    # Row j of the targets is the state at j + 1, as recorded: zeros after the last token.
    states = jnp.concatenate([jnp.zeros_like(features[:, :1]), BATCH["target"]], axis=1)[:, :-1]
    assert not BATCH["target"][:, -1].any()

    def loss(params):
        predicted = teacher_forced(
            loaded.functional.bind(params),
            loaded.params.embeddings,
            tokens,
            jnp.asarray(features),
            segments,
            positions,
        )
        sums = distillation([predicted], weight, states, weight, None, counts, OBJECTIVE)
        rows = sums.rows[0] + 1e-5
        regression = feature_regression(predicted, states, counts[0]) / rows
        entropy = sums.loss[0] / rows
        return META["v_w"] * regression + META["p_w"] * entropy, (predicted, regression, entropy, sums)

    (value, (predicted, regression, entropy, sums)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        dict(loaded.params.head)
    )
    np.testing.assert_allclose(value, expected["loss"], rtol=1e-4)
    np.testing.assert_allclose(regression, expected["vloss"], rtol=1e-4)
    np.testing.assert_allclose(entropy, expected["ploss"], rtol=1e-4)
    np.testing.assert_allclose(sums.correct[0] / sums.rows[0], expected["acc"], atol=1e-5)

    file = GOLDEN / f"eagle1/{case}.safetensors"
    if not file.exists():
        return
    golden = load_file(file)
    valid = BATCH["attention_mask"].astype(bool)
    np.testing.assert_allclose(np.asarray(predicted)[valid], golden["predict"][valid], atol=1e-4, rtol=1e-4)
    compared = set()
    for name, gradient in golden.items():
        path = rename(name.removeprefix("grad."), HEAD_NAMES) if name.startswith("grad.") else None
        if path in grads:
            np.testing.assert_allclose(grads[path], gradient, rtol=1e-3, atol=2e-5, err_msg=name)
            compared.add(path)
    assert compared == {name for name in grads if name != "embed_tokens.weight"}


def test_noise_is_as_wide_as_the_reference_makes_it():
    features = jnp.ones((2, 128, 16))
    noise = np.asarray(feature_noise(jax.random.key(0), features) - features)
    width = 0.2 * 512 / 128
    assert -width / 2 <= noise.min() < -0.49 * width
    assert 0.49 * width < noise.max() <= width / 2
    assert abs(noise.mean()) < 0.02 * width
