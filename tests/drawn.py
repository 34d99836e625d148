"""The content of a figure (lines, labels, axes), read from matplotlib's objects."""

import numpy as np
from matplotlib.figure import Figure


def record(monkeypatch):
    """A list of the figures that are written from now on, in order; they are still written."""
    figures, write = [], Figure.savefig

    def savefig(self, *args, **more):
        figures.append(self)
        return write(self, *args, **more)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures


def lines(axis):
    """The labelled lines of an axis: label -> points [n, 2]."""
    found = {line.get_label(): np.asarray(line.get_xydata(), float) for line in axis.get_lines()}
    return {label: points for label, points in found.items() if not str(label).startswith("_")}


def legend(axis):
    """The labels in the legend of an axis, in order."""
    shown = axis.get_legend()
    return [] if shown is None else [text.get_text() for text in shown.get_texts()]


def texts(axis):
    return [text.get_text() for text in axis.texts]


def check_figure(figure):
    """Every visible axis has labels, ticks or a title for x and y, and draws finite data."""
    assert figure.axes
    for axis in figure.axes:
        if not axis.axison or axis.get_label() == "<colorbar>":
            continue
        for side, shared in (("x", axis.get_shared_x_axes()), ("y", axis.get_shared_y_axes())):
            named = [getattr(one, f"get_{side}label")() for one in (axis, *shared.get_siblings(axis))]
            ticks = [tick.get_text() for tick in getattr(axis, f"get_{side}ticklabels")()]
            titles = [axis.get_title(loc=where) for where in ("left", "center", "right")]
            assert any(named) or any(ticks) or any(titles), f"nothing says what {side} is"
        assert drawn_points(axis), f"nothing is drawn in {axis.get_title()!r}"


def drawn_points(axis):
    """The number of finite points, bars, cells and markers that an axis draws."""
    points = sum(int(np.isfinite(np.asarray(line.get_xydata(), float)).all(1).sum()) for line in axis.get_lines())
    marks = sum(len(one.get_offsets()) for one in axis.collections if hasattr(one, "get_offsets"))
    cells = sum(int(np.ma.count(image.get_array())) for image in axis.images)
    return points + marks + cells + len(axis.patches) + len(axis.tables)
