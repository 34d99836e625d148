"""Elastic aggregation against NumPy: sensitivities, the scaled step, held-out and train rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.core import StructureError, check_structure
from fedbraid.costs import cost, data_shapes
from fedbraid.data import digits
from fedbraid.local import ClientData, LocalWork, shuffled
from fedbraid.models.linear import softmax_regression
from fedbraid.simulation import simulate
from fedbraid.transforms import elastic
from fedbraid.transforms.elastic_aggregation import elasticity
from transforms.toy import one_round
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
HELD = 0.3  # clients of 3, 9, 4, 7, 5 rows hold out 1, 3, 2, 3, 2 of them


def outputs(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def divided(n, key=None, held=HELD):
    """The train rows and the held-out rows of a client with ``n`` rows, in the order in which it takes them."""
    order = np.asarray(shuffled(jax.random.key(0) if key is None else key, np.arange(n), n))
    kept = max(1, int((1 - held) * n + 1e-6))
    return order[:kept], order[kept:]


def sensitivity_by_hand(x, kind, mu, size):
    """The sensitivities of F(x) = x w + b at start(): g = 2 mean F(x) (x, 1) per batch."""
    w, b = (np.asarray(start()[k]) for k in "wb")
    batches = [x[a : a + size] for a in range(0, len(x), size)]
    g = [2 * np.mean((r @ w + b)[:, None] * np.column_stack([r, np.ones(len(r))]), 0) for r in batches]
    if kind == "average":
        return sum(len(r) * np.abs(v) for r, v in zip(batches, g, strict=True)) / len(x)
    omega = np.zeros(4)
    for v in g:
        omega = mu * omega + (1 - mu) * np.abs(v)
    return omega


def one_step_by_hand(kind, mu, tau, size, lr):
    """FedAvg with one full-batch step on the train rows, weighted by their number, and the paper's server update."""
    split = clients()
    w, b = (np.asarray(start()[k]) for k in "wb")
    moves, omegas, weights = [], [], []
    for i in range(5):
        own = split.client(i)
        kept, held = divided(len(own["y"]))
        x, y = own["x"][kept], own["y"][kept]
        residual = x @ w + b - y
        moves.append(-lr * np.mean(residual[:, None] * np.column_stack([x, np.ones(len(x))]), 0))  # theta_k - theta
        omegas.append(sensitivity_by_hand(own["x"][held], kind, mu, size))
        weights.append(len(y))
    move, omega = (np.average(v, axis=0, weights=weights) for v in (moves, omegas))
    zeta = 1 + tau - omega / omega.max()
    return np.append(w, b) + zeta * move  # Algorithm 3 adds the move


def moved(alg, split=None):
    """The model after one round of all clients."""
    server, *_ = one_round(alg, start(), clients() if split is None else split)
    return alg.params(server)


def flat(params):
    return np.append(np.asarray(params["w"]), np.asarray(params["b"]))


@pytest.mark.parametrize(("kind", "size"), [("momentum", 2), ("average", 2), ("average", 1)])
def test_one_round_is_what_numpy_says(kind, size):
    alg = elastic(
        fb.fedavg(loss, client_lr=0.05, batch_size=None),
        outputs,
        tau=0.4,
        mu=0.8,
        sensitivity=kind,
        held_out=HELD,
        batch_size=size,
    )
    assert isinstance(alg.exchanges[0].client, LocalWork)
    got = moved(alg)
    np.testing.assert_allclose(flat(got), one_step_by_hand(kind, 0.8, 0.4, size, 0.05), rtol=1e-10)


def opaque(alg):
    """The same algorithm with a client that is a plain function, not a LocalWork."""
    exchange = alg.exchanges[0]
    work = exchange.client
    return alg._replace(exchanges=(exchange._replace(client=lambda *args: work(*args)),))


def test_a_client_in_one_piece_does_the_same():
    base = fb.fedavg(loss, client_lr=0.05, batch_size=None)
    whole = elastic(opaque(base), outputs, tau=0.4, mu=0.8, held_out=HELD, batch_size=2)
    got = moved(whole)
    np.testing.assert_allclose(flat(got), one_step_by_hand("momentum", 0.8, 0.4, 2, 0.05), rtol=1e-10)


def test_constant_sensitivity_is_a_rescaled_step_and_none_is_no_change():
    """zeta = tau everywhere if all parameters have the same sensitivity; 1 if all are 0."""
    even = lambda params, batch: batch["mask"] * jnp.sqrt(jnp.sum(params["w"]) + params["b"])  # noqa: E731
    none = lambda params, batch: batch["mask"] * 0.0  # noqa: E731
    base = fb.fedavg(loss, client_lr=0.05, batch_size=None)
    equal, none_sensitive = (
        flat(moved(elastic(base, f, tau=0.25, held_out=HELD))) - flat(start()) for f in (even, none)
    )
    np.testing.assert_allclose(equal, 0.25 * none_sensitive, rtol=1e-9)
    split = clients()
    kept = fb.Split.from_clients([{k: v[divided(len(v))[0]] for k, v in split.client(i).items()} for i in range(5)])
    plain = flat(moved(base, kept)) - flat(start())
    np.testing.assert_allclose(none_sensitive, plain, rtol=1e-9)


def test_labels_of_the_held_out_rows_are_never_read():
    """They are NaN here, and the sensitivities are still those of the held-out rows."""
    split = clients()
    own = [{k: v.copy() for k, v in split.client(i).items()} for i in range(5)]
    for client in own:
        client["y"][divided(len(client["y"]))[1]] = np.nan
    alg = elastic(fb.mime(loss, base="sgd", shuffle=False), outputs, held_out=HELD)

    @jax.jit
    def reports(data, keys):  # every exchange has its own key, and they hold out the same rows
        server, state = alg.init(start()), alg.init_client(start())
        return [e.client(e.send(server), state, data, keys[i]) for i, e in enumerate(alg.exchanges)]

    keys = jax.random.split(jax.random.key(0), len(alg.exchanges))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(reports(ClientData.of(own[1]), keys)))


def test_the_engine_holds_out_the_same_rows_in_every_round():
    """Other labels for the rows drawn from address.rows_key change no round of a run with this seed."""
    split, seed = clients(), 3
    own = [{k: v.copy() for k, v in split.client(i).items()} for i in range(5)]
    for i, client in enumerate(own):
        key = address.rows_key(jax.random.key(seed), i)
        client["y"][divided(len(client["y"]), key)[1]] = 1e6
    alg = elastic(fb.fedavg(loss, client_lr=0.05), outputs, held_out=HELD)
    plain, other, with_seed = (
        flat(simulate(alg, start(), given, rounds=2, devices=1, seed=s).params)
        for given, s in ((split, seed), (fb.Split.from_clients(own), seed), (fb.Split.from_clients(own), seed + 1))
    )
    np.testing.assert_array_equal(plain, other)
    assert np.abs(with_seed).max() > 1e3  # another seed holds out other rows


# --- the order of a client's rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
def test_sensitivity_over_seeds_is_that_of_a_sample_without_replacement(order):
    """Mean and variance of Omega over seeds are those of m of n rows drawn without replacement, in any row order."""
    rng, n, held, draws = np.random.default_rng(5), 40, 0.25, 4000
    x = rng.normal(size=(n, 3)) + np.linspace(0, 4, n)[:, None]  # sorted rows have a trend
    rows = x if order == "sorted" else rng.permutation(x)
    w, b = (np.asarray(start()[k]) for k in "wb")
    each = np.abs(2 * (x @ w + b)[:, None] * np.column_stack([x, np.ones(n)]))  # |g| of every row
    alg = elastic(fb.fedavg(loss, batch_size=None), outputs, sensitivity="average", held_out=held, batch_size=1, mu=0.0)
    exchange = alg.exchanges[0]
    data = ClientData.of({"x": rows, "y": np.zeros(n)})

    @jax.jit
    @jax.vmap
    def omega(seed):
        own = replace(data, key=address.rows_key(jax.random.key(seed), 2))
        return exchange.client(exchange.send(alg.init(start())), (), own, jax.random.key(0)).up.aux.omega

    got = omega(np.arange(draws))
    got = np.column_stack([got["w"], got["b"]])
    m = round(held * n)
    variance = (1 - m / n) * each.var(0, ddof=1) / m
    assert np.abs((got.mean(0) - each.mean(0)) / np.sqrt(variance / draws)).max() < 4
    np.testing.assert_allclose(got.var(0), variance, rtol=0.15)


def test_no_class_vanishes_when_rows_are_sorted_by_label():
    """The last rows of a client sorted by label are a whole class: if they are held out, its recall is 0."""
    images = digits.arrays()
    x, y = images["x"] / 16.0, images["y"]
    groups = np.array_split(np.random.default_rng(0).permutation(1400), 4)
    data = fb.Split.from_clients(
        [{"x": x[rows], "y": y[rows]} for rows in (rows[np.argsort(y[rows], kind="stable")] for rows in groups)]
    )
    model = softmax_regression(64, 10)
    alg = elastic(fb.fedavg(model.loss, client_lr=0.5, batch_size=50, epochs=2), lambda p, b: model.predict(p, b["x"]))
    result = simulate(alg, model.init(jax.random.key(0)), data, rounds=15, devices=1)
    said = np.argmax(model.predict(result.params, x[1400:]), 1)
    recall = np.array([np.mean(said[y[1400:] == c] == c) for c in range(10)])
    assert recall.min() > 0.5, recall


# --- what a round logs ------------------------------------------------------------------------------------------------


def test_a_round_logs_the_share_of_boosted_parameters_and_the_mean_factor():
    """Against NumPy at the first round of all clients; 0 and 1 if nothing is sensitive."""
    base = fb.fedavg(loss, client_lr=0.05, batch_size=None)
    alg = elastic(base, outputs, tau=0.6, sensitivity="average", held_out=HELD)
    result = simulate(alg, start(), clients(), rounds=1, devices=1)
    omegas, weights = [], []
    for i in range(5):
        x = clients().client(i)["x"]
        kept, held = divided(len(x), address.rows_key(jax.random.key(0), i))
        omegas.append(sensitivity_by_hand(x[held], "average", 0, 20))
        weights.append(len(kept))
    omega = np.average(omegas, axis=0, weights=weights)
    zeta = 1.6 - omega / omega.max()
    assert 0 < np.mean(zeta > 1) < 1
    np.testing.assert_allclose(result.history["train/boosted"], np.mean(zeta > 1), rtol=1e-12)
    np.testing.assert_allclose(result.history["train/mean_factor"], zeta.mean(), rtol=1e-12)
    none = elastic(base, lambda params, batch: batch["mask"] * 0.0, held_out=HELD)
    result = simulate(none, start(), clients(), rounds=1, devices=1)
    assert result.history["train/boosted"][0] == 0
    assert result.history["train/mean_factor"][0] == 1


def test_elasticity_ranks_over_all_arrays_together():
    zeta = elasticity({"a": jnp.array([0.0, 2.0]), "b": jnp.array(8.0)}, 0.5)
    np.testing.assert_allclose(zeta["a"], [1.5, 1.25])
    np.testing.assert_allclose(zeta["b"], 0.5)
    np.testing.assert_allclose(elasticity({"a": jnp.zeros(3)}, 0.5)["a"], np.ones(3))


def test_communication_is_the_papers():
    make = {"fedavg": 2, "fedavgm": 2, "fedprox": 2, "scaffold": 4}
    for name, multiple in make.items():
        alg = getattr(fb, name)(loss)
        assert cost(alg, start(), clients()).multiple == multiple
        assert cost(elastic(alg, outputs), start(), clients()).multiple == multiple + 1


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: elastic(fb.fedavg(loss), None), "outputs"),
        (lambda: elastic(fb.fedavg(loss), outputs, tau=-1.0), "tau"),
        (lambda: elastic(fb.fedavg(loss), outputs, mu=1.0), "mu"),
        (lambda: elastic(fb.fedavg(loss), outputs, held_out=0.0), "held_out"),
        (lambda: elastic(fb.fedavg(loss), outputs, sensitivity="fisher"), "sensitivity"),
        (lambda: elastic(fb.fedavg(loss), outputs, batch_size=0), "batch_size"),
        (lambda: elastic(fb.fedsplit(loss), outputs), "train"),
    ],
)
def test_bad_arguments_are_refused(make, word):
    with pytest.raises(ValueError, match=word):
        make()


def test_refused_where_clients_keep_the_update_itself():
    check_structure(elastic(fb.scaffold(loss), outputs), start(), data_shapes(clients()))
    with pytest.raises(StructureError, match="states of server and clients would disagree"):
        check_structure(elastic(fb.feddyn(loss), outputs), start(), data_shapes(clients()))
