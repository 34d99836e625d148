"""Federated runs on this machine: compiled rounds, arrival models, evaluation, checkpoints."""

from fedbraid.simulate.adapt import adaptation, compare_adapted
from fedbraid.simulate.arrival import bernoulli, deadline, everyone
from fedbraid.simulate.devices import use_cores
from fedbraid.simulate.evaluate import evaluator, summarize
from fedbraid.simulate.run import Checkpoints, Progress, Result, simulate
from fedbraid.simulate.shadow import ShadowTrace, draw_shadow, trace_shadow
from fedbraid.simulate.states import HostStates

__all__ = [
    "Checkpoints",
    "HostStates",
    "Progress",
    "Result",
    "ShadowTrace",
    "adaptation",
    "bernoulli",
    "compare_adapted",
    "deadline",
    "draw_shadow",
    "evaluator",
    "everyone",
    "simulate",
    "summarize",
    "trace_shadow",
    "use_cores",
]
