"""Federated data on disk: flat arrays sorted by client, offsets, client ids, and a small JSON header.

A store is a folder. ``header.json`` lists the splits and, for every file, its size and SHA-256. Each field of a split
is one raw little-endian file that opens as a memory map. Opening takes milliseconds for any size, and a data set larger
than memory has the same interface as one in memory. No pickle is used.

- `layout`: file names, dtypes and the header's format, shared by the others;
- `writing`: `StoreWriter` and `write_store`;
- `opening`: `open_store`, `read_header`, `verify`;
- `cohorts`: `gather` and `prefetch`, which copy the rows of sampled clients into memory.

>>> import tempfile, pathlib
>>> import numpy as np
>>> path = pathlib.Path(tempfile.mkdtemp()) / "store"
>>> with StoreWriter(path, name="tiny") as writer:
...     writer.add("train", "ann", {"x": np.zeros((2, 3), np.uint8), "y": np.array([0, 1])})
...     writer.add("train", "bob", {"x": np.ones((1, 3), np.uint8), "y": np.array([1])})
>>> data = open_store(path)
>>> data.train.sizes.tolist(), list(data.train.ids)
([2, 1], ['ann', 'bob'])
"""

from fedbraid.data.store.cohorts import Cohort, gather, prefetch
from fedbraid.data.store.layout import TextRows
from fedbraid.data.store.opening import is_store, open_store, read_header, verify
from fedbraid.data.store.writing import StoreWriter, write_store

__all__ = [
    "Cohort",
    "StoreWriter",
    "TextRows",
    "gather",
    "is_store",
    "open_store",
    "prefetch",
    "read_header",
    "verify",
    "write_store",
]
