"""Extreme eigenvalues of a symmetric operator that is known by its products with vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["extreme", "lowest"]


class _Operator:
    """What `scipy.sparse.linalg.aslinearoperator` needs: a product, a shape and a dtype."""

    def __init__(self, matvec: Callable, size: int) -> None:
        self.matvec, self.shape, self.dtype = matvec, (size, size), np.dtype(np.float64)


def extreme(
    product: Callable,
    size: int,
    tolerance: float,
    rng: np.random.Generator,
    near: np.ndarray | None = None,
    which: str = "LA",
) -> tuple[float, np.ndarray]:
    """The largest eigenvalue ("LA"), or the largest in magnitude ("LM"), with its eigenvector.

    ``near`` is a guess of the eigenvector. Noise is added to it: if it were an eigenvector of another eigenvalue,
    Lanczos would not leave it.
    """
    from scipy.sparse.linalg import ArpackNoConvergence, aslinearoperator, eigsh

    operator = aslinearoperator(_Operator(product, size))
    start = rng.standard_normal(size)
    if near is not None:
        start = near + 0.3 * start / np.linalg.norm(start)
    if not np.any(product(start)):
        return 0.0, start / np.linalg.norm(start)
    for loosen in (1.0, 5.0, 20.0):
        tol: Any = tolerance * loosen
        try:
            values, vectors = eigsh(operator, k=1, which=which, tol=tol, v0=start, ncv=min(size, 8), maxiter=40)
            return float(values[0]), vectors[:, 0]
        except ArpackNoConvergence:
            continue
    raise ValueError(f"Lanczos found no extreme eigenvalue within {tolerance * 20:.0%}: is the loss smooth here?")


def lowest(
    product: Callable, size: int, top: float, tolerance: float, rng: np.random.Generator
) -> tuple[float, np.ndarray]:
    """The smallest eigenvalue, to ``tolerance`` times the largest: ``top`` minus the largest of ``top I - H``."""
    scale = max(abs(top), 1e-30)
    value, vector = extreme(lambda v: scale * v - product(v), size, tolerance, rng)
    return scale - value, vector
