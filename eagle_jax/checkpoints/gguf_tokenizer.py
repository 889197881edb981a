"""The tokenizer in a GGUF file's metadata, rebuilt for `transformers`.

Two kinds exist: byte-level BPE (`gpt2`), whose file names its way of splitting text but does not hold it, and
SentencePiece BPE (`llama`), which holds scores instead of merges.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from eagle_jax.checkpoints.gguf_container import read_container
from eagle_jax.checkpoints.source import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPACE = "\u2581"  # how SentencePiece writes a space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split before merging, by `tokenizer.ggml.pre`. A regex splits by itself; "gpt-2" and "digits"
# use GPT-2's, the latter after setting every digit apart.
_SPLITS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
# Whole words are taken from the vocabulary before merges are tried, and text starts with BOS unless the
# file says no.
_LLAMA3_LIKE = {"llama-bpe", "llama3", "llama-v3", "tekken"}


def gguf_tokenizer(path: Path) -> "PreTrainedTokenizerFast | None":
    """Returns the tokenizer of a GGUF file, with its special tokens and chat template; None if the file has
    none.

    Raises:
        CheckpointError: the file is damaged, or its tokenizer is of a kind not known here.
    """
    from transformers import PreTrainedTokenizerFast

    path = Path(path)
    metadata = read_container(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens: list[str] = _array(metadata, "tokens", path)
    types: list[int] = _array(metadata, "token_type", path)
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{path} has {len(tokens)} tokens and {len(types)} token types; expected as many"
        )
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if kind == "gpt2":
        tokenizer = _byte_level(path, pre, tokens, _array(metadata, "merges", path))
    elif kind == "llama":
        add_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
        unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
        if unknown >= len(tokens):
            raise CheckpointError(
                f"{path} has {len(tokens)} tokens, and its unknown token is number {unknown}"
            )
        tokenizer = _sentence_piece(
            tokens, types, _array(metadata, "scores", path), tokens[unknown], add_space
        )
    else:
        raise CheckpointError(
            f"{path} has a tokenizer of kind {kind!r}; expected gpt2 (byte-level BPE) or llama"
        )
    tokenizer.add_tokens(list(_added(tokens, types)))

    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{name}_token"] = tokens[token_id]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        add_bos_token=metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in _LLAMA3_LIKE),
        add_eos_token=metadata.get("tokenizer.ggml.add_eos_token", False),
        clean_up_tokenization_spaces=False,
        chat_template=metadata.get("tokenizer.chat_template"),
        **special,
    )


def _array(metadata: dict[str, Any], name: str, path: Path) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(values, list):
        raise CheckpointError(
            f"{path} has no tokenizer.ggml.{name} in its metadata, which this kind of tokenizer needs"
        )
    return values


def _added(tokens: list[str], types: list[int]) -> Iterable[AddedToken]:
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            yield AddedToken(token, special=True, normalized=False)
        elif kind == TokenType.USER_DEFINED:
            yield AddedToken(token, special=False, normalized=False)


def _byte_level(path: Path, pre: str, tokens: list[str], merges: list[str]) -> Tokenizer:
    split = _SPLITS.get(pre)
    if split is None:
        raise CheckpointError(
            f"{path} splits text as {pre!r} (tokenizer.ggml.pre); expected one of "
            f"{', '.join(sorted(_SPLITS))}"
        )
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [_pair(path, merge, ids) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs, ignore_merges=pre in _LLAMA3_LIKE))
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    if split in ("gpt-2", "digits"):
        digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "digits" else []
        steps = [*digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    else:
        steps = [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(path: Path, merge: str, ids: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left in ids and right in ids and left + right in ids):
        raise CheckpointError(f"{path} has the merge {merge!r}; expected two tokens that join to a third")
    return left, right


def _sentence_piece(
    tokens: list[str], types: list[int], scores: list[float], unknown: str, add_space: bool
) -> Tokenizer:
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=_merges(ids, types, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), spaces] if add_space else [spaces]
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if add_space else steps)
    return tokenizer


def _merges(ids: dict[str, int], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the third first: the order in which
    SentencePiece joins."""
    mergeable = {token for token, token_id in ids.items() if types[token_id] == TokenType.NORMAL}
    found = []
    for piece in mergeable:
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in mergeable and right in mergeable:
                found.append((-scores[ids[piece]], ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
