"""Every algorithm and transform of the zoo, deployed: what the simulator computes, at the bytes that ``cost`` says."""

import numpy as np
import pytest

from fedbraid import cost, simulate
from fedbraid.simulate.plan import cohorts_of
from flower.small import SPLIT, close, deploy, grid_of
from zoo import ROWS, start

RAGGED = {"batch_size": 2, "epochs": 1}
every_row = pytest.mark.parametrize("name", list(ROWS))

# The stated overhead of a message, beside its numbers: the order or answer, Flower's message, and for every dtype's
# buffer the objects that carry it.
MESSAGE, BUFFER = 1600, 500


def run_both(name):
    alg = ROWS[name].make(**RAGGED)
    grid = grid_of(alg)
    served = deploy(alg, grid, rounds=3, cohort=3)
    return alg, grid, served, simulate(alg, start(), SPLIT, rounds=3, cohort=3, devices=1)


@every_row
def test_deployed_is_simulated_in_float64(name, x64):
    alg, grid, served, simulated = run_both(name)
    close(served.params, simulated.params, 1e-12)
    close(served.server, simulated.server, 1e-12)
    for column in simulated.history:
        np.testing.assert_allclose(served.history[column], simulated.history[column], rtol=1e-9, atol=1e-9)
    check_bytes(alg, grid)


@every_row
def test_deployed_is_simulated_in_float32(name):
    _, _, served, simulated = run_both(name)
    close(served.params, simulated.params, 1e-6)


def check_bytes(alg, grid):
    """Payload bytes are those of ``cost``, exactly; all that is serialised is that and the stated overhead."""
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
