"""PFNM: neurons of the clients' networks are matched before they are averaged, in one round of communication.

M. Yurochkin, M. Agarwal, S. Ghosh, K. Greenewald, N. Hoang, Y. Khazaeni. Bayesian Nonparametric Federated Learning of
Neural Networks. ICML 2019.

Permuting the neurons of a hidden layer does not change a network's function, so networks that were trained apart cannot
be averaged weight by weight. PFNM (probabilistic federated neural matching) first finds which neurons belong together.
Client j has L_j neurons, as vectors v_jl. The model behind them: global neurons theta_i are draws from a normal
distribution N(0, sigma0^2 I), as many as a Beta process of mass gamma0 needs. Each client has a random subset of them
(a Bernoulli process), and sees each with noise: v_jl is drawn from N(theta_i, sigma^2 I). B^j_il = 1 says that neuron l
of client j is global neuron i.

Given all B, the most probable global neurons are (Corollary 1)

    theta_i = sum_{j,l} B^j_il v_jl / sigma^2  /  p_i,    p_i = 1 / sigma0^2 + m_i / sigma^2,

with m_i clients that have neuron i. Given the B of all clients but j, the most probable B^j is an assignment problem
(Proposition 2). Let s_i = sum v / sigma^2, p_i and m_i be those of the other clients. Neuron l of client j gains

    |s_i + v_jl / sigma^2|^2 / (p_i + 1 / sigma^2) - |s_i|^2 / p_i + 2 log(m_i / (J - m_i))   as i, if others have i,
    the same with s_i = 0 and m_i = 0, + 2 log(gamma0 / J) - 2 log k                          as the k-th new neuron.

The Hungarian method finds the B^j with the largest total gain. Clients are visited in turn, at first to add them one by
one, then again in up to ``sweeps`` sweeps, which end when a sweep changes nothing. A visit of a sweep is undone if it
would decrease the posterior of all assignments, sum_i |s_i|^2 / p_i + 2 log(gamma0 (J - m_i)! (m_i - 1)!) up to a
constant. The paper has no such rule. A decrease is possible (and rare) because of the term 2 log k: it belongs to the
probability of the number of a client's new neurons, and not to that posterior.

In a network of one hidden layer, v_jl has the neuron's weights from the inputs, its bias and its weights to the
outputs. Deeper networks are matched from the top. There v_jl has the bias and the weights to the global neurons of the
next layer, which is matched already (0 to those that the client does not have). In the first layer it also has the
weights from the inputs. Output neurons are the same for all clients, so their biases need no matching.

Array shapes are static here. So the server's network, the model of the run, limits the global width. Clients train
narrower networks, of ``width`` neurons per hidden layer. A neuron that is not used has only zeros, in and out: it gets
no gradient and stays so. Clients are visited in the order of the norms of their networks, so the result does not depend
on the order of the cohort.

The paper's method ends after one round. In later rounds here, clients start from the matched network, with all of its
neurons, and the results are matched again. (The paper's clients restart from their own matched neurons only.)

Sends: the model down, one vector of its size up. Keeps: nothing on the clients. The server needs each upload, not only
their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax

from fedbraid.algorithms._local_update import local_update
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import (
    Aggregate,
    Algorithm,
    Down,
    Logged,
    Reducer,
    StructureError,
    Up,
    check_choice,
    check_count,
    check_number,
)
from fedbraid.local import LocalWork

__all__ = ["Matching", "match", "match_networks", "pfnm", "posterior_mean"]

Loss = Callable[[Any, dict, Any], Any]
Layers = Sequence[dict[str, Any]]  # [{"w": [in, out], "b": [out]}, ...]


class MatchedState(NamedTuple):
    """The server's network, and whether it was matched already."""

    params: Any
    matched: Any


class Matching(NamedTuple):
    """The constants of the model, and the number of sweeps."""

    sigma_squared: Any
    sigma0_squared: Any
    gamma0: Any
    sweeps: int


def pfnm(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    width: int | Sequence[int] | None = None,
    start: Literal["own", "common"] = "own",
    sigma_squared: Any = 0.3,
    sigma0_squared: Any = 10.0,
    gamma0: Any = 1.0,
    sweeps: int = 3,
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """PFNM: one round in which clients train networks of their own, and the server matches their neurons.

    width: neurons of the clients' networks, per hidden layer; by default half of the model's. The model's own widths
        limit the width of the global network.
    start: clients begin at their "own" random networks, or at the first ``width`` neurons of the "common" model.
    sigma_squared, sigma0_squared: variance of clients' neurons about the global ones, and of those about 0. Smaller
        values of the first give more global neurons.
    gamma0: mass of the Beta process; larger values give more global neurons.
    sweeps: visits to each client after the first.

    >>> alg = pfnm(lambda params, batch, key: 0.0, width=32, epochs=10)
    >>> alg.exchanges[0].reducer.kind
    'gather'
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    check_choice("start", start, ("own", "common"))
    for name, value in (("sigma_squared", sigma_squared), ("sigma0_squared", sigma0_squared), ("gamma0", gamma0)):
        check_number(name, value, low=0, open_low=True)
    check_count("sweeps", sweeps, low=0)
    for one in () if width is None else (width,) if isinstance(width, int) else tuple(width):
        check_count("width", one)
    matching = Matching(sigma_squared, sigma0_squared, gamma0, sweeps)
    train = local_update(loss, gamma=client_lr, message="delta", weighting="uniform", server_lr=1.0, **local)
    work = train.exchanges[0].client
    assert isinstance(work, LocalWork)
    fold = work.folds[0]

    def init(params: Any) -> MatchedState:
        check_layers(params)
        local_widths(width, params)
        return MatchedState(params, jnp.array(False))

    def begin(down: Down, state: Any, key: Any) -> Any:
        widths = local_widths(width, down.params)
        drawn = narrow(down.params if start == "common" else random_network(down.params, widths, key), widths)
        first = jax.tree.map(lambda own, sent: jnp.where(down.aux, sent, own), drawn, down.params)
        return fold.start(Down(first, down.aux), state, key)

    def end(carry: Any, down: Down, state: Any, n: Any) -> Any:
        # minus the network: the server moves along -pseudograd, here from 0
        return fold.finish(carry, Down(jax.tree.map(jnp.zeros_like, down.params)), state, n)

    def matched(stacked: Up, weight: Any, count: Any) -> Up:
        del count
        found, widths = match_networks(jax.tree.map(jnp.negative, stacked.pseudograd), weight > 0, matching)
        like = jax.tree.structure(stacked.pseudograd)
        return Up(jax.tree.unflatten(like, [-leaf for leaf in jax.tree.leaves(found)]), widths)

    def receive(server: MatchedState, aggregate: Aggregate, key: Any) -> Logged:
        params = jax.tree.map(jnp.negative, aggregate.up.pseudograd)
        logs = {f"width_{i}": width for i, width in enumerate(aggregate.up.aux, 1)}
        return Logged(MatchedState(params, jnp.array(True)), logs)

    exchange = train.exchanges[0]._replace(
        client=replace(work, folds=(fold._replace(start=begin, finish=end),)),
        send=lambda server: Down(server.params, server.matched),
        receive=receive,
        reducer=Reducer(lambda up, weight: up, matched, kind="gather"),
        whole=True,
        lockstep="it matches the neurons of whole networks, which are not changes of the server's model",
    )
    return Algorithm(init, train.init_client, (exchange,), lambda server: server.params)


# --- the networks ----------------------------------------------------------------------------------------------------


def check_layers(params: Any) -> None:
    """Refuse parameters that are not those of a multi-layer perceptron with a hidden layer."""
    what = "pfnm matches the neurons of multi-layer perceptrons (model 'mlp' with at least one hidden layer)"
    if not isinstance(params, list | tuple) or len(params) < 2:
        found = f"{len(params)} layer(s)" if isinstance(params, list | tuple) else f"a {type(params).__name__}"
        raise StructureError(f"{what}: params must be a list of two or more layers, got {found}")
    for i, layer in enumerate(params):
        shapes = {name: jnp.shape(leaf) for name, leaf in layer.items()} if isinstance(layer, dict) else {}
        dense = set(shapes) == {"w", "b"} and len(shapes["w"]) == 2 and shapes["b"] == shapes["w"][1:]
        if not dense:
            raise StructureError(f"{what}: params[{i}] must be {{'w': [in, out], 'b': [out]}}, got {shapes or layer!r}")
    for i, (below, above) in enumerate(pairwise(params)):
        if below["w"].shape[1] != above["w"].shape[0]:
            raise StructureError(
                f"{what}: params[{i}] has {below['w'].shape[1]} outputs, but params[{i + 1}] takes "
                f"{above['w'].shape[0]} inputs"
            )


def local_widths(width: int | Sequence[int] | None, params: Layers) -> tuple[int, ...]:
    """The hidden widths of a client's network."""
    largest = [layer["w"].shape[1] for layer in params[:-1]]
    if width is None:
        return tuple(-(-n // 2) for n in largest)
    widths = (width,) * len(largest) if isinstance(width, int) else tuple(width)
    if len(widths) != len(largest) or any(a > b for a, b in zip(widths, largest, strict=True)):
        raise StructureError(
            f"width={width!r}: clients' hidden layers must not be wider than the model's, which are {largest}. Give at "
            "most these, or a wider model (its widths limit the matched network)"
        )
    return widths


def narrow(params: Layers, widths: Sequence[int]) -> Layers:
    """The network without its hidden neurons after the first ``widths``: their weights, in and out, are 0."""
    sizes = [params[0]["w"].shape[0], *widths, params[-1]["w"].shape[1]]

    def keep(leaf: Any, *counts: int) -> Any:
        inside = [jnp.arange(n) < count for n, count in zip(leaf.shape, counts, strict=True)]
        mask = inside[0] if len(inside) == 1 else inside[0][:, None] & inside[1]
        return jnp.where(mask, leaf, jnp.zeros_like(leaf))

    return [
        {"w": keep(layer["w"], *both), "b": keep(layer["b"], both[1])}
        for layer, both in zip(params, pairwise(sizes), strict=True)
    ]


def random_network(like: Layers, widths: Sequence[int], key: Any) -> Layers:
    """Glorot-uniform kernels for hidden layers of these widths, and zero biases, in the shapes of ``like``."""
    sizes = [like[0]["w"].shape[0], *widths, like[-1]["w"].shape[1]]
    out = []
    for i, (layer, (fan_in, fan_out)) in enumerate(zip(like, pairwise(sizes), strict=True)):
        limit, w = (6 / (fan_in + fan_out)) ** 0.5, layer["w"]
        drawn = jax.random.uniform(jax.random.fold_in(key, i), w.shape, w.dtype, -limit, limit)
        out.append({"w": drawn, "b": jnp.zeros_like(layer["b"])})
    return out


def match_networks(networks: Layers, present: Any, matching: Matching) -> tuple[Layers, list[Any]]:
    """The global network of stacked networks (every leaf has a leading axis of clients), and its hidden widths.

    present: which of the networks count. Those are visited in the order of their norms, the largest first.
    """
    size = sum(jnp.sum(leaf.reshape(len(leaf), -1) ** 2, 1) for leaf in jax.tree.leaves(networks))
    order = jnp.argsort(jnp.where(present, -size, jnp.inf))
    networks, present = jax.tree.map(lambda leaf: leaf[order], list(networks)), present[order]
    weights, biases = [layer["w"] for layer in networks], [layer["b"] for layer in networks]
    last = posterior_mean(biases[-1][:, None], jnp.zeros((len(present), 1), int), present[:, None], matching)[0][0]
    out, widths, above = [{"w": weights[-1][0], "b": last}], [], None
    for c in reversed(range(len(networks) - 1)):
        # weights to the next layer, as the global one orders its neurons
        to = weights[c + 1] if above is None else jnp.take_along_axis(weights[c + 1], _inverse(above)[:, None, :], 2)
        into = weights[c].swapaxes(1, 2)
        real = present[:, None] & (jnp.any(into != 0, 2) | (biases[c] != 0) | jnp.any(to != 0, 2))
        parts = ([into] if c == 0 else []) + [biases[c][..., None], to]
        vectors = jnp.concatenate(parts, 2)
        above = match(vectors, real, present, matching)
        theta, counts = posterior_mean(vectors, above, real, matching)
        start = into.shape[2] if c == 0 else 0
        out[0] = out[0] | {"w": theta[:, start + 1 :]}
        out.insert(0, {"w": theta[:, :start].T, "b": theta[:, start]})
        widths.insert(0, jnp.sum(counts > 0))
    return out, widths


# --- the matching of one layer ---------------------------------------------------------------------------------------


def posterior_mean(vectors: Any, place: Any, real: Any, matching: Matching) -> tuple[Any, Any]:
    """Corollary 1: the global neurons, 0 where there is none, and how many clients have each."""
    totals, counts = _totals(vectors, place, real, matching.sigma_squared)
    return totals / _precision(counts, matching)[:, None], counts


def match(vectors: Any, real: Any, present: Any, matching: Matching) -> Any:
    """The global neuron of every client's every neuron, as a permutation of the n places, [clients, n].

    vectors: the neurons, [clients, n, size]. real: which of them the clients have, [clients, n]; the others fill the
    remaining places. present: which clients count; they are visited in this order.
    """
    clients, n, _ = vectors.shape
    number = jnp.maximum(jnp.sum(present), 1).astype(vectors.dtype)
    rows = jnp.arange(n)

    def visit(t: Any, place: Any, quiet: Any) -> tuple[Any, Any]:
        j = t % clients
        others = (jnp.arange(clients) < t) & (jnp.arange(clients) != j)
        totals, counts = _totals(vectors, place, real & others[:, None], matching.sigma_squared)
        new = counts == 0
        gain = jnp.where(real[j][:, None], _gains(vectors[j], totals, counts, number, matching), 0)
        kth = jnp.log(jnp.maximum(jnp.cumsum(new), 1).astype(gain.dtype))
        found = _assign(jnp.where(real[j][:, None] & new, gain - 2 * kth, gain))

        def values(at: Any) -> tuple[Any, Any]:
            """2 log posterior of a placement up to a constant: of all clients, and of this one given the others."""
            total, added = jnp.sum(gain[rows, at]), jnp.sum((real[j] & new[at]).astype(gain.dtype))
            return total, total - 2 * jax.lax.lgamma(added + 1)

        (joint, given), (old_joint, old_given) = values(found), values(place[j])
        # placements that are equally good, such as permutations of new neurons, must not replace each other for ever
        slack = 64 * jnp.finfo(gain.dtype).eps * jnp.sum(jnp.abs(gain[rows, found]))
        better = present[j] & (given > old_given + slack) & ((joint > old_joint - slack) | (t < clients))
        return place.at[j].set(jnp.where(better, found, place[j])), jnp.where(better, 0, quiet + 1)

    def goes_on(carry: tuple) -> Any:
        t, _, quiet = carry
        return (t < clients * (1 + matching.sweeps)) & ((t < clients) | (quiet < clients))

    place = jnp.broadcast_to(rows, (clients, n))
    zero = jnp.zeros((), rows.dtype)
    begin = (zero, place, zero)
    return jax.lax.while_loop(goes_on, lambda carry: (carry[0] + 1, *visit(*carry)), begin)[1]


def _gains(own: Any, totals: Any, counts: Any, number: Any, matching: Matching) -> Any:
    """Proposition 2 without -2 log k, for all pairs of own neurons and places; ``counts`` are those of the others."""
    one = 1 / _like(matching.sigma_squared, own)
    own, precision = own * one, _precision(counts, matching)
    squares, products = jnp.sum(totals**2, 1), jnp.matmul(own, totals.T, precision=jax.lax.Precision.HIGHEST)
    together = squares + 2 * products + jnp.sum(own**2, 1)[:, None]
    odds = jnp.where(
        counts == 0,
        _like(matching.gamma0, own) / number,
        jnp.maximum(counts, 1) / jnp.maximum(number - counts, 1),
    )
    return together / (precision + one) - squares / precision + 2 * jnp.log(odds)


def _totals(vectors: Any, place: Any, real: Any, sigma_squared: Any) -> tuple[Any, Any]:
    """sum v / sigma^2 and the number of clients, for every place."""
    at = _inverse(place)
    moved = jnp.take_along_axis(jnp.where(real[..., None], vectors, 0), at[..., None], 1)
    counts = jnp.sum(jnp.take_along_axis(real, at, 1).astype(vectors.dtype), 0)
    return jnp.sum(moved, 0) / _like(sigma_squared, vectors), counts


def _precision(counts: Any, matching: Matching) -> Any:
    return 1 / _like(matching.sigma0_squared, counts) + counts / _like(matching.sigma_squared, counts)


def _like(value: Any, array: Any) -> Any:
    return jnp.asarray(value, array.dtype)


def _inverse(place: Any) -> Any:
    """The inverse of every permutation."""
    return jnp.argsort(place, axis=-1)


def _assign(gain: Any) -> Any:
    """The column of every row in the assignment of largest total gain."""
    with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes
        rows, columns = optax.assignment.hungarian_algorithm(-gain.astype(jnp.result_type(float)))
    return jnp.zeros(len(gain), int).at[rows].set(columns)
