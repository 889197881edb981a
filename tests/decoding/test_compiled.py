"""What is compiled, and when: nothing twice, no cache is copied, and nothing leaves the device in the loop."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from random_models import random_pair
from sameness import Request, row_sampling

from eagle_jax import LLM, SamplingParams
from eagle_jax.draft_tree import StaticTree

COMPILED: list[str] = []
PROMPTS = [[5, 9, 14, 3], [7, 21, 2, 40, 11, 8]]
OTHERS = [[30, 31, 32, 33, 34, 35, 36, 37, 38], [12], [6, 6, 6], [17, 4]]
GREEDY = SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_new_tokens=20, min_new_tokens=2)
CAPACITY, CHUNK = 80, 16
PAIR = random_pair(50, 30)


@jax.monitoring.register_event_duration_secs_listener
def _listen(event, duration, **kwargs):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(str(kwargs.get("fun_name", event)))


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The programs that were compiled inside, once it is left."""
    before, inside = len(COMPILED), []
    yield inside
    inside.extend(COMPILED[before:])


# ---------------------------------------------------------------- compile counts


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    target, head = PAIR.save(tmp_path_factory.mktemp("pair"))
    return LLM(
        str(target),
        speculative_config={"model": str(head), "num_speculative_tokens": 3},
        batch_size=2,
    )


def test_compilations_are_seen():
    with compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.float32(2)).block_until_ready()
    assert len(compiled) == 1


@pytest.mark.parametrize("speculative", [True, False], ids=["speculative", "baseline"])
def test_nothing_compiles_after_the_warm_up(llm, speculative):
    llm = llm if speculative else llm.baseline()
    with compilations() as compiled:
        llm.warm_up(PROMPTS, GREEDY)
    assert compiled
    with compilations() as compiled:
        llm.warm_up(OTHERS[:2], SAMPLED)
        llm.generate(PROMPTS, GREEDY)
        llm.generate(PROMPTS, SAMPLED)
        llm.generate(OTHERS, [GREEDY, SAMPLED, replace(SAMPLED, n=2), GREEDY])
        llm.generate(OTHERS[0], replace(GREEDY, stop_token_ids=(3, 4), repetition_penalty=1.2))
    assert compiled == []


def test_a_warm_up_covers_each_of_its_batches(llm):
    """The second batch is longer than the first, so it runs in programs of its own."""
    long = [3 + i % 40 for i in range(140)]
    prompts = [*PROMPTS, long]
    llm.warm_up(prompts, GREEDY)
    with compilations() as compiled:
        llm.generate(prompts, GREEDY)
    assert compiled == []


def test_a_second_stream_compiles_nothing(llm):
    list(llm.stream(PROMPTS[0], GREEDY))
    with compilations() as compiled:
        list(llm.stream(OTHERS[0], SAMPLED))
    assert compiled == []


# ---------------------------------------------------------------- the program


def arguments(generator, params, batch, on_device=False):
    """What `Generator._run` is called with; the state only as shapes unless `on_device`."""
    requests = [Request(PROMPTS[i % 2], SAMPLED) for i in range(batch)]
    history, lengths = np.zeros((batch, CAPACITY), np.int32), np.zeros((batch,), np.int32)
    for i, request in enumerate(requests):
        history[i, : len(request.prompt)] = request.prompt
        lengths[i] = len(request.prompt)
    sampling = row_sampling(requests)
    if on_device:
        state = generator.start(params, history, lengths, sampling, CHUNK)
    else:
        state = jax.eval_shape(generator._init, history, lengths)
    rest = dict(sampling=sampling, max_steps=np.int32(100), cancelled=np.zeros(batch, bool))
    return state, jax.tree.map(jnp.asarray, rest) if on_device else rest


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tree", [None, StaticTree.chain(3)], ids=["no_draft", "chain"])
def test_no_cache_is_copied(tree, batch):
    generator, params = PAIR.decoding(tree)
    state, rest = arguments(generator, params, batch)
    program = generator._run.lower(params, state=state, **rest).compile()
    caches = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    model = PAIR.target.config
    assert len(caches) >= 2 * model.num_layers + (0 if tree is None else 2)

    hlo = program.as_text()
    shapes = {",".join(map(str, leaf.shape)) for leaf in caches}
    assert any(f"f32[{shape}]" in hlo for shape in shapes)  # they are written as is expected below
    copied = [
        line.strip()
        for line in hlo.splitlines()
        if (found := re.search(r"= \(?f32\[([\d,]+)\]\S* copy(-start)?\(", line)) and found[1] in shapes
    ]
    assert copied == []

    sizes = [np.dtype(leaf.dtype).itemsize * leaf.size for leaf in caches]
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes)


@pytest.mark.parametrize("tree", [None, StaticTree.chain(3)], ids=["no_draft", "chain"])
def test_the_loop_transfers_nothing(tree):
    generator, params = PAIR.decoding(tree)
    state, rest = arguments(generator, params, 2, on_device=True)
    generator._run(params, state=state, **rest)
    state, rest = arguments(generator, params, 2, on_device=True)
    with jax.transfer_guard("disallow"):
        state = jax.block_until_ready(generator._run(params, state=state, **rest))
    assert np.asarray(state.generated).tolist() == [20, 20]

    state, rest = arguments(generator, params, 2, on_device=True)
    rest["max_steps"] = np.int32(1)  # a guard that lets this pass would see nothing
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):
        generator._run(params, state=state, **rest)
