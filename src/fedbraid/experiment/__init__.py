"""Configurations, runs and their folders."""

from fedbraid.experiment.assembly import Experiment, build
from fedbraid.experiment.config import Config, ConfigError, load_config
from fedbraid.experiment.run import run_config
from fedbraid.experiment.summary import RunSummary

__all__ = ["Config", "ConfigError", "Experiment", "RunSummary", "build", "load_config", "run_config"]
