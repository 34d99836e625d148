"""Secure aggregation in process, for tests: its federation, and clients that die between two messages."""

import functools

import jax

from fedbraid import fedavg
from fedbraid.flower import InProcessGrid, Secure, client_app
from fedbraid.flower.wire import PLAIN
from flower.small import SPLIT, load
from zoo import loss, start

SECURE = Secure(clients=5)
ALG = fedavg(loss, client_lr=0.05, batch_size=2)
PHASES = {"query.secure_keys": "keys", "query.secure_deal": "deal", "query.secure_open": "open"}


def phase_of(message):
    """(round, exchange, phase, client) of a message of an exchange; None for a greeting."""
    plain, kind = message.content[PLAIN], message.metadata.message_type
    if "tag" not in plain:
        return None
    round_, exchange, _ = str(plain["tag"]).split(".", 2)
    return int(round_), int(exchange), PHASES.get(kind, "upload"), plain["client"]


def dying(deaths):
    """Lose the replies of clients from a phase of an exchange on: {(round, exchange): {client: phase}}."""
    order = ("keys", "deal", "upload", "open")

    def tamper(message, reply):
        found = phase_of(message)
        if found is None:
            return reply
        round_, exchange, phase, client = found
        death = deaths.get((round_, exchange), {}).get(client)
        return None if death is not None and order.index(phase) >= order.index(death) else reply

    return tamper


@functools.cache
def app_of(alg, secure, x64):
    return client_app(alg, start(), load, cache=False, fingerprint="zoo", secure=secure)


def secure_grid(alg, secure=SECURE, **options):
    """Grids of one algorithm share its compiled programs."""
    app = app_of(alg, secure, jax.config.jax_enable_x64)
    return InProcessGrid(app, {100 + i: {"partition-id": i} for i in range(SPLIT.num_clients)}, **options)
