"""Fair objectives: q-FedAvg weighs clients with large losses up, AFL minimizes the loss of the worst mixture.

**q-FedAvg.** T. Li, M. Sanjabi, A. Beirami, V. Smith. Fair Resource Allocation in Federated Learning. ICLR 2020. The
q-FFL objective is sum_k p_k F_k(x)^(q+1) / (q + 1): q = 0 is the usual mean, and a larger q makes losses more equal.
Client k computes its loss F_k at the server's model x and trains from there to x_k (Algorithm 2):

    d_k = L (x - x_k),      Delta_k = F_k^q d_k,      h_k = q F_k^(q-1) |d_k|^2 + L F_k^q,
    x <- x - sum_k p_k Delta_k / sum_k p_k h_k.

L is the inverse of a learning rate that would suit q = 0; by default it is 1 / ``client_lr``. Then q = 0 is FedAvg. h_k
bounds the curvature of F_k^(q+1) / (q + 1), so that one learning rate serves every q. The paper samples clients with
probability p_k and sums without weights; here cohorts are uniform, and the sums have the weights p_k. One local step on
all examples is q-FedSGD (Algorithm 1).

**AFL.** M. Mohri, G. Sivek, A. T. Suresh. Agnostic Federated Learning. ICML 2019. The objective is min over x, max over
lambda in the simplex, of sum_k lambda_k F_k(x): the model is good for every mixture of the N clients. Stochastic-AFL
takes projected gradient steps on both, and returns the mean of the iterates:

    x <- x - lr sum_k lambda_k grad F_k(x),   lambda <- projection onto the simplex of lambda + (lambda_lr / N) F(x).

Every client keeps its own share s_k = N lambda_k, at first 1. A round has two exchanges with the same cohort S. In
``losses`` clients send the number y_k = s_k + lambda_lr F_k, and the server finds the threshold t of the projection of
y onto {s >= 0, sum over S of s = sum over S of the old s}. In ``train`` they get t, send s_k grad F_k, and keep
s_k <- max(y_k - t, 0). With all clients this is the projection onto the simplex. With a cohort the others keep their
shares, and the sum of all stays N. If an upload is lost between the exchanges, its client keeps its share and the sum
is no longer N. So the server divides by the mean of the shares that it got: its step is always along a mixture.

Sends: q-FedAvg the model down, one vector of its size and a number up. AFL twice the model down, a gradient and three
numbers up. Keeps: AFL three numbers per client. The server of AFL needs the numbers y_k one by one.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import local_update
from fedbraid.algorithms._server_only import Gradients, Loss, full_gradients
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Exchange,
    Reducer,
    Report,
    Up,
    check_choice,
    check_number,
)
from fedbraid.local import Batches, Fold, LocalWork, Weighting, rewritten, weight_of

__all__ = ["afl", "q_fedavg"]

PyTree = Any
SMALLEST = 1e-10  # added to losses, as the paper's code does: 0^(q-1) is infinite


def mean_loss(loss: Loss, batch_size: int | None) -> Fold:
    """A pass over a client's examples that gives its mean loss at the server's model, and their number."""

    def start(down: Down, state: Any, key: Any) -> tuple[Any, Any]:
        zero = jnp.zeros((), jnp.result_type(float))
        return zero, zero

    def step(total: tuple, batch: dict, key: Any, down: Down) -> tuple[Any, Any]:
        n = jnp.sum(batch["mask"])
        return total[0] + n * rewritten(loss)(down.params, batch, key).astype(n.dtype), total[1] + n

    def finish(total: tuple, down: Down, state: Any, n: Any) -> Any:
        return total[0] / total[1]

    return Fold(start, step, finish, Batches(batch_size, epochs=1, shuffle=False, augment=False))


# --- q-FedAvg --------------------------------------------------------------------------------------------------------


class FairState(NamedTuple):
    """The server's model."""

    params: PyTree


def q_fedavg(
    loss: Loss,
    *,
    q: Any = 1.0,
    client_lr: Any = 0.1,
    smoothness: Any = None,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """q-FedAvg: FedAvg on the q-FFL objective; q = 0 is FedAvg.

    T. Li, M. Sanjabi, A. Beirami, V. Smith. Fair Resource Allocation in Federated Learning. ICLR 2020.

    ``smoothness`` is L, by default 1 / ``client_lr``. Losses must not be negative.

    >>> alg = q_fedavg(lambda params, batch, key: jnp.sum(params**2), q=5.0, client_lr=0.1)
    """
    check_number("q", q, low=0)
    check_number("client_lr", client_lr, low=0, open_low=True)
    if smoothness is not None:
        check_number("smoothness", smoothness, low=0, open_low=True)
    rate = 1 / client_lr if smoothness is None else smoothness
    train = local_update(loss, gamma=client_lr, message="delta", weighting=weighting, **local)
    work = train.exchanges[0].client
    assert isinstance(work, LocalWork)

    def combine(results: tuple, down: Down, state: Any, key: Any) -> Report:
        here, report = results[0] + SMALLEST, results[1]
        power = here**q
        d = jax.tree.map(lambda moved: rate * moved, report.up.pseudograd)
        squared = sum(jnp.sum(leaf.astype(here.dtype) ** 2) for leaf in jax.tree.leaves(d))
        sent = Up(
            jax.tree.map(lambda leaf: power.astype(leaf.dtype) * leaf, d),
            q * here ** (q - 1) * squared + rate * power,
        )
        return report._replace(up=sent, metrics={**report.metrics, "loss_before": results[0]})

    def receive(server: FairState, aggregate: Aggregate, key: Any) -> FairState:
        total, h = aggregate.up
        return FairState(jax.tree.map(lambda x, p: x - p / h.astype(x.dtype), server.params, total))

    client = LocalWork((mean_loss(loss, local.get("batch_size", 20)), *work.folds), combine)
    exchange = Exchange("train", lambda server: Down(server.params), client, receive)
    return Algorithm(FairState, train.init_client, (exchange,), lambda server: server.params)


# --- AFL -------------------------------------------------------------------------------------------------------------


class MixtureServer(NamedTuple):
    """The iterate, the mean of all iterates, their number, and the threshold of the last projection."""

    params: PyTree
    mean: PyTree
    rounds: Any
    threshold: Any


class MixtureClient(NamedTuple):
    """A client's share s_k = N lambda_k; y_k, its next share before the projection; and the round of y_k."""

    share: Any
    raised: Any
    since: Any


def threshold_of(raised: Any, total: Any, there: Any) -> Any:
    """The t with sum of max(y - t, 0) = ``total`` over the entries that are there: the projection onto a simplex.

    >>> round(float(threshold_of(jnp.array([0.9, 0.5, -1.0]), jnp.array(1.0), jnp.array([True, True, True]))), 3)
    0.2
    """
    y = jnp.sort(jnp.where(there, raised, -jnp.inf))[::-1]
    count = jnp.arange(1, len(y) + 1).astype(y.dtype)
    known = jnp.isfinite(y)
    candidates = (jnp.cumsum(jnp.where(known, y, 0)) - total) / count
    active = known & (y > candidates)  # true for the largest entries, up to the last positive one
    return candidates[jnp.maximum(jnp.sum(active) - 1, 0)]


def _gathered(stacked: Up, weight: Any, count: Any) -> Up:
    """The threshold of the uploads' numbers: y_k is the pseudograd, s_k the aux."""
    there = weight > 0
    total = jnp.sum(jnp.where(there, stacked.aux, 0))
    return Up(threshold_of(stacked.pseudograd, total, there))


def afl(
    loss: Loss,
    *,
    lr: Any = 0.1,
    lambda_lr: Any = 0.1,
    output: Literal["mean", "last"] = "mean",
    batch_size: int | None = 20,
) -> Algorithm:
    """Agnostic federated learning: minimizes the loss of the worst mixture of clients, by Stochastic-AFL.

    M. Mohri, G. Sivek, A. T. Suresh. Agnostic Federated Learning. ICML 2019.

    lr, lambda_lr: the rates of the model and of the mixture weights, which are per client, lambda = 1 / N at first.
        Weights of N clients move by ``lambda_lr`` F_k / N per round.
    output: the model is the "mean" of all iterates, as in the paper, or the "last".
    batch_size: limits the memory of a client's full gradient and does not change it.

    >>> alg = afl(lambda params, batch, key: jnp.sum(params**2), lr=0.1)
    >>> [exchange.name for exchange in alg.exchanges]
    ['losses', 'train']
    """
    check_number("lr", lr, low=0, open_low=True)
    check_number("lambda_lr", lambda_lr, low=0)
    check_choice("output", output, ("mean", "last"))

    def init(params: PyTree) -> MixtureServer:
        zero = jnp.zeros((), jnp.result_type(float))
        return MixtureServer(params, params, zero, zero)

    def init_client(params: PyTree) -> MixtureClient:
        one = jnp.ones((), jnp.result_type(float))
        return MixtureClient(one, one, -one)

    def raise_share(results: tuple, down: Down, state: MixtureClient, key: Any) -> Report:
        raised = state.share + lambda_lr * results[0]
        kept = state._replace(raised=raised, since=down.aux)
        return Report(Up(raised, state.share), weight_of("uniform", 1), kept, {"loss": results[0]})

    def take_threshold(server: MixtureServer, aggregate: Aggregate, key: Any) -> MixtureServer:
        return server._replace(threshold=aggregate.up.pseudograd)

    def descend(results: tuple[Gradients], down: Down, state: MixtureClient, key: Any) -> Report:
        g = jax.tree.map(lambda leaf: state.share.astype(leaf.dtype) * leaf, results[0].at[0])
        threshold, now = down.aux
        # y_k of this round took part in the projection, unless it was lost
        share = jnp.where(state.since == now, jnp.maximum(state.raised - threshold, 0), state.share)
        metrics = {"loss": results[0].loss, "share": share}
        return Report(Up(g, state.share), weight_of("uniform", 1), state._replace(share=share), metrics)

    def receive(server: MixtureServer, aggregate: Aggregate, key: Any) -> MixtureServer:
        g, share = aggregate.up
        safe = jnp.where(share > 0, share, 1)
        x = jax.tree.map(lambda x, g: x - lr * g / safe.astype(x.dtype), server.params, g)
        rounds = server.rounds + 1
        mean = jax.tree.map(lambda m, x: m + (x - m) / rounds.astype(x.dtype), server.mean, x)
        return server._replace(params=x, mean=mean, rounds=rounds)

    losses = Exchange(
        "losses",
        lambda server: Down(server.params, server.rounds),
        LocalWork((mean_loss(loss, batch_size),), raise_share),
        take_threshold,
        reducer=Reducer(lambda up, weight: up, _gathered, kind="gather"),
    )
    train = Exchange(
        "train",
        lambda server: Down(server.params, (server.threshold, server.rounds)),
        LocalWork((full_gradients(loss, lambda down: (down.params,), batch_size),), descend),
        receive,
        cohort="same",
    )
    return Algorithm(
        init, init_client, (losses, train), lambda server: server.mean if output == "mean" else server.params
    )
