"""FedPer, LG-FedAvg, FedRep, FedBABU and local training against independent NumPy computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid.core import StructureError, check_structure, message_shapes
from fedbraid.costs import data_shapes
from fedbraid.models import perceptron
from fedbraid.testing import check
from fedbraid.testing.problem import clients, loss, start

RATE = 0.05
pytestmark = pytest.mark.usefixtures("x64", "strict")


def run(alg, *, rounds=3, cohort=2, split=None):
    split = clients() if split is None else split
    result = fb.simulate(alg, start(), split, rounds=rounds, cohort=cohort, seed=7, devices=1)
    own = jax.vmap(alg.personal, in_axes=(None, 0))(result.server, result.states)
    return result, jax.tree.map(np.asarray, own)


def cohorts(rounds=3, cohort=2):
    return [address.cohort(7, r, 0, clients().num_clients, cohort).tolist() for r in range(rounds)]


class Model:
    """Least squares in NumPy: w is the body, b the head."""

    def __init__(self, w, b):
        self.w, self.b = np.array(w, float), float(b)

    def gradient(self, rows):
        residual = rows["x"] @ self.w + self.b - rows["y"]
        return rows["x"].T @ residual / len(residual), residual.mean()

    def step(self, rows, body=0.0, head=0.0):
        g, h = self.gradient(rows)
        self.w, self.b = self.w - body * g, self.b - head * h


def average(models, sizes):
    return np.average(models, axis=0, weights=sizes)


def first():
    return np.asarray(start()["w"]), np.full(clients().num_clients, float(start()["b"]))


def test_fedper_without_private_leaves_is_fedavg():
    options = {"client_lr": RATE, "batch_size": 2, "epochs": 1}
    plain, own = fb.fedavg(loss, **options), fb.fedper(loss, head=(), **options)
    a, b = (fb.simulate(alg, start(), clients(), rounds=2, cohort=3, devices=1) for alg in (plain, own))
    pairs = [jax.tree.leaves((one.params, one.server, one.states)) for one in (a, b)]
    for x, y in zip(*pairs, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_fedper_and_lg_fedavg_are_each_others_mirror():
    """FedPer keeps the head, LG-FedAvg everything else: with head = w one is the other with head = b."""
    options = {"client_lr": RATE, "batch_size": None, "steps": 3}
    w, b = first()
    for cohort in cohorts():
        ends, sizes = [], []
        for i in cohort:
            model, rows = Model(w, b[i]), clients().client(i)
            for _ in range(3):
                model.step(rows, RATE, RATE)
            ends.append(model.w)
            b[i] = model.b
            sizes.append(len(rows["y"]))
        w = average(ends, sizes)
    for alg in (fb.fedper(loss, head="b", **options), fb.lg_fedavg(loss, head="w", **options)):
        result, own = run(alg)
        np.testing.assert_allclose(result.params["w"], w, rtol=1e-10)
        np.testing.assert_allclose(own["b"], b, rtol=1e-10)
        np.testing.assert_array_equal(result.params["b"], start()["b"])


def test_fedrep_trains_the_head_first_then_the_body():
    """Head steps at the server's body, then body steps at the new head; only the body is averaged."""
    head_rate, head_steps, steps = 0.2, 4, 2
    alg = fb.fedrep(
        loss, head="b", client_lr=RATE, head_lr=head_rate, head_steps=head_steps, steps=steps, batch_size=None
    )
    result, own = run(alg)
    w, b = first()
    for cohort in cohorts():
        ends, sizes = [], []
        for i in cohort:
            model, rows = Model(w, b[i]), clients().client(i)
            for _ in range(head_steps):
                model.step(rows, head=head_rate)
            for _ in range(steps):
                model.step(rows, body=RATE)
            ends.append(model.w)
            b[i] = model.b
            sizes.append(len(rows["y"]))
        w = average(ends, sizes)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-10)
    np.testing.assert_allclose(own["b"], b, rtol=1e-10)


def test_fedrep_counts_epochs_of_each_client():
    """Batches of 3 rows in their order: a client with n rows takes ceil(n / 3) steps an epoch."""
    alg = fb.fedrep(loss, head="b", client_lr=RATE, head_epochs=2, epochs=1, batch_size=3, shuffle=False)
    _, own = run(alg, rounds=1, cohort=5)
    w, b = first()
    for i in range(5):
        model, rows = Model(w, b[i]), clients().client(i)
        batches = [{k: v[at : at + 3] for k, v in rows.items()} for at in range(0, len(rows["y"]), 3)]
        for batch in 2 * batches:
            model.step(batch, head=RATE)
        np.testing.assert_allclose(own["b"][i], model.b, rtol=1e-10)
        assert alg.exchanges[0].client.count(len(rows["y"])) == 3 * len(batches)


def test_fedbabu_trains_the_body_and_tunes_the_head():
    """The head of training never changes; a client's own head is tuned at the body that it last received."""
    alg = fb.fedbabu(loss, head="b", client_lr=RATE, steps=3, batch_size=None, tune_lr=0.2, tune_epochs=4)
    result, own = run(alg)
    w, tuned = first()
    for cohort in cohorts():
        ends, sizes = [], []
        for i in cohort:
            rows = clients().client(i)
            model, personal = Model(w, start()["b"]), Model(w, start()["b"])
            for _ in range(3):
                model.step(rows, body=RATE)
            for _ in range(4):
                personal.step(rows, head=0.2)
            ends.append(model.w)
            tuned[i] = personal.b
            sizes.append(len(rows["y"]))
        w = average(ends, sizes)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-10)
    np.testing.assert_array_equal(result.params["b"], start()["b"])
    np.testing.assert_allclose(own["b"], tuned, rtol=1e-10)
    np.testing.assert_allclose(own["w"], np.tile(w, (5, 1)), rtol=1e-10)
    untuned = fb.fedbabu(loss, head="b", client_lr=RATE, steps=3, batch_size=None, tune_epochs=0)
    np.testing.assert_array_equal(run(untuned)[1]["b"], np.full(5, float(start()["b"])))


def test_local_only_is_each_clients_own_descent():
    alg = fb.local_only(loss, client_lr=RATE, batch_size=None, steps=3)
    result, own = run(alg)
    w, b = first()
    w = np.tile(w, (5, 1))
    for cohort in cohorts():
        for i in cohort:
            model, rows = Model(w[i], b[i]), clients().client(i)
            for _ in range(3):
                model.step(rows, RATE, RATE)
            w[i], b[i] = model.w, model.b
    np.testing.assert_allclose(own["w"], w, rtol=1e-10)
    np.testing.assert_allclose(own["b"], b, rtol=1e-10)
    np.testing.assert_array_equal(result.params["w"], start()["w"])
    sent = message_shapes(alg, start(), data_shapes(clients()))[0]
    assert not jax.tree.leaves((sent.down, sent.up))
    assert fb.cost(alg, start(), clients()).multiple == 0


def test_local_only_obeys_the_laws():
    """All but 'sign': the global model of clients that send nothing does not move."""
    found = check(fb.local_only, options={"client_lr": RATE}, skip=["sign", "order", "purity", "resume"])
    assert {"structure", "mask", "engine", "plan", "deployed"} <= set(found.held)


def test_the_head_of_a_model_is_known():
    model = perceptron.mlp(d=4, classes=3, hidden=(5,))
    for make, private in ((fb.fedper, True), (fb.lg_fedavg, False), (fb.fedrep, True), (fb.fedbabu, True)):
        with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
            data = data_shapes({"x": np.zeros((2, 4), np.float32), "y": np.zeros(2, np.int32)})
            sent = message_shapes(make(model.loss), model.init(jax.random.key(0)), data)[0].down.params
        assert (sent[1]["w"] is None) == private
        assert (sent[0]["w"] is None) != private


def test_a_model_without_a_known_head_needs_the_names():
    for make in (fb.fedper, fb.lg_fedavg, fb.fedrep, fb.fedbabu):
        with pytest.raises(ValueError, match="head"):
            make(lambda params, batch, key: jnp.zeros(()))
        with pytest.raises(StructureError, match="no leaf matches 'tail'; the model's leaves are b, w"):
            check_structure(make(loss, head="tail"), start(), data_shapes(clients()))
        with pytest.raises(StructureError, match="all leaves"):
            check_structure(make(loss, head=("b", "w")), start(), data_shapes(clients()))
