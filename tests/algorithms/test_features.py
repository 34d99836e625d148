"""MOON and FedProto, which compare features, and FedRoD: the papers' recursions in NumPy, and limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address, models
from fedbraid.algorithms._fedproto import closest_class
from fedbraid.data.catalog import load
from fedbraid.experiment.assembly import assemble
from fedbraid.experiment.config import Config, ConfigError
from fedbraid.local import masked_mean
from fedbraid.lowering.operations import dense
from fedbraid.simulation import simulate
from fedbraid.testing import check

pytestmark = pytest.mark.usefixtures("x64")
LR, K = 0.1, 2
WHOLE = {"client_lr": LR, "batch_size": None, "steps": K}
RNG = np.random.default_rng(0)
X = [RNG.normal(size=(n, 3)) for n in (4, 6, 3)]
Y = [np.array(y) for y in ([0, 1, 1, 0], [1, 1, 2, 1, 2, 2], [0, 2, 0])]
DATA = fb.Split.from_clients([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])
# a network of two layers, features tanh(x A) with 2 numbers: A [3, 2], then scores features @ B, B [2, 3]
START = RNG.normal(size=12)


def parts(p):
    return p[:6].reshape(3, 2), p[6:].reshape(2, 3)


def features(params, batch):
    return jnp.tanh(batch["x"] @ parts(params)[0])


def loss(params, batch, key):
    scores = features(params, batch) @ parts(params)[1]
    picked = jnp.take_along_axis(scores, jnp.where(batch["mask"] > 0, batch["y"], 0)[:, None], 1)[:, 0]
    return masked_mean(jax.nn.logsumexp(scores, -1) - picked, batch["mask"])


# --- the same in NumPy, with derivatives by central differences -------------------------------------------------------


def z_of(p, i):
    return np.tanh(X[i] @ parts(p)[0])


def loss_of(p, i):
    scores = z_of(p, i) @ parts(p)[1]
    return np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(scores)), Y[i]])


def slope(function, p, h=1e-6):
    return np.array([(function(p + h * e) - function(p - h * e)) / (2 * h) for e in np.eye(len(p))])


def run(alg, rounds=3, **options):
    return simulate(alg, jnp.asarray(START), DATA, rounds=rounds, devices=1, **{"cohort": 2, **options})


def averaged(x, ups):
    n = np.array([len(X[i]) for i in ups])
    return x - n / n.sum() @ np.array(list(ups.values()))


# --- MOON ------------------------------------------------------------------------------------------------------------


def contrastive(p, x, last, i, tau):
    def similar(a, b):
        return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)

    near, far = (np.exp(similar(z_of(p, i), z_of(q, i)) / tau) for q in (x, last))
    return np.mean(-np.log(near / (near + far)))


def test_moon_is_the_papers_recursion():
    mu, tau, x, last = 2.0, 0.5, START, [START] * 3
    for t in range(3):
        ups = {}
        for i in address.cohort(0, t, 0, 3, 2):
            y = x
            for _ in range(K):
                y = y - LR * slope(lambda p, x=x, i=i: loss_of(p, i) + mu * contrastive(p, x, last[i], i, tau), y)
            ups[i], last[i] = x - y, y
        x = averaged(x, ups)
    result = run(fb.moon(loss, features, mu=mu, tau=tau, **WHOLE))
    np.testing.assert_allclose(result.params, x, 1e-6)
    np.testing.assert_allclose(result.states.last, last, 1e-6)
    assert np.abs(result.params - run(fb.fedavg(loss, **WHOLE)).params).max() > 1e-4


def test_moon_without_contrast_is_fedavg():
    local = {"client_lr": LR, "batch_size": 2, "epochs": 2}
    np.testing.assert_allclose(
        run(fb.moon(loss, features, mu=0.0, **local)).params, run(fb.fedavg(loss, **local)).params, 1e-12
    )


def test_features_that_are_zero_have_no_similarity():
    flat = run(fb.moon(loss, lambda params, batch: 0 * features(params, batch), **WHOLE))
    np.testing.assert_allclose(flat.params, run(fb.fedavg(loss, **WHOLE)).params, 1e-12)


# --- FedProto --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_fedproto_is_the_papers_recursion(weighting):
    lam, own, prototypes, known = 1.5, [START] * 3, np.zeros((3, 2)), np.zeros(3, bool)
    for t in range(3):
        sums, counts = np.zeros((3, 2)), np.zeros(3)
        for i in address.cohort(0, t, 0, 3, 2):

            def pulled(p, i=i, prototypes=prototypes, known=known):
                squared = ((z_of(p, i) - prototypes[Y[i]]) ** 2).mean(1)
                return loss_of(p, i) + lam * np.mean(squared * known[Y[i]])

            for _ in range(K):
                own[i] = own[i] - LR * slope(pulled, own[i])
            for j in set(Y[i]):
                mine = z_of(own[i], i)[Y[i] == j]
                weight = len(mine) if weighting == "examples" else 1
                sums[j], counts[j] = sums[j] + weight * mine.mean(0), counts[j] + weight
        heard = counts > 0
        prototypes = np.where(heard[:, None], sums / np.maximum(counts, 1)[:, None], prototypes)
        known = known | heard
    alg = fb.fedproto(loss, features, 3, 2, lam=lam, weighting=weighting, **WHOLE)
    result = run(alg)
    np.testing.assert_allclose(result.server.prototypes, prototypes, 1e-6)
    np.testing.assert_array_equal(result.server.known > 0, known)
    np.testing.assert_allclose(result.states.params, own, 1e-6)
    np.testing.assert_allclose(alg.personal(result.server, jax.tree.map(lambda s: s[1], result.states)), own[1], 1e-6)
    nearest = ((z_of(own[0], 0)[:, None] - prototypes) ** 2).sum(-1).argmin(1)
    np.testing.assert_array_equal(closest_class(result.server, features(own[0], {"x": X[0]})), nearest)


def test_fedproto_without_pull_is_local_training_and_sends_prototypes_only():
    own = [START] * 3
    for i, _ in enumerate(X):
        for _ in range(2 * K):
            own[i] = own[i] - LR * slope(lambda p, i=i: loss_of(p, i), own[i])
    alg = fb.fedproto(loss, features, 3, 2, lam=0.0, **WHOLE)
    result = run(alg, rounds=2, cohort=3)
    np.testing.assert_allclose(result.states.params, own, 1e-6)
    np.testing.assert_array_equal(result.params, START)
    [exchange] = fb.cost(alg, jnp.asarray(START), DATA).exchanges
    assert (exchange.down, exchange.up) == ((6 + 3) * 8, (6 + 3) * 8)


# --- the laws, and where features come from --------------------------------------------------------------------------


def test_the_laws_of_all_algorithms():
    moon = fb.moon(loss, features, mu=2.0, batch_size=2, client_opt="adam", client_opt_state="kept")
    proto = fb.fedproto(loss, features, 3, 2, batch_size=2)
    for alg in (moon, proto):
        checked = check(alg, params=jnp.asarray(START), data=DATA)
        assert {"engine", "plan", "order", "resume", "deployed", "weight"} <= set(checked.held)


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: fb.moon(loss, features, mu=-1.0), "mu"),
        (lambda: fb.moon(loss, features, tau=0.0), "tau"),
        (lambda: fb.moon(loss, None), "features"),  # type: ignore[arg-type]
        (lambda: fb.fedproto(loss, features, 3, 2, lam=-1.0), "lam"),
        (lambda: fb.fedproto(loss, features, 0, 2), "num_classes"),
    ],
)
def test_refusals(call, word):
    with pytest.raises(ValueError, match=word):
        call()


@pytest.mark.parametrize(
    ("model", "shape", "last"),
    [
        (models.mlp(5, 3, hidden=(4,)), (5,), lambda params: params[-1]),
        (models.emnist_cnn(3, image=(8, 8, 1)), (8, 8, 1), lambda params: params["dense2"]),
        (models.softmax_regression(5, 3), (5,), lambda params: params),
        (models.resnet18_gn(3, image=(8, 8, 3), width=4, groups=2), (8, 8, 3), lambda params: params["dense"]),
        (models.char_lstm(7, layers=1, hidden=4, embed=3), (6,), lambda params: params["dense"]),
    ],
)
def test_the_last_layer_on_the_features_is_the_prediction(model, shape, last):
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.init(jax.random.key(0)))
    x = jnp.asarray(np.random.default_rng(1).integers(0, 5, (2, *shape)))
    x = x if len(shape) == 1 and "embedding" in params else x.astype(jnp.float32)
    both = jax.jit(lambda params, x: (dense(last(params), model.features(params, x)), model.predict(params, x)))
    found, expected = both(params, x)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert jnp.ptp(found) > 0


@pytest.mark.parametrize("name", ["moon", "fedproto", "fedrod"])
def test_a_configuration_gives_them_the_features_of_its_model(name):
    config = Config(cohort="all", algorithm={"name": name}, model={"name": "mlp", "hidden": [4]})
    made = assemble(config, load("digits", clients=3))
    sent = made.algorithm.exchanges[0].send(made.algorithm.init(made.params))
    assert name != "fedproto" or sent.params.shape == (10, 4)


def test_a_model_without_features_is_refused(monkeypatch):
    bare = models.mlp(64, 10)._replace(features=None)
    monkeypatch.setattr("fedbraid.experiment.assembly.build_model", lambda *_, **__: bare)
    with pytest.raises(ConfigError, match="does not say what they are"):
        assemble(Config(cohort="all", algorithm={"name": "moon"}), load("digits", clients=3))


# --- FedRoD: two heads on the same features --------------------------------------------------------------------------


def tree(p):
    return {"body": jnp.asarray(p[:6].reshape(3, 2)), "head": jnp.asarray(p[6:].reshape(2, 3))}


def vector(params):
    return np.concatenate([np.asarray(params[name]).reshape(*params[name].shape[:-2], -1) for name in params], -1)


def as_vector(params):
    return jnp.concatenate([params["body"].reshape(-1), params["head"].reshape(-1)])


def tree_loss(params, batch, key):
    return loss(as_vector(params), batch, key)


def tree_scores(params, batch):
    return jnp.tanh(batch["x"] @ params["body"]) @ params["head"]


ROD = {"head": "head", **WHOLE}


def test_fedrod_is_the_papers_recursion():
    counts = [np.bincount(y, minlength=3) for y in Y]

    def balanced(p, i):
        scores = z_of(p, i) @ parts(p)[1]
        likely = np.exp(scores) * counts[i]
        return np.mean(-np.log(likely[np.arange(len(scores)), Y[i]] / likely.sum(1)))

    x, own = START, np.zeros((3, 6))
    for t in range(3):
        ups = {}
        for i in address.cohort(0, t, 0, 3, 2):
            y = x
            for _ in range(K):
                ahead = y - LR * slope(lambda p, i=i: balanced(p, i), y)
                both = lambda h, y=y, i=i: loss_of(np.concatenate([y[:6], y[6:] + h]), i)  # noqa: E731
                y, own[i] = ahead, own[i] - 0.2 * slope(both, own[i])
            ups[i] = x - y
        x = averaged(x, ups)
    alg = fb.fedrod(tree_loss, tree_scores, 3, head_lr=0.2, **ROD)
    result = simulate(alg, tree(START), DATA, rounds=3, cohort=2, devices=1)
    np.testing.assert_allclose(vector(result.params), x, 1e-6)
    np.testing.assert_allclose(result.states["head"].reshape(3, 6), own, 1e-5, 1e-9)
    mine = alg.personal(result.server, {"body": None, "head": result.states["head"][2]})
    np.testing.assert_allclose(vector(mine), x + np.r_[np.zeros(6), own[2]], 1e-6)


def test_with_the_same_classes_everywhere_the_global_part_of_fedrod_is_fedavg():
    """Equal numbers of every class add a constant to all scores. A client's head starts as that of the global model."""
    data = fb.Split.from_clients([{"x": x, "y": np.array([0, 1, 2])} for x in (X[0][:3], X[1][:3])])
    alg = fb.fedrod(tree_loss, tree_scores, 3, **ROD)
    result, plain = (simulate(a, tree(START), data, rounds=3, devices=1) for a in (alg, fb.fedavg(tree_loss, **WHOLE)))
    np.testing.assert_allclose(vector(result.params), vector(plain.params), 1e-9)
    first = alg.personal(alg.init(tree(START)), alg.init_client(tree(START)))
    np.testing.assert_array_equal(vector(first), START)


def test_fedrod_obeys_the_laws_of_all_algorithms():
    checked = check(fb.fedrod(tree_loss, tree_scores, 3, head="head", batch_size=2), params=tree(START), data=DATA)
    assert {"engine", "plan", "order", "resume", "deployed", "weight"} <= set(checked.held)
