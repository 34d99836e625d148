"""Every algorithm and transform of the zoo, deployed: what the simulator computes, at the bytes that ``cost`` says."""

import numpy as np
import pytest

from fedbraid import cost, simulate
from fedbraid.flower import Policy
from fedbraid.simulate import bernoulli, run
from fedbraid.simulate.plan import cohorts_of
from flower.small import SPLIT, close, deploy, grid_of, losing
from zoo import ROWS, start

RAGGED = {"batch_size": 2, "epochs": 1}
LOSSY = bernoulli(0.5)
every_row = pytest.mark.parametrize("name", list(ROWS))

# The stated overhead of a message beside its numbers: the order or answer and Flower's own message; and for every
# dtype's buffer the objects that carry it.
MESSAGE, BUFFER = 1000, 350


@every_row
def test_deployed_is_simulated_in_float64(name, x64, monkeypatch):
    """Three rounds of partial cohorts with lost uploads: parameters, server state and history are the simulator's."""
    alg = ROWS[name].make(**RAGGED)
    monkeypatch.setattr(run, "WINDOW", 2)  # as the laws of the engine run it: its program is compiled once for both
    simulated = simulate(alg, start(), SPLIT, rounds=3, cohort=2, arrival=LOSSY, devices=1)
    grid = grid_of(alg, name="zoo", tamper=losing(LOSSY))
    policy = Policy(deadline=0.02, join=1.0)
    served = deploy(alg, grid, rounds=3, cohort=2, fingerprint="zoo", policy=policy)
    close(served.params, simulated.params, 1e-12)
    close(served.server, simulated.server, 1e-12)
    for column in simulated.history:
        np.testing.assert_allclose(served.history[column], simulated.history[column], rtol=1e-9, atol=1e-9)
    assert served.counts["missing"] > 0


@every_row
def test_deployed_is_simulated_in_float32_at_the_stated_bytes(name):
    """The same without losses; payloads are exactly ``cost``'s, and what is serialised is that and the overhead."""
    alg = ROWS[name].make(**RAGGED)
    grid = grid_of(alg, name="zoo")
    served = deploy(alg, grid, rounds=3, cohort=3, fingerprint="zoo")
    simulated = simulate(alg, start(), SPLIT, rounds=3, cohort=3, devices=1)
    close(served.params, simulated.params, 1e-6)
    expected = cost(alg, start(), SPLIT)
    cohorts = [c for r in range(3) for c in cohorts_of(alg, 0, r, SPLIT.num_clients, 3)]
    greetings = SPLIT.num_clients
    for way, messages in (("down", grid.sent[greetings:]), ("up", grid.received[greetings:])):
        assert len(messages) == sum(len(c) for c in cohorts)
        payload = [sum(len(a.data) for a in m.content.array_records.get("arrays", {}).values()) for m in messages]
        per_round = [getattr(e, way) for e in expected.exchanges for _ in range(3)]
        assert payload == per_round * 3
        sizes = [n for w, n in grid.wire if w == way][greetings:]
        for message, size, numbers in zip(messages, sizes, payload, strict=True):
            buffers = len(message.content.array_records.get("arrays", {}))
            assert numbers < size <= numbers + MESSAGE + BUFFER * buffers
