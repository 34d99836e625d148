"""Helpers of the tests of formats: import small files, or expect a refusal."""

import h5py
import numpy as np
import pytest

from fedbraid.data.importing import import_data
from fedbraid.data.store import open_store

RNG = np.random.default_rng(0)


def read(kind, paths, out, **options):
    report = import_data(kind, paths if isinstance(paths, list) else [paths], out, **options)
    return open_store(out), report


def refused(words, kind, paths, out, **options):
    """The import fails with a one-line error, and writes no store."""
    before = set(out.parent.iterdir())
    with pytest.raises(ValueError, match=words) as error:
        read(kind, paths, out, **options)
    assert "\n" not in str(error.value)
    assert set(out.parent.iterdir()) == before


def rows_of(split, client, field):
    return split.client(list(split.ids).index(client))[field]


def tff(path, clients):
    with h5py.File(path, "w") as file:
        for name, fields in clients.items():
            for field, values in fields.items():
                file[f"examples/{name}/{field}"] = values
    return path
