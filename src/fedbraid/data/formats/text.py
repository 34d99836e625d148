"""Text for language models: CSV, Parquet, Arrow and JSON-lines files with a column of text, and folders of text files.

In a folder of text files (``.txt``, ``.md``) each subfolder is a client and each file one text. If there are no
subfolders, each file is a client, and its paragraphs, which blank lines separate, are the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedbraid.data.corpus import Corpus, TextColumns, corpus_of, federated
from fedbraid.data.formats.archive import read_bytes
from fedbraid.data.formats.csv import add_data, csv_table
from fedbraid.data.formats.table import whole_table
from fedbraid.data.store import StoreWriter
from fedbraid.data.tokens import tokenizer as tokenizer_of
from fedbraid.limited_json import read_json

__all__ = ["read_text"]

TEXTS = (".txt", ".md")
LINES = (".jsonl", ".jsonl.gz", ".ndjson")
CSV = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
TABLES = (".parquet", ".arrow", ".feather")


def read_text(
    writer: StoreWriter,
    paths: Sequence[Path],
    *,
    client: str | None = None,
    text: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    tokenizer: str = "bytes",
    length: int = 128,
    test: Sequence[Path] = (),
    test_fraction: float | None = None,
) -> None:
    """Read text as windows of tokens, by client; see `fedbraid.data.from_text` for the options."""
    columns, tokens = TextColumns(client, text, question, answer), tokenizer_of(tokenizer)
    train = _corpus(paths, columns)
    held = _corpus(test, columns) if test else None
    plain = train.ids is None
    if plain:  # to be partitioned later
        train = Corpus(train.texts, ["all"] * len(train.texts))
        held = held and Corpus(held.texts, ["all"] * len(held.texts))
        writer.info["plain"] = True
    seed, source = writer.shuffle or 0, paths[0]
    data = federated(train, held, tokens, length=length, test_fraction=test_fraction or 0.0, seed=seed, source=source)
    writer.preprocess = data.preprocess  # type: ignore[assignment]
    add_data(writer, data)


def _corpus(paths: Sequence[Path], columns: TextColumns) -> Corpus:
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"files of several kinds ({', '.join(sorted(kinds))}); import one kind at a time")
    (kind,) = kinds
    if kind == "text files":
        if columns != TextColumns():
            raise ValueError(f"{paths[0]}: text files have no columns; leave client, text, question and answer out")
        parts = [_folder(path) for path in paths]
    else:
        parts = [corpus_of(*_table(path, kind), columns, path) for path in paths]
    ids = None if parts[0].ids is None else [who for part in parts for who in part.ids or ()]
    return Corpus([one for part in parts for one in part.texts], ids)


def _table(path: Path, kind: str) -> tuple[list[str], Callable[[str], list[Any]]]:
    """The names of the columns of a file, and a function from a name to the values."""
    if kind == "JSON lines":
        found = _lines(path)
        return list(found), found.__getitem__
    table = csv_table(path) if kind == "CSV" else whole_table([path])
    return table.column_names, lambda name: table.column(name).to_pylist()


def _kind(path: Path) -> str:
    name = path.name.lower()
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_dir():
        found = {p.suffix.lower() for p in path.rglob("*") if p.is_file()}
        name = next((f"*{suffix}" for suffix in (*TEXTS, *TABLES) if suffix in found), name)
    for kind, endings in (
        ("text files", TEXTS),
        ("JSON lines", LINES),
        ("CSV", CSV),
        ("Parquet or Arrow", TABLES),
    ):
        if name.endswith(endings):
            return kind
    raise ValueError(
        f"{path}: no known kind of text; give files that end in {', '.join((*CSV, *LINES, *TABLES))}, or a folder of "
        f"{' or '.join(TEXTS)} files"
    )


def _lines(path: Path) -> dict[str, list[Any]]:
    """The columns of a file with one JSON object per line; a value that a line lacks is None."""
    rows = []
    for number, line in enumerate(read_bytes(path).removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number}: one JSON object per line expected, got {type(row).__name__}")
        rows.append(row)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _folder(path: Path) -> Corpus:
    if path.is_file():
        files, nested = [path], False
    else:
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXTS and p.is_file())
        nested = any(p.parent != path for p in files)
        if nested and (loose := next((p for p in files if p.parent == path), None)):
            raise ValueError(f"{loose}: the files of a client are in a folder of its own; move this file into one")
    texts, ids = [], []
    for file in files:
        try:
            whole = read_bytes(file).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file}: not UTF-8 ({error}); save it as UTF-8") from error
        found = [whole] if nested else re.split(r"\n\s*\n", whole)
        found = [one for one in found if one.strip()]
        texts += found
        ids += [file.relative_to(path).parts[0] if nested else file.stem] * len(found)
    if not texts:
        raise ValueError(f"{path}: its files have no text")
    return Corpus(texts, ids)
