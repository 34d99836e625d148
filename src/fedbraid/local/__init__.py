"""Local work: how a client goes over its own batches, and how it differentiates a loss.

Client code never slices data. Shuffling, epochs or steps, the last partial batch, masks and held-out slices are here.
The same code serves the simulator's flat arrays and a deployed client's own arrays. A client built with
:func:`local_work` can be called (it folds over its batches). An engine can also take it apart, and run the steps of
many clients together.

Client code differentiates with :func:`value_and_grad` and :func:`grad`. They are jax's functions, but an engine may
first rewrite the loss (see :func:`rewriting`), for example to replace slow operations by fast ones, or compute its
gradient in parts of the batch (see :func:`dividing`).
"""

from fedbraid.local.batches import (
    BYZANTINE,
    LEADING,
    MASK,
    WEIGHTINGS,
    Batches,
    ClientData,
    Clients,
    LocalOptions,
    Weighting,
    batches_of,
    masked_mean,
    shuffled,
    weight_of,
)
from fedbraid.local.losses import (
    APPLIES_MASK,
    HEAD,
    NORM,
    STATISTICS,
    WEIGHTS,
    Statistics,
    collecting_statistics,
    dividing,
    grad,
    leaf_names,
    rewriting,
    rewritten,
    value_and_grad,
)
from fedbraid.local.work import (
    Fold,
    LocalWork,
    local_work,
    map_work,
)

__all__ = [
    "APPLIES_MASK",
    "BYZANTINE",
    "HEAD",
    "LEADING",
    "MASK",
    "NORM",
    "STATISTICS",
    "WEIGHTINGS",
    "WEIGHTS",
    "Batches",
    "ClientData",
    "Clients",
    "Fold",
    "LocalOptions",
    "LocalWork",
    "Statistics",
    "Weighting",
    "batches_of",
    "collecting_statistics",
    "dividing",
    "grad",
    "leaf_names",
    "local_work",
    "map_work",
    "masked_mean",
    "rewriting",
    "rewritten",
    "shuffled",
    "value_and_grad",
    "weight_of",
]
