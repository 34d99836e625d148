"""Pictures of runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["curves"]

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#666666"  # told apart by colour-blind eyes too


def _evaluated(table: Mapping[str, np.ndarray], name: str) -> tuple[np.ndarray, np.ndarray]:
    values = table[name]
    seen = np.isfinite(values)
    return table["round"][seen], values[seen]


def curves(table: Mapping[str, np.ndarray], title: str, path: Path) -> Path:
    """Loss and accuracy against rounds, with the spread over clients."""
    from matplotlib.figure import Figure

    accuracy = "test_accuracy" in table
    figure = Figure(figsize=(9.6 if accuracy else 5.4, 3.8), layout="constrained")
    axes: Any = figure.subplots(1, 2 if accuracy else 1, squeeze=False)[0]
    trained = next((name for name in table if name.endswith("/loss")), None)
    if trained:
        axes[0].plot(table["round"], table[trained], color=GREY, lw=1, alpha=0.6, label="training batches")
    if "test_loss" in table:
        axes[0].plot(*_evaluated(table, "test_loss"), color=BLUE, lw=2, label="test")
    axes[0].set_ylabel("loss")
    positive = [v for v in (table.get(trained or ""), table.get("test_loss")) if v is not None]
    if positive and all(np.nanmin(v) > 0 for v in positive if np.isfinite(v).any()):
        axes[0].set_yscale("log")
    if accuracy:
        rounds, pooled = _evaluated(table, "test_accuracy")
        _, tenth = _evaluated(table, "test_accuracy_client_p10")
        axes[1].plot(rounds, pooled, color=BLUE, lw=2, label="test, all examples")
        axes[1].plot(rounds, tenth, color=ORANGE, lw=1.5, ls="--", label="10th percentile of clients")
        axes[1].set_ylabel("accuracy")
        axes[1].set_ylim(0, 1.02)
        if len(pooled):
            axes[1].annotate(
                f"{pooled[-1]:.3f}", (rounds[-1], pooled[-1]), textcoords="offset points", xytext=(-4, -14), ha="right"
            )
    for axis in axes:
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, loc="best")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.savefig(path, dpi=130)
    return path
