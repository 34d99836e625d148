"""Partition a plain data set over clients: pure functions of a seed that return row indices.

Every partitioner returns one index array per client, shuffled within the client. Together they hold every row exactly
once. The methods are those of the papers:

- McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data* (2017): ``iid``,
  ``shards``;
- Yurochkin et al., *Bayesian Nonparametric Federated Learning of Neural Networks* (2019): ``dirichlet`` per class;
- Hsu, Qi & Brown, *Measuring the Effects of Non-Identical Data Distribution* (2019): ``dirichlet`` per client;
- *Elastic Aggregation for Federated Optimization* (supplement, section 2): ``dirichlet`` with log-normal sizes;
- Reddi et al., *Adaptive Federated Optimization* (2021), after Li & McCallum (2006): ``pachinko``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from fedbraid.names import Names

__all__ = [
    "NAMES",
    "PARTITIONERS",
    "Summary",
    "by_id",
    "check_partition",
    "dirichlet",
    "hold_out",
    "iid",
    "label_counts",
    "log_normal",
    "log_normal_sizes",
    "match_labels",
    "pachinko",
    "shards",
    "summarize",
]

Parts = list[np.ndarray]


def iid(n: int, *, clients: int, seed: int = 0) -> Parts:
    """Rows at random, sizes equal to within one.

    >>> [len(p) for p in iid(10, clients=3)]
    [4, 3, 3]
    """
    _check_clients(clients, n)
    return [np.asarray(p) for p in np.array_split(_rng(seed).permutation(n), clients)]


def log_normal(n: int, *, clients: int, sigma: float, min_size: int = 1, seed: int = 0) -> Parts:
    """Rows at random, client sizes log-normal: ``n_i`` proportional to ``exp(sigma z_i)``, at least ``min_size``.

    >>> sum(len(p) for p in log_normal(100, clients=7, sigma=1.0))
    100
    """
    rng = _rng(seed)
    sizes = log_normal_sizes(n, clients=clients, sigma=sigma, min_size=min_size, rng=rng)
    return np.split(rng.permutation(n), np.cumsum(sizes)[:-1])


def dirichlet(
    labels: np.ndarray,
    *,
    clients: int,
    alpha: float,
    per: Literal["class", "client"] = "class",
    sigma: float = 0.0,
    min_size: int = 1,
    retries: int = 200,
    seed: int = 0,
) -> Parts:
    """Uneven label ratios drawn from a symmetric Dirichlet(``alpha``). Small ``alpha``: few labels per client.

    ``per="class"`` (Yurochkin et al.): each class is divided among the clients in proportions drawn from
    Dirichlet(alpha). The sizes vary, too. While a client has fewer than ``min_size`` rows, it draws again, at most
    ``retries`` times.

    ``per="client"`` (Hsu et al.; with ``sigma > 0``, the elastic aggregation paper): each client has its own label
    distribution from Dirichlet(alpha) and a size, equal or log-normal with ``sigma``. It draws that many rows without
    replacement. Labels without rows left are removed and the other probabilities are renormalised.

    >>> parts = dirichlet(np.repeat([0, 1, 2], 20), clients=4, alpha=0.5)
    >>> sorted(np.concatenate(parts).tolist()) == list(range(60))
    True
    """
    labels = _check_labels(labels)
    _check_clients(clients, len(labels))
    _check_positive("alpha", alpha)
    if per not in ("class", "client"):
        raise ValueError(f'per must be "class" or "client", got {per!r}')
    if per == "class" and sigma:
        raise ValueError(
            f'sigma = {sigma} asks for log-normal sizes, which per="class" cannot give (there the sizes '
            'follow from the label proportions); use per="client", or sigma = 0'
        )
    if min_size * clients > len(labels):
        raise ValueError(
            f"min_size = {min_size} for {clients} clients needs more rows than the data has ({len(labels)})"
        )
    rng = _rng(seed)
    rows = _rows_by_label(labels, rng)
    if per == "class":
        return _dirichlet_per_class(rows, clients, alpha, min_size=min_size, retries=retries, rng=rng)
    if sigma:
        sizes = log_normal_sizes(len(labels), clients=clients, sigma=sigma, min_size=min_size, rng=rng)
    else:
        sizes = _even(len(labels), clients)
    return _deal(rows, _counts_per_client(rows, sizes, alpha, rng), rng)


def _dirichlet_per_class(
    rows: list[np.ndarray], clients: int, alpha: float, *, min_size: int, retries: int, rng: np.random.Generator
) -> Parts:
    smallest = 0
    for _ in range(max(1, retries)):
        p = np.exp(_log_dirichlet(rng, alpha, (len(rows), clients)))
        counts = np.stack([_cut(p_k, len(r)) for p_k, r in zip(p, rows, strict=True)], axis=1)
        smallest = max(smallest, int(counts.sum(1).min()))
        if counts.sum(1).min() >= min_size:
            return _deal(rows, counts, rng)
    raise ValueError(
        f"Dirichlet(alpha = {alpha}) over {clients} clients: in {retries} draws some client always had fewer than "
        f"min_size = {min_size} of the {sum(map(len, rows))} rows (best: {smallest}); use a larger alpha, fewer "
        'clients, a smaller min_size, or per="client", which fixes the sizes'
    )


def _counts_per_client(rows: Parts, sizes: np.ndarray, alpha: float, rng: np.random.Generator) -> np.ndarray:
    """Counts [clients, labels]: ``sizes[i]`` rows of client ``i`` from its own Dirichlet draw, without replacement."""
    left = np.array([len(r) for r in rows])
    counts = np.zeros((len(sizes), len(rows)), np.int64)
    log_p = _log_dirichlet(rng, alpha, counts.shape)
    for i, size in enumerate(sizes):
        counts[i] = _draw_without_replacement(rng, int(size), log_p[i], left)
        left -= counts[i]
    return counts


def shards(labels: np.ndarray, *, clients: int, per_client: int = 2, equal: bool = False, seed: int = 0) -> Parts:
    """At most ``per_client`` labels per client: rows sorted by label are cut into shards, assigned at random.

    A label gets shards in proportion to its rows and no shard holds two labels, so that the bound on labels is strict.
    ``equal=True`` is the partition of McMahan et al.: shards of equal size, some of which hold two labels.

    >>> y = np.repeat([0, 1, 2, 3], 10)
    >>> max(len(set(y[p].tolist())) for p in shards(y, clients=4, per_client=2))
    2
    """
    labels = _check_labels(labels)
    _check_clients(clients, len(labels))
    total = clients * per_client
    if per_client < 1 or total > len(labels):
        raise ValueError(
            f"per_client = {per_client} for {clients} clients makes {total} shards of {len(labels)} rows; "
            "it must be at least 1, and no more shards than rows"
        )
    rng = _rng(seed)
    rows = _rows_by_label(labels, rng)
    if equal:
        pieces = np.array_split(np.concatenate(rows), total)
    else:
        if total < len(rows):
            raise ValueError(
                f"{clients} clients x {per_client} labels cannot hold {len(rows)} labels; use more clients or labels"
            )
        sizes = np.array([len(r) for r in rows])
        quota = _apportion(sizes, total, least=1)
        pieces = [piece for r, q in zip(rows, quota, strict=True) for piece in np.array_split(r, q)]
    deal = rng.permutation(total).reshape(clients, per_client)
    return _nonempty([rng.permutation(np.concatenate([pieces[j] for j in hand])) for hand in deal], "shards")


def pachinko(
    coarse: np.ndarray,
    fine: np.ndarray,
    *,
    clients: int = 500,
    size: int | None = None,
    alpha: float = 0.1,
    beta: float = 10.0,
    seed: int = 0,
) -> Parts:
    """Pachinko allocation over coarse and fine labels: the partition of federated CIFAR-100 (500 clients x 100 images).

    Each client draws a distribution over coarse labels from Dirichlet(``alpha``) and, for each of them, one over its
    fine labels from Dirichlet(``beta``). For each example it draws a coarse label, then a fine label, then a row with
    that label without replacement. A label without rows left is removed, and its distribution is renormalised.
    ``size`` defaults to an equal share of all rows, and clients x size must be the number of rows.

    >>> fine = np.repeat(np.arange(4), 5)
    >>> [len(p) for p in pachinko(fine // 2, fine, clients=4, size=5)]
    [5, 5, 5, 5]
    """
    coarse, fine = _check_labels(coarse, "coarse"), _check_labels(fine, "fine")
    if len(coarse) != len(fine):
        raise ValueError(f"coarse has {len(coarse)} labels, fine has {len(fine)}: they must describe the same rows")
    _check_clients(clients, len(fine))
    _check_positive("alpha", alpha)
    _check_positive("beta", beta)
    if size is not None and size * clients != len(fine):
        raise ValueError(
            f"{clients} clients x size {size} = {clients * size} must be the number of rows, {len(fine)}; "
            f"leave size out, or choose clients that divide {len(fine)}"
        )
    rng = _rng(seed)
    rows = _rows_by_label(fine, rng)
    parent = np.array([coarse[r[0]] for r in rows])
    for k, r in enumerate(rows):
        if np.any(coarse[r] != parent[k]):
            raise ValueError(f"fine label {fine[r[0]]} has more than one coarse label: {np.unique(coarse[r])}")
    groups = [np.flatnonzero(parent == c) for c in np.unique(coarse)]
    left = np.array([len(r) for r in rows])
    sizes = _even(len(fine), clients)
    counts = np.zeros((clients, len(rows)), np.int64)
    for i in range(clients):
        log_top = _log_dirichlet(rng, alpha, (len(groups),))
        top = _draw_without_replacement(rng, int(sizes[i]), log_top, np.array([left[g].sum() for g in groups]))
        for group, m in zip(groups, top, strict=True):
            log_low = _log_dirichlet(rng, beta, (len(group),))
            counts[i, group] = _draw_without_replacement(rng, int(m), log_low, left[group])
        left -= counts[i]
    return _deal(rows, counts, rng)


def by_id(ids: Sequence[object] | np.ndarray) -> tuple[Parts, tuple[str, ...]]:
    """Rows grouped by a natural id column (writer, role, user): the parts, sorted by id, and the ids as names.

    >>> parts, names = by_id(["b", "a", "b"])
    >>> names, [p.tolist() for p in parts]
    (('a', 'b'), [[1], [0, 2]])
    """
    column = np.asarray(ids)
    if column.ndim != 1 or not len(column):
        raise ValueError(f"the id column must be a non-empty 1-d sequence, got shape {column.shape}")
    if column.dtype == object:
        missing = np.array([v is None or v != v for v in column])
        column = column.astype(str)
    else:
        missing = column != column  # NaN, or NaT
    if missing.any():
        raise ValueError(
            f"the id column has a null in row {int(np.argmax(missing))} ({missing.sum()} in all); drop or name them"
        )
    names, inverse = np.unique(column, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
    return parts, tuple(str(n) for n in names)


def hold_out(parts: Parts, *, fraction: float, seed: int = 0) -> tuple[Parts, Parts]:
    """Hold out a fraction of every client's rows for testing or validation. Each client keeps at least one row.

    >>> train, test = hold_out([np.arange(10), np.array([10])], fraction=0.2)
    >>> [len(p) for p in train], [len(p) for p in test]
    ([8, 1], [2, 0])
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"the held-out fraction must be at least 0 and below 1, got {fraction}")
    rng = _rng(seed)
    train, held = [], []
    for part in parts:
        m = min(round(fraction * len(part)), len(part) - 1) if len(part) else 0
        part = rng.permutation(part)
        train.append(part[m:])
        held.append(part[:m])
    return train, held


def match_labels(parts: Parts, labels: np.ndarray, test_labels: np.ndarray, *, seed: int = 0) -> Parts:
    """Partition a separate test set so that each client has its own train label ratios. Every test row is used once.

    Test rows of a label go to clients in proportion to their train rows of that label (largest remainders). Each client
    is then tested on the labels that it trains on. Test rows of a label without train rows are distributed evenly.

    >>> y = np.array([0, 0, 0, 1, 1, 1])
    >>> [p.tolist() for p in match_labels([np.array([0, 1, 2]), np.array([3, 4, 5])], y, np.array([1, 1, 0, 1]))]
    [[2], [0, 1, 3]]
    """
    labels, test_labels = _check_labels(labels), _check_labels(test_labels, "test_labels")
    rng = _rng(seed)
    out: list[list[np.ndarray]] = [[] for _ in parts]
    for label in np.unique(test_labels):
        rows = rng.permutation(np.flatnonzero(test_labels == label))
        weight = np.array([np.count_nonzero(labels[p] == label) for p in parts])
        counts = _apportion(weight if weight.any() else np.ones(len(parts), np.int64), len(rows))
        for i, piece in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
            out[i].append(piece)
    return [np.sort(np.concatenate(pieces)) for pieces in out]


# ---------------------------------------------------------------- summaries of a partition


class Summary(NamedTuple):
    """A partition in numbers. ``divergence``: mean total-variation distance between labels of a client and of all."""

    clients: int
    examples: int
    size_min: int
    size_median: float
    size_max: int
    labels: int | None = None
    labels_per_client: float | None = None
    divergence: float | None = None


def label_counts(parts: Parts, labels: np.ndarray) -> np.ndarray:
    """Clients x labels table of counts.

    >>> label_counts([np.array([0, 1]), np.array([2])], np.array([0, 1, 1])).tolist()
    [[1, 1], [0, 1]]
    """
    labels = _check_labels(labels)
    _, code = np.unique(labels, return_inverse=True)
    return np.stack([np.bincount(code[p], minlength=int(code.max()) + 1) for p in parts])


def summarize(parts: Parts, labels: np.ndarray | None = None) -> Summary:
    """Sizes and label skew of a split.

    >>> summarize([np.array([0, 1]), np.array([2])], np.array([0, 1, 1])).labels_per_client
    1.5
    """
    sizes = np.array([len(p) for p in parts])
    base = (len(parts), int(sizes.sum()), int(sizes.min()), float(np.median(sizes)), int(sizes.max()))
    if labels is None:
        return Summary(*base)
    counts = label_counts(parts, labels)
    pool = counts.sum(0) / counts.sum()
    own = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    full = counts.sum(1) > 0
    distance = 0.5 * np.abs(own - pool).sum(1)[full]
    return Summary(*base, counts.shape[1], float((counts > 0).sum(1).mean()), float(distance.mean()))


def check_partition(parts: Parts, n: int) -> None:
    """Raise unless every row 0 .. n-1 is used exactly once and no client is empty. This holds for every partitioner."""
    seen = np.bincount(np.concatenate(parts), minlength=n)
    if len(seen) != n or np.any(seen != 1):
        row = int(np.argmax(seen != 1))
        raise ValueError(
            f"row {row} is used {int(seen[row])} times; a partition of {n} rows uses every row exactly once"
        )
    _nonempty(parts, "partition")


# ---------------------------------------------------------------- functions that partitioners share


def _rng(seed: int) -> np.random.Generator:
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ValueError(f"seed must be a non-negative integer, got {seed!r}")
    return np.random.default_rng(int(seed))


def _check_clients(clients: int, n: int) -> None:
    if isinstance(clients, bool) or not isinstance(clients, (int, np.integer)) or not 1 <= clients <= n:
        raise ValueError(f"clients must be an integer from 1 to the number of rows ({n}), got {clients!r}")


def _check_positive(name: str, value: float) -> None:
    if not (np.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be positive and finite, got {value}")


def _check_labels(labels: np.ndarray, name: str = "labels") -> np.ndarray:
    labels = np.asarray(labels)
    if labels.ndim != 1 or not len(labels) or labels.dtype.kind not in "iubUS":
        raise ValueError(
            f"{name} must be a non-empty 1-d array of integers or strings, got {labels.dtype}{labels.shape}"
        )
    return labels


def _even(n: int, clients: int) -> np.ndarray:
    return np.full(clients, n // clients) + (np.arange(clients) < n % clients)


def log_normal_sizes(n: int, *, clients: int, sigma: float, min_size: int = 1, rng: np.random.Generator) -> np.ndarray:
    """Sizes that sum to ``n``, proportional to ``exp(sigma z)`` above ``min_size``.

    >>> int(log_normal_sizes(100, clients=4, sigma=0.5, rng=np.random.default_rng(0)).sum())
    100
    """
    _check_clients(clients, n)
    if not (np.isfinite(sigma) and sigma >= 0):
        raise ValueError(f"sigma must be non-negative and finite, got {sigma}")
    if min_size < 1 or min_size * clients > n:
        raise ValueError(
            f"min_size = {min_size} for {clients} clients must be between 1 and n / clients = {n / clients:g}"
        )
    return _apportion(np.exp(sigma * rng.standard_normal(clients)), n, least=min_size)


def _apportion(weights: np.ndarray, total: int, least: int = 0) -> np.ndarray:
    """Whole numbers with the given sum, proportional to the weights (largest remainders), none below ``least``."""
    weights = np.asarray(weights, float)
    low = np.zeros(len(weights), bool)
    while True:  # shares that would fall below `least` are set to it; the others divide the remaining total
        share = np.where(low, 0.0, weights)
        share = share / share.sum() * (total - least * low.sum())
        fresh = ~low & (share < least)
        if not fresh.any():
            break
        low |= fresh
    out = np.where(low, least, np.floor(share)).astype(np.int64)
    order = np.argsort(-np.where(low, -1.0, share - np.floor(share)), kind="stable")
    out[order[: total - out.sum()]] += 1
    return out


def _log_dirichlet(rng: np.random.Generator, alpha: float, shape: tuple[int, ...]) -> np.ndarray:
    """Log of symmetric Dirichlet draws over the last axis.

    Logarithms are needed because at small alpha most components underflow, and renormalising over the labels that are
    left would divide by zero. They use Gamma(a) = Gamma(a + 1) U^(1/a).
    """
    log_gamma = np.log(rng.gamma(alpha + 1.0, size=shape)) + np.log(rng.random(shape)) / alpha
    log_gamma -= log_gamma.max(-1, keepdims=True)
    return log_gamma - np.log(np.exp(log_gamma).sum(-1, keepdims=True))


def _draw_without_replacement(rng: np.random.Generator, m: int, log_p: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Counts of ``m`` draws from ``p``, where a label without rows left is removed and the rest is renormalised.

    Drawing one row at a time with removal is the same as drawing from the first ``p`` and rejecting labels without rows
    left. So a whole multinomial is drawn and capped at the rows left, and only the excess is drawn again from the
    renormalised rest. The counts have the same distribution as the loop over single draws.
    """
    counts = np.zeros(len(left), np.int64)
    while m:
        open_ = np.flatnonzero(left > counts)
        weight = np.exp(log_p[open_] - log_p[open_].max())
        draw = rng.multinomial(m, weight / weight.sum())
        taken = np.minimum(draw, left[open_] - counts[open_])
        counts[open_] += taken
        m -= int(taken.sum())
    return counts


def _rows_by_label(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    _, code = np.unique(labels, return_inverse=True)
    order = rng.permutation(len(labels))
    order = order[np.argsort(code[order], kind="stable")]
    return np.split(order, np.cumsum(np.bincount(code))[:-1])


def _cut(p: np.ndarray, n: int) -> np.ndarray:
    edges = np.floor(np.cumsum(p)[:-1] * n).astype(np.int64)
    return np.diff(np.concatenate([[0], np.clip(edges, 0, n), [n]]))


def _deal(rows: list[np.ndarray], counts: np.ndarray, rng: np.random.Generator) -> Parts:
    pieces = [np.split(r, np.cumsum(counts[:, k])[:-1]) for k, r in enumerate(rows)]
    return [rng.permutation(np.concatenate([piece[i] for piece in pieces])) for i in range(len(counts))]


def _nonempty(parts: Parts, what: str) -> Parts:
    for i, part in enumerate(parts):
        if not len(part):
            raise ValueError(f"client {i} of the {what} has no rows; use fewer clients")
    return parts


PARTITIONERS: Mapping[str, Callable[..., Parts]] = {
    "iid": iid,
    "log-normal": log_normal,
    "dirichlet": dirichlet,
    "shards": shards,
    "pachinko": pachinko,
}

NAMES = Names("partition", PARTITIONERS)
"""Those, the partitions of installed packages, and ``module:attribute``; ``"natural"`` is not one of them."""
