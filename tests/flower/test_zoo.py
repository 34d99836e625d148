"""Every algorithm and transform of the zoo, deployed: the simulator's results, with the bytes of ``cost``."""

import numpy as np
import pytest

from fedbraid import cost, simulate
from fedbraid.flower import InProcessGrid, Policy, client_app, schema_of
from fedbraid.flower.wire import PLAIN, array_bytes, serialized_bytes
from fedbraid.transforms import is_private
from flower.small import BUFFER, MESSAGE, SPLIT, WIDE, close, deploy, grid_of, load_wide, losing, narrow, seeded
from shared_programs import COHORT, LOSSY, RAGGED, lossy, ragged
from zoo import ALGORITHMS, ROWS, start

pytestmark = pytest.mark.usefixtures("strict")  # as the laws, whose programs these are


@pytest.mark.parametrize("name", list(ROWS))
def test_deployed_is_simulated_in_float64_at_the_stated_bytes(name, x64, monkeypatch):
    """Three rounds of partial cohorts with lost uploads: parameters, server state and history are the simulator's.

    A private algorithm is given the simulator's noise and cohorts; test_entropy.py tests its own.
    """
    alg, simulated = ragged(name), lossy(name, rounds=3)
    grid = grid_of(alg, name="zoo", tamper=losing(LOSSY))
    if is_private(alg):
        seeded(monkeypatch, grid)
    policy = Policy(deadline=0.02, join=1.0)
    served = deploy(alg, grid, rounds=3, cohort=COHORT, fingerprint="zoo", policy=policy)
    close(served.params, simulated.params, 1e-12)
    close(served.server, simulated.server, 1e-12)
    for column in simulated.history:
        np.testing.assert_allclose(served.history[column], simulated.history[column], rtol=1e-9, atol=1e-9)
    assert served.counts["missing"] > 0
    check_bytes(alg, grid)


def check_bytes(alg, grid):
    """The arrays have exactly the bytes of ``cost``, and a serialised message has at most the stated overhead."""
    expected = cost(alg, start(), SPLIT).exchanges
    orders = {m.metadata.message_id: m.content[PLAIN] for m in grid.sent if "exchange" in m.content[PLAIN]}
    downs = [(m, expected[orders[m.metadata.message_id]["exchange"]].down) for m in grid.sent[SPLIT.num_clients :]]
    ups = [
        (m, expected[orders[m.metadata.reply_to_message_id]["exchange"]].up)
        for m in grid.received
        if m.metadata.reply_to_message_id in orders
    ]
    assert len(downs) == 3 * COHORT * len(expected)
    assert ups
    for message, numbers in (*downs, *ups):
        assert array_bytes(message) == numbers
        buffers = len(message.content.array_records.get("arrays", {}))
        assert numbers < serialized_bytes(message) <= numbers + MESSAGE + BUFFER * buffers


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_deployed_is_simulated_in_float32_under_a_pipeline_that_changes_shapes(name):
    """The stored examples fit the loss only after the preprocessing, which also adds random noise."""
    alg = ROWS[name].make(**RAGGED)
    client = client_app(alg, start(), load_wide, preprocess=narrow, cache=False, fingerprint="zoo")
    grid = InProcessGrid(client, {100 + i: {"partition-id": i} for i in range(WIDE.num_clients)})
    schema = schema_of(WIDE.arrays)
    served = deploy(alg, grid, rounds=3, cohort=3, fingerprint="zoo", schema=schema, preprocess=narrow)
    simulated = simulate(alg, start(), WIDE, rounds=3, cohort=3, devices=1)
    close(served.params, simulated.params, 1e-6)
    assert cost(alg, start(), WIDE) == cost(alg, start(), SPLIT)
