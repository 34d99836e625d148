"""Federated data in numbers and in a picture: clients, sizes, labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedbraid.data.description import Preprocess
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.preprocess import Pipeline
from fedbraid.drawing import BLUE, ORANGE, figure_html, table_html

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["client_label_counts", "data_html", "plot_data", "summarize_data"]

_ROWS_FOR_LABELS = 5_000_000  # with more rows, labels are not counted: it would read too much from disk


def summarize_data(data: FederatedData) -> dict[str, Any]:
    """A JSON-ready summary.

    ``clients`` counts clients that train and unseen clients. (If the test split has other clients, ``splits`` has their
    number.) ``test_examples`` counts examples of the test split and of unseen clients. ``sizes`` are those of the train
    clients. ``label_divergence`` is the mean total-variation distance between a client's label distribution and that of
    all clients together: 0 if all clients have the same, near 1 if each has a label of its own. ``preprocess`` lists
    the steps from stored fields to a model's input.

    >>> from fedbraid.data.catalog import load
    >>> summary = summarize_data(load("digits"))
    >>> summary["clients"], summary["train_examples"] + summary["test_examples"], summary["labels"]
    (50, 1797, 10)
    """
    train = data.train
    splits = {name: _split_numbers(split) for name, split in data.splits.items()}
    held = [split for name, split in data.splits.items() if name in ("test", "unseen")]
    summary: dict[str, Any] = {
        "name": data.name,
        "clients": train.num_clients + (data.unseen.num_clients if data.unseen is not None else 0),
        "train_examples": train.num_examples,
        "test_examples": sum(s.num_examples for s in held),
        "shapes": {f: list(a.shape[1:]) if a.dtype != object else "text" for f, a in train.arrays.items()},
        "types": {f: a.dtype.name if a.dtype != object else "text" for f, a in train.arrays.items()},
        "labels": data.info.get("classes"),
        "sizes": splits["train"]["sizes"],
        "bytes": sum(s.nbytes for s in data.splits.values()),
        "splits": splits,
    }
    counts = client_label_counts(train)
    if counts is not None:
        pool = counts.sum(0)
        own = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        summary["labels"] = summary["labels"] or int(np.count_nonzero(pool))
        summary["label_counts"] = pool.tolist()
        summary["labels_per_client"] = float((counts > 0).sum(1).mean())
        summary["label_divergence"] = float(0.5 * np.abs(own - pool / pool.sum()).sum(1).mean())
    summary["preprocess"] = _steps(data.preprocess)
    summary["info"] = {k: v for k, v in data.info.items() if k != "vocabulary"}
    return summary


def _steps(preprocess: Preprocess | None) -> list[dict[str, Any]]:
    if isinstance(preprocess, Pipeline):
        return preprocess.spec()
    return [] if preprocess is None else [{"name": f"the function {getattr(preprocess, '__name__', preprocess)}"}]


def client_label_counts(split: Split, label: str = "y") -> np.ndarray | None:
    """Counts [clients, labels], or None if examples have no integer label or there are too many rows."""
    labels = split.arrays.get(label)
    if labels is None or labels.dtype.kind not in "iu" or labels.ndim != 1 or split.num_examples > _ROWS_FOR_LABELS:
        return None
    if not split.num_examples or int(labels.min()) < 0 or int(labels.max()) > 10_000:
        return None
    classes = int(labels.max()) + 1
    owner = np.repeat(np.arange(split.num_clients), split.sizes)
    return np.bincount(owner * classes + labels, minlength=split.num_clients * classes).reshape(-1, classes)


def _split_numbers(split: Split) -> dict[str, Any]:
    sizes = split.sizes
    return {
        "clients": int(split.num_clients),
        "clients_with_examples": int(np.count_nonzero(sizes)),
        "examples": split.num_examples,
        "sizes": {"min": int(sizes.min()), "median": float(np.median(sizes)), "max": int(sizes.max())},
    }


def plot_data(data: FederatedData, *, max_clients: int = 400, title: str | None = None) -> Figure:
    """A picture of a split: the labels of each client (left) and its number of examples (right).

    Clients are sorted by their most frequent label, so that skew is visible as blocks along the diagonal. With more
    than ``max_clients``, only every k-th client is shown. Without labels only the sizes are shown.
    """
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    counts, sizes = client_label_counts(data.train), data.train.sizes
    many = len(sizes) > max_clients
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    shown = f"{data.train.num_clients:,} clients, {data.train.num_examples:,} train examples"
    figure.suptitle(title or f"{data.name}: {shown}")
    if counts is None:
        axes = figure.subplots()
    else:
        left, axes = figure.subplots(1, 2, width_ratios=(3, 2))
        own = counts / np.maximum(counts.sum(1, keepdims=True), 1)
        order = np.lexsort((-own.max(1), own.argmax(1)))
        if many:
            order = order[np.linspace(0, len(order) - 1, max_clients).astype(int)]
        norm = PowerNorm(0.5, vmin=0, vmax=1)  # makes small shares visible: with many labels most shares are small
        image = left.imshow(
            own[order].T, aspect="auto", cmap="cividis", norm=norm, interpolation="nearest", origin="lower"
        )
        left.set_xlabel(
            "client, by most frequent label" + (f" (every {len(sizes) / max_clients:.0f}th)" if many else "")
        )
        left.set_ylabel("label")
        if counts.shape[1] <= 12:
            left.set_yticks(range(counts.shape[1]))
        figure.colorbar(image, ax=left, label="share of the client's examples")
    ranked = np.sort(sizes)[::-1]
    axes.plot(np.arange(1, len(ranked) + 1), ranked, color=BLUE, drawstyle="steps-mid", linewidth=1.6)
    axes.axhline(float(np.median(sizes)), color=ORANGE, linestyle="--", linewidth=1)
    axes.annotate(
        f"median {np.median(sizes):,.0f}",
        (0.98, float(np.median(sizes))),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
        color="#A04000",
    )
    if ranked[0] > 30 * max(1, ranked[-1]):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, None)
    if len(ranked) > 10_000:
        axes.set_xscale("log")
    axes.set_xlabel("client, by size")
    axes.set_ylabel("train examples")
    axes.grid(alpha=0.25)
    return figure


def data_html(data: FederatedData) -> str:
    """A small table and a picture, for notebooks."""
    rows = []
    for name, split in data.splits.items():
        sizes = split.sizes
        each = f"{sizes.min():,} / {np.median(sizes):,.0f} / {sizes.max():,}" if len(sizes) else "-"
        rows.append((name, f"{split.num_clients:,}", f"{split.num_examples:,}", each))
    fields = ", ".join(f"{name} {a.dtype}{list(a.shape[1:])}" for name, a in data.train.arrays.items())
    table = table_html(rows, [data.name, "clients", "examples", "per client: least / median / most"])
    steps = ", ".join(str(step["name"]) for step in _steps(data.preprocess))
    words = table_html([("fields", fields), *([("preprocessing", steps)] if steps else [])])
    picture = figure_html(plot_data(data), f"labels and sizes of the clients of {data.name}")
    return table + words + picture
