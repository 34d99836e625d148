"""The shadow sequence: the recorded models equal those of a run; and the toy problem of its picture."""

import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from closed_forms import loss, problem
from fedbraid.data.toy import toy_loss, toy_metrics, toy_optimum, two_class
from fedbraid.simulation.shadow import draw_shadow, trace_shadow

pytestmark = pytest.mark.usefixtures("x64")

P = problem()
X = np.array([0.3, -1.2, 0.8])


def test_iterates_are_fedavg_by_hand():
    tau, eta = 4, 0.1
    alg = fb.fedavg(loss, client_lr=eta, batch_size=None, steps=tau, weighting="uniform")
    trace = trace_shadow(alg, jnp.asarray(X), P.split, rounds=3)
    x = X.copy()
    for t in range(3):
        paths = []
        for A, b in zip(P.A, P.b, strict=True):
            path = [x]
            for _ in range(tau):
                path.append(path[-1] - eta * (A @ path[-1] - b))
            paths.append(path)
        shadow = np.mean(paths, axis=0)
        np.testing.assert_allclose(trace.server[t], x, rtol=1e-10)
        np.testing.assert_allclose(trace.iterates[t], paths, rtol=1e-10)
        np.testing.assert_allclose(trace.shadow[t], shadow, rtol=1e-10)
        drift = np.mean(np.sum((np.array(paths) - shadow) ** 2, -1), 0)
        np.testing.assert_allclose(trace.drift[t], drift, atol=1e-12)
        x = shadow[-1]  # the server's next model is the end of the shadow
    np.testing.assert_allclose(trace.server[3], x, rtol=1e-10)
    assert np.all(trace.drift[:, 0] == 0)
    assert np.all(trace.drift[:, -1] > 0.01)


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mime"])
def test_a_trace_ends_where_the_run_does(name):
    """The same numbers with padded batches, partial cohorts, weights by examples, states and two exchanges."""
    alg = {
        "fedavg": lambda: fb.fedavg(loss, client_lr=0.05, batch_size=2, epochs=1),
        "scaffold": lambda: fb.scaffold(loss, client_lr=0.05, batch_size=2, epochs=1),
        "mime": lambda: fb.mime(loss, batch_size=2, epochs=1),
    }[name]()
    trace = trace_shadow(alg, jnp.asarray(X), P.split, rounds=3, cohort=3, seed=5)
    for rounds in (1, 3) if name == "fedavg" else (3,):
        run = fb.simulate(alg, jnp.asarray(X), P.split, rounds=rounds, cohort=3, seed=5, devices=1)
        np.testing.assert_allclose(trace.server[rounds], run.params, rtol=1e-9)
    np.testing.assert_array_equal(trace.steps, -(-P.n[trace.clients] // 2))
    for t in range(3):
        for j in range(3):
            k = trace.steps[t, j]
            assert np.all(trace.iterates[t, j, k:] == trace.iterates[t, j, k])  # the last model is repeated
            assert np.all(np.any(np.diff(trace.iterates[t, j, : k + 1], axis=0) != 0, axis=1))
    np.testing.assert_allclose(trace.weights.sum(1), 1)
    if name == "fedavg":
        np.testing.assert_allclose(trace.shadow[:, -1], trace.server[1:], rtol=1e-9)


def test_models_of_several_arrays_are_flattened_and_back():
    def split_loss(params, batch, key):
        return loss(jnp.append(params["head"], params["last"]), batch, key)

    params = {"head": jnp.asarray(X[:2]), "last": jnp.asarray(X[2])}
    trace = trace_shadow(fb.fedavg(split_loss, batch_size=None, steps=2), params, P.split, rounds=1)
    back = trace.unravel(trace.shadow[0, -1])
    np.testing.assert_allclose(back["head"], trace.server[1][:2], rtol=1e-10)
    assert back["last"].shape == ()


def test_without_local_steps_there_is_no_shadow():
    with pytest.raises(ValueError, match="no shadow"):
        trace_shadow(fb.fedsplit(loss), jnp.asarray(X), P.split, rounds=1)
    alg = fb.fedavg(loss)
    with pytest.raises(ValueError, match="'train'"):
        trace_shadow(alg, jnp.asarray(X), P.split, rounds=1, exchange="refine")
    with pytest.raises(ValueError, match="cohort"):
        trace_shadow(alg, jnp.asarray(X), P.split, rounds=1, cohort=9)
    with pytest.raises(ValueError, match="rounds"):
        trace_shadow(alg, jnp.asarray(X), P.split, rounds=0)


# --- the toy ----------------------------------------------------------------------------------------------------------


def test_the_toy_is_what_it_says():
    split = two_class(clients=3, examples=400, angle=120.0, noise=0.3)
    for j, degrees in enumerate((-60, 0, 60)):
        own = split.client(j)
        centre = (own["x"] * own["y"][:, None]).mean(0)
        turn = np.deg2rad(degrees)
        np.testing.assert_allclose(centre, [np.cos(turn), np.sin(turn)], atol=0.06)
        assert own["y"].sum() == 0
        away = own["x"] - own["y"][:, None] * centre
        across = away @ [-np.sin(turn), np.cos(turn)]
        assert across.std() == pytest.approx(0.3, rel=0.15)
        assert (away @ [np.cos(turn), np.sin(turn)]).std() == pytest.approx(0.15, rel=0.15)


def test_the_toys_optimum_and_where_fedavg_stops():
    split = two_class()
    star = toy_optimum(split)
    A = [2 * x.T @ x / len(x) for x in (split.client(j)["x"].astype(float) for j in range(3))]
    b = [2 * c["x"].T.astype(float) @ c["y"] / len(c["y"]) for c in (split.client(j) for j in range(3))]
    np.testing.assert_allclose(sum(A) @ star, sum(b), atol=1e-10)
    eta, tau = 0.1, 10
    Q = [sum(np.linalg.matrix_power(np.eye(2) - eta * a, k) for k in range(tau)) for a in A]
    stops = np.linalg.solve(
        sum(q @ a for q, a in zip(Q, A, strict=True)), sum(q @ v for q, v in zip(Q, b, strict=True))
    )
    alg = fb.fedavg(toy_loss, client_lr=eta, batch_size=None, steps=tau, weighting="uniform")
    result = fb.simulate(alg, jnp.zeros(2), fb.FederatedData(split, split), rounds=200, metrics=toy_metrics, devices=1)
    np.testing.assert_allclose(result.params, stops, atol=1e-6)
    assert np.linalg.norm(stops - star) > 0.01
    assert result.evaluations["test_accuracy"][-1] > 0.8


def test_shares_of_the_classes_alone_make_no_heterogeneity():
    """Why the toy problem rotates its clients: x with label -1 is equivalent to -x with label +1."""
    split = two_class(clients=1, examples=50)
    own = split.client(0)
    mirrored = {"x": own["x"] * own["y"][:, None], "y": np.ones_like(own["y"]), "mask": np.ones(50)}
    for w in (jnp.array([0.3, 0.4]), jnp.array([-1.0, 2.0])):
        a = toy_loss(w, {k: jnp.asarray(v) for k, v in own.items()} | {"mask": jnp.ones(50)}, None)
        assert a == pytest.approx(float(toy_loss(w, mirrored, None)), rel=1e-6)


def test_toy_refusals():
    for options in ({"clients": 0}, {"examples": 1}, {"angle": 200.0}, {"noise": 0.0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            two_class(**options)


def test_the_picture(tmp_path):
    split = two_class()
    alg = fb.fedavg(toy_loss, client_lr=0.1, batch_size=None, steps=3, weighting="uniform")
    trace = trace_shadow(alg, jnp.zeros(2, jnp.float32), split, rounds=2)
    figure = draw_shadow(trace, objective=lambda w: jnp.sum(w**2), optimum=toy_optimum(split))
    figure.savefig(tmp_path / "shadow.png")
    plane, drift = figure.axes
    assert plane.get_xlabel() == "parameter 0"
    assert [t.get_text() for t in plane.get_legend().get_texts()] == [
        "client 0",
        "client 1",
        "client 2",
        "shadow (mean)",
        "server",
        "optimum",
    ]
    assert len(drift.lines) == 2
    np.testing.assert_allclose(drift.lines[1].get_xdata(), [3, 4, 5, 6])
    np.testing.assert_allclose(drift.lines[1].get_ydata(), trace.drift[1])
    with pytest.raises(ValueError, match="axes"):
        draw_shadow(trace, axes=(0, 2))
    deeper = trace_shadow(fb.fedavg(loss, batch_size=None), jnp.asarray(X), P.split, rounds=1)
    with pytest.raises(ValueError, match="two parameters"):
        draw_shadow(deeper, objective=jnp.sum)
    assert draw_shadow(deeper, axes=(2, 0)).axes[0].get_xlabel() == "parameter 2"
