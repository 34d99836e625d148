"""Transforms: functions ``Algorithm -> Algorithm`` for privacy, compression and robustness. They can be stacked."""

from collections.abc import Callable, Mapping

from fedbraid.core import Algorithm
from fedbraid.names import Names
from fedbraid.transforms.accounting import epsilon, epsilon_by_round, epsilon_of_rows, is_private
from fedbraid.transforms.byzantine import attack
from fedbraid.transforms.compression import qsgd, quantize, top_k
from fedbraid.transforms.elastic_aggregation import elastic
from fedbraid.transforms.extrapolation import fedexp
from fedbraid.transforms.hypergradients import hypergradient
from fedbraid.transforms.privacy import adaptive_clip, clip, dp
from fedbraid.transforms.private_leaves import private
from fedbraid.transforms.robust import (
    admit_if,
    geometric_median,
    krum,
    median,
    multi_krum,
    norm_bound,
    trimmed_mean,
)

__all__ = [
    "NAMES",
    "TRANSFORMS",
    "adaptive_clip",
    "admit_if",
    "attack",
    "clip",
    "dp",
    "elastic",
    "epsilon",
    "epsilon_by_round",
    "epsilon_of_rows",
    "fedexp",
    "geometric_median",
    "hypergradient",
    "is_private",
    "krum",
    "median",
    "multi_krum",
    "norm_bound",
    "private",
    "qsgd",
    "quantize",
    "top_k",
    "trimmed_mean",
]

TRANSFORMS: Mapping[str, Callable[..., Algorithm]] = {
    "adaptive_clip": adaptive_clip,
    "clip": clip,
    "dp": dp,
    "elastic": elastic,
    "fedexp": fedexp,
    "geometric_median": geometric_median,
    "hypergradient": hypergradient,
    "krum": krum,
    "median": median,
    "multi_krum": multi_krum,
    "norm_bound": norm_bound,
    "private": private,
    "qsgd": qsgd,
    "quantize": quantize,
    "top_k": top_k,
    "trimmed_mean": trimmed_mean,
}
"""Transforms that a config can name: ``factory(algorithm, **options)``, with numbers and strings as options.

``elastic`` also takes the model's ``outputs``, which a config gets from its model. ``attack`` is not here because it
needs marked data and has its own section. ``admit_if`` is not here because it needs a function.
"""

NAMES = Names("transform", TRANSFORMS, Algorithm, first="alg")
"""Those, the transforms of installed packages, and ``module:attribute``."""
