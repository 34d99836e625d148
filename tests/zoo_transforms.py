"""Every transform, one row each, for the laws of test_laws.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fedbraid as fb
from fedbraid import transforms as tf
from fedbraid.core import Algorithm
from fedbraid.testing.problem import loss, outputs
from fedbraid.transforms.uploads import Extended
from zoo_row import Row, Varied, gap


def _innermost(state: Any) -> Any:
    """The algorithm's own state, without the states of the transforms around it."""
    return _innermost(state.inner) if isinstance(state, Extended) else state


def _over_scaffold(transform: Callable, *refuses: tuple, rates: Any = {}, **more: Any) -> Row:  # noqa: B006
    """A transform of a stateful algorithm whose invariant it must preserve; ``more``: options of it and of the row."""
    of_row = {name: more.pop(name) for name in ("draws", "varied") if name in more}
    return Row(
        transform,
        more,
        over=fb.scaffold,
        rates=rates,
        invariant=lambda server, states: gap(_innermost(server).c, _innermost(states)),
        refuses=refuses,
        **of_row,
    )


def _over_fedavg(transform: Callable, *refuses: tuple, varied: tuple[Varied, ...] = ()) -> Row:
    return Row(
        transform,
        over=fb.fedavg,
        varied=varied,
        refuses=((lambda: transform(fb.fedavg(loss), exchanges=["no-such"]), "no-such"), *refuses),
    )


def _plain() -> Algorithm:
    return fb.fedavg(loss)


TRANSFORMS: dict[str, Row] = {
    "adaptive_clip": _over_scaffold(
        tf.adaptive_clip,
        (lambda: tf.adaptive_clip(_plain(), quantile=2.0), "quantile"),
        initial=0.5,
        rates={"initial": 1.0, "quantile": 0.8, "rate": 0.4},
    ),
    "clip": _over_scaffold(tf.clip, (lambda: tf.clip(_plain(), bound=0.0), "bound"), bound=0.5, rates={"bound": 1.0}),
    "dp": _over_scaffold(
        tf.dp,
        (lambda: tf.dp(_plain(), noise=-1.0), "noise"),
        (lambda: tf.dp(fb.scaffold(loss)), "clients"),
        noise=0.01,
        bound=1.0,
        where="clients",
        shares=2,
        rates={"noise": 0.02, "bound": 0.5},
        varied=(
            Varied(
                {"quantile": 0.5, "bit_noise": 0.1}, {"noise": 0.02, "quantile": 0.8, "rate": 0.4, "bit_noise": 0.2}
            ),
        ),
        draws=True,
    ),
    "elastic": Row(
        tf.elastic,
        {"batch_size": 1, "held_out": 0.3},
        over=fb.scaffold,
        rates={"tau": 0.25, "mu": 0.5},
        draws=True,  # the held-out rows are random
        invariant=lambda server, states: gap(server.c, states),
        refuses=(
            (lambda: tf.elastic(_plain(), outputs, tau=-1.0), "tau"),
            (lambda: tf.elastic(fb.fedsplit(loss), outputs), "train"),
        ),
    ),
    "fedexp": Row(
        tf.fedexp,
        {"eps": 1e-3, "average": True},
        over=fb.scaffold,
        rates={"eps": 0.1},
        varied=(Varied({"eps": 0.0, "limit": 50.0}, {"limit": 1.0}),),
        invariant=lambda server, states: gap(_innermost(server).c, states),
        refuses=(
            (lambda: tf.fedexp(_plain(), eps=-1.0), "eps"),
            (lambda: tf.fedexp(fb.fedsplit(loss)), "train"),
        ),
    ),
    "geometric_median": _over_fedavg(tf.geometric_median),
    "hypergradient": _over_scaffold(
        tf.hypergradient,
        (lambda: tf.hypergradient(_plain(), beta=-1.0), "beta"),
        (lambda: tf.hypergradient(_plain(), limit=0.5), "limit"),
        rates={"beta": 0.5},
        varied=(Varied({"beta": 1.0}, {"limit": 1.5}),),
    ),
    # with at most two uploads, as in most laws, a share has no effect: these rates are varied with all clients
    "krum": _over_fedavg(
        tf.krum, (lambda: tf.krum(_plain(), fraction=0.5), "fraction"), varied=(Varied({}, {"fraction": 0.4}),)
    ),
    "median": _over_fedavg(tf.median, (lambda: tf.median(fb.scaffold(loss)), "clients")),
    "multi_krum": _over_fedavg(
        tf.multi_krum,
        (lambda: tf.multi_krum(_plain(), keep=0.0), "keep"),
        varied=(Varied({"keep": 0.5}, {"fraction": 0.4, "keep": 0.9}),),
    ),
    "norm_bound": _over_scaffold(
        tf.norm_bound, (lambda: tf.norm_bound(_plain(), bound=-1.0), "bound"), bound=0.5, rates={"bound": 1.0}
    ),
    "private": Row(
        tf.private,
        {"leaves": "b"},
        over=fb.scaffold,
        invariant=lambda server, states: gap(server.inner.c["w"], states.inner["w"]),
        refuses=((lambda: tf.private(tf.quantize(_plain()), "b"), "inside"),),
    ),
    "qsgd": _over_scaffold(tf.qsgd, (lambda: tf.qsgd(_plain(), levels=500), "levels"), levels=4, draws=True),
    "quantize": _over_scaffold(tf.quantize, (lambda: tf.quantize(_plain(), bits=5), "bits"), draws=True),
    "top_k": _over_scaffold(tf.top_k, (lambda: tf.top_k(_plain(), fraction=0.0), "fraction"), fraction=0.4),
    "trimmed_mean": _over_fedavg(
        tf.trimmed_mean, (lambda: tf.trimmed_mean(_plain(), trim=0.5), "trim"), varied=(Varied({}, {"trim": 0.4}),)
    ),
}
