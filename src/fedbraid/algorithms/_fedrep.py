"""FedRep: clients fit their heads to the shared representation, then improve the representation.

L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. Exploiting Shared Representations for Personalized Federated
Learning. ICML 2021.

The model is a representation phi (the body) and a head h_i of every client. In a round, client i (Algorithm 1)

    h_i   <- h_i   - head_lr   grad_h f_i(h_i, phi; batch)       for the head epochs, with the server's phi,
    phi_i <- phi_i - client_lr grad_phi f_i(h_i, phi_i; batch)   for the other epochs, with its new head,

and sends phi_i, which the server averages. So the two parts never move in the same step, unlike in FedPer.

Sends: the body down and up. Keeps: the head on every client.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import Algorithm, Down, Exchange, Report, Up, check_choice, check_count, check_number
from fedbraid.local import (
    LEADING,
    WEIGHTINGS,
    Batches,
    LocalOptions,
    Weighting,
    batches_of,
    local_work,
    value_and_grad,
    weight_of,
)
from fedbraid.transforms.private_leaves import head_of, not_all
from fedbraid.transforms.statistics import keep_own

__all__ = ["fedrep"]


class Walk(NamedTuple):
    """A client's carry: model, step number and sum of its batch losses."""

    params: Any
    k: Any
    loss: Any


def fedrep(
    loss: Loss,
    *,
    head: str | Sequence[str] | Callable | None = None,
    client_lr: Any = 0.1,
    head_lr: Any = None,
    head_epochs: int | None = None,
    head_steps: int | None = None,
    weighting: Weighting = "examples",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedRep: local steps on the head first, then on the body, which is averaged.

    head: the leaves of the head, as patterns of their names (see `fedbraid.transforms.private`); by default those that
        the model declares.
    head_lr: the rate of the head; default: ``client_lr``.
    head_epochs, head_steps: of the head, before the ``epochs`` or ``steps`` of the body, in the same unit. Default: 10
        epochs as in the paper, or as many steps as the body has.

    >>> import jax.numpy as jnp
    >>> alg = fedrep(lambda params, batch, key: jnp.sum(params["w"] ** 2) + params["b"] ** 2, head="b", epochs=1)
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    head_lr = client_lr if head_lr is None else check_number("head_lr", head_lr, low=0)
    check_choice("weighting", weighting, WEIGHTINGS)
    chosen = not_all(head_of(loss, head), "head")
    batches = _two_phases(batches_of(**local), head_epochs, head_steps)
    opt = server_optimizers.sgd(1.0)

    def start(down: Down, state: Any, key: Any) -> Walk:
        return Walk(down.params, jnp.int32(0), jnp.zeros((), jnp.result_type(float)))

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        leading = batch[LEADING]
        batch = {name: field for name, field in batch.items() if name != LEADING}
        value, g = value_and_grad(loss)(walk.params, batch, key)

        def move(y: Any, g: Any, of_head: bool) -> Any:
            turn = leading if of_head else ~leading
            return jnp.where(turn, y - (head_lr if of_head else client_lr) * g, y)

        y = jax.tree.map(move, walk.params, g, chosen(walk.params))
        return Walk(y, walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params)
        return Report(Up(sent), weight_of(weighting, n), (), {"loss": walk.loss / walk.k.astype(walk.loss.dtype)})

    exchange = Exchange(
        "train",
        lambda server: Down(server.params),
        local_work(start, step, finish, batches),
        lambda server, aggregate, key: server_step(opt, server, aggregate.up.pseudograd),
    )
    alg = Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=lambda params: (),
        exchanges=(exchange,),
        params=lambda server: server.params,
    )
    return keep_own(alg, loss, chosen)


def _two_phases(body: Batches, head_epochs: int | None, head_steps: int | None) -> Batches:
    """The batches of the head and of the body in one pass; those of the head lead."""
    unit, other = ("head_epochs", head_steps) if body.steps is None else ("head_steps", head_epochs)
    if other is not None:
        raise ValueError(f"the body counts {unit.removeprefix('head_')}, so the head does too: give {unit}")
    if body.steps is None:
        number = check_count("head_epochs", 10 if head_epochs is None else head_epochs)
        return body.after(number)
    return body.after(check_count("head_steps", body.steps if head_steps is None else head_steps))
