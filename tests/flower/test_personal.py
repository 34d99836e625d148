"""A deployed method with private leaves: the simulated run, also in the evaluation of the clients' own models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid import fedavg, scaffold
from fedbraid.core import Algorithm
from fedbraid.costs import cost
from fedbraid.data.federated import FederatedData
from fedbraid.flower import InProcessGrid, Policy, client_app
from fedbraid.flower.evaluate import read_by_personal
from fedbraid.flower.wire import array_bytes
from fedbraid.simulation import simulate
from fedbraid.transforms import private
from flower.small import SPLIT, deploy, load
from flower.test_evaluate import TEST, load_test, metrics, questions
from zoo import loss, start

ALG = private(scaffold(loss, client_lr=0.05, batch_size=2), "w")
QUICK = Policy(deadline=5.0, join=5.0)


@functools.cache
def grid():
    app = client_app(ALG, start(), load, metrics=metrics, load_test=load_test, cache=False, fingerprint="ours")
    return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(5)})


@pytest.mark.usefixtures("x64")
def test_a_deployed_run_is_the_simulated_one():
    """Three of five clients a round, so that some states are old and some are the first ones."""
    options = {"rounds": 3, "cohort": 2, "seed": 3, "eval_every": 3}
    served = deploy(ALG, grid(), metrics=metrics, policy=QUICK, fingerprint="ours", **options)
    simulated = simulate(ALG, start(), FederatedData(SPLIT, TEST), metrics=metrics, devices=1, **options)
    for name, leaf in simulated.params.items():
        np.testing.assert_allclose(served.params[name], leaf, rtol=1e-12)
    assert set(served.evaluations) == set(simulated.evaluations)
    assert "test_personal_loss_client_gini" in served.evaluations
    for name, column in simulated.evaluations.items():
        np.testing.assert_allclose(served.evaluations[name], column, rtol=1e-9, err_msg=name)
    assert not np.allclose(served.evaluations["test_loss"], served.evaluations["test_personal_loss"])
    assert set(served.clients) == {"test_loss", "test_accuracy", "test_personal_loss", "test_personal_accuracy"}
    # the message has the global model and the shared leaves that own models are made of; nothing private
    model = cost(ALG, start(), SPLIT).model
    for message in questions(grid()):
        assert array_bytes(message) == model + 8  # b, in float64
    orders = [m for m in grid().sent if m.metadata.message_type.startswith("train")]
    assert {array_bytes(message) for message in orders} == {16}  # b and its control variate


def test_a_question_has_only_what_own_models_read():
    server = jax.eval_shape(ALG.init, start())
    leaves = jax.tree_util.tree_leaves_with_path(server)
    assert [jax.tree_util.keystr(leaves[i][0]) for i in read_by_personal(ALG, server)] == [".inner.params['b']"]
    assert read_by_personal(fedavg(loss), jax.eval_shape(fedavg(loss).init, start())) == []
    double: Algorithm = ALG._replace(personal=lambda server, state: jax.tree.map(jnp.add, server.own, server.own))
    assert [jax.tree_util.keystr(leaves[i][0]) for i in read_by_personal(double, server)] == [".own['w']"]
