"""Answers that end inside an accepted run: wherever the cut falls, it is exact."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from golden_data import GOLDEN, TARGET, read_json

from eagle_jax import LLM, SamplingParams

PROMPT = read_json("eagle3/prompts.json")["prompts"][2]
PLACES = range(1, 15)  # tokens before the cut
FREE = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
TREES = {
    "chain": {"kind": "chain", "num_tokens": 5},
    "dynamic": {"kind": "dynamic", "total_tokens": 16, "depth": 3, "top_k": 4},
}


@pytest.fixture(scope="module", params=TREES)
def llm(request):
    head = {"model": str(GOLDEN / "eagle3" / "head"), "tree": TREES[request.param]}
    return LLM(str(TARGET), speculative_config=head, batch_size=16)


@pytest.fixture(scope="module")
def baseline():
    return LLM(str(TARGET), batch_size=16)


@pytest.fixture(scope="module")
def reference(llm):
    """The uncut answer; its steps are such that many cuts fall inside of one."""
    output = answer(llm, [FREE])[0]
    assert output.finish_reason == "length"
    ends = {1, *(1 + total for total in accumulate(output.accept_lengths))}
    inside = set(PLACES) - ends
    assert len(inside) >= 6, output.accept_lengths
    assert max(output.accept_lengths) >= 5
    return output


def answer(llm, params):
    """One row for each of `params`, all in one batch."""
    assert len(params) <= llm.batch_size
    return [r.outputs[0] for r in llm.generate([PROMPT] * len(params), params)]


def check(output, token_ids, reason, reference):
    assert output.token_ids == token_ids
    assert output.finish_reason == reason
    assert 1 + sum(output.accept_lengths) == len(token_ids)
    assert all(n > 0 for n in output.accept_lengths)
    full = reference.accept_lengths[: len(output.accept_lengths)]
    assert output.accept_lengths[:-1] == full[:-1]  # only the last step is cut
    assert output.accepted == reference.accepted[: len(token_ids)]


def same_as_baseline(llm, baseline, params):
    outputs = answer(llm, params)
    for output, plain in zip(outputs, answer(baseline, params), strict=True):
        assert output.token_ids == plain.token_ids
        assert output.finish_reason == plain.finish_reason
        assert output.stop_reason == plain.stop_reason
        assert plain.accept_lengths == [1] * (len(plain.token_ids) - 1)
        assert not any(plain.accepted)
    return outputs


def first_places(tokens):
    """Places whose token has not come before: there a stop token can end the answer."""
    return [p for p in PLACES if tokens[p - 1] not in tokens[: p - 1]]


def test_maximum_length(llm, baseline, reference):
    params = [replace(FREE, max_new_tokens=p) for p in PLACES]
    for p, output in zip(PLACES, same_as_baseline(llm, baseline, params), strict=True):
        check(output, reference.token_ids[:p], "length", reference)
        assert output.stop_reason is None


def test_stop_tokens(llm, baseline, reference):
    tokens = reference.token_ids
    places = first_places(tokens)
    assert len(places) >= 4
    params = [replace(FREE, stop_token_ids=(tokens[p - 1],)) for p in places]
    for p, output in zip(places, same_as_baseline(llm, baseline, params), strict=True):
        check(output, tokens[:p], "stop", reference)
        assert output.stop_reason == tokens[p - 1]


def test_several_stop_tokens(llm, baseline, reference):
    """The first that comes ends the answer, in whatever order they are given."""
    tokens = reference.token_ids
    places = first_places(tokens)
    pairs = list(pairwise(places))
    params = [replace(FREE, stop_token_ids=(tokens[late - 1], tokens[early - 1])) for early, late in pairs]
    for (early, _), output in zip(pairs, same_as_baseline(llm, baseline, params), strict=True):
        check(output, tokens[:early], "stop", reference)
        assert output.stop_reason == tokens[early - 1]


def test_a_stop_token_that_is_the_last_one_allowed(llm, baseline, reference):
    tokens = reference.token_ids
    places = first_places(tokens)
    params = [replace(FREE, stop_token_ids=(tokens[p - 1],), max_new_tokens=p) for p in places]
    for p, output in zip(places, same_as_baseline(llm, baseline, params), strict=True):
        check(output, tokens[:p], "stop", reference)


def test_minimum_length_up_to_the_stop_token(llm, baseline, reference):
    """A minimum that the stop token just keeps changes nothing."""
    tokens = reference.token_ids
    places = first_places(tokens)
    params = [replace(FREE, stop_token_ids=(tokens[p - 1],), min_new_tokens=p - 1) for p in places]
    for p, output in zip(places, same_as_baseline(llm, baseline, params), strict=True):
        check(output, tokens[:p], "stop", reference)


@pytest.mark.parametrize("more", [0, 2])
def test_minimum_length_beyond_the_stop_token(llm, baseline, reference, more):
    """The stop token is out of the question at its place: the text goes on without it."""
    tokens = reference.token_ids
    places = first_places(tokens)
    params = [replace(FREE, stop_token_ids=(tokens[p - 1],), min_new_tokens=p + more) for p in places]
    for p, output in zip(places, same_as_baseline(llm, baseline, params), strict=True):
        assert output.token_ids[: p - 1] == tokens[: p - 1]
        assert tokens[p - 1] not in output.token_ids[: p + more]
        assert 1 + sum(output.accept_lengths) == len(output.token_ids) > p
