"""What is emitted follows the target's own distribution, and the tests would see it if it did not."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_pair
from reference_sampling import distribution
from sameness import Request, compare, decode, read, row_sampling
from scipy import stats

from eagle_jax import SamplingParams
from eagle_jax.caches.contiguous import ContiguousCache
from eagle_jax.decoding import step as step_module
from eagle_jax.decoding.verification import Accepted, follow_target
from eagle_jax.draft_tree import DraftTree, DynamicTree, StaticTree, ancestor_mask

V, DRAFTED, PROMPT, TOKENS = 13, 9, [3, 5, 7, 11, 1, 4], 3
BATCH, BATCHES = 500, 12
CAPACITY, CHUNK = 48, 16
PAIR = random_pair(V, DRAFTED, seed=3)
TREE = DynamicTree(8, 2, 3)
SETTINGS = [SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)]


# ---------------------------------------------------------------- exact enumeration


def random_tree(rng, V, nodes, depth):
    """A tree of random shape with distinct siblings; some nodes are padding, some may not be accepted."""
    tokens, parents, depths = [int(rng.integers(V))], [0], [0]
    while len(tokens) < nodes:
        parent = int(rng.integers(len(tokens)))
        siblings = {t for t, p in zip(tokens[1:], parents[1:], strict=True) if p == parent}
        free = sorted(set(range(V)) - siblings)
        if depths[parent] < depth and free:
            tokens.append(int(rng.choice(free)))
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return (
        np.array(tokens),
        np.array(parents),
        np.array(depths),
        rng.random(nodes) > 0.1,
        rng.random(nodes) > 0.1,
    )


@pytest.mark.parametrize(("V", "nodes", "depth"), [(3, 6, 2), (4, 5, 2), (5, 5, 3), (3, 7, 3)])
def test_following_the_target_is_exact(V, nodes, depth):
    """Over all choices that a target can make at the nodes, the emitted tokens have the target's probabilities."""
    rng = np.random.default_rng(V * nodes)
    choices = np.array(list(product(range(V), repeat=nodes)), np.int32)
    follow = jax.jit(follow_target, static_argnums=2)
    for _ in range(6):
        tokens, parents, depths, valid, candidate = random_tree(rng, V, nodes, depth)
        p = {}  # the target's distribution after every text

        def after(text, p=p):
            return p.setdefault(text, rng.dirichlet(np.ones(V)))

        paths = []
        for node in range(nodes):
            paths.append(() if node == 0 else (*paths[parents[node]], int(tokens[node])))
        weight = np.prod([after(paths[node])[choices[:, node]] for node in range(nodes)], axis=0)
        shape = choices.shape
        wide = [np.broadcast_to(x, shape) for x in (tokens, parents, depths, valid, candidate)]
        mask = np.broadcast_to(ancestor_mask(jnp.asarray(parents[None]), depth), (*shape, nodes))
        accepted = follow(DraftTree(wide[0], wide[1], wide[2], mask, wide[3], wide[4]), choices, depth)
        count, emitted = np.asarray(accepted.count), np.asarray(accepted.tokens)

        # A text comes about if it begins with what is emitted, and plain sampling adds the rest.
        for text in product(range(V), repeat=depth + 1):
            begins = np.all((emitted == text) | (np.arange(depth + 1) >= count[:, None]), axis=1)
            rest = np.array(
                [np.prod([after(text[:i])[text[i]] for i in range(n, depth + 1)]) for n in range(depth + 2)]
            )
            total = np.sum(weight[begins] * rest[count[begins]])
            plain = np.prod([after(text[:i])[text[i]] for i in range(depth + 1)])
            assert total == pytest.approx(plain, abs=1e-12)


# ---------------------------------------------------------------- the compiled loop


@partial(jax.jit, static_argnums=0)
def logits_after(target, params, tokens):
    """Raw logits after each whole row of `tokens`."""
    model, (B, T) = target.config, tokens.shape
    cache = ContiguousCache.zeros(model.num_layers, B, model.num_kv_heads, 16, model.head_dim, "float32")
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T))
    decoder = target.bind(params)
    out = decoder(tokens, positions, cache, jnp.zeros((B,), jnp.int32), causal)
    return decoder.logits(out.hidden[:, -1])


def exact(params):
    """Probabilities of all texts of `TOKENS` tokens after the prompt, [V, V, …]."""
    joint = np.ones(())
    for length in range(TOKENS):
        texts = list(product(range(V), repeat=length))
        rows = np.array([[*PROMPT, *text] for text in texts], np.int32)
        logits = np.asarray(logits_after(PAIR.target, PAIR.target_weights, rows))
        joint = joint[..., None] * np.stack([distribution(x, params) for x in logits]).reshape(
            (V,) * (length + 1)
        )
    return joint


def emitted(decoding, params):
    """Counts of what the loop emits, one seed a row."""
    counts = np.zeros((V,) * TOKENS)
    lengths = []
    generator, weights = decoding
    history = np.zeros((BATCH, CAPACITY), np.int32)
    history[:, : len(PROMPT)] = PROMPT
    prompt_lengths = np.full(BATCH, len(PROMPT), np.int32)
    one = row_sampling([Request(PROMPT, params)])
    for batch in range(BATCHES):
        sampling = jax.tree.map(lambda x: np.repeat(x, BATCH, axis=0), one)
        seeds = np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.uint32)
        sampling = replace(
            sampling,
            seed=seeds,
            max_new_tokens=np.full(BATCH, TOKENS, np.int32),
            stop_ids=sampling.stop_ids * 0 - 1,
        )
        state = generator.start(weights, history, prompt_lengths, sampling, CHUNK)
        answers = read(generator.run(weights, state, sampling))
        np.add.at(counts, tuple(np.array([a.token_ids for a in answers]).T), 1)
        lengths += [n for a in answers for n in a.accept_lengths]
    return counts, np.mean(lengths)


def p_value(counts, probabilities):
    """Chi-square over all texts; rare ones are pooled, impossible ones must not come."""
    expected = probabilities.ravel() * counts.sum()
    counts = counts.ravel()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(observed[wanted > 0], wanted[wanted > 0] * observed.sum() / wanted.sum()).pvalue


def favour_drafts(logits, tree, noise, state, sampling):
    """A target that likes what was drafted a little better."""
    nodes = jnp.arange(tree.parents.shape[1])[:, None]
    child_of = (tree.parents[:, None, :] == nodes) & (tree.depths > 0)[:, None]
    drafted = jnp.einsum("bnm,bmv->bnv", child_of * 1.0, jax.nn.one_hot(tree.tokens, logits.shape[-1]))
    return CHOOSE(logits + 0.5 * drafted, tree, noise, state, sampling)


def shift_noise(logits, tree, noise, state, sampling):
    """Below the root, the noise of the position before: each token alone is right, together they are not."""
    return CHOOSE(logits, tree, jnp.concatenate([noise[:, :1], noise[:, :-1]], axis=1), state, sampling)


def accept_first_children(tree, choices, max_depth):
    """Descends to the root's first child, whatever the target says."""
    accepted = follow_target(tree, choices.at[:, 0].set(tree.tokens[:, 1]), max_depth)
    return Accepted(accepted.path, accepted.count, jnp.take_along_axis(choices, accepted.path, axis=1))


CHOOSE = step_module.choose
BUGS = {favour_drafts: "choose", shift_noise: "choose", accept_first_children: "follow_target"}
MIXED = [
    Request(
        np.random.default_rng(i).integers(0, V, 1 + i % 9).tolist(),
        SamplingParams(
            temperature=(0.0, 0.8, 1.0, 1.3)[i % 4],
            top_p=(1.0, 0.9)[i % 3 == 1],
            top_k=(0, 6)[i % 5 == 1],
            repetition_penalty=(1.0, 1.2)[i % 7 == 1],
            max_new_tokens=5 + i % 20,
            min_new_tokens=i % 4,
            seed=i,
        ),
    )
    for i in range(60)
]


@lru_cache
def loop(bug=None):
    """The loop with a coupled tree and a planted bug, and what it answers to `MIXED`."""
    with pytest.MonkeyPatch.context() as patch:
        if bug is not None:
            patch.setattr(step_module, BUGS[bug], bug)
        decoding = PAIR.decoding(TREE)  # traced, bug and all, by its first use
        return decoding, decode(*decoding, MIXED, CAPACITY, CHUNK, eos=[2], rows=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["coupled-tree", "deterministic-chain"])
def test_emitted_texts_follow_the_targets_distribution(kind):
    decoding = loop()[0] if kind == "coupled-tree" else PAIR.decoding(StaticTree.chain(2), coupled=False)
    for params in SETTINGS:
        counts, mean_acceptance = emitted(decoding, params)
        assert p_value(counts, exact(params)) > 0.001, params
        assert mean_acceptance > 1.2  # else nothing has been tested


@pytest.mark.slow
@pytest.mark.parametrize("bug", [favour_drafts, shift_noise])
def test_the_test_sees_a_planted_bias(bug):
    counts, _ = emitted(loop(bug)[0], SamplingParams())
    assert p_value(counts, exact(SamplingParams())) < 1e-6


def test_samples_and_seeds_differ():
    requests = [
        Request(PROMPT, SamplingParams(seed=seed, max_new_tokens=12, ignore_eos=True), sample)
        for seed, sample in [(0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (1, 1)]
    ]
    answers = decode(*loop()[0], requests, CAPACITY, CHUNK, rows=BATCH)
    texts = [tuple(answer.token_ids) for answer in answers]
    assert len(set(texts[:4])) == 4
    assert texts[4:] == [texts[0], texts[3]]


# ---------------------------------------------------------------- the sameness check, on the same models


@pytest.fixture(scope="module")
def plainly():
    return decode(*PAIR.decoding(None), MIXED, CAPACITY, CHUNK, eos=[2])


@pytest.mark.parametrize("bug", [None, *BUGS], ids=lambda bug: bug.__name__ if bug else "no_bug")
def test_the_sameness_check_sees_planted_bugs(bug, plainly):
    (_, params), answers = loop(bug)
    result = compare(PAIR.target, params.target, MIXED, plainly, answers, [2], CAPACITY)
    assert bool(result.differences) == (bug is not None), "\n".join(result.differences)
