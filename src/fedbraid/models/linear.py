"""Linear models, convex in their parameters. They start at zero, so the seed of the initialisation has no effect.

Losses are means over examples. If a paper sums over a client's n examples and adds (lambda/2) ||w||^2, its loss is n
times the loss here with ``l2 = lambda / n``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedbraid.lowering.operations import dense, product
from fedbraid.metric import declares
from fedbraid.models.layers import as_floats
from fedbraid.models.model import (
    ACCURACY,
    LOSS,
    Array,
    Model,
    PyTree,
    check_sizes,
    head,
    score_values,
    supervised,
)
from fedbraid.models.targets import Targets


def least_squares(d: int, *, l2: float = 0.0, intercept: bool = False) -> Model:
    """Linear least squares: the mean of (x.w - y)^2 / 2, plus l2/2 ||w||^2. ``x`` [B, d], ``y`` [B].

    With the factor 1/2 the Hessian is the features' second moment. Metrics: ``loss``, ``squared_error`` without this
    factor, ``rmse`` and ``mae``.

    Args:
        d: the number of features.
        l2: weight of the penalty; the intercept is not penalised.
        intercept: also fit a constant ``b``.

    >>> import jax, jax.numpy as jnp
    >>> model = least_squares(2)
    >>> batch = {"x": jnp.eye(2), "y": jnp.array([2.0, 0.0]), "mask": jnp.ones(2)}
    >>> jax.grad(model.loss)(model.init(jax.random.key(0)), batch, None)["w"].tolist()
    [-1.0, 0.0]
    """
    check_sizes(d=d)
    return supervised(
        _zeros((d,), (), intercept), _linear(d), score_values, _l2_penalty(l2), Targets("values"), _inputs(d)
    )


def logistic(d: int, *, l2: float = 0.0, intercept: bool = False) -> Model:
    """Binary logistic regression: the mean of log(1 + exp(-b x.w)), plus l2/2 ||w||^2. ``x`` [B, d], ``y`` [B].

    The label b is +1 where ``y > 0`` and -1 elsewhere, so ``y`` may be in {0, 1} or in {-1, +1}. Pathak and Wainwright,
    "FedSplit", 2020, eq. (20).

    >>> import jax, jax.numpy as jnp
    >>> model = logistic(1)
    >>> batch = {"x": jnp.array([[1.0], [3.0]]), "y": jnp.array([1, 0]), "mask": jnp.ones(2)}
    >>> jax.grad(model.loss)(model.init(jax.random.key(0)), batch, None)["w"].tolist()
    [0.5]
    """
    check_sizes(d=d)

    @declares(LOSS, ACCURACY)
    def score(outputs, y, mask):
        mask = mask.astype(outputs.dtype)
        sign = jnp.where(y > 0, 1, -1).astype(outputs.dtype)
        return {
            "loss": (jax.nn.softplus(-sign * outputs) * mask, mask),
            "accuracy": (((outputs > 0) == (y > 0)) * mask, mask),
        }

    return supervised(
        _zeros((d,), (), intercept), _linear(d), score, _l2_penalty(l2), Targets("two classes"), _inputs(d)
    )


def one_versus_all(d: int, classes: int, *, l2: float = 0.0, intercept: bool = False) -> Model:
    """One logistic regression per class: the mean of sum_k log(1 + exp(-b_k x.w_k)), plus l2/2 ||w||^2.

    ``x`` [B, d], ``y`` [B] in 0 .. classes - 1; b_k is +1 for the label's class and -1 for the others. The prediction
    is the class of the largest x.w_k. Pathak and Wainwright, "FedSplit", 2020, eq. (21).

    >>> import jax
    >>> one_versus_all(d=6785, classes=62).init(jax.random.key(0))["w"].shape
    (6785, 62)
    """
    check_sizes(d=d, classes=classes)

    @declares(LOSS, ACCURACY)
    def score(outputs, y, mask):
        mask = mask.astype(outputs.dtype)
        sign = jnp.where(y[:, None] == jnp.arange(classes), 1, -1).astype(outputs.dtype)
        return {
            "loss": (jax.nn.softplus(-sign * outputs).sum(-1) * mask, mask),
            "accuracy": ((jnp.argmax(outputs, -1) == y) * mask, mask),
        }

    targets = Targets("classes", classes)
    return supervised(
        _zeros((d, classes), (classes,), intercept), _linear(d), score, _l2_penalty(l2), targets, _inputs(d)
    )


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
    last = head("classes", classes)
    return supervised(
        _zeros((d, classes), (classes,), True), _linear(d), last.score, _l2_penalty(l2), last.targets, _inputs(d)
    )


def _zeros(w: tuple[int, ...], b: tuple[int, ...], intercept: bool) -> Callable[[Array], PyTree]:
    return lambda key: {"w": jnp.zeros(w)} | ({"b": jnp.zeros(b)} if intercept else {})


def _linear(d: int) -> Callable[[PyTree, Array, Array | None], Array]:
    def apply(params, x, key):
        x = as_floats(x, (d,))
        return dense(params, x) if "b" in params else product(x, params["w"])

    return apply


def _inputs(d: int) -> Callable[[PyTree, Array, Array | None], Array]:
    """The features of a model of one layer: its inputs."""
    return lambda params, x, key: as_floats(x, (d,))


def _l2_penalty(l2: Any) -> Callable[[PyTree], Array] | None:
    """l2/2 ||w||^2, or None if ``l2`` is the number 0. ``l2`` may be traced, so that a sweep can vary it."""
    if isinstance(l2, int | float):
        if not l2 >= 0:
            raise ValueError(f"l2 must be 0 or more, got {l2}")
        if l2 == 0:
            return None
    return lambda params: 0.5 * l2 * jnp.sum(params["w"] ** 2)
