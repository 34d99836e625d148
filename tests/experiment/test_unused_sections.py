"""Sweeps say that [stop] and [track] have no effect on them."""

from __future__ import annotations

from fedbraid.experiment.config import load_config
from fedbraid.experiment.judging import notice_unused
from fedbraid.experiment.lab import SweepSettings
from fedbraid.experiment.sweep import run_sweep
from told import collecting, told

TINY = ["data.clients=4", "model={name='softmax_regression'}", "cohort=2", "rounds=1", "evaluation.every=1"]
TINY += ["algorithm.name=fedavg"]


def test_a_sweep_says_which_sections_it_ignores(tmp_path):
    config = load_config(settings=[*TINY, "stop.target=0.9", "track.to=['tensorboard:logs']"])
    with told(r"\[stop\].*sweeps ignore it") as texts:
        run_sweep(config, SweepSettings(over={"algorithm.client_lr": [0.1]}), tmp_path / "sweep")
    assert any("[track]" in text for text in texts)
    with collecting() as texts:
        notice_unused(load_config(settings=TINY), "sweeps")
    assert not texts
