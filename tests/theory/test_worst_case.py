"""Worst cases by performance estimation, against known tight rates and against runs."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from typer.testing import CliRunner

from drawn import check_figure
from fedbraid.cli.app import make_app
from fedbraid.theory.figures import rates_figure
from fedbraid.theory.published_rates import compare_rates, published_rate
from fedbraid.theory.worst_case import METHODS, worst_case

MU, L = 0.1, 1.0


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("step", [0.3, 1.0, 1.7, 2.1])
def test_one_local_step_is_gradient_descent(clients, step):
    """Its tight contraction is max |1 - gamma mu|, |1 - gamma L|, also if clients differ."""
    factor = max(abs(1 - step * MU), abs(1 - step * L))
    for method in ("fedavg", "mime"):
        for zeta in (0.0, 2.0):
            found = worst_case(method, client_lr=step, clients=clients, mu=MU, zeta=zeta, rounds=2)
            assert found.value == pytest.approx(factor**2, abs=1e-6)
            assert found.certified >= found.value - 1e-6


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("step", [0.5, 1.0])
def test_gradient_descent_on_convex_losses_has_the_gap_of_drori_and_teboulle(rounds, step):
    found = worst_case("fedavg", client_lr=step / 3, smoothness=3.0, distance=2.0, rounds=rounds, measure="gap")
    assert found.value == pytest.approx(3.0 * 4.0 / (4 * rounds * step + 2), abs=1e-6)


@pytest.mark.parametrize("step", [0.2, 1 / math.sqrt(MU * L), 20.0])
@pytest.mark.parametrize("clients", [2, 3])
def test_the_prox_methods_contract_exactly_as_published(step, clients):
    split = worst_case("fedsplit", client_lr=step, clients=clients, mu=MU, measure="contraction")
    assert split.value == pytest.approx(max(abs(1 - step * v) / (1 + step * v) for v in (MU, L)), abs=1e-6)
    prox = worst_case("fedprox", client_lr=step, clients=clients, mu=MU, measure="contraction", rounds=2)
    assert prox.value == pytest.approx((1 + step * MU) ** -2, abs=1e-6)


def test_with_the_best_step_fedsplit_has_the_rate_of_theorem_1():
    found = worst_case("fedsplit", client_lr=1 / math.sqrt(MU * L), mu=MU, measure="contraction")
    assert found.value == pytest.approx(1 - 2 / (math.sqrt(L / MU) + 1), abs=1e-6)


def test_the_first_round_of_scaffold_is_a_round_of_mime():
    setting = {"client_lr": 0.2, "steps": 2, "mu": MU, "zeta": math.inf, "measure": "gap factor"}
    assert worst_case("scaffold", **setting).value == pytest.approx(worst_case("mime", **setting).value, abs=1e-6)
    long = {"client_lr": 1.6, "steps": 3, "mu": MU, "zeta": 5.0, "rounds": 2}
    assert worst_case("scaffold", **long).value > 1.5 * worst_case("mime", **long).value  # older control variates


def quadratic_clients(seed, n=2, d=3):
    """Hessians with eigenvalues in [MU, L] and the minimizer of their sum at 0; gradients there with mean square 1."""
    rng = np.random.default_rng(seed)
    hessians = []
    for _ in range(n):
        q, _ = np.linalg.qr(rng.normal(size=(d, d)))
        hessians.append((q * rng.choice([MU, L, rng.uniform(MU, L)], size=d)) @ q.T)
    tilt = rng.normal(size=(n, d))
    tilt -= tilt.mean(0)
    tilt /= math.sqrt(np.mean(np.sum(tilt**2, 1)))
    start = rng.normal(size=d)
    return hessians, tilt, start / np.linalg.norm(start)


def run(method, hessians, tilt, x, *, step, steps, rounds):
    """The methods in NumPy, written from their papers. Client i's gradient is H_i x + tilt_i."""
    n, d = tilt.shape
    at = [lambda y, i=i: hessians[i] @ y + tilt[i] for i in range(n)]
    controls, z = [at[i](x) for i in range(n)], [x] * n
    for _ in range(rounds):
        if method == "fedsplit":
            z = [
                z[i] + 2 * (np.linalg.solve(np.eye(d) + step * hessians[i], 2 * x - z[i] - step * tilt[i]) - x)
                for i in range(n)
            ]
            x = np.mean(z, 0)
            continue
        ends, renewed = [], []
        for i in range(n):
            shift = {
                "mime": np.mean([g(x) for g in at], 0) - at[i](x),
                "scaffold": np.mean(controls, 0) - controls[i],
            }.get(method, 0.0)
            if method == "fedprox":
                ends.append(np.linalg.solve(np.eye(d) + step * hessians[i], x - step * tilt[i]))
                continue
            y, seen = x, []
            for _ in range(steps):
                seen.append(at[i](y))
                y = y - step * (seen[-1] + shift)
            ends.append(y)
            renewed.append(np.mean(seen, 0))
        controls = renewed or controls
        x = np.mean(ends, 0)
    return x


SETTINGS = {
    "fedavg": {"client_lr": 0.7, "steps": 2},
    "fedprox": {"client_lr": 2.0},
    "mime": {"client_lr": 0.5, "steps": 2},
    "scaffold": {"client_lr": 0.5, "steps": 2},
    "fedsplit": {"client_lr": 3.0},
}
LIMITS = {
    (method, measure): worst_case(method, mu=MU, zeta=1.0, rounds=2, measure=measure, **setting).certified
    for method, setting in SETTINGS.items()
    for measure in ("distance", "gap")
}


def test_every_method_is_here():
    assert set(SETTINGS) == set(METHODS)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), method=st.sampled_from(sorted(SETTINGS)))
def test_no_run_is_worse_than_the_worst_case(seed, method):
    hessians, tilt, start = quadratic_clients(seed)
    setting = SETTINGS[method]
    end = run(method, hessians, tilt, start, step=setting["client_lr"], steps=setting.get("steps", 1), rounds=2)
    assert np.linalg.norm(end) <= LIMITS[method, "distance"] + 1e-6
    assert 0.5 * end @ np.mean(hessians, 0) @ end <= LIMITS[method, "gap"] + 1e-6


@pytest.mark.parametrize("method", ["fedavg", "mime", "scaffold"])
def test_some_run_comes_close(method):
    """So the worst case is not merely large: the hardest of some one-dimensional federations is near it."""
    setting = SETTINGS[method]
    exact = worst_case(method, mu=MU, zeta=0.0, rounds=2, **setting).value
    hardest = 0.0
    for a in (MU, L):
        end = run(
            method, [np.full((1, 1), a)] * 2, np.zeros((2, 1)), np.ones(1), step=setting["client_lr"], steps=2, rounds=2
        )
        hardest = max(hardest, abs(float(end[0])))
    assert exact >= hardest - 1e-6
    assert exact <= 1.1 * hardest


def test_published_rates_are_never_below_the_worst_case():
    for row in compare_rates(mu=MU):
        if row.published is not None:
            assert row.exact <= row.published + 1e-6
            assert row.lost is not None
            assert row.lost >= 1 - 1e-6
    assert published_rate("fedavg", "mean gap", client_lr=0.3) is None  # beyond 1 / (4 L)


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("fedadam", {}, "choose one of fedavg"),
        ("fedavg", {"mu": 1.0}, "mu must be at least 0 and below smoothness"),
        ("fedavg", {"steps": 0}, "steps must be a whole number"),
        ("fedavg", {"measure": "loss"}, "measure must be one of"),
        ("fedavg", {"steps": 2, "zeta": math.inf}, "zeta must be finite"),
        ("fedavg", {"client_lr": math.nan}, "client_lr must be a finite number"),
        ("fedsplit", {"steps": 3}, "steps must be 1"),
        ("mime", {"measure": "mean gap"}, "is for fedavg"),
        ("scaffold", {"measure": "contraction"}, "use 'distance'"),
        ("fedavg", {"clients": 8, "steps": 8}, "take fewer clients"),
    ],
)
def test_what_cannot_be_asked(method, changes, said):
    with pytest.raises(ValueError, match=said):
        worst_case(method, **{"client_lr": 0.5, **changes})


def test_the_command_prints_exact_and_published():
    called = ["theory", "worst-case", "--algorithm", "fedsplit", "--client-lr", "3", "--measure", "contraction"]
    result = CliRunner().invoke(make_app(), [*called, "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    assert row["exact"] == pytest.approx(0.7 / 1.3, abs=1e-6)  # |1 - 3 mu| / (1 + 3 mu)
    assert row["published"] == pytest.approx(row["exact"], abs=1e-6)
    assert "FedSplit, Theorem 1" in CliRunner().invoke(make_app(), called).stdout


def test_legends_of_the_picture_hide_no_curve():
    figure = rates_figure(mu=MU, smoothness=L, points=3)
    check_figure(figure)
    FigureCanvasAgg(figure).draw()  # places the legends
    for axis in figure.axes:
        shown = axis.get_legend().get_window_extent()
        assert shown.y0 >= axis.get_window_extent().y1 - 1, axis.get_title()  # above the panel
        assert axis.title.get_window_extent().y0 >= shown.y1 - 1, axis.get_title()  # and below its title
        assert shown.x1 <= figure.bbox.x1, axis.get_title()
    assert [tick.get_text() for tick in figure.axes[0].get_yticklabels()] == ["0.5", "1", "2", "5"]
