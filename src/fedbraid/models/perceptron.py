"""The multi-layer perceptron.

Karimireddy et al., "Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning", 2021, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax

from fedbraid.core import check_choice
from fedbraid.lowering.operations import dense
from fedbraid.models.layers import as_floats, batch_norm, dense_init, norm_init
from fedbraid.models.model import Model, Normalised, check_sizes, head, supervised


def mlp(
    d: int, classes: int, *, hidden: Sequence[int] = (300, 100), score: str = "classes", norm: str = "none"
) -> Model:
    """Dense layers with ReLU between them: ``x`` [B, d] (or images of d values), ``y`` [B] in 0 .. classes - 1.

    ``score="values"`` makes it a regression with ``classes`` real numbers per example: ``y`` [B], or [B, classes] if
    there are several. ``hidden=(300, 100)`` is the network of Mime's ablation on EMNIST-62. Kernels start
    Glorot-uniform, biases zero. ``norm="batch"`` puts batch normalisation before every ReLU: such a network is trained
    by methods that keep its statistics on the clients (``fedbn``).

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
    check_choice("norm", norm, ("none", "batch"))
    widths, last, normed = [d, *hidden, classes], head(score, classes), norm == "batch" and bool(hidden)

    def init(key):
        keys = jax.random.split(key, len(widths) - 1)
        layers: list[Any] = [dense_init(k, n, m) for k, (n, m) in zip(keys, pairwise(widths), strict=True)]
        if normed:
            layers[:-1] = [layer | {"norm": norm_init(m)} for layer, m in zip(layers[:-1], hidden, strict=True)]
        return layers

    def hidden_values(params, x, mask):
        x, new = as_floats(x, (d,)), []
        for layer in params[:-1]:
            x = dense(layer, x)
            if normed:
                x, found = batch_norm(layer["norm"], x, mask)
                new.append({"w": None, "b": None, "norm": {"scale": None, "shift": None, **found}})
            x = jax.nn.relu(x)
        return x, [*new, {"w": None, "b": None}]

    def features(params, x, key):
        return hidden_values(params, x, None)[0]

    def run(params, x, mask):
        x, new = hidden_values(params, x, mask)
        return last.shape(dense(params[-1], x)), new

    names = [f"{i}.norm.{leaf}" for i in range(len(hidden)) for leaf in ("scale", "shift", "mean", "variance")]
    statistics = tuple(name for name in names if name.endswith(("mean", "variance")))
    return supervised(
        init,
        lambda params, x, key: run(params, x, None)[0],
        last.score,
        targets=last.targets,
        features=features,
        head=(str(len(hidden)),),
        norm=tuple(names) if normed else (),
        normalised=Normalised(statistics, lambda params, x, mask, key: run(params, x, mask)) if normed else None,
    )
