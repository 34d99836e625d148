"""The twelve methods of Table 2: three ways to federate four base optimizers, at equal communication."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import optax

from fedbraid.algorithms import local_update, mime, mimelite
from fedbraid.algorithms.base_optimizers import adagrad, from_optax
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData
from fedbraid.drawing import COLOURS, tidy
from fedbraid.experiment.config import ConfigError, parse, unknown
from fedbraid.reproduce.training import Swap, best, score, train

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RATES = tuple(10.0 ** (-k / 2) for k in range(9))  # 1 to 1e-4
BETA, B1, B2, EPS, INITIAL = 0.9, 0.9, 0.99, 1e-7, 0.1


class Way(NamedTuple):
    """One of the twelve: the algorithm, its options, its clients per round (Table 4), and what to run instead."""

    algorithm: str
    options: Mapping[str, Any]
    cohort: int
    swap: Swap | None = None


_BASES: dict[str, Callable[[Mapping[str, Any]], optax.GradientTransformation]] = {
    "momentum": lambda o: optax.sgd(1.0, momentum=o["beta"]),
    "adam": lambda o: optax.adam(1.0, b1=o["b1"], b2=o["b2"], eps=o["eps"]),
    "adagrad": lambda o: optax.adagrad(1.0, initial_accumulator_value=o["initial"], eps=o["eps"]),
}
_OF_BASES = ("base", "beta", "b1", "b2", "eps", "initial")


def _over_optax(make: Callable[..., Algorithm]) -> Swap:
    """Mime or MimeLite with optax's optimizers, which add a gradient to their averages before they divide by them."""

    def swap(loss: Callable, options: Mapping[str, Any]) -> Algorithm:
        taken = {k: v for k, v in options.items() if k not in _OF_BASES}
        base = from_optax(_BASES[options["base"]](options), name=f"optax's {options['base']}")
        # linear=True, although it is not linear, suppresses the notice: this deviation is intended here
        base = base._replace(linear=True)
        return make(loss, base=base, **taken)

    return swap


def _server_adagrad(loss: Callable, options: Mapping[str, Any]) -> Algorithm:
    """FedAvg with Table 5's AdaGrad on the server, starting at 0.1; the library's FedAdagrad starts at tau^2."""
    base, rate = adagrad(eps=options["tau"], initial=INITIAL), options["server_lr"]

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        step = base.update(updates, state, params)
        return jax.tree.map(lambda u: -rate * u, step), base.track(updates, state, params)

    opt = optax.GradientTransformation(base.init, update)
    local = {k: v for k, v in options.items() if k in ("batch_size", "epochs")}
    return local_update(loss, gamma=options["client_lr"], server_opt=opt, message="delta", **local)


def _ways() -> dict[str, Way]:
    split = {"protocol": "split-cohort"}
    adam = {"base": "adam", "b1": B1, "b2": B2, "eps": EPS}
    ada = {"base": "adagrad", "eps": EPS, "initial": INITIAL}
    mom = {"base": "momentum", "beta": BETA}
    lite, full = _over_optax(mimelite), _over_optax(mime)
    return {
        "FedAvgSGD": Way("fedavg", {}, 20),
        "MimeLiteSGD": Way("mimelite", {"base": "sgd", **split}, 20),
        "MimeSGD": Way("mime", {"base": "sgd", **split}, 8),
        "FedAvgMom": Way("fedavgm", {"momentum": BETA, "kind": "average"}, 20),
        "MimeLiteMom": Way("mimelite", {**mom, **split}, 8, lite),
        "MimeMom": Way("mime", {**mom, **split}, 6, full),
        "FedAvgAdam": Way("fedadam", {"b1": B1, "b2": B2, "tau": EPS, "bias_correction": True}, 20),
        "MimeLiteAdam": Way("mimelite", {**adam, **split}, 6, lite),
        "MimeAdam": Way("mime", {**adam, **split}, 5, full),
        "FedAvgAdagrad": Way("fedadagrad", {"tau": EPS}, 20, _server_adagrad),
        "MimeLiteAdagrad": Way("mimelite", {**ada, **split}, 8, lite),
        "MimeAdagrad": Way("mime", {**ada, **split}, 6, full),
    }


WAYS = _ways()


def run_method(
    name: str,
    data: FederatedData,
    *,
    work: Path,
    model: Mapping[str, Any],
    rounds: int = 1000,
    rates: Sequence[float] = RATES,
    every: int = 100,
    marks: Collection[int] = (),
    piece: int | None = None,
    batch_size: int = 10,
    seed: int = 0,
    cohort: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    points: Sequence[Mapping[str, Any]] | None = None,
    label: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """One method over all client rates, as one program; the result is kept in ``work/NAME.json``.

    cohort: clients per round, if not those of Table 4.
    overrides: other options of the algorithm.
    points: replace ``rates`` if more than the client rate is varied.
    label: replaces the name of the method in the file name.
    """
    if name not in WAYS:
        raise ConfigError(unknown("method of Table 2", name, WAYS))
    way = WAYS[name]
    config = parse(
        {
            "rounds": rounds,
            "cohort": way.cohort if cohort is None else cohort,
            "model": dict(model),
            "algorithm": {
                "name": way.algorithm,
                "client_lr": 1.0,
                "server_lr": 1.0,
                "batch_size": batch_size,
                "epochs": 1,
                **way.options,
                **(overrides or {}),
            },
            "evaluation": {"every": every},
        }
    )
    return train(
        label or name,
        config,
        data,
        [{"algorithm.client_lr": rate} for rate in rates] if points is None else points,
        work=work,
        seeds=(seed,),
        marks=marks,
        piece=piece,
        swap=way.swap,
        tell=tell,
    )


def accuracies(results: Mapping[str, Mapping[str, Any]], last: int) -> dict[str, float]:
    """Each method's best accuracy over its points, in percent."""
    return {name: 100 * best(result, last=last)[1] for name, result in results.items()}


def rate_of(result: Mapping[str, Any], last: int) -> float:
    """The client rate of a method's best point."""
    return result["points"][best(result, last=last)[0]]["algorithm.client_lr"]


def notes(results: Mapping[str, Mapping[str, Any]], last: int) -> tuple[str, ...]:
    """Best rates, and the points that diverged."""
    rates = ", ".join(f"{name} {rate_of(result, last):.3g}" for name, result in results.items())
    lost = {name: sum(result["diverged"]) for name, result in results.items()}
    diverged = ", ".join(f"{name} {n} of {len(results[name]['points'])}" for name, n in lost.items() if n)
    spent = sum({id(result): result["seconds"] for result in results.values()}.values())  # names may share a result
    return (
        f"Best client rates: {rates}.",
        f"Diverged points (a model that is not finite, or a round of which every upload was refused): "
        f"{diverged or 'none'}.",
        f"All methods together took {spent:.0f} s of training and evaluation, compilation included.",
    )


def draw(
    results: Mapping[str, Mapping[str, Any]],
    paper: Mapping[str, float],
    last: int,
    *,
    margin: float,
    title: str,
    others: Mapping[str, Mapping[str, Mapping[str, Any]]] | None = None,
) -> Figure:
    """Our accuracies next to the paper's, and accuracy over client rates.

    others: results by method for each other reading of the paper. If ``results`` have one client rate each, as those of
        an earlier page have, the curves over client rates are those of the reading with the most methods (the last one
        of equals).
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(10.5, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.15, 1))
    ours = accuracies(results, last)
    for i, name in enumerate(results):
        if name in paper:
            left.plot([paper[name] - margin, paper[name] + margin], [i, i], color="0.8", lw=7, solid_capstyle="butt")
            left.plot(paper[name], i, "|", color="0.35", ms=11, mew=2)
        if math.isfinite(ours[name]):
            left.plot(ours[name], i, "o", color=COLOURS[0])
        else:
            left.text(left.get_xlim()[0], i, "diverged", va="center", fontsize=8)
    left.set_yticks(range(len(results)), list(results), fontsize=8)
    left.invert_yaxis()
    left.set_xlabel("test accuracy, %")
    handles = [Line2D([], [], ls="", marker="o", color=COLOURS[0], label="ours")]
    if paper:
        handles.append(Line2D([], [], ls="", marker="|", color="0.35", ms=11, mew=2, label="paper, and our band"))
    for k, (reading, read) in enumerate((others or {}).items()):
        accuracy = accuracies(read, last)
        look: dict[str, Any] = {"ls": "", "marker": "s^Dv"[k % 4], "ms": 5, "color": COLOURS[1 + k % 6], "mfc": "none"}
        handles.append(Line2D([], [], label=reading, **look))
        seen = {i: accuracy[name] for i, name in enumerate(results) if math.isfinite(accuracy.get(name, math.nan))}
        left.plot(list(seen.values()), list(seen), **look)
    left.legend(handles=handles, frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    bases = {"SGD": COLOURS[6], "Mom": COLOURS[0], "Adam": COLOURS[1], "Adagrad": COLOURS[2]}
    dashes = {"FedAvg": ":", "MimeLite": "--", "Mime": "-"}
    curves, of = results, ""
    if others and all(len(result["points"]) == 1 for result in results.values()):
        of = max(list(others)[::-1], key=lambda reading: len(others[reading]))
        curves = others[of]
    right.set_title(of, fontsize=9, loc="left")
    for name, result in curves.items():
        base = next(b for b in bases if name.endswith(b))
        family = name.removesuffix(base)
        rates = [point["algorithm.client_lr"] for point in result["points"]]
        values = [100 * score(result, i, last=last) for i in range(len(rates))]
        right.plot(rates, values, color=bases[base], ls=dashes[family], marker=".", ms=4, lw=1.3)
    right.set_xscale("log")
    right.set_xlabel("client rate (a gap: diverged)")
    right.set_ylabel("test accuracy, %")
    keys = [Line2D([], [], color=c, label=b) for b, c in bases.items()]
    keys += [Line2D([], [], color="0.3", ls=d, label=f) for f, d in dashes.items()]
    right.legend(handles=keys, frameon=False, fontsize=8, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axis in (left, right):
        tidy(axis)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


DEVIATIONS = (
    "On the clients of Mime and MimeLite the base optimizers are optax's, as in the authors' published code (FedJAX), "
    "not those of Table 5, which divide by averages that do not include the current gradient: with eps = 1e-7 Adam's "
    "first round, and any coordinate whose gradient was always 0 so far (a rare character), is multiplied by up to "
    "1e7, and AdaGrad starts at 3.2 times the nominal rate. Momentum there is m = g + beta m, which is Table 5's "
    "average at a rate ten times as large.",
    "On FedAvg's server: momentum as the average of Table 5, optax's Adam with bias correction, Table 5's AdaGrad.",
    "The paper has two statements on Adam's epsilon in this table. Section 5.3: the hyper-parameters of the large "
    'experiments, "e.g. epsilon for adaptive methods", are "more carefully chosen following [49]" (Reddi et al. 2020). '
    "C.4: 1e-7. Rows that name no epsilon have 1e-7.",
    "One seed, apparently as in the paper. Accuracy is the mean of the evaluations in the last 50 rounds; the paper "
    "reports it after 1000 rounds.",
)
