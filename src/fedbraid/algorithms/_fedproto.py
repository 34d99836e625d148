"""FedProto: clients share the mean features of every class, prototypes, instead of models.

Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. FedProto: Federated Prototype Learning across Heterogeneous
Clients. AAAI 2022. Algorithm 1.

Client i keeps its own model. It trains by local steps on

    f_i + lam mean over examples (x, y) of  |R(x) - C_y|^2 / D,

with the D features R(x) before the last layer and the global prototype C_y of the example's class; a class without a
prototype yet adds nothing. (The paper has the distance between the means of the features; the authors' code, as here,
the mean of the distances.) Then it computes its own prototypes, the mean features of its examples of each class
(equation 3), and sends them with the numbers of these examples. The server averages them with these numbers as weights
(equation 6):

    C_j = sum_i n_ij C_ij / sum_i n_ij    over the clients whose uploads arrived; without any, C_j stays.

lam = 0 is local training. ``closest_class`` predicts the class of the nearest prototype, as the paper does. A client's
model is its own one with its own last layer. There is no global model: the one that evaluation scores stays the initial
one, so look at the personal columns.

Sends: a matrix of D numbers per class down and up, and one number per class. Keeps: one model per client.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import Loss
from fedbraid.algorithms.client_optimizers import OptimizerSpec, client_optimizer
from fedbraid.algorithms.local_steps import Walk, walking
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Reducer,
    Report,
    Up,
    check_choice,
    check_count,
    check_number,
    is_zero,
)
from fedbraid.local import (
    MASK,
    WEIGHTINGS,
    Batches,
    ClientData,
    Fold,
    LocalOptions,
    Weighting,
    batches_of,
    masked_mean,
    rewritten,
    value_and_grad,
    weight_of,
)

__all__ = ["ProtoClient", "ProtoServer", "closest_class", "fedproto"]

PyTree = Any


class ProtoServer(NamedTuple):
    """The server: the initial model, the prototypes [classes, D], and which of them are known (0 or 1)."""

    params: PyTree
    prototypes: Any
    known: Any


class ProtoClient(NamedTuple):
    """What a client keeps: its model, and its optimizer's state."""

    params: PyTree
    opt: PyTree


def closest_class(server: ProtoServer, z: Any) -> Any:
    """The class of the nearest known prototype, for features ``[B, D]``.

    >>> server = ProtoServer((), jnp.array([[0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]), jnp.array([1.0, 1.0, 0.0]))
    >>> closest_class(server, jnp.array([[0.2, 0.1], [8.0, 8.0]])).tolist()
    [0, 1]
    """
    distances = jnp.sum((z[:, None] - server.prototypes[None]) ** 2, -1)
    return jnp.argmin(jnp.where(server.known > 0, distances, jnp.inf), -1)


def _lift(up: Up, weight: Any) -> Up:
    counts = up.aux * jnp.asarray(weight, up.aux.dtype)
    return Up(up.pseudograd * counts[:, None].astype(up.pseudograd.dtype), counts)


def _finish(total: Up, weight: Any, count: Any) -> Up:
    safe = jnp.where(total.aux > 0, total.aux, 1)
    return Up(total.pseudograd / safe[:, None].astype(total.pseudograd.dtype), total.aux)


BY_CLASS = Reducer(_lift, _finish)
"""The mean of every class, weighted by the numbers in the aux, and their sums."""


def fedproto(
    loss: Loss,
    features: Callable[[PyTree, dict], Any],
    num_classes: int,
    num_features: int,
    *,
    lam: Any = 1.0,
    client_lr: Any = 0.1,
    weighting: Weighting = "examples",
    client_opt: OptimizerSpec = "sgd",
    client_opt_state: Literal["reset", "kept"] = "reset",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """FedProto: personal models whose features are pulled towards shared prototypes of the classes.

    features: ``(params, batch) -> activations before the last layer``, ``[B, num_features]``.
    lam: weight of the term that pulls features towards the prototypes.
    weighting: weight of a client's prototype of a class in the mean: its number of examples of that class
        ("examples"), or 1 ("uniform").

    >>> alg = fedproto(lambda params, batch, key: jnp.sum(params**2), lambda params, batch: batch["x"] * params, 10, 4)
    """
    if not callable(features):
        raise ValueError(f"features must be a function (params, batch) -> features, got {features!r}")
    check_count("num_classes", num_classes)
    check_count("num_features", num_features)
    check_number("lam", lam, low=0)
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_choice("weighting", weighting, WEIGHTINGS)
    opt = client_optimizer(client_lr, client_opt, client_opt_state)
    batches = batches_of(**local)

    def labels(batch: dict) -> Any:
        return jnp.where(batch[MASK] > 0, batch["y"].astype(jnp.int32), 0)  # padding may have any label

    def rows(params: PyTree, batch: dict) -> Any:
        return features(params, batch).reshape(-1, num_features)

    def direction(y: PyTree, batch: dict, key: Any, down: Down, held: tuple) -> tuple[Any, PyTree]:
        prototypes, known = held

        def total(y: PyTree) -> Any:
            value = loss(y, batch, key)
            if is_zero(lam):
                return value
            classes = labels(batch)
            z = rows(y, batch)
            squared = jnp.mean((z - prototypes[classes].astype(z.dtype)) ** 2, -1) * known[classes].astype(z.dtype)
            return value + lam * masked_mean(squared, batch[MASK]).astype(value.dtype)

        return value_and_grad(total)(y)

    def in_class(params: PyTree, batch: dict) -> tuple[Any, Any]:
        """Of every class, the sum of the features and the number of examples."""
        wide = jnp.result_type(float)
        one = jax.nn.one_hot(labels(batch), num_classes, dtype=wide) * batch[MASK][:, None].astype(wide)
        return one.T @ rows(params, batch).astype(wide), jnp.sum(one, 0)

    def count(sums: tuple, batch: dict, key: Any, params: PyTree) -> tuple:
        return jax.tree.map(jnp.add, sums, rewritten(in_class)(params, batch))

    def nothing(*_: Any) -> tuple[Any, Any]:
        wide = jnp.result_type(float)
        return jnp.zeros((num_classes, num_features), wide), jnp.zeros(num_classes, wide)

    start, step = walking(opt, direction, hold=lambda down, state: down.aux, kept=lambda state: state.opt)
    training = Fold(start, step, lambda walk, down, state, n: walk, batches)
    counting = Fold(
        nothing, count, lambda sums, *_: sums, Batches(batches.size, epochs=1, shuffle=False, augment=False)
    )

    def client(down: Down, state: ProtoClient, data: ClientData, key: Any) -> Report:
        walk: Walk = training.run(Down(state.params, (down.params, down.aux)), state, data, key)
        sums, counts = counting.run(walk.params, (), data, key)
        own = sums / jnp.where(counts > 0, counts, 1)[:, None]
        weights = counts if weighting == "examples" else (counts > 0).astype(counts.dtype)
        return Report(
            Up(down.params - own.astype(down.params.dtype), weights),
            weight_of("uniform", data.size),
            ProtoClient(walk.params, opt.after(walk.opt)),
            {"loss": walk.mean_loss()},
        )

    def receive(server: ProtoServer, aggregate: Aggregate, key: Any) -> ProtoServer:
        move, counts = aggregate.up
        heard = counts > 0
        return server._replace(
            prototypes=jnp.where(heard[:, None], server.prototypes - move, server.prototypes),
            known=jnp.where(heard, jnp.ones_like(server.known), server.known),
        )

    return Algorithm(
        init=lambda params: ProtoServer(params, *nothing()),
        init_client=lambda params: ProtoClient(params, opt.of_client(params)),
        exchanges=(
            Exchange("train", lambda server: Down(server.prototypes, server.known), client, receive, reducer=BY_CLASS),
        ),
        params=lambda server: server.params,
        personal=lambda server, state: state.params,
    )
