"""Stacks of transforms, also over algorithms whose clients keep state."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbraid as fb
from fedbraid.core import check_structure, keep
from fedbraid.costs import cost, data_shapes
from fedbraid.simulation import bernoulli, simulate
from fedbraid.transforms import (
    TRANSFORMS,
    adaptive_clip,
    clip,
    dp,
    elastic,
    median,
    norm_bound,
    qsgd,
    quantize,
    top_k,
)
from fedbraid.transforms.uploads import Extended
from transforms.toy import many_rounds
from zoo import clients, loss, start

WHOLE = {"batch_size": None, "steps": 2}
THERE = np.random.default_rng(0).random((8, 5)) < 0.6
THERE[:, 0] |= ~THERE.any(1)  # at least one upload per round: an engine skips rounds without uploads

pytestmark = pytest.mark.usefixtures("x64")


def outputs(params, batch):
    return batch["x"] @ params["w"] + params["b"]


def innermost(state):
    return innermost(state.inner) if isinstance(state, Extended) else state


def gap(a, b):
    return max(float(jnp.max(jnp.abs(x - jnp.mean(y, 0)))) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


STATEFUL = {  # (algorithm, distance between the server's state and the mean of the clients' states)
    "scaffold": (fb.scaffold(loss, client_lr=0.05, **WHOLE), lambda server, c_i: gap(server.c, c_i)),
    "feddyn": (fb.feddyn(loss, client_lr=0.05, alpha=0.5, **WHOLE), lambda server, g_i: gap(server.h, g_i)),
    "fedsplit": (fb.fedsplit(loss, step=0.3, prox="closed-form"), lambda server, own: gap(server.params, own.z)),
}
STACKS = {
    "clip quantize top_k": lambda alg: clip(quantize(top_k(alg, fraction=0.4)), bound=0.5),
    "clip quantize top_k, no feedback": lambda alg: clip(
        quantize(top_k(alg, fraction=0.4, error_feedback=False)), bound=0.5
    ),
    "norm_bound qsgd, no feedback": lambda alg: norm_bound(qsgd(alg, levels=2), bound=0.5),
    "norm_bound qsgd": lambda alg: norm_bound(qsgd(alg, levels=2, error_feedback=True), bound=0.5),
    "adaptive_clip int4": lambda alg: adaptive_clip(quantize(alg, bits=4), initial=0.1),
    "dp norm_bound": lambda alg: dp(norm_bound(alg, bound=0.4), noise=0.5, bound=0.5, where="clients", shares=3),
    "top_k elastic": lambda alg: top_k(elastic(alg, outputs), fraction=0.4),
    "elastic clip": lambda alg: elastic(clip(alg, bound=0.5), outputs),
}
CASES = [("scaffold", stack) for stack in STACKS if "no feedback" not in stack] + [
    ("feddyn", "norm_bound qsgd, no feedback"),
    ("fedsplit", "clip quantize top_k, no feedback"),
    ("fedsplit", "dp norm_bound"),
]


@pytest.mark.parametrize(("name", "stack"), CASES)
def test_clients_and_server_stay_in_agreement(name, stack):
    """c = mean c_i, h = mean g_i, x = mean z_i hold if transforms change uploads and if some uploads are lost."""
    alg, distance = STATEFUL[name]
    server, states = many_rounds(STACKS[stack](alg), start(), clients(), THERE)
    assert distance(innermost(server), innermost(states)) < 1e-12
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((server, states)))


def test_without_reconciliation_they_part():
    """The test above is not trivial: without ``reconcile`` such a stack breaks the equation."""
    alg, distance = STATEFUL["scaffold"]
    careless = alg._replace(exchanges=(alg.exchanges[0]._replace(reconcile=keep),))
    server, states = many_rounds(STACKS["dp norm_bound"](careless), start(), clients(), THERE)
    assert distance(innermost(server), innermost(states)) > 1e-2


def test_a_stack_optimizes_in_the_engine():
    """With a stack of many transforms over FedAvg and lost uploads, the loss still decreases."""
    alg = dp(quantize(elastic(fb.fedavg(loss, client_lr=0.05, **WHOLE), outputs)), noise=0.002, bound=50.0)
    split = clients()
    result = simulate(alg, start(), split, rounds=45, cohort=4, arrival=bernoulli(0.2), devices=1)
    batch = {k: jnp.asarray(v) for k, v in split.arrays.items()} | {"mask": jnp.ones(split.num_examples)}
    assert loss(result.params, batch, None) < 0.5 * loss(start(), batch, None)
    assert result.info.cost.exchanges[0].up == 2 * ((3 + 8) + 8)  # update and sensitivity: w is packed, b not


# --- every order either fits or is refused with a reason -------------------------------------------------------------

OPTIONS = {"elastic": {"outputs": outputs}, "private": {"leaves": "b"}, "top_k": {"fraction": 0.4}}
RANKED = {"median", "trimmed_mean", "geometric_median", "krum", "multi_krum"}
CODED = {"quantize", "qsgd", "top_k"}
KINDS = [
    "adaptive_clip",
    "clip",
    "dp",
    "elastic",
    "fedexp",
    "hypergradient",
    "median",
    "norm_bound",
    "private",
    "quantize",
    "top_k",
]


def refused(outer, inner):
    """Whether a pair of transforms must be refused."""
    return (
        inner == "dp"  # dp must be outermost
        or (outer in RANKED | {"dp"} and inner in RANKED | {"adaptive_clip"})  # outer replaces or noises a mean
        or (outer in {"clip", "adaptive_clip", "norm_bound"} and inner == "adaptive_clip")  # a bit has no norm
        or (outer == "top_k" and inner in CODED)
        or (outer == inner == "quantize")
        or (outer == "private" and inner in CODED | {"elastic", "fedexp", "norm_bound", "private"})  # they see it
        or (outer in {"elastic", "hypergradient", "top_k"} and inner == "private")  # they need the whole model
    )


@pytest.mark.parametrize("inner", KINDS)
def test_pairs(inner):
    for outer in KINDS:

        def build(outer=outer):
            alg = fb.fedavg(loss, **WHOLE)
            for name in (inner, outer):
                alg = TRANSFORMS[name](alg, **OPTIONS.get(name, {}))
            check_structure(alg, start(), data_shapes(clients()))

        if refused(outer, inner):
            with pytest.raises(ValueError, match=r"\w{3,} \w+"):
                build()
        else:
            build()


def test_the_registry_holds_factories_with_defaults():
    for name, factory in TRANSFORMS.items():
        alg = factory(fb.fedavg(loss), **({"outputs": outputs} if name == "elastic" else {}))
        assert cost(alg, start(), clients()).model == 4 * 8
    assert set(KINDS) | RANKED | CODED == set(TRANSFORMS)
    assert len(list(itertools.product(KINDS, KINDS))) == 121
    assert median(fb.fedavg(loss)).exchanges[0].name == "train"
