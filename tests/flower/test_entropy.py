"""Private deployments: noise that cannot be subtracted, secret cohorts, and the epsilon of what was released."""

import json
import logging
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fedbraid import address, simulate
from fedbraid.core import Algorithm, Down, Exchange, Report, Up
from fedbraid.experiment import runfolder
from fedbraid.experiment.config import Config
from fedbraid.flower import InProcessGrid, Policy, client_app, entropy, private, schema_of, serve
from fedbraid.flower.pack import layout_of, read_records
from fedbraid.flower.record import write_run
from fedbraid.flower.wire import PLAIN, arrays_in
from fedbraid.simulation import bernoulli
from fedbraid.transforms import dp, epsilon_of_rows
from flower.small import SPLIT, deploy, grid_of, losing, seeded
from zoo import loss, start

WIDE, CLIENTS, ROUNDS = 4000, 6, 2
Z, BOUND = 1.5, 0.8
VALUES = np.random.default_rng(0).normal(size=(CLIENTS, WIDE)).astype(np.float32)
CLIPPED = VALUES * np.minimum(1, BOUND / np.linalg.norm(VALUES, axis=1))[:, None]
QUIET = {"say": lambda line: None, "policy": Policy(deadline=0.5, join=1.0)}


def telling() -> Algorithm:
    """Every client sends its vector; the server keeps the last mean of the uploads."""

    def client(down, state, data, key):
        return Report(Up({"x": data.everything()["u"][0]}), jnp.float32(1), (), {})

    exchange = Exchange("train", Down, client, lambda server, aggregate, key: aggregate.up.pseudograd)
    return Algorithm(lambda params: params, lambda params: (), (exchange,), lambda server: server)


ZERO = {"x": jnp.zeros(WIDE)}
AT_CLIENTS = dp(telling(), noise=Z, bound=BOUND, where="clients", shares=CLIENTS)
AT_SERVER = dp(telling(), noise=Z, bound=BOUND)
PARTIAL = dp(telling(), noise=Z, bound=BOUND)


def load(context):
    return {"u": VALUES[int(context.node_config["partition-id"])][None]}


APPS = {}


def grid_for(alg, **options):
    app = APPS.setdefault(id(alg), client_app(alg, ZERO, load, cache=False, fingerprint="telling"))
    return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(CLIENTS)}, **options)


def served_by(alg, grid, *, rounds=ROUNDS, seed=3, **options):
    schema = schema_of({"u": VALUES[:1]})
    given = {"schema": schema, "population": CLIENTS, "seed": seed, "fingerprint": "telling"} | QUIET | options
    return serve(alg, ZERO, grid, rounds=rounds, **given)


def uploads(grid):
    """(round, client) -> the upload, as the server reads it."""
    orders = {m.metadata.message_id: m.content[PLAIN] for m in grid.sent if "exchange" in m.content[PLAIN]}
    found = {}
    for reply in grid.received:
        if (order := orders.get(reply.metadata.reply_to_message_id)) is not None:
            up = read_records(layout_of(Up({"x": ZERO["x"]})), arrays_in(reply))
            found[order["round"], order["client"]] = np.asarray(up.pseudograd["x"], float)
    return found


def losing_of(clients):
    """Lose all uploads of some clients."""

    def tamper(order, reply):
        plain = order.content[PLAIN]
        return None if "round" in plain and plain["client"] in clients else reply

    return tamper


def correlation(a, b):
    return abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


# --- the attack: whoever knows the seed makes the noise and subtracts it ---------------------------------------------


def guesses(seed, round_, client):
    """All noise that can be made from what an order contains, by the addresses of the simulator and by older ones."""
    key = address.exchange_key(jax.random.key(seed), round_, 0)
    like = {"x": jax.ShapeDtypeStruct((WIDE,), jnp.float32)}
    work = address.client_key(key, client)
    yield address.client_noise(key, client)(like)["x"]
    yield address.server_noise(key)(like)["x"]
    for first in (work, jax.random.fold_in(work, 1), address.server_key(key)):  # as it was made before
        for change in (first, jax.random.fold_in(first, 0x5EED)):
            (one,) = jax.random.split(jax.random.fold_in(change, 0x6A05), 1)
            yield jax.random.normal(one, (WIDE,), jnp.float32)


@pytest.fixture(scope="module")
def at_clients():
    grid = grid_for(AT_CLIENTS)
    served_by(AT_CLIENTS, grid)
    return grid


def test_the_server_cannot_subtract_a_clients_noise(at_clients):
    """The server knows the seed, all orders and even all other uploads. The seeded noise used to recover u to 1e-7."""
    found = uploads(at_clients)
    assert len(found) == ROUNDS * CLIENTS
    share = Z * BOUND / np.sqrt(CLIENTS)
    for (round_, client), sent in found.items():
        noise = sent - CLIPPED[client]
        assert abs(noise.std() / share - 1) < 6 / np.sqrt(2 * WIDE)
        for guess in guesses(3, round_, client):
            assert correlation(guess, noise) < 6 / np.sqrt(WIDE)
            assert np.linalg.norm(sent - share * np.asarray(guess) - CLIPPED[client]) > 0.9 * np.linalg.norm(noise)


def test_no_client_can_subtract_the_servers_noise():
    """A client knows the seed, and gets the noisy mean of the round before with its order."""
    grid = grid_for(AT_SERVER)
    served = served_by(AT_SERVER, grid, rounds=1)
    noise = np.asarray(served.params["x"], float) - CLIPPED.mean(0)
    deviation = Z * BOUND / CLIENTS
    assert abs(noise.std() / deviation - 1) < 6 / np.sqrt(2 * WIDE)
    for guess in guesses(3, 0, 0):
        assert correlation(guess, noise) < 6 / np.sqrt(WIDE)
    for (_, client), sent in uploads(grid).items():
        np.testing.assert_allclose(sent, CLIPPED[client], rtol=1e-5, atol=1e-7)  # the clients add none


def test_the_attack_is_real(monkeypatch):
    """With noise from the seed, as in a simulation, the same attack recovers uploads: it is able to."""
    grid = grid_for(AT_CLIENTS)
    seeded(monkeypatch, grid)
    served_by(AT_CLIENTS, grid, rounds=1)
    share = Z * BOUND / np.sqrt(CLIENTS)
    for (round_, client), sent in uploads(grid).items():
        errors = [
            np.abs(sent - share * np.asarray(g, float) - CLIPPED[client]).max() for g in guesses(3, round_, client)
        ]
        assert min(errors) < 1e-6


def test_the_noise_is_normal_and_independent_over_sites_rounds_and_runs(at_clients):
    again = grid_for(AT_CLIENTS)
    served_by(AT_CLIENTS, again)  # the same seed
    noises = [sent - CLIPPED[client] for grid in (at_clients, again) for (_, client), sent in uploads(grid).items()]
    assert len(noises) == 2 * ROUNDS * CLIENTS
    between = np.corrcoef(noises)
    np.fill_diagonal(between, 0)
    assert np.abs(between).max() < 6 / np.sqrt(WIDE)
    everything = np.concatenate(noises) / (Z * BOUND / np.sqrt(CLIENTS))
    assert stats.kstest(everything, "norm").pvalue > 1e-6
    within = [abs(np.corrcoef(n[:-1], n[1:])[0, 1]) for n in noises]  # neighbours in one upload
    assert max(within) < 6 / np.sqrt(WIDE)


def test_normal_numbers_of_the_operating_system():
    """Moments up to the fourth, tails, odd and empty shapes, dtypes, and blocks."""
    x = np.asarray(entropy.normals(jax.ShapeDtypeStruct((entropy.BLOCK + 12_345,), np.dtype("float32"))), float)
    n = len(x)
    assert stats.kstest(x, "norm").pvalue > 1e-6
    assert abs(x.mean()) < 6 / np.sqrt(n)
    assert abs(x.var() - 1) < 6 * np.sqrt(2 / n)
    assert abs(np.mean(x**4) - 3) < 6 * np.sqrt(96 / n)
    assert abs(np.mean(np.abs(x) > 3) - 2 * stats.norm.sf(3)) < 6 * np.sqrt(0.0027 / n)
    assert len(np.unique(x)) > 0.97 * n
    drawn = entropy.normals(({"a": jnp.zeros((3, 5)), "b": jnp.zeros(())}, jnp.zeros((0, 2), jnp.bfloat16)))
    assert drawn[0]["a"].shape == (3, 5)
    assert drawn[0]["b"].shape == ()
    assert drawn[1].dtype == jnp.bfloat16
    assert entropy.normals(()) == ()


# --- cohorts ---------------------------------------------------------------------------------------------------------


def asked_by(grid):
    asked = {}
    for message in grid.sent:
        plain = message.content[PLAIN]
        if "round" in plain:
            asked.setdefault(plain["round"], []).append(plain["client"])
    return [tuple(sorted(asked[r])) for r in sorted(asked)]


def test_the_cohorts_of_a_private_run_are_secret():
    runs = []
    for _ in range(2):
        grid = grid_for(PARTIAL)
        served_by(PARTIAL, grid, rounds=8, cohort=3)
        runs.append(asked_by(grid))
    computed = [tuple(address.cohort(3, r, 0, CLIENTS, 3).tolist()) for r in range(8)]
    assert all(len(cohort) == 3 for run in runs for cohort in run)
    assert runs[0] != runs[1]  # they agree by chance with probability 20^-8
    assert computed not in runs
    plain = telling()
    grid = grid_for(plain)
    served_by(plain, grid, rounds=3, cohort=3)
    assert asked_by(grid) == computed[:3]  # without privacy the cohorts are the simulator's


def test_every_cohort_is_equally_likely():
    drawn = [tuple(entropy.cohort(5, 2).tolist()) for _ in range(4000)]
    _, counts = np.unique(drawn, axis=0, return_counts=True)
    assert len(counts) == 10
    assert stats.chisquare(counts).pvalue > 1e-6


# --- nothing of the entropy is kept ----------------------------------------------------------------------------------


def traces(grid, folder):
    """The bytes of all messages, of all nodes' contexts, and of all files of a run."""
    for message in (*grid.sent, *grid.received):
        yield repr(message.content).encode()
        yield from (bytes(a.data) for record in message.content.array_records.values() for a in record.values())
    yield from (repr(context.state).encode() for context in grid.contexts.values())
    yield from (place.read_bytes() for place in folder.rglob("*") if place.is_file())


@pytest.mark.parametrize("alg", [AT_CLIENTS, AT_SERVER], ids=["clients", "server"])
def test_nothing_of_the_entropy_is_sent_logged_or_saved(alg, tmp_path, monkeypatch, caplog, capsys):
    """The random bytes, the normal numbers and the noise made of them: in messages, logs, files and node contexts."""
    given, numbers, urandom, draw = [], [], os.urandom, entropy.normals

    def watched(size):
        given.append(urandom(size))
        return given[-1]

    def normals(shapes):
        drawn = draw(shapes)
        numbers.extend(np.asarray(leaf) for leaf in jax.tree.leaves(drawn))
        return drawn

    monkeypatch.setattr(entropy.os, "urandom", watched)
    monkeypatch.setattr(entropy, "normals", normals)
    caplog.set_level(logging.DEBUG)
    lines, grid = [], grid_for(alg)
    served_by(alg, grid, checkpoints=tmp_path, say=lines.append)
    output = capsys.readouterr()
    words = "\n".join([*lines, caplog.text, output.out, output.err]).encode()
    everything = b"\n".join([*traces(grid, tmp_path), words])
    assert b"train" in everything
    assert uploads(grid)[0, 1].astype(np.float32).tobytes()[:16] in everything  # what is sent is found
    scales = [1, Z * BOUND, Z * BOUND / CLIENTS, Z * BOUND / np.sqrt(CLIENTS)]
    hidden = given + [(n * np.float32(scale)).tobytes() for n in numbers for scale in scales]
    assert len(numbers) == ROUNDS * (CLIENTS if alg is AT_CLIENTS else 1)
    assert sum(map(len, given)) >= 32 * WIDE * len(numbers)
    for secret in hidden:
        for piece in (secret[:16], secret[len(secret) // 2 :][:16]):
            if len(piece) == 16:
                assert piece not in everything
                assert piece.hex().encode() not in everything


# --- epsilon ---------------------------------------------------------------------------------------------------------


def by_dp_accounting(events, delta=1e-5):
    """The smaller epsilon of both accountants."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, pld, rdp

    found = []
    for accountant in (rdp.RdpAccountant(), pld.PLDAccountant(value_discretization_interval=1e-3)):
        for z, q in events:
            accountant.compose(PoissonSampledDpEvent(q, GaussianDpEvent(z)))
        found.append(accountant.get_epsilon(delta))
    return min(found)


def test_deployed_runs_report_the_epsilon_of_dp_accounting(tmp_path):
    """Cohorts of 3 of 6: with probability 1/2 another client takes a client's place, which moves the sum by 2 C."""
    lines = []
    served = served_by(PARTIAL, grid_for(PARTIAL), rounds=3, cohort=3, say=lines.append)
    for i in range(3):
        assert served.history["epsilon"][i] == pytest.approx(by_dp_accounting([(Z / 2, 0.5)] * (i + 1)), rel=2e-3)
    assert f"epsilon {served.history['epsilon'][2]:.3g}" in lines[-1]
    summary = write_run(tmp_path, Config(), served, finished=True)
    assert summary.final["epsilon"] == served.history["epsilon"][2]
    assert runfolder.read_summary(tmp_path).final["epsilon"] == served.history["epsilon"][2]
    assert runfolder.read_metrics(tmp_path)["epsilon"].tolist() == served.history["epsilon"].tolist()
    whole = served_by(AT_SERVER, grid_for(AT_SERVER), rounds=2)
    assert whole.history["epsilon"][-1] == pytest.approx(by_dp_accounting([(Z, 1.0)] * 2), rel=2e-3)


def test_a_lost_upload_costs_noise_and_an_absent_node_costs_amplification():
    """One of six uploads is lost: five shares of the noise. One node is away: 3 of 5 clients are asked."""
    lost = grid_for(AT_CLIENTS, tamper=losing_of({2}))
    served = served_by(AT_CLIENTS, lost, rounds=1)
    assert served.history["epsilon"][0] == pytest.approx(by_dp_accounting([(Z * np.sqrt(5 / 6), 1.0)]), rel=2e-3)
    away = grid_for(PARTIAL)
    away.leave(104)
    served = served_by(PARTIAL, away, rounds=1, cohort=3)
    assert served.history["train/sampling"][0] == 3 / 5
    assert served.history["epsilon"][0] == pytest.approx(by_dp_accounting([(Z / 2, 0.6)]), rel=2e-3)


class CrashError(Exception):
    pass


def test_a_round_that_is_repeated_after_a_crash_costs_twice_and_gets_other_noise(tmp_path):
    """The server dies after round 2, before its checkpoint: the model of round 2 had been sent, or could have been."""
    grid = grid_for(AT_SERVER)
    seen = []

    def crash(params):
        seen.append(np.asarray(params["x"]))
        if len(seen) == 2:
            raise CrashError
        return {}

    with pytest.raises(CrashError):
        served_by(AT_SERVER, grid, rounds=3, checkpoints=tmp_path, evaluate=crash)
    place = tmp_path / private.FILE
    assert len(place.read_text().splitlines()) == 2
    with place.open("a") as file:
        file.write('["abc", 7, {"train/arr')  # a torn line: the server died before it used that sum
    served = served_by(AT_SERVER, grid, rounds=3, checkpoints=tmp_path, evaluate=crash)
    assert served.rounds == 3
    once = epsilon_of_rows(AT_SERVER, [{"train/arrived": 6, "train/sampling": 1.0}] * 3)
    assert served.history["epsilon"][-1] == pytest.approx(by_dp_accounting([(Z, 1.0)] * 4), rel=2e-3)
    assert served.history["epsilon"][-1] > once
    assert correlation(seen[1] - CLIPPED.mean(0), seen[2] - CLIPPED.mean(0)) < 6 / np.sqrt(WIDE)
    assert [json.loads(line)[1] for line in place.read_text().splitlines()] == [0, 1, 1, 2]
    kept = place.read_text()
    place.unlink()
    with pytest.raises(ValueError, match="has 0 rounds"):
        served_by(AT_SERVER, grid, rounds=4, checkpoints=tmp_path)
    place.write_text(kept.replace("[", "<", 1))
    with pytest.raises(ValueError, match=r"line 1 of .* is damaged"):
        served_by(AT_SERVER, grid, rounds=4, checkpoints=tmp_path)


# --- the mean --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantile", [None, 0.5])
def test_lost_uploads_do_not_change_the_divisor_deployed_or_simulated(quantile, monkeypatch, x64):
    """With the simulator's noise, cohorts and losses a deployment is the simulation, and the mean is sum / cohort."""
    from fedbraid import fedavg

    alg = dp(fedavg(loss, client_lr=0.05, batch_size=None), noise=0.3, bound=0.5, quantile=quantile)
    lossy = bernoulli(0.5)
    grid = grid_of(alg, name="private", tamper=losing(lossy))
    seeded(monkeypatch, grid)
    policy = Policy(deadline=0.02, join=1.0)
    served = deploy(alg, grid, rounds=3, cohort=3, fingerprint="private", policy=policy, say=lambda line: None)
    simulated = simulate(alg, start(), SPLIT, rounds=3, cohort=3, arrival=lossy, devices=1)
    assert simulated.history["train/arrived"].tolist() == served.history["train/arrived"].tolist()
    assert 0 < simulated.history["train/arrived"].sum() < 9
    for a, b in zip(jax.tree.leaves(served.server), jax.tree.leaves(simulated.server), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_one_upload_moves_a_private_mean_by_at_most_the_bound_over_the_cohort():
    """Without noise: five uploads of six are lost. The mean is u / 6, not u."""
    alg = dp(telling(), noise=0.0, bound=BOUND)
    one = grid_for(alg, tamper=losing_of(set(range(CLIENTS)) - {4}))
    served = served_by(alg, one, rounds=1)
    np.testing.assert_allclose(np.asarray(served.params["x"]), CLIPPED[4] / CLIENTS, rtol=1e-5, atol=1e-8)
    assert served.history["epsilon"][0] == np.inf
