"""Advice from estimated constants and from trial rounds: which settings are safe, what limits a round, what to try.

`advise` is arithmetic, so it can be tested without a run. Every sentence names the result on which it is based.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedbraid.drawing import bars_svg, table_html
from fedbraid.theory.bounds import mime_rounds
from fedbraid.theory.constants import Constants, envelope
from fedbraid.theory.frontier import Point, point
from fedbraid.theory.surrogate import theta_sum

__all__ = ["Advice", "Probe", "Sentence", "Settings", "advise", "error_terms", "round_down"]

CLEAR = 2.0  # a difference counts if it is this many standard errors
AVERAGING = ("fedavg", "fedprox", "reptile", "meta_minibatch_prox")
"""Methods whose server steps along the mean upload, without a state: a probe, which is a round of FedAvg, fits them."""

TRADE_OFFS = "Charles and Konecny 2021"
MIME = "Karimireddy et al. 2021 (Mime)"
FEDSPLIT = "Pathak and Wainwright 2020 (FedSplit)"


class Settings(NamedTuple):
    """The settings of a run that the advice is about. ``steps`` is the mean number of local steps per client."""

    algorithm: str
    client_lr: float | None
    steps: float
    cohort: int
    clients: int
    rounds: int
    batch_size: int | None = 20
    server_lr: float = 1.0
    alpha: float = 0.0


class Probe(NamedTuple):
    """One round tried with K local steps: the decrease of the mean training loss, for each server step.

    noise: the standard error of these decreases over the cohorts that were tried.
    """

    steps: int
    fell: Mapping[float, float]  # server step -> loss before - loss after
    noise: float = 0.0


class Sentence(NamedTuple):
    """One sentence of advice and the result on which it is based."""

    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} [{self.source}]"


@dataclass(frozen=True, repr=False)
class Advice:
    """Sentences, settings to try, and limitations.

    >>> from fedbraid.theory.constants import Estimate as E
    >>> c = Constants(
    ...     L=E(4.0), mu=E(0.5), L_client_max=E(8.0), L_client_mean=E(5.0), mu_client_min=E(0.2), sigma2=E(0.1),
    ...     G2=E(2.0), B2=E(5.0), zeta=E(3.0), delta=E(1.0), delta_mean=E(0.7), grad_norm2=E(0.5), loss=E(1.0),
    ...     clients=10, population=100, batch_size=20,
    ... )
    >>> advice = advise([c], Settings("fedavg", 0.3, 5.0, 10, 100, 200))
    >>> advice.safe_client_lr, advice.typical_client_lr, advice.mime_steps, advice.dominant
    (0.125, 0.2, 4, 'drift')
    >>> print(advice.sentences[0])
    At the last point the mean curvature of a client is L_i = 5, so a step of 1 / L_i = 0.2 is typical; yours, 0.3, is \
1.5 times that. Every surrogate stays convex up to 1 / max L_i = 0.125. Tuned steps are often several times larger. \
[Charles and Konecny 2021, Lemma 1]
    """

    safe_client_lr: float
    typical_client_lr: float
    mime_steps: int
    dominant: str
    terms: dict[str, float]
    rounds_by_family: dict[str, float]
    predicted: Point | None
    sentences: tuple[Sentence, ...]
    unknown: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return "\n".join(["Advice", *(f"- {sentence}" for sentence in self.sentences)])

    def _repr_html_(self) -> str:
        rows = [(str(i), sentence.text, sentence.source) for i, sentence in enumerate(self.sentences, 1)]
        return table_html(rows, ["", "advice", "source"]) + bars_svg(self.terms)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        predicted = None
        if self.predicted is not None:
            p = self.predicted
            predicted = {"kappa": p.kappa, "delta": p.delta, "rho": p.rho, "method": p.method}
        return {
            "safe_client_lr": self.safe_client_lr,
            "typical_client_lr": self.typical_client_lr,
            "mime_steps": self.mime_steps,
            "dominant": self.dominant,
            "terms": self.terms,
            "rounds_by_family": self.rounds_by_family,
            "predicted": predicted,
            "settings": self.settings,
            "sentences": [s._asdict() for s in self.sentences],
            "unknown": list(self.unknown),
        }


def advise(points: Sequence[Constants], settings: Settings, probes: Sequence[Probe] = ()) -> Advice:
    """Advice from the constants at one or more points of a run, and from probes if there are any.

    An example is at `Advice`.
    """
    if not points:
        raise ValueError("advise needs the constants of at least one point")
    worst, last = envelope(points), points[-1]
    safe = _one_over(worst.L_client_max.value, settings)
    typical = _one_over(last.L_client_mean.value, settings)  # curvature often falls tenfold in the first rounds
    terms = error_terms(last, settings)
    dominant = max(terms, key=lambda name: terms[name])
    mime_steps = max(1, math.ceil(last.L.value / last.delta.value - 1e-9)) if last.delta.value > 0 else 1
    about_probes, tried = _about_probes(probes, settings, typical)
    families = _rounds_by_family(last, settings)
    predicted, not_predicted = _predict(worst, settings)
    sentences = (
        _about_step(settings, last, typical, safe),
        *_about_terms(terms, dominant, last),
        _about_hessians(last, mime_steps),
        *about_probes,
        *_about_families(families, last, settings, dominant),
        *_about_prediction(predicted),
        Sentence(
            "Constants explain a run; they do not choose its settings well. `fedbraid advise` compares methods and "
            "rates by a pilot.",
            "docs/advise.md",
        ),
    )
    unknown = (
        *not_predicted,
        "the constants hold at the points where they were estimated; a theorem needs them everywhere",
        "rounds by family have unknown constant factors: compare them with each other, do not plan with them",
        *dict.fromkeys(note for p in points for note in p.notes),
    )
    wanted = {"client_lr": round_down(typical)} if settings.client_lr is not None and math.isfinite(typical) else {}
    chosen = {**wanted, **tried}
    return Advice(safe, typical, mime_steps, dominant, terms, families, predicted, sentences, unknown, chosen)


def _one_over(curvature: float, settings: Settings) -> float:
    return 1.0 / (curvature + settings.alpha) if curvature > 0 else math.inf


def _about_step(settings: Settings, last: Constants, typical: float, safe: float) -> Sentence:
    curvature = last.L_client_mean.value
    text = f"At the last point the mean curvature of a client is L_i = {curvature:.3g}"
    text += f", so a step of 1 / L_i = {typical:.3g} is typical"
    lr = settings.client_lr
    if lr is not None and math.isfinite(typical):
        times = lr / typical
        text += f"; yours, {lr:g}, is {times:.1f} times that" if times >= 1 else f"; yours, {lr:g}, is {1 / times:.1f} "
        text += "" if times >= 1 else "times smaller"
    text += (
        f". Every surrogate stays convex up to 1 / max L_i = {safe:.3g}. Tuned steps are often several times larger."
    )
    return Sentence(text, f"{TRADE_OFFS}, Lemma 1")


def error_terms(c: Constants, settings: Settings) -> dict[str, float]:
    """Squared errors of a round's mean direction, in units of a squared gradient.

    Client sampling G^2 / S (1 - S / N), batch noise sigma^2 / (K S), and the bias of local steps (Theorem I of Mime):
    (L K lr)^2 times the mean squared client gradient, and at most that.
    """
    S, N, K = settings.cohort, settings.clients, max(settings.steps, 1.0)
    # The first local gradient is taken at the server's model, so only K - 1 steps bias a round.
    reach = min(1.0, c.L_client_mean.value * (settings.client_lr or 0.0) * (K - 1.0)) if K > 1 else 0.0
    return {
        "client sampling": c.G2.value / S * (1.0 - S / N),
        "batch noise": c.sigma2.value / (K * S),
        "drift": reach**2 * (c.G2.value + c.grad_norm2.value),
    }


def _about_terms(terms: Mapping[str, float], dominant: str, c: Constants) -> list[Sentence]:
    listed = ", ".join(f"{name} {value:.2g}" for name, value in terms.items())
    remedy = {
        "drift": "drift correction (SCAFFOLD, Mime) removes it; a smaller client step or fewer local steps reduce it",
        "client sampling": "a larger cohort, server momentum or variance reduction reduce it",
        "batch noise": "larger batches or more local steps reduce it",
    }[dominant]
    said = [
        Sentence(
            f"At your settings {dominant} is the largest error of a round ({listed}; the squared gradient is "
            f"{c.grad_norm2.value:.2g}): {remedy}.",
            f"{MIME}, Theorem I",
        )
    ]
    if dominant == "drift":
        said.append(
            Sentence(
                "Drift is a trade-off: local steps speed up the first rounds and lower the accuracy at convergence. "
                "With few rounds, more local steps reach a given accuracy sooner. To converge further, lower the "
                "client step or the number of local steps later.",
                f"{TRADE_OFFS}, Corollary 1 and Section 5",
            )
        )
    return said


def _about_hessians(c: Constants, steps: int) -> Sentence:
    ratio = c.L.value / c.delta.value if c.delta.value > 0 else math.inf
    text = f"Client Hessians differ from their mean by up to delta = {c.delta.value:.2g}, with L = {c.L.value:.2g}"
    if ratio <= 1:
        text += (
            ": delta is as large as L, so client Hessians share nothing. With drift correction, more than one local "
            "step then helps little."
        )
    else:
        text += f": methods that correct drift (Mime, MVR) can use about L / delta, here {steps}, local steps."
    return Sentence(text, f"{MIME}, Theorem IV")


def _about_probes(
    probes: Sequence[Probe], settings: Settings, rate: float
) -> tuple[list[Sentence], dict[str, int | float]]:
    """The fewest local steps that achieve 90% of the largest decrease, with the best server step for them.

    Nothing is advised if the decreases are within the noise of the cohorts, nor a server step for a method whose server
    is not that of FedAvg. A value at the edge of what was tried is named.
    """
    if not probes:
        return [], {}
    at_one = {p.steps: p.fell[1.0] for p in probes}
    listed = ", ".join(f"{k}: {fell:.3g}" for k, fell in at_one.items())
    best, noise = max(at_one.values()), max(p.noise for p in probes)
    at = f"client step {round_down(rate):g}"
    intro = f"One round at {at} lowered the mean loss by, per number of local steps, {listed}"
    if max(abs(fell) for fell in at_one.values()) <= CLEAR * noise:
        text = (
            f"{intro}. That is within the noise of the cohorts (standard error {noise:.2g}), so the number of local "
            "steps cannot be chosen from it: the run has converged here, or moves too little in one round."
        )
        return [Sentence(text, "measured")], {}
    if best <= 0:
        text = (
            f"No number of local steps up to {max(at_one)} lowered the mean loss in one round at {at}: lower the "
            "client step first."
        )
        return [Sentence(text, "measured")], {}
    steps = min(k for k, fell in at_one.items() if fell >= 0.9 * best - noise)
    chosen = next(p for p in probes if p.steps == steps)
    server = max(chosen.fell, key=lambda s: chosen.fell[s])
    if settings.algorithm not in AVERAGING or chosen.fell[server] < 1.1 * chosen.fell[1.0] + CLEAR * chosen.noise:
        server = 1.0
    text = (
        f"{intro} (standard error {noise:.2g}). {steps} steps reach at least 90% of the best decrease; you take "
        f"{settings.steps:.3g}, so a round would cost {steps / max(settings.steps, 1e-9):.2g} times the client work."
        + (f" A server step of {server:g} does better than 1." if server != 1.0 else "")
        + _edges(steps, max(at_one), server, max(chosen.fell))
    )
    source = f"measured; more local steps help in the first rounds: {TRADE_OFFS}, Section 4.3"
    advised: dict[str, int | float] = {"steps": steps}
    if settings.algorithm in AVERAGING:
        advised["server_lr"] = server
    return [Sentence(text, source)], advised


def _edges(steps: int, most_steps: int, server: float, most_server: float) -> str:
    """Says which of the chosen values is the largest that was tried."""
    said = ""
    if steps == most_steps:
        said += f" {steps} is the largest number of steps that was tried; more may do better."
    if server == most_server and server != 1.0:
        said += f" {server:g} is the largest server step that was tried; more may do better."
    return said


FAMILIES = {
    "fedavg_sgd": "FedAvg",
    "server_sgd": "server-only SGD",
    "mime_sgd": "Mime with SGD",
    "mime_mvr": "MimeMVR",
    "mimelite_mvr": "MimeLiteMVR",
    "scaffold": "SCAFFOLD (clients keep state)",
}


def _rounds_by_family(c: Constants, settings: Settings) -> dict[str, float]:
    """Rounds of Mime's Table 1 to a tenth of the current squared gradient; f(x_0) - f* is taken as the current loss."""
    epsilon = 0.1 * c.grad_norm2.value
    if not (epsilon > 0 and math.isfinite(epsilon) and c.L.value > 0):
        return {}
    scale = max(c.loss.value, 1e-12)
    # The table is for losses in units of f(x_0) - f*. Dividing f by that divides L and delta by it, G^2 by its square.
    unit = {
        "smoothness": c.L.value / scale,
        "G2": max(c.G2.value, 0.0) / scale**2,
        "sampled": settings.cohort,
        "clients": settings.clients,
        "sigma2": c.sigma2.value / scale**2,
        "delta": c.delta.value / scale,
    }
    return {name: mime_rounds(name, epsilon / scale**2, **unit).value for name in FAMILIES}


def _about_families(families: Mapping[str, float], c: Constants, settings: Settings, dominant: str) -> list[Sentence]:
    if not families:
        return []
    stateless = {k: v for k, v in families.items() if k != "scaffold"}
    best = min(stateless, key=lambda k: stateless[k])
    text = (
        "To a tenth of the current squared gradient the worst-case numbers of rounds are: "
        + ", ".join(f"{FAMILIES[k]} {v:.2g}" for k, v in sorted(families.items(), key=lambda item: item[1]))
        + f". Without client state try {FAMILIES[best]}"
    )
    if families["scaffold"] < stateless[best]:
        visits = settings.rounds * settings.cohort / settings.clients
        text += f"; SCAFFOLD needs fewer, and a client takes part about {visits:.0f} times in this run" + (
            ", so its control variates stay fresh: try it." if visits >= 10 else ", too rarely for SCAFFOLD to help."
        )
    else:
        text += "."
    said = [Sentence(text, f"{MIME}, Table 1")]
    if c.convex_here and c.mu.value > 0:
        said.append(
            Sentence(
                "The losses look convex: FedSplit has the minimizer as its fixed point and needs about sqrt(kappa) "
                "rounds per digit, if every client can take part in every round.",
                f"{FEDSPLIT}, Theorem 1",
            )
        )
    if dominant == "client sampling":
        said.append(
            Sentence(
                "Server momentum averages over cohorts. If it is tuned, it speeds up convergence and does not change "
                "the point that the run converges to.",
                f"{TRADE_OFFS}, Theorem 3",
            )
        )
    return said


def _predict(worst: Constants, settings: Settings) -> tuple[Point | None, list[str]]:
    """rho and Delta of a quadratic loss with these curvatures; None with the reason if there is no such model."""
    lr, mu, L = settings.client_lr, worst.mu_client_min.value, worst.L_client_max.value
    if lr is None:
        return None, ["rho and Delta: this algorithm has no client step"]
    if not worst.convex_here:
        return None, [f"rho and Delta: curvature {mu:.2g} was found, so no quadratic model holds here"]
    if mu <= 0:
        return None, ["rho and Delta: no strong convexity was found, the quadratic model has no rate"]
    steps = max(1, round(settings.steps))
    try:
        found = point(mu=mu, smoothness=L, gamma=lr, theta=theta_sum(steps), alpha=settings.alpha)
    except ValueError as error:
        return None, [f"rho and Delta: {error}"]
    return found, ["rho and Delta are those of a quadratic with these curvatures; your loss is only approximately one"]


def _about_prediction(predicted: Point | None) -> list[Sentence]:
    if predicted is None:
        return []
    return [
        Sentence(
            "If the loss were quadratic with the curvatures found here, your settings would converge at rho = "
            f"{predicted.rho['none']:.3f} per round ({predicted.rho['heavy_ball']:.3f} with tuned heavy-ball momentum) "
            f"to a point of suboptimality Delta = {predicted.delta:.3f}.",
            f"{TRADE_OFFS}, Table 2 and eq. (17)",
        )
    ]


def round_down(value: float) -> float:
    """Two significant digits, never more than the value.

    >>> round_down(0.1299), round_down(0.05)
    (0.12, 0.05)
    """
    if not (math.isfinite(value) and value > 0):
        return value
    place = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.floor(value / place + 1e-9) * place, 12)
