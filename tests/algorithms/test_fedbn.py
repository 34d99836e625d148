"""FedBN and batch normalisation: statistics stay on the clients, follow every batch, and ignore padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import transforms as tf
from fedbraid.core import StructureError, check_structure, message_shapes
from fedbraid.costs import data_shapes
from fedbraid.data.federated import FederatedData, Split
from fedbraid.models import perceptron
from fedbraid.models.layers import EPSILON, MOMENTUM
from fedbraid.testing import check
from fedbraid.transforms.private_leaves import leaf_names

RATE, STEPS, WIDTH = 0.05, 4, 3
MODEL = perceptron.mlp(d=2, classes=1, hidden=(WIDTH,), score="values", norm="batch")


def examples(sizes=(6, 9, 4), seed=0):
    rng = np.random.default_rng(seed)
    shift = np.arange(len(sizes)) * 2.0
    draw = [rng.normal(size=(n, 2)) * (i + 1) + shift[i] for i, n in enumerate(sizes)]
    return Split.from_clients([{"x": x.astype(np.float32), "y": np.sin(x.sum(1)).astype(np.float32)} for x in draw])


def start():
    return MODEL.init(jax.random.key(0))


class ByHand:
    """The network in NumPy, float64, with the derivatives of batch normalisation written out."""

    def __init__(self, params):
        first, last = (jax.tree.map(lambda leaf: np.asarray(leaf, float), layer) for layer in params)
        self.w, self.b, self.norm = first["w"], first["b"], dict(first["norm"])
        self.v, self.c = last["w"], last["b"]

    def step(self, rows, rate):
        x, y, n = rows["x"].astype(float), rows["y"].astype(float), len(rows["y"])
        z = x @ self.w + self.b
        mean, variance = z.mean(0), z.var(0)
        spread = np.sqrt(variance + EPSILON)
        normal = (z - mean) / spread
        a = normal * self.norm["scale"] + self.norm["shift"]
        h = np.maximum(a, 0)
        out = (h @ self.v + self.c)[:, 0]
        d_out = ((out - y) / n)[:, None]
        d_a = (d_out @ self.v.T) * (a > 0)
        d_normal = d_a * self.norm["scale"]
        d_z = (d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)) / spread
        self.v = self.v - rate * h.T @ d_out
        self.c = self.c - rate * d_out.sum(0)
        self.norm["scale"] = self.norm["scale"] - rate * (d_a * normal).sum(0)
        self.norm["shift"] = self.norm["shift"] - rate * d_a.sum(0)
        self.w, self.b = self.w - rate * x.T @ d_z, self.b - rate * d_z.sum(0)
        self.norm["mean"] = (1 - MOMENTUM) * self.norm["mean"] + MOMENTUM * mean
        self.norm["variance"] = (1 - MOMENTUM) * self.norm["variance"] + MOMENTUM * variance * n / (n - 1)

    def tree(self):
        return [{"w": self.w, "b": self.b, "norm": self.norm}, {"w": self.v, "b": self.c}]


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def own_models(alg, result):
    return jax.vmap(alg.personal, in_axes=(None, 0))(result.server, result.states)


@pytest.mark.parametrize("batch_size", [None, 8])  # 8: every batch has padding, which must not count
def test_fedbn_with_one_client_is_the_centralized_run(batch_size):
    one = Split.from_clients([examples().client(0)])
    alg = fb.fedbn(MODEL.loss, client_lr=RATE, batch_size=batch_size, steps=STEPS)
    result = fb.simulate(alg, start(), one, rounds=3, devices=1)
    network = ByHand(start())
    for _ in range(3 * STEPS):
        network.step(one.client(0), RATE)
    close(jax.tree.map(lambda leaf: leaf[0], own_models(alg, result)), network.tree())


def test_fedbn_averages_all_but_normalisation():
    split = examples()
    alg = fb.fedbn(MODEL.loss, client_lr=RATE, batch_size=None, steps=STEPS)
    result = fb.simulate(alg, start(), split, rounds=2, devices=1)
    networks = [ByHand(start()) for _ in range(3)]
    for _ in range(2):
        for i, network in enumerate(networks):
            for _ in range(STEPS):
                network.step(split.client(i), RATE)
        for part in ("w", "b", "v", "c"):
            mean = np.average([getattr(network, part) for network in networks], axis=0, weights=split.sizes)
            for network in networks:
                setattr(network, part, mean)
    for i, network in enumerate(networks):
        close(jax.tree.map(lambda leaf, i=i: leaf[i], own_models(alg, result)), network.tree())
    assert np.ptp([network.norm["mean"] for network in networks], axis=0).min() > 0.05  # clients do differ


def test_nothing_of_normalisation_is_sent():
    alg = fb.fedbn(MODEL.loss)
    sent = message_shapes(alg, start(), data_shapes(examples()))[0]
    for tree in (sent.down.params, sent.up.pseudograd):
        assert leaf_names(tree) == ["0.b", "0.w", "1.b", "1.w"]


@pytest.mark.parametrize("make", [fb.fedper, fb.lg_fedavg, fb.fedrep, fb.fedbabu, fb.local_only])
def test_statistics_are_private_in_every_method_with_private_leaves(make):
    sent = message_shapes(make(MODEL.loss), start(), data_shapes(examples()))[0]
    assert not any(name.endswith(("mean", "variance")) for name in leaf_names((sent.down, sent.up)))


@pytest.mark.parametrize("inner", [fb.fedadam, fb.scaffold, fb.feddyn, fb.fedprox])
def test_statistics_do_not_pass_through_the_algorithm(inner):
    """With a private leaf, the statistics after a round are those of the client's batches, whatever the server does."""
    one = Split.from_clients([examples().client(0)])
    alg = tf.private(inner(MODEL.loss, client_lr=1e-6, batch_size=None, steps=STEPS), "1.b", MODEL.loss)
    result = fb.simulate(alg, start(), one, rounds=1, devices=1)
    network = ByHand(start())
    for _ in range(STEPS):
        network.step(one.client(0), 1e-6)
    own = jax.tree.map(lambda leaf: leaf[0], own_models(alg, result))
    for name in ("mean", "variance"):
        np.testing.assert_allclose(own[0]["norm"][name], network.norm[name], rtol=1e-4, atol=1e-5)


def test_methods_that_average_everything_are_refused():
    for make in (fb.fedavg, fb.scaffold, fb.mime):
        with pytest.raises(StructureError, match=r"batch normalisation.*fedbn"):
            check_structure(make(MODEL.loss), start(), data_shapes(examples()))
    with pytest.raises(ValueError, match="do not work by local steps"):
        tf.private(fb.fedsplit(MODEL.loss), "1.b", MODEL.loss)
    with pytest.raises(ValueError, match="norm"):
        fb.fedbn(perceptron.mlp(d=2, classes=3).loss)


def test_own_statistics_are_evaluated():
    """Personal models use the client's running statistics; the global model has none."""
    data = FederatedData(examples(), examples(seed=1))
    alg = fb.fedbn(MODEL.loss, client_lr=RATE, batch_size=None, steps=10)
    found = fb.simulate(alg, start(), data, rounds=5, metrics=MODEL.metrics, devices=1)
    own = own_models(alg, found)
    total = 0.0
    for i in range(3):
        rows = data.test.client(i)
        batch = {k: jnp.asarray(v) for k, v in rows.items()} | {"mask": jnp.ones(len(rows["y"]))}
        total += float(MODEL.metrics(jax.tree.map(lambda leaf, i=i: leaf[i], own), batch)["loss"][0].sum())
    pooled = total / data.test.num_examples
    assert found.evaluations["test_personal_loss"][-1] == pytest.approx(pooled, rel=1e-4)


def test_it_obeys_the_laws():
    alg = fb.fedbn(MODEL.loss, client_lr=RATE, batch_size=4, epochs=1, shuffle=False)
    found = check(alg, params=start(), data=examples(), skip=["dtype", "order", "purity", "resume"])
    assert {"structure", "mask", "engine", "plan", "deployed"} <= set(found.held)
