"""Evaluation of a model on a test split: over all examples, and for each client.

The *score* of a metric is an array [2, clients]: each client's sum over its examples, and the sum of their weights. A
sum that other metrics are computed from may be a vector per example; its score then is [2, clients, size].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import StructureError, failure, place_of
from fedbraid.data.federated import Split
from fedbraid.local import MASK
from fedbraid.lowering import captured
from fedbraid.metric import (
    DEVIATION,
    GINI,
    MEAN,
    WORST,
    WORST_TENTH,
    Metric,
    declared_by,
    metric_of_column,
    shown_values,
)

__all__ = [
    "Evaluator",
    "client_values",
    "evaluator",
    "in_batches",
    "metrics_of",
    "score",
    "summarize",
]

Scores = dict[str, Any]


class Evaluator(NamedTuple):
    """A function ``params -> {name: [2, clients]}`` of scores, with the declared metrics."""

    scores: Callable[[Any], Scores]
    declared: tuple[Metric, ...] = ()

    def __call__(self, params: Any) -> Scores:
        return self.scores(params)

    def summary(self, params: Any, prefix: str = "test_") -> dict[str, Any]:
        """The scores as one row of columns; see `summarize`."""
        return summarize(self.scores(params), prefix, self.declared)

    def by_client(self, params: Any, prefix: str = "test_") -> dict[str, Any]:
        """Every metric for each client; see `client_values`."""
        return {prefix + name: values for name, values in client_values(self.scores(params), self.declared).items()}


def evaluator(metrics: Callable, split: Split, *, batch_size: int = 256) -> Evaluator:
    """A function ``params -> {name: [2, clients]}``: sums and weights of each metric over each client's examples.

    ``metrics(params, batch)`` returns ``{name: (sums [B], weights [B])}``, like a model's metrics. Batches are
    preprocessed as the split says, without augmentation. Declare metrics that are not well known with
    `fedbraid.Metrics`:

    >>> import fedbraid as fb
    >>> split = Split.from_clients([{"x": np.array([1.0, 3.0])}, {"x": np.array([5.0])}])
    >>> def regret(params, batch):
    ...     return {"regret": ((batch["x"] - params) * batch["mask"], batch["mask"])}
    >>> evaluate = evaluator(fb.Metrics(regret, (fb.Metric("regret", better="lower"),)), split)
    >>> {name: float(value) for name, value in evaluate.summary(1.0).items()}["test_regret_client_worst"]
    4.0
    """
    compiled = captured.jit(partial(score, metrics, clients=split.num_clients, preprocess=split.preprocess))
    batches, owners = in_batches(split, batch_size=batch_size)
    return Evaluator(lambda params: compiled(params, batches, owners), declared_by(metrics))


def metrics_of(metrics: Callable, params: Any, split: Split) -> tuple[Metric, ...]:
    """The metrics that ``metrics(params, batch)`` gives, found by tracing, without computing them.

    Results that are not sums and weights per example are refused, and so is a metric whose direction is neither
    declared nor well known.

    >>> split = Split.from_clients([{"x": np.ones(3, np.float32)}])
    >>> metrics_of(lambda params, batch: {"loss": (batch["x"] * params, batch["mask"])}, 1.0, split)
    (Metric(name='loss', better='lower'),)
    """
    canonical = jax.dtypes.canonicalize_dtype
    batch = {name: jax.ShapeDtypeStruct((PROBE, *a.shape[1:]), canonical(a.dtype)) for name, a in split.arrays.items()}
    batch[MASK] = jax.ShapeDtypeStruct((PROBE,), jnp.result_type(float))
    declared = declared_by(metrics)
    try:
        found = jax.eval_shape(partial(_of_batch, metrics, split.preprocess), params, batch)
    except Exception as error:
        if not place_of(error):  # not in the user's code
            raise
        shapes = ", ".join(f"{name} {one.dtype}{list(one.shape)}" for name, one in batch.items())
        raise StructureError(f"{failure('the loss or the metrics', error)} (batch as stored: {shapes})") from error
    _check_sums(found, declared)
    names = shown_values(dict.fromkeys(found), [m for m in declared if m.of is None])
    computed = [metric.name for metric in declared if metric.of is not None]
    return tuple(metric_of_column(name, declared) for name in [*names, *computed])


PROBE = 3  # rows of the batch with which the shapes of metrics are checked


def _check_sums(found: Any, declared: Iterable[Metric]) -> None:
    """Refuse results of metrics that are not ``{name: (sums [B], weights [B])}``."""
    wanted = (
        "metrics(params, batch) must return {name: (sums, weights)}, with one number per example in both, for example "
        '{"accuracy": (correct * batch["mask"], batch["mask"])}. The engine adds them up over batches and divides'
    )
    if not isinstance(found, Mapping):
        raise ValueError(f"metrics returned a {type(found).__name__}: {wanted}")
    hidden = {metric.name for metric in declared if not metric.shown}
    for name, pair in found.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            shape = getattr(pair, "shape", None)
            what = type(pair).__name__ if shape is None else f"an array of shape {shape_words(shape)}"
            raise ValueError(f"metric {name!r} is {what} instead of a pair: {wanted}")
        for what, leaf in zip(("sums", "weights"), pair, strict=True):
            shape = tuple(getattr(leaf, "shape", ()))
            right = shape[:1] == (PROBE,) and (len(shape) == 1 or name in hidden)
            if not right or shape != tuple(getattr(pair[0], "shape", ())):
                raise ValueError(
                    f"the {what} of metric {name!r} have shape {shape_words(shape)} for a batch of B examples, not "
                    f"(B,): {wanted}"
                )


def shape_words(shape: tuple[int, ...]) -> str:
    """A shape of the probing batch, with B for its number of rows."""
    sizes = ["B" if i == 0 and size == PROBE else str(size) for i, size in enumerate(shape)]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def in_batches(split: Split, *, batch_size: int = 256) -> tuple[dict[str, Any], Any]:
    """All examples of a split as stored, in batches (the last one is padded), and the client of each row."""
    n = split.num_examples
    batch_size = min(batch_size, max(n, 1))
    pad = -n % batch_size
    owner = np.repeat(np.arange(split.num_clients), split.sizes)

    def batched(array: np.ndarray) -> Any:
        filled = np.concatenate([array, np.zeros((pad, *array.shape[1:]), array.dtype)]) if pad else np.asarray(array)
        return jnp.asarray(filled.reshape(-1, batch_size, *array.shape[1:]))

    batches = {name: batched(array) for name, array in split.arrays.items()}
    batches[MASK] = batched(np.ones(n, np.float32)).astype(jnp.result_type(float))
    return batches, jnp.asarray(np.concatenate([owner, np.zeros(pad, owner.dtype)]))


def score(
    metrics: Callable,
    params: Any,
    batches: dict[str, Any],
    owners: Any,
    *,
    clients: int,
    preprocess: Callable | None = None,
) -> Scores:
    """Sums and weights of every metric over each client's rows of `in_batches`; works under ``jit`` and ``vmap``.

    preprocess: ``(batch, key, train) -> batch``, called without a key and with ``train=False``.
    """
    scores = jax.lax.map(partial(_of_batch, metrics, preprocess, params), batches)

    def by_client(leaf: Any) -> Any:
        return jax.ops.segment_sum(leaf.reshape(-1, *leaf.shape[2:]), owners, clients)

    return {name: jnp.stack([by_client(s), by_client(w)]) for name, (s, w) in scores.items()}


def _of_batch(metrics: Callable, preprocess: Callable | None, params: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return metrics(params, batch if preprocess is None else preprocess(batch, None, False))


def client_values(scores: Mapping[str, Any], declared: Iterable[Metric] = ()) -> dict[str, Any]:
    """Every metric for each client; nan for a client without test examples.

    >>> client_values({"loss": jnp.array([[1.0, 6.0], [1.0, 2.0]])})["loss"].tolist()
    [1.0, 3.0]
    """
    means = {name: sums[0] / jnp.where(sums[1] > 0, sums[1], jnp.nan) for name, sums in scores.items()}
    return shown_values(means, declared)


def summarize(
    scores: Mapping[str, Any], prefix: str = "test_", declared: Iterable[Metric] = (), *, statistics: bool = True
) -> dict[str, Any]:
    """Scores as one row of columns: for every metric its value over all examples, and five statistics over clients.

    ``_client_mean`` is the mean of the clients' own values, ``_client_worst`` is the worst of them. A tenth of the
    clients are worse than ``_client_worst_tenth``: it is the 10th percentile if higher is better, the 90th if lower is
    better. ``_client_deviation`` is the standard deviation of the clients' values, ``_client_gini`` their Gini
    coefficient: half the mean absolute difference of two clients, divided by the mean; 0 means that all are equal. It
    is nan if a value is negative. ``declared`` gives the direction of metrics that are not well known, and the metrics
    computed from others. Without ``statistics`` there are only the values over all examples.

    >>> scores = {"loss": jnp.array([[1.0, 6.0], [1.0, 2.0]])}  # one client with loss 1, another with 6 / 2
    >>> {name.removeprefix("loss"): round(float(value), 2) for name, value in summarize(scores, "").items()}
    {'': 2.33, '_client_mean': 2.0, '_client_worst_tenth': 2.8, '_client_worst': 3.0, '_client_deviation': 1.0, \
'_client_gini': 0.25}
    """
    row, declared = {}, tuple(declared)
    pooled = shown_values({name: jnp.sum(s[0], 0) / jnp.sum(s[1], 0) for name, s in scores.items()}, declared)
    if not statistics:
        return {prefix + name: value for name, value in pooled.items()}
    for name, values in client_values(scores, declared).items():
        sign = metric_of_column(name, declared).sign
        row[prefix + name] = pooled[name]
        row[prefix + name + MEAN] = jnp.nanmean(values)
        row[prefix + name + WORST_TENTH] = sign * jnp.nanpercentile(sign * values, 10)
        row[prefix + name + WORST] = sign * jnp.nanmin(sign * values)
        row[prefix + name + DEVIATION] = jnp.nanstd(values)
        row[prefix + name + GINI] = _gini(values)
    return row


def _gini(values: Any) -> Any:
    """The Gini coefficient of the clients' values; clients without a value (nan) do not count."""
    there = jnp.isfinite(values)
    n = jnp.sum(there)
    ordered = jnp.sort(jnp.where(there, values, jnp.inf))  # the missing ones last
    place = jnp.arange(1, len(values) + 1)
    total = jnp.sum(jnp.where(there, values, 0))
    ranked = jnp.sum(jnp.where(place <= n, (2 * place - n - 1).astype(values.dtype) * ordered, 0))
    gini = ranked / jnp.where(total > 0, n.astype(values.dtype) * total, 1)
    return jnp.where(jnp.any(there & (values < 0)) | (n == 0), jnp.nan, gini)
