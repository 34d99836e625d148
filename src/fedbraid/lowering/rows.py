"""A client's matrix, stored as the matrix that all clients start with plus the rows that the client's steps added.

With W0 the shared matrix, X the rows of inputs and D the rows of scaled output gradients so far, the client's matrix is
W0 + X' D. The buffers of X and D are large enough for the client with the most steps. A count says how many rows are
filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from fedbraid.lowering import kernels

__all__ = ["Rows", "Site", "filled", "upright"]

Array = Any


class Rows(NamedTuple):
    """The update of a matrix by one client's steps, ``left' right``. Rows beyond the count are uninitialised."""

    left: Array  # [R, the longer axis of the matrix]
    right: Array  # [R, its shorter axis]


def filled(rows: Rows, count: Array) -> Rows:
    """The rows with zeros beyond the first ``count``: uninitialised memory may hold NaN."""
    return Rows(*(jnp.where(jnp.arange(len(a))[:, None] < count, a, 0) for a in rows))


def upright(matrix: Array) -> Array:
    """The matrix with its longer axis first."""
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix


@dataclass(frozen=True)
class Site:
    """One matrix of a carry that is stored as rows."""

    leaf: int  # its index among the carry's leaves
    rows: int  # rows that a step adds
    most: int  # rows of the client with the most steps
    dtype: Any  # of left
    start: Array  # the matrix that all clients start with
    base: Array  # start in the dtype of left, with its longer axis first

    @property
    def turned(self) -> bool:
        """Whether the longer axis is the second."""
        return self.start.shape[0] < self.start.shape[1]

    def empty(self, lanes: int) -> Rows:
        """Buffers for the rows of ``lanes`` clients."""
        long, short = self.base.shape
        buffer = jnp.zeros
        if kernels.available():
            from fedbraid.lowering.kernels.grown import empty as buffer
        return Rows(buffer((lanes, self.most, long), self.dtype), buffer((lanes, self.most, short), self.start.dtype))

    def added(self, rows: Rows) -> Array:
        """The sum that all rows add to the start."""
        first, second = self._factors(Rows(rows.left, rows.right.astype(rows.left.dtype)))
        total = jnp.matmul(first.T, second, preferred_element_type=self.start.dtype)
        return lax.optimization_barrier(total)  # it is used several times, and XLA would recompute it for each use

    def added_on(self, rows: Rows, lane: Array, count: Array) -> Array:
        """The sum that the first ``count`` rows on one of several lanes add to the start."""
        if not kernels.available():
            return self.added(filled(Rows(*(a[lane] for a in rows)), count))
        from fedbraid.lowering.kernels.grown import total

        return total(*self._factors(rows), lane, count)

    def _factors(self, rows: Rows) -> tuple[Array, Array]:
        """The rows of the matrix's first axis and those of its second."""
        return (rows.right, rows.left) if self.turned else (rows.left, rows.right)
