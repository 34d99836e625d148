"""Hostile replies of one node: each costs at most that reply, and the model is that of the other replies.

Real replies are changed at random: types, shapes, sizes, nesting, values, weights, names, replays and broken bytes. The
server must then have exactly the state that it has without this reply. If only ignored parts of the reply were changed,
it may also have the state with the honest reply.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from amount import cases
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from hostile_replies import CHANGES, TEXTS, Old, a_text, a_value

import flower.conftest  # noqa: F401  (Flower without telemetry)
from fedbraid import fedavg, mime, scaffold, simulate
from fedbraid.core import Algorithm, Down, Exchange, Report, Up, finite
from fedbraid.flower import InProcessGrid, Policy, TooFewError, client_app, schema_of
from fedbraid.flower.inprocess import _travel
from fedbraid.flower.pack import RAW
from fedbraid.flower.rounds import MessageRounds
from fedbraid.flower.site import Site
from fedbraid.flower.wire import ARRAYS, PLAIN, one_line
from flower.small import SPLIT, app_of, load
from zoo import loss, start

BAD = 1  # the client of the hostile node
POLICY = Policy(deadline=0.05, join=0.3)
SECONDS = 10.0  # that a case may take
ALGORITHMS = {
    "fedavg": fedavg(loss, client_lr=0.05, batch_size=2),
    "scaffold": scaffold(loss, client_lr=0.05, batch_size=2),
    "mime": mime(loss, client_lr=0.05, batch_size=2),
}

# --- the federation --------------------------------------------------------------------------------------------------


class Hostile(InProcessGrid):
    """A grid on which one reply is changed: ``change(order, reply) -> reply``, or the bytes of its objects are."""

    change: Callable[[Message, Message], Message | None] | None = None
    spoil: Callable[[dict[str, bytes]], None] | None = None

    def __init__(self, app, nodes):
        super().__init__(app, nodes, tamper=self.reply)
        self.broken: dict[str, tuple[str, dict[str, bytes]]] = {}

    def reply(self, order: Message, reply: Message) -> Message | None:
        plain = order.content[PLAIN]
        if self.change is None or reply.metadata.src_node_id != 100 + BAD or not self.matches(plain):
            return reply
        if self.spoil is not None:
            contents = {i: item.deflate() for i, item in get_all_nested_objects(reply).items()}
            self.spoil(contents)
            self.broken[order.metadata.message_id] = (reply.object_id, contents)
            return None
        return self.change(order, reply)

    def matches(self, plain) -> bool:
        return plain.get("exchange") == self.exchange

    exchange = 0

    def pull_messages(self, message_ids):
        found = []
        for id_ in list(message_ids):
            if id_ in self.broken:
                object_id, contents = self.broken.pop(id_)
                found.append(inflate_object_from_contents(object_id, contents))
        return [*found, *super().pull_messages(message_ids)]


class Federation:
    """Five clients, and a server that repeats its first round for every case."""

    def __init__(self, name: str):
        self.alg = ALGORITHMS[name]
        nodes = {100 + i: {"partition-id": i} for i in range(SPLIT.num_clients)}
        self.grid = Hostile(app_of(self.alg, False, name), nodes)
        self.said: list[str] = []
        site = Site(schema_of(SPLIT.arrays), SPLIT.num_clients, policy=POLICY, fingerprint=name)
        self.run = MessageRounds(self.alg, start(), self.grid, site, self.said.append)
        self.run.join()
        self.first = self.run.server
        self.exchanges = len(self.alg.exchanges)
        self.old: Old = []
        self.grid.exchange = -1
        self.honest = self.round()
        self.columns = set(self.run.history[-1])
        self.lost = []
        for exchange in range(self.exchanges):
            self.grid.exchange, self.grid.change = exchange, lambda order, reply: None
            self.lost.append(self.round())
        self.grid.change = self.keep
        self.grid.exchange = 0
        self.round()

    def keep(self, order: Message, reply: Message) -> Message:
        """Keep replies for replays; they are of other attempts, because tags are unique."""
        stale = copy.deepcopy(dict(reply.content))
        stale[PLAIN]["tag"] = "7.0.abcdef"
        self.old.append(RecordDict(stale))
        return reply

    def round(self):
        run = self.run
        run.done, run.server, run.taken, run.history, run.losses = 0, self.first, {}, [], type(run.losses)()
        run.durable, run.durable_first = {}, run.roster.terms.first
        run.roster.refused.clear()
        run.gather(SPLIT.num_clients)
        run.advance(1)
        return run.server


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def sendable(reply: Message) -> bool:
    """Whether Flower can serialise and read the message at all."""
    try:
        _travel(reply)
    except Exception:
        return False
    return True


def byte_flips(rng: np.random.Generator) -> Callable[[dict[str, bytes]], None]:
    def spoil(contents: dict[str, bytes]) -> None:
        name = list(contents)[rng.integers(len(contents))]
        body = bytearray(contents[name])
        for place in rng.integers(0, len(body), size=rng.integers(1, 8)):
            body[place] = rng.integers(256)
        contents[name] = bytes(body[: rng.integers(1, len(body) + 1)]) if rng.integers(2) else bytes(body)

    return spoil


class Case:
    """One hostile reply: drawn when the honest reply is known."""

    def __init__(self, rng: np.random.Generator, old: Old):
        self.rng, self.old, self.name, self.may_count = rng, old, "not sent", True

    def __call__(self, order: Message, reply: Message) -> Message:
        while True:
            chosen = CHANGES[self.rng.integers(len(CHANGES))]
            changed = Message(copy.deepcopy(reply.content), reply_to=order)
            try:
                self.may_count = chosen(self.rng, changed, self.old)
            except (TypeError, ValueError, KeyError):  # Flower's records refuse such a value
                continue
            if sendable(changed):
                self.name = chosen.__name__
                return changed


def check_told(run: MessageRounds) -> str:
    """What is wrong with the report of the last round; empty if nothing."""
    assert run.told is not None
    for note in run.told.notes:
        if f"client {BAD} (node {100 + BAD}) left out" not in note:
            return f"a note that names no node: {note!r}"
        if not note.isprintable() or len(note) > 500:
            return f"a note of {len(note)} characters: {note[:99]!r}"
    return ""


def judged(federation: Federation, case: Case, exchange: int, began: float) -> str:
    """What is wrong after a round with a hostile reply; empty if it held."""
    run, server = federation.run, federation.run.server
    if time.monotonic() - began > SECONDS:
        return "it takes too long"
    if not finite(run.alg.params(server)):
        return "the model is not finite"
    if set(run.history[-1]) != federation.columns:
        return f"other columns: {set(run.history[-1]) ^ federation.columns}"
    unknown = [name for name, value in run.history[-1].items() if not np.isfinite(value)]
    if unknown:
        return f"not finite: {unknown}"
    if same(server, federation.lost[exchange]):
        return check_told(run) if run.told and run.told.notes else "left out without a note"
    if case.may_count and same(server, federation.honest):
        return ""
    return "another model than that of the honest replies"


@pytest.fixture(scope="module")
def federations():
    made: dict[str, Federation] = {}

    def get(name: str) -> Federation:
        if name not in made:
            made[name] = Federation(name)
        return made[name]

    return get


def hostile_rounds(federation: Federation, number: int, seed: int) -> Iterator[tuple[str, str]]:
    """(what was sent, what went wrong) of one hostile reply per round."""
    grid = federation.grid
    for i in range(number):
        rng = np.random.default_rng([seed, i])
        case, grid.exchange = Case(rng, federation.old), int(rng.integers(federation.exchanges))
        grid.change, grid.spoil = case, byte_flips(rng) if rng.integers(8) == 0 else None
        began = time.monotonic()
        try:
            federation.round()
            wrong = judged(federation, case, grid.exchange, began)
        except TooFewError as error:
            wrong = f"too few uploads: {error}"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        yield f"case {i}, {'bytes' if grid.spoil else case.name}", wrong
        grid.change = grid.spoil = None


@pytest.mark.parametrize(("name", "sample", "whole"), [("fedavg", 18, 200), ("scaffold", 6, 60), ("mime", 6, 60)])
def test_a_hostile_reply_costs_that_reply_only(federations, tally, name, sample, whole):
    for sent, wrong in hostile_rounds(federations(name), cases(sample, whole), seed=17):
        tally.case(not wrong, f"{name}, {sent}: {wrong}")
    tally.check()


def test_a_hostile_greeting_costs_that_node_only(federations, tally):
    """The answer to a greeting: the node is refused with one line, or it is accepted and its honest upload counts."""
    federation = federations("fedavg")
    run, grid = federation.run, federation.grid
    for i in range(cases(10, 60)):
        rng = np.random.default_rng([18, i])

        def change(order: Message, reply: Message, rng=rng) -> Message:
            while True:
                changed = Message(copy.deepcopy(reply.content), reply_to=order)
                record = changed.content.config_records[PLAIN]
                names = list(record)
                name = names[rng.integers(len(names))]
                try:
                    record[name] = a_text(rng) if rng.integers(2) and isinstance(record[name], str) else a_value(rng)
                    if rng.integers(6) == 0:
                        del record[name]
                except (TypeError, ValueError):
                    continue
                if sendable(changed):
                    return changed

        grid.matches = lambda plain: "population" in plain
        grid.change = change
        federation.said.clear()
        wrong = ""
        try:
            run.roster.renew(run.roster.terms)
            run.roster.refused.clear()
            run.gather(SPLIT.num_clients)
            refused = dict(run.roster.refused)
            run.done, run.server, run.taken, run.history = 0, federation.first, {}, []
            run.advance(1)
            expected = federation.honest if BAD in run.roster.clients else federation.lost[0]
            if not same(run.server, expected):
                wrong = "another model than that of the honest replies"
            elif refused and not (set(refused) == {100 + BAD} and all(x.isprintable() for x in federation.said)):
                wrong = f"refused: {refused}, said: {federation.said}"
            elif len(run.roster.clients) < SPLIT.num_clients - 1:
                wrong = "honest nodes are missing"
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"
        tally.case(not wrong, f"case {i}: {wrong}")
        del grid.matches
        grid.change = None
        run.roster.renew(run.roster.terms)
        run.roster.refused.clear()
    tally.check()


# --- single attacks --------------------------------------------------------------------------------------------------


def huge(number: float) -> Callable[[Message, Message], Message]:
    """Every number of the upload is ``number``."""

    def change(order: Message, reply: Message) -> Message:
        arrays = reply.content.array_records[ARRAYS]
        sent = {n: np.full(len(a.data) // np.dtype(n).itemsize, number, n) for n, a in arrays.items()}
        made = {n: Array(n, values.shape, RAW, values.tobytes()) for n, values in sent.items()}
        reply.content = RecordDict({**reply.content, ARRAYS: ArrayRecord(made)})
        return reply

    return change


def test_an_upload_that_is_finite_until_it_is_weighted_is_left_out(federations):
    federation = federations("fedavg")
    federation.grid.change, federation.grid.exchange = huge(5e37), 0  # times 9 examples: above the largest float32
    server = federation.round()
    federation.grid.change = None
    assert same(server, federation.lost[0])
    assert federation.run.told is not None
    assert "nonfinite" in federation.run.told.notes[0]


@pytest.mark.parametrize("weights", ["examples", "any"])
def test_a_weight_above_the_stated_examples_is_refused_and_an_infinite_product_always(federations, weights):
    federation = federations("fedavg")

    def change(order: Message, reply: Message) -> Message:
        reply.content.config_records[PLAIN]["weight"] = 3e38
        return reply

    federation.run.policy = POLICY._replace(weights=weights)
    federation.grid.change, federation.grid.exchange = change, 0
    server = federation.round()
    federation.grid.change, federation.run.policy = None, POLICY
    assert same(server, federation.lost[0])
    (note,) = federation.run.told.notes
    assert ("it claims the weight 3e+38, its node stated 9 examples" if weights == "examples" else "not finite") in note
    assert same(federation.round(), federation.honest)  # the node is greeted again and counts again


def test_uploads_that_only_together_are_not_finite_are_left_out():
    """Two hostile nodes: every upload and every weighted upload is finite, their sum is not."""
    alg = fedavg(loss, client_lr=0.05, batch_size=2, weighting="uniform")
    app = client_app(alg, start(), load, cache=False, fingerprint="two")
    change = huge(3e38)
    grid = InProcessGrid(
        app,
        {100 + i: {"partition-id": i} for i in range(5)},
        tamper=lambda o, r: change(o, r) if "round" in o.content[PLAIN] and r.metadata.src_node_id in (100, 103) else r,
    )
    site = Site(schema_of(SPLIT.arrays), 5, policy=POLICY, fingerprint="two")
    run = MessageRounds(alg, start(), grid, site, lambda line: None)
    run.join()
    run.advance(1)
    assert finite(run.alg.params(run.server))
    assert run.history[-1]["train/arrived"] == 3
    assert len(run.told.notes) == 2


def test_an_upload_with_which_the_servers_step_overflows_is_left_out():
    """The sum is finite, the server's step of ten times the mean is not: the largest upload is left out."""
    alg = fedavg(loss, client_lr=0.05, batch_size=2, weighting="uniform", server_lr=100.0)
    app = client_app(alg, start(), load, cache=False, fingerprint="step")
    change = huge(6e37)
    grid = InProcessGrid(
        app,
        {100 + i: {"partition-id": i} for i in range(5)},
        tamper=lambda o, r: change(o, r) if "round" in o.content[PLAIN] and r.metadata.src_node_id == 103 else r,
    )
    site = Site(schema_of(SPLIT.arrays), 5, policy=POLICY, fingerprint="step")
    run = MessageRounds(alg, start(), grid, site, lambda line: None)
    run.join()
    run.advance(1)
    assert finite(run.alg.params(run.server))
    assert run.history[-1]["train/arrived"] == 4
    assert run.history[-1]["train/refused"] == 1
    (note,) = run.told.notes
    assert "client 3 (node 103) left out, nonfinite" in note
    run.policy = run.requests.policy = POLICY._replace(minimum=5, too_few="abort")
    with pytest.raises(TooFewError, match="node 103"):
        run.advance(2)


def test_in_the_simulator_such_an_upload_is_left_out_and_counted():
    def client(down, state, data, key):
        sent = jnp.where(data.size == 9, jnp.float32(1e38), jnp.float32(1.0))
        return Report(Up({"w": jnp.full(3, sent), "b": sent}), data.size.astype(jnp.float32))

    exchange = Exchange(
        "train",
        lambda server: Down(server),
        client,
        lambda server, aggregate, key: jax.tree.map(jnp.add, server, aggregate.up.pseudograd),
    )
    alg = Algorithm(lambda p: p, lambda p: (), (exchange,), lambda s: s)
    result = simulate(alg, jax.tree.map(jnp.float32, start()), SPLIT, rounds=2, devices=1)
    assert result.history["train/refused"].tolist() == [1, 1]
    assert result.history["train/arrived"].tolist() == [4, 4]
    np.testing.assert_allclose(result.params["b"], 2.5, rtol=1e-6)


def test_texts_of_nodes_are_shown_as_one_short_line():
    for text in TEXTS:
        shown = one_line(text * 50)
        assert shown.isprintable()
        assert len(shown) <= 310
