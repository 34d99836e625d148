"""``fedbraid.testing.check``: a user's algorithm obeys all laws, and for each law a broken algorithm is refused."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import MEAN, Reducer
from fedbraid.testing import LAWS, LawError, check
from fedbraid.testing.problem import clients, loss, start

NUMPY = np.random.default_rng(0)
EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def fedexp():
    sys.path.insert(0, str(EXAMPLES))
    try:
        import fedexp

        yield fedexp.fedexp
    finally:
        sys.path.remove(str(EXAMPLES))
        sys.modules.pop("fedexp", None)


def test_fedexp_obeys_every_law(fedexp):
    found = check(fedexp, options={"client_lr": 0.05}, rates={"client_lr": 0.02, "eps": 1.0})
    assert set(found.held) == set(LAWS) - {"invariant"}
    assert set(found.skipped) == {"invariant"}


def test_fedexp_is_the_papers_step(fedexp):
    """By NumPy from the clients' updates: eta = max(1, sum ||D_i||^2 / (2 M (||mean D||^2 + eps)))."""
    options = {"client_lr": 0.05, "batch_size": None, "steps": 3}
    with jax.enable_x64(True):
        run = fb.simulate(fedexp(loss, eps=1e-3, **options), start(), clients(), rounds=1, devices=1)
        updates = []
        for i in range(5):
            x, y = (clients().client(i)[name] for name in "xy")
            w, b = np.array([0.3, -0.2, 0.1]), 0.5
            for _ in range(3):
                residual = x @ w + b - y
                w, b = w - 0.05 * x.T @ residual / len(y), b - 0.05 * residual.mean()
            updates.append(np.append(np.array([0.3, -0.2, 0.1]) - w, 0.5 - b))
    mean = np.mean(updates, 0)
    eta = max(1, sum(u @ u for u in updates) / (2 * 5 * (mean @ mean + 1e-3)))
    np.testing.assert_allclose(run.history["train/step"], [eta], rtol=1e-12)
    np.testing.assert_allclose(run.params["w"], np.array([0.3, -0.2, 0.1]) - eta * mean[:3], rtol=1e-12)


# --- one broken algorithm per law -------------------------------------------------------------------------------------


def changed(change, loss=None):
    """A factory of FedAvg whose exchange is changed."""

    def factory(given, *, client_lr=0.05, batch_size=2, steps=2):
        alg = fb.fedavg(loss or given, client_lr=client_lr, batch_size=batch_size, steps=steps)
        return alg._replace(exchanges=(change(alg.exchanges[0]),))

    return factory


def receiving(receive):
    return changed(lambda e: e._replace(receive=lambda server, a, key: receive(e.receive, server, a, key)))


def opaque(client):
    """FedAvg with another client function: ``client(params, data) -> pseudograd``."""

    def report(down, state, data, key):
        return fb.Report(fb.Up(client(down.params, data)), jnp.ones(()))

    return changed(lambda e: e._replace(client=report))


def gathered(combine):
    """FedAvg whose uploads are stacked, and combined by ``combine(rows, weights)``."""
    reducer = Reducer(
        lambda up, w: up, lambda rows, w, n: jax.tree.map(lambda r: combine(r, w), rows), kind="gather", mean="none"
    )
    return changed(lambda e: e._replace(reducer=reducer))


def by_slots(rows, weights):
    """The mean over all rows, also those of uploads that did not arrive."""
    return jnp.mean(rows, 0)


def first_row(rows, weights):
    return rows[jnp.argmax(weights > 0)]


def poisoned_loss(params, batch, key):
    return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)  # without the mask


def whole_store(params, data):
    """Reads all rows that it can see: in a simulation those of other clients, too."""
    return {"w": 0.01 * data.arrays["x"].mean(0), "b": params["b"] * 0.0}


def rounds_in_python():
    count = [0]

    def receive(inner, server, aggregate, key):
        count[0] += 1
        state = inner(server, aggregate, key)
        return jax.tree.map(lambda leaf: leaf * (1 - 0.01 * count[0]) if jnp.ndim(leaf) else leaf, state)

    return receiving(receive)


def drawing(params, data):
    return jax.tree.map(lambda p: p * 0 + NUMPY.random(), params)


def rounded(given, *, client_lr=0.05, batch_size=2, steps=2):
    return fb.fedavg(given, client_lr=float(client_lr), batch_size=batch_size, steps=steps)


BROKEN = {
    "structure": receiving(lambda inner, s, a, key: jax.tree.map(lambda leaf: leaf[None], inner(s, a, key))),
    "dtype": receiving(
        lambda inner, s, a, key: jax.tree.map(lambda leaf: leaf * np.ones((), np.float64), inner(s, a, key))
    ),
    "purity": opaque(drawing),
    "mask": changed(lambda e: e, poisoned_loss),
    "messages": changed(
        lambda e: e._replace(
            client=lambda down, state, data, key: fb.Report(
                fb.Up(down.params, jnp.zeros(data.cap)), jnp.ones(()), metrics={}
            ),
            receive=lambda server, a, key: server,
        )
    ),
    "weight": changed(lambda e: e._replace(reducer=MEAN._replace(lift=lambda up, w: up))),
    "engine": gathered(by_slots),
    "plan": gathered(by_slots),
    "order": gathered(first_row),
    "sign": changed(
        lambda e: e._replace(
            receive=lambda server, a, key: e.receive(server, a._replace(up=jax.tree.map(jnp.negative, a.up)), key)
        )
    ),
    "resume": rounds_in_python(),
    "rates": rounded,
    "invariant": changed(lambda e: e),
    "deployed": opaque(whole_store),
}


def test_there_is_a_broken_one_for_every_law():
    assert set(BROKEN) == set(LAWS)


@pytest.mark.parametrize("law", list(BROKEN))
def test_a_broken_algorithm_is_refused(law):
    options = {"rates": {"client_lr": 0.02}} if law == "rates" else {}
    if law == "invariant":
        options = {"invariant": lambda server, states: jnp.abs(server.params["b"])}
    with pytest.raises(LawError, match=f"law '{law}'"):
        check(BROKEN[law], skip=[name for name in LAWS if name != law], **options)


def test_an_algorithm_is_checked_on_its_own_data():
    split = clients(dtype=np.float32)
    alg = fb.fedavg(loss, client_lr=0.05, batch_size=2)
    params = start(jnp.float32)
    found = check(alg, params=params, data=split, skip=["resume", "plan", "deployed"])
    assert {"engine", "order", "mask"} <= set(found.held)
    assert set(found.skipped) == {"resume", "plan", "deployed", "rates", "invariant", "sign"}
    bad = fb.fedavg(poisoned_loss, client_lr=0.05, batch_size=2)
    with pytest.raises(LawError, match="law 'mask'"):
        check(bad, params=params, data=split)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"skip": ["laws"]}, "no law is called 'laws'"),
        ({"data": clients()}, "params and data belong to an Algorithm"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        check(fb.fedavg, **given)
    with pytest.raises(ValueError, match="its own params and data"):
        check(fb.fedavg(loss))
