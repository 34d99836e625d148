"""A model is a few pure functions over a pytree of arrays.

A *batch* is a dict of arrays with one leading axis of B examples, plus ``batch["mask"]`` of shape [B]: 1 for a real
example, 0 for padding. Images and features are in ``batch["x"]``, targets in ``batch["y"]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedbraid.core import check_count
from fedbraid.local import APPLIES_MASK, HEAD, NORM, STATISTICS, WEIGHTS, Statistics
from fedbraid.metric import Metric, Metrics, declared_by, declares
from fedbraid.models.targets import Targets, check_targets

Array = jax.Array
Batch = Mapping[str, Any]
PyTree = Any
LOSS, ACCURACY, SQUARED_ERROR = Metric("loss", "lower"), Metric("accuracy", "higher"), Metric("squared_error", "lower")
MAE = Metric("mae", "lower")
RMSE = Metric("rmse", "lower", of=lambda means: means["squared_error"] ** 0.5)


class Model(NamedTuple):
    """A model as pure functions. ``params`` is a pytree of arrays only, so optax and ``vmap`` work on it.

    ``metrics`` and ``loss`` agree: ``total(metrics(params, batch)["loss"])`` is ``loss(params, batch, None)``, up to
    rounding. ``metrics`` is a `fedbraid.Metrics`, which declares whether higher or lower values are better. It may be a
    plain function if all its names are well known (`fedbraid.metric.KNOWN`). ``targets`` says which labels the model
    can have, so that data is checked before training. ``features`` is needed only by methods that compare
    representations (MOON, FedProto).

    >>> import jax, jax.numpy as jnp
    >>> from fedbraid.models import softmax_regression, total
    >>> model = softmax_regression(d=2, classes=3)
    >>> params = model.init(jax.random.key(0))
    >>> batch = {"x": jnp.ones((4, 2)), "y": jnp.array([0, 1, 2, 0]), "mask": jnp.array([1.0, 1.0, 1.0, 0.0])}
    >>> round(float(model.loss(params, batch, None)), 4), round(float(total(model.metrics(params, batch)["loss"])), 4)
    (1.0986, 1.0986)
    """

    init: Callable[[Array], PyTree]  # (key) -> params
    loss: Callable[[PyTree, Batch, Array | None], Array]  # (params, batch, key) -> scalar; no dropout if key is None
    metrics: Callable[[PyTree, Batch], dict[str, tuple[Array, Array]]]  # {name: (sums [B], weights [B])}
    predict: Callable[[PyTree, Array], Array]  # (params, x) -> logits or outputs, evaluation mode
    targets: Targets | None = None  # what the field y must be; None: not checked
    features: Callable[[PyTree, Array], Array] | None = None  # (params, x) -> activations before the last layer
    merge: Callable[[PyTree], PyTree] | None = None  # (params) -> all weights, of a model with frozen parts; see `lora`


def check_sizes(**sizes: int) -> None:
    """Refuse sizes that are not positive whole numbers, naming the argument."""
    for name, size in sizes.items():
        check_count(name, size)


def mask_of(batch: Batch) -> Array:
    """The batch's mask, or all ones if it has none."""
    if "mask" in batch:
        return batch["mask"]
    return jnp.ones(batch["x"].shape[0], jnp.float32)


def ratio(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, and 0 where the denominator is 0 (a batch of padding)."""
    return numerator / jnp.where(denominator > 0, denominator, 1)


def total(metric: tuple[Array, Array]) -> Array:
    """A metric over all examples: the sum of its sums divided by the sum of its weights.

    >>> import jax.numpy as jnp
    >>> float(total((jnp.array([1.0, 0.0, 1.0]), jnp.array([1.0, 1.0, 2.0]))))
    0.5
    """
    sums, weights = metric
    return ratio(jnp.sum(sums), jnp.sum(weights))


class Normalised(NamedTuple):
    """A network with batch normalisation in training mode.

    statistics: names of the leaves of ``params`` that are running statistics.
    train: (params, x, mask, key) -> (outputs, new statistics). It normalises over the rows whose mask is 1. The new
    statistics have the structure of ``params``, with None at all other leaves.
    """

    statistics: tuple[str, ...]
    train: Callable[[PyTree, Array, Array, Array], tuple[Array, PyTree]]


def supervised(
    init: Callable[[Array], PyTree],
    apply: Callable[[PyTree, Array, Array | None], Any],
    per_example: Callable[[Any, Array, Array], Mapping[str, tuple[Array, Array]]],
    penalty: Callable[[PyTree], Array] | None = None,
    targets: Targets | None = None,
    features: Callable[[PyTree, Array, Array | None], Array] | None = None,
    head: tuple[str, ...] = (),
    norm: tuple[str, ...] = (),
    normalised: Normalised | None = None,
) -> Model:
    """A model from a network and a scorer. Masks, means and penalties are applied only here.

    Args:
        init: (key) -> params.
        apply: (params, x, key) -> outputs; ``key`` is None in evaluation mode.
        per_example: (outputs, y, mask) -> {name: (sums [B], weights [B])}, masks applied; one is named ``"loss"``.
            A `fedbraid.Metrics` if it has names that are not well known.
        penalty: (params) -> scalar added to the mean loss, such as l2.
        targets: which labels the model can have.
        features: (params, x, key) -> activations before the last layer; ``apply`` usually calls it.
        head: names of the leaves of the last layer, for methods that treat it apart; empty if it is not known.
        norm: names of the leaves of normalisation layers, statistics included.
        normalised: how a network with batch normalisation is trained; None if it has none.
    """

    def loss(params: PyTree, batch: Batch, key: Array | None = None) -> Array:
        return update(params, batch, key)[0]

    def update(params: PyTree, batch: Batch, key: Array | None = None) -> tuple[Array, PyTree]:
        """The loss, and the new statistics of batch normalisation; () without any, and in evaluation mode."""
        mask, new = mask_of(batch), ()
        if normalised is None or key is None:
            outputs = apply(params, batch["x"], key)
        else:
            outputs, new = normalised.train(params, batch["x"], mask, key)
        value = total(per_example(outputs, batch["y"], mask)["loss"])
        return value if penalty is None else value + penalty(params), new

    def metrics(params: PyTree, batch: Batch) -> dict[str, tuple[Array, Array]]:
        scores = dict(per_example(apply(params, batch["x"], None), batch["y"], mask_of(batch)))
        if penalty is not None:
            sums, weights = scores["loss"]
            scores["loss"] = (sums + weights * penalty(params), weights)
        return scores

    def weights(params: PyTree, batch: Batch) -> Array:
        """The weight of each example in the mean loss; it does not depend on the outputs, only on their shapes."""
        shapes = jax.eval_shape(lambda params, x: apply(params, x, None), params, batch["x"])
        outputs = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        return per_example(outputs, batch["y"], mask_of(batch))["loss"][1]

    setattr(loss, WEIGHTS, weights)
    for function in (loss, update):
        setattr(function, APPLIES_MASK, True)  # the scorer gets the mask: engines need not check padding
    setattr(loss, HEAD, head)
    setattr(loss, NORM, norm)
    if normalised is not None:
        setattr(loss, STATISTICS, Statistics(normalised.statistics, update))
    declared = Metrics(metrics, declared_by(per_example), lambda data: check_targets(model, data))
    represent = features and (lambda params, x: features(params, x, None))
    model = Model(init, loss, declared, lambda params, x: apply(params, x, None), targets, represent)
    return model


@declares(LOSS, ACCURACY)
def score_classes(logits: Array, y: Array, mask: Array) -> dict[str, tuple[Array, Array]]:
    """Cross entropy and top-1 accuracy of integer labels; logits [B, classes]."""
    mask = mask.astype(logits.dtype)
    # Padding may have any label. A real label out of range gives NaN, so that the loss is not silently wrong.
    y = jnp.where(mask > 0, y.astype(jnp.int32), 0)
    return {
        "loss": (cross_entropy(logits, y) * mask, mask),
        "accuracy": ((jnp.argmax(logits, -1) == y) * mask, mask),
    }


@declares(LOSS, SQUARED_ERROR, MAE, RMSE)
def score_values(outputs: Array, y: Array, mask: Array) -> dict[str, tuple[Array, Array]]:
    """Half the squared error as the loss, and squared, absolute and root mean squared error; outputs like ``y``.

    If an example has several values, its errors are summed over them.
    """
    if outputs.shape != y.shape:
        raise ValueError(f"outputs of shape {outputs.shape} for targets 'y' of shape {y.shape}: they must be the same")
    mask = mask.astype(outputs.dtype)
    difference = (outputs - y).reshape(y.shape[0], -1)
    error, absolute = (jnp.sum(f(difference), axis=-1) * mask for f in (jnp.square, jnp.abs))
    return {"loss": (error / 2, mask), "squared_error": (error, mask), "mae": (absolute, mask)}


@declares(LOSS, ACCURACY)
def score_tokens(
    logits: Array, y: Array, mask: Array, *, padding: int = 0, uncounted: Sequence[int] = ()
) -> dict[str, tuple[Array, Array]]:
    """Cross entropy and accuracy of token ids ``y`` [B, T]; logits [B, T, vocab].

    A token counts if its example is real and its id is not ``padding``. An example's weight is its number of such
    tokens. ``uncounted`` ids (unknown word, end of sentence) count in the loss but not in the accuracy.
    """
    y = y.astype(jnp.int32)
    real = (y != padding) & (mask > 0)[:, None]
    y = jnp.where(real, y, 0)
    counted = real
    for token in uncounted:
        counted &= y != token
    weights, counted = real.astype(logits.dtype), counted.astype(logits.dtype)
    return {
        "loss": ((cross_entropy(logits, y) * weights).sum(-1), weights.sum(-1)),
        "accuracy": (((jnp.argmax(logits, -1) == y) * counted).sum(-1), counted.sum(-1)),
    }


class Head(NamedTuple):
    """How a network's last layer is scored: the scorer, the targets, and the outputs in the shape of the targets."""

    score: Metrics
    targets: Targets
    shape: Callable[[Array], Array]


def head(score: str, count: int) -> Head:
    """The head of a network with ``count`` outputs: ``"classes"`` or ``"values"``.

    >>> head("values", 1).shape(jnp.zeros((4, 1))).shape
    (4,)
    """
    if score == "classes":
        if count < 2:
            raise ValueError(
                f"classes must be at least 2, got {count}: a softmax over one class is constant. For a regression set "
                'score = "values"; for two classes set classes = 2'
            )
        return Head(score_classes, Targets("classes", count), lambda outputs: outputs)
    if score == "values":
        one = count == 1
        return Head(score_values, Targets("values"), lambda outputs: outputs[..., 0] if one else outputs)
    raise ValueError(f"score must be 'classes' or 'values', got {score!r}")


SCORES = {"classes": score_classes, "values": score_values, "tokens": score_tokens}
"""How a network's outputs are scored, by the name that adapters and configs use."""


def cross_entropy(logits: Array, y: Array) -> Array:
    """-log softmax(logits)[y] over the last axis; nan where ``y`` is not a class."""
    picked = jnp.take_along_axis(logits, y[..., None], axis=-1, mode="fill", fill_value=jnp.nan)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked
