"""Optimizers of clients and rates over rounds in configurations."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import fedbraid as fb
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.config import ConfigError, load_config
from fedbraid.experiment.divergence import lower_rate

SETTINGS = ["model={name='softmax_regression'}", "cohort='all'", "algorithm.name=fedavg", "algorithm.batch_size=8"]


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 8, 3)).astype(np.float32), rng.integers(0, 2, (2, 8))
    split = fb.Split.from_clients([{"x": x[i], "y": y[i]} for i in range(2)])
    return fb.FederatedData(split, info={"classes": 2})


def run(data, *settings):
    made = assemble(load_config(settings=[*SETTINGS, *settings]), data)
    return made, fb.simulate(made.algorithm, made.params, data, rounds=3).params


def test_a_table_names_an_optimizer_and_its_options(data):
    made, found = run(data, "algorithm.client_opt={name='adamw', weight_decay=0.1}", "algorithm.client_lr=0.01")
    alg = fb.fedavg(made.loss, client_lr=0.01, batch_size=8, client_opt=lambda lr: optax.adamw(lr, weight_decay=0.1))
    again = fb.simulate(alg, made.params, data, rounds=3).params
    np.testing.assert_allclose(found["w"], again["w"], rtol=1e-6)


def test_a_rate_may_be_a_table_over_rounds(data):
    rate = "algorithm.client_lr={value=0.4, schedule='linear', over=4, end=0.5, warmup=1}"
    made, found = run(data, rate)
    params = made.params
    for round_, factor in enumerate((1.0, 1.0, 1 - 0.5 / 3)):
        alg = fb.fedavg(made.loss, client_lr=0.4 * factor, batch_size=8, shuffle=False)
        params = fb.simulate(alg, params, data, rounds=1, seed=round_).params
    np.testing.assert_allclose(found["w"], params["w"], rtol=1e-5)  # one full batch a round, in any order
    assert lower_rate(made.config) == ("algorithm.client_lr", 0.04, 0.4)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("client_lr={value=0.1, schedule='stairs', over=3}", "algorithm.client_lr.schedule must be one of constant"),
        ("client_lr={schedule='linear', over=3}", "needs a number as its value, got None"),
        ("client_lr={value=-1, schedule='linear', over=3}", "client_lr must be a finite number"),
        ("client_lr={value=0.1, schedule='linear'}", "over must be a whole number"),
        ("client_opt={name='adam', beta=1}", "client_opt 'adam' has no option 'beta'"),
        ("client_opt='adamm'", "client_opt must be one of sgd"),
    ],
)
def test_mistakes_are_named(data, setting, message):
    with pytest.raises(ConfigError, match=message):
        run(data, f"algorithm.{setting}")
