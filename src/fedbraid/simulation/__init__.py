"""Federated runs on this machine: compiled rounds, arrival models, evaluation, checkpoints."""

from fedbraid.simulation.arrival import bernoulli, deadline, everyone
from fedbraid.simulation.asynchrony import Asynchrony, fedasync, fedbuff, semi_synchronous
from fedbraid.simulation.clock import Clock
from fedbraid.simulation.devices import use_cores
from fedbraid.simulation.evaluate import Evaluator, evaluator, metrics_of, summarize
from fedbraid.simulation.fine_tuning import adaptation, compare_adapted
from fedbraid.simulation.options import EngineOptions
from fedbraid.simulation.personal import PersonalEvaluator, personal_evaluator, read_states
from fedbraid.simulation.result import Checkpoints, Progress, Result
from fedbraid.simulation.run import simulate
from fedbraid.simulation.shadow import ShadowTrace, draw_shadow, trace_shadow
from fedbraid.simulation.states import HostStates
from fedbraid.simulation.tuning import time_plans

__all__ = [
    "Asynchrony",
    "Checkpoints",
    "Clock",
    "EngineOptions",
    "Evaluator",
    "HostStates",
    "PersonalEvaluator",
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
    "fedasync",
    "fedbuff",
    "metrics_of",
    "personal_evaluator",
    "read_states",
    "semi_synchronous",
    "simulate",
    "summarize",
    "time_plans",
    "trace_shadow",
    "use_cores",
]
