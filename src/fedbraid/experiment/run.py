"""One run from a configuration to a run folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.experiment import runfolder
from fedbraid.experiment.assembly import Experiment, build
from fedbraid.experiment.config import Config, dump
from fedbraid.experiment.plots import curves
from fedbraid.simulation import Checkpoints, Progress, hosts, simulate
from fedbraid.simulation.evaluate import client_values, evaluator
from fedbraid.transforms.privacy import epsilon_by_round, is_private

__all__ = ["run_config"]


def run_config(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    on_built: Callable[[Experiment], None] | None = None,
    on_progress: Callable[[Progress], bool | None] | None = None,
) -> dict[str, Any]:
    """Train what ``config`` says, write the run folder, and return its summary.

    The folder must be new, or with ``resume`` one whose run was stopped. ``on_progress`` may return True to stop; the
    summary's ``finished`` is then false and the run can be resumed. On several hosts all call it alike; the first one
    writes, and the summary of the others is short.
    """
    experiment = build(config)  # whatever is wrong with the configuration is said before a folder is made
    hosts.same(f"{dump(config)} {experiment.data.train.num_examples}", "configurations or data")
    if not resume:
        hosts.first_alone(lambda: runfolder.create(out, config))
    if on_built is not None:
        on_built(experiment)
    saved = out / runfolder.CHECKPOINTS
    stamps: list[tuple[int, float]] = []

    def watched(now: Progress) -> bool | None:
        stamps.append((now.round, now.seconds))
        return None if on_progress is None else on_progress(now)

    began = time.perf_counter()
    result = simulate(
        experiment.algorithm,
        experiment.params,
        experiment.data,
        rounds=config.rounds,
        cohort=None if config.cohort == "all" else config.cohort,
        seed=config.seed,
        metrics=experiment.metrics if experiment.data.test is not None else None,
        eval_every=config.evaluation.every,
        arrival=experiment.arrival,
        engine=config.engine,
        checkpoints=Checkpoints(saved, config.checkpoint.every, resume and saved.is_dir() and any(saved.iterdir())),
        on_progress=watched,
    )
    jax.block_until_ready(result.params)
    seconds = time.perf_counter() - began
    if not hosts.is_first():  # of several hosts one writes
        return {"finished": result.info.stopped_at == config.rounds, "rounds": result.info.stopped_at}
    table = runfolder.columns(result.history, result.evaluations, result.info.stopped_at)
    table["seconds"] = _clock(table["round"], stamps)
    if is_private(experiment.algorithm):
        sampling = result.info.plan.cohort / experiment.data.train.num_clients
        rounds = result.info.stopped_at
        table["epsilon"] = epsilon_by_round(
            experiment.algorithm, sampling=sampling, rounds=rounds, history=result.history
        )
    runfolder.write_metrics(out, table)
    if experiment.data.test is not None:
        scores = evaluator(experiment.metrics, experiment.data.test)(result.params)
        runfolder.write_clients(out, {f"test_{name}": client_values(sums) for name, sums in scores.items()})
    what = f"{config.algorithm.name} on {config.data.name}"
    title = f"{what}: {config.model.name}, cohort {config.cohort}, seed {config.seed}"
    curves(table, title, out / runfolder.CURVES)
    final = {name: float(np.asarray(column)[-1]) for name, column in result.evaluations.items() if name != "round"}
    if "epsilon" in table:
        final["epsilon"] = float(table["epsilon"][-1])
    info = result.info
    summary = {
        "algorithm": config.algorithm.name,
        "data": config.data.name,
        "model": config.model.name,
        "finished": info.stopped_at == config.rounds,
        "rounds": info.stopped_at,
        "seconds": seconds,
        "rounds_per_second": info.stopped_at / seconds,
        "final": final,
        "bytes": {way: int(table[f"bytes_{way}"][-1]) for way in ("down", "up")},
        "engine": {
            "plan": info.plan.kind,
            "devices": info.plan.devices,
            "hosts": jax.process_count(),
            "chunk": info.plan.chunk,
            "streamed": info.streamed,
            "local_steps": info.steps,
            "masked_share": info.masked_share,
            "imbalance": info.imbalance,
        },
        "params_sha256": runfolder.params_sha256(result.params),
        "out": str(out),
    }
    runfolder.write_summary(out, summary)
    return summary


def _clock(rounds: np.ndarray, stamps: list[tuple[int, float]]) -> np.ndarray:
    """Seconds since the start at the end of every round; nan for rounds done before the run was resumed."""
    if not stamps:
        return np.full(len(rounds), np.nan)
    at, seconds = np.array(stamps).T
    return np.interp(rounds, at, seconds, left=np.nan)
