"""PFNM against an independent NumPy version of the paper's equations, and the laws of matching."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

import fedbraid as fb
from fedbraid import models
from fedbraid.algorithms._pfnm import Matching, match, match_networks, narrow
from fedbraid.data.catalog import load
from fedbraid.testing import check

PLAIN = Matching(1.0, 10.0, 1.0, 3)
VAGUE = PLAIN._replace(sigma0_squared=1e12)  # the prior does not shrink the mean


@functools.partial(jax.jit, static_argnums=3)
def matched(vectors, real, constants, sweeps):
    return match(vectors, real, jnp.ones(len(real), bool), Matching(*constants, sweeps))


def places(vectors, real, c):
    """The library's matching of one layer, compiled once per shape."""
    return np.asarray(matched(jnp.asarray(vectors), jnp.asarray(real), c[:3], c.sweeps))


@functools.partial(jax.jit, static_argnums=3)
def _network(networks, present, constants, sweeps):
    return match_networks(networks, present, Matching(*constants, sweeps))


def joined(networks, c, present=None):
    """The library's global network of a list of networks, and its widths."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *networks)
    present = jnp.ones(len(networks), bool) if present is None else jnp.asarray(present)
    found, widths = _network(stacked, present, c[:3], c.sweeps)
    return found, [int(w) for w in widths]


# --- the paper, in NumPy: lists of global neurons that grow and shrink ----------------------------------------------


class Global:
    """A global neuron: its members, (client, neuron) -> vector."""

    def __init__(self, members=None):
        self.members = members or {}


def gaussian(members, c):
    """2 log of the density of the members at the best theta, without constants: the definition, not its closed form."""
    if not members:
        return 0.0
    v = np.array(list(members.values()))
    theta = v.sum(0) / c.sigma_squared / (1 / c.sigma0_squared + len(v) / c.sigma_squared)
    return -((v - theta) ** 2).sum() / c.sigma_squared - (theta**2).sum() / c.sigma0_squared


def conditional(groups, j, clients, c):
    """2 log P(B^j, theta | other B, v): normal densities, and the Indian buffet process with client j as the last."""
    value, new = 0.0, 0
    for group in groups:
        m = sum(client != j for client, _ in group.members)
        has = any(client == j for client, _ in group.members)
        value += gaussian(group.members, c)
        if m == 0:
            new += has
        else:
            value += 2 * math.log((m if has else clients - m) / clients)
    rate = c.gamma0 / clients
    return value + 2 * (new * math.log(rate) - rate - math.lgamma(new + 1))


def visit(groups, j, neurons, clients, cap, c):
    """Remove client j and assign its neurons again, by Proposition 2 and SciPy."""
    for group in groups:
        group.members = {key: v for key, v in group.members.items() if key[0] != j}
    groups[:] = [group for group in groups if group.members]
    fresh = min(len(neurons), cap - len(groups))
    gain = np.zeros((len(neurons), len(groups) + fresh))
    for l, v in enumerate(neurons):
        for i, group in enumerate(groups):
            m = len(group.members)
            s = sum(group.members.values()) / c.sigma_squared
            p = 1 / c.sigma0_squared + m / c.sigma_squared
            both = ((s + v / c.sigma_squared) ** 2).sum() / (p + 1 / c.sigma_squared)
            gain[l, i] = both - (s**2).sum() / p + 2 * math.log(m / (clients - m))
        for k in range(1, fresh + 1):
            alone = ((v / c.sigma_squared) ** 2).sum() / (1 / c.sigma0_squared + 1 / c.sigma_squared)
            gain[l, len(groups) + k - 1] = alone + 2 * math.log(c.gamma0 / clients) - 2 * math.log(k)
    groups += [Global() for _ in range(fresh)]
    for l, i in zip(*linear_sum_assignment(-gain), strict=True):
        groups[i].members[j, l] = neurons[l]
    groups[:] = [group for group in groups if group.members]


def joint(groups, clients, c):
    """2 log P(B, theta | v) up to a constant: normal densities, and the Beta-Bernoulli process of marked atoms."""
    value = 0.0
    for group in groups:
        m = len(group.members)
        value += gaussian(group.members, c) + 2 * (math.log(c.gamma0) + math.lgamma(clients - m + 1) + math.lgamma(m))
        value -= 2 * math.lgamma(clients + 1)
    return value


def by_hand(vectors, cap, c):
    """The global neurons after all visits; the gains in the conditional posterior of the sweeps, and visits undone.

    The library's one addition to the paper: a visit of a sweep that decreases the joint posterior is undone.
    """
    groups, gains, undone = [], [], 0
    for sweep in range(1 + c.sweeps):
        for j, neurons in enumerate(vectors):
            kept = [dict(group.members) for group in groups]
            before, whole = conditional(groups, j, len(vectors), c), joint(groups, len(vectors), c)
            visit(groups, j, neurons, len(vectors), cap, c)
            if sweep:
                gains.append(conditional(groups, j, len(vectors), c) - before)
                if joint(groups, len(vectors), c) < whole - 1e-9:
                    groups, undone = [Global(members) for members in kept], undone + 1
    return groups, gains, undone


def partition(groups):
    return {frozenset(group.members) for group in groups}


def partition_of(place, real):
    groups = {}
    for j, l in zip(*np.nonzero(real), strict=True):
        groups.setdefault(int(place[j, l]), set()).add((int(j), int(l)))
    return {frozenset(group) for group in groups.values()}


def noisy_copies(seed, clients, widths, cap, noise=0.4, size=6):
    """Neurons of clients that have noisy, permuted subsets of the same global ones, padded to ``cap`` rows."""
    rng = np.random.default_rng(seed)
    atoms = rng.normal(size=(max(widths) + 2, size)) * 1.5
    rows = [rng.permutation(len(atoms))[: widths[j % len(widths)]] for j in range(clients)]
    lists = [atoms[r] + noise * rng.normal(size=(len(r), size)) for r in rows]
    padded, real = np.zeros((clients, cap, size)), np.zeros((clients, cap), bool)
    for j, own in enumerate(lists):
        padded[j, : len(own)], real[j, : len(own)] = own, True
    return lists, padded, real


@pytest.mark.usefixtures("x64", "strict")
@pytest.mark.parametrize(
    ("seed", "cap", "noise", "constants"),
    [
        (0, 14, 0.4, PLAIN),
        (1, 14, 0.4, Matching(0.3, 4.0, 2.0, 2)),
        (2, 8, 0.4, Matching(0.05, 10.0, 1.0, 3)),  # few matches: the limit on the width binds
        (3, 30, 0.4, Matching(0.2, 1.0, 5.0, 0)),
        (4, 14, 1.0, Matching(0.5, 5.0, 1.0, 3)),
        (5, 14, 1.0, Matching(0.5, 5.0, 20.0, 3)),
    ],
)
def test_it_is_the_paper(seed, cap, noise, constants):
    """The same neurons are matched, by equations written again with lists, SciPy and explicit densities."""
    lists, padded, real = noisy_copies(seed, 4, (5, 7), cap, noise)
    groups, gains, undone = by_hand(lists, cap, constants)
    place = places(padded, real, constants)
    assert np.array_equal(np.sort(place, 1), np.broadcast_to(np.arange(cap), (4, cap)))
    assert partition_of(place, real) == partition(groups)
    assert max(len(group.members) for group in groups) > 1  # something was matched
    # a visit never decreases the posterior of the client's assignment, given those of the others
    assert all(gain > -1e-9 for gain in gains)
    assert (undone > 0) == (seed == 1)
    assert any(gain > 1e-3 for gain in gains) == (seed in (1, 4, 5))  # sweeps change something


@pytest.mark.usefixtures("x64")
def test_the_posterior_never_decreases_over_sweeps():
    raised = 0
    for seed in range(6):
        lists, padded, real = noisy_copies(seed, 4, (5, 7), 12, noise=1.0)
        found = []
        for sweeps in range(4):
            c = Matching(0.5, 5.0, 1.0, sweeps)
            place = places(padded, real, c)
            groups = {}
            for j, l in zip(*np.nonzero(real), strict=True):
                groups.setdefault(place[j, l], Global()).members[int(j), int(l)] = lists[j][l]
            found.append(joint(groups.values(), 4, c))
        assert (np.diff(found) > -1e-9).all()
        raised += (np.diff(found) > 1e-3).sum()
    assert raised > 2


@pytest.mark.usefixtures("x64")
def test_a_visit_finds_the_most_probable_assignment():
    """Of all placements of a client's three neurons at two known or three new ones."""
    c = Matching(0.5, 5.0, 2.0, 0)
    rng = np.random.default_rng(4)
    for _ in range(5):
        first, second = rng.normal(size=(2, 4)), rng.normal(size=(3, 4))
        best = -math.inf
        for tried in itertools.permutations(range(5), 3):
            groups = [Global() for _ in range(5)]
            for l, v in enumerate(first):
                groups[l].members[0, l] = v
            for l, i in enumerate(tried):
                groups[i].members[1, l] = second[l]
            best = max(best, conditional(groups, 1, 2, c))
        padded = np.zeros((2, 5, 4))
        padded[0, :2], padded[1, :3] = first, second
        real = np.any(padded != 0, 2)
        place = places(padded, real, c)
        groups = [Global() for _ in range(5)]
        for j, l in zip(*np.nonzero(real), strict=True):
            groups[place[j, l]].members[int(j), int(l)] = padded[j, l]
        np.testing.assert_allclose(conditional(groups, 1, 2, c), best, rtol=1e-9)


# --- networks --------------------------------------------------------------------------------------------------------

HIDDEN = [(7,), (6, 5), (5, 6, 4)]


def network(hidden, seed=0, limit=12):
    """A random network with biases, padded with neurons of zeros to ``limit`` per hidden layer."""
    rng = np.random.default_rng(seed)
    wide = models.mlp(4, classes=3, hidden=(limit,) * len(hidden)).init(jax.random.key(0))
    drawn = [{name: jnp.asarray(rng.normal(size=leaf.shape)) for name, leaf in layer.items()} for layer in wide]
    return narrow(drawn, hidden)


def permuted(layers, hidden, seed):
    """The same function with its neurons in another order."""
    rng = np.random.default_rng(seed)
    layers = [dict(layer) for layer in layers]
    for c, width in enumerate(hidden):
        order = np.concatenate([rng.permutation(width), np.arange(width, layers[c]["b"].size)])
        layers[c] = {"w": layers[c]["w"][:, order], "b": layers[c]["b"][order]}
        layers[c + 1] = layers[c + 1] | {"w": layers[c + 1]["w"][order]}
    return layers


def outputs(layers, x):
    for layer in layers[:-1]:
        x = np.maximum(x @ np.asarray(layer["w"]) + np.asarray(layer["b"]), 0)
    return x @ np.asarray(layers[-1]["w"]) + np.asarray(layers[-1]["b"])


X = np.random.default_rng(9).normal(size=(20, 4))


@pytest.mark.usefixtures("x64", "strict")
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_permuted_copies_are_matched_exactly(hidden):
    one = network(hidden)
    copies = [permuted(one, hidden, seed) for seed in range(4)]
    assert np.abs(np.asarray(copies[0][0]["w"] - copies[1][0]["w"])).max() > 0.1
    found, widths = joined(copies, VAGUE)
    assert widths == list(hidden)
    np.testing.assert_allclose(outputs(found, X), outputs(one, X), rtol=1e-9, atol=1e-9)
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *copies)
    assert np.abs(outputs(mean, X) - outputs(one, X)).max() > 0.1  # the plain mean is another function


@pytest.mark.usefixtures("x64", "strict")
@pytest.mark.parametrize("hidden", HIDDEN, ids=str)
def test_identical_clients_give_the_network_back(hidden):
    """Neuron by neuron; a prior shrinks every weight by J / (J + sigma^2 / sigma0^2). Absent clients change nothing."""
    one, other = network(hidden), network((12,) * len(hidden), seed=5)
    for constants, factor in ((VAGUE, 1.0), (PLAIN, 3 / 3.1)):
        found, widths = joined([one, other, one, one], constants, [True, False, True, True])
        assert widths == list(hidden)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a, factor * b, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_neurons_of_one_client_only_become_new_ones():
    """Two clients with different networks: the global one has the neurons of both, unless its width is limited."""
    far = Matching(0.01, 1e12, 1.0, 3)
    for limit, width in ((12, 10), (8, 8)):
        pair = [network((5,), seed, limit) for seed in (1, 2)]
        found, widths = joined(pair, far)
        assert widths == [width]
        unused = np.all(np.asarray(found[0]["w"]) == 0, 0)
        assert unused.sum() == limit - width
        assert (np.asarray(found[1]["w"])[unused] == 0).all()
        assert (np.asarray(found[0]["b"])[unused] == 0).all()


# --- the algorithm ---------------------------------------------------------------------------------------------------


def small(clients=4, seed=0):
    rng = np.random.default_rng(seed)
    sizes = [5, 9, 6, 7, 8][:clients]
    return fb.Split.from_clients([{"x": rng.normal(size=(n, 4)), "y": rng.integers(0, 3, n)} for n in sizes])


def test_the_laws_of_all_algorithms():
    """Engine, plan, order of clients, purity, resume, deployed: on a perceptron, which is what it is for."""
    model = models.mlp(4, classes=3, hidden=(6,))
    alg = fb.pfnm(model.loss, width=4, start="common", batch_size=None, steps=2)
    checked = check(alg, params=model.init(jax.random.key(1)), data=small())
    assert {"engine", "plan", "order", "resume", "deployed", "weight"} <= set(checked.held)


def test_a_sweep_over_its_rates_is_a_vmap():
    model = models.mlp(4, classes=3, hidden=(6,))
    params, data = model.init(jax.random.key(1)), small()
    first = {"client_lr": 0.1, "sigma_squared": 0.1, "sigma0_squared": 10.0, "gamma0": 1.0}
    second = {"client_lr": 0.3, "sigma_squared": 1.0, "sigma0_squared": 1.0, "gamma0": 20.0}

    def run(rates):
        return fb.simulate(fb.pfnm(model.loss, width=4, epochs=2, **rates), params, data, rounds=1, devices=1).params

    alone = [run(first), run(second)]
    together = jax.vmap(run)({name: jnp.array([first[name], second[name]]) for name in first})
    for i, one in enumerate(alone):
        for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=2e-4, atol=2e-5)


def test_unused_neurons_stay_zero_in_training():
    """A client's network has exactly ``width`` neurons that are not zero, from both starts and with any optimizer."""
    model = models.mlp(4, classes=3, hidden=(6, 5))
    params = model.init(jax.random.key(1))
    for start, opt in (("own", "sgd"), ("common", "adamw")):
        alg = fb.pfnm(model.loss, width=(4, 2), start=start, epochs=3, client_opt=opt)
        exchange, data = alg.exchanges[0], fb.ClientData.of(small().client(1))
        down = exchange.send(alg.init(params))
        own = [jax.jit(exchange.client)(down, (), data, jax.random.key(k)).up.pseudograd for k in (0, 1)]
        nets = [jax.tree.map(lambda p: -np.asarray(p), moved) for moved in own]
        for net in nets:
            assert [np.any(layer["w"] != 0, 0).sum() for layer in net[:-1]] == [4, 2]
            assert [np.any(layer["w"] != 0, 1).sum() for layer in net[1:]] == [4, 2]
        apart = np.abs(nets[0][0]["w"] - nets[1][0]["w"]).max()
        assert (apart > 0.3) == (start == "own")


def test_on_digits_matching_beats_averaging_of_own_networks():
    data = load("digits", clients=5, alpha=1.0)
    model = models.mlp(64, classes=10, hidden=(48,))
    alg = fb.pfnm(model.loss, width=24, epochs=10, client_lr=0.3)

    def average(server, aggregate, key):
        moved = jax.tree.map(jnp.subtract, server.params, aggregate.up.pseudograd)
        return server._replace(params=moved, matched=jnp.array(True))

    plain = alg._replace(exchanges=(alg.exchanges[0]._replace(reducer=fb.MEAN, receive=average),))
    scores = []
    for one in (alg, plain):
        found = fb.simulate(one, model.init(jax.random.key(0)), data, rounds=1, metrics=model.metrics, devices=1)
        scores.append(float(found.evaluations["test_accuracy"][-1]))
    assert scores[0] > 0.75
    assert scores[0] > scores[1] + 0.15


COMPARISON = """
rounds = 1
cohort = "all"
[data]
name = "digits"
clients = 4
[model]
name = "mlp"
hidden = [12]
[compare]
seeds = 1
baselines = []
drift = 0
[[methods]]
label = "PFNM"
name = "pfnm"
width = 6
over = { sigma_squared = [0.1, 1.0] }
[[methods]]
label = "FedAvg"
name = "fedavg"
"""


def test_compared_and_reported(tmp_path):
    (tmp_path / "compare.toml").write_text(COMPARISON)
    compared = fb.compare(tmp_path / "compare.toml", tmp_path / "compared")
    assert set(compared.scores) == {"PFNM", "FedAvg"}
    assert all(score is not None for score in compared.scores.values())
    page = compared.report().page
    assert "PFNM" in page
    assert "Yurochkin" in page


def test_another_model_in_a_run_is_one_clear_error(tmp_path):
    config = {"rounds": 1, "algorithm": {"name": "pfnm"}, "model": {"name": "softmax_regression"}}
    with pytest.raises(ValueError, match="pfnm matches the neurons of multi-layer perceptrons"):
        fb.run(config, tmp_path / "run", progress=False)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        (models.softmax_regression(4, 3), "mlp"),
        (models.mlp(4, classes=3, hidden=()), "hidden layer"),
        (models.mlp(4, classes=3, hidden=(3,)), "width=4"),
        (models.emnist_cnn(3, image=(8, 8, 1)), "mlp"),
    ],
)
def test_another_model_is_refused(model, word):
    params = model.init(jax.random.key(0))
    with pytest.raises(fb.StructureError, match=word):
        fb.simulate(fb.pfnm(model.loss, width=4), params, small(), rounds=1, devices=1)


@pytest.mark.parametrize(
    "options",
    [
        {"client_lr": 0},
        {"start": "server"},
        {"sigma_squared": 0},
        {"sigma0_squared": -1},
        {"gamma0": 0},
        {"sweeps": -1},
        {"width": 0},
        {"width": (3, 0.5)},
    ],
    ids=str,
)
def test_refusals(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        fb.pfnm(lambda params, batch, key: 0.0, **options)
