"""From plain arrays, a torch-style data set or a table to federated data: partition, hold out, name the clients."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedbraid.data import partition as partitions
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.preprocess import Pipeline

__all__ = ["from_arrays", "partition_options", "partition_rows"]


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
    preprocess: Pipeline | None = None,
    **options: Any,
) -> FederatedData:
    """Partition plain arrays over clients.

    ``partition`` is a name of ``fedbraid.data.partition`` (``iid``, ``dirichlet``, ``log-normal``, ``shards``,
    ``pachinko``) with its options, or ``"natural"`` with one id per row in ``ids``. The test split has the same clients
    in the same order: a given ``test`` set is dealt in each client's own label ratios, otherwise ``test_fraction`` of
    each client's rows is held out (a client always keeps one row to train on). Rows are shuffled within each client.

    >>> x, y = np.arange(20.0).reshape(10, 2), np.arange(10) % 2
    >>> data = from_arrays({"x": x, "y": y}, partition="iid", clients=2, test_fraction=0.2)
    >>> data.train.sizes.tolist(), data.test.sizes.tolist()
    ([4, 4], [1, 1])
    """
    arrays = {k: np.asarray(v) for k, v in arrays.items()}
    _check_columns(arrays, "train")
    n = len(next(iter(arrays.values())))
    if test is not None:
        if test_fraction is not None:
            raise ValueError("give a test set or test_fraction, not both")
        test = {k: np.asarray(v) for k, v in test.items()}
        _check_columns(test, "test")
        if set(test) != set(arrays):
            raise ValueError(f"train has fields {sorted(arrays)}, test has {sorted(test)}: they must agree")
    names: tuple[str, ...] = ()
    if partition == "natural":
        if ids is None:
            raise ValueError('partition = "natural" needs one id per row in ids; choose another partition otherwise')
        if len(ids) != n:
            raise ValueError(f"{len(ids)} ids for {n} rows")
        if options:
            raise ValueError(f'partition = "natural" takes no option {min(options)!r}')
        parts, names = partitions.by_id(ids)
        rng = np.random.default_rng(seed)
        parts = [rng.permutation(p) for p in parts]
    else:
        parts = partition_rows(n, arrays, partition=partition, label=label, seed=seed, **options)

    info = {**(info or {}), "partition": {"name": partition, "seed": seed, **options}}
    fields = {k: v for k, v in arrays.items() if k != "coarse"}
    test_split = None
    if test is not None:
        test_fields = {k: v for k, v in test.items() if k != "coarse"}
        test_parts = (
            partitions.match_labels(parts, arrays[label], test[label], seed=seed)
            if label in arrays
            else partitions.iid(len(next(iter(test.values()))), clients=len(parts), seed=seed)
        )
        test_split = Split.from_assignment(test_fields, test_parts, names)
    elif test_fraction:
        parts, test_parts = partitions.hold_out(parts, fraction=test_fraction, seed=seed)
        test_split = Split.from_assignment(fields, test_parts, names)
    train = Split.from_assignment(fields, parts, names)
    return FederatedData(train=train, test=test_split, name=name, info=info, preprocess=preprocess)


def partition_rows(
    n: int, arrays: Mapping[str, np.ndarray], *, partition: str, label: str = "y", seed: int = 0, **options: Any
) -> partitions.Parts:
    """Call a partitioner by name, with the label columns it needs and its options checked by name.

    >>> [len(p) for p in partition_rows(6, {}, partition="iid", clients=3)]
    [2, 2, 2]
    """
    if partition not in partitions.PARTITIONERS:
        known = ", ".join([*partitions.PARTITIONERS, "natural"])
        raise ValueError(f"unknown partition {partition!r}; known: {known}")
    function = partitions.PARTITIONERS[partition]
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
    if partition not in partitions.PARTITIONERS:
        return {}
    parameters = inspect.signature(partitions.PARTITIONERS[partition]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _check_columns(arrays: Mapping[str, np.ndarray], which: str) -> None:
    lengths = {k: len(v) if v.ndim else -1 for k, v in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or min(lengths.values()) < 1:
        raise ValueError(f"the {which} fields must be non-empty and of one length, got rows {lengths}")
