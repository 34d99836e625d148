"""The entry of this package: rewrites the programs of clients as the options say.

An algorithm differentiates its loss through :mod:`fedbraid.local`. Its lowered form traces each local step inside
``local.rewriting``, so that the convolutions of the loss are replaced *before* the loss is differentiated. A client
that calls ``jax.grad`` itself bypasses this context. The convolutions that are left in its program, gradients included,
are replaced *after* differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax

from fedbraid.core import Algorithm
from fedbraid.local import dividing, map_work, rewriting
from fedbraid.lowering import kernels
from fedbraid.lowering.microbatch import microbatches
from fedbraid.lowering.mixed import narrow_activations
from fedbraid.lowering.options import PRECISIONS, LoweringOptions, Remat
from fedbraid.lowering.remat import remat_layers
from fedbraid.lowering.rewrite import fast_convolutions
from fedbraid.metric import as_metrics

__all__ = ["lower", "lower_function", "lower_metrics", "precision_of"]


def lower(alg: Algorithm, options: LoweringOptions) -> Algorithm:
    """``alg`` whose clients run fast programs, with the same values and derivatives up to rounding.

    It changes local steps (``Fold.step``), or the whole client if it has no local steps.

    >>> from fedbraid.algorithms import fedavg
    >>> import jax.numpy as jnp
    >>> alg = lower(fedavg(lambda params, batch, key: jnp.sum(params**2)), LoweringOptions(precision="float32"))
    >>> alg.exchanges[0].name
    'train'
    """
    return map_work(alg, lambda work: lower_function(work, options))


def lower_function(function: Callable, options: LoweringOptions) -> Callable:
    """A function of arrays, rewritten like the clients of :func:`lower`."""
    rewrite = fast_convolutions if options.convolutions == "fast" else None
    divide = None if options.microbatch is None else microbatches(options.microbatch)

    def run(*args: Any) -> Any:
        narrow = options.precision == "bfloat16" and kernels.available()
        with rewriting(_change(rewrite, narrow, options.remat)), dividing(divide), precision_of(options):
            return function(*args)

    return run if rewrite is None else rewrite(run)


def _narrow_and_fast(loss: Callable) -> Callable:
    return fast_convolutions(narrow_activations(loss))


_NARROW = {fast_convolutions: _narrow_and_fast, None: narrow_activations}


@cache  # the same function each time: jax's caches of compiled programs know it by identity
def _change(rewrite: Callable | None, narrow: bool, remat: Remat) -> Callable | None:
    """How a loss is changed before it is differentiated."""
    change = _NARROW[rewrite] if narrow else rewrite
    if remat == "none":
        return change
    return lambda loss: remat_layers(loss if change is None else change(loss))


def lower_metrics(metrics: Callable, options: LoweringOptions) -> Callable:
    """The metrics of an evaluation. Convolutions follow the options; products have jax's default precision."""
    how = LoweringOptions(convolutions=options.convolutions)
    return as_metrics(metrics).through(lambda function: lower_function(function, how))


def precision_of(options: LoweringOptions) -> AbstractContextManager[Any]:
    """A context in which matrix products are traced with the precision of the options."""
    how = PRECISIONS[options.precision]
    return nullcontext() if how is None else jax.default_matmul_precision(how)
