"""Advice for a run from the constants of its data: what is safe, what dominates, what to try, and what is not known.

`advise` is arithmetic on estimated constants and on one measurement, so it can be read and tested without a run;
`diagnose` makes both along a short run of a configuration; `verify` runs the configured and the advised settings side
by side. Every sentence names the result it rests on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedbraid.theory.bounds import mime_rounds
from fedbraid.theory.constants import Constants, envelope, estimate
from fedbraid.theory.frontier import Point, point
from fedbraid.theory.surrogate import theta_sum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedbraid.experiment.config import Config

__all__ = ["Advice", "Diagnosis", "Probe", "Sentence", "Settings", "advise", "diagnose", "diagnosis_figure", "verify"]

TRADE_OFFS = "Charles and Konecny 2021"
MIME = "Karimireddy et al. 2021 (Mime)"
SCAFFOLD = "Karimireddy et al. 2020 (SCAFFOLD)"
FEDSPLIT = "Pathak and Wainwright 2020 (FedSplit)"


class Settings(NamedTuple):
    """What of a run the advice is about. ``steps`` are local steps per client and round, on average."""

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
    """One round tried with K local steps: by how much the mean training loss fell, for each server step."""

    steps: int
    fell: Mapping[float, float]  # server step -> loss before - loss after


class Sentence(NamedTuple):
    text: str
    source: str

    def __str__(self) -> str:
        return f"{self.text} [{self.source}]"


@dataclass(frozen=True)
class Advice:
    """Sentences, settings to try, and what could not be known.

    >>> from fedbraid.theory.constants import Estimate as E
    >>> c = Constants(
    ...     L=E(4.0), mu=E(0.5), L_client_max=E(8.0), L_client_mean=E(5.0), mu_client_min=E(0.2), sigma2=E(0.1),
    ...     G2=E(2.0), B2=E(5.0), zeta=E(3.0), delta=E(1.0), delta_mean=E(0.7), grad_norm2=E(0.5), loss=E(1.0),
    ...     clients=10, population=100, batch_size=20,
    ... )
    >>> advice = advise([c], Settings("fedavg", 0.3, 5.0, 10, 100, 200))
    >>> advice.safe_client_lr, advice.mime_steps, advice.dominant
    (0.125, 4, 'drift')
    >>> print(advice.sentences[0])
    The largest client step that keeps every surrogate convex is 1 / L_i = 0.125; yours, 0.3, is 2.4 times that: lower \
it. [Charles and Konecny 2021, Lemma 1]
    """

    safe_client_lr: float
    mime_steps: int
    dominant: str
    terms: dict[str, float]
    rounds_by_family: dict[str, float]
    predicted: Point | None
    sentences: tuple[Sentence, ...]
    unknown: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        predicted = None
        if self.predicted is not None:
            p = self.predicted
            predicted = {"kappa": p.kappa, "delta": p.delta, "rho": p.rho, "method": p.method}
        return {
            "safe_client_lr": self.safe_client_lr,
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
    """Advice from constants at one or more points of a run and, where there are any, from probes.

    An example is at `Advice`.
    """
    if not points:
        raise ValueError("advise needs the constants of at least one point")
    worst, last = envelope(points), points[-1]
    said: list[Sentence] = []
    say = lambda text, source: said.append(Sentence(text, source))  # noqa: E731

    safe = 1.0 / (worst.L_client_max.value + settings.alpha) if worst.L_client_max.value > 0 else math.inf
    _say_step(say, settings, safe)
    terms, dominant = _terms(last, settings)
    _say_terms(say, terms, dominant, last, settings)
    mime_steps = max(1, math.ceil(last.L.value / last.delta.value - 1e-9)) if last.delta.value > 0 else 1
    ratio = last.L.value / last.delta.value if last.delta.value > 0 else math.inf
    _say_hessians(say, last, ratio, mime_steps)
    tried = _say_probes(say, probes, settings, safe)
    families = _families(last, settings)
    _say_family(say, families, last, settings, dominant)
    predicted, unknown = _predict(points, settings)
    if predicted is not None:
        say(
            "If the loss were quadratic with the curvatures found here, your settings would converge at rho = "
            f"{predicted.rho['none']:.3f} per round ({predicted.rho['heavy_ball']:.3f} with tuned heavy-ball momentum) "
            f"to a point of suboptimality Delta = {predicted.delta:.3f}.",
            f"{TRADE_OFFS}, Table 2 and eq. (17)",
        )
    unknown = [
        *unknown,
        "the constants hold at the points looked at; a theorem needs them everywhere",
        "rounds by family are up to hidden constants: compare them, do not count on them",
        *dict.fromkeys(note for p in points for note in p.notes),
    ]
    wanted = {"client_lr": _round_down(safe)} if settings.client_lr is not None and math.isfinite(safe) else {}
    return Advice(
        safe, mime_steps, dominant, terms, families, predicted, tuple(said), tuple(unknown), {**wanted, **tried}
    )


def _say_step(say: Any, settings: Settings, safe: float) -> None:
    source = f"{TRADE_OFFS}, Lemma 1"
    head = f"The largest client step that keeps every surrogate convex is 1 / L_i = {safe:.3g}"
    lr = settings.client_lr
    if lr is None:
        say(f"{head}.", source)
    elif lr > safe:
        say(f"{head}; yours, {lr:g}, is {lr / safe:.1f} times that: lower it.", source)
    elif lr < safe / 2:
        say(f"{head}; yours, {lr:g}, is {safe / lr:.1f} times smaller: there is room.", source)
    else:
        say(f"{head}; yours, {lr:g}, is within it.", source)


def _terms(c: Constants, settings: Settings) -> tuple[dict[str, float], str]:
    """Squared errors of a round's mean direction, in units of a squared gradient.

    Client sampling G^2 / S (1 - S / N), batch noise sigma^2 / (K S), and the bias of local steps (Theorem I of Mime):
    (L K lr)^2 times the mean squared client gradient, at most that itself.
    """
    S, N, K = settings.cohort, settings.clients, max(settings.steps, 1.0)
    # One step is taken at the server's own point: the walk that biases a round is K - 1 steps long.
    reach = min(1.0, c.L_client_mean.value * (settings.client_lr or 0.0) * (K - 1.0)) if K > 1 else 0.0
    terms = {
        "client sampling": c.G2.value / S * (1.0 - S / N),
        "batch noise": c.sigma2.value / (K * S),
        "drift": reach**2 * (c.G2.value + c.grad_norm2.value),
    }
    return terms, max(terms, key=lambda k: terms[k])


def _say_terms(say: Any, terms: dict[str, float], dominant: str, c: Constants, settings: Settings) -> None:
    listed = ", ".join(f"{name} {value:.2g}" for name, value in terms.items())
    remedy = {
        "drift": "drift correction (SCAFFOLD, Mime) removes it, a smaller client step or fewer local steps lower it",
        "client sampling": "a larger cohort, server momentum or variance reduction lower it",
        "batch noise": "larger batches or more local steps average it away",
    }[dominant]
    say(
        f"At your settings {dominant} dominates a round's error ({listed}; the squared gradient is "
        f"{c.grad_norm2.value:.2g}): {remedy}.",
        f"{MIME}, Theorem I",
    )
    if dominant == "drift":
        say(
            "Drift is not only harm: local steps trade accuracy in the end for speed at the start. With few rounds, "
            "more local work reaches a given accuracy sooner; to converge further, lower the client step or the local "
            "steps later.",
            f"{TRADE_OFFS}, Corollary 1 and Section 5",
        )


def _say_hessians(say: Any, c: Constants, ratio: float, steps: int) -> None:
    text = f"Clients' Hessians differ from the mean by up to delta = {c.delta.value:.2g} where L = {c.L.value:.2g}"
    if ratio <= 1:
        text += ": they differ by as much as they are, so drift correction gains little from more than one local step."
    else:
        text += f": methods that correct drift (Mime, MVR) make use of about L / delta, here {steps} local steps."
    say(text, f"{MIME}, Theorem IV")


def _say_probes(say: Any, probes: Sequence[Probe], settings: Settings, safe: float) -> dict[str, Any]:
    if not probes:
        return {}
    at_one = {p.steps: p.fell[1.0] for p in probes}
    best = max(at_one.values())
    if best <= 0:
        say(
            f"No number of local steps up to {max(at_one)} lowered the mean loss in one round at client step "
            f"{_round_down(safe):g}: take a smaller step before anything else.",
            "measured",
        )
        return {}
    steps = min(k for k, fell in at_one.items() if fell >= 0.9 * best)
    chosen = next(p for p in probes if p.steps == steps)
    server = max(chosen.fell, key=lambda s: chosen.fell[s])
    if chosen.fell[server] < 1.1 * chosen.fell[1.0]:
        server = 1.0
    listed = ", ".join(f"{k}: {fell:.3g}" for k, fell in at_one.items())
    say(
        f"Tried for one round at client step {_round_down(safe):g}, the mean loss fell by ({listed}) with that many "
        f"local steps: {steps} steps do at least nine tenths of the best; you take {settings.steps:.3g}, "
        f"so a round would cost {steps / max(settings.steps, 1e-9):.2g} times the client work."
        + (f" A server step of {server:g} does better than 1." if server != 1.0 else ""),
        f"measured; that more local work pays while rounds are few: {TRADE_OFFS}, Section 4.3",
    )
    return {"steps": steps, "server_lr": server}


FAMILIES = {
    "fedavg_sgd": "FedAvg",
    "server_sgd": "server-only SGD",
    "mime_sgd": "Mime with SGD",
    "mime_mvr": "MimeMVR",
    "mimelite_mvr": "MimeLiteMVR",
    "scaffold": "SCAFFOLD (clients keep state)",
}


def _families(c: Constants, settings: Settings) -> dict[str, float]:
    """Rounds of Mime's Table 1 to a tenth of today's squared gradient, with f(x_0) - f* taken as today's loss."""
    epsilon = 0.1 * c.grad_norm2.value
    if not (epsilon > 0 and math.isfinite(epsilon) and c.L.value > 0):
        return {}
    known = {"smoothness": c.L.value, "G2": max(c.G2.value, 0.0), "sampled": settings.cohort}
    more = {"clients": settings.clients, "sigma2": c.sigma2.value, "delta": c.delta.value}
    scale = max(c.loss.value, 1e-12)
    # The table is for losses in units of f(x_0) - f*: dividing f by that divides L, delta by it and squares G by it.
    unit = {
        "smoothness": known["smoothness"] / scale,
        "G2": known["G2"] / scale**2,
        "sampled": settings.cohort,
        "clients": more["clients"],
        "sigma2": more["sigma2"] / scale**2,
        "delta": more["delta"] / scale,
    }
    return {name: mime_rounds(name, epsilon / scale**2, **unit).value for name in FAMILIES}


def _say_family(say: Any, families: dict[str, float], c: Constants, settings: Settings, dominant: str) -> None:
    if not families:
        return
    stateless = {k: v for k, v in families.items() if k != "scaffold"}
    best = min(stateless, key=lambda k: stateless[k])
    text = (
        "To a tenth of today's squared gradient the worst-case counts are, in rounds: "
        + ", ".join(f"{FAMILIES[k]} {v:.2g}" for k, v in sorted(families.items(), key=lambda item: item[1]))
        + f". Without client state try {FAMILIES[best]}"
    )
    visits = settings.rounds * settings.cohort / settings.clients
    if families["scaffold"] < stateless[best]:
        text += f"; SCAFFOLD promises fewer, and here a client takes part about {visits:.0f} times in a run" + (
            ", so its control variates stay fresh: try it." if visits >= 10 else ", too rarely for it to pay."
        )
    else:
        text += "."
    say(text, f"{MIME}, Table 1")
    if c.convex_here and c.mu.value > 0:
        say(
            "The losses look convex: FedSplit has the right fixed point and needs about sqrt(kappa) rounds per digit, "
            "if every client can take part.",
            f"{FEDSPLIT}, Theorem 1",
        )
    if dominant == "client sampling":
        say(
            "Server momentum averages over cohorts and, tuned, speeds convergence without moving its end point.",
            f"{TRADE_OFFS}, Theorem 3",
        )


def _predict(points: Sequence[Constants], settings: Settings) -> tuple[Point | None, list[str]]:
    worst = envelope(points)
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
    return found, ["rho and Delta are those of a quadratic with these curvatures; your loss is one only approximately"]


def _round_down(value: float) -> float:
    """Two significant digits, never more than the value."""
    if not (math.isfinite(value) and value > 0):
        return value
    place = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.floor(value / place + 1e-9) * place, 12)


# --- along a run -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found: constants at ``rounds``, probes, advice, and the advised settings as ``key=value``."""

    settings: Settings
    rounds: tuple[int, ...]
    points: tuple[Constants, ...]
    probes: tuple[Probe, ...]
    advice: Advice
    changes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "settings": self.settings._asdict(),
            "rounds": list(self.rounds),
            "constants": [c.as_dict() for c in self.points],
            "probes": [{"steps": p.steps, "fell": {str(k): v for k, v in p.fell.items()}} for p in self.probes],
            "advice": self.advice.as_dict(),
            "changes": list(self.changes),
        }


def diagnose(
    config: Config,
    *,
    rounds: int = 20,
    points: int = 3,
    clients: int | None = None,
    probe_steps: Sequence[int] = (1, 2, 4, 8, 16, 32),
    seed: int | None = None,
) -> Diagnosis:
    """Run ``config`` for a few rounds, estimate the constants at ``points`` points of it, probe, and advise.

    clients: sampled for the constants; default 50, or 10 for models of more than 20,000 parameters.
    probe_steps: numbers of local steps to try for one round; none leaves the probes out.

    >>> from fedbraid.experiment.config import load_config
    >>> tiny = load_config(settings=["data.clients=4", "model.hidden=[4]", "cohort=2"])
    >>> found = diagnose(tiny, rounds=1, points=1, clients=2, probe_steps=())
    >>> found.changes[0].startswith("algorithm.client_lr=")
    True
    """
    import jax

    from fedbraid.experiment.assembly import build
    from fedbraid.simulation import simulate

    for name, value in (("rounds", rounds), ("points", points), ("clients", clients)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if seed is not None:
        config = config.model_copy(update={"seed": seed})
    made = build(config)
    settings = _settings(config, made.data.train)
    loss = _evaluation_loss(made)
    if clients is None:
        clients = 50 if sum(leaf.size for leaf in jax.tree.leaves(made.params)) <= 20_000 else 10
    looked = sorted({round(i * rounds / max(points - 1, 1)) for i in range(points)}) if points > 1 else [rounds]
    found, params = [], made.params
    for at in looked:
        if at > 0:
            params = simulate(
                made.algorithm, made.params, made.data.train, rounds=at, cohort=settings.cohort, seed=config.seed
            ).params
        found.append(
            estimate(
                loss,
                params,
                made.data.train,
                clients=clients,
                batch_size=settings.batch_size,
                weighting=_option(config, "weighting", "examples"),
                seed=config.seed,
            )
        )
    probes: tuple[Probe, ...] = ()
    if probe_steps and settings.client_lr is not None:
        safe = _round_down(1.0 / (envelope(found).L_client_max.value + settings.alpha))
        probes = _probe(made, params, settings, safe, probe_steps, _option(config, "weighting", "examples"))
    advice = advise(found, settings, probes)
    return Diagnosis(settings, tuple(looked), tuple(found), probes, advice, _changes(config, advice))


def verify(
    config: Config, changes: Sequence[str], *, target: float = 0.9, seeds: int = 5, metric: str = "test_accuracy"
) -> dict[str, list[int | None]]:
    """Rounds to ``target`` with the configured and with the advised settings, one number per seed (None: not reached).

    An example is in docs/theory/diagnose.md: it trains a model ten times.
    """
    from fedbraid.experiment.assembly import build
    from fedbraid.experiment.config import parse
    from fedbraid.simulation import simulate

    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    outcome: dict[str, list[int | None]] = {"configured": [], "advised": []}
    for seed in range(seeds):
        for name, changed in (("configured", ()), ("advised", changes)):
            tree = config.model_dump(mode="json")
            _change(tree, changed)
            made = build(parse({**tree, "seed": seed}))
            if made.data.test is None:
                raise ValueError("verify needs a test split to measure accuracy on, and the data has none")
            result = simulate(
                made.algorithm,
                made.params,
                made.data,
                rounds=config.rounds,
                cohort=None if config.cohort == "all" else config.cohort,
                seed=seed,
                metrics=made.metrics,
                eval_every=1,
            )
            if metric not in result.evaluations:
                raise ValueError(f"metric {metric!r} is not evaluated; there are {', '.join(result.evaluations)}")
            reached = np.flatnonzero(np.asarray(result.evaluations[metric]) >= target)
            outcome[name].append(int(result.evaluations["round"][reached[0]]) if len(reached) else None)
    return outcome


def _change(tree: dict[str, Any], changes: Sequence[str]) -> None:
    """Apply the advice; ``steps`` takes the place of ``epochs``."""
    for change in changes:
        key, _, value = change.partition("=")
        name = key.removeprefix("algorithm.")
        tree["algorithm"][name] = float(value) if name != "steps" else int(value)
        if name == "steps":
            tree["algorithm"].pop("epochs", None)


def _changes(config: Config, advice: Advice) -> tuple[str, ...]:
    """The advised settings that this algorithm takes, as ``--set`` takes them."""
    from fedbraid import algorithms
    from fedbraid.experiment.config import options_of

    takes = options_of(algorithms.ALGORITHMS[config.algorithm.name])
    return tuple(f"algorithm.{k}={v:g}" for k, v in advice.settings.items() if k in takes)


def _option(config: Config, name: str, default: Any) -> Any:
    from fedbraid import algorithms
    from fedbraid.experiment.config import options_of

    options = {**options_of(algorithms.ALGORITHMS[config.algorithm.name]), **config.algorithm.options}
    value = options.get(name, default)
    return default if value is None or value is getattr(type(value), "empty", object()) else value


def _settings(config: Config, split: Any) -> Settings:
    from fedbraid.local import batches_of

    cohort = split.num_clients if config.cohort == "all" else config.cohort
    given = {k: config.algorithm.options[k] for k in ("epochs", "steps", "batch_size") if k in config.algorithm.options}
    batch_size = given.get("batch_size", 20)
    client_lr = _option(config, "client_lr", None)
    steps = float(np.mean([batches_of(**given).count(int(n)) for n in split.sizes])) if client_lr is not None else 1.0
    return Settings(
        config.algorithm.name,
        None if client_lr is None else float(client_lr),
        steps,
        int(cohort),
        split.num_clients,
        config.rounds,
        batch_size,
        float(_option(config, "server_lr", 1.0)),
        float(_option(config, "alpha", 0.0)) if isinstance(_option(config, "alpha", 0.0), int | float) else 0.0,
    )


def _evaluation_loss(made: Any) -> Any:
    """The model's loss without dropout or augmentation: what the constants are of."""
    prepare = made.data.preprocess
    if prepare is None:
        return lambda params, batch, key: made.model.loss(params, batch, None)
    return lambda params, batch, key: made.model.loss(params, prepare(batch, None, False), None)


def _probe(
    made: Any, params: Any, settings: Settings, client_lr: float, steps: Sequence[int], weighting: str
) -> tuple[Probe, ...]:
    """One round of FedAvg from ``params`` with each number of local steps; mean over two cohorts."""
    import jax

    from fedbraid import algorithms
    from fedbraid.data.federated import Split
    from fedbraid.simulation import evaluator, simulate

    split = made.data.train
    rng = np.random.default_rng(0)
    some = np.sort(rng.choice(split.num_clients, min(40, split.num_clients), replace=False))
    seen = Split.from_clients([{k: a[:200] for k, a in split.client(int(i)).items()} for i in some])
    seen = replace(seen, preprocess=split.preprocess)
    scores = evaluator(made.metrics, seen)

    def mean_loss(x: Any) -> float:
        sums = np.asarray(scores(x)["loss"])
        return float(sums[0].sum() / sums[1].sum()) if weighting == "examples" else float(np.mean(sums[0] / sums[1]))

    before, servers = mean_loss(params), (1.0, 1.5, 2.0)
    found = []
    for K in steps:
        alg = algorithms.fedavg(
            made.loss,
            client_lr=client_lr,
            steps=K,
            batch_size=settings.batch_size,
            weighting=weighting,  # type: ignore[arg-type]
        )
        fell = dict.fromkeys(servers, 0.0)
        for seed in (101, 102):
            after = simulate(alg, params, split, rounds=1, cohort=settings.cohort, seed=seed).params
            for s in servers:
                moved = jax.tree.map(lambda x, y, s=s: x + s * (y - x), params, after)
                value = mean_loss(moved)
                fell[s] += (before - value) / 2 if math.isfinite(value) else -math.inf
        found.append(Probe(int(K), fell))
    return tuple(found)


def diagnosis_figure(diagnosis: Diagnosis) -> Figure:
    """Constants along the run, what dominates a round, and the probes."""
    from fedbraid.theory.figures import COLOURS, _panels

    figure, axes = _panels(3, width=4.4)
    ax = axes[0]
    rows = {
        "L_i max": "L_client_max",
        "L": "L",
        "delta": "delta",
        "zeta": "zeta",
        "$G^2$": "G2",
        "$\\sigma^2$": "sigma2",
    }
    for i, (label, name) in enumerate(rows.items()):
        values = [getattr(p, name) for p in diagnosis.points]
        ax.errorbar(
            diagnosis.rounds,
            [v.value for v in values],
            yerr=[0.0 if math.isnan(v.stderr) else v.stderr for v in values],
            marker="o",
            capsize=3,
            color=COLOURS[i % 7],
            label=label,
        )
    ax.set(xlabel="round", xticks=diagnosis.rounds, yscale="log", title="constants along the run")
    ax.legend(fontsize=8, ncols=2)
    ax.grid(alpha=0.3)
    ax = axes[1]
    terms = {**diagnosis.advice.terms, "$|\\nabla f|^2$": diagnosis.points[-1].grad_norm2.value}
    bars = ax.bar(list(terms), list(terms.values()), color=[*COLOURS[:3], "0.7"])
    ax.bar_label(bars, [f"{v:.2g}" for v in terms.values()], fontsize=9, padding=2)
    ax.set(title="error of a round's mean direction", ylabel="squared norm")
    ax.tick_params(axis="x", labelsize=8)
    ax.margins(y=0.12)
    ax = axes[2]
    for i, s in enumerate(diagnosis.probes[0].fell if diagnosis.probes else ()):
        values = [p.fell[s] for p in diagnosis.probes]
        ax.plot([p.steps for p in diagnosis.probes], values, "o-", color=COLOURS[i], label=f"server step {s:g}")
    if diagnosis.probes:
        ax.set(xscale="log", xlabel="local steps", ylabel="fall of the mean loss in one round")
        ax.set_xticks([p.steps for p in diagnosis.probes], [str(p.steps) for p in diagnosis.probes], minor=False)
        ax.minorticks_off()
        ax.axhline(0.0, color="0.6", lw=0.8)
        ax.legend(fontsize=8)
        ax.grid(alpha=0.3)
    else:
        ax.set_axis_off()
    ax.set_title("more local work?")
    return figure
