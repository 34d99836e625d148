"""Section 3 and Figure 1: the two-class linear toy, its local steps and their shadow sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.algorithms import fedavg
from fedbraid.data.federated import Split
from fedbraid.data.toy import toy_loss, toy_optimum, two_class
from fedbraid.reproduce.entry import Entry, Evidence, Finding, Job
from fedbraid.simulation import simulate
from fedbraid.simulation.shadow import ShadowTrace, draw_shadow, trace_shadow
from fedbraid.theory import drift_bound, linear_federation, surrogate_loss, theta_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER = "Renard, Notes on Federated Optimization, 2022"
START, RATE, STEPS, ROUNDS = np.array([-0.6, 0.9]), 0.1, 4, 3


def _parts(split: Split) -> list[tuple[np.ndarray, np.ndarray]]:
    own = [split.client(i) for i in range(split.num_clients)]
    return [(one["x"].astype(float), one["y"].astype(float)) for one in own]


def _by_hand(split: Split, *, rate: float, steps: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Algorithm 1 in NumPy: iterates [round, client, step, 2] and server models [round + 1, 2]."""
    parts = _parts(split)
    server, iterates = [START], []
    for _ in range(rounds):
        paths = []
        for x, y in parts:
            w, path = server[-1], [server[-1]]
            for _ in range(steps):
                w = w - rate * 2 * x.T @ (x @ w - y) / len(y)
                path.append(w)
            paths.append(path)
        iterates.append(paths)
        moved = np.mean([path[-1] - path[0] for path in paths], axis=0)
        server.append(server[-1] + moved)
    return np.array(iterates), np.array(server)


def _misses(split: Split, *, rate: float, steps: int, rounds: int) -> tuple[float, float]:
    """The last model of a long run: its distance from the surrogate's minimizer (theory) and from the optimum."""
    alg = fedavg(toy_loss, client_lr=rate, steps=steps, batch_size=None, weighting="uniform")
    with jax.enable_x64(True):
        end = np.asarray(simulate(alg, jnp.asarray(START), split, rounds=rounds, devices=1).params)
    parts = _parts(split)
    quadratic = linear_federation([2 * x.T @ x / len(y) for x, y in parts], [2 * x.T @ y / len(y) for x, y in parts])
    stop = surrogate_loss(quadratic, gamma=rate, theta=theta_sum(steps)).minimizer
    return float(np.linalg.norm(end - stop)), float(np.linalg.norm(end - toy_optimum(split)))


def _trace(split: Split, rate: float) -> ShadowTrace:
    method = fedavg(toy_loss, client_lr=rate, steps=STEPS, batch_size=None, weighting="uniform")
    with jax.enable_x64(True):
        return trace_shadow(method, jnp.asarray(START), split, rounds=ROUNDS)


def _check_trace(trace: ShadowTrace, split: Split) -> list[Finding]:
    """The shadow sequence and the iterates, against their definition and against NumPy."""
    iterates, server = _by_hand(split, rate=RATE, steps=STEPS, rounds=ROUNDS)
    reset = float(np.abs(trace.drift[:, 0]).max())
    return [
        Finding(
            "shadow at step tau against the server's next model",
            "equal by definition",
            float(np.abs(trace.shadow[:, -1] - trace.server[1:]).max()),
            0.0,
            1e-12,
            kind="own",
        ),
        Finding(
            "iterates of all clients and steps against Algorithm 1 in NumPy",
            "0",
            float(np.abs(trace.iterates - iterates).max()),
            0.0,
            1e-12,
            kind="own",
        ),
        Finding("server models against NumPy", "0", float(np.abs(trace.server - server).max()), 0.0, 1e-12, kind="own"),
        Finding(
            "drift at the start of a round", "0: clients begin at the server's model", reset, 0.0, 1e-20, kind="own"
        ),
        Finding(
            "drift grows with every local step, in every round",
            "drawn so",
            bool(np.all(np.diff(trace.drift, axis=1) > 0)),
        ),
    ]


def _check_drift(split: Split) -> tuple[Finding, str]:
    """Lemma 2.3 at eta = 1/(4L), with the zeta of the points that the run visits."""
    parts = _parts(split)
    hessians = np.array([2 * x.T @ x / len(y) for x, y in parts])
    linear = np.array([2 * x.T @ y / len(y) for x, y in parts])
    smoothness = float(np.linalg.eigvalsh(hessians)[:, -1].max())
    rate = 0.25 / smoothness
    slow = _trace(split, rate)
    # Over the whole plane the differences of the clients' gradients are unbounded, so zeta is taken over the iterates.
    seen = slow.iterates.reshape(-1, 2)
    gradients = np.einsum("iab,nb->ina", hessians, seen) - linear[:, None]
    zeta = float(np.linalg.norm(gradients - gradients.mean(0), axis=-1).max())
    allowed = drift_bound(eta=rate, tau=STEPS, smoothness=smoothness, zeta=zeta, sigma2=0.0).value
    away = float(np.sum((slow.iterates - slow.shadow[:, None]) ** 2, -1).max())
    what = "largest drift of a client over Lemma 2.3's bound, eta = 1/(4L)"
    note = f"L = {smoothness:.3f}; zeta over the iterates seen = {zeta:.3f}. "
    return Finding(what, "at most 1", away / allowed, 0.0, 1.0), note


def _check_ends(job: Job, split: Split) -> tuple[list[Finding], list[float]]:
    """Long runs end at the surrogate's minimizer; with more local steps it is further from the optimum."""
    findings, misses = [], []
    for tau in (1, 4, 16) if job.full else (4,):
        stop, miss = _misses(split, rate=RATE, steps=tau, rounds=400)
        misses.append(miss)
        findings.append(
            Finding(
                f"tau = {tau}: end of 400 rounds against the surrogate's minimizer", "0", stop, 0.0, 1e-9, kind="own"
            )
        )
    if job.full:
        findings.append(
            Finding("tau = 1: distance of that end from the optimum", "0: no drift", misses[0], 0.0, 1e-9, kind="own")
        )
        findings.append(
            Finding("that distance grows with tau = 1, 4, 16", "drift terms grow", misses == sorted(misses))
        )
    return findings, misses


def _draw(trace: ShadowTrace, split: Split) -> Figure:
    everything = {**split.arrays, "mask": np.ones(split.num_examples, np.float32)}
    with jax.enable_x64(True):
        figure = draw_shadow(trace, objective=lambda w: toy_loss(w, everything, None), optimum=toy_optimum(split))
    figure.set_size_inches(7.2, 3.4)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.axes[0].get_legend().remove()
    figure.legend(handles, labels, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    for axis in figure.axes:
        axis.title.set_fontsize(9)
    return figure


def run(job: Job) -> Evidence:
    split = two_class(clients=3, angle=120)
    trace = _trace(split, RATE)
    drift, note = _check_drift(split)
    ends, misses = _check_ends(job, split)
    note += f"Distance of the end from the optimum: {', '.join(f'{m:.3g}' for m in misses)}."
    return Evidence((*_check_trace(trace, split), drift, *ends), _draw(trace, split), (note,))


ENTRY = Entry(
    title="Notes on FedAvg, Section 3 and Figure 1: the toy and its shadow sequence",
    paper=f"{PAPER}, Section 3 and Figure 1",
    setting="One linear layer w . x with two parameters, mean squared error against labels +1 and -1; three clients "
    "whose classes point 60 degrees apart, 40 examples each. FedAvg with 4 local gradient steps of 0.1 from (-0.6, "
    "0.9), three rounds drawn; 400 rounds with tau = 1, 4, 16 for where it ends. Float64.",
    quick="the same rounds, and 400 of tau = 4",
    run=run,
    deviations=(
        "The notes give the model and the loss but no data and no numbers; the data are ours. Their Figure 1 is a "
        "sketch of one round of 4 steps; ours are computed.",
        "Lemma 2.3 needs a zeta that holds everywhere; quadratic clients with different Hessians have none, so zeta "
        "is the largest over the points that the run visits.",
    ),
    remarks=(
        "In the notes k runs from 0 to tau, which would be tau + 1 steps; the update uses x^(t,tau), that is tau "
        "steps.",
    ),
)
