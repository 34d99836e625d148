"""Federated data from plain arrays, a torch-style data set or a table: partition, hold out, name the clients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from fedbraid.data import partition as partitions
from fedbraid.data.description import Preprocess
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.preprocess import scaling_of
from fedbraid.names import options_of

__all__ = ["from_arrays", "from_dataset", "from_table", "partition_options", "partition_rows"]


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
        if label in arrays:
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
    _check_columns(test, "test")
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


def from_table(
    table: Any,
    test: Any = None,
    *,
    client: str | None = None,
    label: str | None = None,
    features: Sequence[str] = (),
    **options: Any,
) -> FederatedData:
    """A pyarrow table or a Hugging Face data set: clients by the column ``client``, or a partition by ``options``.

    >>> import pyarrow as pa
    >>> data = from_table(pa.table({"who": ["b", "a", "b"], "x": [1.0, 2.0, 3.0]}), client="who")
    >>> list(data.train.ids), data.train.sizes.tolist()
    (['a', 'b'], [1, 2])
    """
    from fedbraid.data.formats.table import arrow_columns

    def read(source: Any) -> tuple[dict[str, Any], np.ndarray | None]:
        if hasattr(source, "with_format"):  # a Hugging Face data set: its rows as one Arrow table
            source = source.with_format("arrow")[:]
        return arrow_columns(source, client=client, label=label, features=features)

    columns, ids = read(table)
    if ids is None:
        return from_arrays(columns, None if test is None else read(test)[0], **options)
    if test is None:
        return from_arrays(columns, partition="natural", ids=ids, **options)
    train = from_arrays(columns, partition="natural", ids=ids, **options)
    test_columns, test_ids = read(test)
    assert test_ids is not None
    held = from_arrays(test_columns, partition="natural", ids=test_ids, **options).train
    return _with_test(train, held)


def _with_test(data: FederatedData, held: Split) -> FederatedData:
    """Test clients in the train clients' order. Those that never train become the split ``unseen``.

    If no test client trains, all of them stay in the split ``test``.
    """
    place = {client: i for i, client in enumerate(held.ids)}
    if not any(client in place for client in data.train.ids):
        return replace(data, test=held)
    rows = [np.arange(a, b) for a, b in zip(held.offsets[:-1], held.offsets[1:], strict=True)]
    own = [rows[place[c]] if c in place else np.zeros(0, np.int64) for c in data.train.ids]
    known = set(data.train.ids)
    others = [c for c in held.ids if c not in known]
    unseen = Split.from_assignment(held.arrays, [rows[place[c]] for c in others], others) if others else None
    return replace(data, test=Split.from_assignment(held.arrays, own, data.train.ids), unseen=unseen)


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
        raise ValueError(f"partition {partition!r} has no option {extra[0]!r}; it takes {', '.join(keywords)}")
    if missing := [k for k, default in keywords.items() if default is inspect.Parameter.empty and k not in options]:
        raise ValueError(f"partition {partition!r} needs the option {missing[0]!r}")
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
    lengths = {k: len(v) if v.ndim else -1 for k, v in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or min(lengths.values()) < 1:
        raise ValueError(f"the {which} fields must be non-empty and of equal length, got rows {lengths}")
