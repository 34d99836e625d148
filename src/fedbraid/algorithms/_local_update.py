"""LocalUpdate(alpha, gamma, Theta, ServerOpt) and its named members.

Z. Charles, J. Konecny. Convergence and Accuracy Trade-Offs in Federated Learning and Meta-Learning. AISTATS 2021.

Client i, given the server's model x, runs (Algorithm 2)

    x_1 = x,   g_k = grad f_i(x_k; batch k) + alpha (x_k - x),   x_{k+1} = x_k - gamma g_k,

and sends  sum_k theta_k g_k.  The proximal term is part of g_k and so of the message: only then is a round one step of
ServerOpt on the surrogate loss (Theorem 1). The message is a sum of gradients, so gamma = 0 is allowed and makes
progress. For Theta = Theta_{1:K} the model delta is x - x_{K+1} = gamma sum_k g_k. `message="delta"` sends the delta.
This is FedAvg as commonly implemented; server_lr = 1 averages the models.

    member                 Theta        alpha    gamma      message
    minibatch_sgd          Theta_1      0        0          gradients
    fedsgd                 Theta_{1:K}  0        0          gradients
    lookahead              Theta_{1:K}  0        > 0        delta       (a population of one client)
    fedavg, reptile        Theta_{1:K}  0        > 0        delta
    fedprox                Theta_{1:K}  > 0      > 0        delta
    meta_minibatch_prox    Theta_{1:K}  > 0      > 0        delta
    fomaml                 Theta_K      0        > 0        gradients
    fedavgm, fedadam, fedadagrad, fedyogi: fedavg with another ServerOpt
    fedopt, diloco: fedavg with other optimizers on the server and on the clients

Sends: the model down, one vector of its size up. Keeps: nothing on the clients, except the state of an optimizer with
``client_opt_state="kept"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedbraid.algorithms import server_optimizers
from fedbraid.algorithms.client_optimizers import ClientOptions, OptimizerSpec, client_optimizer, optimizer
from fedbraid.algorithms.server_optimizers import ServerState, server_step
from fedbraid.core import Aggregate, Algorithm, Down, Exchange, Report, Up, check_choice, check_number, is_zero
from fedbraid.local import WEIGHTINGS, LocalOptions, Weighting, batches_of, local_work, value_and_grad, weight_of

__all__ = [
    "diloco",
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
    "fedopt",
    "fedprox",
    "fedsgd",
    "fedyogi",
    "fomaml",
    "local_update",
    "lookahead",
    "meta_minibatch_prox",
    "minibatch_sgd",
    "reptile",
]

Loss = Callable[[Any, dict, Any], Any]


class Walk(NamedTuple):
    """A client's carry: model, optimizer's state, message so far, step number and sum of its batch losses."""

    params: Any
    opt: Any
    message: Any
    k: Any
    loss: Any


def check_theta(theta: Any) -> Literal["1:K", "K"] | tuple[float, ...]:
    """Theta as "1:K", "K", or a tuple of weights >= 0 that are not all 0."""
    if isinstance(theta, str):
        return check_choice("theta", theta, ("1:K", "K"))
    weights = tuple(theta)
    if not weights:
        raise ValueError("theta must not be empty: give '1:K', 'K' or the weights of the local gradients")
    for k, weight in enumerate(weights):
        check_number(f"theta[{k}]", weight, low=0)
    if not any(weights):
        raise ValueError(f"theta must have a positive entry, got {weights}: the message would always be zero")
    return tuple(float(w) for w in np.trim_zeros(np.asarray(weights, float), "b"))


def local_update(
    loss: Loss,
    *,
    gamma: Any = 0.1,
    alpha: Any = 0.0,
    theta: Literal["1:K", "K"] | Sequence[float] = "1:K",
    server_lr: Any = 0.1,
    server_opt: optax.GradientTransformation | None = None,
    message: Literal["gradients", "delta"] = "gradients",
    weighting: Weighting = "examples",
    client_opt: OptimizerSpec = "sgd",
    client_opt_state: Literal["reset", "kept"] = "reset",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """LocalUpdate(alpha, gamma, Theta, ServerOpt).

    ``theta`` given as weights fixes the number of local steps; "1:K" and "K" take it from ``epochs`` or ``steps``.
    ``server_opt`` replaces gradient descent with ``server_lr``. ``client_opt`` replaces the local gradient steps by
    those of another optimizer with the rate ``gamma`` (see `fedbraid.algorithms.client_optimizers`).

    >>> quadratic = lambda params, batch, key: 0.5 * jnp.sum((params - batch["x"].mean(0)) ** 2)
    >>> alg = local_update(quadratic, gamma=0.1, theta=(1.0, 1.0, 1.0), batch_size=None)
    >>> [exchange.name for exchange in alg.exchanges]
    ['train']
    """
    theta = check_theta(theta)
    check_number("gamma", gamma, low=0)
    check_number("alpha", alpha, low=0)
    check_choice("message", message, ("gradients", "delta"))
    check_choice("weighting", weighting, WEIGHTINGS)
    if not isinstance(theta, str):
        if local.get("epochs") is not None or local.get("steps") not in (None, len(theta)):
            raise ValueError(f"theta has {len(theta)} weights, which fixes the local steps; leave out epochs and steps")
        local["steps"] = len(theta)
    if message == "delta" and theta != "1:K":
        raise ValueError(
            f"message='delta' is gamma times the sum of all local gradients: it needs theta='1:K', got {theta}"
        )
    batches = batches_of(**local)
    opt = server_optimizers.sgd(server_lr) if server_opt is None else server_opt
    local_opt = client_optimizer(gamma, client_opt, client_opt_state)

    def start(down: Down, state: Any, key: Any) -> Walk:
        message_so_far = () if message == "delta" else jax.tree.map(jnp.zeros_like, down.params)
        zero = jnp.zeros((), jnp.result_type(float))
        return Walk(down.params, local_opt.start(down.params, state), message_so_far, jnp.int32(0), zero)

    def step(walk: Walk, batch: dict, key: Any, down: Down) -> Walk:
        value, g = value_and_grad(loss)(walk.params, batch, key)
        if not is_zero(alpha):
            g = jax.tree.map(lambda g, y, x: g + alpha * (y - x), g, walk.params, down.params)
        y, opt_state = local_opt.step(walk.params, g, walk.opt)
        return Walk(y, opt_state, accumulate(walk, g), walk.k + 1, walk.loss + value.astype(walk.loss.dtype))

    def accumulate(walk: Walk, g: Any) -> Any:
        if message == "delta":
            return ()
        if theta == "K":  # only the last gradient counts, for any number of steps
            return g
        if theta == "1:K":
            return jax.tree.map(jnp.add, walk.message, g)
        weight = jnp.asarray(theta, jnp.result_type(float))[walk.k]
        return jax.tree.map(lambda m, g: m + weight.astype(g.dtype) * g, walk.message, g)

    def finish(walk: Walk, down: Down, state: Any, n: Any) -> Report:
        sent = jax.tree.map(jnp.subtract, down.params, walk.params) if message == "delta" else walk.message
        mean_loss = walk.loss / walk.k.astype(walk.loss.dtype)
        return Report(Up(sent), weight_of(weighting, n), local_opt.after(walk.opt), {"loss": mean_loss})

    def send(server: ServerState) -> Down:
        return Down(server.params)

    def receive(server: ServerState, aggregate: Aggregate, key: Any) -> ServerState:
        return server_step(opt, server, aggregate.up.pseudograd)

    return Algorithm(
        init=lambda params: ServerState(params, opt.init(params)),
        init_client=local_opt.of_client,
        exchanges=(Exchange("train", send, local_work(start, step, finish, batches), receive),),
        params=lambda server: server.params,
    )


# --- the members of Table 1 ------------------------------------------------------------------------------------------


def minibatch_sgd(
    loss: Loss, *, lr: Any = 0.5, weighting: Weighting = "examples", batch_size: int | None = 20
) -> Algorithm:
    """Mini-batch SGD: one gradient per client and round, at the server's model.

    >>> alg = minibatch_sgd(lambda params, batch, key: jnp.sum(params**2), lr=0.1)
    """
    opt = server_optimizers.sgd(check_number("lr", lr, low=0))
    return local_update(loss, gamma=0.0, theta=(1.0,), server_opt=opt, weighting=weighting, batch_size=batch_size)


def fedsgd(
    loss: Loss, *, server_lr: Any = 0.1, weighting: Weighting = "examples", **local: Unpack[LocalOptions]
) -> Algorithm:
    """FedSGD: the sum of K batch gradients at the server's model (gamma = 0)."""
    opt = server_optimizers.sgd(server_lr)
    return local_update(loss, gamma=0.0, server_opt=opt, weighting=weighting, **local)


def _averaging(
    loss: Loss, server_opt: optax.GradientTransformation, client_lr: Any, alpha: Any = 0.0, **options: Any
) -> Algorithm:
    """The members that send the model delta."""
    check_number("client_lr", client_lr, low=0, open_low=True)
    return local_update(loss, gamma=client_lr, alpha=alpha, server_opt=server_opt, message="delta", **options)


def fedavg(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedAvg: clients take local SGD steps, and the server averages their models.

    H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep Networks
    from Decentralized Data. AISTATS 2017.

    loss: ``(params, batch, key) -> scalar``, such as the ``loss`` of a model.
    client_lr: learning rate of the local steps.
    server_lr: factor of the mean update; 1 replaces the server's model by the mean of the clients' models.
    weighting: "examples" weights a client by its number of examples, "uniform" weights all clients equally.
    local: ``epochs`` (default 1) or ``steps``, ``batch_size`` (default 20; None: all examples at once), ``shuffle``,
        and ``client_opt``, the optimizer of the local steps (default "sgd").

    >>> alg = fedavg(lambda params, batch, key: jnp.sum(params**2), client_lr=0.1, epochs=2)
    """
    opt = server_optimizers.sgd(server_lr)
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def reptile(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "uniform",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """Reptile: FedAvg used for meta-learning, with equal weights for all tasks.

    A. Nichol, J. Achiam, J. Schulman. On First-Order Meta-Learning Algorithms. arXiv:1803.02999, 2018.
    """
    return fedavg(loss, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)


def lookahead(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 0.5,
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """Lookahead: fast weights on the one client, slow weights on the server.

    With more than one client per round it averages their fast weights, which the paper excludes: a notice says so.

    M. R. Zhang, J. Lucas, G. Hinton, J. Ba. Lookahead Optimizer: k Steps Forward, 1 Step Back. NeurIPS 2019.
    """
    alg = fedavg(loss, client_lr=client_lr, server_lr=server_lr, **local)
    return alg._replace(exchanges=(alg.exchanges[0]._replace(at_most=1),))


def fedprox(
    loss: Loss,
    *,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedProx: FedAvg with a proximal term that keeps local models close to the server's.

    T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous Networks.
    MLSys 2020.

    alpha: weight of the proximal term; 0 is FedAvg. The other options are those of `fedavg`.

    ``fedprox_exact`` solves the proximal problem exactly and converges to another point.
    """
    opt = server_optimizers.sgd(server_lr)
    return _averaging(loss, opt, client_lr, alpha, weighting=weighting, **local)


def meta_minibatch_prox(
    loss: Loss,
    *,
    alpha: Any = 0.1,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    weighting: Weighting = "uniform",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """MetaMinibatchProx: FedProx used for meta-learning, with equal weights for all tasks.

    P. Zhou, X. Yuan, H. Xu, S. Yan, J. Feng. Efficient Meta Learning via Minibatch Proximal Update. NeurIPS 2019.
    """
    return fedprox(loss, alpha=alpha, client_lr=client_lr, server_lr=server_lr, weighting=weighting, **local)


def fomaml(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 0.5,
    weighting: Weighting = "uniform",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """First-order MAML: only the last local gradient is sent (Theta_K).

    C. Finn, P. Abbeel, S. Levine. Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks. ICML 2017.
    """
    check_number("client_lr", client_lr, low=0)
    opt = server_optimizers.sgd(server_lr)
    if "epochs" not in local:
        local.setdefault("steps", 3)
    return local_update(loss, gamma=client_lr, theta="K", server_opt=opt, weighting=weighting, **local)


# --- fedavg with other server optimizers -----------------------------------------------------------------------------


def fedavgm(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    momentum: Any = 0.9,
    kind: Literal["heavy-ball", "nesterov", "average"] = "heavy-ball",
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedAvgM: server momentum, by default heavy-ball as in the paper: ``v <- momentum v + delta``, ``x <- x - v``.

    ``kind="average"`` is ``v <- momentum v + (1 - momentum) delta`` (Mime's and elastic aggregation's FedAvgM), whose
    steps are smaller by the factor ``1 - momentum``; ``"nesterov"`` looks one step ahead.

    T.-M. H. Hsu, H. Qi, M. Brown. Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification. arXiv:1909.06335, 2019.
    """
    opt = server_optimizers.momentum(server_lr, momentum, kind=kind)
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def fedadam(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 0.02,
    b1: Any = 0.9,
    b2: Any = 0.99,
    tau: Any = 1e-3,
    bias_correction: bool = False,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedAdam: Adam on the server; optax's bias correction is an option.

    S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan. Adaptive Federated
    Optimization. ICLR 2021.
    """
    opt = server_optimizers.adaptive("adam", server_lr, b1=b1, b2=b2, tau=tau, bias_correction=bias_correction)
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def fedyogi(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 0.02,
    b1: Any = 0.9,
    b2: Any = 0.99,
    tau: Any = 1e-3,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedYogi: Yogi on the server.

    S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan. Adaptive Federated
    Optimization. ICLR 2021.
    """
    opt = server_optimizers.adaptive("yogi", server_lr, b1=b1, b2=b2, tau=tau)
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def fedadagrad(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 0.1,
    b1: Any = 0.0,
    tau: Any = 1e-3,
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedAdagrad: Adagrad on the server.

    S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan. Adaptive Federated
    Optimization. ICLR 2021.
    """
    opt = server_optimizers.adaptive("adagrad", server_lr, b1=b1, tau=tau)
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def fedopt(
    loss: Loss,
    *,
    client_lr: Any = 0.1,
    server_lr: Any = 1.0,
    server_opt: OptimizerSpec = "sgd",
    weighting: Weighting = "examples",
    **local: Unpack[ClientOptions],
) -> Algorithm:
    """FedOpt: any optimizer on the clients (``client_opt``) and any on the server (``server_opt``).

    S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konecny, S. Kumar, H. B. McMahan. Adaptive Federated
    Optimization. ICLR 2021. Algorithm 1.

    >>> alg = fedopt(lambda params, batch, key: jnp.sum(params**2), client_lr=1e-3, client_opt="adamw")
    """
    opt = optimizer(server_opt, server_lr, what="server_opt")
    return _averaging(loss, opt, client_lr, weighting=weighting, **local)


def diloco(
    loss: Loss,
    *,
    client_lr: Any = 4e-4,
    server_lr: Any = 0.7,
    momentum: Any = 0.9,
    weight_decay: Any = 0.1,
    weighting: Weighting = "uniform",
    **local: Unpack[LocalOptions],
) -> Algorithm:
    """DiLoCo: AdamW on the clients, which keep its state, and Nesterov momentum on the server.

    A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen. DiLoCo:
    Distributed Low-Communication Training of Language Models. arXiv:2311.08105, 2023.

    >>> alg = diloco(lambda params, batch, key: jnp.sum(params**2), steps=500)
    """
    opt = server_optimizers.momentum(server_lr, momentum, kind="nesterov")
    adamw = {"name": "adamw", "weight_decay": weight_decay}
    kept: Literal["kept"] = "kept"
    return _averaging(loss, opt, client_lr, weighting=weighting, client_opt=adamw, client_opt_state=kept, **local)
