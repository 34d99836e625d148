"""Figure 4: MAML-style messages inside Lemma 4 trace a part of FedAvg's frontier."""

from __future__ import annotations

import math

import numpy as np

from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.reproduce.localupdate._measured import PAPER, local_update, matrix, off_curve, printed_rate
from fedbraid.theory import MOMENTA, pareto_frontier
from fedbraid.theory.figures import NAMES, figure_4

L = 10.0
# K -> infinity with gamma = 1 / (2 L K): kappa = 10 exp(-1/2 + 1/20)
KAPPA = L * math.exp(-0.5 * (1 - 1 / L))


def _stepwise() -> float:
    worst = 0.0
    for steps in (1, 2, 20, 300):
        seen = local_update(matrix(L), gamma=1 / (2 * L * steps), steps=steps, family="last")
        said = pareto_frontier(
            mu=1.0, smoothness=L, family="last", gamma_of_steps=lambda k: 1 / (2 * L * k), values=[steps]
        )
        worst = max(
            worst, abs(float(said.rho[0]) - printed_rate(seen.kappa, "none")), abs(float(said.delta[0]) - seen.delta)
        )
    return worst


def run(job: Job) -> Evidence:
    findings, near_zero = [], []
    for momentum in MOMENTA:
        fedavg = pareto_frontier(mu=1.0, smoothness=L, gamma=0.001, momentum=momentum)
        maml = pareto_frontier(
            mu=1.0, smoothness=L, family="last", gamma_of_steps=lambda k: 1 / (2 * L * k), momentum=momentum
        )
        rho, start = printed_rate(KAPPA, momentum), printed_rate(L, momentum)
        name = NAMES[momentum]
        findings += [
            Finding(
                f"{name}: distance of either frontier from one curve",
                "MAML a subset",
                max(off_curve(maml, L, momentum), off_curve(fedavg, L, momentum)),
                0.0,
                1e-8,
            ),
            Finding(
                f"{name}: both begin at rho (K = 1); by hand {start:.4f}",
                "the same",
                float(max(abs(maml.rho[0] - start), abs(fedavg.rho[0] - start))),
                0.0,
                1e-9,
            ),
            Finding(
                f"{name}: smallest rho of MAML; by hand {rho:.4f}",
                "more restrictive",
                float(maml.rho.min()),
                rho - 1e-4,
                rho + 1e-4,
            ),
            Finding(f"{name}: smallest rho of FedAvg", "about 0", float(fedavg.rho.min()), 0.0, 0.005),
        ]
        near_zero.append(float(np.interp(0.02, fedavg.rho[::-1], fedavg.delta[::-1])))
    findings += [
        Finding(
            "FedAvg at rho = 0.02: Delta differs between momenta by", "similar", float(np.ptp(near_zero)), 0.0, 0.01
        ),
        Finding("MAML's frontier against Algorithm 2 run step by step", "0", _stepwise(), 0.0, 1e-9, kind="own"),
    ]
    return Evidence(tuple(findings), figure_4())


ENTRY = Entry(
    title="Local update methods, Figure 4: FedAvg against MAML-style messages, by server momentum",
    paper=f"{PAPER}, Figure 4",
    setting="mu = 1, L = 10, alpha = 0, K from 1 to 10^6; FedAvg with gamma = 0.001, MAML-style messages Theta_K with "
    "gamma = 1/(2 L K), which Lemma 4 allows; three server momenta.",
    quick="the same; it takes seconds",
    run=run,
    remarks=("The caption's K in [0, 10^6] begins at 1: no gradient is sent at K = 0.",),
)
