"""The zoo's problem in NumPy, for closed forms and hand-written rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fedbraid.data.federated import Split


class Quadratics(NamedTuple):
    """Client losses 0.5 x'A x - b'x + const over x = (w, b); one of each per client."""

    A: np.ndarray
    b: np.ndarray
    sizes: np.ndarray

    def gradient(self, i: int, x: np.ndarray) -> np.ndarray:
        return self.A[i] @ x - self.b[i]

    def weights(self, weighting: str, ids: Any = None) -> np.ndarray:
        """The weights of the clients ``ids``; their sum is 1."""
        n = self.sizes if ids is None else self.sizes[ids]
        w = n.astype(float) if weighting == "examples" else np.ones(len(n))
        return w / w.sum()

    def optimum(self, weights: np.ndarray) -> np.ndarray:
        """The minimizer of the weighted sum of client losses."""
        return np.linalg.solve(np.tensordot(weights, self.A, 1), weights @ self.b)


def quadratics(split: Split) -> Quadratics:
    A, b = [], []
    for i in range(split.num_clients):
        own = split.client(i)
        rows = np.column_stack([own["x"], np.ones(len(own["y"]))])
        A.append(rows.T @ rows / len(rows))
        b.append(rows.T @ own["y"] / len(rows))
    return Quadratics(np.array(A), np.array(b), np.asarray(split.sizes))


def flat(params: Any) -> np.ndarray:
    """The zoo's parameters, or a tree of their shape, as one vector (per client, if stacked)."""
    w, b = np.asarray(params["w"]), np.asarray(params["b"])
    return np.concatenate([w, b[..., None]], -1)
