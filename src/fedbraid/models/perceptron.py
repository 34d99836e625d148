"""The multi-layer perceptron.

Karimireddy et al., "Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning", 2021, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import jax

from fedbraid.lowering.operations import dense
from fedbraid.models.layers import as_floats, dense_init
from fedbraid.models.model import Model, check_sizes, head, supervised


def mlp(d: int, classes: int, *, hidden: Sequence[int] = (300, 100), score: str = "classes") -> Model:
    """Dense layers with ReLU between them: ``x`` [B, d] (or images of d values), ``y`` [B] in 0 .. classes - 1.

    ``score="values"`` makes it a regression with ``classes`` real numbers per example: ``y`` [B], or [B, classes] if
    there are several. ``hidden=(300, 100)`` is the network of Mime's ablation on EMNIST-62. Kernels start
    Glorot-uniform, biases zero.

    >>> import jax
    >>> params = mlp(d=784, classes=62).init(jax.random.key(0))
    >>> [layer["w"].shape for layer in params]
    [(784, 300), (300, 100), (100, 62)]
    """
    check_sizes(d=d, classes=classes)
    if not isinstance(hidden, list | tuple):
        raise ValueError(f"hidden must be a list of widths such as [300, 100], got {hidden!r}")
    for width in hidden:
        check_sizes(hidden=width)
    widths, last = [d, *hidden, classes], head(score, classes)

    def init(key):
        keys = jax.random.split(key, len(widths) - 1)
        return [dense_init(k, n, m) for k, (n, m) in zip(keys, pairwise(widths), strict=True)]

    def features(params, x, key):
        x = as_floats(x, (d,))
        for layer in params[:-1]:
            x = jax.nn.relu(dense(layer, x))
        return x

    def apply(params, x, key):
        return last.shape(dense(params[-1], features(params, x, key)))

    return supervised(init, apply, last.score, targets=last.targets, features=features, head=(str(len(hidden)),))
