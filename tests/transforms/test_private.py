"""Private leaves: they are in no message, and a client updates them as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid import address
from fedbraid import transforms as tf
from fedbraid.core import StructureError, check_structure, message_shapes
from fedbraid.costs import data_shapes
from fedbraid.data.federated import Split
from fedbraid.local import masked_mean
from fedbraid.testing.problem import SQUARES, clients, loss, start
from fedbraid.transforms.private_leaves import leaf_names, matching
from zoo import ALGORITHMS

# those without own models; a method that already has private leaves is not made private again
PLAIN = [name for name, row in ALGORITHMS.items() if row.make().personal is None]
REFUSED = {"fedexp": "put private inside", "mimelite": "asks other clients than 'gradient'"}


def _odd_loss(params, batch, key):
    residual = batch["x"] @ params["w"] + jnp.sum(params["head"]["v"]) - batch["y"]
    return masked_mean(0.5 * residual**2, batch["mask"])


def _odd_start():
    return {"w": jnp.array([0.3, -0.2, 0.1]), "head": {"v": jnp.ones((7, 11))}}


ODD = SQUARES._replace(loss=_odd_loss, start=_odd_start)


def _shapes(tree):
    return [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", PLAIN)
def test_private_leaves_are_in_no_message(name):
    """Not in the params, not in the aux, not flattened into something else."""
    alg = ALGORITHMS[name].make(ODD)
    split = clients()
    plain = message_shapes(alg, _odd_start(), data_shapes(split))
    assert any((7, 11) in _shapes((one.down, one.up)) for one in plain)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            tf.private(alg, "head")
        return
    private = tf.private(alg, "head")
    for before, after in zip(plain, message_shapes(private, _odd_start(), data_shapes(split)), strict=True):
        for way in ("down", "up"):
            sent, full = _shapes(getattr(after, way)), _shapes(getattr(before, way))
            assert all(np.prod(shape) < 77 for shape in sent)
            assert sorted(sent) == sorted(shape for shape in full if shape != (7, 11))
    state = jax.eval_shape(private.init_client, _odd_start())
    assert (7, 11) in _shapes(state.own)
    assert (7, 11) not in _shapes(jax.eval_shape(private.init, _odd_start()).inner)


def test_without_private_leaves_it_is_the_algorithm():
    alg = fb.fedavg(loss)
    assert tf.private(alg, ()) is alg


@pytest.mark.usefixtures("x64", "strict")
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedadam", "scaffold", "feddyn", "mime", "q_fedavg", "fedsplit"])
def test_a_federation_of_one_client_is_the_algorithm(name):
    """With one client nothing is gained or lost by keeping leaves on it."""
    one, row = Split.from_clients([clients().client(1)]), ALGORITHMS[name]
    plain = row.make(batch_size=2, epochs=1)
    private = tf.private(plain, "b")
    run = [fb.simulate(alg, start(), one, rounds=3, devices=1) for alg in (plain, private)]
    state = jax.tree.map(lambda leaf: leaf[0], run[1].states)
    own = private.personal(run[1].server, state)
    for leaf, other in zip(jax.tree.leaves(run[0].params), jax.tree.leaves(own), strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-9, atol=1e-12)
    moved = abs(float(run[0].params["b"] - start()["b"]))
    assert moved > 1e-3
    np.testing.assert_array_equal(run[1].params["b"], start()["b"])  # the global model has the initial value


@pytest.mark.usefixtures("x64", "strict")
def test_private_bias_against_numpy():
    """FedAvg with a private bias: the weights are averaged, every client has its own bias, lost rounds included."""
    split, rate, steps = clients(), 0.05, 3
    alg = tf.private(fb.fedavg(loss, client_lr=rate, batch_size=None, steps=steps), ["b"])
    result = fb.simulate(alg, start(), split, rounds=4, cohort=2, seed=7, devices=1)
    w, b = np.asarray(start()["w"]), np.full(split.num_clients, float(start()["b"]))
    asked = set()
    for round_ in range(4):
        cohort = address.cohort(7, round_, 0, split.num_clients, 2)
        asked |= set(cohort.tolist())
        ends, sizes = [], []
        for i in cohort.tolist():
            x, y, v = split.client(i)["x"], split.client(i)["y"], w.copy()
            for _ in range(steps):
                residual = x @ v + b[i] - y
                v, b[i] = v - rate * x.T @ residual / len(y), b[i] - rate * residual.mean()
            ends.append(v)
            sizes.append(len(y))
        w = np.average(ends, axis=0, weights=sizes)
    assert len(asked) < split.num_clients  # one client was never asked and has the initial bias
    personal = jax.vmap(alg.personal, in_axes=(None, 0))(result.server, result.states)
    np.testing.assert_allclose(personal["b"], b, rtol=1e-9)
    np.testing.assert_allclose(personal["w"], np.tile(w, (split.num_clients, 1)), rtol=1e-9)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-9)


def test_cost_counts_what_is_sent():
    alg = tf.private(fb.scaffold(_odd_loss), "head.v")
    plain, private = (fb.cost(one, _odd_start(), clients()) for one in (fb.scaffold(_odd_loss), alg))
    for way in ("down", "up"):
        sent = getattr(plain.exchanges[0], way) - getattr(private.exchanges[0], way)
        assert sent == 2 * 7 * 11 * 4  # of the model and of the control variate
    tf.quantize(alg)  # other transforms go outside
    with pytest.raises(ValueError, match=r"put private inside.* elastic, .* do not work with private in either order"):
        tf.private(tf.quantize(fb.scaffold(_odd_loss)), "head")
    with pytest.raises(ValueError, match="dp outside"):
        tf.private(tf.dp(fb.fedavg(_odd_loss), noise=1.0), "head")


@pytest.mark.parametrize("make", [lambda alg: tf.private(alg, "head"), lambda _: fb.fedper(_odd_loss, head="head")])
def test_transforms_that_need_every_leaf_are_refused(make):
    alg = make(fb.fedavg(_odd_loss))
    feedback = "set error_feedback = false, or leave one of the two out"
    for name, transform in {
        "elastic": lambda alg: tf.elastic(alg, lambda params, batch: batch["x"] @ params["w"]),
        "hypergradient": tf.hypergradient,
        "top_k with error feedback": tf.top_k,
        "qsgd with error feedback": lambda alg: tf.qsgd(alg, error_feedback=True),
    }.items():
        instead = feedback if "feedback" in name else "leave one of the two out"
        words = f"^{name} over private leaves: .* only the shared ones, because the transform private, .*: {instead}$"
        with pytest.raises(StructureError, match=words):
            transform(alg)
    check_structure(tf.top_k(alg, error_feedback=False), _odd_start(), data_shapes(clients()))


def test_patterns_are_checked():
    params = {"body": [jnp.zeros(2), jnp.zeros(3)], "head": {"w": jnp.zeros(4)}}
    assert leaf_names(params) == ["body.0", "body.1", "head.w"]
    assert jax.tree.leaves(matching(params, "head")) == [False, False, True]
    assert jax.tree.leaves(matching(params, ("*.1", "head.?"))) == [False, True, True]
    assert jax.tree.leaves(matching(params, lambda name, leaf: leaf.size < 3)) == [True, False, False]
    alg = fb.fedavg(_odd_loss)
    for leaves, words in (
        ("heads", "no leaf matches 'heads'; the model's leaves are head.v, w"),
        (("head", "x*"), "no leaf matches 'x\\*'"),
        (lambda name, leaf: False, "chooses no leaf; the model's leaves are head.v, w"),
        ("*", "are all leaves of the model .* local_only"),
    ):
        with pytest.raises(StructureError, match=words):
            check_structure(tf.private(alg, leaves), _odd_start(), data_shapes(clients()))
