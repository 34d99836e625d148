"""Evaluation of one model on a test split: pooled over examples, and client by client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.data.federated import Split
from fedbraid.local import MASK

__all__ = ["client_values", "evaluator", "in_batches", "score", "summarize"]


def evaluator(metrics: Callable, split: Split, *, batch_size: int = 256) -> Callable[[Any], dict[str, Any]]:
    """A function of params: per metric its sums and weights over each client's examples, ``{name: [2, clients]}``.

    ``metrics(params, batch)`` gives ``{name: (sum per example, weight per example)}``, as a model's does. Batches are
    preprocessed as the split says, without augmentation.
    """
    compiled = jax.jit(partial(score, metrics, clients=split.num_clients, preprocess=split.preprocess))
    batches, owners = in_batches(split, batch_size=batch_size)
    return lambda params: compiled(params, batches, owners)


def in_batches(split: Split, *, batch_size: int = 256) -> tuple[dict[str, Any], Any]:
    """All examples of a split as stored, in batches, the last one padded; and the client of each row."""
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
) -> dict[str, Any]:
    """Sums and weights of every metric over each client's rows of `in_batches`; may be traced and mapped.

    preprocess: ``(batch, key, train) -> batch``, called without a key and with ``train=False``.
    """

    def of_batch(batch: dict[str, Any]) -> dict[str, Any]:
        return metrics(params, batch if preprocess is None else preprocess(batch, None, False))

    scores = jax.lax.map(of_batch, batches)
    by_client = lambda leaf: jax.ops.segment_sum(leaf.reshape(-1), owners, clients)  # noqa: E731
    return {name: jnp.stack([by_client(s), by_client(w)]) for name, (s, w) in scores.items()}


def client_values(sums: Any) -> Any:
    """Each client's own metric; nan for a client without test examples."""
    return sums[0] / jnp.where(sums[1] > 0, sums[1], jnp.nan)


def summarize(scores: Mapping[str, Any], prefix: str = "test_") -> dict[str, Any]:
    """Pooled value, mean over clients, and the bad end of the clients: 10th percentile and worst.

    ``client_p10`` is what a tenth of the clients do worse than: low for accuracy, high for a loss or an error.
    """
    row = {}
    for name, sums in scores.items():
        values = client_values(sums)
        sign = -1.0 if "loss" in name or "error" in name else 1.0
        row[prefix + name] = jnp.sum(sums[0]) / jnp.sum(sums[1])
        row[f"{prefix}{name}_client_mean"] = jnp.nanmean(values)
        row[f"{prefix}{name}_client_p10"] = sign * jnp.nanpercentile(sign * values, 10)
        row[f"{prefix}{name}_client_worst"] = sign * jnp.nanmin(sign * values)
    return row
