"""Client states with lost and late uploads, and restarts of server or nodes: server and clients stay consistent.

The ledger algorithm makes this checkable: the server's ``mean`` equals the mean of the clients' states if and only if
both sides agree on which uploads were accepted.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid.flower import Policy
from fedbraid.flower.states import states_of
from fedbraid.flower.wire import PLAIN
from fedbraid.simulation import bernoulli, simulate
from flower.small import SPLIT, close, deploy, grid_of, ledger, losing
from zoo import start

ALG = ledger()
QUICK = Policy(deadline=0.05, join=0.5)
LOSSY = bernoulli(0.4)


lose = losing(LOSSY)


def states_on(grid, client):
    run = next(m.content[PLAIN]["run"] for m in reversed(grid.sent))
    return states_of(grid.contexts[100 + client], run, client)


def committed(grid, served):
    """The state from which every client would start its next work, read from its node."""
    rows = []
    for client in range(SPLIT.num_clients):
        buffers = states_on(grid, client).read(served.taken.get(client, "init"))
        assert buffers is not None
        rows.append(np.array(buffers["float32"]))
    return np.stack(rows)


def in_folders(grid, folder):
    for node in list(grid.contexts):
        grid.join(node, grid.contexts[node].node_config | {"state-dir": str(folder)})
    return grid


@pytest.mark.parametrize("folder", [False, True])
def test_lost_uploads_leave_both_sides_in_agreement_as_in_the_simulator(folder, tmp_path):
    grid = grid_of(ALG, tamper=lose)
    grid = in_folders(grid, tmp_path) if folder else grid
    served = deploy(ALG, grid, rounds=5, cohort=4, policy=QUICK)
    assert served.counts["missing"] >= 4
    simulated = simulate(ALG, start(), SPLIT, rounds=5, cohort=4, arrival=LOSSY, devices=1)
    close(served.server, simulated.server, 1e-6)
    close(committed(grid, served), simulated.states, 1e-6)
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)
    for client in range(SPLIT.num_clients):
        assert len(states_on(grid, client).held()) <= 2  # committed and pending


def test_late_uploads_are_discarded_counted_and_do_not_commit():
    held = []

    def hold(order, reply):
        """Client 2's upload of round 1 arrives in round 2."""
        plain = order.content[PLAIN]
        if plain.get("round") == 1 and plain["client"] == 2:
            held.append((order.metadata.message_id, reply))
            return None
        return reply

    grid = grid_of(ALG, tamper=hold)

    def deliver(told):
        if told.round == 2:
            ((id_, reply),) = held
            grid._replies[id_] = reply

    served = deploy(ALG, grid, rounds=4, policy=QUICK, on_round=deliver)
    assert served.counts["late"] == 1
    assert served.history["late"].tolist() == [0, 0, 1, 0]
    assert served.history["train/arrived"].tolist() == [5, 4, 5, 5]
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)


class Stop(Exception):
    """The server's process is killed."""


@pytest.mark.parametrize(("every", "killed_after"), [(1, 2), (2, 3), (3, 5)])
def test_a_restarted_server_ends_where_an_uninterrupted_one_does(every, killed_after, tmp_path):
    def kill(told):
        if told.round == killed_after:
            raise Stop

    whole = deploy(ALG, grid_of(ALG, tamper=lose), rounds=6, policy=QUICK)
    grid = grid_of(ALG, tamper=lose)
    options = {"rounds": 6, "policy": QUICK, "checkpoints": tmp_path, "checkpoint_every": every}
    with pytest.raises(Stop):
        deploy(ALG, grid, on_round=kill, **options)
    resumed = deploy(ALG, grid, **options)
    assert resumed.rounds == 6
    for a, b in zip(jax.tree.leaves(whole.server), jax.tree.leaves(resumed.server), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    np.testing.assert_allclose(committed(grid, resumed).mean(0), resumed.server.mean, atol=1e-5)
    assert whole.history["train/arrived"].tolist() == resumed.history["train/arrived"].tolist()


def test_a_server_killed_within_a_round_redoes_it(tmp_path):
    """After a restart, uploads of the first try are not used; clients start from their last accepted upload."""
    killed = []

    def kill(order, reply):
        plain = order.content[PLAIN]
        if plain.get("round") == 2 and plain["client"] == 3 and not killed:
            killed.append(order)
            raise Stop
        return reply

    grid = grid_of(ALG, tamper=kill)
    options = {"rounds": 4, "policy": QUICK, "checkpoints": tmp_path}
    with pytest.raises(Stop):
        deploy(ALG, grid, **options)
    served = deploy(ALG, grid, **options)
    close(served.server, simulate(ALG, start(), SPLIT, rounds=4, devices=1).server, 1e-6)
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)


def test_a_restarted_node_goes_on_from_its_folder(tmp_path):
    grid = in_folders(grid_of(ALG), tmp_path)

    def restart(told):
        if told.round == 2:
            config = grid.contexts[103].node_config
            grid.leave(103)
            grid.join(203, config)  # Flower gives a restarted node another id

    told = []
    served = deploy(ALG, grid, rounds=4, policy=QUICK, on_round=lambda t: (told.append(t), restart(t)))
    assert served.nodes[3] == 203
    assert [t.total("arrived") for t in told][-1] == 5
    grid.contexts[103] = grid.contexts[203]
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)


def test_the_first_state_is_made_of_the_servers_parameters():
    """Only the shapes of a node's own parameters are used: FedSplit's z starts at the server's x."""
    alg = ALG._replace(init_client=lambda p: jnp.stack([p["w"][0], p["b"], p["b"]]))
    grid = grid_of(alg, params=jax.tree.map(lambda leaf: leaf + 5, start()))
    served = deploy(alg, grid, rounds=1)
    close(served.server, simulate(alg, start(), SPLIT, rounds=1, devices=1).server, 1e-6)
    states = simulate(alg, start(), SPLIT, rounds=1, devices=1).states
    close(committed(grid, served), states, 1e-6)


@pytest.mark.parametrize("size", [0, 100])
def test_a_node_with_a_cut_off_state_file_rejoins_as_one_that_lost_it(size, tmp_path, capsys):
    grid = in_folders(grid_of(ALG), tmp_path)
    policy = QUICK._replace(lost_state="restart")

    def cut(told):
        if told.round == 2:
            for place in tmp_path.glob("*/3/*.npz"):
                assert place.stat().st_mode & 0o777 == 0o600
                place.write_bytes(place.read_bytes()[:size])

    served = deploy(ALG, grid, rounds=5, policy=policy, on_round=cut)
    assert "client 3 (node 103) lost its state" in capsys.readouterr().out
    assert served.rounds == 5
    assert served.counts["lost"] == 1
    assert served.history["train/arrived"].tolist()[-1] == 5
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)
