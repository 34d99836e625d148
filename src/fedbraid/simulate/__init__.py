"""Federated runs on this machine: compiled rounds, arrival models, evaluation, checkpoints."""

from fedbraid.simulate.arrival import bernoulli, deadline, everyone
from fedbraid.simulate.devices import use_cores
from fedbraid.simulate.evaluate import evaluator, summarize
from fedbraid.simulate.run import Checkpoints, Progress, Result, simulate
from fedbraid.simulate.states import HostStates

__all__ = [
    "Checkpoints",
    "HostStates",
    "Progress",
    "Result",
    "bernoulli",
    "deadline",
    "evaluator",
    "everyone",
    "simulate",
    "summarize",
    "use_cores",
]
