"""Figure 10: a proximal term on simulated MAML-style frontiers."""

from __future__ import annotations

import numpy as np

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._measured import PAPER, local_update, matrix
from fedbraid.theory import pareto_frontier, simulated_frontier
from fedbraid.theory.figures import figure_10
from fedbraid.theory.frontier import Frontier

L, GAMMA = 10.0, 0.001
ALPHAS = (0.0, 0.5, 1.0, 10.0)


def _apart(a: Frontier, b: Frontier) -> float:
    """Largest distance in rho at equal Delta; Delta grows with K on either curve."""
    inside = (a.delta <= b.delta[-1]) & (a.delta < 0.999)
    return float(np.abs(a.rho - np.interp(a.delta, b.delta, b.rho))[inside].max())


def run(job: Job) -> Evidence:
    # one matrix for all K and alpha, so that only alpha differs
    grid = np.unique(np.geomspace(1, 5000, 600).round().astype(int))
    maml = [
        simulated_frontier(mu=1.0, smoothness=L, dim=100, alpha=a, values=grid, gamma=GAMMA, resample=False)
        for a in ALPHAS
    ]
    fedavg = [pareto_frontier(mu=1.0, smoothness=L, gamma=GAMMA, alpha=a) for a in ALPHAS]
    findings = []
    for alpha, frontier in zip(ALPHAS, fedavg, strict=True):
        kappa = L * (1 + alpha) / (L + alpha)
        rho = (kappa - 1) / (kappa + 1)
        what = f"alpha = {alpha:g}: smallest rho of FedAvg; by hand {rho:.4f}"
        findings.append(Finding(what, "shrinks", float(frontier.rho.min()), rho - 1e-6, rho + 1e-6))
    for alpha, frontier in zip(ALPHAS[1:], maml[1:], strict=True):
        what = f"alpha = {alpha:g}: largest change of MAML's curve in rho, d = 100"
        findings.append(Finding(what, "not by a meaningful amount", _apart(frontier, maml[0]), 0.0, 0.01))
    worst = 0.0
    for steps, alpha in ((50, 0.5), (250, 1.0), (700, 10.0)):
        seen = local_update(matrix(L, dim=5, seed=3), gamma=GAMMA, steps=steps, family="last", alpha=alpha)
        said = simulated_frontier(mu=1.0, smoothness=L, dim=5, values=[steps], seed=3, alpha=alpha)
        worst = max(
            worst, abs(float(said.rho[0]) - (seen.kappa - 1) / (seen.kappa + 1)), abs(float(said.delta[0]) - seen.delta)
        )
    findings.append(
        Finding("frontier against Algorithm 2 with the proximal term, step by step", "0", worst, 0.0, 1e-8, kind="own")
    )
    return Evidence(tuple(findings), figure_10())


ENTRY = Entry(
    title="Local update methods, Figure 10: a proximal term on simulated MAML-style frontiers",
    paper=f"{PAPER}, Figure 10",
    setting="mu = 1, L = 10, gamma = 0.001, alpha = 0, 0.5, 1 and 10, K from 1 to 10^6, random matrices of size 5 and "
    "100, server gradient descent. Curves are compared with one matrix for all K.",
    quick="the same; it takes seconds",
    run=run,
    remarks=(
        "With the proximal term, (1 - gamma (lambda + alpha))^(K-1) is nearly (1 - gamma alpha)^(K-1) times the same "
        "expression without it. A common factor changes neither kappa nor Delta, so the curve of Theta_K stays.",
    ),
)
