"""Clients that lost their state: a reinstalled node, a wiped disk. No client trains from a wrong state.

SCAFFOLD's c is the mean of the c_i. When c_3 becomes 0, c is too large by c_3 / N, which the server does not know. So
all start anew from the current model. The rounds before and after are computed in NumPy, too.
"""

import functools
import shutil

import numpy as np
import pytest

from fedbraid import fedavg, scaffold
from fedbraid.flower import Policy
from fedbraid.transforms import top_k
from flower.small import SPLIT, deploy, grid_of, ledger
from flower.test_states import committed, in_folders, states_on
from zoo import loss, start

STEPS, RATE, N = 3, 0.05, SPLIT.num_clients
ALG = scaffold(
    loss, client_lr=RATE, batch_size=None, steps=STEPS
)  # full batches: no shuffling, so NumPy needs no random keys
LEDGER = ledger()
QUICK = Policy(deadline=0.05, join=0.5)
LOSER = 3


def gradient(client, y):
    rows = SPLIT.client(client)
    residual = rows["x"] @ y[:3] + y[3] - rows["y"]
    return np.append(rows["x"].T @ residual, residual.sum()) / len(residual)


class ByHand:
    """SCAFFOLD, option II, full batches and equal weights. Vectors are (w, b)."""

    def __init__(self, x):
        self.x, self.c, self.own = x, np.zeros(4), np.zeros((N, 4))

    def round(self, present):
        moved, changed = np.zeros(4), np.zeros(4)
        before = self.own.copy()
        for i in present:
            y = self.x.copy()
            for _ in range(STEPS):
                y -= RATE * (gradient(i, y) - before[i] + self.c)
            self.own[i] = before[i] - self.c + (self.x - y) / (STEPS * RATE)
            moved += (self.x - y) / len(present)
            changed += self.own[i] - before[i]
        self.x, self.c = self.x - moved, self.c + changed / N

    def replay(self, arrived, restarted):
        """Compute the rounds of a run in which only client LOSER was away at times."""
        for count, anew in zip(arrived, restarted, strict=True):
            if anew:
                self.__init__(self.x)
            self.round([i for i in range(N) if count == N or i != LOSER])
        return self


def vector(tree):
    return np.append(np.asarray(tree["w"]), np.asarray(tree["b"]))


def own_states(grid, served):
    """Clients' states as vectors (w, b); in a message b comes first."""
    rows = []
    for client in range(N):
        (buffer,) = states_on(grid, client).read(served.taken[client]).values()
        rows.append(np.append(buffer[1:], buffer[0]))
    return np.stack(rows)


def reinstall(grid, client=LOSER, node=None):
    """The site has a new machine: another node that has only its config."""
    config = grid.contexts.pop(100 + client).node_config
    grid.join(node or 100 + client + 100, config)
    return grid


def after(round_, act):
    return lambda told: act() if told.round == round_ else None


@pytest.mark.parametrize("how", ["reinstalled", "wiped"])
def test_scaffold_starts_anew_where_both_sides_agree(how, x64, tmp_path, capsys):
    grid = in_folders(grid_of(ALG), tmp_path) if how == "wiped" else grid_of(ALG)

    def lose():
        if how == "reinstalled":
            reinstall(grid)
        else:
            (folder,) = tmp_path.glob(f"*/{LOSER}")
            shutil.rmtree(folder)

    served = deploy(ALG, grid, rounds=6, policy=QUICK, on_round=after(2, lose))
    arrived, restarted = served.history["train/arrived"], served.history["restarted"]
    assert restarted.sum() == 1
    assert arrived[:3].tolist() == [5, 5, 4]
    assert arrived[-1] == 5
    assert served.counts["lost"] == 1
    hand = ByHand(vector(start())).replay(arrived, restarted)
    np.testing.assert_allclose(vector(served.params), hand.x, rtol=1e-12)
    np.testing.assert_allclose(vector(served.server.c), hand.c, rtol=1e-11)
    if how == "reinstalled":
        grid.contexts[100 + LOSER] = grid.contexts[200 + LOSER]
    np.testing.assert_allclose(own_states(grid, served), hand.own, rtol=1e-11)
    np.testing.assert_allclose(own_states(grid, served).mean(0), vector(served.server.c), rtol=1e-11)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "start anew" in line]
    assert line.startswith(f"client {LOSER} (node ")
    assert f"the model of round {restarted.argmax()}" in line


def test_resetting_one_scaffold_client_alone_would_leave_c_too_large_by_its_share(x64):
    """Why all must start anew: otherwise c is wrong by c_3 / N in all later rounds."""
    grid, had = grid_of(ALG), []

    def lose(told):
        if told.round == 2:
            newest = max(states_on(grid, LOSER).held())  # tags begin with the round
            (values,) = states_on(grid, LOSER).read(newest).values()
            had.append(np.append(values[1:], values[0]))
            reinstall(grid)

    served = deploy(ALG, grid, rounds=6, policy=QUICK._replace(lost_state="reset"), on_round=lose)
    grid.contexts[100 + LOSER] = grid.contexts[200 + LOSER]
    gap = vector(served.server.c) - own_states(grid, served).mean(0)
    np.testing.assert_allclose(gap, had[0] / N, rtol=1e-9)
    assert np.abs(gap).max() > 0.1


def test_an_undeclared_agreement_is_kept_by_the_policy():
    grid = grid_of(LEDGER)
    policy = QUICK._replace(lost_state="restart")
    served = deploy(LEDGER, grid, rounds=5, policy=policy, on_round=after(2, functools.partial(reinstall, grid)))
    assert served.history["restarted"].tolist() == [0, 0, 0, 1, 0]
    grid.contexts[100 + LOSER] = grid.contexts[200 + LOSER]
    np.testing.assert_allclose(committed(grid, served).mean(0), served.server.mean, atol=1e-5)
    assert np.abs(served.server.mean).max() > 1


def test_a_residual_that_the_server_keeps_no_account_of_is_reset_alone(capsys):
    alg = top_k(fedavg(loss, client_lr=0.05, batch_size=None), fraction=0.4)
    grid = grid_of(alg)
    served = deploy(alg, grid, rounds=5, policy=QUICK, on_round=after(2, functools.partial(reinstall, grid)))
    assert served.history["restarted"].tolist() == [0] * 5
    assert served.history["train/arrived"].tolist() == [5, 5, 4, 5, 5]
    out = capsys.readouterr().out
    assert f"client {LOSER} (node {200 + LOSER}) lost its state" in out
    assert "the others keep theirs" in out
    bases = {(o["round"], o["client"]): o["base"] for o in (m.content["fedbraid"] for m in grid.sent) if "base" in o}
    assert bases[3, LOSER] == "init"
    assert bases[3, 0] != "init"


def test_a_second_node_with_the_same_config_loses_no_state():
    grid = grid_of(ALG)
    grid.join(900, {"partition-id": LOSER})
    served = deploy(ALG, grid, rounds=3, policy=QUICK)
    assert served.nodes[LOSER] == 103
    assert not served.counts.get("lost")
    served = deploy(ALG, grid, rounds=5, policy=QUICK, on_round=after(2, lambda: grid.leave(103)))
    assert served.nodes[LOSER] == 900  # now its client has no other node
    assert served.counts["lost"] == served.history["restarted"].sum() == 1


def test_refused_by_name_if_the_policy_says_so(capsys):
    grid = grid_of(LEDGER)
    policy = QUICK._replace(lost_state="refuse")
    served = deploy(LEDGER, grid, rounds=5, policy=policy, on_round=after(2, functools.partial(reinstall, grid)))
    out = capsys.readouterr().out
    assert "node 203 is refused: client 3 lost its state" in out
    assert "state-dir" in out
    assert 3 not in served.nodes
    assert served.history["train/arrived"].tolist() == [5, 5, 4, 4, 4]


def test_a_client_that_loses_its_state_again_and_again_is_refused(capsys):
    grid = grid_of(ALG)

    forget = lambda told: grid.join(100 + LOSER, {"partition-id": LOSER})  # noqa: E731
    served = deploy(ALG, grid, rounds=14, policy=QUICK, on_round=forget)
    assert served.counts["lost"] == 4
    assert served.history["restarted"].sum() == 3
    assert "(4 times in this run)" in capsys.readouterr().out
    assert served.history["train/arrived"][-1] == 4


def test_waiting_for_all_clients_does_not_wait_for_a_lost_state():
    grid = grid_of(ALG)
    policy = QUICK._replace(minimum=5, too_few="wait", patience=60.0)
    served = deploy(ALG, grid, rounds=5, policy=policy, on_round=after(2, functools.partial(reinstall, grid)))
    assert served.seconds < 30
    assert served.history["skipped"].tolist() == [0, 0, 1, 0, 0]
    assert served.history["train/arrived"].tolist() == [5, 5, 0, 5, 5]


class Stop(Exception):
    """The server's process is killed."""


@pytest.mark.parametrize(("every", "killed_after"), [(3, 4), (1, 5)])
def test_a_server_killed_around_a_restart_goes_on_in_agreement(every, killed_after, x64, tmp_path):
    """All start anew before round 4. The first kill is before the checkpoint of this, the second after it."""
    grid = in_folders(grid_of(ALG), tmp_path / "states")

    def act(told):
        if told.round == 2:
            shutil.rmtree(next((tmp_path / "states").glob(f"*/{LOSER}")))
            reinstall(grid)
        if told.round == killed_after:
            raise Stop

    options = {"rounds": 8, "policy": QUICK, "checkpoints": tmp_path / "checkpoints", "checkpoint_every": every}
    with pytest.raises(Stop):
        deploy(ALG, grid, on_round=act, **options)
    served = deploy(ALG, grid, **options)
    assert served.history["restarted"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert served.history["train/arrived"].tolist() == [5, 5, 4, 5, 5, 5, 5, 5]
    hand = ByHand(vector(start())).replay(served.history["train/arrived"], served.history["restarted"])
    np.testing.assert_allclose(vector(served.params), hand.x, rtol=1e-12)
    grid.contexts[100 + LOSER] = grid.contexts[200 + LOSER]
    np.testing.assert_allclose(own_states(grid, served), hand.own, rtol=1e-11)
