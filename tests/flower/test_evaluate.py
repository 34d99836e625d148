"""Evaluation on the clients' own test data: the same values as in the simulator, from sums and counts only."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from fedbraid import cost, fedavg
from fedbraid.data.federated import FederatedData, Split
from fedbraid.flower import InProcessGrid, Policy, client_app, schema_of, server, server_app
from fedbraid.flower.evaluate import batches_of, sums_program
from fedbraid.flower.wire import PLAIN, array_bytes, serialized_bytes
from fedbraid.simulation import simulate
from flower.small import BUFFER, MESSAGE, SPLIT, bare, crash, deploy, load, plain
from zoo import loss, start

ALG = fedavg(loss, client_lr=0.05, batch_size=2)
QUICK = Policy(deadline=0.05, join=0.5)
SIZES = (4, 1, 0, 20, 7)  # test examples of the five clients: the third has none
METRICS = ("loss", "accuracy")


def metrics(params, batch):
    """A loss, and an accuracy in which the weight of an example is the number of large values in its row."""
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    times = batch["mask"] * (1.0 + jnp.sum(batch["x"] > 0.5, -1))
    return {"loss": (0.5 * residual**2 * batch["mask"], batch["mask"]), "accuracy": (times * (residual > 0), times)}


def held_out():
    rng = np.random.default_rng(7)
    return Split.from_clients([{"x": rng.normal(size=(n, 3)), "y": 3 * rng.normal(size=n)} for n in SIZES])


TEST = held_out()


def load_test(context):
    rows = TEST.client(int(context.node_config["partition-id"]))
    return rows if len(rows["y"]) else None


@functools.cache
def app_of(x64):
    return client_app(ALG, start(), load, metrics=metrics, load_test=load_test, cache=False, fingerprint="ours")


def grid_of(**options):
    app = app_of(jax.config.jax_enable_x64)
    return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(5)}, **options)


def run(grid, *, rounds=3, **options):
    return deploy(ALG, grid, rounds=rounds, **({"metrics": metrics, "policy": QUICK, "fingerprint": "ours"} | options))


def by_hand(params):
    """Sums and counts of every client in NumPy, float64: ``{metric: [2, clients]}``."""
    w, b = np.asarray(params["w"], np.float64), float(params["b"])
    out = {name: np.zeros((2, len(SIZES))) for name in METRICS}
    for i in range(len(SIZES)):
        rows = TEST.client(i)
        residual = rows["x"] @ w + b - rows["y"]
        times = 1 + (rows["x"] > 0.5).sum(-1)
        out["loss"][:, i] = 0.5 * np.sum(residual**2), len(residual)
        out["accuracy"][:, i] = np.sum(times * (residual > 0)), times.sum()
    return out


def pooled(sums, clients):
    return {name: both[0, clients].sum() / both[1, clients].sum() for name, both in sums.items()}


def questions(grid):
    return [m for m in grid.sent if m.metadata.message_type == "evaluate"]


def tampered(client, change):
    def tamper(order, reply):
        asked = order.metadata.message_type == "evaluate" and order.content[PLAIN]["client"] == client
        return change(reply) if asked else reply

    return tamper


def check_against_the_simulator(tolerance):
    grid = grid_of()
    served = run(grid, eval_every=2)
    simulated = simulate(
        ALG, start(), FederatedData(SPLIT, TEST), rounds=3, metrics=metrics, eval_every=2, devices=1
    ).evaluations
    assert set(served.evaluations) == set(simulated)
    for name, column in simulated.items():
        np.testing.assert_allclose(served.evaluations[name], column, rtol=tolerance, atol=tolerance)
    assert served.evaluations["round"].tolist() == [2, 3]  # every second round, and the last
    sums = by_hand(served.params)
    everybody = [0, 1, 3, 4]
    for name in METRICS:
        own = sums[name][0, everybody] / sums[name][1, everybody]
        np.testing.assert_allclose(served.clients[f"test_{name}"][everybody], own, rtol=tolerance)
        assert np.isnan(served.clients[f"test_{name}"][2])
        final = served.evaluations[f"test_{name}"][-1]
        np.testing.assert_allclose(final, pooled(sums, everybody)[name], rtol=tolerance)
        worst = own.max() if name == "loss" else own.min()
        np.testing.assert_allclose(served.evaluations[f"test_{name}_client_worst"][-1], worst, rtol=tolerance)
    return grid, served


def test_it_is_the_simulators_evaluation_in_float64(x64):
    check_against_the_simulator(1e-12)


def test_it_is_the_simulators_evaluation_in_float32_at_the_stated_bytes():
    grid, served = check_against_the_simulator(1e-6)
    assert served.history["evaluate/asked"].tolist() == [0, 5, 5]
    assert served.history["evaluate/tested"].tolist() == [0, 4, 4]
    assert served.history["evaluate/untested"].tolist() == [0, 1, 1]  # counted, but not as a fault
    assert not any(served.counts.values())
    asked = questions(grid)
    answers = [m for m in grid.received if m.metadata.reply_to_message_id in {q.metadata.message_id for q in asked}]
    assert len(asked) == len(answers) == 10
    model, sums = cost(ALG, start(), SPLIT).model, 4 * 2 * len(METRICS)
    for message in asked:
        assert array_bytes(message) == model
        assert model < serialized_bytes(message) <= model + MESSAGE + BUFFER
    for message in answers:
        # only a sum and a count for every metric, the number of examples, and names leave a node
        numbers = sums if message.content[PLAIN]["examples"] else 0
        assert array_bytes(message) == numbers
        assert set(message.content) <= {PLAIN, "arrays"}
        assert set(message.content[PLAIN]) == {"tag", "examples", "layout", "leaves"}
        assert serialized_bytes(message) <= numbers + MESSAGE + BUFFER
    assert served.history["evaluate/bytes_down"].tolist() == [0, 5 * model, 5 * model]
    assert served.history["evaluate/bytes_up"].tolist() == [0, 4 * sums, 4 * sums]
    for way, messages in (("down", asked), ("up", answers)):
        assert served.history[f"evaluate/wire_{way}"].sum() == sum(map(serialized_bytes, messages))


def test_training_is_what_it_is_without():
    with_, without = run(grid_of()), run(grid_of(), metrics=None)
    for a, b in zip(jax.tree.leaves(with_.params), jax.tree.leaves(without.params), strict=True):
        assert np.array_equal(a, b)
    assert without.clients == {}
    assert not any(name.startswith("evaluate/") for name in without.history)


def test_a_sample_of_the_clients_is_drawn_anew_from_the_seed():
    drawn = []
    for _ in range(2):
        grid = grid_of()
        served = run(grid, rounds=4, evaluate_clients=2)
        drawn.append([m.content[PLAIN]["client"] for m in questions(grid)])
        assert served.history["evaluate/asked"].tolist() == [2, 2, 2, 2]
    assert drawn[0] == drawn[1]
    pairs = {tuple(drawn[0][i : i + 2]) for i in range(0, 8, 2)}
    assert len(pairs) > 1
    last = [client for client in drawn[0][-2:] if SIZES[client]]
    sums = by_hand(served.params)
    np.testing.assert_allclose(served.evaluations["test_loss"][-1], pooled(sums, last)["loss"], rtol=1e-6)
    assert np.flatnonzero(~np.isnan(served.clients["test_loss"])).tolist() == last


def numbers(change):
    def changed(reply):
        array = reply.content["arrays"]["float32"]
        found = change(np.frombuffer(array.data, np.float32).copy())
        reply.content["arrays"] = ArrayRecord({"float32": Array("float32", found.shape, array.stype, found.tobytes())})
        return reply

    return changed


def put(index, value):
    def change(found):
        found[index] = value
        return found

    return numbers(change)


FAULTS = {
    "lost": (lambda reply: None, "missing", "no reply in 0.05 s"),
    "nan": (put(0, np.nan), "nonfinite", "not finite"),
    "negative count": (put(1, -5.0), "nonfinite", "not finite"),
    "short": (numbers(lambda found: found[:-1]), "malformed", "['loss'] float32[2]"),
    "long": (numbers(lambda found: np.zeros(9, np.float32)), "malformed", "9 float32"),
    "huge": (numbers(lambda found: np.zeros(1_000_000, np.float32)), "oversized", "4 MB"),
    "other metrics": (
        plain(layout="0", leaves='[["[\'accuracy\']","float32",[2]],["[\'auc\']","float32",[2]]]'),
        "malformed",
        "expected leaf ['loss'] float32[2], got leaf ['auc'] float32[2]",
    ),
    "other tag": (plain(tag="0.evaluate.zzz", examples=0), "malformed", "0.evaluate.zzz"),
    "minus one example": (plain(examples=-1), "malformed", "examples"),
    "nothing": (bare, "malformed", "does not run fedbraid"),
    "crash": (crash, "failed", "ZeroDivisionError"),
}


@pytest.mark.parametrize("fault", list(FAULTS))
def test_a_bad_answer_is_left_out_counted_and_named(fault):
    change, kind, word = FAULTS[fault]
    told = []
    served = run(grid_of(tamper=tampered(3, change)), rounds=1, on_round=told.append)
    assert {name: n for name, n in served.counts.items() if n} == {kind: 1}
    (note,) = told[0].notes
    assert f"client 3 (node 103) left out, {kind}" in note
    assert word in note
    assert served.history["evaluate/tested"].tolist() == [3]
    assert served.history["train/arrived"].tolist() == [5]
    others = pooled(by_hand(served.params), [0, 1, 4])
    for name in METRICS:
        np.testing.assert_allclose(served.evaluations[f"test_{name}"], others[name], rtol=1e-5)
    assert served.history["evaluate/seconds"][0] < 100 * QUICK.deadline  # silent clients do not delay it


def test_test_data_that_does_not_fit_is_a_refusal_with_the_reason():
    def narrow(context):
        return {name: rows[..., :2] if name == "x" else rows for name, rows in TEST.client(0).items()}

    grid = grid_of()
    bad = client_app(ALG, start(), load, metrics=metrics, load_test=narrow, cache=False, fingerprint="ours")
    grid.apps = {100 + i: bad if i == 3 else grid.apps for i in range(5)}
    told = []
    served = run(grid, rounds=1, on_round=told.append)
    assert served.counts["refused"] == 1
    assert "field 'x': one example has shape (2,), the schema asks for (3,)" in told[0].notes[0]


def test_without_any_score_the_run_goes_on_and_says_so():
    grid = grid_of()
    grid.apps = client_app(ALG, start(), load, cache=False, fingerprint="ours")  # no client has test data
    told = []
    served = run(grid, rounds=2, on_round=told.append)
    assert served.history["evaluate/untested"].tolist() == [5, 5]
    assert told[1].notes == ("no client evaluated the model: of 5 clients 5 have no test data",)
    assert list(served.evaluations) == ["round"]
    assert served.clients == {}


def test_late_answers_are_late_and_a_restart_after_the_last_round_keeps_the_scores(tmp_path):
    held = []

    def hold(reply):
        held.append(reply)
        return None

    grid = grid_of(tamper=tampered(0, hold))

    def deliver(told):
        for reply in held:
            grid._replies[reply.metadata.reply_to_message_id] = reply
        held.clear()

    served = run(grid, rounds=2, on_round=deliver, checkpoints=tmp_path)
    assert served.counts["late"] == 1
    assert served.history["late"].tolist() == [0, 1]
    assert np.isnan(served.clients["test_loss"][0])
    again = run(grid_of(), rounds=2, checkpoints=tmp_path)  # all rounds are done; only the folder is written
    for name, values in served.clients.items():
        np.testing.assert_array_equal(again.clients[name], values)
    assert "tested 3/5" in server.Round(2, 2, {n: c[-1] for n, c in served.history.items()}, {}, 1.0, ()).line()


def test_padding_weighs_nothing():
    rows = TEST.client(3)
    sums = sums_program(metrics)
    small, large = (sums(start(), *batches_of(rows, 20, room)) for room in (20, 300))
    for name in METRICS:
        np.testing.assert_allclose(small[name], large[name], rtol=1e-6)


def test_options_that_do_not_fit_together_are_refused():
    options = {"rounds": 1, "population": 5, "schema": schema_of(SPLIT.arrays)}
    for given, word in (
        ({"evaluate_clients": 2}, "give the metrics too"),
        ({"evaluate_clients": 6, "metrics": metrics}, "at most the population of 5"),
        ({"evaluate_clients": 0, "metrics": metrics}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=word):
            server_app(ALG, start(), **options, **given)
    for one in ({"metrics": metrics}, {"load_test": load_test}):
        with pytest.raises(ValueError, match="go together"):
            client_app(ALG, start(), load, **one)
    other = ALG._replace(exchanges=(ALG.exchanges[0]._replace(name="evaluate"),))
    with pytest.raises(ValueError, match="rename it"):
        deploy(other, grid_of(), rounds=1, metrics=metrics)
