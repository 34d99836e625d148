"""Figure 1: on least squares FedSplit converges to the optimum; FedGD with several steps and FedProx do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedbraid.algorithms import fedgd, fedprox_exact, fedsplit
from fedbraid.data.federated import Split
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.fedsplit._trace import PAPER, draw, residual_loss, trace
from fedbraid.theory import fedgd_gap, fedprox_gap, fedsplit_gap, gaussian_least_squares, split_step
from fedbraid.theory.quadratics import LeastSquares, QuadraticFederation

EPOCHS = (1, 10, 100)
ROUNDS = {"FedGD, e = 1": 120, "FedGD, e = 10": 100, "FedGD, e = 100": 40, "FedProx": 100, "FedSplit": 100}


def _stops(problem: LeastSquares, step: float, prox_step: float) -> dict[str, np.ndarray]:
    """Eqs. (9) and (10) and the FedProx display, written out with matrix powers and inverses."""
    grams = np.einsum("jna,jnb->jab", problem.designs, problem.designs)
    right = np.einsum("jna,jn->ja", problem.designs, problem.responses)
    eye = np.eye(grams.shape[1])
    stops = {"optimum": np.linalg.lstsq(np.concatenate(problem.designs), np.concatenate(problem.responses))[0]}
    for e in EPOCHS:
        sums, power = np.zeros_like(grams), np.broadcast_to(eye, grams.shape)
        for _ in range(e):
            sums, power = sums + power, power @ (eye - step * grams)
        stops[f"FedGD, e = {e}"] = np.linalg.solve((grams @ sums).sum(0), np.einsum("jab,jb->a", sums, right))
    shrink = np.linalg.inv(eye + prox_step * grams)
    left = (eye - shrink).sum(0)
    inner = np.linalg.inv(grams + eye / prox_step)
    stops["FedProx"] = np.linalg.solve(left, np.einsum("jab,jb->a", inner, right))
    return stops


class Setting(NamedTuple):
    """The least-squares problem, its quadratic clients, and the step of FedGD and FedProx."""

    problem: LeastSquares
    fed: QuadraticFederation
    step: float

    @property
    def curvature(self) -> np.ndarray:
        """The Hessian of the paper's loss, which is a sum over clients."""
        return self.fed.hessian * self.fed.num_clients


def _closed_forms(fed: QuadraticFederation, step: float) -> dict[str, np.ndarray]:
    """The gap after every round, by formula."""
    at = {name: np.arange(rounds + 1) for name, rounds in ROUNDS.items()}
    closed = {f"FedGD, e = {e}": fedgd_gap(fed, at[f"FedGD, e = {e}"], step=step, local_steps=e) for e in EPOCHS}
    closed["FedProx"] = fedprox_gap(fed, at["FedProx"], step=step)
    closed["FedSplit"] = fedsplit_gap(fed, ROUNDS["FedSplit"])
    return closed


def _simulated(job: Job, setting: Setting, best: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rounds and gaps from the simulator: all methods, or two of them in the quick form."""
    fed, step, H = setting.fed, setting.step, setting.curvature
    methods = {f"FedGD, e = {e}": fedgd(residual_loss, step=step, local_steps=e, objective="sum") for e in EPOCHS}
    methods["FedProx"] = fedprox_exact(residual_loss, step=step, objective="sum", prox="closed-form")
    prox_step = split_step(fed.mu, fed.smoothness)
    methods["FedSplit"] = fedsplit(residual_loss, step=prox_step, objective="sum", prox="closed-form")
    clients = Split.from_clients(setting.problem.clients())

    def gap(x: Any) -> Any:
        return 0.5 * (x - best) @ H @ (x - best)

    curves = {}
    for name in methods if job.full else ("FedGD, e = 10", "FedSplit"):
        job.tell(name)
        curves[name] = trace(methods[name], np.zeros(fed.dim), clients, gap, rounds=ROUNDS[name])
    return curves


def _check_floors(
    curves: Mapping[str, tuple[np.ndarray, np.ndarray]], stops: Mapping[str, np.ndarray], H: np.ndarray
) -> list[Finding]:
    """The last model of each method, against its fixed point computed by hand."""
    start = float(curves["FedSplit"][1][0])
    findings = []
    for name, (_, gaps) in curves.items():
        if name in ("FedSplit", "FedGD, e = 1"):
            findings.append(
                Finding(f"{name}: last gap over first", "converges to the optimum", float(gaps[-1]) / start, 0.0, 1e-20)
            )
        else:
            stop = stops[name] - stops["optimum"]
            floor = float(0.5 * stop @ H @ stop)
            what = f"{name}: gap at which it stops, over that of its fixed point by hand ({floor:.3g})"
            findings.append(Finding(what, "1", float(gaps[-1]) / floor, 1 - 1e-6, 1 + 1e-6, kind="own"))
            what = f"{name}: that gap over the first one"
            findings.append(Finding(what, "fails to converge to the optimum", floor / start, 1e-9))
    floors = {name: float(gaps[-1]) for name, (_, gaps) in curves.items()}
    findings.append(
        Finding(
            "the floor rises with e = 1, 10, 100",
            "wrong as soon as e > 1",
            floors["FedGD, e = 1"] < floors["FedGD, e = 10"] < floors["FedGD, e = 100"],
        )
    )
    return findings


def _check_rates(
    simulated: Mapping[str, tuple[np.ndarray, np.ndarray]], closed: Mapping[str, np.ndarray], kappa: float
) -> list[Finding]:
    """The simulator against the closed forms, and FedSplit's contraction against Theorem 1."""
    seen = simulated["FedSplit"][1]
    start = float(seen[0])
    large = {name: simulated[name][1] > 1e-12 * start for name in simulated}
    apart = max(float(np.abs(simulated[n][1] / closed[n] - 1)[large[n]].max()) for n in simulated)
    rate = 1 - 2 / (np.sqrt(kappa) + 1)
    until = int(np.argmax(seen < 1e-20 * start))
    measured = float((seen[until] / seen[2]) ** (0.5 / (until - 2)))
    return [
        Finding(
            "simulated gaps against closed forms, method by method, round by round: relative",
            "0",
            apart,
            0.0,
            1e-6,
            kind="own",
        ),
        Finding(
            f"FedSplit's contraction per round; Theorem 1 promises {rate:.3f}",
            "at most that",
            measured,
            0.0,
            float(rate),
        ),
    ]


def run(job: Job) -> Evidence:
    from matplotlib.figure import Figure

    problem = gaussian_least_squares(**({} if job.full else {"clients": 8, "dim": 10, "examples": 50}))
    fed = problem.federation()
    setting = Setting(problem, fed, 1 / fed.smoothness)
    stops = _stops(problem, setting.step, setting.step)
    closed = _closed_forms(fed, setting.step)
    simulated = _simulated(job, setting, stops["optimum"])
    curves = {name: (np.arange(len(gaps)), gaps) for name, gaps in closed.items()} | simulated
    findings = _check_floors(curves, stops, setting.curvature) + _check_rates(simulated, closed, fed.kappa0)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.add_subplot()
    draw(axis, curves, floor=1e-24 * float(curves["FedSplit"][1][0]))
    axis.legend(fontsize=8)
    return Evidence(tuple(findings), figure)


ENTRY = Entry(
    title="FedSplit, Figure 1: where FedGD, FedProx and FedSplit stop on least squares",
    paper=f"{PAPER}, Figure 1 and Appendix B.1",
    setting="25 clients, d = 100, 500 examples each, Gaussian designs, noise variance 0.25, all clients every round, x "
    "= 0 first, float64. FedGD with s = 1/L* and e = 1, 10, 100; FedProx with the exact prox and s = 1/L*; FedSplit "
    "with the exact prox and s = 1/sqrt(l* L*). Run by the simulator; the fixed points are solved from eqs. (9) and "
    "(10) with NumPy.",
    quick="8 clients, d = 10, 50 examples each: the same findings; the simulator runs FedGD with e = 10 and FedSplit, "
    "the others are computed by closed forms",
    run=run,
    deviations=(
        "The paper does not state its step sizes; ours are above. It does not print the figure's numbers, so the fixed "
        "points are compared with its closed forms.",
        "FedSplit is drawn as well; the paper's figure has FedGD and FedProx only.",
    ),
)
