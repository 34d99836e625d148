"""Faulty replies: late, missing, malformed, not finite or too large ones are left out, counted and reported."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict

from fedbraid import fedavg
from fedbraid.core import finite
from fedbraid.data.federated import Split
from fedbraid.flower import InProcessGrid, Policy, TooFewError, asking, client_app, schema_of, server_app
from fedbraid.flower.wire import PLAIN
from fedbraid.simulation import simulate
from flower.small import SPLIT, bare, close, crash, deploy, grid_of, load, plain
from zoo import loss, start

ALG = fedavg(loss, client_lr=0.05, batch_size=2)
QUICK = Policy(deadline=0.05, join=0.5)
BAD = 1  # the client that misbehaves


def only(client, change, *, rounds=(0, 1, 2)):
    """Change the replies of one client to its orders."""

    def tamper(order, reply):
        plain = order.content[PLAIN]
        return change(reply) if plain.get("client") == client and plain.get("round") in rounds else reply

    return tamper


def with_arrays(reply, arrays):
    content = RecordDict(dict(reply.content))
    content["arrays"] = ArrayRecord(arrays)
    reply.content = content
    return reply


def spoil(value):
    def change(reply):
        array = reply.content["arrays"]["float32"]
        numbers = np.frombuffer(array.data, np.float32).copy()
        numbers[1] = value
        return with_arrays(reply, {"float32": Array("float32", (4,), array.stype, numbers.tobytes())})

    return change


def raw(n, name="float32"):
    return lambda reply: with_arrays(
        reply, {name: Array(name, (n,), "fedbraid.raw", bytes(n * np.dtype(name).itemsize))}
    )


def other_layout(reply):
    leaves = [[".pseudograd['b']", "float32", []], [".pseudograd['w']", "float32", [2]]]
    return plain(layout="0", leaves=json.dumps(leaves))(reply)


FAULTS = {
    "lost": (lambda reply: None, "missing", "no reply"),
    "nan": (spoil(np.nan), "nonfinite", "not finite"),
    "inf": (spoil(np.inf), "nonfinite", "not finite"),
    "nan weight": (plain(weight=float("nan")), "nonfinite", "not finite"),
    "negative weight": (plain(weight=-1.0), "nonfinite", "not finite"),
    "short": (raw(3), "malformed", "['w'] float32[3]"),
    "long": (raw(5), "malformed", "5 float32"),
    "other dtype": (raw(4, "float64"), "malformed", "float64"),
    "huge": (raw(10_000_000), "oversized", "40 MB"),
    "long words": (plain(leaves="x" * 2_000_000), "oversized", "2 MB"),
    "nothing": (bare, "malformed", "does not run fedbraid"),
    "other tag": (plain(tag="0.0.zzz"), "malformed", "0.0.zzz"),
    "weight as text": (plain(weight="much"), "malformed", "weight"),
    "weight above its examples": (plain(weight=9.5), "malformed", "weight 9.5, its node stated 9 examples"),
    "nested layout": (plain(layout="0", leaves="[" * 100_000), "malformed", "deeper than 64 levels"),
    "other layout": (other_layout, "malformed", "leaf .pseudograd['w'] should be"),
    "layout is garbage": (plain(layout="0", leaves="not json"), "malformed", ""),
    "crash": (crash, "failed", "ZeroDivisionError"),
}


@pytest.fixture(scope="module")
def lost():
    """The run in which that upload is lost."""
    tamper = only(BAD, lambda reply: None, rounds=(1,))
    return deploy(ALG, grid_of(ALG, tamper=tamper), rounds=3, policy=QUICK).params


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_bad_reply_is_left_out_counted_and_named_and_training_goes_on(fault, lost):
    change, kind, word = FAULTS[fault]
    notes = []
    grid = grid_of(ALG, tamper=only(BAD, change, rounds=(1,)))
    served = deploy(ALG, grid, rounds=3, policy=QUICK, on_round=lambda told: notes.append(told.notes))
    assert served.counts[kind] == 1
    assert sum(served.counts.values()) == 1
    assert served.history["train/arrived"].tolist() == [5, 4, 5]
    (note,) = notes[1]
    assert f"client {BAD} (node {100 + BAD}) left out, {kind}" in note
    assert word in note
    assert not notes[0]
    assert not notes[2]
    close(served.params, lost, 0)
    assert finite(served.params)


def test_a_reply_that_flower_cannot_read_takes_no_other_with_it():
    grid = grid_of(ALG)
    honest = grid.pull_messages

    def pull(ids):
        """Client 1's reply in round 2 is not a valid Flower message."""
        bad = {m.metadata.message_id for m in grid.sent if m.content[PLAIN].get("round") == 1}
        bad &= {m.metadata.message_id for m in grid.sent if m.content[PLAIN].get("client") == BAD}
        if bad & set(ids):
            raise AttributeError("no such object")
        return honest(ids)

    grid.pull_messages = pull
    notes = []
    served = deploy(ALG, grid, rounds=3, policy=QUICK, on_round=lambda told: notes.append(told.notes))
    assert served.history["train/arrived"].tolist() == [5, 4, 5]
    assert "client 1 (node 101) left out, failed: unreadable: no such object" in notes[1][0]


def test_weights_renormalise_over_the_uploads_that_count():
    others = Split.from_clients([SPLIT.client(i) for i in range(5) if i != BAD])
    alg = fedavg(loss, client_lr=0.05, batch_size=None)  # no shuffling: client numbers do not matter
    served = deploy(alg, grid_of(alg, tamper=only(BAD, spoil(np.nan), rounds=(0,))), rounds=1, policy=QUICK)
    close(served.params, simulate(alg, start(), others, rounds=1, devices=1).params, 1e-6)


def nobody(order, reply):
    return None if "round" in order.content[PLAIN] else reply


def test_skip_leaves_the_server_as_it_is():
    served = deploy(ALG, grid_of(ALG, tamper=nobody), rounds=2, policy=QUICK)
    close(served.params, start(), 0)
    assert served.history["skipped"].tolist() == [1, 1]
    some = only(BAD, lambda reply: None)
    served = deploy(ALG, grid_of(ALG, tamper=some), rounds=2, policy=QUICK._replace(minimum=5))
    close(served.params, start(), 0)
    assert served.history["train/arrived"].tolist() == [0, 0]


def test_abort_ends_with_an_exit_code_and_says_who_is_missing():
    policy = QUICK._replace(minimum=5, too_few="abort")
    with pytest.raises(TooFewError, match=r"4 uploads within 0\.05 s") as error:
        deploy(ALG, grid_of(ALG, tamper=only(BAD, lambda reply: None)), rounds=2, policy=policy)
    assert "client 1 (node 101)" in str(error.value)
    assert error.value.exit_code > 0


def test_wait_asks_again_until_enough_have_answered(monkeypatch):
    monkeypatch.setattr(asking, "LOOK", 0.1)
    tries = []

    def twice(reply):
        tries.append(reply)
        return reply if len(tries) > 2 else None

    policy = QUICK._replace(minimum=5, too_few="wait", patience=20.0)
    served = deploy(ALG, grid_of(ALG, tamper=only(BAD, twice, rounds=(0,))), rounds=2, policy=policy)
    assert len(tries) == 3
    close(served.params, simulate(ALG, start(), SPLIT, rounds=2, devices=1).params, 1e-6)


def test_wait_gives_up_when_its_patience_is_over():
    policy = QUICK._replace(minimum=5, too_few="wait", patience=0.2)
    with pytest.raises(TooFewError, match="patience"):
        deploy(ALG, grid_of(ALG, tamper=only(BAD, lambda reply: None)), rounds=1, policy=policy)


def test_an_absent_node_is_not_asked_and_may_come_later():
    grid = grid_of(ALG)
    config = grid.contexts[104].node_config
    grid.leave(104)

    def come(told):
        if told.round == 2:
            grid.join(104, config)

    served = deploy(ALG, grid, rounds=4, policy=QUICK, on_round=come)
    # it is greeted at the start of round 3 and asked from round 4 on
    assert served.history["train/asked"].tolist() == [4, 4, 4, 5]


def test_nodes_without_a_number_are_numbered():
    app = client_app(ALG, start(), lambda context: SPLIT.client(context.node_id - 50), cache=False)
    grid = InProcessGrid(app, {50 + i: {} for i in range(5)})
    served = deploy(ALG, grid, rounds=2)
    assert served.nodes == {i: 50 + i for i in range(5)}
    close(served.params, simulate(ALG, start(), SPLIT, rounds=2, devices=1).params, 1e-6)


def test_a_second_node_with_the_same_number_waits_for_its_place():
    grid = grid_of(ALG)
    grid.join(900, {"partition-id": 2})
    assert deploy(ALG, grid, rounds=2, policy=QUICK).nodes[2] == 102

    def die(told):
        if told.round == 1:
            grid.tamper = lambda order, reply: None if reply.metadata.src_node_id == 102 else reply

    served = deploy(ALG, grid, rounds=4, policy=QUICK, on_round=die)
    assert served.nodes[2] == 900
    assert served.history["train/arrived"].tolist() == [5, 4, 5, 5]


REFUSALS = {
    "fields": (lambda rows: {"x": rows["x"]}, "the data has the fields ['x'], the schema asks for ['x', 'y']"),
    "shape": (lambda rows: rows | {"x": rows["x"][:, :2]}, "field 'x': one example has shape (2,)"),
    "dtype": (lambda rows: rows | {"y": rows["y"].astype(np.int32)}, "field 'y' is int32"),
    "lengths": (lambda rows: rows | {"y": rows["y"][1:]}, "fields differ in length"),
    "nan": (lambda rows: rows | {"y": rows["y"] * np.nan}, "not finite"),
    "empty": (lambda rows: {k: v[:0] for k, v in rows.items()}, "no examples"),
    "not a mapping": (lambda rows: list(rows.values()), "mapping"),
}


@pytest.mark.parametrize("case", list(REFUSALS))
def test_data_that_does_not_fit_is_refused_at_the_start_with_the_reason(case, capsys):
    change, reason = REFUSALS[case]

    def load_one(context):
        rows = load(context)
        return change(rows) if context.node_id == 100 + BAD else rows

    grid = grid_of(ALG)
    grid.apps = client_app(ALG, start(), load_one, cache=False)
    served = deploy(ALG, grid, rounds=1, policy=QUICK)
    out = capsys.readouterr().out
    assert f"node {100 + BAD} is refused" in out
    assert reason in out
    assert BAD not in served.nodes
    assert served.history["train/arrived"].tolist() == [4]


def test_another_algorithm_is_refused_with_both_fingerprints(capsys):
    from fedbraid.flower import fingerprint

    other = fedavg(loss, client_lr=0.06, batch_size=2)
    ours, theirs = (fingerprint(a, start(), schema_of(SPLIT.arrays)) for a in (ALG, other))
    assert ours != theirs
    with pytest.raises(TooFewError, match="0 of 5"):
        deploy(ALG, grid_of(other), rounds=1, policy=QUICK)
    out = capsys.readouterr().out
    assert ours in out
    assert theirs in out


def test_a_number_outside_the_population_is_refused(capsys):
    grid = grid_of(ALG)
    grid.join(104, {"partition-id": 5})
    deploy(ALG, grid, rounds=1, policy=QUICK)
    assert "partition-id=5; clients are numbered 0 to 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rounds": 0}, "rounds"),
        ({"population": 0}, "population"),
        ({"cohort": 6}, "cohort"),
        ({"policy": Policy(deadline=0)}, "deadline"),
        ({"policy": Policy(minimum=0)}, "minimum"),
        ({"policy": Policy(minimum=6)}, "minimum"),
        ({"policy": Policy(too_few="pray")}, "too_few"),
        ({"policy": Policy(join=-1)}, "join"),
        ({"policy": Policy(weights="heavy")}, "weights"),
        ({"policy": Policy(max_examples=0)}, "max_examples"),
    ],
)
def test_bad_options_are_refused_when_the_app_is_made(options, word):
    options = {"rounds": 1, "population": 5, "schema": schema_of(SPLIT.arrays)} | options
    with pytest.raises(ValueError, match=word):
        server_app(ALG, start(), **options)


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    deploy(ALG, grid_of(ALG), rounds=1, checkpoints=tmp_path)
    other = fedavg(loss, client_lr=0.06, batch_size=2)
    with pytest.raises(ValueError, match="fingerprint"):
        deploy(other, grid_of(other), rounds=2, checkpoints=tmp_path)
    with pytest.raises(ValueError, match="load_data"):
        client_app(ALG, start(), {"x": jnp.zeros(3)})
