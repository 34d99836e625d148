"""Any optax optimizer on clients, rates over local steps and over rounds: each equals a loop written by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fedbraid as fb
from fedbraid.algorithms.client_optimizers import OPTIMIZERS, optimizer
from fedbraid.algorithms.schedules import over_rounds, schedule
from fedbraid.local import masked_mean
from told import told

RNG = np.random.default_rng(1)
X, Y = RNG.normal(size=(3, 8, 4)), RNG.normal(size=(3, 8))


def clients(count: int) -> fb.Split:
    return fb.Split.from_clients([{"x": X[i], "y": Y[i]} for i in range(count)])


def loss(params, batch, key=None):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return masked_mean(error**2, batch["mask"]) / 2


def whole(i: int) -> dict:
    return {"x": jnp.asarray(X[i]), "y": jnp.asarray(Y[i]), "mask": jnp.ones(8)}


def start() -> dict:
    return {"w": jnp.asarray(RNG.normal(size=4) * 0 + 0.3), "b": jnp.asarray(0.1)}


def run(alg, count=1, rounds=3, **options):
    return fb.simulate(alg, start(), clients(count), rounds=rounds, **options)


def close(found, expected, tolerance=1e-12):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


FULL = {"batch_size": None, "steps": 4}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("method", [fb.fedavg, fb.scaffold, fb.feddyn, fb.fedadam], ids=lambda m: m.__name__)
def test_sgd_by_optax_is_the_usual_method(method):
    usual = run(method(loss, client_lr=0.05, **FULL), count=3)
    same = run(method(loss, client_lr=0.05, client_opt=optax.sgd, **FULL), count=3)
    close(same.params, usual.params)
    close(same.states, usual.states)
    other = run(method(loss, client_lr=0.05, client_opt="momentum", **FULL), count=3)
    assert abs(other.params["w"] - usual.params["w"]).max() > 1e-6


@pytest.mark.usefixtures("x64")
def test_adamw_with_one_client_and_kept_state_is_optax_alone():
    found = run(fb.fedavg(loss, client_lr=0.1, client_opt="adamw", client_opt_state="kept", **FULL)).params
    opt = optax.adamw(0.1)
    params = start()
    state = opt.init(params)
    for _ in range(3 * 4):
        updates, state = opt.update(jax.grad(loss)(params, whole(0)), state, params)
        params = optax.apply_updates(params, updates)
    close(found, params)


@pytest.mark.usefixtures("x64")
def test_a_state_that_is_reset_starts_anew_in_every_round():
    found = run(fb.fedavg(loss, client_lr=0.1, client_opt="adam", **FULL)).params
    opt, params = optax.adam(0.1), start()
    for _ in range(3):
        state = opt.init(params)
        for _ in range(4):
            updates, state = opt.update(jax.grad(loss)(params, whole(0)), state, params)
            params = optax.apply_updates(params, updates)
    close(found, params)


@pytest.mark.usefixtures("x64")
def test_diloco_is_a_loop_written_by_hand():
    alg = fb.diloco(loss, client_lr=0.05, server_lr=0.7, momentum=0.9, weight_decay=0.1, **FULL)
    found = run(alg, count=3, rounds=5)
    inner, outer = optax.adamw(0.05, weight_decay=0.1), optax.sgd(0.7, 0.9, nesterov=True)
    params = start()
    states, outer_state = [inner.init(params) for _ in range(3)], outer.init(params)
    for _ in range(5):
        ends = []
        for i in range(3):
            y = params
            for _ in range(4):
                updates, states[i] = inner.update(jax.grad(loss)(y, whole(i)), states[i], y)
                y = optax.apply_updates(y, updates)
            ends.append(y)
        gap = jax.tree.map(lambda x, *ys: x - sum(ys) / 3, params, *ends)
        updates, outer_state = outer.update(gap, outer_state, params)
        params = optax.apply_updates(params, updates)
    close(found.params, params, 1e-9)


@pytest.mark.usefixtures("x64")
def test_scaffold_with_another_optimizer_keeps_its_invariant():
    alg = fb.scaffold(loss, client_lr=0.05, client_opt="adam", client_opt_state="kept", **FULL)
    found = run(alg, count=3, rounds=4)
    mean = jax.tree.map(lambda c: c.mean(0), found.states.c)
    close(found.server.c, mean)


@pytest.mark.usefixtures("x64")
def test_clipping_decay_and_a_schedule_over_local_steps():
    spec = {
        "name": "sgd",
        "clip_norm": 0.3,
        "weight_decay": 0.2,
        "schedule": {"name": "linear", "over": 4, "end": 0.5},
    }
    found = run(fb.fedavg(loss, client_lr=0.1, client_opt=spec, **FULL), rounds=2).params
    params = start()
    for _ in range(2):
        for k in range(4):
            rate = 0.1 * (1 - 0.5 * k / 4)
            g = jax.grad(loss)(params, whole(0))
            norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(g)))
            shrink = min(1.0, 0.3 / norm)
            params = jax.tree.map(lambda p, g, r=rate, s=shrink: p - r * (s * g + 0.2 * p), params, g)
    close(found, params, 1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda **r: fb.fedavg(loss, **FULL, **r), {"client_lr": 0.1, "server_lr": 0.8}),
        (lambda **r: fb.scaffold(loss, **FULL, **r), {"client_lr": 0.1}),
        (lambda **r: fb.mime(loss, batch_size=None, steps=4, **r), {"client_lr": 0.1}),
        (lambda **r: fb.fednova(loss, **FULL, **r), {"client_lr": 0.1}),
    ],
    ids=["fedavg", "scaffold", "mime", "fednova"],
)
def test_rates_over_rounds_are_runs_of_one_round_with_each_rate(make, rates):
    values = {name: (lambda t, v=value: v * 0.5**t) for name, value in rates.items()}
    found = run(over_rounds(make, values), count=3, rounds=3)
    server, states = None, None
    for t in range(3):
        alg = make(**{name: value(t) for name, value in values.items()})
        server = alg.init(start()) if server is None else server
        states = jax.tree.map(lambda s: jnp.stack([s] * 3), alg.init_client(start())) if states is None else states
        server, states = by_hand(alg, server, states)
    close(found.server.server, server, 1e-9)
    assert int(found.server.round) == 3


def by_hand(alg, server, states):
    """One round over all three clients, without the simulator."""
    from fedbraid.core import Aggregate, reduce_reports
    from fedbraid.local import ClientData

    key = jax.random.key(0)
    for exchange in alg.exchanges:
        down = exchange.send(server)
        one = [jax.tree.map(lambda s, i=i: s[i], states) for i in range(3)]
        data = [ClientData.of({"x": X[i], "y": Y[i]}) for i in range(3)]
        reports = [exchange.client(down, one[i], data[i], key) for i in range(3)]
        ups = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[report.up for report in reports])
        up, weight, count = reduce_reports(exchange.reducer, ups, jnp.stack([jnp.asarray(r.weight) for r in reports]))
        states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[report.state for report in reports])
        server = exchange.receive(server, Aggregate(up, weight, count, 3), key)
    return server, states


def test_the_round_costs_four_bytes():
    alg = over_rounds(lambda **rates: fb.fedavg(loss, **rates), {"client_lr": optax.cosine_decay_schedule(0.1, 10)})
    plain, scheduled = (fb.cost(a, start(), clients(1)) for a in (fb.fedavg(loss), alg))
    assert (scheduled.down - plain.down, scheduled.up - plain.up) == (4, 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_named_optimizer_descends(name):
    alone = name in ("dog", "dowg", "prodigy")  # they find their rate over the run, from tiny first steps
    rate = 1.0 if alone else 0.01 if name in ("lion", "lamb", "adagrad") else 0.05
    kept = {"client_opt_state": "kept"} if alone else {}
    found = run(fb.fedavg(loss, client_lr=rate, client_opt=name, **kept, **FULL), rounds=8).params
    assert loss(found, whole(0)) < loss(start(), whole(0))


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"client_opt must be one of sgd, momentum.* \(did you mean 'adam'"):
        fb.fedavg(loss, client_opt="adamm")
    for given in (3, ["adam"], {"name": ["adam"]}):
        with pytest.raises(ValueError, match=r"client_opt must be one of sgd, momentum.* or a table .* got"):
            fb.fedavg(loss, client_opt=given)
    with pytest.raises(ValueError, match="client_opt 'adam' has no option 'beta'; it takes b1, b2"):
        fb.fedavg(loss, client_opt={"name": "adam", "beta": 1})
    with pytest.raises(ValueError, match=r"no option 'weight_decy' \(did you mean 'weight_decay'\?\)"):
        fb.fedavg(loss, client_opt={"name": "adam", "weight_decy": 0.1})
    for option, value in (("weight_decay", -1.0), ("b1", 1.0), ("b2", -0.1), ("eps", -1e-8)):
        with pytest.raises(ValueError, match=rf"client_opt.{option} must be a finite number of at least 0.* {value}"):
            fb.fedavg(loss, client_opt={"name": "adamw", option: value})
    with pytest.raises(ValueError, match=r"momentum must be a finite number of at least 0 and below 1, got 1.5"):
        fb.fedavg(loss, client_opt={"name": "momentum", "momentum": 1.5})
    with pytest.raises(ValueError, match="client_opt_state must be one of 'reset', 'kept', got 'forget'"):
        fb.fedavg(loss, client_opt="adam", client_opt_state="forget")
    with pytest.raises(ValueError, match=r"client_opt.schedule.over must be a whole number of at least 1, got None"):
        fb.fedavg(loss, client_opt={"name": "adam", "schedule": {"name": "cosine"}})
    with pytest.raises(ValueError, match=r"schedule.name must be one of constant, linear"):
        schedule({"name": "stairs"})
    with told("its own rate: the learning rate 0.1 has no effect"):
        optimizer(optax.adam(0.1), 0.1)
