"""Federated data from plain arrays, torch-style data sets, one for all or one per client, a table, or text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of_class
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedbraid.data import corpus, tokens
from fedbraid.data import partition as partitions
from fedbraid.data.description import Preprocess
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.importing import NO_TEST
from fedbraid.data.names import check_client
from fedbraid.data.preprocess import scaling_of
from fedbraid.data.tabular import Columns, as_arrow, tabulate
from fedbraid.names import nearest, options_of
from fedbraid.notices import notice

__all__ = [
    "from_arrays",
    "from_clients",
    "from_dataset",
    "from_table",
    "from_text",
    "partition_options",
    "partition_rows",
]


def from_arrays(
    arrays: Mapping[str, np.ndarray],
    test: Mapping[str, np.ndarray] | None = None,
    *,
    partition: str = "iid",
    label: str = "y",
    test_fraction: float | None = None,
    seed: int = 0,
    ids: Sequence[object] | np.ndarray | None = None,
    name: str = "data",
    info: Mapping[str, Any] | None = None,
    preprocess: Preprocess | Literal["auto"] | None = "auto",
    **options: Any,
) -> FederatedData:
    """Partition plain arrays over clients.

    ``partition`` is a name of ``fedbraid.data.partition`` (``iid``, ``dirichlet``, ``log-normal``, ``shards``,
    ``pachinko``) with its options, or ``"natural"`` with one id per row in ``ids``. The test split has the same clients
    in the same order. A given ``test`` set is partitioned with each client's own label ratios. Otherwise
    ``test_fraction`` of each client's rows is held out (a client always keeps one row to train on). Rows are shuffled
    within each client. ``preprocess`` is that of ``FederatedData``. "auto" divides ``x`` by 255 if it holds uint8
    images, and is None otherwise.

    >>> x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    >>> data = from_arrays({"x": x, "y": y}, partition="iid", clients=2, test_fraction=0.2)
    >>> data.train.sizes.tolist(), data.test.sizes.tolist()
    ([4, 4], [1, 1])
    """
    arrays = {k: np.asarray(v) for k, v in arrays.items()}
    test = None if test is None else {k: np.asarray(v) for k, v in test.items()}
    _check_columns(arrays, "train")
    if test is not None:
        _check_columns(test, "test")
        _check_test(arrays, test, test_fraction)
    n = len(next(iter(arrays.values())))
    names: tuple[str, ...] = ()
    if partition == "natural":
        parts, names = _natural_parts(n, ids, seed, options)
    else:
        parts = partition_rows(n, arrays, partition=partition, label=label, seed=seed, **options)

    fields = _without_coarse(arrays)
    test_split = None
    if test is not None:
        if label in arrays and arrays[label].ndim == 1:  # not of sequences
            test_parts = partitions.match_labels(parts, arrays[label], test[label], seed=seed)
        else:
            test_parts = partitions.iid(len(next(iter(test.values()))), clients=len(parts), seed=seed)
        test_split = Split.from_assignment(_without_coarse(test), test_parts, names)
    elif test_fraction:
        parts, test_parts = partitions.hold_out(parts, fraction=test_fraction, seed=seed)
        test_split = Split.from_assignment(fields, test_parts, names)
    return FederatedData(
        train=Split.from_assignment(fields, parts, names),
        test=test_split,
        name=name,
        info={**(info or {}), "partition": {"name": partition, "seed": seed, **options}},
        preprocess=scaling_of(fields) if preprocess == "auto" else preprocess,
    )


def _check_test(arrays: Mapping[str, np.ndarray], test: Mapping[str, np.ndarray], test_fraction: float | None) -> None:
    if test_fraction is not None:
        raise ValueError("give a test set or test_fraction, not both")
    if set(test) != set(arrays):
        raise ValueError(f"train has fields {sorted(arrays)}, test has {sorted(test)}: they must agree")


def _natural_parts(
    n: int, ids: Sequence[object] | np.ndarray | None, seed: int, options: Mapping[str, Any]
) -> tuple[partitions.Parts, tuple[str, ...]]:
    """Rows grouped by id, shuffled within each client; and the clients' names."""
    if ids is None:
        raise ValueError('partition = "natural" needs one id per row in ids; choose another partition otherwise')
    if len(ids) != n:
        raise ValueError(f"{len(ids)} ids for {n} rows")
    if options:
        raise ValueError(f'partition = "natural" takes no option {min(options)!r}')
    parts, names = partitions.by_id(ids)
    rng = np.random.default_rng(seed)
    return [rng.permutation(p) for p in parts], names


def _without_coarse(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All fields but coarse labels, which only the Pachinko partition needs."""
    return {name: array for name, array in arrays.items() if name != "coarse"}


def from_dataset(
    dataset: Any, test: Any = None, *, fields: Sequence[str] = ("x", "y"), **options: Any
) -> FederatedData:
    """Partition a torch-style data set: any object with a length and items, tuples (named by ``fields``) or dicts.

    Options are those of ``from_arrays``. Tensors and images are converted by NumPy's array protocol.

    >>> pairs = [(np.full(2, i), i % 2) for i in range(6)]
    >>> from_dataset(pairs, partition="shards", clients=2, per_client=1).train.arrays["y"].tolist()
    [1, 1, 1, 0, 0, 0]
    """
    columns = _columns(dataset, fields, "dataset")
    return from_arrays(columns, None if test is None else _columns(test, fields, "test"), **options)


def from_clients(
    clients: Mapping[str, Any] | Sequence[Any],
    test: Mapping[str, Any] | Sequence[Any] | None = None,
    *,
    fields: Sequence[str] = ("x", "y"),
    test_fraction: float | None = None,
    seed: int = 0,
    name: str = "data",
    preprocess: Preprocess | Literal["auto"] | None = "auto",
) -> FederatedData:
    """One data set per client, by id in a dict or in a list: torch-style sets, or dicts of arrays.

    ``test`` has the test sets of the same clients, or ``test_fraction`` of each client's rows is held out. Labels of
    text are numbered in alphabetical order; ``data.info["labels"]`` has their names.

    >>> pairs, arrays = [(np.zeros(2), "no"), (np.ones(2), "yes")], {"x": np.ones((1, 2)), "y": ["no"]}
    >>> data = from_clients({"ann": pairs, "bob": arrays}, test_fraction=0.5)
    >>> list(data.train.ids), data.train.sizes.tolist(), data.test.sizes.tolist(), data.info["labels"]
    (['ann', 'bob'], [1, 1], [1, 0], ['no', 'yes'])
    """
    if test is not None and test_fraction:
        raise ValueError("give test sets or test_fraction, not both")
    ids, train = _client_columns(clients, fields, "clients")
    held: list[dict[str, np.ndarray]] | None = None
    if test is not None:
        test_ids, held = _client_columns(test, fields, "test")
        if isinstance(clients, Mapping) and set(test_ids) - set(ids):
            raise ValueError(f"test has the client {min(set(test_ids) - set(ids))!r}, which is not among the clients")
        if not isinstance(clients, Mapping) and len(held) != len(train):
            raise ValueError(f"{len(held)} test sets for {len(train)} clients; give one each, in the same order")
        own = dict(zip(test_ids, held, strict=True))
        empty = {field: values[:0] for field, values in train[0].items()}
        held = [own.get(client, empty) for client in ids]
    labels = _number_labels([*train, *(held or [])], train)
    split, test_split = Split.from_clients(train, ids), Split.from_clients(held, ids) if held is not None else None
    if test_fraction:
        parts = [np.arange(a, b) for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
        kept, out = partitions.hold_out(parts, fraction=test_fraction, seed=seed)
        test_split, split = (
            Split.from_assignment(split.arrays, out, ids),
            Split.from_assignment(split.arrays, kept, ids),
        )
    for which, part in (("clients", split), ("test", test_split)):
        if part is not None:
            _check_columns(dict(part.arrays), which)
    y = split.arrays.get("y")
    classes = {"classes": int(y.max()) + 1} if y is not None and y.dtype.kind in "iu" and y.min() >= 0 else {}
    info = {**classes, **({"labels": labels, "classes": len(labels)} if labels else {})}
    steps = scaling_of(split.arrays) if preprocess == "auto" else preprocess
    return _told(FederatedData(split, test_split, name, info, steps))


def _client_columns(
    clients: Mapping[str, Any] | Sequence[Any], fields: Sequence[str], what: str
) -> tuple[list[str], list[dict[str, np.ndarray]]]:
    named = clients if isinstance(clients, Mapping) else {f"{i:06d}": client for i, client in enumerate(clients)}
    if not named:
        raise ValueError(f"{what} is empty")
    out = []
    for client, rows in named.items():
        at = f"{what}[{client!r}]"
        columns = (
            {k: np.asarray(v) for k, v in rows.items()} if isinstance(rows, Mapping) else _columns(rows, fields, at)
        )
        _check_lengths(columns, at)
        out.append(columns)
    return [check_client(str(client), what) for client in named], out


def _number_labels(parts: list[dict[str, np.ndarray]], train: list[dict[str, np.ndarray]]) -> list[str] | None:
    """Replace labels of text by their numbers in the sorted list of the training labels, which is returned."""
    if not all("y" in part and part["y"].dtype.kind in "UO" for part in train):
        return None
    names = sorted({str(v) for part in train for v in part["y"]})
    place = {name: i for i, name in enumerate(names)}
    for part in parts:
        if unknown := [str(v) for v in part["y"] if str(v) not in place]:
            raise ValueError(f"the test label {unknown[0]!r} is not among the training labels")
        part["y"] = np.array([place[str(v)] for v in part["y"]], np.int32)
    return names


def from_table(
    table: Any,
    test: Any = None,
    *,
    partition: str | None = None,
    seed: int = 0,
    name: str = "data",
    **options: Any,
) -> FederatedData:
    """A table: pandas, polars or pyarrow, a Hugging Face ``Dataset`` or ``DatasetDict``, or a dict of arrays.

    Options say what the columns are (see `Columns`): ``client``, ``label``, ``features``, ``categories``, ``task``,
    ``missing``, ``standardise``, ``test_fraction``. Without a client column, rows are partitioned by ``partition`` and
    its options, as in `from_arrays`.

    >>> import pyarrow as pa
    >>> rows = pa.table({"who": ["b", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [0, 1, 0]})
    >>> data = from_table(rows, rows.slice(0, 1), client="who", label="y")
    >>> list(data.train.ids), data.train.sizes.tolist(), data.train.arrays["x"].shape
    (['a', 'b'], [1, 2], (3, 1))
    """
    known = [f.name for f in fields_of_class(Columns)]
    chosen = {k: options.pop(k) for k in known if k in options}
    lists = {k: tuple(chosen.pop(k) or ()) for k in ("features", "categories") if k in chosen}
    columns = Columns(**lists, **{k: v for k, v in chosen.items() if v is not None})
    table, test = _without_splits(table, test)
    names = _class_names(table, columns.label)
    fitted = columns.standardise is not None or columns.missing == "mean"
    held = 0.0 if columns.client is not None or fitted else columns.test_fraction
    tables = [None if t is None else as_arrow(t, what) for t, what in ((table, "table"), (test, "test table"))]
    columns = replace(columns, test_fraction=columns.test_fraction - held)
    data = replace(tabulate(*tables, columns=columns, seed=seed), name=name)
    info = {**data.info, **({"labels": names, "classes": len(names)} if names and "labels" not in data.info else {})}
    if columns.client is not None:
        if partition is not None or options:
            given = "partition" if partition is not None else min(options)
            raise ValueError(f"the column {columns.client!r} names the clients, so there is no option {given!r}")
        return _told(replace(data, info=info))
    info.pop("plain")
    return _told(
        from_arrays(
            data.train.arrays,
            None if data.test is None else data.test.arrays,
            partition=partition or "iid",
            test_fraction=held or None,
            seed=seed,
            name=name,
            info=info,
            preprocess=data.preprocess,
            **options,
        )
    )


def from_text(
    source: Any,
    test: Any = None,
    *,
    client: str | None = None,
    text: str | None = None,
    question: str | None = None,
    answer: str | None = None,
    tokenizer: str = "bytes",
    length: int = 128,
    test_fraction: float = 0.0,
    partition: str | None = None,
    seed: int = 0,
    name: str = "text",
    **options: Any,
) -> FederatedData:
    """Text for a language model: ``x`` and ``y`` are windows of ``length`` tokens, ``y`` one token later.

    Args:
        source: a table (pandas, polars, pyarrow, a Hugging Face data set, a dict of columns), or a dict from the name
            of a client to its texts, which are strings or pairs of a question and an answer.
        test: the same for test texts of the same clients; or set ``test_fraction``.
        client: the column that names the client of a row. Without it, rows are partitioned.
        text: the column of running text.
        question: with ``answer``: columns of questions and answers. Only the answers' tokens count in the loss. Several
            columns of a question are separated by commas.
        answer: see ``question``.
        tokenizer: ``"bytes"``, ``"characters"`` or ``"smollm2"`` (`fedbraid.data.tokenizer`).
        length: tokens of an example.
        test_fraction: share of each client's texts that become the test split.
        partition: how rows without a client are divided over clients, with its options, as in `from_arrays`.
        seed: of the partition, of held-out texts and of the order of windows.
        name: of the data.
        options: of the partition.

    >>> texts = {"ann": ["hello", "bye"], "bob": ["good morning"]}
    >>> data = from_text(texts, test_fraction=0.5, length=8)
    >>> list(data.train.ids), data.train.sizes.tolist(), data.test.sizes.tolist(), data.info["classes"]
    (['ann', 'bob'], [1, 2], [1, 0], 258)
    """
    columns, encoding = corpus.TextColumns(client, text, question, answer), tokens.tokenizer(tokenizer)
    source, test = _without_splits(source, test)
    train = corpus.read(source, columns, "text")
    held = None if test is None else corpus.read(test, columns, "test text")
    if train.ids is not None and (partition is not None or options):
        given = "partition" if partition is not None else min(options)
        raise ValueError(f"the texts have clients, so there is no option {given!r}")
    if train.ids is None:
        parts = partition_rows(len(train.texts), {}, partition=partition or "iid", seed=seed, **options)
        train = corpus.divided(train, parts)
        held = held and corpus.divided(held, partitions.iid(len(held.texts), clients=len(parts), seed=seed))
    how = {"length": length, "test_fraction": test_fraction, "seed": seed, "name": name}
    return _told(corpus.federated(train, held, encoding, **how))


def _without_splits(tables: Any, test: Any) -> tuple[Any, Any]:
    """The train and test tables of a Hugging Face ``DatasetDict``; other sources as they are."""
    columns = (np.ndarray, list, tuple, str)
    if not isinstance(tables, Mapping) or "train" not in tables or isinstance(tables["train"], columns):
        return tables, test
    if test is not None:
        raise ValueError(f"the tables have the splits {', '.join(tables)}, so test is not needed")
    used = "test" if "test" in tables else "validation" if "validation" in tables else None
    if left := [n for n in tables if n not in ("train", used)]:
        notice(f"the splits {', '.join(left)} are not used; train is the train split, {used} the test split")
    return tables["train"], tables[used] if used else None


def _class_names(table: Any, label: str | None) -> list[str] | None:
    """The names of a Hugging Face ``ClassLabel`` column, whose values are numbers."""
    features = getattr(table, "features", None)
    names = getattr(features[label], "names", None) if isinstance(features, Mapping) and label in features else None
    return [str(n) for n in names] if names else None


def _told(data: FederatedData) -> FederatedData:
    if data.test is None:
        notice(NO_TEST)
    return data


def _columns(dataset: Any, fields: Sequence[str], name: str) -> dict[str, np.ndarray]:
    if not len(dataset):
        raise ValueError(f"{name} is empty")
    rows = []
    for i in range(len(dataset)):
        item = dataset[i]
        if not isinstance(item, Mapping):
            if not isinstance(item, (tuple, list)) or len(item) != len(fields):
                raise ValueError(f"{name}[{i}] must be a dict or a tuple of {len(fields)} values ({', '.join(fields)})")
            item = dict(zip(fields, item, strict=True))
        rows.append({k: np.asarray(v) for k, v in item.items()})
    columns = {}
    for field in rows[0]:
        shapes = {r[field].shape for r in rows if field in r}
        if len(shapes) != 1 or any(field not in r for r in rows):
            raise ValueError(f"{name}: field {field}: missing from an item, or examples differ in shape")
        columns[field] = np.stack([r[field] for r in rows])
    return columns


def partition_rows(
    n: int, arrays: Mapping[str, np.ndarray], *, partition: str, label: str = "y", seed: int = 0, **options: Any
) -> partitions.Parts:
    """Call a partitioner by name, with the label columns that it needs. Checks the names of its options.

    >>> [len(p) for p in partition_rows(6, {}, partition="iid", clients=3)]
    [2, 2, 2]
    """
    found = partitions.NAMES.find(partition)
    if not found.own:
        offered = {"n": n, "arrays": dict(arrays), "labels": arrays.get(label), "seed": seed}
        parts = partitions.NAMES.call(found, options, {name: lambda v=value: v for name, value in offered.items()})
        parts = [np.asarray(part) for part in parts]
        partitions.check_partition(parts, n)
        return parts
    function = found.thing
    keywords = partition_options(partition)
    if extra := sorted(set(options) - set(keywords)):
        near = nearest(extra[0], keywords)
        raise ValueError(f"partition {partition!r} has no option {extra[0]!r}{near}; it takes {', '.join(keywords)}")
    if missing := [k for k, default in keywords.items() if default is inspect.Parameter.empty and k not in options]:
        every = " and ".join(map(repr, missing))
        raise ValueError(f"partition {partition!r} needs the option{'s' if missing[1:] else ''} {every}")
    if partition in ("iid", "log-normal"):
        return function(n, seed=seed, **options)
    wanted = ("coarse", label) if partition == "pachinko" else (label,)
    for column in wanted:
        if column not in arrays:
            raise ValueError(f"partition {partition!r} needs the field {column!r}; the data has {sorted(arrays)}")
    return function(*(arrays[c] for c in wanted), seed=seed, **options)


def partition_options(partition: str) -> dict[str, Any]:
    """The options of a partitioner and their defaults; none for ``"natural"``.

    >>> sorted(partition_options("iid"))
    ['clients', 'seed']
    """
    if partition == "natural":
        return {}
    found = partitions.NAMES.find(partition)
    if not found.own:
        return options_of(found.thing, skip=("n", "arrays", "labels"))
    parameters = inspect.signature(found.thing).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check_columns(arrays: Mapping[str, np.ndarray], which: str) -> None:
    """Refuse fields of different lengths, and values that are not finite, with their field and count."""
    _check_lengths(arrays, which)
    for name, array in arrays.items():
        if np.issubdtype(array.dtype, np.floating):
            bad = np.any(~np.isfinite(array.reshape(len(array), -1)), axis=1, keepdims=True)
            if bad.any():
                raise ValueError(
                    f"the {which} field {name!r} is not finite (NaN or infinity) in {int(bad.sum()):,} of {len(bad):,} "
                    f"rows, first in row {int(np.argmax(bad))}; fill or drop them"
                )


def _check_lengths(arrays: Mapping[str, np.ndarray], which: str) -> None:
    lengths = {k: len(v) if v.ndim else -1 for k, v in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or min(lengths.values()) < 1:
        raise ValueError(f"the {which} fields must be non-empty and of equal length, got rows {lengths}")
