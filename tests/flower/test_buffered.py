"""Asynchronous deployed runs: a buffer instead of a barrier, slow and failing nodes, and the same run simulated."""

import json
import time

import numpy as np
import pytest

from fedbraid import fedavg, scaffold
from fedbraid import transforms as tf
from fedbraid.flower import InProcessGrid, Policy
from fedbraid.flower.wire import PLAIN
from fedbraid.masking import Secure
from fedbraid.simulation import Asynchrony, fedasync, fedbuff, semi_synchronous, simulate
from flower.small import SPLIT, close, crash, deploy, grid_of, ledger
from zoo import loss, start

ALG = fedavg(loss, client_lr=0.05, batch_size=2)
POLICY = Policy(deadline=20.0, join=1.0)
SLOW = 3


class SlowGrid(InProcessGrid):
    """A federation in one process whose replies of some clients can be read only after a number of other replies."""

    def slow(self, waits: dict[int, int]):
        """waits: by client: how many replies to orders must be read before each of its own."""
        self.waits, self.ready, self.read = waits, {}, 0
        return self

    def push_messages(self, messages):
        messages = list(messages)
        ids = list(super().push_messages(messages))
        for id_, message in zip(ids, messages, strict=True):
            order = message.content[PLAIN]
            if "round" in order:
                self.ready[id_] = self.read + self.waits.get(order["client"], 0)
        return ids

    def pull_messages(self, message_ids):
        now = [id_ for id_ in message_ids if self.ready.get(id_, 0) <= self.read]
        replies = super().pull_messages(now)
        self.read += sum(id_ in self.ready for id_ in now)
        return replies


def slow_grid(alg, waits, **options) -> SlowGrid:
    plain = grid_of(alg, **options)
    nodes = {node: context.node_config for node, context in plain.contexts.items()}
    return SlowGrid(plain.apps, nodes, **options).slow(waits)


def repeated(alg, served, how, tmp_path, **options):
    """The simulation that takes uploads in the order of a deployed run."""
    order = tmp_path / "arrivals.jsonl"
    order.write_text("".join(json.dumps(step) + "\n" for step in served.arrivals))
    again = Asynchrony(how.name, buffer=how.buffer, alpha=how.alpha, order=str(order))
    return simulate(alg, start(), SPLIT, rounds=served.rounds, asynchrony=again, devices=1, **options)


@pytest.mark.parametrize("how", [fedbuff(2), fedasync(0.6)], ids=["fedbuff", "fedasync"])
def test_a_deployed_run_with_a_slow_node_equals_the_simulation_of_its_arrivals(how, tmp_path):
    served = deploy(ALG, slow_grid(ALG, {SLOW: 9}), rounds=12, policy=POLICY, asynchrony=how)
    order = served.arrivals
    slow = [i for i, step in enumerate(order) if SLOW in step["clients"]]
    assert 0 < len(slow) < 6
    first = order[slow[0]]
    assert slow[0] - first["versions"][first["clients"].index(SLOW)] >= 4  # the others did not wait for it
    assert served.history["staleness"].max() >= 2
    again = repeated(ALG, served, how, tmp_path)
    close(served.params, again.params, 1e-5)
    assert served.history["train/loss"] == pytest.approx(again.history["train/loss"], rel=1e-4)
    assert np.array_equal(served.history["staleness"], again.history["staleness"])
    assert np.array_equal(served.history["train/bytes_down"], again.history["train/bytes_down"])


def test_without_delay_a_buffer_of_the_whole_cohort_is_the_synchronous_deployment():
    rounds = deploy(ALG, grid_of(ALG), rounds=3, cohort=4, seed=2)
    steps = deploy(ALG, grid_of(ALG), rounds=3, cohort=4, seed=2, asynchrony=fedbuff(4))
    close(rounds.params, steps.params, 0)


def test_states_of_clients_stay_consistent_with_the_server(tmp_path):
    """The server's mean is that of the clients' states only if every upload counts once, from the state it says.

    Without staleness weights, because they change what the server adds.
    """
    alg, how = ledger(), Asynchrony("fedbuff", buffer=2, staleness="constant")
    lost = iter([False, False, True, False, True] * 20)

    def tamper(order, reply):
        return crash(reply) if "round" in order.content[PLAIN] and next(lost) else reply

    grid = slow_grid(alg, {SLOW: 5, 1: 2}, tamper=tamper)
    served = deploy(alg, grid, rounds=10, policy=POLICY, asynchrony=how)
    assert served.counts["failed"] > 0
    again = repeated(alg, served, how, tmp_path)
    assert np.asarray(served.server.mean) == pytest.approx(np.mean(np.asarray(again.states), 0), rel=1e-4)


def test_a_client_that_never_answers_is_given_up_and_the_others_go_on():
    grid = slow_grid(ALG, {SLOW: 10**9})
    notes = []
    quick = Policy(deadline=0.3, join=1.0)
    served = deploy(
        ALG, grid, rounds=6, policy=quick, asynchrony=fedbuff(2), on_round=lambda told: _pause(notes, told.notes)
    )
    assert served.rounds == 6
    assert all(SLOW not in step["clients"] for step in served.arrivals)
    assert served.counts["missing"] >= 1
    assert any(f"client {SLOW} (node {100 + SLOW}) left out, missing: no reply in 0.3 s" in note for note in notes)


def _pause(notes, new):
    notes += new
    time.sleep(0.1)


def test_a_restarted_server_continues_with_its_model_and_its_arrivals(tmp_path):
    how = fedbuff(2)
    options = {"policy": POLICY, "asynchrony": how, "checkpoints": tmp_path / "checkpoints"}
    deploy(ALG, slow_grid(ALG, {SLOW: 9}), rounds=4, **options)
    served = deploy(ALG, slow_grid(ALG, {SLOW: 9}), rounds=9, **options)
    assert [len(step["clients"]) for step in served.arrivals] == [2] * 9
    assert all(
        version >= 4 for step in served.arrivals[4:] for version in step["versions"]
    )  # earlier work is forgotten
    close(served.params, repeated(ALG, served, how, tmp_path).params, 1e-5)


def test_semi_synchronous_rounds_take_the_first_uploads():
    served = deploy(
        ALG, slow_grid(ALG, {SLOW: 4}), rounds=3, cohort=4, policy=POLICY, asynchrony=semi_synchronous(1.25)
    )
    assert served.history["train/arrived"].tolist() == [4, 4, 4]
    assert served.history["train/asked"].tolist() == [5, 5, 5]
    assert served.counts["late"] >= 1


def test_what_cannot_be_asynchronous_is_refused_before_nodes_are_asked():
    control = scaffold(loss, batch_size=2)
    with pytest.raises(ValueError, match="mean of the clients' c_i"):
        deploy(control, grid_of(ALG), rounds=1, asynchrony=fedbuff(2))
    with pytest.raises(ValueError, match="its epsilon would be wrong"):
        deploy(tf.dp(ALG), grid_of(ALG), rounds=1, asynchrony=fedbuff(2))
    with pytest.raises(ValueError, match="agree on their masks"):
        deploy(ALG, grid_of(ALG), rounds=1, asynchrony=fedbuff(2), secure=Secure(clients=5))
    with pytest.raises(ValueError, match="minimum must be at most the buffer of 2"):
        deploy(ALG, grid_of(ALG), rounds=1, asynchrony=fedbuff(2), policy=Policy(minimum=3))
