"""Random numbers that a guarantee rests on: the noise of differential privacy, and the cohorts of private algorithms.

They come from the operating system's generator, in the process that needs them: a client's noise at its site, the
server's noise and the cohorts in the ServerApp. No seed and no key of theirs exists, so that none can be sent, logged,
saved or guessed. (A key of JAX has 64 bits. A server that knows one coordinate of an upload could try all of them.)

Every normal number is the sum of four independent ones, divided by 2, in float64. One number of the usual methods takes
only some of the values near it, and these gaps can show what it was added to (Mironov 2012). Four of them fill the gaps
(N. Holohan, S. Braghin. Secure Random Sampling in Differential Privacy. ESORICS 2021).
"""

from __future__ import annotations

import os
import secrets
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["cohort", "normals"]

PyTree = Any
BLOCK = 1 << 18  # normal numbers that are made at a time: 8 MB of random bytes


def _uniforms(number: int) -> np.ndarray:
    """Independent uniform numbers in (0, 1], multiples of 2^-53."""
    bits = np.frombuffer(os.urandom(8 * number), np.uint64)
    return ((bits >> np.uint64(11)) + np.uint64(1)) * 2.0**-53


def _normals(number: int) -> np.ndarray:
    """Independent standard normal numbers, by the method of Box and Muller; see above for the sum of four."""
    pairs = -(-number // 2)
    radius = np.sqrt(-2 * np.log(_uniforms(4 * pairs))).reshape(4, pairs)
    angle = (2 * np.pi * _uniforms(4 * pairs)).reshape(4, pairs)
    both = np.sum(radius * np.cos(angle), 0), np.sum(radius * np.sin(angle), 0)  # independent of each other
    return np.concatenate(both)[:number] / 2


def normals(shapes: PyTree) -> PyTree:
    """Independent standard normal numbers in the shapes of a tree.

    >>> normals({"w": jax.ShapeDtypeStruct((3,), jnp.float32)})["w"].shape
    (3,)
    """

    def draw(leaf: Any) -> Any:
        flat = np.empty(leaf.size, jnp.dtype(leaf.dtype))
        for start in range(0, leaf.size, BLOCK):
            flat[start : start + BLOCK] = _normals(min(BLOCK, leaf.size - start))
        return jnp.asarray(flat.reshape(leaf.shape))

    return jax.tree.map(draw, shapes)


def cohort(population: int, size: int) -> np.ndarray:
    """``size`` of ``population`` clients, drawn without replacement.

    >>> cohort(5, 5).tolist()
    [0, 1, 2, 3, 4]
    """
    return np.array(sorted(secrets.SystemRandom().sample(range(population), size)), int)
