"""Figures draw the data that they are given: lines, labels, marks and scales are read from the figure itself."""

import numpy as np
import pytest

from drawn import check_figure, legend, lines, texts
from fedbraid.drawing import BLUE, COLOURS, ORANGE, style
from fedbraid.experiment.figures import draw_clients, draw_curves, draw_drift, draw_run, save, series
from fedbraid.experiment.tuningplot import draw_tuning, tuning_plot
from fedbraid.metric import Metric

ROUNDS = np.arange(1, 7)
TABLE = {
    "round": ROUNDS,
    "train/loss": np.exp(-ROUNDS / 2.0),
    "test_loss": np.where(ROUNDS % 2 == 0, 1.0 / ROUNDS, np.nan),
    "test_accuracy": np.where(ROUNDS % 2 == 0, ROUNDS / 10, np.nan),
    "test_accuracy_client_worst_tenth": np.where(ROUNDS % 2 == 0, ROUNDS / 20, np.nan),
}


def test_a_run_shows_its_losses_and_its_accuracy():
    figure = draw_run(TABLE, "a title")
    loss, accuracy = figure.axes
    check_figure(figure)
    assert figure.get_suptitle() == "a title"
    assert (loss.get_ylabel(), loss.get_yscale(), loss.get_xlabel()) == ("loss", "log", "round")
    np.testing.assert_allclose(lines(loss)["training batches"], np.c_[ROUNDS, TABLE["train/loss"]])
    np.testing.assert_allclose(lines(loss)["test"], [(2, 1 / 2), (4, 1 / 4), (6, 1 / 6)])
    assert legend(accuracy) == ["test, all examples", "a tenth of the clients are below"]
    np.testing.assert_allclose(lines(accuracy)["test, all examples"], [(2, 0.2), (4, 0.4), (6, 0.6)])
    np.testing.assert_allclose(lines(accuracy)["a tenth of the clients are below"], [(2, 0.1), (4, 0.2), (6, 0.3)])
    assert texts(accuracy) == ["0.600"]


def test_a_run_with_one_evaluation_shows_it_at_a_whole_round_with_plain_numbers():
    nan = np.nan
    table = {"round": np.array([1, 2]), "train/loss": np.array([4.83, 4.71])}
    table |= {"test_loss": np.array([nan, 4.72]), "test_accuracy": np.array([nan, 0.22])}
    figure = draw_run(table, "")
    figure.canvas.draw()
    loss, accuracy = figure.axes
    markers = {line.get_label(): line.get_marker() for axis in figure.axes for line in axis.lines}
    assert markers == {"training batches": "None", "test": "o", "test, all examples": "o"}
    low, high = accuracy.get_xlim()
    assert [tick for tick in accuracy.get_xticks() if low <= tick <= high] == [2]
    low, high = loss.get_ylim()
    ticks = zip(loss.yaxis.get_minorticklocs(), loss.yaxis.get_minorticklabels(), strict=True)
    labels = [text.get_text() for place, text in ticks if low <= place <= high]
    assert "4.8" in labels
    assert not any("times" in label for label in labels)


def test_a_run_without_accuracy_shows_its_losses_alone():
    (axis,) = draw_run({name: TABLE[name] for name in ("round", "train/loss")}, "").axes
    assert list(lines(axis)) == ["training batches"]
    negative = draw_run({"round": ROUNDS, "train/loss": -TABLE["train/loss"]}, "").axes[0]
    assert negative.get_yscale() == "linear"


@pytest.mark.parametrize(
    ("better", "shift", "scale"), [("lower", 0.0, "log"), ("lower", -5.0, "linear"), ("higher", 0.0, "linear")]
)
def test_curves_are_means_in_bands_and_logarithmic_where_lower_is_better(better, shift, scale):
    tables = [{"round": ROUNDS, "m": ROUNDS * rate + shift} for rate in (1.0, 3.0)]
    both = {"label": "both", **series(tables, "m", "rounds")}
    alone = {"label": "alone", **series(tables[:1], "m", "rounds")}
    figure = draw_curves([both, alone], Metric("m", better), "rounds")
    (axis,) = figure.axes
    check_figure(figure)
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_yscale()) == ("round", "m", scale)
    np.testing.assert_allclose(lines(axis)["both"], np.c_[ROUNDS, ROUNDS * 2.0 + shift])
    np.testing.assert_allclose(lines(axis)["alone"], np.c_[ROUNDS, ROUNDS + shift])
    (band,) = axis.collections  # a single seed has none
    corners = band.get_paths()[0].vertices
    assert corners[:, 1].min() == pytest.approx(1.0 + shift)
    assert corners[:, 1].max() == pytest.approx(18.0 + shift)
    assert legend(axis) == ["both", "alone"]


def test_curves_against_bytes_have_units():
    table = {"round": ROUNDS, "m": 1.0 * ROUNDS, "bytes_down": 1e6 * ROUNDS, "bytes_up": 1e6 * ROUNDS}
    figure = draw_curves([{"label": "a", **series([table], "m", "bytes")}], Metric("m", "higher"), "bytes")
    (axis,) = figure.axes
    np.testing.assert_allclose(lines(axis)["a"][:, 0], 2e6 * ROUNDS)
    assert axis.get_xlabel() == "bytes sent, both ways"
    assert axis.xaxis.get_major_formatter()(4e6) == "4 MB"


def test_clients_are_drawn_by_percentile():
    axis = draw_clients([{"label": "a", "values": [0.1, 0.5]}, {"label": "b", "values": [0.3]}], "acc").axes[0]
    np.testing.assert_allclose(lines(axis)["a"], [(25, 0.1), (75, 0.5)])
    np.testing.assert_allclose(lines(axis)["b"], [(50, 0.3)])
    assert axis.get_ylabel() == "acc of the client"


def test_drift_restarts_every_round_and_is_logarithmic_where_methods_differ_much():
    near = [{"label": "a", "drift": [[0.0, 1.0, 2.0], [0.0, 1.0, 3.0]]}, {"label": "b", "drift": [[0.0, 2.0, 4.0]]}]
    axis = draw_drift(near).axes[0]
    assert axis.get_yscale() == "linear"
    assert legend(axis) == ["a", "b"]
    first, second, _ = (line.get_xydata() for line in axis.get_lines())
    np.testing.assert_allclose(first, [(0, 0), (1, 1), (2, 2)])
    np.testing.assert_allclose(second, [(2, 0), (3, 1), (4, 3)])
    far = [near[0], {"label": "b", "drift": [[0.0, 200.0, 400.0]]}]
    assert draw_drift(far).axes[0].get_yscale() == "log"


# --- tunings ---------------------------------------------------------------------------------------------------------


def trial(point, score, status="finished", better="lower", **values):
    return {"point": point, "seed": 1, "status": status, "rounds": 9, "metric": "m", "better": better, **values} | {
        "score": score
    }


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_a_line_marks_the_best_and_crosses_what_diverged(better):
    rows = [trial(i, s, better=better, a=a) for i, (a, s) in enumerate([(0.01, 3.0), (1.0, 1.0), (0.1, 2.0)])]
    rows.append(trial(3, None, "diverged", better, a=10.0))
    best = {"lower": 1.0, "higher": 0.01}[better]
    (axis,) = draw_tuning(rows, ["a"], {"best": {"a": best}, "criterion": "why"}).axes
    finished = axis.containers[0].lines[0]
    np.testing.assert_allclose(finished.get_xydata(), [(0.01, 3), (0.1, 2), (1.0, 1)])
    assert finished.get_color() == BLUE
    assert axis.get_xscale() == "log"
    ring = lines(axis)[f"best: {1 if better == 'lower' else 3}"]
    np.testing.assert_allclose(ring, [(best, 1.0 if better == "lower" else 3.0)])
    assert lines(axis)["diverged"][:, 0].tolist() == [10.0]
    assert axis.get_title(loc="left") == "why"


@pytest.mark.parametrize(("better", "colours", "shown"), [("lower", "viridis_r", 2.0), ("higher", "viridis", 5.0)])
def test_a_map_shows_the_best_of_the_other_keys(better, colours, shown):
    cells = [(1, 1, 1, 2.0), (1, 1, 2, 5.0), (2, 1, 1, 3.0), (1, 2, 1, 4.0), (2, 2, 1, None)]
    rows = [
        trial(i, s, "diverged" if s is None else "finished", better, a=a, b=b, c=c)
        for i, (a, b, c, s) in enumerate(cells)
    ]
    figure = draw_tuning(rows, ["a", "b", "c"], {"best": {"a": 1, "b": 2, "c": 1}})
    axis = figure.axes[0]
    (image,) = axis.images
    np.testing.assert_allclose(image.get_array().filled(np.nan), [[shown, 3.0], [4.0, np.nan]])
    assert image.get_cmap().name == colours
    assert texts(axis) == [f"{shown:g}", "3", "4", "×"]
    (ring,) = axis.patches
    assert (ring.get_xy(), ring.get_width(), ring.get_height()) == ((-0.5, 0.5), 1, 1)
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("a", "b")
    assert axis.get_title(loc="left") == "best over c"
    assert figure.axes[1].get_ylabel() == "m"


def test_many_values_are_a_scatter():
    rng = np.random.default_rng(0)
    rows = [trial(i, float(i), a=float(a), b=float(b)) for i, (a, b) in enumerate(rng.uniform(0.01, 1, (20, 2)))]
    rows[3] |= {"status": "diverged", "score": None}
    assert tuning_plot(rows, ["a", "b"])["kind"] == "scatter"
    axis = draw_tuning(rows, ["a", "b"], {"best": {"a": rows[0]["a"], "b": rows[0]["b"]}}).axes[0]
    (dots,) = axis.collections
    scored = [row for row in rows if row["score"] is not None]
    np.testing.assert_allclose(dots.get_offsets(), [(row["a"], row["b"]) for row in scored])
    np.testing.assert_allclose(dots.get_array(), [row["score"] for row in scored])
    assert dots.get_cmap().name == "viridis_r"
    np.testing.assert_allclose(lines(axis)["diverged"], [(rows[3]["a"], rows[3]["b"])])
    np.testing.assert_allclose(lines(axis)["best: 0"], [(rows[0]["a"], rows[0]["b"])])


def test_series_differ_in_colour_and_then_in_dashes(tmp_path):
    looks = [tuple(style(i).values()) for i in range(4 * len(COLOURS))]
    assert len(set(looks)) == len(looks)
    assert style(1)["color"] == ORANGE
    written = save(draw_run(TABLE, ""), tmp_path / "a.png", pdf=True)
    assert [path.read_bytes()[:4] for path in written] == [b"\x89PNG", b"%PDF"]
    first = written[1].read_bytes()
    save(draw_run(TABLE, ""), tmp_path / "a.png", pdf=True)
    assert written[1].read_bytes() == first
