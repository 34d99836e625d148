"""MAML: trains a model to have a low loss after a few local steps on a client.

C. Finn, P. Abbeel, S. Levine. Model-agnostic meta-learning for fast adaptation of deep networks. ICML 2017; as a local
update method: Z. Charles, J. Konecny, Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning,
AISTATS 2021, Theorem 2.

In every round client i splits its examples at random into a support and a query set. It runs K local steps on the
support set,

    x_1 = x,   x_{k+1} = x_k - gamma (grad f_i(x_k; support batch k) + alpha (x_k - x)),   X_K(x) = x_{K+1},

and sends the gradient of x -> f_i(X_K(x); query). It differentiates through all K steps, so the gradient contains
Hessians. The server uses it as a gradient. The proximal term (alpha > 0) is in the steps, not in the query loss.

On quadratics with all examples in both sets (``support=1.0``) the message is grad f~_i(x) = J^2 A_i (x - c_i) with J =
(I - gamma A_i)^K: the surrogate gradient for Theta_{2K+1}. With alpha > 0, J = (A_i + alpha I)^-1 (alpha I + A_i R^K),
R = I - gamma (A_i + alpha I). With ``order="first"`` (FOMAML) J is left out once: Theta_{K+1} for alpha = 0.

Sends: the model down, one vector of its size up. Keeps: nothing on the clients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Report,
    Up,
    check_choice,
    check_count,
    check_number,
    is_zero,
)
from fedbraid.local import WEIGHTINGS, ClientData, Weighting, grad, shuffled, value_and_grad, weight_of

__all__ = ["maml"]

Loss = Callable[[Any, dict, Any], Any]


def maml(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    alpha: Any = 0.0,
    steps: int = 3,
    server_lr: Any = 0.5,
    server_opt: optax.GradientTransformation | None = None,
    support: float = 0.5,
    order: Literal["second", "first"] = "second",
    batch_size: int | None = 20,
    weighting: Weighting = "uniform",
) -> Algorithm:
    """MAML with K = ``steps`` local steps of rate gamma = ``client_lr``.

    support: share of a client's examples in the support set, the rest is the query set; 1 uses all examples as both.
    order: "second" is exact; "first" sends the query gradient at X_K(x) itself (FOMAML with a query set).
    batch_size: examples of a support batch, and of the query batch; None takes all of each set.
    server_opt: replaces gradient descent with ``server_lr``.

    >>> alg = maml(lambda params, batch, key: jnp.sum(params**2), client_lr=0.05, steps=2)
    >>> [exchange.name for exchange in alg.exchanges]
    ['train']
    """
    check_number("client_lr", client_lr, low=0)
    check_number("alpha", alpha, low=0)
    check_count("steps", steps)
    check_number("support", support, low=0, high=1, open_low=True)
    check_choice("order", order, ("second", "first"))
    check_choice("weighting", weighting, WEIGHTINGS)
    if batch_size is not None:
        check_count("batch_size", batch_size)
    opt = server_optimizers.sgd(server_lr) if server_opt is None else server_opt

    def client(down: Down, state: Any, data: ClientData, key: Any) -> Report:
        order_key, step_key, query_key = (jax.random.fold_in(key, i) for i in range(3))
        batches, rows = _episode(data, order_key, support, steps, batch_size)
        query = data.rows(*rows, key=query_key)

        def adapt(x: Any) -> Any:
            def local_step(y: Any, this: tuple) -> tuple[Any, None]:
                k, rows = this
                noise = jax.random.fold_in(step_key, k)
                g = grad(loss)(y, data.rows(*rows, key=noise), noise)
                if not is_zero(alpha):
                    g = jax.tree.map(lambda g, y, x: g + alpha * (y - x), g, y, x)
                return jax.tree.map(lambda y, g: y - client_lr * g, y, g), None

            return jax.lax.scan(local_step, x, (jnp.arange(steps), batches))[0]

        if order == "second":
            after, g = value_and_grad(lambda x: loss(adapt(x), query, query_key))(down.params)
        else:
            after, g = value_and_grad(loss)(adapt(down.params), query, query_key)
        return Report(Up(g), weight_of(weighting, data.size), metrics={"loss": after})

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(opt, server, aggregate.up.pseudograd)

    return Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=lambda params: (),
        exchanges=(Exchange("train", lambda server: Down(server.params), client, receive),),
        params=lambda server: server.params,
    )


def _episode(
    data: ClientData, key: Any, support: float, steps: int, batch_size: int | None
) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Rows and masks of every support batch, ``[steps, size]``, and of the query batch, ``[size]``."""
    inner, outer = _divide(data.size, support)
    size = data.cap if batch_size is None else min(batch_size, data.cap)
    place = jnp.arange(size, dtype=jnp.int32)

    batch_number = jnp.arange(steps, dtype=jnp.int32)[:, None] % -(-inner // size)
    position = jnp.concatenate([batch_number * size + place, data.size - outer + place[None]])
    valid = jnp.concatenate([position[:-1] < inner, place[None] < outer])
    if not (support == 1.0 and batch_size is None):  # if all sets hold all examples, their order does not matter
        position = shuffled(key, jnp.where(valid, position, 0), data.size)
    return (position[:-1], valid[:-1]), (position[-1], valid[-1])


def _divide(n: Any, support: float) -> tuple[Any, Any]:
    """Sizes of the support and of the query set; neither is empty, and a client of one example uses it for both."""
    if support == 1.0:
        return n, n
    share = jnp.round(support * n.astype(jnp.result_type(float))).astype(n.dtype)
    inner = jnp.clip(share, 1, jnp.maximum(n - 1, 1))
    return inner, jnp.maximum(n - inner, 1)
