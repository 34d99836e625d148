"""Estimate all constants at one point."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedbraid.theory.constants.curvature import Hessians, curvature
from fedbraid.theory.constants.gradients import client_gradients, dissimilarity
from fedbraid.theory.constants.sampling import Clients, draw
from fedbraid.theory.constants.table import CURVATURES, Constants, Estimate

__all__ = ["estimate"]

PyTree = Any
Loss = Callable[[PyTree, dict, Any], Any]
_DEFAULT = Hessians()


def estimate(
    loss: Loss,
    params: PyTree,
    split: Clients,
    *,
    clients: int = 10,
    batch_size: int | None = 20,
    weighting: Literal["examples", "uniform"] = "examples",
    hessians: Hessians | None = _DEFAULT,
    seed: int = 0,
    compiler_options: Mapping[str, Any] | None = None,
) -> Constants:
    """Estimate the constants at ``params`` from ``clients`` sampled clients (all of them if there are fewer).

    The loss is called with ``key=None``: evaluation mode for the models of this library (no dropout). If the split has
    a ``preprocess``, the loss gets preprocessed batches, as in a simulation; without augmentation.

    batch_size: of training; sigma2 is the gradient noise of such a batch. None: full batches, no noise.
    weighting: the weight of a client in f, as in training.
    hessians: how curvatures are computed. None leaves L, mu and delta out (NaN), which is fast.
    compiler_options: options of XLA for the programs, for example to compile them faster.

    >>> import numpy as np, jax.numpy as jnp
    >>> from fedbraid import Split
    >>> data = Split.from_clients([{"x": np.full((4, 1), c, np.float32)} for c in (1.0, 3.0)])
    >>> loss = lambda params, batch, key: 0.5 * jnp.mean((params - batch["x"]) ** 2 * batch["mask"][:, None])
    >>> c = estimate(loss, jnp.zeros(1), data)
    >>> round(c.L.value, 4), round(c.G2.value, 4), round(c.zeta.value, 4), round(c.delta.value, 4)
    (1.0, 1.0, 1.0, 0.0)
    """
    _check(clients, batch_size, weighting)
    split.check()
    flat, unravel = ravel_pytree(params)
    if not jnp.issubdtype(flat.dtype, jnp.floating):
        raise ValueError(f"params must be floating point, got {flat.dtype}")
    rng = np.random.default_rng(seed)
    sample = draw(split, clients, weighting, rng)
    notes = []
    if len(sample.ids) < split.num_clients:
        notes.append(f"{len(sample.ids)} of {split.num_clients} clients sampled; maxima are over these")

    jit = partial(jax.jit, compiler_options=dict(compiler_options)) if compiler_options else jax.jit
    prepare = getattr(split, "preprocess", None)

    def flat_loss(x: Any, batch: dict) -> Any:
        return loss(unravel(x), batch if prepare is None else prepare(batch, None, False), None)

    found = client_gradients(flat_loss, flat, split, sample, batch_size, rng, jit)
    if not np.all(np.isfinite(found.losses)):
        i = int(sample.ids[int(np.argmin(np.isfinite(found.losses)))])
        raise ValueError(f"the loss of {split.name_of(i)} is not finite at these parameters; choose other parameters")
    gradients, determined = dissimilarity(found, sample, rng)
    curvatures = dict.fromkeys(CURVATURES, Estimate(math.nan))
    if hessians is not None:
        fewer = sample.some(hessians.sized(flat.size, clients)[1], rng)
        if len(fewer.ids) < len(sample.ids):
            notes.append(f"curvatures from {len(fewer.ids)} of these clients")
        curvatures, limits = curvature(flat_loss, flat, split, fewer, hessians, rng, jit)
        notes += limits
    return Constants(
        **gradients,
        **curvatures,
        clients=len(sample.ids),
        population=split.num_clients,
        batch_size=batch_size,
        notes=(*notes, *determined),
    )


def _check(clients: int, batch_size: int | None, weighting: str) -> None:
    if clients < 1:
        raise ValueError(f"clients must be at least 1, got {clients}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, or None for full batches, got {batch_size}")
    if weighting not in ("examples", "uniform"):
        raise ValueError(f"weighting must be 'examples' or 'uniform', got {weighting!r}")
