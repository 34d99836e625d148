"""FlexLoRA: the server averages the products of LoRA's factors, not the factors.

J. Bai, D. Chen, B. Qian, L. Yao, Y. Li. Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and
Client Resources. NeurIPS 2024.

Client i trains the factors A_i [in, r] and B_i [r, out] of each adapter. The mean of A_i times the mean of B_i is not
the mean of the products A_i B_i. The server therefore computes

    D = sum_i w_i A_i B_i / sum_i w_i,        D = U S V'   (singular value decomposition),

and sends the factors of the best approximation of rank r: A = U_r, B = S_r V_r' (the paper's B = U S, A = V' of the
transposed product). The factor at the inputs has orthonormal columns. So directions that the clients did not use keep a
factor A that is not zero, and can be learned later.

D is never formed. Its rank is at most k r for k clients. With the QR decompositions [A_1 .. A_k] = Q R and
[w_1 B_1'  ..  w_k B_k'] = P T, the singular values of D are those of the small matrix R T'.

Leaves that are not LoRA's factors are averaged as in FedAvg. Clients take the steps of any optimizer, such as AdamW.

Sends: the model down, one vector of its size up. Keeps: nothing on the clients. The server needs each upload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from fedbraid.algorithms._local_update import local_update
from fedbraid.algorithms.client_optimizers import ClientOptions
from fedbraid.core import Aggregate, Algorithm, Down, Reducer, StructureError, Up, check_number
from fedbraid.local import LocalWork, Weighting

__all__ = ["flexlora", "mean_of_products"]

Loss = Callable[[Any, dict, Any], Any]
A, B = "lora_a", "lora_b"  # the names that fedbraid.models.lora gives to the factors


def flexlora(
    loss: Loss, *, client_lr: Any = 0.1, weighting: Weighting = "examples", **local: Unpack[ClientOptions]
) -> Algorithm:
    """FedAvg whose server averages the products of LoRA's factors and factors the mean again, by an SVD.

    The parameters are those of a model made by `fedbraid.models.lora` with ``factors="both"``.

    >>> alg = flexlora(lambda params, batch, key: 0.0, client_lr=1e-3, client_opt="adamw")
    >>> alg.exchanges[0].reducer.kind
    'gather'
    """
    check_number("client_lr", client_lr, low=0, open_low=True)
    train = local_update(loss, gamma=client_lr, message="delta", weighting=weighting, server_lr=1.0, **local)
    work = train.exchanges[0].client
    assert isinstance(work, LocalWork)
    fold = work.folds[0]

    def end(carry: Any, down: Down, state: Any, n: Any) -> Any:
        # minus the client's model: the server moves along -pseudograd, here from 0
        return fold.finish(carry, Down(jax.tree.map(jnp.zeros_like, down.params)), state, n)

    def reduced(stacked: Up, weight: Any, count: Any) -> Up:
        del count
        models = jax.tree.map(jnp.negative, stacked.pseudograd)
        return Up(jax.tree.map(jnp.negative, _averaged(models, weight)))

    def receive(server: Any, aggregate: Aggregate, key: Any) -> Any:
        return server._replace(params=jax.tree.map(jnp.negative, aggregate.up.pseudograd))

    exchange = train.exchanges[0]._replace(
        client=replace(work, folds=(fold._replace(finish=end),)),
        receive=receive,
        reducer=Reducer(lambda up, weight: up, reduced, kind="gather"),
        whole=True,
        lockstep="it averages the products of whole factors, which are not changes of the server's",
    )
    return train._replace(exchanges=(exchange,))


def _is_pair(node: Any) -> bool:
    return isinstance(node, dict) and set(node) == {A, B}


def _averaged(models: Any, weight: Any) -> Any:
    """The models of all clients (their first axis) as one: products of factors averaged, other leaves averaged."""
    share = weight / jnp.where(jnp.sum(weight) > 0, jnp.sum(weight), 1)

    def mean(node: Any) -> Any:
        if not _is_pair(node):
            shares = share.astype(node.dtype).reshape(-1, *[1] * (node.ndim - 1))
            return jnp.sum(jnp.where(shares > 0, node, 0) * shares, 0)
        missing = [node[name] is None for name in (A, B)]
        if all(missing):  # a private pair
            return node
        if any(missing):
            raise StructureError(
                "flexlora averages the products A B, so both factors must be shared, but one of them is private: to "
                "keep a factor on the clients, as in FedSA-LoRA, use fedavg with the transform private"
            )
        a, b = (jnp.moveaxis(node[name], 0, -3) for name in (A, B))  # stacked layers stay in front
        a, b = mean_of_products(a, b, share)
        return {A: a, B: b}

    return jax.tree.map(mean, models, is_leaf=_is_pair)


def mean_of_products(a: Any, b: Any, share: Any) -> tuple[Any, Any]:
    """Factors of the best approximation of rank r of ``sum_i share_i a_i @ b_i``; a [.., k, m, r], b [.., k, r, n].

    The first factor has orthonormal columns.

    >>> a, b = jnp.array([[[1.0], [0.0]], [[0.0], [1.0]]]), jnp.array([[[3.0, 0.0]], [[0.0, 1.0]]])
    >>> left, right = mean_of_products(a, b, jnp.array([0.5, 0.5]))
    >>> jnp.round(left @ right, 4).tolist()  # the mean is diag(1.5, 0.5), of rank 2
    [[1.5, 0.0], [0.0, 0.0]]
    """
    *stack, k, m, r = a.shape
    if stack:
        return jax.vmap(mean_of_products, (0, 0, None))(a, b, share)
    n = b.shape[-1]
    used = (share > 0)[:, None, None]
    tall = jnp.where(used, a, 0).swapaxes(0, 1).reshape(m, k * r)
    wide = (jnp.where(used, b, 0) * share.astype(b.dtype)[:, None, None]).reshape(k * r, n)
    (q, left), (p, right) = jnp.linalg.qr(tall), jnp.linalg.qr(wide.T)
    u, s, vt = jnp.linalg.svd(left @ right.T, full_matrices=False)
    few = min(r, len(s))
    first, second = q @ u[:, :few], s[:few, None] * (vt[:few] @ p.T)
    # An SVD is unique up to signs: the largest entry of each column is positive, for any order of the clients.
    largest = jnp.take_along_axis(first, jnp.argmax(jnp.abs(first), 0)[None], 0)[0]
    sign = jnp.where(largest < 0, -1, 1).astype(first.dtype)
    first, second = first * sign, second * sign[:, None]
    missing = r - few  # of a rank that is larger than the matrix
    return jnp.pad(first, ((0, 0), (0, missing))), jnp.pad(second, ((0, missing), (0, 0)))
