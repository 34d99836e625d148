"""Figure 2: client drift of FedAvg with server momentum, and of Mime, on two clients in the plane."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import fedavg, fedavgm, mime, mimelite
from fedbraid.core import Algorithm
from fedbraid.data.federated import Split
from fedbraid.data.toy import toy_loss
from fedbraid.drawing import BLUE, GREEN, ORANGE, PINK, tidy
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.simulation.shadow import ShadowTrace, trace_shadow
from fedbraid.theory import federation, surrogate_loss, theta_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

START, RATE, STEPS, BETA, ROUNDS, SHOWN = np.array([-0.2, 2.0]), 0.3, 3, 0.5, 120, 5
OPTIMA = np.array([[-1.0, 0.0], [1.0, 0.0]])
STEEP, FLAT = 2.0, 0.2  # curvatures of a client along and across its steep direction
DIRECTIONS = np.deg2rad([35.0, -75.0])
NAMES = ("FedAvg, server momentum", "Mime, momentum", "equation (5): MimeLite, momentum")


def _hessians() -> np.ndarray:
    along = np.stack([np.cos(DIRECTIONS), np.sin(DIRECTIONS)], 1)
    return FLAT * np.eye(2) + (STEEP - FLAT) * np.einsum("ia,ib->iab", along, along)


def _clients(hessians: np.ndarray) -> Split:
    """Two rows x per client with X'X = A, so that the mean of (w . x - y)^2 is (w - c)' A (w - c) / 2."""
    roots = [np.linalg.cholesky(a).T for a in hessians]
    return Split.from_clients([{"x": r, "y": r @ c} for r, c in zip(roots, OPTIMA, strict=True)])


def _methods() -> dict[str, Algorithm]:
    local = {"client_lr": RATE, "steps": STEPS, "batch_size": None, "weighting": "uniform"}
    momentum = {"base": "momentum", "beta": BETA}
    averaged = fedavgm(toy_loss, momentum=BETA, kind="average", **local)
    mimes = (mime(toy_loss, **momentum, **local), mimelite(toy_loss, **momentum, **local))
    return {**dict(zip(NAMES, (averaged, *mimes), strict=True)), "FedAvg": fedavg(toy_loss, **local)}


def _by_hand(name: str, hessians: np.ndarray, *, rate: float = RATE, rounds: int = ROUNDS) -> np.ndarray:
    """The server's models [round + 1, 2] by the equations of Appendix A and Algorithm 1, in NumPy."""
    x, m, server = START, np.zeros(2), [START]
    for _ in range(rounds):
        gradients = np.einsum("iab,ib->ia", hessians, x - OPTIMA)
        c, ends = gradients.mean(0), []
        for i in range(2):
            y = x
            for _ in range(STEPS):
                g = hessians[i] @ (y - OPTIMA[i])
                if name.startswith("Mime"):
                    g = g - gradients[i] + c
                y = y - rate * (g if name.startswith("FedAvg") else (1 - BETA) * g + BETA * m)
            ends.append(y)
        moved = x - np.mean(ends, axis=0)
        if name == "FedAvg, server momentum":
            m = (1 - BETA) * moved + BETA * m
            x = x - m
        else:
            m = (1 - BETA) * c + BETA * m
            x = x - moved
        server.append(x)
    return np.array(server)


def _distance(points: np.ndarray, to: np.ndarray) -> np.ndarray:
    return np.linalg.norm(points - to, axis=-1)


def _rounds_to_end(server: np.ndarray) -> int:
    """The first round after which the model stays within 1% of the way to its end."""
    left = _distance(server, server[-1])
    return int(np.flatnonzero(left > 0.01 * left[0])[-1]) + 1


def _speedups(hessians: np.ndarray) -> dict[float, float]:
    """Rounds that FedAvg needs with server momentum over those without, by the rate of local steps."""

    def needed(name: str, rate: float) -> int:
        return _rounds_to_end(_by_hand(name, hessians, rate=rate, rounds=1000))

    return {rate: needed(NAMES[0], rate) / needed("FedAvg", rate) for rate in (0.02, 0.04, 0.08, 0.15, RATE)}


def _findings(
    traces: Mapping[str, ShadowTrace], hessians: np.ndarray, speedups: Mapping[float, float]
) -> list[Finding]:
    problem = federation(hessians, OPTIMA)
    best, middle = problem.minimizer, OPTIMA.mean(0)
    ends = {name: trace.server[-1] for name, trace in traces.items()}
    averaged, corrected, lite = (ends[name] for name in NAMES)
    wrong = float(_distance(averaged, best))
    local = {name: float(_distance(traces[name].iterates[-20:], best).mean()) for name in NAMES}
    far = surrogate_loss(problem, gamma=RATE, theta=theta_sum(1000)).minimizer
    stop = surrogate_loss(problem, gamma=RATE, theta=theta_sum(STEPS)).minimizer
    apart = max(float(np.abs(traces[name].server - _by_hand(name, hessians)).max()) for name in traces)
    return [
        Finding("FedAvg ends away from x*: distance", "quite different", wrong, 0.1),
        Finding(
            "FedAvg's end is nearer to the mean of the clients' optima than x* is: share of the distance",
            "moves towards that mean",
            float(_distance(averaged, middle) / _distance(best, middle)),
            0.0,
            0.95,
        ),
        Finding(
            "1,000 local steps: distance of FedAvg's end from the mean of the clients' optima",
            "the mean, for large K",
            float(_distance(far, middle)),
            0.0,
            1e-6,
        ),
        Finding(
            "ends of FedAvg with and without server momentum: distance",
            "momentum does not correct it",
            float(_distance(averaged, ends["FedAvg"])),
            0.0,
            1e-6,
        ),
        Finding(
            "local models of Mime near its end: mean distance from x*, over FedAvg's",
            "closer to x*",
            local[NAMES[1]] / local[NAMES[0]],
            0.0,
            1.0,
        ),
        Finding(
            "equation (5), no correction: distance of its end from x*, over FedAvg's",
            "less biased",
            float(_distance(lite, best)) / wrong,
            0.0,
            1.0,
        ),
        Finding("Mime: distance of its end from x*", "0", float(_distance(corrected, best)), 0, 1e-6, kind="own"),
        Finding(
            "FedAvg: distance of its end from the surrogate's minimizer",
            "0",
            float(_distance(ends["FedAvg"], stop)),
            0.0,
            1e-6,
            kind="own",
        ),
        Finding("server models of the four methods against NumPy", "0", apart, 0.0, 1e-10, kind="own"),
        Finding(
            "rounds to FedAvg's end, with server momentum over without: smallest over five rates",
            "below 1 at some rate",
            min(speedups.values()),
            0.0,
            0.99,
            kind="own",
        ),
    ]


def _draw(traces: Mapping[str, ShadowTrace], hessians: np.ndarray) -> Figure:
    from matplotlib.figure import Figure

    best = federation(hessians, OPTIMA).minimizer
    figure = Figure(figsize=(10.5, 4.2), layout="constrained")
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    grid = np.stack(np.meshgrid(np.linspace(-1.35, 1.35, 80), np.linspace(-0.6, 2.2, 80)), -1)
    away = grid[:, :, None] - OPTIMA
    loss = np.einsum("xyia,iab,xyib->xy", away, hessians, away) / 4
    for axis, name in zip(axes, NAMES, strict=True):
        trace = traces[name]
        axis.contour(grid[..., 0], grid[..., 1], loss, levels=12, colors="0.85", linewidths=0.8)
        for t in range(SHOWN):
            for j in np.argsort(trace.clients[t]):
                path, client = trace.iterates[t, j], int(trace.clients[t, j])
                label = f"local steps of client {client + 1}" if t == 0 else None
                axis.plot(path[:, 0], path[:, 1], ".-", color=(ORANGE, GREEN)[client], ms=4, lw=1, label=label)
        path = trace.server[: SHOWN + 1]
        axis.plot(path[:, 0], path[:, 1], "s", color=BLUE, ms=5, label="server")
        end = trace.server[-1]
        axis.plot(end[0], end[1], "X", color=BLUE, ms=9, mec="white", label=f"its end, round {ROUNDS}", zorder=4)
        for i, (x, y) in enumerate(OPTIMA):
            axis.plot(x, y, "o", color=(ORANGE, GREEN)[i], ms=8, mec="black", label=f"optimum of client {i + 1}")
        axis.plot(*OPTIMA.mean(0), "D", color=PINK, ms=7, mec="black", label="mean of the clients' optima")
        axis.plot(best[0], best[1], "*", color="white", mec="black", ms=15, label="global optimum", zorder=3)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("first parameter")
        tidy(axis)
    axes[0].set_ylabel("second parameter")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def run(job: Job) -> Evidence:
    hessians = _hessians()
    split = _clients(hessians)
    with jax.enable_x64(True):
        traces = {
            name: trace_shadow(method, jnp.asarray(START), split, rounds=ROUNDS) for name, method in _methods().items()
        }
    best = federation(hessians, OPTIMA).minimizer
    ends = ", ".join(f"{name}: {_distance(trace.server[-1], best):.3g}" for name, trace in traces.items())
    speedups = _speedups(hessians)
    shares = ", ".join(f"{rate:g}: {share:.2f}" for rate, share in speedups.items())
    notes = (
        f"Distance of the ends from x*: {ends}.",
        f"Rounds of FedAvg with server momentum over those without, by the rate of local steps: {shares}.",
    )
    findings = _findings(traces, hessians, speedups)
    if job.full:
        what = f"rounds to FedAvg's end, with server momentum over without, at the rate {RATE}"
        findings.append(Finding(what, "only speeds up", speedups[RATE], 0.0, 0.99))
    return Evidence(tuple(findings), _draw(traces, hessians), notes)


ENTRY = Entry(
    title="Mime, Figure 2: client drift of FedAvg and of Mime on two clients",
    paper="Karimireddy et al., Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning, Figure 2, "
    "Appendix A",
    setting="Two quadratic clients in the plane with curvatures 2 and 0.2 in different directions; optima (-1, 0) and "
    f"(1, 0). {STEPS} local gradient steps of {RATE}, momentum {BETA}, both clients in every round, {ROUNDS} rounds "
    f"from (-0.2, 2), of which {SHOWN} are drawn. Float64.",
    quick="the same in seconds, without the row on the speed at the rate 0.3",
    run=run,
    deviations=(
        "The paper's figure is a sketch without numbers; the problem is ours.",
        "The text samples one client per round and explains equation (5), which has no correction: that is MimeLite. "
        "The caption says Mime. Both are drawn, with both clients in every round, so that the ends are points.",
    ),
    remarks=(
        "Equation (5) reduces the bias but does not remove it: each local gradient keeps the weight 1 - beta. Mime's "
        "correction removes it when all clients take part.",
        "The row outside of its band: at the rate 0.3 of the sketch, server momentum as a moving average makes FedAvg "
        "need more than twice as many rounds. Momentum helps only at smaller rates: the last note lists the ratio at "
        "five rates, and one of our own checks is the smallest ratio. The paper gives no numbers and no rate.",
    ),
)
