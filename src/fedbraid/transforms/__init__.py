"""Transforms, ``Algorithm -> Algorithm``: they stack, and every interpreter of an algorithm reads the result."""

from collections.abc import Callable, Mapping

from fedbraid.core import Algorithm
from fedbraid.transforms.byzantine import attack
from fedbraid.transforms.compression import qsgd, quantize, top_k
from fedbraid.transforms.elastic_aggregation import elastic
from fedbraid.transforms.privacy import adaptive_clip, clip, dp, epsilon, epsilon_by_round, is_private
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
    "TRANSFORMS",
    "adaptive_clip",
    "admit_if",
    "attack",
    "clip",
    "dp",
    "elastic",
    "epsilon",
    "epsilon_by_round",
    "geometric_median",
    "is_private",
    "krum",
    "median",
    "multi_krum",
    "norm_bound",
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
    "geometric_median": geometric_median,
    "krum": krum,
    "median": median,
    "multi_krum": multi_krum,
    "norm_bound": norm_bound,
    "qsgd": qsgd,
    "quantize": quantize,
    "top_k": top_k,
    "trimmed_mean": trimmed_mean,
}
"""Transforms that a config can name: ``factory(algorithm, **options)``, with plain numbers and words as options.

``elastic`` also takes the model's ``outputs``, which a config gets from its model. ``attack`` and ``admit_if`` are not
here: the one needs marked data and is a section of its own, the other needs a function.
"""
