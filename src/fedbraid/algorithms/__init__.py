"""Federated algorithms, one file a family."""

from fedbraid.algorithms.local_update import (
    fedadagrad,
    fedadam,
    fedavg,
    fedavgm,
    fedprox,
    fedsgd,
    fedyogi,
    fomaml,
    local_update,
    lookahead,
    meta_minibatch_prox,
    minibatch_sgd,
    reptile,
)

__all__ = [
    "fedadagrad",
    "fedadam",
    "fedavg",
    "fedavgm",
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
