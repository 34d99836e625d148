"""fedbraid: federated optimization. Write an algorithm once; simulate, understand, tune and deploy it."""

import fedbraid.start  # noqa: F401  the first import: it makes Ctrl-C during the others quiet
from fedbraid import algorithms, transforms
from fedbraid.algorithms import *  # noqa: F403
from fedbraid.algorithms import __all__ as _algorithms
from fedbraid.core import MEAN, Aggregate, Algorithm, Down, Exchange, Logged, Reducer, Report, StructureError, Up
from fedbraid.costs import cost
from fedbraid.data.federated import FederatedData, Split
from fedbraid.local import Batches, ClientData, local_work, masked_mean
from fedbraid.metric import Metric, Metrics
from fedbraid.names import factory
from fedbraid.simulation import EngineOptions, simulate, use_cores

__version__ = "0.1.0"

__all__ = [
    "MEAN",
    "Aggregate",
    "Algorithm",
    "Batches",
    "ClientData",
    "Down",
    "EngineOptions",
    "Exchange",
    "FederatedData",
    "Logged",
    "Metric",
    "Metrics",
    "Reducer",
    "Report",
    "Split",
    "StructureError",
    "Up",
    "algorithms",
    "cost",
    "factory",
    "local_work",
    "masked_mean",
    "simulate",
    "transforms",
    "use_cores",
    *_algorithms,
]
