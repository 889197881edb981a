"""The acceptance rule at temperature 0.8 against the reference's, by exact probabilities in float64.

The reference consumes uniform numbers one candidate after the other; here the target chooses once at every
node and its choice is followed. The two are compared as distributions: the probability of accepting exactly
the recorded path, and that of the token after it.
"""

import jax
import numpy as np
import pytest
from golden_data import BY_NAME, STATIC, read_json, read_npz

from eagle_jax.decoding.verification import follow_target
from eagle_jax.draft_tree import DraftTree
from eagle_jax.sampling import RowSampling, process

EXACT = dict(rtol=1e-12, atol=1e-15)
FLOAT32 = dict(rtol=2e-4, atol=1e-6)


# Compiled once, not once a call.
jitted_process = jax.jit(process)
jitted_follow_target = jax.jit(follow_target, static_argnames="max_depth")


def softmax(logits):
    logits = logits.astype(np.float64)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def draft_tree(tokens, mask, depths):
    """A golden tree as ours; a parent is the last ancestor."""
    parents = [max(np.flatnonzero(row[:i]), default=0) for i, row in enumerate(mask)]
    tree = DraftTree(
        *(np.asarray(x, np.int32)[None] for x in (tokens, parents, depths)),
        mask=np.asarray(mask == 1)[None],
        valid=np.ones((1, len(tokens)), bool),
        candidate=np.ones((1, len(tokens)), bool),
    )
    return jax.tree.map(jax.numpy.asarray, tree)


def processed(logits, tree, temperature):
    """Our distributions at every node."""

    def row(value, dtype):
        return np.full((1,), value, dtype)

    sampling = RowSampling(
        temperature=row(temperature, np.float32),
        top_p=row(1, np.float32),
        top_k=row(0, np.int32),
        min_p=row(0, np.float32),
        repetition_penalty=row(1, np.float32),
        seed=row(0, np.uint32),
        sample=row(0, np.int32),
        min_new_tokens=row(0, np.int32),
        max_new_tokens=row(128, np.int32),
        stop_ids=np.full((1, 1), -1, np.int32),
    )
    presence = np.zeros((1, logits.shape[-1]), bool)
    return softmax(np.asarray(jitted_process(logits[None], tree, presence, row(1, np.int32), sampling))[0])


def children(tree, node):
    parents, tokens = np.asarray(tree.parents)[0], np.asarray(tree.tokens)[0]
    return {int(tokens[n]): n for n in range(1, len(tokens)) if parents[n] == node}


def follow(tree, p, path):
    """Our rule, exactly: the probability of accepting just `path`, the nodes on it, and what comes then."""
    nodes, probability = [0], 1.0
    for token in path[1:]:
        probability *= p[nodes[-1], token]
        nodes.append(children(tree, nodes[-1])[token])
    rest = p[nodes[-1]].copy()
    rest[list(children(tree, nodes[-1]))] = 0
    return probability * rest.sum(), nodes, rest / rest.sum()


def check_follow_target(tree, p, path, nodes, rest):
    """`follow_target` accepts just that path when the choices are its tokens and then no child."""
    choices = p.argmax(-1).astype(np.int32)
    choices[nodes[:-1]] = path[1:]
    depth = int(np.asarray(tree.depths).max())
    for last in (int(rest.argmax()), *children(tree, nodes[-1])):
        choices[nodes[-1]] = last
        accepted = jitted_follow_target(tree, choices[None], max_depth=depth)
        count = int(accepted.count[0])
        is_child = last in children(tree, nodes[-1])
        assert (count > len(nodes)) if is_child else (count == len(nodes))
        assert np.asarray(accepted.path)[0, : len(nodes)].tolist() == nodes
        assert np.asarray(accepted.tokens)[0, : len(nodes)].tolist() == [*path[1:], last]


EAGLE3 = read_json("eagle3/sampling_accept.json")


@pytest.mark.parametrize("number", range(len(EAGLE3["cases"])))
def test_eagle3(number):
    """q = 1: accept x if u <= p(x), else p(x) = 0 and renormalise."""
    recorded, sample_p = EAGLE3["cases"][number], read_npz("eagle3/sampling_accept.npz")[f"sample_p_{number}"]
    golden = BY_NAME["eagle3/A"].first_tree(recorded["prompt"])
    tokens = golden["draft_tokens"][0]
    tree = draft_tree(tokens, golden["tree_mask"][0, 0], golden["tree_position_ids"])
    p = softmax(golden["verify_logits"] / EAGLE3["temperature"])
    rows = sorted(
        golden["retrieve_indices"].tolist(), key=lambda row: [n if n >= 0 else len(tokens) for n in row]
    )

    # The recorded algorithm: what it did with its numbers, and how probable that was.
    uniforms, path, end, probability = iter(recorded["uniforms"]), [0], None, 1.0
    while end is None:
        rest, tried = p[path[-1]].copy(), set()
        below = [row[len(path)] for row in rows if row[: len(path)] == path and len(row) > len(path)]
        for node in below:
            if node < 0 or node in tried:
                continue
            tried.add(node)
            if next(uniforms) <= rest[tokens[node]]:
                probability *= rest[tokens[node]]
                path.append(node)
                break
            probability *= 1 - rest[tokens[node]]
            rest[tokens[node]] = 0
            rest /= rest.sum()
        else:
            end = rest
    assert next(uniforms, None) is None
    assert tokens[path].tolist() == recorded["path"]
    assert len(path) == recorded["accept_length"] + 1
    assert rows[recorded["best_candidate"]][: len(path)] == path
    np.testing.assert_allclose(end, sample_p, **FLOAT32)

    ours, nodes, rest = follow(tree, p, recorded["path"])
    assert nodes == path
    np.testing.assert_allclose(ours, probability, **EXACT)
    np.testing.assert_allclose(rest, end, **EXACT)
    np.testing.assert_allclose(rest, sample_p, **FLOAT32)
    np.testing.assert_allclose(processed(golden["verify_logits"], tree, EAGLE3["temperature"]), p, **FLOAT32)
    check_follow_target(tree, p, recorded["path"], nodes, rest)


EAGLE1 = read_json("eagle1/sampling_accept.json")


@pytest.mark.parametrize("number", range(len(EAGLE1["cases"])))
def test_eagle1(number):
    """The reference draws children from q without replacement and accepts x with probability p(x) / q(x).

    Its acceptance of a given tree depends on q, ours on the target alone, so path probabilities have nothing
    in common here. Compared are: that the recorded numbers give the recorded path and distribution by the
    rule as the golden README states it; that on the same tree our rule accepts the path with the product of
    the target's probabilities, all children together with p(children); and that what we emit at a node (a
    child, or a token from the rest) is p exactly, which is what the reference's rule is for.
    """
    recorded, archive = EAGLE1["cases"][number], read_npz("eagle1/sampling_accept.npz")
    buffers, static = read_npz("eagle1/tree_buffers.npz"), read_json("eagle1/tree_buffers.json")
    temperature = EAGLE1["temperature"]
    logits, tokens = archive[f"verify_logits_{number}"], archive[f"tree_candidates_{number}"][0]
    q, draft = (
        archive[f"cart_prob_{number}"].astype(np.float64),
        archive[f"draft_probs_{number}"].astype(float),
    )
    first_row = np.cumsum([0, *EAGLE1["draft_prob_rows"]])
    rows = buffers["retrieve_indices"].tolist()
    p = softmax(logits / temperature)

    uniforms, path, end = iter(recorded["uniforms"]), [0], None
    while end is None:
        depth, rest, tried = len(path), p[path[-1]].copy(), set()
        for r, row in enumerate(rows):
            if row[:depth] != path or depth >= len(row) or row[depth] < 0 or row[depth] in tried:
                continue
            node = row[depth]
            tried.add(node)
            u = next(uniforms)
            if u <= rest[tokens[node]] / q[r, depth]:
                path.append(node)
                break
            other = draft[first_row[depth - 1] + static["p_indices"][r][depth]].copy()
            other[tokens[static["b_indices"][r][depth]]] = 0
            rest = np.maximum(rest - other / other.sum(), 0)
            rest /= rest.sum()
        else:
            # Branch v1 leaves the temperature out where nothing was rejected.
            end = rest if tried else softmax(logits[path[-1]])
    assert tokens[path].tolist() == recorded["path"]
    assert len(path) == recorded["accept_length"] + 1
    assert rows[recorded["best_candidate"]][: len(path)] == path
    np.testing.assert_allclose(end, archive[f"sample_p_{number}"], rtol=1e-3, atol=1e-5)

    tree = draft_tree(tokens, buffers["tree_attn_mask"][0, 0], buffers["tree_position_ids"])
    assert np.asarray(tree.parents)[0].tolist() == list(STATIC[0].tree.parents)
    probability, nodes, rest = follow(tree, p, recorded["path"])
    assert nodes == path
    below = list(children(tree, nodes[-1]))
    on_path = np.prod([p[n, t] for n, t in zip(nodes, recorded["path"][1:], strict=False)])
    np.testing.assert_allclose(probability, on_path * (1 - p[nodes[-1], below].sum()), rtol=1e-9, atol=1e-15)
    emitted = rest * (1 - p[nodes[-1], below].sum())
    emitted[below] += p[nodes[-1], below]
    np.testing.assert_allclose(emitted, p[nodes[-1]], rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(processed(logits, tree, temperature), p, **FLOAT32)
    check_follow_target(tree, p, recorded["path"], nodes, rest)
