"""The text of a growing answer, against the tokenizer's own decoding of all of it."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle_jax.detokenizer import REPLACEMENT, Detokenizer, decode

LINES = [
    "Once upon a time there was a small fox. The fox ran over the hill and over the river.",
    "One day the small fox saw a bird, and the bird sang: tra la la!",
    "Über die Brücke fährt der Zug; naïve café 🙂.",
]
TEXTS = [
    "Once upon a time there was a bird.",
    "  two spaces, a tab\tand\n\nlines ",
    "日本語と🙂🦊 emoji, naïve façade",
    "👩‍👩‍👧 é ñ ✓",
]


def trained(model, trainer, pre, decoder):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoder
    tokenizer.train_from_iterator(LINES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


@pytest.fixture(scope="module")
def byte_level():
    """Characters that the training text lacks take a token for each byte."""
    return trained(
        models.BPE(),
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )


@pytest.fixture(scope="module")
def metaspace():
    """Like Llama's: a space belongs to the word behind it, and is dropped at the front of what is decoded."""
    return trained(
        models.BPE(unk_token="<unk>"),
        trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], show_progress=False),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
    )


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def pieces(tokenizer, text):
    """Ids of a text's characters one by one, so that it is known where tokens begin."""
    return [i for character in text for i in ids(tokenizer, character)]


def follow(detokenizer, token_ids, size=1):
    """Pushes `size` tokens at a time; returns what was released after each push, and at the end."""
    chunks = []
    for start in range(0, len(token_ids), size):
        detokenizer.push(token_ids[start : start + size])
        if detokenizer.stopped_by is not None:
            break
        chunks.append(detokenizer.release())
    return [*chunks, detokenizer.release(detokenizer.text)]


# ---------------------------------------------------------------- text


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 3])
def test_text_at_every_prefix(byte_level, text, size):
    tokens = ids(byte_level, text)
    detokenizer = Detokenizer(byte_level)
    for start in range(0, len(tokens), size):
        detokenizer.push(tokens[start : start + size])
        assert detokenizer.token_ids == tokens[: start + size]
        assert detokenizer.text == decode(byte_level, tokens[: start + size])
    assert detokenizer.text == text


def test_text_of_a_tokenizer_that_drops_a_leading_space(metaspace):
    tokens = ids(metaspace, LINES[0])
    detokenizer = Detokenizer(metaspace)
    for count, token in enumerate(tokens, start=1):
        detokenizer.push([token])
        assert detokenizer.text == decode(metaspace, tokens[:count])
    assert detokenizer.text == LINES[0]
    assert "".join(follow(Detokenizer(metaspace), tokens, 2)) == LINES[0]


def test_special_tokens_have_no_text(byte_level):
    eos = byte_level.eos_token_id
    tokens = [eos, *ids(byte_level, "a fox"), eos, eos, *ids(byte_level, " ran"), eos]
    detokenizer = Detokenizer(byte_level)
    assert "".join(follow(detokenizer, tokens)) == "a fox ran"
    assert detokenizer.text == decode(byte_level, tokens)


def test_random_tokens(byte_level):
    """Broken UTF-8 too: the text is still what decoding all of it gives."""
    rng = random.Random(0)
    for _ in range(50):
        tokens = [rng.randrange(len(byte_level)) for _ in range(40)]
        detokenizer = Detokenizer(byte_level)
        for count, token in enumerate(tokens, start=1):
            detokenizer.push([token])
            assert detokenizer.text == decode(byte_level, tokens[:count])
        assert "".join(follow(Detokenizer(byte_level, ["foxes", "Once more"]), tokens)) == detokenizer.text


def test_without_a_tokenizer():
    detokenizer = Detokenizer(None)
    assert detokenizer.push([1, 2, 3]) == 3
    assert detokenizer.text == detokenizer.release() == ""
    assert decode(None, [1, 2, 3]) == ""


# ---------------------------------------------------------------- release


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("stop", [(), ("time flies", "emoji!", "\n\n\n")])
def test_chunks_concatenate(byte_level, text, size, stop):
    detokenizer = Detokenizer(byte_level, stop)
    chunks = follow(detokenizer, ids(byte_level, text), size)
    assert "".join(chunks) == detokenizer.text == text
    assert not any(REPLACEMENT in chunk for chunk in chunks)


def test_unfinished_characters_are_held_back(byte_level):
    tokens = ids(byte_level, "🦊")
    assert len(tokens) > 2
    detokenizer = Detokenizer(byte_level)
    for token in tokens[:-1]:
        detokenizer.push([token])
        assert detokenizer.release() == ""
    detokenizer.push(tokens[-1:])
    assert detokenizer.release() == "🦊"


def test_an_unfinished_end_is_released_with_the_whole(byte_level):
    tokens = [*ids(byte_level, "a"), *ids(byte_level, "🦊")[:2]]
    detokenizer = Detokenizer(byte_level)
    detokenizer.push(tokens)
    assert detokenizer.release() == "a"
    assert detokenizer.release(detokenizer.text) == REPLACEMENT


def test_a_beginning_of_a_stop_text_is_held_back(byte_level):
    detokenizer = Detokenizer(byte_level, ["END", "xENDING"])
    released = []
    for token in pieces(byte_level, "aENxEN."):
        assert detokenizer.push([token]) == 1
        released.append(detokenizer.release())
    assert released == ["a", "", "", "EN", "", "", "xEN."]
    assert detokenizer.stopped_by is None


# ---------------------------------------------------------------- stop texts


@pytest.mark.parametrize("size", [1, 2, 100])
def test_stop_text_over_several_tokens(byte_level, size):
    tokens = pieces(byte_level, "the fox END of it")
    detokenizer = Detokenizer(byte_level, ["END"])
    chunks = follow(detokenizer, tokens, size)
    assert (detokenizer.stopped_by, detokenizer.text) == ("END", "the fox ")
    assert detokenizer.token_ids == pieces(byte_level, "the fox END")
    assert "".join(chunks) == "the fox "


def test_push_counts_up_to_the_stop_text(byte_level):
    detokenizer = Detokenizer(byte_level, ["END"])
    assert detokenizer.push(pieces(byte_level, "aE")) == 2
    assert detokenizer.push(pieces(byte_level, "NDbc")) == 2


def test_stop_text_inside_a_token(byte_level):
    """The token that holds it belongs to the answer; the text ends within it."""
    token = max(range(len(byte_level)), key=lambda i: len(decode(byte_level, [i])))
    text = decode(byte_level, [token])
    assert len(text) >= 4
    detokenizer = Detokenizer(byte_level, [text[1:3]])
    assert detokenizer.push([token, token]) == 1
    assert detokenizer.text == text[: text.find(text[1:3])]


def test_stop_text_at_the_first_token(byte_level):
    detokenizer = Detokenizer(byte_level, ["O"])
    assert detokenizer.push(pieces(byte_level, "On")) == 1
    assert (detokenizer.text, detokenizer.stopped_by) == ("", "O")
    assert detokenizer.release(detokenizer.text) == ""


@pytest.mark.parametrize("order", [1, -1])
def test_the_earliest_of_two_stop_texts(byte_level, order):
    for stops, text, stopped_by, kept in [
        (["fox", "bird"], "a bird, a fox", "bird", "a "),
        (["fox", "bird"], "a fox, a bird", "fox", "a "),
        (["bcd", "c"], "abcd", "c", "ab"),  # complete first
        (["cd", "bcd"], "abcd", "bcd", "a"),  # complete with the same token, and begins first
    ]:
        detokenizer = Detokenizer(byte_level, stops[::order])
        follow(detokenizer, pieces(byte_level, text))
        assert (detokenizer.stopped_by, detokenizer.text) == (stopped_by, kept)


def test_stop_text_of_several_bytes(byte_level):
    detokenizer = Detokenizer(byte_level, ["🦊🦊"])
    chunks = follow(detokenizer, ids(byte_level, "a 🦊 b 🦊🦊 c"))
    assert "".join(chunks) == detokenizer.text == "a 🦊 b "


@pytest.mark.parametrize("size", [1, 3, 100])
def test_minimum_of_tokens(byte_level, size):
    """A stop text that is complete within the minimum does not count, not even later."""
    tokens = pieces(byte_level, "a.b.c.d.")
    for minimum, kept in [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c"), (7, "a.b.c.d")]:
        detokenizer = Detokenizer(byte_level, ["."], minimum)
        chunks = follow(detokenizer, tokens, size)
        assert "".join(chunks) == detokenizer.text == kept
    detokenizer = Detokenizer(byte_level, ["."], 8)
    assert "".join(follow(detokenizer, tokens, size)) == "a.b.c.d."
    assert detokenizer.stopped_by is None


def test_stop_text_across_the_minimum(byte_level):
    """It begins within the minimum and is complete after it, so it counts."""
    detokenizer = Detokenizer(byte_level, ["bcd"], 2)
    assert detokenizer.push(pieces(byte_level, "abcde")) == 4
    assert detokenizer.text == "a"


def test_unfinished_character_at_the_minimum(byte_level):
    tokens = ids(byte_level, "🦊")
    for minimum, stopped in [(len(tokens) - 1, True), (len(tokens), False)]:
        detokenizer = Detokenizer(byte_level, ["🦊"], minimum)
        detokenizer.push(tokens)
        assert (detokenizer.stopped_by is not None) == stopped
