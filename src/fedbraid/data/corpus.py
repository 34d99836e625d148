"""Text of your own as examples of a language model: tables with a column of text, or of questions and answers.

Every row of a table, or every text of a client, is one text. Test texts are held out before texts are cut into
windows, so no window has a part of both. Texts of a client stay in their order: windows go across them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedbraid.core import check_count
from fedbraid.data import partition as partitions
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.names import check_client
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.tabular import as_arrow
from fedbraid.data.tokens import Tokenizer, answers, token_windows
from fedbraid.names import nearest
from fedbraid.notices import notice

__all__ = ["Corpus", "TextColumns", "corpus_of", "divided", "federated", "read"]

Text = str | tuple[str, str]  # or a question and its answer


@dataclass(frozen=True)
class TextColumns:
    """Which columns of a table hold text.

    client: the column that names the client of a row; None for a plain table, which is partitioned.
    text: the column of running text; "text" if nothing is named.
    question, answer: instead of ``text``, columns of questions and their answers. Only answers are learned. A question
        may be several columns, separated by commas, such as ``"instruction,context"``: they follow each other in lines.
    """

    client: str | None = None
    text: str | None = None
    question: str | None = None
    answer: str | None = None

    def __post_init__(self) -> None:
        if (self.question is None) != (self.answer is None):
            given, other = ("question", "answer") if self.answer is None else ("answer", "question")
            raise ValueError(f"{given} = {getattr(self, given)!r} needs the column of the {other}s, too: set {other}")
        if self.text is not None and self.question is not None:
            raise ValueError(f"name a column of text, or of questions and answers; got text = {self.text!r} and both")

    @property
    def read(self) -> tuple[tuple[str, ...], ...]:
        """The columns of the text itself: those of running text, or of the question and of the answer."""
        if self.question is not None and self.answer is not None:
            return (tuple(name.strip() for name in self.question.split(",")), (self.answer,))
        return (("text" if self.text is None else self.text,),)


class Corpus(NamedTuple):
    """Texts, and the client of each; ids is None if texts have no clients."""

    texts: list[Text]
    ids: list[str] | None


def federated(
    train: Corpus,
    test: Corpus | None,
    tokens: Tokenizer,
    *,
    length: int,
    test_fraction: float = 0.0,
    seed: int = 0,
    name: str = "text",
    source: object = "the text",
) -> FederatedData:
    """Windows by client. Clients of ``test`` that are not in ``train`` become the split ``unseen``."""
    if test is not None and test_fraction:
        raise ValueError("give test texts or test_fraction, not both")
    check_count("length", length, low=2)
    cut: list[int] = []
    rng = np.random.default_rng(seed)

    def examples(texts: Sequence[Text], who: str) -> dict[str, np.ndarray]:
        if texts and isinstance(texts[0], tuple):
            found = answers([("", *one) for one in texts], tokens, length=length, cut=cut.append)  # type: ignore[misc]
        else:
            found = token_windows(texts, tokens, length=length)  # type: ignore[arg-type]
        if texts and not np.any(found["y"]):
            raise ValueError(f"{source}: client {who}: its text has no token to predict; leave the client out")
        order = rng.permutation(len(found["x"]))
        return {field: values[order] for field, values in found.items()}

    groups = _by_client(train, source)
    held = {} if test is None else _by_client(test, source)
    if test_fraction:
        parts = [np.arange(len(texts)) for texts in groups.values()]
        kept, out = partitions.hold_out(parts, fraction=test_fraction, seed=seed)
        chosen = zip(groups.items(), kept, out, strict=True)
        held = {who: [texts[i] for i in sorted(o)] for (who, texts), _, o in chosen}
        groups = {who: [texts[i] for i in sorted(k)] for (who, texts), k in zip(groups.items(), kept, strict=True)}
    ids = tuple(groups)
    splits: dict[str, Split | None] = {"train": Split.from_clients([examples(groups[i], i) for i in ids], ids)}
    splits["test"] = splits["unseen"] = None
    if held and any(held.get(i) for i in ids):
        splits["test"] = Split.from_clients([examples(held.get(i, []), i) for i in ids], ids)
    if others := tuple(i for i in held if i not in groups):
        splits["unseen"] = Split.from_clients([examples(held[i], i) for i in others], others)
    if sum(cut):
        notice(
            f"{source}: {sum(cut):,} of {sum(map(len, groups.values())) + sum(map(len, held.values())):,} questions "
            f"with their answers are longer than length = {length} tokens and are cut; set a larger length to keep them"
        )
    info = {"classes": tokens.size, "tokenizer": tokens.name}
    integers = Pipeline.of({"name": "integers", "fields": "x,y"})
    return FederatedData(name=name, info=info, preprocess=integers, **splits)  # type: ignore[arg-type]


def divided(corpus: Corpus, parts: partitions.Parts) -> Corpus:
    """The texts ``parts[i]`` go to client ``i``."""
    order = np.argsort(np.concatenate(parts))
    ids = np.repeat([f"{i:06d}" for i in range(len(parts))], [len(part) for part in parts])[order]
    return Corpus(corpus.texts, ids.tolist())


def _by_client(corpus: Corpus, source: object) -> dict[str, list[Text]]:
    """Each client's texts, in their order; clients in alphabetical order."""
    if corpus.ids is None:
        raise ValueError(f"{source}: the train texts have clients, the test texts have none; name their client column")
    groups: dict[str, list[Text]] = {}
    for who, text in zip(corpus.ids, corpus.texts, strict=True):
        groups.setdefault(check_client(who, str(source)), []).append(text)
    return dict(sorted(groups.items()))


def read(source: Any, columns: TextColumns, what: str) -> Corpus:
    """The texts of a table, or of a dict from the name of a client to its texts."""
    named = columns != TextColumns()
    if isinstance(source, Mapping) and not named and "text" not in source:
        return _of_clients(source, what)
    table = as_arrow(source, what)
    return corpus_of(table.column_names, lambda name: table.column(name).to_pylist(), columns, what)


def _of_clients(clients: Mapping[Any, Any], what: str) -> Corpus:
    texts: list[Text] = []
    ids: list[str] = []
    for who, own in clients.items():
        if isinstance(own, str):
            own = [own]
        for one in own:
            pair = isinstance(one, (tuple, list)) and len(one) == 2 and all(isinstance(part, str) for part in one)
            if not pair and not isinstance(one, str):
                raise ValueError(
                    f"{what}[{who!r}]: texts are strings, or pairs of a question and an answer; got {one!r:.60}. For a "
                    "table, name its columns: client and text, or client, question and answer"
                )
            texts.append(tuple(one) if pair else one)  # type: ignore[arg-type]
            ids.append(str(who))
    if len({isinstance(one, tuple) for one in texts}) > 1:
        raise ValueError(f"{what}: some texts are strings and others are pairs; use one form")
    return _filled(Corpus(texts, ids), what)


def corpus_of(names: Sequence[str], column: Callable[[str], list[Any]], columns: TextColumns, source: object) -> Corpus:
    """The texts of a table with the columns ``names``; rows without text are left out with a notice."""
    parts = [name for group in columns.read for name in group]
    wanted = [*parts, *([] if columns.client is None else [columns.client])]
    if missing := [name for name in wanted if name not in names]:
        near = nearest(missing[0], names)
        raise ValueError(f"{source}: no column {missing[0]!r}{near}; it has {', '.join(map(str, names))}")
    read = {name: column(name) for name in parts}
    ids = None
    if columns.client is not None:
        found = column(columns.client)
        if None in found:
            row = found.index(None)
            raise ValueError(f"{source}: column {columns.client!r} has no value in row {row} (counted from 0)")
        ids = [str(who) for who in found]
    for name, values in read.items():
        odd = next((i for i, value in enumerate(values) if not isinstance(value, str | int | float | None)), None)
        if odd is not None:
            kind = type(values[odd]).__name__
            raise ValueError(f"{source}: column {name!r} holds {kind} in row {odd} (counted from 0), not text")
    joined = [[_joined(row) for row in zip(*(read[name] for name in group), strict=True)] for group in columns.read]
    texts: list[Text] = list(joined[0]) if len(joined) == 1 else list(zip(*joined, strict=True))
    return _filled(Corpus(texts, ids), source)


def _joined(values: Sequence[Any]) -> str:
    """The values of a row that are not missing or empty, in lines."""
    return "\n".join(str(value) for value in values if value not in (None, ""))


def _filled(corpus: Corpus, source: object) -> Corpus:
    """The texts that are not blank; of pairs, those whose answer is not."""
    full = [bool((one if isinstance(one, str) else one[1]).strip()) for one in corpus.texts]
    if not any(full):
        raise ValueError(f"{source}: it has no text" if corpus.texts else f"{source}: it has no rows")
    if not all(full):
        notice(f"{source}: {full.count(False):,} of {len(full):,} rows have no text and are left out")
    texts = [one for one, yes in zip(corpus.texts, full, strict=True) if yes]
    ids = None if corpus.ids is None else [who for who, yes in zip(corpus.ids, full, strict=True) if yes]
    return Corpus(texts, ids)
