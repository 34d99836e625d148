"""Linear models, convex in their parameters. They start at zero: the seed matters through the data alone."""

from __future__ import annotations

import jax.numpy as jnp

from fedbraid.models.layers import as_floats, dense
from fedbraid.models.model import Model, score_classes, supervised


def softmax_regression(d: int, classes: int, *, l2: float = 0.0) -> Model:
    """Multinomial logistic regression: ``x`` [B, d] (or images of d values), ``y`` [B] in 0 .. classes - 1.

    Loss: mean cross entropy + l2/2 ||w||^2, the bias not penalised. ``params`` is a dict of ``w`` [d, classes] and
    ``b`` [classes].

    >>> import jax
    >>> params = softmax_regression(d=784, classes=62).init(jax.random.key(0))
    >>> params["w"].shape, params["b"].shape
    ((784, 62), (62,))
    """
    check_sizes(d=d, classes=classes)

    return supervised(
        lambda key: {"w": jnp.zeros((d, classes)), "b": jnp.zeros(classes)},
        lambda params, x, key: dense(params, as_floats(x, (d,))),
        score_classes,
        l2_penalty(l2),
    )


def l2_penalty(l2):
    """l2/2 ||w||^2, or None when ``l2`` is the number 0. A traced ``l2`` is let through, so it can be swept over."""
    if isinstance(l2, int | float):
        if not l2 >= 0:
            raise ValueError(f"l2 must be 0 or more, got {l2}")
        if l2 == 0:
            return None
    return lambda params: 0.5 * l2 * jnp.sum(params["w"] ** 2)


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not positive whole numbers, naming the argument."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {size!r}")
