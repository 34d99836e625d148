"""Configurations, runs and their folders."""

from fedbraid.experiment.assembly import Experiment, assemble, build
from fedbraid.experiment.config import Config, ConfigError, load_config
from fedbraid.experiment.run import run_config
from fedbraid.experiment.summary import RunSummary

__all__ = ["Config", "ConfigError", "Experiment", "RunSummary", "assemble", "build", "load_config", "run_config"]
