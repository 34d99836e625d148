"""Elastic aggregation against NumPy: sensitivities, the scaled step, held-out and train rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import StructureError, check_structure
from fedbraid.costs import cost, data_shapes
from fedbraid.local import ClientData, LocalWork
from fedbraid.transforms import elastic
from fedbraid.transforms.elastic_aggregation import elasticity
from transforms.toy import one_round
from zoo import clients, loss, start

pytestmark = pytest.mark.usefixtures("x64")
HELD = 0.3  # clients of 3, 9, 4, 7, 5 rows hold out their last 1, 3, 2, 3, 2


def outputs(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def held_rows(n):
    return np.arange(n) >= max(1, int((1 - HELD) * n + 1e-6))


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
        held = held_rows(len(own["y"]))
        x, y = own["x"][~held], own["y"][~held]
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
    kept = fb.Split.from_clients([{k: v[~held_rows(len(v))] for k, v in split.client(i).items()} for i in range(5)])
    plain = flat(moved(base, kept)) - flat(start())
    np.testing.assert_allclose(none_sensitive, plain, rtol=1e-9)


def test_labels_of_the_held_out_rows_are_never_read():
    """They are NaN here, and the sensitivities are still those of the held-out rows."""
    split = clients()
    own = [{k: v.copy() for k, v in split.client(i).items()} for i in range(5)]
    for client in own:
        client["y"][held_rows(len(client["y"]))] = np.nan
    alg = elastic(fb.mime(loss, base="sgd", shuffle=False), outputs, held_out=HELD)

    @jax.jit
    def reports(data, key):
        server, state = alg.init(start()), alg.init_client(start())
        return [e.client(e.send(server), state, data, key) for e in alg.exchanges]

    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(reports(ClientData.of(own[1]), jax.random.key(0))))


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
