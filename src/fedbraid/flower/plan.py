"""A plan: what all sites of a federation agree on, read from two files of the app that ``fedbraid deploy init`` writes.

``experiment.toml`` is the experiment's configuration. ``federation.toml`` holds what a site without the experiment's
data must know of it (fields, classes, preprocessing, how many clients there are) and the policy of rounds.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

import fedbraid
from fedbraid import address, algorithms, transforms
from fedbraid.core import Algorithm
from fedbraid.data.catalog import load as load_named
from fedbraid.data.federated import FederatedData
from fedbraid.data.preprocess import Pipeline, pipeline
from fedbraid.experiment.assembly import Experiment, build_algorithm
from fedbraid.experiment.config import Config, ConfigError, load_config
from fedbraid.flower.identity import Schema, schema_of
from fedbraid.flower.policy import Policy
from fedbraid.flower.record import open_folder, write_run
from fedbraid.flower.server import serve
from fedbraid.metric import Metrics, as_metrics, is_client_column
from fedbraid.models import Model
from fedbraid.models import build as build_model
from fedbraid.simulation.evaluate import Evaluator, client_values, evaluator

__all__ = ["Plan", "describe", "load_plan", "plan_server_app", "testers"]

PyTree = Any
TAG = "[fedbraid] "
EXPERIMENT, FEDERATION = "experiment.toml", "federation.toml"


def describe(experiment: Experiment) -> dict[str, Any]:
    """What sites must know of an experiment's data, as plain values for ``federation.toml``."""
    data = experiment.data
    if data.preprocess is not None and not isinstance(data.preprocess, Pipeline):
        raise ConfigError(
            f"data {data.name!r}: its preprocessing is a function of its own and cannot be written down; sites need a "
            "Pipeline of named functions (fedbraid.data.preprocess)"
        )
    config = experiment.config
    factories = [(config.algorithm.name, algorithms.ALGORITHMS[config.algorithm.name])]
    factories += [(named.name, transforms.TRANSFORMS[named.name]) for named in config.transforms]
    if config.attack.share:
        raise ConfigError("[attack] is for simulations: clients of a federation lie unasked; leave the section out")
    for name, factory in factories:
        if "data" in inspect.signature(factory).parameters:
            raise ConfigError(f"{name!r} reads the data of all clients together, which no machine of a federation has")
    fields = {
        name: {"shape": list(field.shape), "dtype": np.dtype(field.dtype).name}
        for name, field in schema_of(data.train.arrays).items()
    }
    about: dict[str, Any] = {
        "population": data.train.num_clients,
        "evaluate": data.test is not None,
        "evaluate_clients": 0,
    }
    if data.info.get("classes") is not None:
        about["classes"] = int(data.info["classes"])
    return {
        "federation": about,
        "policy": Policy()._asdict(),
        "schema": fields,
        "preprocess": data.preprocess.spec() if data.preprocess else [],
    }


class Plan:
    """What a federation computes. Everything is made when it is first asked for: a node's process is short."""

    def __init__(self, config: Config, about: Mapping[str, Any]) -> None:
        self.config, self._about = config, about
        federation = about["federation"]
        self.population: int = federation["population"]
        self.evaluates: bool = federation.get("evaluate", False)
        self.evaluate_clients = testers(federation.get("evaluate_clients", 0), self.population)
        self.checkpoint_every: int = federation.get("checkpoint_every", 1)
        self.policy = Policy(**about["policy"])
        self.policy.check()
        self.schema: Schema = {
            name: jax.ShapeDtypeStruct(tuple(field["shape"]), field["dtype"]) for name, field in about["schema"].items()
        }

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that decides what clients compute: no program is traced for it."""
        parts = self.config.model_dump(mode="json", include={"model", "algorithm", "transforms"})
        decides = {k: self._about[k] for k in ("schema", "preprocess")} | parts | {"version": fedbraid.__version__}
        decides["classes"] = self._about["federation"].get("classes")
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]

    @cached_property
    def model(self) -> Model:
        shapes = {name: field.shape for name, field in self.schema.items()}
        named, classes = self.config.model, self._about["federation"].get("classes")
        return build_model(named.name, shapes, classes, **named.options)

    @cached_property
    def _prepare(self) -> Callable[[Mapping[str, Any], Any, bool], Any]:
        return pipeline(self._about.get("preprocess")) or (lambda batch, key, train: batch)

    def loss(self, params: PyTree, batch: Mapping[str, Any], key: Any) -> Any:
        return self.model.loss(params, self._prepare(batch, key, True), key)

    @cached_property
    def metrics(self) -> Metrics:
        prepared = lambda f: lambda params, batch: f(params, self._prepare(batch, None, False))  # noqa: E731
        return as_metrics(self.model.metrics).through(prepared)

    @cached_property
    def shapes(self) -> PyTree:
        """The shapes of the parameters: all that a client needs of them."""
        return jax.eval_shape(self.model.init, address.init_key(self.config.seed))

    @cached_property
    def params(self) -> PyTree:
        """The parameters that the server starts from: the simulator's."""
        return self.model.init(address.init_key(self.config.seed))

    @cached_property
    def algorithm(self) -> Algorithm:
        names = [self.config.algorithm.name, *(named.name for named in self.config.transforms)]
        factories = {**algorithms.ALGORITHMS, **transforms.TRANSFORMS}
        asked = {name for factory in names for name in inspect.signature(factories[factory]).parameters}
        context: dict[str, Any] = {"loss": self.loss, "population": self.population, "outputs": self._outputs}
        if "params" in asked:
            context["params"] = self.params
        return build_algorithm(self.config, context)

    def _outputs(self, params: PyTree, batch: Mapping[str, Any]) -> Any:
        return self.model.predict(params, self._prepare(batch, None, False)["x"])

    @cached_property
    def data(self) -> FederatedData:
        """The experiment's own data: for rehearsals, and for a server that evaluates on its test split."""
        return load_named(self.config.data.name, **self.config.data.options)

    def rehearsal_rows(self, client: Any) -> dict[str, np.ndarray]:
        """What client ``client`` has in the experiment: stands in for a site's data in a rehearsal."""
        return self.data.train.client(self._number(client))

    def rehearsal_test(self, client: Any) -> dict[str, np.ndarray] | None:
        """Its test examples in the experiment; None if the test split there is, if any, is not by the same clients."""
        number, data = self._number(client), self.data
        return data.test.client(number) if data.test is not None and data.aligned else None

    def _number(self, client: Any) -> int:
        if type(client) is not int or not 0 <= client < self.population:
            raise ValueError(
                f"the node's config says partition-id={client!r}; clients are numbered 0 to {self.population - 1}"
            )
        return client


def testers(value: Any, population: int) -> int:
    """How many clients evaluate: ``evaluate_clients`` of ``federation.toml``."""
    if value == "all":
        return population
    if type(value) is not int or not 0 <= value <= population:
        raise ConfigError(
            f'evaluate_clients = {value!r} in {FEDERATION}: it must be "all" or a whole number from 0 (nobody) to the '
            f"population of {population}"
        )
    return value


def load_plan(folder: Path) -> Plan:
    """The plan in an app's package folder."""
    place = folder / FEDERATION
    try:
        about = tomllib.loads(place.read_text())
        return Plan(load_config(folder / EXPERIMENT), about)
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {error.strerror}; make an app with fedbraid deploy init") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{place} is not what fedbraid deploy init writes: {error!r}") from None


def _say(text: str) -> None:
    """A line of a ServerApp's log that is ours: Flower's own lines stand between them."""
    print(*(TAG + line for line in text.splitlines()), sep="\n", flush=True)


def _on_server(score: Evaluator, params: PyTree, *, among: bool) -> dict[str, Any]:
    """Scores on the server's own test split. Where clients evaluate too, among theirs: under names of its own."""
    if not among:
        return score.summary(params)
    return {name: value for name, value in score.summary(params, "server_").items() if not is_client_column(name)}


def plan_server_app(plan: Plan) -> ServerApp:
    """The ServerApp of a plan. It writes the run folder that the run's config names, ``out``.

    A folder that holds a run which stopped is continued.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config = plan.config
        rounds = int(context.run_config.get("rounds", config.rounds))
        out = Path(str(context.run_config["out"])).expanduser().absolute()
        checkpoints = open_folder(out, config)
        score = evaluate = None
        if plan.evaluates and plan.data.test is not None:
            score = evaluator(plan.metrics, plan.data.test)
            evaluate = partial(_on_server, score, among=bool(plan.evaluate_clients))
        served = serve(
            plan.algorithm,
            plan.params,
            grid,
            schema=plan.schema,
            rounds=rounds,
            population=plan.population,
            cohort=None if config.cohort == "all" else config.cohort,
            seed=config.seed,
            policy=plan.policy,
            evaluate=evaluate,
            metrics=plan.metrics if plan.evaluate_clients else None,
            evaluate_clients=plan.evaluate_clients or None,
            eval_every=config.evaluation.every,
            checkpoints=checkpoints,
            checkpoint_every=plan.checkpoint_every,
            fingerprint=plan.fingerprint,
            say=_say,
        )
        clients = served.clients
        if score and not plan.evaluate_clients:
            clients = {f"test_{name}": client_values(sums) for name, sums in score(served.params).items()}
        summary = write_run(
            out, config, served, finished=served.rounds == rounds, clients=clients, declared=plan.metrics.declared
        )
        _say(f"done: {summary.rounds} rounds in {summary.seconds:.1f} s, written to {out}")

    return app
