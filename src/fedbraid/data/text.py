"""Text as token ids, as in the papers: Shakespeare in windows of 80 characters, StackOverflow in sentences of 20 words.

The symbol 0 is padding in both: models mask it. The character vocabulary has 90 symbols: 86 characters, begin, end,
padding, unknown (Charles & Konecny, App. E; Reddi et al., *Adaptive Federated Optimization*). The word vocabulary is
the most frequent words (Karimireddy et al., App. C: 1,000; Reddi et al.: 10,000) and the same four special symbols.
"""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

__all__ = [
    "BEGIN",
    "CHARACTERS",
    "END",
    "PADDING",
    "UNKNOWN",
    "VOCABULARY_SIZE",
    "character_ids",
    "character_windows",
    "decode",
    "frequent_words",
    "word_index",
    "word_windows",
]

CHARACTERS = "\n\r !\"#$%&'()*,-./" + string.digits + ":;?@" + string.ascii_uppercase + "[]_" + string.ascii_lowercase
PADDING = 0  # characters are 1 to 86
UNKNOWN, BEGIN, END = (len(CHARACTERS) + k for k in (1, 2, 3))
VOCABULARY_SIZE = len(CHARACTERS) + 4

_TABLE = np.full(129, UNKNOWN, np.uint8)  # one row per ASCII code, and a last one for all other characters
_TABLE[[ord(c) for c in CHARACTERS]] = np.arange(1, len(CHARACTERS) + 1)


def character_ids(text: str) -> np.ndarray:
    """One symbol per character, uint8.

    >>> decode(character_ids("To be, or}"))
    'To be, or?'
    """
    return _TABLE[np.minimum(np.frombuffer(text.encode("utf-32-le"), "<u4"), 128)]


def decode(ids: np.ndarray) -> str:
    """Symbols back to text; begin, end and padding are removed, unknown becomes ``?``."""
    symbols = ["", *CHARACTERS, "?", "", ""]
    return "".join(symbols[int(i)] for i in ids)


def character_windows(snippets: Iterable[str], *, length: int = 80, join: bool = False) -> dict[str, np.ndarray]:
    """Next-character examples ``x, y`` uint8 [n, length]: ``y`` is ``x`` shifted by one.

    Each snippet gets a begin and an end symbol and is cut into blocks of ``length + 1`` symbols; the last block is
    padded (as in Reddi et al.). ``join=True`` joins a client's snippets before they are cut, and loses no prediction at
    the cuts.

    >>> w = character_windows(["abc"], length=2)
    >>> [decode(row) for row in w["x"]], [decode(row) for row in w["y"]]
    (['a', 'c'], ['ab', ''])
    """
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
    framed = [np.concatenate([[BEGIN], character_ids(s), [END]]).astype(np.uint8) for s in snippets]
    if join:
        stream = np.concatenate(framed) if framed else np.zeros(1, np.uint8)
        return {"x": _blocks(stream[:-1], length), "y": _blocks(stream[1:], length)}
    blocks = [_blocks(tokens, length + 1) for tokens in framed]
    table = np.concatenate(blocks) if blocks else np.zeros((0, length + 1), np.uint8)
    return {"x": np.ascontiguousarray(table[:, :-1]), "y": np.ascontiguousarray(table[:, 1:])}


def _blocks(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, (0, -len(tokens) % length)).reshape(-1, length)


def frequent_words(sentences: Iterable[str] | Mapping[str, int], size: int) -> tuple[str, ...]:
    """The ``size`` most frequent words (ties in alphabetical order), from sentences or from counts.

    >>> frequent_words(["the cat", "the dog", "a dog"], 2)
    ('dog', 'the')
    """
    if size < 1:
        raise ValueError(f"a vocabulary needs at least one word, got size {size}")
    counts = dict(sentences) if isinstance(sentences, Mapping) else Counter(w for s in sentences for w in s.split())
    return tuple(sorted(counts, key=lambda w: (-counts[w], w))[:size])


def word_index(vocabulary: Sequence[str]) -> dict[str, int]:
    """Ids 1 to V of the words. Unknown, begin and end are V + 1, V + 2 and V + 3.

    >>> word_index(["the", "cat"])
    {'the': 1, 'cat': 2}
    """
    index = {word: i for i, word in enumerate(vocabulary, 1)}
    if len(index) != len(vocabulary):
        raise ValueError("the vocabulary has a word twice")
    return index


def word_windows(sentences: Iterable[str], index: Mapping[str, int], *, length: int = 20) -> dict[str, np.ndarray]:
    """Next-word examples ``x, y`` [n, length], one per sentence: begin, up to ``length`` words, end if there is room.

    >>> w = word_windows(["the cat sat"], word_index(["the", "cat"]), length=5)
    >>> w["x"].tolist(), w["y"].tolist()
    ([[4, 1, 2, 3, 5]], [[1, 2, 3, 5, 0]])
    """
    unknown, begin, end = (len(index) + k for k in (1, 2, 3))
    rows = []
    for sentence in sentences:
        tokens = [begin, *(index.get(w, unknown) for w in sentence.split()[:length])]
        if len(tokens) <= length:
            tokens.append(end)
        rows.append(tokens + [PADDING] * (length + 1 - len(tokens)))
    table = np.asarray(rows, np.uint16 if end < 1 << 16 else np.int32).reshape(-1, length + 1)
    return {"x": np.ascontiguousarray(table[:, :-1]), "y": np.ascontiguousarray(table[:, 1:])}
