"""Secure aggregation in process, over Flower's messages: the same runs as without, and what each side refuses."""

import copy
import json
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, RecordDict
from typer.testing import CliRunner

from fedbraid import cost, transforms
from fedbraid.core import message_shapes
from fedbraid.costs import data_shapes
from fedbraid.experiment.config import ConfigError
from fedbraid.flower import (
    InProcessGrid,
    Policy,
    Secure,
    TooFewError,
    client_app,
    load_federation,
    rounds,
    schema_of,
    serve,
    server_app,
)
from fedbraid.flower.roster import Terms
from fedbraid.flower.secure.messages import check_sums
from fedbraid.flower.wire import PLAIN, array_bytes, is_refusal
from fedbraid.masking.fixed_point import check_leaves
from fedbraid.masking.sizes import summand_of
from fedbraid.transforms.uploads import norm
from flower.masked import ALG, SECURE, dying, phase_of, secure_grid
from flower.small import SPLIT, close, deploy, grid_of, load, seeded
from shared_programs import RAGGED
from told import told
from zoo import ROWS, start

QUICK = Policy(deadline=0.05, join=0.5)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The nodes' markers of answered steps."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


DEATHS = {(0, 0): {2: "upload"}, (1, 0): {0: "deal"}, (2, 0): {4: "open"}, (1, 1): {3: "keys"}}
COUNTED = {key: {c: p for c, p in dead.items() if p != "open"} for key, dead in DEATHS.items()}


@pytest.mark.parametrize(
    "name", ["fedavg", "scaffold", "mime", "fedadam", "transform:elastic", "transform:adaptive_clip"]
)
def test_a_secure_run_is_the_run_without_to_fixed_point_rounding(name, x64):
    """One client dies in each round: before its shares, before its upload, or after it (then its upload counts)."""
    alg = ROWS[name].make(**RAGGED)
    plain = deploy(alg, grid_of(alg, name="zoo", tamper=dying(COUNTED)), rounds=3, fingerprint="zoo", policy=QUICK)
    grid = secure_grid(alg, tamper=dying(DEATHS))
    served = deploy(alg, grid, rounds=3, fingerprint="zoo", policy=QUICK, secure=SECURE)
    # a sum of five uploads is wrong by at most 5 half units; three rounds amplify that by far less than 1000
    close(served.params, plain.params, 1000 * SECURE.codec.unit)
    close(served.server, plain.server, 1000 * SECURE.codec.unit)
    first = alg.exchanges[0].name
    assert served.history[f"{first}/arrived"].tolist() == [4, 4, 5]
    assert served.counts["missing"] == 3 + (len(alg.exchanges) > 1)
    for column in plain.history:
        if column.split("/")[-1] in ("loss", "arrived", "asked"):
            np.testing.assert_allclose(served.history[column], plain.history[column], rtol=1e-6)
    assert served.secure == SECURE.name
    last = [{client: tag.rpartition(".")[0] for client, tag in one.taken.items()} for one in (served, plain)]
    assert last[0] == last[1]  # clients and server agree on which uploads count


@pytest.mark.parametrize("name", ["transform:dp", "transform:quantize"])
def test_noise_of_clients_and_codes_go_through(name, x64, monkeypatch):
    """Noise is added before the masks; codes are decoded by the client, which is said."""
    options = {"where": "clients"} if name == "transform:dp" else {}
    alg = ROWS[name].make(**RAGGED, **options)

    def deployed(grid, **more):
        if name == "transform:dp":
            seeded(monkeypatch, grid)  # the same noise in both runs
        return deploy(alg, grid, rounds=2, fingerprint="zoo", policy=QUICK, **more)

    plain = deployed(grid_of(alg, name="zoo"))
    run = lambda: deployed(secure_grid(alg), secure=SECURE)  # noqa: E731
    if name == "transform:quantize":
        with told("compression saves nothing"):
            served = run()
    else:
        served = run()
    close(served.params, plain.params, 1000 * SECURE.codec.unit)


@pytest.mark.parametrize(("name", "bits"), [("fedavg", 64), ("mime", 32)])
def test_cost_counts_the_bytes_that_are_sent(name, bits):
    alg, secure = ROWS[name].make(**RAGGED), Secure(clients=5, bits=bits, bound=1000.0)
    grid = secure_grid(alg, secure)
    served = deploy(alg, grid, rounds=1, fingerprint="zoo", secure=secure)
    expected = cost(alg, start(), SPLIT, secure=secure)
    for index, exchange in enumerate(expected.exchanges):
        ids = {m.metadata.message_id for m in grid.sent if (at := phase_of(m)) and at[1] == index}
        assert len(ids) == 4 * 5
        down = sum(array_bytes(m) for m in grid.sent if m.metadata.message_id in ids)
        up = sum(array_bytes(m) for m in grid.received if m.metadata.reply_to_message_id in ids)
        assert (down, up) == (5 * exchange.down, 5 * exchange.up)
        row = {column: float(served.history[f"{exchange.name}/{column}"][0]) for column in ("bytes_down", "bytes_up")}
        assert row == {"bytes_down": down, "bytes_up": up}
    bare = cost(alg, start(), SPLIT)
    assert expected.up > bare.up
    assert expected.down > bare.down


def test_the_server_gets_no_single_upload_weight_metric_or_number_of_examples():
    grid = secure_grid(ALG)
    lines = []
    deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=SECURE, say=lines.append)
    assert "at least 4 of 5 clients" in lines[0]
    for message in grid.received:
        assert set(message.content) <= {PLAIN, "arrays"}
        plain = message.content[PLAIN]
        assert set(plain) == {"tag"} or plain["examples"] == 0
    replies = {m.metadata.reply_to_message_id: m for m in grid.received}
    ups = [replies[m.metadata.message_id] for m in grid.sent if (at := phase_of(m)) and at[2] == "upload"]
    words = [np.frombuffer(m.content["arrays"]["uint64"].data, np.uint64) for m in ups]
    assert len(words) == 5
    # one of 2^64 values each: an entry below 2^56 would be one in 256 by chance, a plain one always is
    assert sum(int(w.min() > 2**56 and w.max() < 2**64 - 2**56) for w in words) >= 1
    assert len(np.unique(np.concatenate(words))) == sum(map(len, words))


# --- too few, and repetition


def two_die(phase, attempts=("",)):
    def tamper(message, reply):
        found = phase_of(message)
        if found is None or found[2] != phase or found[3] not in (1, 3):
            return reply
        suffix = str(message.content[PLAIN]["tag"]).partition("-")[2]
        return None if suffix in attempts else reply

    return tamper


def run_once(tamper=None, **policy):
    policy = Policy(deadline=0.05, join=0.5, **policy)
    grid = secure_grid(ALG, tamper=tamper)
    return deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=SECURE, policy=policy, say=lambda line: None)


@pytest.fixture(scope="module")
def whole():
    """The run in which nobody dies."""
    return run_once()


@pytest.mark.parametrize("phase", ["keys", "deal", "upload", "open"])
def test_below_the_threshold_a_round_is_skipped_or_repeated_with_new_keys(phase, whole):
    """Two of five die where four are needed."""
    skipped = run_once(two_die(phase))
    assert skipped.history["skipped"].tolist() == [1]
    assert skipped.taken == {}
    close(skipped.params, start(), 0)
    again = run_once(two_die(phase), too_few="wait")
    close(again.params, whole.params, 0)  # sums of integers: the same bits
    assert {tag.partition("-")[2] for tag in again.taken.values()} == {"1"}


def test_below_the_threshold_a_run_ends_if_its_policy_says_so():
    with pytest.raises(TooFewError, match=r"at least 4 are needed(?s:.*)3 clients helped to unmask"):
        run_once(two_die("open"), too_few="abort")
    with pytest.raises(TooFewError, match=r"patience; at least 4 are needed(?s:.*)3 clients dealt shares"):
        run_once(two_die("deal", ("", "1", "2", "3")), too_few="wait", patience=0.3)


def test_a_client_whose_upload_cannot_be_summed_leaves_itself_out():
    """Not finite, or larger than the bound: the server could not see it in a sum."""

    def wrong(context):
        arrays = load(context)
        if context.node_config["partition-id"] == 3:
            arrays = arrays | {"y": np.full_like(arrays["y"], 1e30)}
        return arrays

    def grid_with(secure):
        app = client_app(ALG, start(), wrong, cache=False, fingerprint="zoo", secure=secure)
        return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(5)})

    plain = deploy(ALG, grid_of(ALG, name="zoo", tamper=dying({(0, 0): {3: "keys"}})), rounds=1, fingerprint="zoo")
    lines = []
    served = deploy(ALG, grid_with(SECURE), rounds=1, fingerprint="zoo", secure=SECURE, say=lines.append)
    close(served.params, plain.params, 1e-6)
    assert served.counts["refused"] == 1
    (note,) = [line for line in lines if "left out" in line]
    assert "client 3" in note
    assert "sends no" in note
    assert "1e+30" not in note
    tight = Secure(clients=5, bound=1e-6)
    policy = QUICK._replace(too_few="abort")
    with pytest.raises(TooFewError, match=r"larger than the bound 1e-06; a larger bound"):
        deploy(ALG, grid_with(tight), rounds=1, fingerprint="zoo", secure=tight, policy=policy)


def with_bytes(reply, data):
    array = reply.content["arrays"]["uint8"]
    arrays = ArrayRecord({"uint8": Array("uint8", (len(data),), array.stype, data)})
    reply.content = RecordDict(dict(reply.content) | {"arrays": arrays})
    return reply


def test_a_client_that_deals_wrong_shares_stops_one_exchange_and_is_refused():
    """The others notice only when its seed cannot be restored: that round is skipped, the next one goes on without."""

    def tamper(message, reply):
        at = phase_of(message)
        size = len(reply.content["arrays"]["uint8"].data) if at and at[2] == "deal" else 0
        return with_bytes(reply, bytes(size)) if size and at[3] == 2 else reply

    lines = []
    grid = secure_grid(ALG, tamper=tamper)
    served = deploy(ALG, grid, rounds=2, fingerprint="zoo", secure=SECURE, policy=QUICK, say=lines.append)
    assert served.history["train/arrived"].tolist() == [0, 4]
    assert served.history["skipped"].tolist() == [1, 0]
    assert served.counts["refused"] == 1
    assert any("node 102 is refused: the secrets of client 2" in line for line in lines)


def test_a_client_that_sends_a_copied_key_is_left_out():
    """The others would refuse a list with a key twice, and no round would ever end."""

    def tamper(message, reply):
        at = phase_of(message)
        if not at or at[2:] != ("keys", 2):
            return reply
        own = reply.content["arrays"]["uint8"].data
        return with_bytes(reply, own[:32] + own[:32])

    grid = secure_grid(ALG, tamper=tamper)
    served = deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=SECURE, policy=QUICK)
    assert served.history["train/arrived"].tolist() == [4]
    assert served.counts["malformed"] == 1


# --- what is refused before a run


@pytest.mark.parametrize("name", ["transform:median", "transform:krum", "transform:norm_bound", "admit_if"])
def test_rules_that_need_single_uploads_are_refused_on_both_sides(name):
    alg = transforms.admit_if(ALG, lambda up: norm(up) < 9.0) if name == "admit_if" else ROWS[name].make()
    schema = {"schema": schema_of(SPLIT.arrays), "rounds": 1, "population": 5, "secure": SECURE}
    with pytest.raises(ValueError, match="only sums"):
        client_app(alg, start(), load, secure=SECURE)
    with pytest.raises(ValueError, match="only sums"):
        server_app(alg, start(), **schema)
    with pytest.raises(ValueError, match="only sums"):
        serve(alg, start(), grid_of(ALG), **schema)
    with pytest.raises(ValueError, match=r"secure\.clients must be the cohort's size 3, got 5"):
        server_app(ALG, start(), **schema, cohort=3)


def test_all_other_algorithms_and_transforms_are_carried():
    """Their summands have a fixed-point code. The refused ones are those that the documentation lists."""
    refused = set()
    for name, row in ROWS.items():
        alg = row.make(batch_size=2)
        try:
            check_sums(alg)
        except ValueError:
            refused.add(name.removeprefix("transform:"))
            continue
        for exchange, message in zip(alg.exchanges, message_shapes(alg, start(), data_shapes(SPLIT)), strict=True):
            check_leaves(summand_of(exchange, message.up, message.metrics).lifted, name)
    assert refused == {"median", "trimmed_mean", "geometric_median", "krum", "multi_krum", "norm_bound", "afl"}


def test_evaluations_on_clients_are_not_masked_which_is_said():
    def metrics(params, batch):
        return {"error": (jnp.abs(batch["x"] @ params["w"] - batch["y"]), batch["mask"])}

    app = client_app(ALG, start(), load, cache=False, metrics=metrics, load_test=load, secure=SECURE)
    grid = InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(5)})
    with told("not evaluations"):
        deploy(ALG, grid, rounds=1, secure=SECURE, metrics=metrics)


# --- a server that does not keep to the protocol


def test_sites_and_servers_with_other_settings_do_not_work_together():
    other = Secure(clients=5, threshold=3)
    for ours, theirs in ((SECURE, None), (None, SECURE), (SECURE, other)):
        lines = []
        grid = secure_grid(ALG, theirs)
        with pytest.raises(TooFewError, match="secure-"):
            deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=ours, policy=QUICK, say=lines.append)


def test_a_site_sends_no_upload_without_masks(monkeypatch):
    """The server has the sites' fingerprint and accepts all of them, but asks for plain uploads."""
    monkeypatch.setattr(rounds, "Terms", lambda **given: Terms(**(given | {"masked": True})))
    grid = secure_grid(ALG)
    lines = []
    name = f"zoo+{SECURE.name}"
    served = deploy(ALG, grid, rounds=1, fingerprint=name, policy=QUICK, say=lines.append)
    assert served.counts["refused"] == 5
    assert any("no upload without masks" in line for line in lines)
    assert not any(array_bytes(m) for m in grid.received)


def test_every_step_is_answered_once_even_to_two_requests_at_the_same_time():
    """A second request after the first, and one that another process gets before the first one is stored."""
    grid = secure_grid(ALG)
    handle, seen = grid._handle, []

    def twice(node, message):
        before = copy.deepcopy(grid.contexts[node])
        reply = handle(node, message)
        if (at := phase_of(message)) and at[2] != "keys" and at[3] == 2:
            again = handle(node, message)
            after = grid.contexts[node]
            grid.contexts[node] = before
            raced = handle(node, message)
            grid.contexts[node] = after
            assert is_refusal(again)
            assert is_refusal(raced)
            seen.append((at[2], str(again.content[PLAIN]["refused"]), str(raced.content[PLAIN]["refused"])))
        return reply

    grid._handle = twice
    deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=SECURE)
    assert [phase for phase, *_ in seen] == ["deal", "upload", "open"]
    assert all("already answered" in raced for *_, raced in seen)
    assert not [key for key in grid.contexts[102].state if "secure" in key]  # the secrets are forgotten


@pytest.mark.parametrize("many", [1, 3])
def test_a_server_cannot_choose_fewer_survivors_than_the_threshold(many):
    """It changes the list in the last message; every client refuses."""
    grid = secure_grid(ALG)
    push = grid.push_messages

    def fewer(messages):
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "query.secure_open":
                array = message.content["arrays"]["int32"]
                array.data = np.frombuffer(array.data, np.int32)[:many].tobytes()
                array.shape = (many,)
        return push(messages)

    grid.push_messages = fewer
    lines = []
    served = deploy(ALG, grid, rounds=1, fingerprint="zoo", secure=SECURE, policy=QUICK, say=lines.append)
    assert served.history["skipped"].tolist() == [1]
    assert any(f"{many} clients sent masked uploads; from 4 to 5 must" in line for line in lines)
    assert jax.tree.all(jax.tree.map(np.array_equal, served.params, start()))


# --- the app's configuration


def cli(*words):
    from fedbraid.cli.app import make_app

    return CliRunner().invoke(make_app(), [str(word) for word in words])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from libraries that Flower uses
def test_an_apps_section_turns_it_on(tmp_path):
    settings = [word for one in ("data.clients=6", "cohort=5", "model.hidden=[4]") for word in ("--set", one)]
    made = cli("deploy", "init", tmp_path / "app", *settings, "--secure")
    assert made.exit_code == 0, made.output
    place = tmp_path / "app" / "federation"
    assert load_federation(place).secure == SECURE
    text = (place / "federation.toml").read_text()
    for section, word in (
        ("threshold = 0.3", "more than half"),
        ("threshold = 0", "at least 2, got 0"),
        ("threshold = false", "at least 2"),
        ("threshold = 'all'", "threshold"),
        ("bits = 8", "bits"),
        ("seed = 1", "unknown key 'seed'"),
    ):
        (place / "federation.toml").write_text(f"{text.partition('[secure]')[0]}[secure]\n{section}\n")
        with pytest.raises(ConfigError, match=word):
            load_federation(place)
    (place / "federation.toml").write_text(f"{text.partition('[secure]')[0]}[secure]\nthreshold = 0.6\n")
    assert load_federation(place).secure == Secure(clients=5, threshold=3)
    (place / "federation.toml").write_text(text.partition("[secure]")[0])
    assert load_federation(place).secure is None
    krum = cli("deploy", "init", tmp_path / "other", *settings, "--set", 'transforms=[{name="krum"}]', "--secure")
    assert krum.exit_code != 0
    assert not (tmp_path / "other").exists()
    shown = [json.loads(cli("cost", *settings, "--json", *more).stdout) for more in ([], ["--secure", "64"])]
    assert shown[1]["secure"] == SECURE.name
    assert shown[0]["secure"] is None
    assert 1.9 < shown[1]["up"] / shown[0]["up"] < 3.5  # 8 bytes instead of 4, keys and shares
