"""Penalties, cuts and noise against what they are defined as."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference_sampling import kept_and_margin, prepare
from sameness import Request, row_sampling
from scipy import stats

from eagle_jax import SamplingParams
from eagle_jax.draft_tree import DraftTree, ancestor_mask
from eagle_jax.sampling import gumbel_noise, process, process_draft, truncate

jitted_truncate = jax.jit(truncate)
jitted_process = jax.jit(process)
jitted_draft = jax.jit(process_draft)
jitted_noise = jax.jit(gumbel_noise, static_argnums=2)


def rows(*params: SamplingParams):
    return row_sampling([Request([0], p) for p in params])


def survivors(logits, *params):
    """Which tokens of [B, N, V] are left; parameters go by row."""
    cut = np.asarray(jitted_truncate(jnp.asarray(logits, jnp.float32), rows(*params)))
    left = np.isfinite(cut)
    assert np.array_equal(cut[left], np.asarray(logits, np.float32)[left])
    return left


def sampled(**kwargs):
    return SamplingParams(temperature=1.0, **kwargs)


# ---------------------------------------------------------------- cuts


def random_params(rng):
    return sampled(
        top_p=float(rng.choice([1.0, 0.95, 0.8, 0.5, 0.1, 1e-6])),
        top_k=int(rng.choice([0, 1, 2, 5, 30, 1000])),
        min_p=float(rng.choice([0.0, 0.001, 0.1, 0.7, 1.0])),
    )


@pytest.mark.parametrize("V", [2, 3, 50, 997])
def test_cuts_are_those_of_a_sort(V):
    rng = np.random.default_rng(V)
    checked = 0
    for _ in range(8):
        params = [random_params(rng) for _ in range(32)]
        spread = rng.choice([0.3, 2.0, 8.0], size=(32, 1, 1))
        logits = (rng.normal(size=(32, 4, V)) * spread).astype(np.float32)
        got = survivors(logits, *params)
        for b, p in enumerate(params):
            for n in range(4):
                kept, margin = kept_and_margin(logits[b, n], p)
                if margin > 1e-5:  # else rounding decides
                    assert np.array_equal(got[b, n], kept), (p, logits[b, n])
                    checked += 1
    assert checked > 900


def test_cuts_come_in_the_order_min_p_top_k_top_p():
    """Each after the other on what is left, top-p on the renormalised rest."""
    p = np.array([0.4, 0.2, 0.2, 0.1, 0.1])
    logits = np.log(np.array([0.40, 0.24, 0.16, 0.12, 0.08]))[None, None]
    assert p.sum() == pytest.approx(1)
    # Of the three best, 0.40/0.80 and 0.64/0.80 of the mass come with one and with two tokens.
    assert survivors(logits, sampled(top_k=3, top_p=0.7)).sum() == 2
    assert survivors(logits, sampled(top_p=0.7)).sum() == 3
    # min-p leaves 0.40 and 0.24, of which 0.40 is 0.62.
    assert survivors(logits, sampled(min_p=0.5, top_p=0.6)).sum() == 1
    assert survivors(logits, sampled(min_p=0.5, top_p=0.65)).sum() == 2
    # min-p first: top-k then has nothing to cut.
    assert survivors(logits, sampled(min_p=0.5, top_k=4)).sum() == 2


def test_extremes():
    logits = np.random.default_rng(0).normal(size=(1, 3, 64)).astype(np.float32)
    best = logits == logits.max(axis=-1, keepdims=True)
    for p in (sampled(top_k=1), sampled(top_p=1e-9), sampled(min_p=1.0)):
        assert np.array_equal(survivors(logits, p), best)
    for p in (sampled(top_k=64), sampled(top_k=10**6), sampled(top_p=1.0), sampled(min_p=1e-30)):
        assert survivors(logits, p).all()


def test_ties():
    """Tokens that tie with the last one kept are kept; a flat distribution is therefore never cut."""
    flat = np.zeros((1, 1, 8))
    for p in (sampled(top_k=3), sampled(top_p=0.3), sampled(min_p=1.0)):
        assert survivors(flat, p).all()
    steps = np.array([3.0, 1.0, 1.0, 1.0, 0.0, 0.0])[None, None]
    assert survivors(steps, sampled(top_k=2)).sum() == 4
    assert survivors(steps, sampled(top_k=1)).sum() == 1


def test_what_is_already_impossible_stays_so():
    logits = np.array([0.0, -np.inf, 1.0, -np.inf, -200.0])[None, None]
    assert survivors(logits, sampled(top_k=4))[0, 0].tolist() == [True, False, True, False, False]
    assert survivors(logits, sampled(top_p=0.999))[0, 0].tolist() == [True, False, True, False, False]


def test_rows_keep_to_themselves():
    logits = np.random.default_rng(1).normal(size=(4, 2, 40)).astype(np.float32)
    params = [sampled(top_k=3), SamplingParams(temperature=0, top_k=3), sampled(), sampled(top_p=0.4)]
    together = survivors(logits, *params)
    for i, p in enumerate(params):
        assert np.array_equal(together[i], survivors(logits[i : i + 1], p)[0])
    assert together[0].sum(axis=-1).tolist() == [3, 3]
    assert together[1:3].all()


# ---------------------------------------------------------------- penalties and minimum lengths


def tree(tokens, parents, depths):
    parents = jnp.asarray([parents])
    ones = jnp.ones_like(parents) > 0
    mask = ancestor_mask(parents, max(depths))
    return DraftTree(jnp.asarray([tokens]), parents, jnp.asarray([depths]), mask, ones, ones)


#        0
#      1   2        tokens 4; 5, 6; 7, 5; 8
#     3 4
#     5
TREE = tree([4, 5, 6, 7, 5, 8], [0, 0, 0, 1, 1, 3], [0, 1, 1, 2, 2, 3])
PATHS = [[4], [4, 5], [4, 6], [4, 5, 7], [4, 5, 5], [4, 5, 7, 8]]


def processed(logits, params, history=(), generated=1):
    presence = np.zeros((1, logits.shape[-1]), bool)
    presence[0, [*history, 4]] = True  # the root belongs to the history
    return np.asarray(jitted_process(logits, TREE, presence, np.asarray([generated]), rows(params)))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_counts_the_history_and_the_nodes_path(penalty, temperature):
    logits = np.random.default_rng(2).normal(size=(1, 6, 12)).astype(np.float32) * 3
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    got = processed(logits, params, history=[1, 2])
    for n, path in enumerate(PATHS):
        np.testing.assert_allclose(got[0, n], prepare(logits[0, n], [1, 2, *path], [], params), rtol=1e-6)


def test_repetition_penalty_is_that_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(3).normal(size=(1, 6, 12)).astype(np.float32) * 3
    got = processed(logits, SamplingParams(temperature=0, repetition_penalty=1.3), history=[1, 2])
    for n, path in enumerate(PATHS):
        path = torch.tensor([[1, 2, *path]])
        theirs = RepetitionPenaltyLogitsProcessor(1.3)(path, torch.tensor(logits[:, n]))
        np.testing.assert_allclose(got[:, n], theirs.numpy(), rtol=1e-6)


@pytest.mark.parametrize(("minimum", "bans"), [(0, 0), (2, 0), (3, 1), (4, 3), (5, 5), (6, 6), (50, 6)])
def test_minimum_length_bans_stop_tokens_by_depth(minimum, bans):
    """With two tokens generated, the choice at depth d is the one after 2 + d."""
    logits = np.zeros((1, 6, 12), np.float32)
    params = SamplingParams(max_new_tokens=99, min_new_tokens=minimum, stop_token_ids=(3, 9))
    got = processed(logits, params, generated=2)
    banned = np.isneginf(got[0])
    assert banned.sum() == 2 * bans
    assert banned[:bans, [3, 9]].all()


def test_banned_tokens_do_not_count_for_the_cuts():
    """The most likely token is banned; top-k and top-p then look at the rest."""
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.1, 0.05, 0.05] + [1e-9] * 7, np.float32)), (1, 6, 1))
    params = SamplingParams(top_k=2, min_new_tokens=9, stop_token_ids=(0,))
    assert np.flatnonzero(np.isfinite(processed(logits, params)[0, 5])).tolist() == [1, 2]


def test_draft_side_is_close_to_the_targets():
    """With the whole vocabulary and at the root, where there is no path, they are one."""
    rng = np.random.default_rng(4)
    greedy = SamplingParams(temperature=0, repetition_penalty=1.2)
    sampling = rows(sampled(), sampled(top_k=3, repetition_penalty=1.5), greedy)
    logits = rng.normal(size=(3, 1, 20)).astype(np.float32)
    presence = rng.random((3, 20)) < 0.3
    root = DraftTree.root_only(jnp.argmax(presence, axis=1))
    target_side = jitted_process(logits, root, presence, np.ones(3, np.int32), sampling)
    np.testing.assert_array_equal(jitted_draft(logits, None, presence, sampling), target_side)
    kept = np.array([3, 7, 11, 12, 19])
    uncut = replace(sampling, top_k=np.zeros(3, np.int32))
    part = jitted_draft(logits[:, :, kept], kept, presence, uncut)
    whole = jitted_draft(logits, None, presence, uncut)
    np.testing.assert_array_equal(part, np.asarray(whole)[:, :, kept])


# ---------------------------------------------------------------- noise


def noise(keys, positions, V=30):
    """Noise of rows (seed, sample)."""
    requests = [Request([0], SamplingParams(seed=seed), sample) for seed, sample in keys]
    return np.asarray(jitted_noise(row_sampling(requests), np.asarray(positions, np.int32), V))


@pytest.fixture(scope="module")
def draws():
    """[row, position, token] of ten seeds with four samples each, at fifty positions."""
    keys = [
        (seed, sample) for seed in (0, 1, 2, 3, 5, 8, 13, 2**31, 2**32 - 2, 2**32 - 1) for sample in range(4)
    ]
    return noise(keys, np.tile(np.arange(50), (40, 1)), V=100)


def test_noise_depends_on_seed_sample_and_position_only():
    keys = [(5, 0), (2**32 - 1, 3), (5, 1), (6, 0)]
    positions = np.array([[7, 8, 9], [100, 101, 102], [9, 10, 11], [0, 1, 2]])
    together = noise(keys, positions)
    for slot in range(4):  # in other slots, at other depths
        moved = noise(np.roll(keys, slot, axis=0).tolist(), np.roll(positions, slot, axis=0)[:, ::-1])
        np.testing.assert_array_equal(moved, np.roll(together, slot, axis=0)[:, ::-1])
    for slot, key in enumerate(keys):  # alone
        np.testing.assert_array_equal(noise([key], positions[slot : slot + 1, 1:2])[0, 0], together[slot, 1])
    np.testing.assert_array_equal(together[0, 2], noise([keys[0]], [[9]])[0, 0])
    assert not np.array_equal(together[0, 2], together[2, 0])  # the same seed and position, another sample


def test_no_two_places_share_noise(draws):
    """Not even those whose numbers have the same sum or are exchanged."""
    flat = draws.reshape(-1, draws.shape[-1])
    assert len(np.unique(flat, axis=0)) == len(flat)
    assert len(np.unique(flat)) > 0.98 * flat.size
    correlation = np.corrcoef(flat)
    assert np.abs(correlation[~np.eye(len(flat), dtype=bool)]).max() < 0.7


def test_noise_is_gumbel_and_independent_along_every_axis(draws):
    assert np.isfinite(draws).all()
    assert stats.kstest(draws.ravel(), "gumbel_r").pvalue > 0.001
    for axis in (0, 1, 2):
        a, b = (np.take(draws, np.arange(s, s + draws.shape[axis] - 1), axis=axis).ravel() for s in (0, 1))
        assert abs(stats.pearsonr(a, b).statistic) < 4 / np.sqrt(a.size)


def test_choices_follow_the_distribution(draws):
    """argmax(log p + G) draws from p."""
    p = np.array([0.5, 0.25, 0.15, 0.1])
    chosen = np.argmax(np.log(p) + draws[:, :, :4], axis=-1).ravel()
    assert stats.chisquare(np.bincount(chosen, minlength=4), p * chosen.size).pvalue > 0.001


def test_greedy_rows_have_no_noise():
    requests = [Request([0], SamplingParams(temperature=t)) for t in (0.0, 1.0, 1e-6, 0.01)]
    got = np.asarray(jitted_noise(row_sampling(requests), np.zeros((4, 3), np.int32), 30))
    assert [bool(row.any()) for row in got] == [False, True, False, True]
    got = np.asarray(jitted_noise(row_sampling(requests[:1] * 4), np.zeros((4, 3), np.int32), 30))
    assert not got.any()


def test_tiny_temperatures_are_greedy():
    """Dividing by them would overflow."""
    logits = np.array([1.0, 3.0, 2.0, -1.0], np.float32)[None, None]
    root = DraftTree.root_only(jnp.zeros(1, jnp.int32))
    for temperature in (1e-40, 1e-30, 1e-6, 0.0):
        sampling = rows(SamplingParams(temperature=temperature, top_p=0.9))
        scores = jitted_process(logits, root, np.zeros((1, 4), bool), np.ones(1, np.int32), sampling)
        assert np.array_equal(scores, logits)
