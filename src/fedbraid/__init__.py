"""fedbraid: federated optimization. Write an algorithm once; simulate, understand, tune and deploy it."""

from typing import TYPE_CHECKING

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
from fedbraid.version import __version__

if TYPE_CHECKING:
    from fedbraid.experiment.inline import advise, compare, load_run, report, run

# imported when first used: they need pydantic, matplotlib and Arrow
_LATER = ("advise", "compare", "load_run", "report", "run")

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
    "__version__",
    "advise",
    "algorithms",
    "compare",
    "cost",
    "factory",
    "load_run",
    "local_work",
    "masked_mean",
    "report",
    "run",
    "simulate",
    "transforms",
    "use_cores",
    *_algorithms,
]


def __getattr__(name: str) -> object:
    if name in _LATER:
        from fedbraid.experiment import inline

        return getattr(inline, name)
    raise AttributeError(f"module 'fedbraid' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
