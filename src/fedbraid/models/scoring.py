"""Further metrics of a model, on request: F1 and AUC for classes, R2 for values.

None of them is a mean over examples. Each is computed from sums that are (`fedbraid.metric.part`), so that it is exact
over batches, clients and devices; a deployed client still sends only sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedbraid.metric import Metric, Metrics, as_metrics, declared_by, part
from fedbraid.models.model import Array, Batch, Model, PyTree, mask_of

__all__ = ["EXTRA", "with_metrics"]

BINS = 512  # of scores, for the AUC
CLASSES = 100  # the AUC keeps 512 counts per example and class

Sums = dict[str, tuple[Array, Array]]
Extra = Callable[[Array, Array, Array], Sums]


def with_metrics(model: Model, names: Sequence[str], *, centre: float = 0.0) -> Model:
    """``model`` with further metrics: ``"f1"`` and ``"auc"`` of classes, ``"r2"`` of values.

    centre: a number near the mean of the targets. It keeps R2 accurate in float32 if the mean is much larger than the
        deviation; it changes nothing else.

    >>> from fedbraid.models import least_squares
    >>> [metric.name for metric in with_metrics(least_squares(2), ["r2"]).metrics.declared if metric.shown]
    ['loss', 'squared_error', 'mae', 'rmse', 'r2']
    """
    kind = None if model.targets is None else model.targets.kind
    extras: list[Extra] = []
    declared: list[Metric] = []
    for name in names:
        if name not in EXTRA:
            raise ValueError(f"metrics that can be added are {', '.join(EXTRA)}, got {name!r}")
        kinds, make = EXTRA[name]
        if kind not in kinds:
            raise ValueError(f"the metric {name!r} is for models of {' or '.join(kinds)}; this model is for {kind}")
        metrics = make(centre)
        extras.append(metrics.function)
        declared += metrics.declared
    if not extras:
        return model

    def metrics(params: PyTree, batch: Batch) -> Sums:
        outputs, y, mask = model.predict(params, batch["x"]), batch["y"], mask_of(batch)
        found = dict(model.metrics(params, batch))
        for extra in extras:
            found |= extra(outputs, y, mask)
        return found

    own = as_metrics(model.metrics)
    return model._replace(metrics=Metrics(metrics, (*declared_by(own), *declared), own.check))


def _f1(centre: float) -> Metrics:
    """The mean over classes of 2 tp / (predicted + actual); classes that neither occur nor are predicted do not count.

    For two classes with one output it is the F1 of the positive class.
    """

    def sums(outputs: Array, y: Array, mask: Array) -> Sums:
        if outputs.ndim == 1:
            guess, truth = (outputs > 0)[:, None], (y > 0)[:, None]
        else:
            classes = jnp.arange(outputs.shape[-1])
            guess, truth = jnp.argmax(outputs, -1)[:, None] == classes, y[:, None] == classes
        real = jnp.broadcast_to(mask[:, None], guess.shape).astype(jnp.result_type(float))
        return {"f1_hits": (guess * truth * real, real), "f1_size": ((1.0 * guess + truth) * real, real)}

    def value(means):
        hits, size = means["f1_hits"], means["f1_size"]
        each = 2 * hits / jnp.where(size > 0, size, 1)
        count = jnp.sum(size > 0, -1)
        return jnp.where(count > 0, jnp.sum(each, -1) / jnp.maximum(count, 1), jnp.nan)

    return Metrics(sums, (part("f1_hits"), part("f1_size"), Metric("f1", "higher", of=value)))


def _auc(centre: float) -> Metrics:
    """The area under the ROC curve: how often a positive example has a higher score than a negative one.

    For several classes it is the mean over classes of one class against the others. Scores are counted in 512 bins, so
    it is exact up to the order of scores in the same bin, which count one half. nan where one side has no examples.
    """

    def sums(outputs: Array, y: Array, mask: Array) -> Sums:
        if outputs.ndim == 1:
            score, truth = outputs[:, None], (y > 0)[:, None]
        else:
            if outputs.shape[-1] > CLASSES:
                raise ValueError(f"auc is computed for at most {CLASSES} classes, this model has {outputs.shape[-1]}")
            classes = jnp.arange(outputs.shape[-1])
            rest = jax.vmap(lambda k: jax.nn.logsumexp(jnp.where(classes == k, -jnp.inf, outputs), -1))(classes).T
            score, truth = outputs - rest, y[:, None] == classes  # the log odds of each class
        bins = jnp.clip((BINS * jax.nn.sigmoid(score / 2)).astype(jnp.int32), 0, BINS - 1)
        real = jnp.broadcast_to(mask[:, None, None], (*bins.shape, BINS)).astype(jnp.result_type(float))
        there = jax.nn.one_hot(bins, BINS) * real
        return {
            "auc_positive": (there * truth[..., None], real),
            "auc_negative": (there * ~truth[..., None], real),
        }

    def value(means):
        positive, negative = means["auc_positive"], means["auc_negative"]
        below = jnp.cumsum(negative, -1) - negative / 2
        pairs = positive.sum(-1) * negative.sum(-1)
        each = jnp.where(pairs > 0, (positive * below).sum(-1) / jnp.where(pairs > 0, pairs, 1), jnp.nan)
        return jnp.nanmean(each, -1)

    return Metrics(sums, (part("auc_positive"), part("auc_negative"), Metric("auc", "higher", of=value)))


def _r2(centre: float) -> Metrics:
    """1 - squared error / variance of the targets; nan for a client whose targets are all the same."""

    def sums(outputs: Array, y: Array, mask: Array) -> Sums:
        values = (y - centre).reshape(y.shape[0], -1).astype(jnp.result_type(float))
        real = jnp.broadcast_to(mask[:, None], values.shape).astype(values.dtype)
        return {"r2_mean": (values * real, real), "r2_square": (values**2 * real, real)}

    def value(means):
        variance = jnp.sum(means["r2_square"] - means["r2_mean"] ** 2, -1)
        least = 1e-6 * jnp.sum(means["r2_square"], -1)  # below it, float32 has lost the variance
        return jnp.where(variance > least, 1 - means["squared_error"] / jnp.where(variance > 0, variance, 1), jnp.nan)

    return Metrics(sums, (part("r2_mean"), part("r2_square"), Metric("r2", "higher", of=value)))


EXTRA: dict[str, tuple[tuple[str, ...], Callable[[float], Metrics]]] = {
    "f1": (("classes", "two classes"), _f1),
    "auc": (("classes", "two classes"), _auc),
    "r2": (("values",), _r2),
}
"""The metrics that can be added: the kinds of targets they are for, and how they are made."""
