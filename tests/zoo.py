"""Every algorithm and transform, one row each, on one small problem: the laws of test_laws.py run over all rows.

The problem is heterogeneous least squares: five clients of 3 to 9 examples, each with its own optimum. ``make(...)``
builds a row's algorithm on it; ``local`` is how clients walk over their data, and a row without local steps ignores it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import fedbraid as fb
from fedbraid import transforms as tf
from fedbraid.core import Algorithm, Report, Up
from fedbraid.data.federated import Split
from fedbraid.local import masked_mean
from fedbraid.transforms.uploads import Extended

SIZES = (3, 9, 4, 7, 5)


def clients(seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    out = []
    for i, n in enumerate(SIZES):
        x = rng.normal(size=(n, 3))
        out.append({"x": x, "y": x @ (rng.normal(size=3) + i) + 0.5 * rng.normal(size=n)})
    return Split.from_clients(out)


def loss(params: Any, batch: dict, key: Any) -> Any:
    residual = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return masked_mean(0.5 * residual**2, batch["mask"])


def start() -> dict[str, Any]:
    return {"w": jnp.array([0.3, -0.2, 0.1]), "b": jnp.array(0.5)}


class Row(NamedTuple):
    """One algorithm or transform.

    invariant: (server, states) -> largest violation, for stateful ones; states are stacked over clients.
    exact: with full participation and full batches it stops at the optimum of the mean of the client losses.
    refuses: calls that must raise ValueError, with a word that the message must contain.
    """

    make: Callable[..., Algorithm]
    invariant: Callable[[Any, Any], Any] | None = None
    exact: bool = False
    refuses: tuple[tuple[Callable[[], Any], str], ...] = ()


def _refuse_rates(factory: Callable, *names: str) -> tuple:
    return tuple((lambda n=n: factory(loss, **{n: -1.0}), n) for n in names)


def _gap(mean: Any, states: Any) -> Any:
    """How far a server's tree is from the mean of its clients' states."""
    pairs = zip(jax.tree.leaves(mean), jax.tree.leaves(states), strict=True)
    return max(jnp.abs(m - own.mean(0)).max() for m, own in pairs)


ALGORITHMS: dict[str, Row] = {
    "local_update": Row(
        lambda **local: fb.local_update(
            loss, gamma=0.05, alpha=0.1, theta=(1.0, 0.0, 2.0), batch_size=local.get("batch_size", 2)
        ),
        refuses=(
            (lambda: fb.local_update(loss, gamma=-0.1), "gamma"),
            (lambda: fb.local_update(loss, gamma=0.1, alpha=-1.0), "alpha"),
            (lambda: fb.local_update(loss, gamma=float("nan")), "gamma"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(0.0, 0.0)), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(1.0, -1.0)), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=()), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta="2:K"), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta=(1.0,), epochs=2), "theta"),
            (lambda: fb.local_update(loss, gamma=0.1, theta="K", message="delta"), "delta"),
            (lambda: fb.local_update(loss, gamma=0.1, batch_size=0), "batch_size"),
            (lambda: fb.local_update(loss, gamma=0.1, epochs=1, steps=2), "epochs"),
            (lambda: fb.local_update(loss, gamma=0.1, steps=0), "steps"),
            (lambda: fb.local_update(loss, gamma=0.1, weighting="rows"), "weighting"),
        ),
    ),
    "minibatch_sgd": Row(
        lambda **local: fb.minibatch_sgd(loss, lr=0.1, batch_size=local.get("batch_size", 2)),
        refuses=_refuse_rates(fb.minibatch_sgd, "lr"),
    ),
    "fedsgd": Row(
        lambda **local: fb.fedsgd(loss, server_lr=0.05, **local), refuses=_refuse_rates(fb.fedsgd, "server_lr")
    ),
    "lookahead": Row(
        lambda **local: fb.lookahead(loss, client_lr=0.05, **local), refuses=_refuse_rates(fb.lookahead, "client_lr")
    ),
    "fedavg": Row(
        lambda **local: fb.fedavg(loss, client_lr=0.05, **local),
        refuses=_refuse_rates(fb.fedavg, "client_lr", "server_lr"),
    ),
    "reptile": Row(
        lambda **local: fb.reptile(loss, client_lr=0.05, **local), refuses=_refuse_rates(fb.reptile, "client_lr")
    ),
    "fedprox": Row(
        lambda **local: fb.fedprox(loss, client_lr=0.05, alpha=0.5, **local),
        refuses=_refuse_rates(fb.fedprox, "alpha", "client_lr"),
    ),
    "meta_minibatch_prox": Row(
        lambda **local: fb.meta_minibatch_prox(loss, client_lr=0.05, **local),
        refuses=_refuse_rates(fb.meta_minibatch_prox, "alpha"),
    ),
    "fomaml": Row(
        lambda **local: fb.fomaml(loss, client_lr=0.02, server_lr=0.1, **local),
        refuses=_refuse_rates(fb.fomaml, "client_lr"),
    ),
    "fedavgm": Row(
        lambda **local: fb.fedavgm(loss, client_lr=0.05, **local),
        refuses=(
            *_refuse_rates(fb.fedavgm, "momentum"),
            (lambda: fb.fedavgm(loss, momentum=1.0), "momentum"),
            (lambda: fb.fedavgm(loss, kind="polyak"), "kind"),
        ),
    ),
    "fedadam": Row(
        lambda **local: fb.fedadam(loss, client_lr=0.05, **local), refuses=_refuse_rates(fb.fedadam, "tau", "b1")
    ),
    "fedyogi": Row(
        lambda **local: fb.fedyogi(loss, client_lr=0.05, **local), refuses=_refuse_rates(fb.fedyogi, "tau", "b2")
    ),
    "fedadagrad": Row(
        lambda **local: fb.fedadagrad(loss, client_lr=0.05, **local), refuses=_refuse_rates(fb.fedadagrad, "tau")
    ),
    "fedgd": Row(
        lambda **local: fb.fedgd(loss, step=0.05, local_steps=2),
        refuses=(*_refuse_rates(fb.fedgd, "step"), (lambda: fb.fedgd(loss, objective="total"), "objective")),
    ),
    "fedprox_exact": Row(
        lambda **local: fb.fedprox_exact(loss, step=0.5, prox="closed-form"),
        refuses=(*_refuse_rates(fb.fedprox_exact, "step"), (lambda: fb.fedprox_exact(loss, prox="exact"), "prox")),
    ),
    "fedsplit": Row(
        lambda **local: fb.fedsplit(loss, step=0.5, prox="closed-form", relaxation=1.0),
        invariant=lambda server, states: max(
            jnp.abs(x - z.mean(0)).max()
            for x, z in zip(jax.tree.leaves(server.params), jax.tree.leaves(states.z), strict=True)
        ),
        exact=True,
        refuses=(
            *_refuse_rates(fb.fedsplit, "step", "relaxation", "regularization"),
            (lambda: fb.fedsplit(loss, prox="gradient"), "smoothness"),
            (lambda: fb.fedsplit(loss, estimate="dense"), "data"),
        ),
    ),
    "maml": Row(
        lambda **local: fb.maml(loss, client_lr=0.02, steps=2, server_lr=0.1, batch_size=local.get("batch_size", 2)),
        refuses=(
            *_refuse_rates(fb.maml, "client_lr", "alpha", "server_lr"),
            (lambda: fb.maml(loss, support=0.0), "support"),
            (lambda: fb.maml(loss, order="zeroth"), "order"),
            (lambda: fb.maml(loss, steps=0), "steps"),
        ),
    ),
    "server_only": Row(
        lambda **local: fb.server_only(
            loss, base="momentum", lr=0.1, weighting="uniform", batch_size=local.get("batch_size", 2)
        ),
        exact=True,
        refuses=(*_refuse_rates(fb.server_only, "lr"), (lambda: fb.server_only(loss, base="newton"), "base")),
    ),
    "server_only_mvr": Row(
        lambda **local: fb.server_only_mvr(
            loss, a=0.3, lr=0.1, weighting="uniform", batch_size=local.get("batch_size", 2)
        ),
        exact=True,
        refuses=_refuse_rates(fb.server_only_mvr, "a", "lr"),
    ),
    "mime": Row(
        lambda **local: fb.mime(loss, base="momentum", client_lr=0.05, weighting="uniform", **local),
        exact=True,
        refuses=(
            *_refuse_rates(fb.mime, "client_lr", "server_lr", "beta"),
            (lambda: fb.mime(loss, base="adam", beta=0.9), "beta"),
            (lambda: fb.mime(loss, protocol="eager"), "protocol"),
        ),
    ),
    "mimelite": Row(
        lambda **local: fb.mimelite(loss, base="adam", client_lr=0.01, protocol="split-cohort", **local),
        refuses=_refuse_rates(fb.mimelite, "client_lr", "server_lr"),
    ),
    "locmime": Row(
        lambda **local: fb.locmime(loss, base="momentum", client_lr=0.05, weighting="uniform", **local),
        exact=True,
        refuses=_refuse_rates(fb.locmime, "client_lr", "server_lr"),
    ),
    "mime_mvr": Row(  # a lagged one stands still in its first round, so the sign shows under another protocol
        lambda **local: fb.mime_mvr(loss, a=0.3, client_lr=0.05, protocol="two-phase", weighting="uniform", **local),
        exact=True,
        refuses=_refuse_rates(fb.mime_mvr, "a", "client_lr", "server_lr"),
    ),
    "mimelite_mvr": Row(
        lambda **local: fb.mimelite_mvr(loss, a=0.3, client_lr=0.05, **local),
        refuses=_refuse_rates(fb.mimelite_mvr, "a", "client_lr", "server_lr"),
    ),
    "scaffold": Row(
        lambda **local: fb.scaffold(loss, client_lr=0.05, weighting="examples", **local),
        invariant=lambda server, states: _gap(server.c, states),
        exact=True,
        refuses=(
            *_refuse_rates(fb.scaffold, "client_lr", "server_lr"),
            (lambda: fb.scaffold(loss, option="III"), "option"),
        ),
    ),
    "feddyn": Row(
        lambda **local: fb.feddyn(loss, alpha=1.0, client_lr=0.05, **local),
        invariant=lambda server, states: _gap(server.h, states),
        exact=True,
        refuses=_refuse_rates(fb.feddyn, "alpha", "client_lr"),
    ),
    "fednova": Row(
        lambda **local: fb.fednova(loss, client_lr=0.05, rho=0.5, alpha=0.1, **local),
        refuses=_refuse_rates(fb.fednova, "client_lr", "server_lr", "rho", "alpha"),
    ),
}


def _outputs(params: Any, batch: dict) -> Any:
    return batch["x"] @ params["w"] + params["b"]


def _innermost(state: Any) -> Any:
    """The algorithm's own state under those that transforms keep beside it."""
    return _innermost(state.inner) if isinstance(state, Extended) else state


def _over_scaffold(transform: Callable, *refuses: tuple, **options: Any) -> Row:
    """The transform over a stateful algorithm, whose invariant it must keep."""
    return Row(
        lambda **local: transform(fb.scaffold(loss, client_lr=0.05, **local), **options),
        invariant=lambda server, states: _gap(_innermost(server).c, _innermost(states)),
        refuses=refuses,
    )


def _over_fedavg(transform: Callable, *refuses: tuple, **options: Any) -> Row:
    return Row(
        lambda **local: transform(fb.fedavg(loss, client_lr=0.05, **local), **options),
        refuses=((lambda: transform(fb.fedavg(loss), exchanges=["no-such"]), "no-such"), *refuses),
    )


def _plain() -> Algorithm:
    return fb.fedavg(loss)


TRANSFORMS: dict[str, Row] = {
    "adaptive_clip": _over_scaffold(
        tf.adaptive_clip, (lambda: tf.adaptive_clip(_plain(), quantile=2.0), "quantile"), initial=0.5
    ),
    "clip": _over_scaffold(tf.clip, (lambda: tf.clip(_plain(), bound=0.0), "bound"), bound=0.5),
    "dp": _over_scaffold(
        tf.dp,
        (lambda: tf.dp(_plain(), noise=-1.0), "noise"),
        (lambda: tf.dp(fb.scaffold(loss)), "clients"),
        noise=0.01,
        bound=1.0,
        where="clients",
        shares=2,
    ),
    "elastic": Row(
        lambda **local: tf.elastic(fb.scaffold(loss, client_lr=0.05, **local), _outputs, batch_size=1, held_out=0.3),
        invariant=lambda server, states: _gap(server.c, states),
        refuses=(
            (lambda: tf.elastic(_plain(), _outputs, tau=-1.0), "tau"),
            (lambda: tf.elastic(fb.fedsplit(loss), _outputs), "train"),
        ),
    ),
    "geometric_median": _over_fedavg(tf.geometric_median),
    "krum": _over_fedavg(tf.krum, (lambda: tf.krum(_plain(), fraction=0.5), "fraction")),
    "median": _over_fedavg(tf.median, (lambda: tf.median(fb.scaffold(loss)), "clients")),
    "multi_krum": _over_fedavg(tf.multi_krum, (lambda: tf.multi_krum(_plain(), keep=0.0), "keep")),
    "norm_bound": _over_scaffold(tf.norm_bound, (lambda: tf.norm_bound(_plain(), bound=-1.0), "bound"), bound=0.5),
    "qsgd": _over_scaffold(tf.qsgd, (lambda: tf.qsgd(_plain(), levels=500), "levels"), levels=4),
    "quantize": _over_scaffold(tf.quantize, (lambda: tf.quantize(_plain(), bits=5), "bits")),
    "top_k": _over_scaffold(tf.top_k, (lambda: tf.top_k(_plain(), fraction=0.0), "fraction"), fraction=0.4),
    "trimmed_mean": _over_fedavg(tf.trimmed_mean, (lambda: tf.trimmed_mean(_plain(), trim=0.5), "trim")),
}

ROWS: dict[str, Row] = {**ALGORITHMS, **{f"transform:{name}": row for name, row in TRANSFORMS.items()}}


def counting() -> Algorithm:
    """A stateful algorithm with two exchanges: clients count how often they were asked, and sum what they saw."""

    def client(down, state, data, key):
        batch = data.everything()
        seen = jnp.sum(batch["y"] * batch["mask"])
        count = state["count"] + 1
        return Report(Up(0.1 * seen * down.params / count), 1.0, {"count": count, "seen": state["seen"] + seen})

    alg = fb.fedavg(loss)
    exchange = alg.exchanges[0]
    one = exchange._replace(
        name="one", send=lambda s: fb.Down(s), client=client, receive=lambda s, a, k: s - a.up.pseudograd
    )
    return fb.Algorithm(
        init=lambda params: params,
        init_client=lambda params: {"count": jnp.zeros((), jnp.int32), "seen": jnp.zeros(())},
        exchanges=(one, one._replace(name="two", cohort="same"), one._replace(name="three")),
        params=lambda server: server,
    )


def optimum() -> dict[str, np.ndarray]:
    """The minimizer of the mean over clients of their mean losses (uniform weights), by NumPy."""
    split = clients()
    normal, right = np.zeros((4, 4)), np.zeros(4)
    for i in range(split.num_clients):
        own = split.client(i)
        a = np.column_stack([own["x"], np.ones(len(own["y"]))])
        normal += a.T @ a / len(a)
        right += a.T @ own["y"] / len(a)
    solution = np.linalg.solve(normal, right)
    return {"w": solution[:3], "b": solution[3]}


def gradient(params: Any, split: Split) -> Any:
    """The gradient of the loss pooled over all examples."""
    batch = {k: jnp.asarray(v) for k, v in split.arrays.items()} | {"mask": jnp.ones(split.num_examples)}
    return jax.grad(loss)(params, batch, None)
