"""When an answer is wrong or not certain, and the sentence that says so."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedbraid.data.federated import FederatedData, Split
from fedbraid.experiment.advice.candidates import Setting, neighbour
from fedbraid.experiment.advice.pilot import Found
from fedbraid.experiment.advice.race import Race
from fedbraid.experiment.advice.ranking import kept

__all__ = ["Baseline", "constant_baseline", "doubts_about", "problem_with"]

SIGMAS = 3.0  # a result counts as better than chance if it is this many standard errors better
FEW = 200  # validation examples


class Baseline(NamedTuple):
    """The best that a model can do which ignores its inputs, on the validation split.

    accuracy: of the most frequent class, with its standard error; None for values. loss: the cross-entropy of the class
    frequencies, or the variance. examples: their number.
    """

    accuracy: float | None
    accuracy_error: float
    loss: float
    examples: int


def constant_baseline(data: FederatedData, kind: str) -> Baseline | None:
    """The score of the most frequent class, or of the mean; None for other targets.

    kind: "classes" or "values", as a model declares its targets. The frequencies and the mean are those of the training
    examples.

    >>> some = Split.from_clients([{"y": np.array([0, 0, 0, 1])}])
    >>> found = constant_baseline(FederatedData(some, validation=some), "classes")
    >>> found.accuracy, round(found.loss, 4)
    (0.75, 0.5623)
    """
    train, validation = data.train, data.validation
    if validation is None or "y" not in train.arrays or kind not in ("classes", "values"):
        return None
    seen, asked = _targets(train), _targets(validation)
    if kind == "values":
        return Baseline(None, 0.0, float(((asked.astype(float) - seen.astype(float).mean()) ** 2).mean()), len(asked))
    labels, counts = np.unique(seen, return_counts=True)
    frequency = dict(zip(labels.tolist(), (counts / counts.sum()).tolist(), strict=True))
    share = float((asked == labels[np.argmax(counts)]).mean())
    loss = -np.log([frequency.get(label, 1 / (len(seen) + 1)) for label in asked.tolist()]).mean()
    return Baseline(share, math.sqrt(max(share * (1 - share), 1e-12) / len(asked)), float(loss), len(asked))


def _targets(split: Split) -> np.ndarray:
    return np.asarray(split.arrays["y"]).reshape(-1)


def problem_with(race: Race, found: Found, kind: str) -> str:
    """Why there is no advice, as one sentence; empty if there is one."""
    metric = race.metric.name
    if found.best is None:
        lowest = min((value for one in found.tried for _, value in one.rates[:1]), default=math.nan)
        return (
            f"no advice: all {len(found.tried)} settings diverged, down to a client rate of {lowest:.2g}. Check the "
            "loss and the data: a loss that is not finite at the first model, or inputs that are not scaled, are the "
            "usual causes"
        )
    ends = race.curves(found.best, race.reached).kept()[:, -1]
    if ends.mean() <= race.start:
        return (
            f"no advice: no setting improves {metric} over the initial model ({race.start * race.metric.sign:.4g}) in "
            f"{race.reached} rounds. Try more rounds (--budget), or check the loss and the data"
        )
    base = constant_baseline(race.held[0], kind)
    if base is not None and not _beats(race, found.best, base):
        what = "the most frequent class" if base.accuracy is not None else "the mean"
        return (
            f"no advice: after {race.reached} rounds no setting predicts better than {what} on the validation "
            "examples. The targets look like noise for this model, so no rate is better than another. Check the labels "
            "and the inputs, or give the pilot more rounds (--budget)"
        )
    return ""


def _beats(race: Race, best: Setting, base: Baseline) -> bool:
    """Whether the best values of a setting beat the constant prediction by more than chance."""
    rows = race.rows_of(best, race.reached)

    def level(name: str, sign: float) -> float | None:
        curves = [row.get(f"curve/validation_{name}") for row in rows]
        if any(curve is None for curve in curves):
            return None
        return float(np.mean(kept(sign * np.array(curves, float))[:, -1]))

    # A prediction that has nothing to do with the targets explains a share of them that is 1 / n on average.
    chance = SIGMAS**2 / base.examples
    if base.accuracy is None:
        explained = level("r2", 1.0)
        return explained is None or explained > chance
    accuracy, loss = level("accuracy", 1.0), level("loss", -1.0)
    if accuracy is not None and accuracy > base.accuracy + SIGMAS * base.accuracy_error:
        return True
    return loss is None or -loss < base.loss - chance


def doubts_about(race: Race, found: Found) -> list[str]:
    """Reasons why the advice may not be the best, each a sentence."""
    said: list[str] = []
    assert found.best is not None
    assert found.final is not None
    close: Sequence[Any] = [one for one in found.final.close_to_best() if one != found.best]
    if close:
        listed = "; ".join(f"{one}: {_times(found, one)} the rounds" for one in close)
        said.append(f"Not certain: within the noise of {len(found.seeds)} seeds these may be as good: {listed}.")
    for name, value in found.best.rates:
        line = [dict(one.rates).get(name, value) for one in found.tried if one[:2] == found.best[:2]]
        if len(set(line)) > 1 and value in (min(line), max(line)):
            side = 1 if value == max(line) else -1
            said.append(
                f"{name} = {value:.3g} is at the edge of what was tried; {neighbour(value, side):.3g} may be better."
            )
    if race.reached < race.config.rounds:
        said.append(
            f"The longest trials had {race.reached} of the {race.config.rounds} configured rounds; what happens "
            "later is not known."
        )
    clients, validation = race.held[0].train.num_clients, race.held[0].validation
    if clients == 1:
        said.append(
            "The data has one client: there is nothing to federate, and methods against drift cannot help. The "
            "advice is that of ordinary training."
        )
    if validation is not None and validation.num_examples < FEW:
        said.append(f"There are only {validation.num_examples} validation examples, so all scores are noisy.")
    return said


def _times(found: Found, one: Setting) -> str:
    assert found.final is not None
    assert found.best is not None
    return f"{math.exp(found.final.regret[one] - found.final.regret[found.best]):.2f}x"
