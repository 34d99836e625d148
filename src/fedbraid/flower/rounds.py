"""Rounds by messages: the driver of a deployed run.

It shares the loop, the schedule and the checkpoints with simulated runs (:mod:`fedbraid.simulation.loop`). This module
adds the messages: which clients are asked, what they are sent, and which replies are accepted.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedbraid import address
from fedbraid.core import Algorithm
from fedbraid.flower import wire
from fedbraid.flower.aggregate import Aggregator, Summed, Upload
from fedbraid.flower.asking import POLL, Asked, Requests
from fedbraid.flower.buffered import Buffer
from fedbraid.flower.evaluate import Sums, are_sums, models_message, summary, sums_shapes
from fedbraid.flower.identity import (
    Messages,
    data_of,
    fingerprint,
    messages_of,
    schema_to_json,
    shapes_of,
    shapes_of_messages,
)
from fedbraid.flower.mailbox import Mailbox, Outgoing
from fedbraid.flower.pack import Layout, MessageError, check_layout, layout_of, read_records, records
from fedbraid.flower.policy import Policy, TooFewError
from fedbraid.flower.private import PrivateRun
from fedbraid.flower.roster import Roster, Terms
from fedbraid.flower.secure.messages import signed
from fedbraid.flower.secure.rounds import SecureRounds, secure_rounds
from fedbraid.flower.site import Round, Site
from fedbraid.flower.states import INIT
from fedbraid.flower.wire import Answer, Order, Question, Tested, content, read_plain
from fedbraid.limited_json import read_json
from fedbraid.metric import Metric, declared_by, metric_of_column
from fedbraid.simulation import checkpoint
from fedbraid.simulation.asynchrony import Asynchrony, check_asynchrony
from fedbraid.simulation.rounds import check_cohort_size, strong

__all__ = ["MessageRounds"]

PyTree = Any
LOSSES = 3  # a client that loses its state more often is refused, because each time all others may have to restart


class MessageRounds:
    """The server of a deployed run. A checkpoint holds its whole state, except the connected nodes.

    Attributes to set: folder is the folder of checkpoints (None saves none); scorer is (params) -> scores on the
    server; sums is the layout of the clients' answers when they evaluate; testers is how many clients evaluate.
    """

    alg: Algorithm
    policy: Policy
    seed: int
    cohort: int
    say: Callable[[str], None]

    def __init__(self, alg: Algorithm, params: PyTree, grid: Grid, site: Site, say: Callable[[str], None]) -> None:
        params = strong(params)
        self.alg, self.policy, self.seed, self.cohort, self.say = alg, site.policy, site.seed, site.size, say
        check_cohort_size(alg, site.size)
        self.asynchrony: Asynchrony = site.asynchrony
        check_asynchrony(alg, shapes_of(params), data_of(site.schema, site.preprocess), site.asynchrony)
        self.messages: tuple[Messages, ...] = messages_of(alg, params, site.schema, site.preprocess)
        exchanges = range(len(alg.exchanges))
        self.parts: list[Aggregator] = [
            Aggregator(alg, i, rows=site.size, population=site.population) for i in exchanges
        ]
        self.stateful: bool = bool(jax.tree.leaves(jax.eval_shape(alg.init_client, params)))
        name = site.fingerprint
        terms = Terms(
            run=secrets.token_hex(6),
            fingerprint=signed(
                fingerprint(alg, params, site.schema, site.preprocess) if name is None else name, site.secure
            ),
            schema=schema_to_json(site.schema),
            population=site.population,
            exchanges=tuple(exchange.name for exchange in alg.exchanges),
            messages=self.messages,
            params=records(params) if self.stateful else None,
            max_examples=site.policy.max_examples,
            masked=site.secure is not None,
        )
        mailbox = Mailbox(grid, keep=max(4 * site.policy.deadline, 600.0))
        self.roster: Roster = Roster(grid, mailbox, terms, self.base)
        # state that a checkpoint holds, together with the name of the run
        self.done: int = 0
        self.server: PyTree = strong(alg.init(params))
        self.first: PyTree = params  # the parameters from which clients make their first states
        self.losses: Counter[int] = Counter()  # client -> how often it lost its state
        self.taken: dict[int, str] = {}  # client -> tag of its last accepted upload
        self.history: list[dict[str, float]] = []
        self.evaluations: list[dict[str, float]] = []
        self.counts: Counter[str] = Counter()
        self.tested: dict[int, dict[str, list[float]]] = {}  # client -> its sums in the last evaluation
        self.arrivals: list[dict[str, Any]] = []  # of asynchronous steps: their uploads, in order
        # state that a checkpoint does not hold
        self.requests: Requests = Requests(mailbox, self.roster, site.policy, self.counts, say)
        self.secure: SecureRounds | None = None
        if site.secure is not None:
            shapes = shapes_of_messages(alg, params, site.schema, site.preprocess)
            self.secure = secure_rounds(site.secure, alg, shapes, self.requests)
        self.durable: dict[int, str] = {}  # the dict ``taken`` of the last checkpoint
        self.restarted: bool = False  # whether server and clients started anew since the last round
        self.durable_first: str = INIT  # the tag of the clients' first states in the last checkpoint
        self.attempt: str = secrets.token_hex(3)  # makes tags unique: a round repeated after a restart gets other tags
        self.told: Round | None = None  # the report of the last round
        self.private: PrivateRun = PrivateRun(alg)
        self.buffer: Buffer | None = Buffer(self, site.asynchrony) if site.asynchrony.is_asynchronous else None
        self.folder: Path | None = None
        self.scorer: Callable[[PyTree], dict[str, Any]] | None = None
        self.declared: tuple[Metric, ...] = ()  # the metrics that clients evaluate
        self.sums: Layout | None = None
        self.testers: int = 0
        self.rounds = 0  # total number, for reports

    def base(self, client: int) -> str:
        """The tag of the state that the client's next work starts from."""
        return self.taken.get(client, self.roster.terms.first)

    # -- checkpoints

    def settle(self) -> None:
        """Note the clients' states from which a restarted server would continue."""
        self.durable, self.durable_first = dict(self.taken), self.roster.terms.first

    def save(self) -> None:
        """Write a checkpoint of everything that the remaining rounds need."""
        assert self.folder is not None
        plain = {
            "run": self.roster.terms.run,
            "fingerprint": self.roster.terms.fingerprint,
            "taken": self.taken,
            "history": self.history,
            "evaluations": self.evaluations,
            "counts": self.counts,
            "tested": self.tested,
            "first": self.roster.terms.first,
            "losses": self.losses,
            "arrivals": self.arrivals,
        }
        text = np.frombuffer(json.dumps(plain).encode(), np.uint8)
        tree = {"server": checkpoint.pack(self.server), "run": {"json": text}}
        if self.roster.terms.first != INIT:  # else they follow from the configuration
            tree["first"] = checkpoint.pack(self.first)
        checkpoint.save(self.folder, self.done, tree)
        self.settle()

    def restore(self, place: Path) -> None:
        self.done, tree = checkpoint.load(place)
        plain = json.loads(np.asarray(tree["run"]["json"]).tobytes())
        terms = self.roster.terms
        if plain["fingerprint"] != terms.fingerprint:
            raise checkpoint.CheckpointError(
                f"the checkpoint {place} is of an algorithm with the fingerprint {plain['fingerprint']}, this run's is "
                f"{terms.fingerprint}: resume with the configuration of the checkpoint, or choose another folder"
            )
        terms = terms._replace(run=plain["run"], first=plain.get("first", INIT))
        if terms.first != INIT:
            self.first = checkpoint.unpack(self.first, tree["first"], "first parameters")
            terms = terms._replace(params=records(self.first))
        self.roster.terms = terms
        self.server = checkpoint.unpack(self.server, tree["server"] or {}, "server state")
        self.history, self.evaluations = plain["history"], plain["evaluations"]
        self.taken = {int(client): tag for client, tag in plain["taken"].items()}
        self.counts.clear()
        self.counts.update(plain["counts"])
        self.losses = Counter({int(client): n for client, n in plain.get("losses", {}).items()})
        self.settle()
        self.tested = {int(client): sums for client, sums in plain.get("tested", {}).items()}
        self.arrivals = plain.get("arrivals", [])

    def close(self) -> None:
        """Nothing to release."""

    # -- connected clients

    def gather(self, wanted: int) -> None:
        """Wait until ``wanted`` clients are connected, at most for the policy's ``join`` seconds."""
        until, pause = time.monotonic() + self.policy.join, POLL[0]
        while len(self.roster.clients) < wanted and time.monotonic() < until:
            self.roster.greet()
            pause = POLL[0] if self.requests.listen(None) else min(2 * pause, POLL[1])
            self.recover()
            if len(self.roster.clients) < wanted:
                time.sleep(max(0.0, min(pause, until - time.monotonic())))

    def join(self) -> None:
        """Wait for the population. Raises an error if fewer than the policy's minimum are connected."""
        population = self.roster.terms.population
        self.gather(population)
        if (joined := len(self.roster.clients)) < self.policy.minimum:
            reasons = "".join(f"\n  {reason}" for reason in self.roster.refused.values())
            raise TooFewError(
                f"{joined} of {population} clients joined within {self.policy.join:g} s; at least "
                f"{self.policy.minimum} must{reasons}"
            )

    # -- clients that lost their state

    def recover(self) -> bool:
        """Between rounds: handle clients that lost their state, by the policy. True if all start anew.

        In SCAFFOLD c is the mean of the c_i. If one c_i became 0, the server would have to subtract c_i / N from c. But
        it does not know c_i: it keeps only the sum. For any algorithm, ``init`` and ``init_client`` of the current
        model are consistent and need no extra memory. So server and clients start from them. The model stays, and the
        control variates are computed again.
        """
        policy, restart = self.policy.lost_state, []
        if policy == "auto":
            policy = "restart" if any(e.keeps for e in self.alg.exchanges) else "reset"
        for client, node in sorted(self.roster.lost.items()):
            words = f"client {client} (node {node.id}) lost its state {self.base(client)!r}"
            self.losses[client] += 1
            self.counts["lost"] += 1
            if policy == "refuse" or self.losses[client] > LOSSES:
                del self.roster.lost[client]
                self.counts["refused"] += 1
                often = f" ({self.losses[client]} times in this run)" if self.losses[client] > 1 else ""
                why = f"client {client} lost its state {self.base(client)!r}{often}: give nodes a state-dir"
                self.say(self.roster.refuse(node.id, f"{why} that survives a restart"))
            elif policy == "restart":
                restart.append(words)
            else:
                self.taken[client] = self.roster.terms.first
                self.roster.admit(node)
                self.say(f"{words}: it starts anew from its first state, the others keep theirs")
        if restart:
            self.restart()
            model = f"the model of round {self.done}" if self.done else "the first model"
            self.say(f"{', '.join(restart)}: server and clients start anew from {model}, so that they agree again")
        return bool(restart)

    def restart(self) -> None:
        """Reset server and clients as at the start of a run, with the current model. Call it only between rounds."""
        self.first = strong(self.alg.params(self.server))
        self.server = strong(self.alg.init(self.first))
        self.taken, self.restarted = {}, True
        first = f"{INIT}.{self.done}.{secrets.token_hex(3)}"
        self.roster.renew(self.roster.terms._replace(first=first, params=records(self.first)))

    # -- rounds

    def draw(self, round_: int, exchange: int, before: list[int]) -> list[int]:
        """The clients to ask: the simulator's cohort if all are connected, else a cohort of the connected ones."""
        if self.alg.exchanges[exchange].cohort == "same":
            return [client for client in before if client in self.roster.clients]
        here = sorted(self.roster.clients)
        size = min(self.asynchrony.asked(self.cohort), len(here))
        return [here[i] for i in self.private.cohort(self.seed, round_, exchange, len(here), size)] if size else []

    def order(self, exchange: int, round_: int, suffix: str = "") -> Asked:
        """The request for one exchange of one round: how to write its messages and read its uploads.

        suffix: of its tag, for a repetition.
        """
        part, terms, wanted = self.parts[exchange], self.roster.terms, self.messages[exchange].up
        tag = f"{round_}.{exchange}.{self.attempt}{suffix}"
        arrays = records(part.send(self.server))

        def request(client: int, node: int) -> Outgoing:
            order = Order(
                run=terms.run,
                fingerprint=terms.fingerprint,
                schema=terms.schema,
                round=round_,
                exchange=exchange,
                client=client,
                seed=self.seed,
                tag=tag,
                base=self.base(client),
                durable=self.durable.get(client, self.durable_first),
                layout=wanted.digest,
            )
            return Outgoing(node, client, f"train.{wire.action_of(part.name)}", content(order, arrays))

        def read(client: int, message: Message) -> Upload | None:
            answer = read_plain(message, Answer)
            up = _numbers(message, answer, tag, wanted)
            self.check_weight(client, answer.weight)
            return part.upload(up, answer.weight, wire.metrics_in(message, self.messages[exchange].metrics))

        name = f"exchange {part.name!r}"
        return Asked(name, round_, tag, self.policy.minimum, wanted, request, read, {}, {}, [], Counter())

    def check_weight(self, client: int, weight: float) -> None:
        """Refuse a weight above the number of examples that the client's node stated, unless the policy allows it.

        The node is greeted again: it may have more examples than before.
        """
        node = self.roster.clients.get(client)
        if self.policy.weights == "any" or node is None:
            return
        most = max(node.examples, 1)
        if weight > most * (1 + float(np.finfo(np.float32).eps)):  # a number of examples may be rounded
            self.roster.doubt(node.id)
            raise MessageError(f"it claims the weight {weight:g}, its node stated {node.examples} examples")

    def question(self, round_: int, wanted: Layout) -> tuple[Asked, int]:
        """The request to evaluate the model after a round, and the bytes of that model."""
        terms, tag = self.roster.terms, f"{round_}.{wire.EVALUATE}.{self.attempt}"
        model = models_message(self.alg, self.server)
        arrays = records(model)

        def request(client: int, node: int) -> Outgoing:
            asked = Question(terms.run, terms.fingerprint, terms.schema, client, tag, self.base(client), wanted.digest)
            return Outgoing(node, client, wire.EVALUATE, content(asked, arrays))

        def read(client: int, message: Message) -> Sums | None:
            del client
            answer = read_plain(message, Tested)
            if answer.examples < 0:
                raise MessageError(f"field 'examples' should be at least 0, got {answer.examples}")
            if answer.examples == 0:
                _check_tag(answer.tag, tag)
                return {}
            found = _numbers(message, answer, tag, wanted)
            return found if are_sums(found, terms.population) else None

        asked = Asked("the evaluation", round_, tag, 0, wanted, request, read, {}, {}, [], Counter())
        return asked, layout_of(model).nbytes

    def collect(
        self, index: int, round_: int, before: list[int], asked: Asked
    ) -> tuple[list[int], Asked, Summed | None, bool]:
        """Ask a cohort for uploads: (the cohort, the request, the sum if only it is known, whether they are enough)."""
        draw = partial(self.draw, round_, index, before)
        if self.secure is None:
            cohort, how = draw(), self.asynchrony
            most = None if how.name == "none" else self.cohort
            return cohort, asked, None, self.requests.collect(asked, cohort, most=most, limit=how.deadline)
        asked, cohort, summed = self.secure.collect(index, asked, partial(self.order, index, round_), draw)
        return cohort, asked, summed, summed is not None

    def advance(self, until: int) -> None:
        """Complete one round: every exchange in turn. After too few uploads the rest of the round is skipped."""
        if self.buffer is not None:
            self.buffer.advance()
        else:
            self.whole_round()
        if self.folder is None:
            self.settle()

    def recover_between(self) -> bool:
        """As `recover`; if all start anew, wait until those that were connected are connected again."""
        known = len(self.roster.clients) + len(self.roster.lost)
        anew = self.recover()
        if anew:
            self.gather(known)
        return anew

    def begin_row(self) -> dict[str, float]:
        """The first columns of a round."""
        row: dict[str, float] = {"restarted": float(self.restarted)} if self.stateful else {}
        self.restarted = False
        return row

    def whole_round(self) -> None:
        """One round of all exchanges."""
        began, round_, late = time.monotonic(), self.done, self.counts["late"]
        self.recover_between()
        self.roster.greet()
        row = self.begin_row()
        notes: list[str] = []
        cohort: list[int] = []
        enough = True
        for index, part in enumerate(self.parts):
            started = time.monotonic()
            asked, summed = self.order(index, round_), None
            if enough:
                cohort, asked, summed, enough = self.collect(index, round_, cohort, asked)
                if not enough and self.policy.too_few == "abort" and not self.roster.lost:
                    raise TooFewError(
                        self.requests.shortage(asked, f"{self.policy.deadline:g} s, the policy's deadline")
                    )
            taken, means = asked.uploads if enough else {}, {}
            if summed is None:
                step = part.step(self.server, taken, round_, self.seed)
            else:
                step = part.step_sum(self.server, summed, round_, self.seed)
            if step.unfit:
                enough = self.leave_out(asked, step.unfit)
                taken = asked.uploads if enough else {}
            if enough:
                self.server, means = step.server, step.metrics
            self.taken |= dict.fromkeys(taken, asked.tag)
            notes += asked.notes
            size, many = self.messages[index].down.nbytes, len(cohort) if asked.tally["down"] else 0
            columns = means | {"arrived": len(taken)} | self.requests.account(asked, started, many, size, len(taken))
            columns |= self.secure.columns(asked) if self.secure else {}
            columns |= self.private.record(part.name, self.attempt, round_, len(taken))
            row |= {f"{part.name}/{name}": value for name, value in columns.items()}
        row |= self.private.spent()
        row |= {"late": self.counts["late"] - late, "skipped": float(not enough), "seconds": time.monotonic() - began}
        self.history.append(row)
        self.done += 1
        self.told = Round(self.done, self.rounds, row, {}, row["seconds"], tuple(notes))

    def leave_out(self, asked: Asked, clients: list[int]) -> bool:
        """Leave out uploads with which the server's state would not be finite. True if enough others remain."""
        for client in clients:
            del asked.uploads[client]
            asked.tally["nonfinite"] += 1
            node = self.roster.clients.get(client)
            who = f"client {client} (node {node.id})" if node else f"client {client}"
            asked.notes.append(f"{who} left out, nonfinite: with its upload the server's state is not finite")
        enough = len(asked.uploads) >= asked.minimum
        if not enough and self.policy.too_few == "abort":
            raise TooFewError(self.requests.shortage(asked, "the round"))
        return enough

    def ask_for(self, metrics: Callable, site: Site, testers: int) -> None:
        """From now on, evaluations ask ``testers`` clients for sums of these metrics."""
        if any(exchange.name == wire.EVALUATE for exchange in self.alg.exchanges):
            raise ValueError(f"an exchange named {wire.EVALUATE!r} would use the evaluation's columns: rename it")
        model = jax.eval_shape(self.alg.params, self.server)
        shapes = sums_shapes(metrics, model, site.schema, site.preprocess, personal=self.alg.personal is not None)
        self.declared = declared_by(metrics)
        for name in shapes:
            metric_of_column(name, self.declared)  # refuses a metric whose direction is unknown
        self.sums, self.testers = layout_of(shapes), testers

    def evaluate(self) -> None:
        """Evaluate the model on the clients' own test data, on the server, or both, and keep the scores."""
        assert self.told is not None
        scores: dict[str, float] = {}
        if self.sums is not None:
            self.told, scores = self.test(self.told)
        if self.scorer is not None:
            scores |= {name: float(value) for name, value in self.scorer(self.alg.params(self.server)).items()}
        self.evaluations.append({"round": self.done} | scores)
        self.told = self.told._replace(evaluation=scores)

    def test(self, told: Round) -> tuple[Round, dict[str, float]]:
        """Ask clients to evaluate the model on their own test data, and wait at most for the policy's deadline."""
        assert self.sums is not None
        started, late, population = time.monotonic(), self.counts["late"], self.roster.terms.population
        here = sorted(self.roster.clients)
        drawn = min(self.testers, len(here))
        # an address after those of the exchanges, so that testers are drawn independently of the training cohorts
        which = address.cohort(self.seed, self.done - 1, len(self.parts), len(here), drawn) if drawn else []
        asked, size = self.question(self.done - 1, self.sums)
        cohort = [here[i] for i in which]
        self.requests.collect(asked, cohort)
        found = {client: sums for client, sums in asked.uploads.items() if sums}
        self.tested = {
            client: {name: both.tolist() for name, both in found[client].items()} for client in sorted(found)
        }
        columns = {"tested": len(found), "untested": len(asked.uploads) - len(found)}
        columns |= self.requests.account(asked, started, len(cohort), size, len(found))
        row = told.row | {f"{wire.EVALUATE}/{name}": value for name, value in columns.items()}
        row["late"] += self.counts["late"] - late
        row["seconds"] += columns["seconds"]
        self.history[-1] = row
        notes = [*told.notes, *asked.notes]
        if not found:
            notes.append(
                f"no client evaluated the model: of {len(cohort)} clients {columns['untested']} have no test data"
            )
        told = told._replace(row=row, seconds=row["seconds"], notes=tuple(notes))
        return told, summary(self.tested, population, self.declared)


def _numbers(message: Message, answer: Answer | Tested, tag: str, wanted: Layout) -> PyTree:
    """The arrays of an answer. Its tag and its layout are checked first."""
    _check_tag(answer.tag, tag)
    if answer.layout != wanted.digest:
        check_layout(wanted, read_json(answer.leaves or "[]"), "upload")
        raise MessageError(f"its upload has the layout {answer.layout}, expected {wanted.digest}")
    return read_records(wanted, wire.arrays_in(message))


def _check_tag(given: str, asked: str) -> None:
    if given != asked:
        raise MessageError(f"it answers request {given!r}, but the current request is {asked!r}")
