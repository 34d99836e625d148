"""Figure 2(a): logistic regression by FedGD and by FedSplit with exact and inexact proxes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import fedgd, fedsplit
from fedbraid.core import Algorithm
from fedbraid.data.federated import Split
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.fedsplit._trace import PAPER, draw, trace
from fedbraid.theory import logistic_clients, rounds_until

ACCURACY = 1e-6  # in the paper, e = 10 follows the exact prox to below this gap


class Constants(NamedTuple):
    """Curvatures of the clients' losses: the extremes at x = 0, where it is maximal, and at the optimum."""

    smoothness: float
    convexity_first: float
    smoothness_there: float
    strong_convexity: float


def logistic_loss(x: Any, batch: Mapping[str, Any], key: Any) -> Any:
    margin = batch["y"] * (batch["x"] @ x)
    return jnp.sum(batch["mask"] * jnp.logaddexp(0.0, -margin)) / jnp.sum(batch["mask"])


def _optimum(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, float]:
    """Newton's method on the pooled problem in NumPy, independent of all methods below."""
    at = np.zeros(x.shape[1])

    def value(at: np.ndarray) -> float:
        return float(np.logaddexp(0.0, -y * (x @ at)).sum())

    for _ in range(100):
        gradient = -x.T @ (y / (1 + np.exp(y * (x @ at))))
        step = np.linalg.solve(_hessian(x, at), gradient)
        t = 1.0
        while value(at - t * step) > value(at) and t > 1e-3:
            t /= 2
        at = at - t * step
        if np.linalg.norm(step) < 1e-12:
            break
    return at, value(at)


def _hessian(x: np.ndarray, at: np.ndarray) -> np.ndarray:
    p = 1 / (1 + np.exp(-x @ at))
    return (x * (p * (1 - p))[:, None]).T @ x


def _constants(clients: Split, best: np.ndarray) -> Constants:
    designs = [np.asarray(clients.client(j)["x"]) for j in range(clients.num_clients)]
    first, there = ([np.linalg.eigvalsh(_hessian(x, at)) for x in designs] for at in (np.zeros_like(best), best))
    largest, least = [[float(pick(v[i] for v in at)) for at in (first, there)] for i, pick in ((-1, max), (0, min))]
    return Constants(largest[0], least[0], largest[1], least[1])


def _straight(at: np.ndarray, gaps: np.ndarray) -> float:
    """R^2 of a line through log(gap) over the later half of the rounds."""
    x, y = at[len(at) // 2 :], np.log(gaps[len(at) // 2 :])
    return float(np.corrcoef(x, y)[0, 1] ** 2)


class Problem(NamedTuple):
    """The clients, the curvatures, and the gap to the pooled optimum."""

    clients: Split
    known: Constants
    gap: Callable[[Any], Any]

    @property
    def start(self) -> np.ndarray:
        return np.zeros(self.clients.arrays["x"].shape[1])

    @property
    def step(self) -> float:
        return 1 / self.known.smoothness_there

    @property
    def theorems_step(self) -> float:
        """Theorem 1's s = 1 / sqrt(l* L*), both taken at x = 0."""
        return 1 / (self.known.convexity_first * self.known.smoothness) ** 0.5

    def inexact(self, e: int, *, step: float | None = None, start: Any = "point") -> Algorithm:
        """FedSplit with ``e`` gradient steps per prox."""
        return fedsplit(
            logistic_loss,
            step=self.step if step is None else step,
            prox="gradient",
            local_steps=e,
            start=start,
            strong_convexity=self.known.strong_convexity,
            smoothness=self.known.smoothness_there,
            objective="sum",
        )


def _problem(job: Job) -> Problem:
    clients = Split.from_clients(logistic_clients(**({} if job.full else {"clients": 4, "dim": 10, "examples": 300})))
    x, y = np.asarray(clients.arrays["x"]), np.asarray(clients.arrays["y"])
    best, value = _optimum(x, y)

    def gap(at: Any) -> Any:
        return jnp.sum(jnp.logaddexp(0.0, -y * (x @ at))) - value

    return Problem(clients, _constants(clients, best), gap)


def _curves(job: Job, problem: Problem, step: float, rounds: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Rounds and gaps of every method; of two of them in the quick form."""
    plain = fedgd(logistic_loss, step=1 / problem.known.smoothness, local_steps=1, objective="sum")
    methods = {
        "FedGD, e = 1": plain,
        "FedSplit, exact": fedsplit(logistic_loss, step=step, prox="newton", tolerance=1e-10, objective="sum"),
        **{f"FedSplit, e = {e}": problem.inexact(e, step=step) for e in (1, 5, 10)},
    }
    curves = {}
    for name in methods if job.full else ("FedSplit, exact", "FedSplit, e = 10"):
        job.tell(f"{name}, s = {step:.4f}")
        curves[name] = trace(methods[name], problem.start, problem.clients, problem.gap, rounds=rounds, every=5)
    return curves


def _check_split(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], of: str = "") -> list[Finding]:
    """FedSplit with the exact prox, and with ten gradient steps against it; ``of`` names the s."""
    at, exact = curves["FedSplit, exact"]
    tenth = curves["FedSplit, e = 10"][1]
    early = exact > ACCURACY
    apart = float(np.abs(np.log10(np.maximum(tenth, 1e-300) / np.maximum(exact, 1e-300)))[early].max())
    late = (exact > 1e-9) & (at > 0)
    return [
        Finding(
            f"FedSplit, exact{of}: R^2 of a line through log(gap), later half",
            "linear",
            _straight(at[late], exact[late]),
            0.99,
        ),
        Finding(f"FedSplit, e = 10{of}: gap it ends at", "below 1e-6", abs(float(tenth[-1])), 0.0, ACCURACY),
        Finding(
            f"FedSplit, e = 10{of}: largest factor (log10) to the exact prox while that is above 1e-6",
            "tracks it",
            apart,
            0.0,
            0.1,
        ),
    ]


def _check_others(curves: Mapping[str, tuple[np.ndarray, np.ndarray]], of: str = "") -> list[Finding]:
    """Few gradient steps leave an error floor, and FedGD is slower."""
    floors = {name: float(gaps[-1]) for name, (_, gaps) in curves.items()}
    at, exact = curves["FedSplit, exact"]
    when = int(at[rounds_until(exact, 1e-3) or -1])
    there = float(curves["FedGD, e = 1"][1][list(at).index(when)])
    return [
        Finding(f"FedSplit, e = 1{of}: gap it ends at", "a floor", floors["FedSplit, e = 1"], 1e-2),
        Finding(
            f"FedSplit, e = 5{of}: gap it ends at, between those of e = 1 and 10",
            "a floor",
            floors["FedSplit, e = 5"],
            1e-6,
            floors["FedSplit, e = 1"],
        ),
        Finding(
            f"FedGD{of and ', 1,500 rounds'}: R^2 of a line through log(gap), later half",
            "linear",
            _straight(*curves["FedGD, e = 1"]),
            0.99,
        ),
        Finding(
            f"FedGD: gap at round {when}, where FedSplit's{of} is 1e-3, over FedSplit's",
            "outperformed",
            there / 1e-3,
            10.0,
        ),
    ]


def _largest_step(job: Job, problem: Problem) -> tuple[list[Finding], tuple[str, ...]]:
    """The final gap with ten local steps at the largest reading of Theorem 1's s, by starting point."""
    known, ends = problem.known, []
    step = 1 / (known.strong_convexity * known.smoothness) ** 0.5
    for begin in ("point", "server"):
        job.tell(f"s = {step:.3f}, from {begin}")
        method = problem.inexact(10, step=step, start=begin)
        last = trace(method, problem.start, problem.clients, problem.gap, rounds=200, every=50)[1][-1]
        ends.append(max(float(last), 1e-12))  # smaller values are rounding errors
    what = f"FedSplit, e = 10, Theorem 1's s = {step:.3f} with l* at the optimum, 200 rounds: gap it ends at"
    return [Finding(what, "below 1e-6", ends[0], 0.0, ACCURACY)], (
        f"Curvatures of the clients: {known.convexity_first:.0f} to {known.smoothness:.0f} at x = 0, "
        f"{known.strong_convexity:.2f} to {known.smoothness_there:.0f} at the optimum.",
        f"With s = {step:.3f} (Theorem 1's with l* at the optimum and L* at x = 0) ten gradient steps end, after 200 "
        f"rounds, at a gap of {ends[0]:.2g} if they start at 2x - z_j, eq. (17), which is the row above; of "
        f"{ends[1]:.2g} if they start at x, the library's default.",
    )


def run(job: Job) -> Evidence:
    from matplotlib.figure import Figure

    problem = _problem(job)
    readings = {"": (problem.step, 600 if job.full else 200)}
    if job.full:
        readings[f", Theorem 1's s = {problem.theorems_step:.4f}"] = problem.theorems_step, 1500
    figure = Figure(figsize=(5.5 * len(readings) + 1.5, 4), layout="constrained")
    axes = figure.subplots(1, len(readings), squeeze=False, sharey=True)[0]
    findings: list[Finding] = []
    for axis, (of, (step, rounds)) in zip(axes, readings.items(), strict=True):
        curves = _curves(job, problem, step, rounds)
        findings += _check_split(curves, of)
        if job.full:
            findings += _check_others(curves, of)
        draw(axis, curves, floor=1e-11)
        axis.set_title(f"s = {step:.4f}", fontsize=10, loc="left")
    axes[0].legend(fontsize=8)
    more, notes = _largest_step(job, problem) if job.full else ([], ())
    return Evidence((*findings, *more), figure, notes)


ENTRY = Entry(
    title="FedSplit, Figure 2(a): logistic regression, exact and inexact proxes",
    paper=f"{PAPER}, Figure 2(a) and Appendix B.2.1",
    setting="10 clients, d = 100, 1,000 examples each, Gaussian features, labels from the logistic model; all clients "
    "every round, from x = 0, float64, by the simulator. FedGD with e = 1 and s = 1/L*, L* taken at x = 0. FedSplit "
    "with the prox by Newton's method, or by e = 1, 5, 10 gradient steps of Corollary 1's size from 2x - z_j, eq. "
    "(17), with two s: 1/L*, L* taken at the optimum, 600 rounds; and Theorem 1's s = 1/sqrt(l* L*), both taken at x "
    "= 0, 1,500 rounds; and, with e = 10 alone, that s with l* taken at the optimum, 200 rounds. The optimum is "
    "NumPy's Newton on the pooled examples.",
    quick="4 clients, d = 10, 300 examples each, 200 rounds: FedSplit exact and with e = 10",
    run=run,
    deviations=(
        "The paper does not state the steps s of this figure, nor where the curvatures of its theorem are taken.",
        "The exact prox is our Newton solver, to a gradient of 1e-10; the paper used CVXPY.",
    ),
    remarks=(
        "Two readings of s give the paper's picture: 1/L*, with L* at the optimum, and Theorem 1's s with both "
        "curvatures at x = 0. With both, e = 10 follows the exact prox to below 1e-6, and fewer steps leave a floor.",
        "A third reading does not: if Theorem 1's l* is taken at the optimum, where it is 128 times smaller, s is 11 "
        "times as large, and ten gradient steps from 2x - z_j stop far from the optimum. This is the last row, outside "
        "of its band.",
        "The other row outside of its band: with s = 0.0045 the floor of e = 5 is at 6e-7, below the 1e-6 that we "
        "asked for.",
    ),
    duration="six minutes on 2 cores",
)
