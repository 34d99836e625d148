"""FedBABU: only the body is trained, with a head that never changes; clients fine-tune the head for themselves.

J. Oh, S. Kim, S.-Y. Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification. ICLR 2022.

All clients have the same random head for the whole training. In a round, client i takes local SGD steps on the body
alone, and the server averages the bodies (Algorithm 1). For its own use a client fine-tunes the head on its examples,
with the body fixed (the paper's F = head):

    h_i <- h_i - tune_lr grad_h f_i(W, h_i; batch)     from the first head, at the body W that it last received.

The paper fine-tunes once, after the training. Here a client does so whenever it takes part, so that its own model can
be evaluated in every round: the model is the server's body with the client's last tuned head. To fine-tune the final
model once, see `fedbraid.simulation.adaptation`.

Sends: the body down and up. Keeps: the tuned head on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss, fedavg
from fedbraid.core import Algorithm, Down, Report, check_count, check_number
from fedbraid.local import STATISTICS, Batches, Fold, LocalOptions, Weighting, batches_of, grad
from fedbraid.transforms.clients import with_fold
from fedbraid.transforms.private_leaves import head_of, join, not_all, split
from fedbraid.transforms.statistics import keep_own, statistics_of
from fedbraid.transforms.uploads import extend_client

__all__ = ["fedbabu"]


def fedbabu(
    loss: Loss,
    *,
    head: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    tune_lr: Any = None,
    tune_epochs: int = 1,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedBABU: the body is trained with a fixed head; a client's own model has a fine-tuned head.

    head: the leaves of the head, as patterns of their names (see `fedbraid.transforms.private`); by default those that
        the model declares.
    tune_lr, tune_epochs: fine-tuning of the head; the default rate is ``client_lr``, and 0 epochs tune nothing.

    >>> import jax.numpy as jnp
    >>> alg = fedbabu(lambda params, batch, key: jnp.sum(params["w"] ** 2) + params["b"] ** 2, head="b")
    """
    chosen = not_all(head_of(loss, head), "head")
    tune_lr = client_lr if tune_lr is None else check_number("tune_lr", tune_lr, low=0)
    check_count("tune_epochs", tune_epochs, low=0)

    alg = fedavg(_at_fixed(loss, chosen), client_lr=client_lr, weighting=weighting, **local)
    if tune_epochs:
        batches = batches_of(**local)
        tuning = Batches(batches.size, epochs=tune_epochs, shuffle=batches.shuffle)
        alg = _tuned(alg, _tuning(loss, chosen, tune_lr, tuning), chosen)
    return keep_own(alg, loss, chosen)


def _at_fixed(loss: Loss, chosen: Callable[[Any], Any]) -> Loss:
    """The loss without a gradient with respect to the chosen leaves. What is known about the loss holds for it, too."""

    def through(function: Callable) -> Callable:
        def fixed(params: Any, batch: dict, key: Any) -> Any:
            stop = jax.tree.map(lambda leaf, fix: jax.lax.stop_gradient(leaf) if fix else leaf, params, chosen(params))
            return function(stop, batch, key)

        fixed.__dict__.update(getattr(function, "__dict__", {}))
        return fixed

    found = through(loss)
    if (statistics := statistics_of(loss)) is not None:
        setattr(found, STATISTICS, statistics._replace(update=through(statistics.update)))
    return found


def _tuning(loss: Loss, chosen: Callable[[Any], Any], rate: Any, batches: Batches) -> Fold:
    """Fine-tuning of the head at the model that the client received; its result is the head."""

    def step(params: Any, batch: dict, key: Any, down: Down) -> Any:
        g = grad(loss)(params, batch, key)
        return jax.tree.map(lambda y, g, own: y - rate * g if own else y, params, g, chosen(params))

    return Fold(
        lambda down, state, key: down.params,
        step,
        lambda params, down, state, n: split(params, chosen(params))[1],
        batches,
    )


def _tuned(alg: Algorithm, tuning: Fold, chosen: Callable[[Any], Any]) -> Algorithm:
    """The algorithm whose clients also keep a tuned head, which their own model has."""

    def keep(report: Report, tuned: Any) -> Report:
        return report._replace(state=report.state._replace(own=tuned))

    def personal(server: Any, state: Any) -> Any:
        params = alg.params(server)
        return join(split(params, chosen(params))[0], state.own)

    wide = extend_client(alg, lambda params: jax.tree.map(jnp.asarray, split(params, chosen(params))[1]))
    exchange = wide.exchanges[0]
    exchange = exchange._replace(client=with_fold(exchange.client, tuning, keep))
    return wide._replace(exchanges=(exchange,), personal=personal)
