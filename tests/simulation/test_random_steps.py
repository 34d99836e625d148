"""Random networks with random local steps: what kernels compute on a GPU is what the step computes as it is written."""

import random
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedbraid.lowering import fused, grown, kernels
from fedbraid.lowering.grown import Extent, grow

HALF, RATE, LANES = jnp.bfloat16, 0.25, 2
SMOOTH = (jax.nn.gelu, jax.nn.silu, jnp.tanh)
DESCENT = {  # (weights, gradient, all weights, slot) -> new weights
    "plain": lambda w, g, p, slot: w - RATE * g,
    "swapped": lambda w, g, p, slot: w - g * RATE,
    "of the client": lambda w, g, p, slot: w - RATE * (1 + slot.astype(jnp.float32)) * g,
    "learned": lambda w, g, p, slot: w - (RATE * p["scale"]) * g,
    "divided": lambda w, g, p, slot: w - g / 4.0,
    "a sum": lambda w, g, p, slot: (-RATE) * g + w,
    "decay": lambda w, g, p, slot: w - RATE * (g + 0.1 * w),
    "twice": lambda w, g, p, slot: w - RATE * g - RATE * g,
    "frozen": lambda w, g, p, slot: w,
}


@pytest.fixture(autouse=True)
def as_if_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "cuda")
    monkeypatch.setattr(kernels, "_recent", lambda: True)
    monkeypatch.setattr(grown, "HEAVY", 0)


def dense(x, w, bias, function):
    return fused.elementwise(function, jnp.dot(x, w), bias, kernel=function)


def drawn_step(seed):
    """Weights and (slot, weights) -> new weights."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    width, inner, count, words = rng.choice((64, 72)), rng.choice((64, 96)), rng.choice((64, 80)), rng.choice((5, 70))
    shapes = {"words": (words, width), "up": (width, inner), "down": (inner, width), "last": (width, inner)}
    shapes |= {"scale": (), "bias": (inner,), "shift": (width,), "more": (2, 3), "past": (width, inner)}
    start = {name: jnp.asarray(numbers.standard_normal(shape), jnp.float32) / 8 for name, shape in shapes.items()}
    start["scale"] += 1
    at = numbers.integers(-3, words + 3, (2, count // 2))  # repeated, negative and outside
    mode, first, second = rng.choice(("clip", "fill")), rng.choice(SMOOTH), rng.choice(SMOOTH)
    tied, twice, residual, seen, shared = (rng.random() < 0.3 for _ in range(5))

    def loss(p):
        x = jnp.nan_to_num(p["words"].at[at].get(mode=mode)).astype(HALF)
        up, down, last = (p[name].astype(HALF) for name in ("up", "down", "last"))
        h = jnp.dot(x, up)
        y = fused.elementwise(first, h.reshape(count, inner), p["bias"], kernel=first)
        if shared:  # two activations of one product
            y = y + fused.elementwise(jnp.tanh, h.reshape(count, inner), 2 * p["bias"], kernel=jnp.tanh)
        y = y if not twice else y + jnp.dot(jnp.dot(y, down), last)
        z = jnp.dot(y, up.T if tied else down)
        more = jnp.mean(z.astype(jnp.float32) ** 2) if seen else 0
        z = fused.elementwise(second, z, p["shift"], kernel=second)
        z = z + x.reshape(count, width) if residual else z
        out = jnp.dot(z, last).astype(jnp.float32) * p["scale"]
        return 30 * (jnp.mean((out - 1) ** 2) + more + jnp.mean(p["more"] ** 2))

    names = [name for name in shapes if name != "past"]
    how = {name: DESCENT[rng.choice(("plain", "plain", *DESCENT))] for name in names}
    momentum, exchanged = rng.random() < 0.3, rng.random() < 0.2

    def advance(slot, p):
        slopes = jax.grad(loss)(p)
        new = {name: how[name](p[name], slopes[name], p, slot) for name in names}
        new["past"] = 0.9 * p["past"] + slopes["last"] if momentum else p["past"] - RATE * p["last"]
        if momentum:
            new["last"] = p["last"] - RATE * new["past"]
        if exchanged:
            new["up"], new["last"] = new["last"], new["up"]
        return new

    return start, advance


def compare(seed):
    """How many updates of each kind, and activations, are found in a step; its results are checked."""
    start, advance = drawn_step(seed)
    slot, slots = jnp.int32(0), jnp.arange(LANES)
    growth = grow(lambda slot: start, lambda slot, k, p: advance(slot, p), (slot, slot), Extent(1, 1, LANES), "whole")
    clients = [jax.tree.map(lambda a, i=i: a * (1 + i / 4), start) for i in range(LANES)]
    many = jax.tree.map(lambda *a: jnp.stack(a), *map(growth.rest, clients))
    new, _ = jax.jit(jax.vmap(growth.step))(slots, slots, many, ())
    found = jax.vmap(partial(growth.carry, matrices=[]))(new)
    for i, client in enumerate(clients):
        for name, value in jax.jit(advance)(slots[i], client).items():
            change, error = (float(jnp.linalg.norm(a)) for a in (value - client[name], found[name][i] - value))
            assert error < 0.01 * change + 1e-5, name  # gradients of matrices were rounded to bfloat16
    leaves = jax.tree.leaves(found)
    for leaf, half in zip(growth.halves, new[len(leaves) :], strict=True):
        np.testing.assert_array_equal(half, leaves[leaf].astype(HALF))
    _, _, updates, epilogues = growth.step.args
    return len(updates.products), len(updates.scatters), len(updates.small), len(epilogues.at)


SEEDS = {4: (0, 1, 4, 4), 7: (1, 1, 2, 2)}  # the numbers of updates and activations that kernels compute


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_is_the_plain_one(seed):
    assert compare(seed) == SEEDS[seed]
