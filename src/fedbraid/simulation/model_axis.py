"""One client's model over several devices: the axis ``model`` of the mesh.

With ``engine.model_devices = m`` the devices form a mesh of groups (axis ``clients``) with m devices each (axis
``model``). The devices of a group work on the same clients. Every large array of a client (parameters, gradients,
optimizer state), of the server and of the frozen part of a model is divided over the m devices along one of its axes.
The compiler divides the computation to match, and adds the communication.

All devices run one program with the same number of loop steps: groups are rows of a ``vmap``, not of a ``shard_map``.
Under ``shard_map`` groups may take different numbers of steps, and then the devices of a group that has ended would not
take part in exchanges of data (collective permutations) in which all devices must take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedbraid.core import Algorithm
from fedbraid.local import Fold, LocalWork
from fedbraid.simulation.devices import MODEL

__all__ = ["divided", "divided_shapes", "has_model_axis", "model_sharding", "over_model"]

PyTree = Any
SMALL = 1 << 10  # entries of the largest array that every device stores whole


def has_model_axis(mesh: Mesh) -> bool:
    """Whether models are divided over devices of this mesh."""
    return MODEL in mesh.axis_names


def model_sharding(mesh: Mesh, shape: tuple[int, ...], leading: int = 0) -> NamedSharding:
    """How an array of a model is divided: along its largest axis whose length the number of devices divides.

    leading: number of first axes that are not part of the model, such as that of the clients. Small arrays, and arrays
    without such an axis, are stored whole on every device.
    """
    own, parts = shape[leading:], mesh.shape.get(MODEL, 1)
    count = 1
    for length in own:
        count *= length
    axes = [i for i, length in enumerate(own) if length % parts == 0]
    if parts == 1 or count <= SMALL or not axes:
        return NamedSharding(mesh, PartitionSpec())
    best = max(axes, key=lambda i: (own[i], i))
    return NamedSharding(mesh, PartitionSpec(*[None] * (leading + best), MODEL))


def divided(mesh: Mesh, tree: PyTree, leading: int = 0) -> PyTree:
    """For compiled functions: the arrays of a tree, each divided over the devices."""

    def one(leaf: Any) -> Any:
        if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, model_sharding(mesh, jnp.shape(leaf), leading))

    return jax.tree.map(one, tree)


def divided_shapes(mesh: Mesh, shapes: PyTree) -> PyTree:
    """Shapes of arrays that are divided over the devices, to compile a program for them."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=model_sharding(mesh, s.shape)), shapes
    )


def over_model(alg: Algorithm, mesh: Mesh) -> Algorithm:
    """``alg`` whose clients divide what they are sent, what they carry from step to step, and what they report."""
    spread = partial(divided, mesh)

    def through(function: Callable) -> Callable:
        return lambda *args: spread(function(*args))

    def fold(one: Fold) -> Fold:
        return one._replace(start=through(one.start), step=through(one.step), finish=through(one.finish))

    def client(work: Callable) -> Callable:
        if isinstance(work, LocalWork):
            return replace(work, folds=tuple(map(fold, work.folds)), combine=through(work.combine))
        return lambda down, state, data, key: spread(work(spread(down), spread(state), data, key))

    return alg._replace(
        exchanges=tuple(e._replace(send=through(e.send), client=client(e.client)) for e in alg.exchanges)
    )
