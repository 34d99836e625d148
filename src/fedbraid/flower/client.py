"""The client side: a ClientApp that runs an algorithm's client functions on a site's own data."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode

import fedbraid
from fedbraid import address
from fedbraid.core import Algorithm, Report
from fedbraid.data.description import Preprocess
from fedbraid.data.federated import Split
from fedbraid.flower import entropy, wire
from fedbraid.flower.compiled import CACHE_DIR, use_cache
from fedbraid.flower.evaluate import (
    Models,
    batches_of,
    models_message,
    own_model_program,
    rows_of,
    sums_program,
)
from fedbraid.flower.identity import (
    Schema,
    check_data,
    fingerprint,
    messages_of,
    schema_from_json,
    schema_to_json,
    shapes_of,
)
from fedbraid.flower.pack import Layout, layout_of, pack, read_records, records, unpack
from fedbraid.flower.programs import client_program, noise_shapes
from fedbraid.flower.rows import padded, room_for
from fedbraid.flower.secure.messages import signed
from fedbraid.flower.secure.site import SecureSite
from fedbraid.flower.states import States, states_of
from fedbraid.flower.wire import (
    Answer,
    Greeting,
    Order,
    Presence,
    Question,
    Refusal,
    Tested,
    content,
    read_plain,
)
from fedbraid.local import ClientData
from fedbraid.lowering import LoweringOptions, captured, lower, notice_unmet
from fedbraid.masking import Secure
from fedbraid.metric import PERSONAL
from fedbraid.simulation.means import check_means

__all__ = ["client_app"]

PyTree = Any
LoadData = Callable[[Context], Mapping[str, Any]]
LoadTest = Callable[[Context], Mapping[str, Any] | None]
NUMBER_KEYS = ("client", "partition-id")  # keys in a node's config for its number in the population
_log = logging.getLogger("flwr")


def client_app(
    alg: Algorithm,
    params: PyTree,
    load_data: LoadData,
    *,
    preprocess: Preprocess | None = None,
    metrics: Callable | None = None,
    load_test: LoadTest | None = None,
    fingerprint: str | None = None,
    cache: bool = True,
    secure: Secure | None = None,
    engine: LoweringOptions | None = None,
) -> ClientApp:
    """The ClientApp of an algorithm: the same object that :func:`fedbraid.simulate` runs.

    Args:
        alg: the algorithm. Each of its exchanges is an action, ``train.<name>``.
        params: the model's parameters, or their shapes. The values come from the server.
        load_data: (context) -> the site's own arrays, with one row per example. They must fit the server's schema.
        preprocess: from a batch of these arrays to the batch that the loss reads (``FederatedData.preprocess``). It
            must be the same on the server.
        metrics: ``(params, batch) -> {name: (sums, weights)}``, as :func:`fedbraid.simulate` takes them. The node
            computes them on its own test data when the server asks, and answers with sums and counts only.
        load_test: (context) -> the site's own test arrays, with the same fields; None if it has none.
        fingerprint: your own name for what clients compute, the same on the server; by default a digest of the client
            programs.
        cache: keep compiled programs on the node's disk (``cache-dir`` of its config, else in Flower's folder).
        secure: send only masked uploads (secure aggregation), with these settings; the same on the server.
        engine: how the client's programs are made fast, such as ``LoweringOptions(microbatch=4)`` for a device with
            little memory. Sites may have different ones. An :class:`fedbraid.EngineOptions` will do, too: its plan,
            devices and places of data are for simulations. Default: the default options.

    The node's config may contain the site's number in the population (``client`` or ``partition-id``; else the server
    numbers the nodes) and a folder for its state (``state-dir``).

    >>> import jax.numpy as jnp, numpy as np
    >>> from fedbraid import fedavg
    >>> alg = fedavg(lambda p, batch, key: jnp.sum((p - batch["x"].mean(0)) ** 2))
    >>> app = client_app(alg, jnp.zeros(3), lambda context: {"x": np.ones((5, 3), np.float32)})
    """
    if not callable(load_data):
        raise ValueError(f"load_data must be a function of the node's context, got {load_data!r}")
    if (metrics is None) != (load_test is None):
        raise ValueError("metrics and load_test go together: give both or none; metrics are evaluated on the test data")
    how = LoweringOptions() if engine is None else engine
    site = _Site(alg, params, load_data, preprocess, fingerprint, cache, how)
    if metrics is not None and load_test is not None:
        site.load_test, site.sums = load_test, captured.jit(sums_program(metrics, preprocess, how))
    app = ClientApp()
    app.query(wire.HELLO)(site.guard(site.hello))
    if secure is not None:
        site.secure = SecureSite(secure, alg)
        for action, handler in site.secure.actions().items():
            app.query(action)(site.guard(handler))
    app.evaluate()(site.guard(site.test))
    for index, exchange in enumerate(alg.exchanges):
        app.train(wire.action_of(exchange.name))(site.guard(partial(site.work, index)))
    return app


class StateLostError(ValueError):
    """This node does not hold the state that a client should start from."""


class _Site:
    """The state of a node's process: the algorithm and how to load data. All else comes with each message."""

    def __init__(
        self,
        alg: Algorithm,
        params: PyTree,
        load_data: LoadData,
        preprocess: Preprocess | None,
        name: str | None,
        cache: bool,
        how: LoweringOptions,
    ) -> None:
        self.alg, self.load_data, self.name, self.cache, self.how = alg, load_data, name, cache, how
        self.preprocess = preprocess
        self.load_test: LoadTest = lambda context: None
        self.sums: Callable = lambda *given: {}
        self.secure: SecureSite | None = None
        self.params = shapes_of(params)
        self.lowered = lower(alg, how).exchanges
        self.programs = [captured.jit(client_program(exchange)) for exchange in self.lowered]
        self.prints: dict[str, str] = {}
        self.layouts: dict[str, str] = {}

    @cached_property
    def state_layout(self) -> Layout:
        return layout_of(jax.eval_shape(self.alg.init_client, self.params))

    @cached_property
    def down_layouts(self) -> list[Layout]:
        server = jax.eval_shape(self.alg.init, self.params)
        return [layout_of(jax.eval_shape(exchange.send, server)) for exchange in self.alg.exchanges]

    @cached_property
    def models_layout(self) -> Layout:
        server = jax.eval_shape(self.alg.init, self.params)
        return layout_of(jax.eval_shape(lambda server: models_message(self.alg, server), server))

    @cached_property
    def own_model(self) -> Callable[[PyTree, PyTree], PyTree]:
        """(the leaves of the server's state in a question, client state) -> the client's own model."""
        return jax.jit(own_model_program(self.alg, self.params))

    def guard(self, handle: Callable[[Message, Context], Message]) -> Callable[[Message, Context], Message]:
        """Answer a ValueError (a mistake of the user or of the server) with its reason. Other errors propagate."""

        def handler(message: Message, context: Context) -> Message:
            if self.cache:
                use_cache(context.node_config.get(CACHE_DIR))  # pyright: ignore[reportArgumentType]
            try:
                return handle(message, context)
            except ValueError as error:
                _log.error("refused: %s", error)
                greet = isinstance(error, StateLostError)
                return Message(content(Refusal(str(error), greet)), reply_to=message)
            except OSError as error:  # a full disk or a missing file; the server counts the reply as failed
                reason = f"{type(error).__name__}: {error}"
                _log.error("failed: %s", reason)
                return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)

        return handler

    def data(self, context: Context, schema: Schema) -> tuple[ClientData, int]:
        arrays = self.load_data(context)
        rows = check_data(schema, arrays)
        return client_data(arrays, rows, self.preprocess), rows

    def check_engine(self, data: ClientData, rows: int) -> None:
        """Refuse microbatches for a loss that is no mean over examples; say which options have no effect."""
        arrays = {name: array[:rows] for name, array in data.arrays.items()}
        split = Split(arrays, np.array([0, rows]), preprocess=self.preprocess)
        check_means(self.alg, self.params, split, self.how)
        notice_unmet(self.alg, self.params, data, self.how)

    def fingerprint(self, schema: Schema) -> str:
        return signed(self.program(schema), self.secure.secure if self.secure else None)

    def program(self, schema: Schema) -> str:
        """The fingerprint of the client programs."""
        if self.name is not None:
            return self.name
        text = schema_to_json(schema)
        if text not in self.prints:
            self.prints[text] = fingerprint(self.alg, self.params, schema, self.preprocess)
        return self.prints[text]

    def layouts_for(self, text: str) -> str:
        if text not in self.layouts:
            messages = messages_of(self.alg, self.params, schema_from_json(text), self.preprocess)
            pairs = [[json.loads(m.down.to_json()), json.loads(m.up.to_json())] for m in messages]
            self.layouts[text] = json.dumps(pairs)
        return self.layouts[text]

    def fingerprint_for(self, context: Context, run: str, text: str) -> str:
        """This node's fingerprint. It is cached in the context, because computing it traces the programs."""
        key = f"fedbraid/{run}/fingerprint"
        known = context.state.config_records.get(key)
        if known is not None and known.get("schema") == text:
            return str(known["fingerprint"])
        found = self.fingerprint(schema_from_json(text))
        context.state[key] = ConfigRecord({"schema": text, "fingerprint": found})
        return found

    def check_fingerprint(self, context: Context, run: str, text: str, theirs: str) -> str:
        mine = self.fingerprint_for(context, run, text)
        if mine != theirs:
            raise ValueError(
                f"this node's algorithm has the fingerprint {mine}, the server's has {theirs}: both must run the same "
                f"algorithm, options, model and versions (here {_versions()})"
            )
        return mine

    def hello(self, message: Message, context: Context) -> Message:
        """Before the first round: check that this site's data fits and that its programs equal the server's."""
        greeting = read_plain(message, Greeting)
        schema = schema_from_json(greeting.schema)
        number = _number(context, greeting)
        data, rows = self.data(context, schema)
        self.check_engine(data, rows)
        mine = self.check_fingerprint(context, greeting.run, greeting.schema, greeting.fingerprint)
        held: list[str] = []
        if self.state_layout.leaves:
            states = states_of(context, greeting.run, number)
            if greeting.first not in states.held():
                # Made from the server's parameters, so that all clients have the same bits. Made even if the node holds
                # other states, because only the server knows which state it needs.
                params = read_records(layout_of(self.params), wire.arrays_in(message))
                states.write(greeting.first, pack(jax.jit(self.alg.init_client)(params)))
            held = states.held()
        presence = Presence(
            client=number,
            examples=0 if self.secure else rows,  # it would tell the weight, which is masked
            fingerprint=mine,
            layouts=self.layouts_for(greeting.schema),
            held=json.dumps(held),
            versions=_versions(),
        )
        return Message(content(presence), reply_to=message)

    def work(self, index: int, message: Message, context: Context) -> Message:
        """One exchange: send the upload, and keep the old and the new state until the server says which one counts."""
        order = read_plain(message, Order)
        if order.exchange != index:
            raise ValueError(f"the order is for exchange {order.exchange}, but its action is that of exchange {index}")
        self.check_fingerprint(context, order.run, order.schema, order.fingerprint)
        held = self.secure.check(message, context, order) if self.secure else None
        down = read_records(self.down_layouts[index], wire.arrays_in(message))
        data, _ = self.data(context, schema_from_json(order.schema))
        states = states_of(context, order.run, order.client) if self.state_layout.leaves else None
        state = self.state(states, order)
        seed_key = jax.random.key(order.seed)
        key = address.exchange_key(seed_key, order.round, order.exchange)
        data = replace(data, key=address.rows_key(seed_key, order.client))
        given = down, state, data, address.client_key(key, order.client)
        noise = entropy.normals(noise_shapes(self.lowered[index], *given))  # the server must not be able to compute it
        report: Report = self.programs[index](*given, noise)
        if states is not None:
            states.write(order.tag, pack(report.state))
            states.keep({order.durable, order.base, order.tag})
        if self.secure and held:
            return self.secure.answer(message, context, order, held, report)
        answer = Answer(order.tag, float(report.weight), *_layout_for(report.up, order.layout))
        metrics = {name: float(value) for name, value in report.metrics.items()}
        return Message(content(answer, records(report.up), metrics), reply_to=message)

    def test(self, message: Message, context: Context) -> Message:
        """Test the server's model, and this client's own, on this site's test data. Only sums and counts are sent."""
        asked = read_plain(message, Question)
        self.check_fingerprint(context, asked.run, asked.schema, asked.fingerprint)
        arrays = self.load_test(context)
        rows = rows_of(schema_from_json(asked.schema), arrays)
        if arrays is None or not rows:
            return Message(content(Tested(asked.tag, 0, "")), reply_to=message)
        models = Models(*read_records(self.models_layout, wire.arrays_in(message)))
        batches = batches_of(arrays, rows, room_for(rows))
        sums = self.sums(models.params, *batches)
        if self.alg.personal is not None:
            states = states_of(context, asked.run, asked.client) if self.state_layout.leaves else None
            own = self.own_model(models.of_server, self.state(states, asked))
            sums |= {PERSONAL + name: both for name, both in self.sums(own, *batches).items()}
        answer = Tested(asked.tag, rows, *_layout_for(sums, asked.layout))
        return Message(content(answer, records(sums)), reply_to=message)

    def state(self, states: States | None, order: Order | Question) -> PyTree:
        if states is None:
            return unpack(self.state_layout, {})
        buffers = states.read(order.base)
        if buffers is None:
            raise StateLostError(
                f"client {order.client} no longer holds its state {order.base!r} (it holds {states.held()}): a node "
                "keeps its states over a restart only if its config names a folder for them, state-dir"
            )
        return unpack(self.state_layout, buffers)


def client_data(arrays: Mapping[str, Any], rows: int, preprocess: Preprocess | None = None) -> ClientData:
    """A site's arrays in the form that client functions take."""
    room = room_for(rows)
    return ClientData(padded(arrays, rows, room), np.int32(0), np.int32(rows), room, preprocess)


def _layout_for(numbers: PyTree, expected: str) -> tuple[str, str]:
    """The digest of a message's layout, and the layout itself only if it differs from the expected one."""
    layout = layout_of(numbers)
    return layout.digest, "" if layout.digest == expected else layout.to_json()


def _versions() -> str:
    return f"fedbraid {fedbraid.__version__}, jax {jax.__version__}"


def _number(context: Context, greeting: Greeting) -> int:
    """The site's number in the population, from its config, else from the server's greeting."""
    for key in NUMBER_KEYS:
        if key in context.node_config:
            number = context.node_config[key]
            if type(number) is not int or not 0 <= number < greeting.population:
                raise ValueError(
                    f"the node's config says {key}={number!r}; clients are numbered 0 to {greeting.population - 1}"
                )
            return number
    return greeting.client
