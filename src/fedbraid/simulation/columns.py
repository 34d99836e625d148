"""The columns of a finished run: a dict whose error for a missing name lists the names and suggests the nearest."""

from __future__ import annotations

import difflib
from typing import Any

import jax

__all__ = ["RunColumns"]


class RunColumns(dict[str, Any]):
    """Columns by name. A name that does not exist is a KeyError with the existing names and the nearest one.

    >>> RunColumns(round=[1, 2], test_accuracy=[0.5, 0.6])["accuracy"]
    Traceback (most recent call last):
        ...
    KeyError: "no column 'accuracy'; did you mean 'test_accuracy'? The columns are: round, test_accuracy"
    """

    def __missing__(self, name: object) -> Any:
        there = sorted(map(str, self))
        if not there:
            raise KeyError(f"no column {name!r}; there are no columns: the run was not evaluated, or has no test split")
        near = difflib.get_close_matches(str(name), there, n=1, cutoff=0.5)
        guess = f"; did you mean {near[0]!r}?" if near else "."
        raise KeyError(f"no column {name!r}{guess} The columns are: {', '.join(there)}")


def _flatten(columns: RunColumns) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    names = tuple(sorted(columns))
    return [(jax.tree_util.DictKey(name), columns[name]) for name in names], names


def _unflatten(names: tuple[str, ...], values: Any) -> RunColumns:
    return RunColumns(zip(names, values, strict=True))


jax.tree_util.register_pytree_with_keys(RunColumns, _flatten, _unflatten)  # as a dict: a result may go through jax.vmap
