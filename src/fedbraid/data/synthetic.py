"""Synthetic federated data: the problems of the papers, and text in the shape of StackOverflow for benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.partition import log_normal_sizes
from fedbraid.data.preprocess import Pipeline
from fedbraid.problems import conditioned_linear, gaussian_linear, gaussian_logistic

__all__ = ["SYNTHETIC", "conditioned", "heterogeneous", "least_squares", "logistic", "sentences", "sentences_data"]


def least_squares(
    *, clients: int = 25, d: int = 100, size: int = 500, variance: float = 0.25, drift: float = 0.0, seed: int = 0
) -> FederatedData:
    """FedSplit, App. B.1: ``b_j = A_j x0 + v_j``, standard normal designs, noise variance 0.25.

    ``drift > 0`` gives client ``j`` its own solution ``x0 + drift u_j`` with standard normal ``u_j``. The paper has no
    such heterogeneity. ``info["x0"]`` is the common part.

    >>> least_squares(clients=3, d=4, size=5).train.arrays["x"].shape
    (15, 4)
    """
    _check(clients=clients, d=d, size=size)
    made = gaussian_linear(clients=clients, dim=d, examples=size, noise_variance=variance, drift=drift, seed=seed)
    info = {"x0": made.truth.tolist()}
    return _data("synthetic-least-squares", made.designs, made.responses.astype(np.float32), info)


def conditioned(
    *, kappa: float = 100.0, clients: int = 10, d: int = 100, size: int = 400, variance: float = 1.0, seed: int = 0
) -> FederatedData:
    """FedSplit, App. B.3: least squares whose designs have squared singular values ``(kappa, 1, ..., 1)``.

    The singular vectors of each client are random. Needs ``size >= d``.

    >>> a = conditioned(kappa=9.0, clients=1, d=3, size=5).train.arrays["x"]
    >>> [round(float(s), 6) for s in np.linalg.svd(a.astype(float), compute_uv=False)]
    [3.0, 1.0, 1.0]
    """
    _check(clients=clients, d=d, size=size)
    if size < d or kappa < 1:
        raise ValueError(f"needs size >= d and kappa >= 1, got size = {size}, d = {d}, kappa = {kappa}")
    made = conditioned_linear(kappa, clients=clients, dim=d, examples=size, noise_variance=variance, seed=seed)
    info = {"x0": made.truth.tolist(), "kappa": kappa}
    return _data("synthetic-conditioned", made.designs, made.responses.astype(np.float32), info)


def logistic(*, clients: int = 10, d: int = 100, size: int = 1000, seed: int = 0) -> FederatedData:
    """FedSplit, App. B.2.1: labels in {0, 1} with P(y = 1) = sigmoid(a^T x0), ``a`` and ``x0`` standard normal.

    >>> sorted(set(logistic(clients=2, d=3, size=50).train.arrays["y"].tolist()))
    [0, 1]
    """
    _check(clients=clients, d=d, size=size)
    made = gaussian_logistic(clients=clients, dim=d, examples=size, seed=seed)
    info = {"x0": made.truth.tolist(), "classes": 2}
    return _data("synthetic-logistic", made.features, made.positive.astype(np.int32), info)


def heterogeneous(
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    clients: int = 30,
    d: int = 60,
    classes: int = 10,
    mean_size: int = 100,
    sigma: float = 1.0,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> FederatedData:
    """Synthetic(alpha, beta) of Li et al., *Federated Optimization in Heterogeneous Networks* (FedProx).

    Client ``k`` draws a model ``W_k, b_k ~ N(u_k, 1)``, ``u_k ~ N(0, alpha)`` and inputs ``x ~ N(v_k, Sigma)``,
    ``v_k ~ N(B_k, 1)``, ``B_k ~ N(0, beta)``, Sigma diagonal with ``j^-1.2``; labels are the model's argmax. So
    alpha is the heterogeneity of the models and beta that of the inputs. Sizes are log-normal with ``sigma`` around
    ``mean_size``.

    >>> heterogeneous(clients=4, mean_size=20).train.num_clients
    4
    """
    _check(clients=clients, d=d, mean_size=mean_size, classes=classes)
    if alpha < 0 or beta < 0:
        raise ValueError(f"alpha and beta are variances and must not be negative, got {alpha} and {beta}")
    rng = np.random.default_rng(seed)
    sizes = log_normal_sizes(clients * mean_size, clients=clients, sigma=sigma, min_size=2, rng=rng)
    scale = np.arange(1, d + 1) ** -0.6
    train, test = [], []
    for n in sizes.tolist():
        model_mean, input_mean = np.sqrt(alpha) * rng.standard_normal(), np.sqrt(beta) * rng.standard_normal()
        w, b = rng.normal(model_mean, 1, (d, classes)), rng.normal(model_mean, 1, classes)
        x = rng.normal(input_mean, 1, d) + scale * rng.standard_normal((n, d))
        y = np.argmax(x @ w + b, axis=1).astype(np.int32)
        m = min(round(test_fraction * n), n - 1)
        test.append({"x": x[:m].astype(np.float32), "y": y[:m]})
        train.append({"x": x[m:].astype(np.float32), "y": y[m:]})
    info = {"classes": classes, "source": "Li et al. (2020), Synthetic(alpha, beta)", "alpha": alpha, "beta": beta}
    return FederatedData(
        Split.from_clients(train), Split.from_clients(test) if test_fraction else None, "synthetic-heterogeneous", info
    )


def sentences(
    *, clients: int = 342_477, examples: int = 20_000_000, words: int = 10_000, length: int = 20, seed: int = 0
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Text in the shape of StackOverflow, client by client: log-normal sizes, Zipf words, up to ``length`` words each.

    >>> client, fields = next(sentences(clients=3, examples=30))
    >>> client, fields["x"].dtype.name, fields["x"].shape[1]
    ('u0000000', 'uint16', 20)
    """
    _check(clients=clients, words=words, length=length)
    if words + 3 >= 1 << 16:
        raise ValueError(f"words must be below {(1 << 16) - 4}, got {words}")
    rng = np.random.default_rng(seed)
    sizes = log_normal_sizes(examples, clients=clients, sigma=1.0, rng=rng)
    weights = 1.0 / np.arange(1, words + 1)
    # The table repeats each word by its frequency, so a uniform index into it draws a word from Zipf's law.
    repeats = np.rint(4 * weights / weights[-1]).astype(np.int64)
    table = np.repeat(np.arange(1, words + 1, dtype=np.uint16), repeats)
    begin, end = words + 2, words + 3
    at = np.arange(length + 1)
    done = 0
    while done < clients:  # for speed, one block of random draws is used for many clients
        stop = done + 1
        while stop < clients and sizes[done:stop].sum() + sizes[stop] <= 1 << 16 and stop - done < 4096:
            stop += 1
        n = int(sizes[done:stop].sum())
        block = np.empty((n, length + 1), np.uint16)
        block[:, 0] = begin
        block[:, 1:] = table[rng.integers(0, len(table), (n, length))]
        ends = rng.integers(2, length + 6, n)[:, None]  # beyond the window: truncated, no end token
        block[at == ends] = end
        block[np.broadcast_to(at > ends, block.shape)] = 0
        start = 0
        for i in range(done, stop):
            rows = block[start : start + sizes[i]]
            yield f"u{i:07d}", {"x": rows[:, :-1], "y": rows[:, 1:]}
            start += int(sizes[i])
        done = stop


def sentences_data(
    *, clients: int = 1_000, examples: int = 50_000, words: int = 10_000, length: int = 20, seed: int = 0
) -> FederatedData:
    """A small data set of ``sentences`` in memory.

    >>> sentences_data(clients=5, examples=50).train.num_examples
    50
    """
    rows = list(sentences(clients=clients, examples=examples, words=words, length=length, seed=seed))
    split = Split.from_clients([fields for _, fields in rows], [client for client, _ in rows])
    info = {"classes": words + 4, "source": "synthetic, StackOverflow-shaped"}
    integers = Pipeline.of({"name": "integers", "fields": "x,y"})
    return FederatedData(split, None, "synthetic-sentences", info, preprocess=integers)


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _data(name: str, x: np.ndarray, y: np.ndarray, info: Mapping[str, Any]) -> FederatedData:
    rows = [{"x": one.astype(np.float32), "y": labels} for one, labels in zip(x, y, strict=True)]
    source = {"source": "synthetic, after Pathak & Wainwright, FedSplit, App. B"}
    return FederatedData(Split.from_clients(rows), None, name, {**source, **info})


SYNTHETIC: Mapping[str, tuple[Callable[..., FederatedData], str]] = {
    "synthetic-least-squares": (least_squares, "least squares with standard normal designs (FedSplit, B.1)"),
    "synthetic-conditioned": (conditioned, "least squares with a given condition number (FedSplit, B.3)"),
    "synthetic-logistic": (logistic, "binary labels of a logistic model (FedSplit, B.2.1)"),
    "synthetic-heterogeneous": (heterogeneous, "Synthetic(alpha, beta): clients differ in models and inputs (FedProx)"),
    "synthetic-sentences": (sentences_data, "next word, StackOverflow-shaped"),
}
