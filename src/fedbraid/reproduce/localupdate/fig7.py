"""Figure 7: simulated MAML-style frontiers for several condition numbers."""

from __future__ import annotations

import numpy as np

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._measured import PAPER, PLOTTED, excess, noise, one_shot
from fedbraid.theory import simulated_frontier
from fedbraid.theory.figures import figure_7

ALL = (2.0, 5.0, 10.0, 100.0)


def run(job: Job) -> Evidence:
    grid = np.unique(np.geomspace(1, 10**6, 300).round().astype(int))
    apart, shared, cusps, noises = [], [], [], []
    for L in ALL:
        frontier = simulated_frontier(mu=1.0, smoothness=L, dim=100, values=grid)
        right = excess(frontier, L)
        below = frontier.delta <= one_shot(L)
        apart.append(float(right[below].max()))
        leaves = int(np.argmax(right > PLOTTED))  # the first K whose point is visibly off the curve
        top = (L - 1) / (L + 1)
        shared.append(float((top - frontier.rho[leaves - 1]) / top))
        fine = np.unique(np.geomspace(20, 5000, 800).round().astype(int))
        still = simulated_frontier(mu=1.0, smoothness=L, dim=100, values=fine, resample=False)
        cusps.append(float(still.delta[int(np.argmin(still.rho))]))
        noises.append(noise(L, dim=5) / noise(L, dim=100))
    findings = [
        Finding("largest distance in rho from FedAvg's curve grows with L", "yes", apart == sorted(apart)),
        Finding(
            "share of FedAvg's rho range traced before leaving falls with L", "yes", shared == sorted(shared)[::-1]
        ),
        Finding("L = 2: that share", "most of the curve", shared[0], 0.5, 1.0),
        Finding("L = 100: that share", "almost immediately", shared[-1], 0.0, 0.1),
        Finding(
            "standard deviation of rho over matrices: d = 5 over d = 100, smallest over L",
            "some noise, a limit",
            min(noises),
            3.0,
        ),
    ]
    for L, cusp in zip(ALL, cusps, strict=True):
        end = one_shot(L)
        what = f"L = {L:g}: Delta at the cusp; one-shot averaging {end:.4f}"
        findings.append(Finding(what, "the same (Section 5)", cusp, end - PLOTTED, end + PLOTTED))
    notes = (
        "Share of the range of rho that the MAML curve (d = 100) has in common with FedAvg's, within "
        f"{PLOTTED}: " + ", ".join(f"L = {L:g}: {s:.2f}" for L, s in zip(ALL, shared, strict=True)) + ".",
        "Largest distance in rho below the cusp: "
        + ", ".join(f"L = {L:g}: {a:.3f}" for L, a in zip(ALL, apart, strict=True))
        + ".",
    )
    return Evidence(tuple(findings), figure_7(), notes)


ENTRY = Entry(
    title="Local update methods, Figure 7: simulated MAML-style frontiers by condition number",
    paper=f"{PAPER}, Figure 7",
    setting="mu = 1, L = 2, 5, 10 and 100, gamma = 0.001, K from 1 to 10^6, random matrices of size 5 and 100 "
    "(Appendix D.1), server gradient descent.",
    quick="the same; it takes seconds",
    run=run,
)
