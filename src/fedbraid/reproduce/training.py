"""Training runs of the entries: many points as one program, saved in parts so that a stopped run can continue.

The result of a run is a small JSON file in the entry's work folder. A run that was stopped continues from the models
saved next to it. Both are used again only if the configuration, the points and the data are the same.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedbraid import files
from fedbraid.core import Algorithm
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.config import Config, ConfigError, parse
from fedbraid.experiment.points import Point, points_program, with_values
from fedbraid.metric import is_client_column
from fedbraid.simulation.points import Points, PointsResult
from fedbraid.simulation.result import Checkpoints

__all__ = ["Swap", "best", "rounds_to", "score", "spent", "train"]

ENGINE = ("loss", "arrived", "refused", "round", "seconds")  # columns of the history that no server logs
IGNORED = ("engine", "checkpoint")  # sections of a configuration that do not change results
Swap = Callable[[Callable, Mapping[str, Any]], Algorithm]  # (loss, options of the configuration's algorithm)


def train(
    name: str,
    config: Config,
    data: FederatedData,
    points: Sequence[Point],
    *,
    work: Path,
    seeds: Sequence[int] = (0,),
    marks: Collection[int] = (),
    piece: int | None = None,
    swap: Swap | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run all points for ``config.rounds`` rounds, or read ``work/NAME.json`` if it has the result of an earlier run.

    seeds: every point runs with each seed. With several seeds, the points of the result have a ``seed`` and are
        sorted by it.
    marks: rounds after which to evaluate, in addition to those of the configuration.
    piece: save models and curves every this many rounds; None saves only the final result.
    swap: makes the algorithm that runs instead of the one that the configuration names.

    The result has ``points``; ``rounds``, those that were evaluated; ``diverged``; for every test metric, under its
    name, one list per point; ``train_loss`` of every round; ``logs``, the columns that the server's ``receive`` logged;
    ``models``, the number of models sent per round, down and up; and ``seconds``.
    """
    asked = _request(config, data, points, seeds, marks, swap)
    path = work / f"{name}.json"
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if _same(kept["asked"], asked):
            return kept
    work.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    keys = tuple(points[0])
    filled = with_values(config, points[0])
    options = {"points": len(points), "seeds": seeds, "test": data.test}
    together = points_program(filled, data, keys, **options, swap=swap)
    parts, outcomes = len(seeds) * len(together.chunks(points)), []
    for i, (seed, chunk) in enumerate(itertools.product(seeds, together.chunks(points))):

        def on_progress(done: int, i: int = i) -> None:
            tell(f"{name}: round {done} of {config.rounds}, part {i + 1} of {parts}")

        checkpoints = None if piece is None else _checkpoints(work / f"{name}-{i}", piece, asked)
        outcomes.append(
            together.run(
                chunk,
                seed=seed,
                rounds=config.rounds,
                marks=marks,
                checkpoints=checkpoints,
                on_progress=on_progress,
            )
        )
    result = {"asked": asked, "name": name, "points": asked["points"], **_joined(outcomes, together)}
    result["seconds"] = round(time.perf_counter() - start, 1)
    _replace(path, lambda temporary: temporary.write_text(json.dumps(result), encoding="utf-8"))
    for i in range(len(outcomes)):
        shutil.rmtree(work / f"{name}-{i}", ignore_errors=True)
    return result


def _request(
    config: Config,
    data: FederatedData,
    points: Sequence[Point],
    seeds: Sequence[int],
    marks: Collection[int],
    swap: Swap | None,
) -> dict[str, Any]:
    """Everything that determines a result, as JSON: a saved result is used only if this is the same."""
    return {
        "config": config.model_dump(mode="json") | {"seed": seeds[0]},
        "points": [dict(point) | ({"seed": seed} if len(seeds) > 1 else {}) for seed in seeds for point in points],
        "marks": sorted(marks),
        "data": [data.name, *([split.num_clients, split.num_examples] for split in (data.train, data.test) if split)],
        "swap": None if swap is None else f"{swap.__module__}.{swap.__qualname__}",
    }


def _checkpoints(folder: Path, every: int, asked: Mapping[str, Any]) -> Checkpoints:
    """Checkpoints of one part of a training; those of another training in the same folder are removed."""
    about = folder / "asked.json"
    if folder.exists() and not (about.is_file() and _same(json.loads(about.read_text(encoding="utf-8")), asked)):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_text(about, json.dumps(asked))
    return Checkpoints(folder / "checkpoints", every, resume=True)


def _joined(outcomes: Sequence[PointsResult], together: Points) -> dict[str, Any]:
    def column(kind: str, name: str) -> list[list[float | None]]:
        return [[_plain(v) for v in row] for outcome in outcomes for row in getattr(outcome, kind)[name].tolist()]

    pooled = [name for name in outcomes[0].evaluations if name != "round" and not is_client_column(name)]
    sent = together.traffic
    return {
        "rounds": outcomes[0].evaluations["round"].tolist(),
        "diverged": [bool(flag) for outcome in outcomes for flag in outcome.diverged],
        **{name: column("evaluations", name) for name in pooled},
        "train_loss": column("history", "train/loss") if "train/loss" in outcomes[0].history else [],
        "logs": {name: column("history", name) for name in outcomes[0].history if name.split("/")[-1] not in ENGINE},
        "models": together.plan.cohort * (sent.down + sent.up) / sent.model,
    }


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None


def _same(kept: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether a saved request equals this one; keys that configurations did not have then count as their defaults."""
    try:
        configs = [parse({k: v for k, v in one["config"].items() if k not in IGNORED}) for one in (kept, asked)]
    except ConfigError:  # a key that no longer exists
        return False
    return configs[0] == configs[1] and all(kept.get(key) == asked[key] for key in asked if key != "config")


# --- saving an unfinished run ----------------------------------------------------------------------------------------


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write to a temporary file and rename it: a run that is stopped while it writes keeps the previous file."""
    with files.replacing(path) as temporary:
        write(temporary)


# --- reading a result ------------------------------------------------------------------------------------------------


def score(result: Mapping[str, Any], point: int, *, last: int = 100) -> float:
    """The mean test accuracy over the evaluations of the last rounds; nan for a point that diverged.

    >>> result = {"rounds": [10, 20, 30], "test_accuracy": [[0.1, 0.5, 0.7]], "diverged": [False]}
    >>> round(score(result, 0, last=20), 6)
    0.6
    """
    if result["diverged"][point]:
        return math.nan
    least = result["rounds"][-1] - last
    seen = [v for r, v in zip(result["rounds"], result["test_accuracy"][point], strict=True) if r > least]
    return math.nan if None in seen else float(np.mean(seen))


def best(result: Mapping[str, Any], *, last: int = 100) -> tuple[int, float]:
    """The point with the highest score, and the score; the first point and nan if all diverged."""
    scores = [score(result, i, last=last) for i in range(len(result["points"]))]
    if all(math.isnan(s) for s in scores):
        return 0, math.nan
    at = int(np.nanargmax(scores))
    return at, scores[at]


def spent(results: Iterable[Mapping[str, Any]]) -> str:
    """The training time of all runs, in words. (An entry that reads saved results takes less time itself.)

    >>> spent([{"seconds": 61.0}, {"seconds": 3.0}])
    'All runs together took 64 s, compilation and evaluation included.'
    """
    return f"All runs together took {sum(r['seconds'] for r in results):.0f} s, compilation and evaluation included."


def rounds_to(result: Mapping[str, Any], point: int, target: float) -> float:
    """The first round at which the test accuracy reaches a target, linear between evaluations; inf if it does not.

    >>> rounds_to({"rounds": [10, 20], "test_accuracy": [[0.4, 0.6]], "diverged": [False]}, 0, 0.5)
    15.0
    """
    values = [math.nan if v is None else v for v in result["test_accuracy"][point]]
    before = (0, 0.0)
    for now in zip(result["rounds"], values, strict=True):
        if now[1] >= target:
            share = (target - before[1]) / (now[1] - before[1]) if now[1] > before[1] else 1.0
            return before[0] + share * (now[0] - before[0])
        before = now
    return math.inf
