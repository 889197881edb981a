"""The front door: what requests come back with, alone, in batches and as streams."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from golden_data import GOLDEN, TARGET, read_json
from sameness import next_logits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_jax import LLM, SamplingParams
from eagle_jax.decoding.generate import Generator
from eagle_jax.errors import EagleError, RequestError
from eagle_jax.models import cpu
from eagle_jax.parallel import memory

VOCAB = 199
PROMPTS = read_json("eagle3/prompts.json")["prompts"]  # of 1, 7, 23 and 60 tokens
GREEDY = SamplingParams(temperature=0, max_new_tokens=16, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, max_new_tokens=16, ignore_eos=True)
HEAD = {"model": str(GOLDEN / "eagle3" / "head"), "num_speculative_tokens": 3}
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}w7{% endif %}"


def tokenizer():
    """A word for each token: token i is `wi`."""
    words = {f"w{i}": i for i in range(VOCAB)}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=own, unk_token="w0")
    wrapped.chat_template = TEMPLATE
    return wrapped


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Three rows a batch, a chain of three drafts, and a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "target"
    shutil.copytree(TARGET, folder)
    tokenizer().save_pretrained(folder)
    return LLM(str(folder), speculative_config=HEAD, batch_size=3, max_model_len=256)


@pytest.fixture(scope="module")
def baseline(llm):
    return llm.baseline()


@pytest.fixture(scope="module")
def bare():
    """Without a tokenizer or a head."""
    return LLM(str(TARGET), max_model_len=256)


def words(token_ids):
    return " ".join(f"w{i}" for i in token_ids)


def tokens(requests):
    return [[output.token_ids for output in request.outputs] for request in requests]


# ---------------------------------------------------------------- batches


def test_answers_are_the_baselines(llm, baseline):
    params = [GREEDY, SAMPLED, replace(SAMPLED, top_k=5, repetition_penalty=1.3), GREEDY]
    drafted, plain = llm.generate(PROMPTS, params), baseline.generate(PROMPTS, params)
    assert tokens(drafted) == tokens(plain)
    assert [r.prompt_token_ids for r in drafted] == PROMPTS
    assert all(r.prompt is None for r in drafted)
    for request in drafted:
        (output,) = request.outputs
        assert output.index == 0
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert output.logprobs is None
        assert output.text == words(output.token_ids)
        assert output.prefill_seconds > 0
        assert output.decode_seconds > 0
    means = [r.outputs[0].mean_acceptance_length for r in drafted]
    assert max(means) > 1.5
    assert [r.outputs[0].mean_acceptance_length for r in plain] == [1] * 4


def test_unequal_prompts_of_a_batch_answer_as_if_alone(llm):
    params = [GREEDY, SAMPLED, replace(GREEDY, max_new_tokens=5), SAMPLED]
    together = tokens(llm.generate(PROMPTS, params))
    alone = [tokens(llm.generate(p, own))[0] for p, own in zip(PROMPTS, params, strict=True)]
    assert together == alone
    order = [3, 1, 0, 2]
    shuffled = tokens(llm.generate([PROMPTS[i] for i in order], [params[i] for i in order]))
    assert shuffled == [together[i] for i in order]


def test_more_requests_than_rows(llm):
    prompts = [[3 + i, 50 + i] for i in range(7)]
    results = llm.generate(prompts, GREEDY)
    assert [r.prompt_token_ids for r in results] == prompts
    assert tokens(results)[4] == tokens(llm.generate(prompts[4], GREEDY))[0]
    assert llm.generate([], GREEDY) == []


def test_samples(llm):
    def samples(n, **changes):
        return tokens(llm.generate(PROMPTS[1], replace(SAMPLED, n=n, **changes)))[0]

    four = samples(4)
    assert len({tuple(s) for s in four}) == 4
    assert samples(4) == four
    assert samples(2) == four[:2]
    assert samples(1) == four[:1]
    assert samples(2, seed=6) != four[:2]
    several = llm.generate([PROMPTS[2], PROMPTS[1]], [GREEDY, replace(SAMPLED, n=4)])
    assert tokens(several)[1] == four
    assert [output.index for output in several[1].outputs] == [0, 1, 2, 3]


def test_samples_are_the_baselines(llm, baseline):
    params = replace(SAMPLED, n=3)
    assert tokens(llm.generate(PROMPTS[2], params)) == tokens(baseline.generate(PROMPTS[2], params))


def test_a_longer_request_after_a_short_one(llm, baseline):
    short = tokens(llm.generate(PROMPTS[1], GREEDY))
    long = replace(GREEDY, max_new_tokens=120)
    drafted = tokens(llm.generate(PROMPTS[3], long))
    assert len(drafted[0][0]) == 120
    assert drafted == tokens(baseline.generate(PROMPTS[3], long))
    assert tokens(llm.generate(PROMPTS[1], GREEDY)) == short


def test_the_model_length_ends_an_answer(llm, baseline):
    prompt = [3 + i % 190 for i in range(250)]
    params = [replace(GREEDY, max_new_tokens=100), replace(GREEDY, max_new_tokens=4)]
    prompts = [prompt, PROMPTS[1]]
    drafted, plain = llm.generate(prompts, params), baseline.generate(prompts, params)
    assert [len(r.outputs[0].token_ids) for r in drafted] == [6, 4]
    assert [r.outputs[0].finish_reason for r in drafted] == ["length", "length"]
    assert tokens(drafted) == tokens(plain)


def test_prefill_chunks(llm):
    """A prompt of several chunks answers as in one, the last chunk being full or not."""
    narrow = object.__new__(LLM)
    narrow.__dict__.update(llm.__dict__)
    narrow.prefill_chunk = 64
    prompts = [[3 + i * i % 190 for i in range(100)], [3 + i * 7 % 190 for i in range(128)], PROMPTS[1]]
    assert tokens(narrow.generate(prompts, GREEDY)) == tokens(llm.generate(prompts, GREEDY))


def test_the_models_own_end(llm):
    """An end-of-sequence token ends the answer, is no reason to name, and has no place in the text."""
    free = llm.generate(PROMPTS[1], GREEDY)[0].outputs[0]
    config = llm.loaded.target.config
    own = next(t for i, t in enumerate(free.token_ids) if i >= 3 and t not in free.token_ids[:i])
    at = free.token_ids.index(own) + 1
    stopped = llm.generate(PROMPTS[1], replace(GREEDY, stop_token_ids=(own,)))[0].outputs[0]
    assert stopped.token_ids == free.token_ids[:at]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", own)
    assert stopped.text == words(free.token_ids[: at - 1])
    assert config.eos_token_ids
    ended = llm._stop_ids(SamplingParams())
    assert ended == list(config.eos_token_ids)


def test_accepted_flags(llm):
    for request in llm.generate(PROMPTS, [GREEDY, SAMPLED, GREEDY, replace(GREEDY, max_new_tokens=40)]):
        output = request.outputs[0]
        assert len(output.accepted) == len(output.token_ids) == 1 + sum(output.accept_lengths)
        assert not output.accepted[0]
        start = 1
        for i, length in enumerate(output.accept_lengths):
            run = output.accepted[start : start + length]
            assert run[:-1] == [True] * (length - 1)
            if i < len(output.accept_lengths) - 1:
                assert not run[-1]  # the target's own next token ends every step that is not cut
            start += length


# ---------------------------------------------------------------- log-probabilities


def test_logprobs(llm, baseline):
    params = [
        replace(GREEDY, logprobs=2, max_new_tokens=8),
        replace(SAMPLED, logprobs=1, max_new_tokens=8),
        replace(GREEDY, max_new_tokens=8),
    ]
    prompts = [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    drafted = [r.outputs[0] for r in llm.generate(prompts, params)]
    plain = [r.outputs[0] for r in baseline.generate(prompts, params)]
    assert drafted[2].logprobs is None
    for prompt, own, a, b in zip(prompts[:2], params, drafted, plain, strict=False):
        assert a.token_ids == b.token_ids
        assert len(a.logprobs) == len(b.logprobs) == 8
        for i, (token, table, other) in enumerate(zip(a.token_ids, a.logprobs, b.logprobs, strict=True)):
            assert token in table
            assert own.logprobs <= len(table) <= own.logprobs + 1
            assert table == pytest.approx(other, abs=1e-4)
            logits = next_logits(llm.loaded.target, llm.loaded.params, [*prompt, *a.token_ids[:i]], 48)
            expected = logits - logits.max()
            expected = expected - np.log(np.exp(expected).sum())
            assert table == pytest.approx({t: expected[t] for t in table}, abs=1e-4)
            best = set(np.argsort(-expected)[: own.logprobs].tolist())
            assert best <= set(table)
            if own.temperature == 0:
                assert table[token] == max(table.values())
                assert len(table) == own.logprobs


def test_logprobs_of_the_chosen_tokens_alone(llm):
    output = llm.generate(PROMPTS[1], replace(GREEDY, logprobs=0))[0].outputs[0]
    assert [list(table) for table in output.logprobs] == [[t] for t in output.token_ids]
    assert all(value <= 0 for table in output.logprobs for value in table.values())


# ---------------------------------------------------------------- text


def test_text_prompts(llm):
    by_text = llm.generate(words(PROMPTS[1]), GREEDY)[0]
    assert by_text.prompt == words(PROMPTS[1])
    assert by_text.prompt_token_ids == PROMPTS[1]
    by_ids = tokens(llm.generate({"prompt_token_ids": PROMPTS[1]}, GREEDY))[0]
    assert by_text.outputs[0].token_ids == by_ids[0]
    mixed = llm.generate([words(PROMPTS[1]), PROMPTS[2], np.array(PROMPTS[1])], GREEDY)
    assert tokens(mixed)[0] == tokens(mixed)[2] == by_ids


def test_chat(llm):
    messages = [{"role": "system", "content": "w5 w6"}, {"role": "user", "content": "w9"}]
    assert llm.apply_chat_template(messages) == [5, 6, 9, 7]
    one = llm.chat(messages, GREEDY)
    assert tokens(one) == tokens(llm.generate([[5, 6, 9, 7]], GREEDY))
    two = llm.chat([messages, messages[1:]], GREEDY)
    assert [r.prompt_token_ids for r in two] == [[5, 6, 9, 7], [9, 7]]
    assert tokens(two)[0] == tokens(one)[0]


def stop_places(output):
    """Places from which the answer's next two words have not come before."""
    text = output.text + " "
    for i in range(len(output.token_ids) - 1):
        stop = words(output.token_ids[i : i + 2])
        if text.find(stop + " ") == len(words(output.token_ids[:i])) + (i > 0):
            yield i, stop


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_stop_texts(llm, baseline, params):
    """A text over two tokens ends the answer wherever it comes, also inside an accepted run."""
    params = replace(params, max_new_tokens=24)
    free = llm.generate(PROMPTS[2], params)[0].outputs[0]
    places = list(stop_places(free))[:9]
    assert len(places) > 3
    each = [replace(params, stop=(stop + " ", "no such text")) for _, stop in places]
    drafted = [r.outputs[0] for r in llm.generate([PROMPTS[2]] * len(each), each)]
    plain = [r.outputs[0] for r in baseline.generate([PROMPTS[2]] * len(each), each)]
    for (at, stop), output, other in zip(places, drafted, plain, strict=True):
        assert (
            output.token_ids == other.token_ids == free.token_ids[: at + 3]
        )  # the space comes with the next
        assert output.text == other.text == words(free.token_ids[:at]) + (" " if at else "")
        assert (output.finish_reason, output.stop_reason) == ("stop", stop + " ")
        assert 1 + sum(output.accept_lengths) == len(output.accepted) == len(output.token_ids)


def test_stop_text_beside_rows_without(llm):
    """A row that its text ends leaves the others of its batch alone."""
    free = [r.outputs[0] for r in llm.generate(PROMPTS[:3], GREEDY)]
    at, stop = next(p for p in stop_places(free[1]) if p[0] > 1)
    params = [GREEDY, replace(GREEDY, stop=stop, logprobs=None), SAMPLED]
    mixed = [r.outputs[0] for r in llm.generate(PROMPTS[:3], params)]
    assert mixed[0].token_ids == free[0].token_ids
    assert mixed[1].text == words(free[1].token_ids[:at]) + " "
    assert mixed[2].token_ids == llm.generate(PROMPTS[2], SAMPLED)[0].outputs[0].token_ids


def test_stop_text_within_the_minimum(llm):
    free = llm.generate(PROMPTS[2], GREEDY)[0].outputs[0]
    at, stop = next(p for p in stop_places(free) if p[0] > 1)
    kept = llm.generate(PROMPTS[2], replace(GREEDY, stop=stop, min_tokens=at + 2))[0].outputs[0]
    assert kept.token_ids[: at + 2] == free.token_ids[: at + 2]
    assert len(kept.token_ids) > at + 2
    cut = llm.generate(PROMPTS[2], replace(GREEDY, stop=stop, min_tokens=at + 1))[0].outputs[0]
    assert cut.token_ids == free.token_ids[: at + 2]


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("name", ["greedy", "sampled", "stop token", "stop text", "one token", "logprobs"])
def test_streams(llm, name):
    params = SAMPLED if name == "sampled" else GREEDY
    free = llm.generate(PROMPTS[2], params)[0].outputs[0]
    first_new = next(t for i, t in enumerate(free.token_ids) if i > 4 and t not in free.token_ids[:i])
    changes = {
        "stop token": dict(stop_token_ids=(first_new,)),
        "stop text": dict(stop=next(s for i, s in stop_places(free) if i > 3)),
        "one token": dict(max_new_tokens=1),
        "logprobs": dict(logprobs=1),
    }
    params = replace(params, **changes.get(name, {}))
    whole = llm.generate(PROMPTS[2], params)[0].outputs[0]
    chunks = list(llm.stream(PROMPTS[2], params))
    output = chunks[-1].output
    assert [c.finished for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert all(c.output is None for c in chunks[:-1])
    assert len(chunks) > 1 or name == "one token"
    assert "".join(c.text for c in chunks) == output.text == whole.text
    assert [t for c in chunks for t in c.token_ids] == output.token_ids == whole.token_ids
    assert [a for c in chunks for a in c.accepted] == output.accepted == whole.accepted
    for field in ("finish_reason", "stop_reason", "accept_lengths"):
        assert getattr(output, field) == getattr(whole, field)
    assert (output.logprobs is None) == (whole.logprobs is None) == (name != "logprobs")


def test_an_abandoned_stream(llm):
    """What comes after it is as it would have been."""
    before = tokens(llm.generate(PROMPTS[1], GREEDY))
    stream = llm.stream(PROMPTS[2], GREEDY)
    next(stream)
    assert tokens(llm.generate(PROMPTS[1], GREEDY)) == before
    rest = list(stream)
    assert rest[-1].output.token_ids == llm.generate(PROMPTS[2], GREEDY)[0].outputs[0].token_ids


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ([3, VOCAB], "199 is outside the vocabulary"),
        ([3, -1], "-1 is outside"),
        ([[3, True]], "True"),
        ([True], "True"),
        ([[3, 4.0]], "4.0"),
        ([[3, "w3"]], "w3"),
        ([5] * 256, "256 tokens"),
        ({"prompt": "w3"}, "prompt_token_ids"),
        ([7, [3]], "outside the vocabulary"),
        ([None], "a prompt is"),
    ],
    ids=str,
)
def test_bad_prompts(bare, prompt, message):
    if prompt == []:
        assert bare.generate(prompt) == []  # no prompts at all
        prompt = [[]]
    for call in (bare.generate, bare.warm_up):
        with pytest.raises(RequestError, match=message):
            call(prompt, GREEDY)


def test_nothing_runs_when_one_prompt_is_bad(llm, monkeypatch):
    monkeypatch.setattr(LLM, "_start", lambda *args: pytest.fail("a batch was started"))
    with pytest.raises(RequestError, match="outside"):
        llm.generate([*PROMPTS, [VOCAB]], GREEDY)


def test_requests_that_need_a_tokenizer(bare):
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate("some text")
    with pytest.raises(RequestError, match="stop_token_ids"):
        bare.generate([[3]], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="chat template"):
        bare.chat([{"role": "user", "content": "w3"}])


def test_requests_that_do_not_go_together(bare):
    with pytest.raises(RequestError, match="2 prompts and 1"):
        bare.generate([[3], [4]], [GREEDY])
    with pytest.raises(RequestError, match="n is 2"):
        bare.stream([3], replace(SAMPLED, n=2))


@pytest.mark.parametrize("prompts", [None, 3, {"prompt_token_ids": None}, [{"prompt_token_ids": 3}]], ids=str)
def test_prompts_of_no_kind(bare, prompts):
    with pytest.raises(RequestError, match=r"expected a prompt|must be a list of token ids"):
        bare.generate(prompts, GREEDY)


@pytest.mark.parametrize("messages", ["hi", ["hi"], {"role": "user", "content": "hi"}, [["hi"]]], ids=str)
def test_conversations_of_no_kind(llm, messages):
    with pytest.raises(RequestError, match="expected a list of messages"):
        llm.chat(messages)


def test_arguments_of_no_kind(bare):
    with pytest.raises(RequestError, match="model: expected a path"):
        LLM(None)
    with pytest.raises(RequestError, match="speculative_config: expected a mapping"):
        LLM(str(TARGET), speculative_config="eagle3")
    with pytest.raises(RequestError, match="mesh: expected a mapping"):
        LLM(str(TARGET), mesh=[1])
    with pytest.raises(RequestError, match="expected SamplingParams, got None"):
        bare.generate([[3]], [None])


def test_models_may_be_paths():
    llm = LLM(TARGET, speculative_config=HEAD | {"model": GOLDEN / "eagle3" / "head"}, max_model_len=64)
    assert llm.drafter.max_depth == 3


def test_a_tree_wider_than_the_draft_vocabulary():
    for tree in (
        {"kind": "static", "paths": [[97]]},
        {"kind": "dynamic", "total_tokens": 60, "depth": 1, "top_k": 98},
    ):
        with pytest.raises(RequestError, match="98 best tokens of a node, and the head knows 97"):
            LLM(TARGET, speculative_config={"model": HEAD["model"], "tree": tree})


def test_a_batch_that_cannot_fit(bare, monkeypatch):
    weights = sum(p.nbytes for p in bare.loaded.params.values())
    monkeypatch.setattr(memory, "device_bytes", lambda mesh: weights + 10_000)
    with pytest.raises(EagleError, match=r"takes .* GiB of KV cache and .* GiB of activations a device"):
        bare.generate([[3]], GREEDY)


def test_fewer_requests_run_in_a_smaller_batch(monkeypatch):
    llm, widths = LLM(TARGET, batch_size=3, max_model_len=128), []
    start = Generator.start

    def spy(self, params, history, *rest):
        widths.append(len(history))
        return start(self, params, history, *rest)

    monkeypatch.setattr(Generator, "start", spy)
    for count in (1, 2, 3, 4, 2):
        llm.generate([[3, 4]] * count, GREEDY)
    assert widths == [1, 2, 3, 3, 1, 2]
    llm = LLM(TARGET, batch_size=3, max_model_len=128)
    for count in (3, 1):  # rather the batch that is compiled than one that is to be
        llm.generate([[3, 4]] * count, GREEDY)
    assert widths[6:] == [3, 3]


def test_a_length_beyond_the_models():
    with pytest.raises(RequestError, match="2048"):
        LLM(str(TARGET), max_model_len=2049)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "temperature": [-0.1, 1e31, float("nan"), float("inf"), "1", None, True],
        "top_p": [0, 1.1, float("nan"), -1],
        "top_k": [-2, 1.5, True, 2**31],
        "min_p": [-0.1, 1.1, float("nan")],
        "repetition_penalty": [0, -1, float("nan"), float("inf")],
        "max_new_tokens": [0, -1, 2**31, 1.5, None, True],
        "min_new_tokens": [-1, 129, 0.5],
        "max_tokens": [0, 2.5, True],
        "min_tokens": [-1, 129],
        "seed": [-1, 2**32, 0.5, None],
        "n": [0, -1, 1.0, True],
        "logprobs": [-1, 0.5, True],
        "stop": ["", ("a", ""), (3,)],
        "stop_token_ids": [(-1,), (2**31,), (1.5,), ("a",), (True,)],
    }.items(),
    ids=str,
)
def test_bad_sampling_params(name, values):
    for value in values:
        with pytest.raises(RequestError, match="stop" if name.startswith("stop") else name.split("_")[-1]):
            SamplingParams(**{name: value})


def test_sampling_params_under_other_names():
    params = SamplingParams(max_tokens=9, min_tokens=2, top_k=-1, stop="a", stop_token_ids=[3, 4])
    assert (params.max_new_tokens, params.min_new_tokens, params.top_k) == (9, 2, 0)
    assert (params.stop, params.stop_token_ids) == (("a",), (3, 4))
    assert params == SamplingParams(max_new_tokens=9, min_new_tokens=2, stop=("a",), stop_token_ids=(3, 4))
    assert replace(params, max_tokens=5).max_new_tokens == 5
    assert replace(params, seed=1).max_new_tokens == 9


# ---------------------------------------------------------------- types


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types(dtype):
    llm = LLM(str(TARGET), speculative_config=HEAD, batch_size=3, dtype=dtype, max_model_len=256)
    params = [GREEDY, SAMPLED, replace(GREEDY, logprobs=1)]
    results = llm.generate(PROMPTS[:3], params)
    for output in (r.outputs[0] for r in results):
        assert len(output.token_ids) == 16 == 1 + sum(output.accept_lengths)
        assert all(0 <= t < VOCAB for t in output.token_ids)
    assert all(np.isfinite(v) for table in results[2].outputs[0].logprobs for v in table.values())
    assert llm.loaded.params["embed_tokens.weight"].dtype == dtype
    if cpu.supported():  # its kernels give a row the same bits in a tree as in a step of its own
        assert any(length > 1 for r in results for length in r.outputs[0].accept_lengths)
        plain = llm.baseline().generate(PROMPTS[:3], params)
        assert [r.outputs[0].token_ids for r in plain] == [r.outputs[0].token_ids for r in results]
