"""The common settings of all sites of a federation, read from two files that ``fedbraid deploy init`` writes.

``experiment.toml`` is the experiment's configuration. ``federation.toml`` describes the data that each site must have
(fields, classes, preprocessing) and the number of clients, and sets the policy of rounds. Model and algorithm are built
from the two files as for a simulated run.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedbraid.data.catalog import load as load_data_set
from fedbraid.data.description import DataDescription
from fedbraid.data.federated import FederatedData
from fedbraid.experiment.assembly import Experiment, assemble
from fedbraid.experiment.config import Config, ConfigError, load_config
from fedbraid.experiment.described import read_description, written_description
from fedbraid.flower.client import LoadData, LoadTest, client_app
from fedbraid.flower.identity import Schema
from fedbraid.flower.policy import Policy
from fedbraid.flower.record import open_folder, write_run
from fedbraid.flower.server import serve
from fedbraid.masking import Secure
from fedbraid.metric import is_client_column
from fedbraid.models.targets import check_labels
from fedbraid.simulation.evaluate import Evaluator, evaluator

__all__ = [
    "Federation",
    "evaluating_clients",
    "federation_client_app",
    "federation_server_app",
    "load_federation",
    "with_labels_checked",
    "written_description",
]

PyTree = Any
TAG = "[fedbraid] "
EXPERIMENT, FEDERATION = "experiment.toml", "federation.toml"


@dataclass(frozen=True)
class Federation:
    """What a federation computes, and the policy of its rounds.

    Model, algorithm and data are made when they are first used, because the process of a node is short.

    evaluates: whether the server tests the model on the experiment's own test split.
    evaluate_clients: number of clients that test it on their own test data.
    secure: the settings of secure aggregation; None: uploads are not masked.
    """

    config: Config
    description: DataDescription
    policy: Policy
    evaluates: bool = False
    evaluate_clients: int = 0
    checkpoint_every: int = 1
    secure: Secure | None = None

    @property
    def population(self) -> int:
        """The number of clients of the federation."""
        return self.description.population

    @property
    def schema(self) -> Schema:
        """The schema that every site's data must fit: the fields as stored."""
        return self.description.fields

    @cached_property
    def experiment(self) -> Experiment:
        """Model and algorithm, as in a simulated run with the same configuration."""
        return assemble(self.config, self.description)

    @property
    def fingerprint(self) -> str:
        """A hash of what clients compute. Sites whose fingerprint differs from the server's are refused."""
        return self.experiment.digest

    @cached_property
    def data(self) -> FederatedData:
        """The experiment's own data, for rehearsals and for evaluation on the server."""
        return load_data_set(self.config.data.name, **self.config.data.options)

    def rehearsal_rows(self, client: Any) -> dict[str, np.ndarray]:
        """The examples of client ``client`` in the experiment. In a rehearsal they are the site's data."""
        return self.data.train.client(self._number(client))

    def rehearsal_test(self, client: Any) -> dict[str, np.ndarray] | None:
        """The client's test examples in the experiment; None if the test split is missing or has other clients."""
        number, data = self._number(client), self.data
        return data.test.client(number) if data.test is not None and data.aligned else None

    def _number(self, client: Any) -> int:
        if client is None:
            raise ValueError(
                'the node\'s config says neither data="FILE.npz" nor loader="module:function"; to rehearse with the '
                f"experiment's own data set partition-id, from 0 to {self.population - 1}"
            )
        if type(client) is not int or not 0 <= client < self.population:
            raise ValueError(
                f"the node's config says partition-id={client!r}; clients are numbered 0 to {self.population - 1}"
            )
        return client


# --- the file -------------------------------------------------------------------------------------------------------


def evaluating_clients(value: Any, population: int) -> int:
    """The number of clients that evaluate, from ``evaluate_clients`` of ``federation.toml``, checked."""
    if value == "all":
        return population
    if type(value) is not int or not 0 <= value <= population:
        raise ConfigError(
            f'evaluate_clients = {value!r} in {FEDERATION}: it must be "all" or a whole number from 0 (no client) to '
            f"the population of {population}"
        )
    return value


def load_federation(folder: Path) -> Federation:
    """The federation in an app's package folder."""
    place = folder / FEDERATION
    try:
        about = tomllib.loads(place.read_text(encoding="utf-8"))
        config = load_config(folder / EXPERIMENT)
        description = read_description(about, config.data.name)
        policy = Policy(**about["policy"])
        federation = about["federation"]
    except OSError as error:
        raise ConfigError(f"cannot read {place}: {error.strerror}; make an app with fedbraid deploy init") from None
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{place} is not what fedbraid deploy init writes: {error!r}") from None
    policy.check()
    secure = read_secure(about.get("secure"), config, description.population)
    return Federation(
        config,
        description,
        policy,
        evaluates=federation.get("evaluate", False),
        evaluate_clients=evaluating_clients(federation.get("evaluate_clients", 0), description.population),
        checkpoint_every=federation.get("checkpoint_every", 1),
        secure=secure,
    )


def read_secure(table: Any, config: Config, population: int) -> Secure | None:
    """The settings in the section ``[secure]``, checked; None if there is no such section."""
    if table is None:
        return None
    if not isinstance(table, Mapping):
        raise ConfigError(f"secure = {table!r} in {FEDERATION}: write a section [secure], it may be empty")
    try:
        return Secure.from_table(table, population if config.cohort == "all" else int(config.cohort))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"[secure] in {FEDERATION}: {error}") from None


# --- the apps -------------------------------------------------------------------------------------------------------


def federation_client_app(
    federation: Federation, load_data: LoadData, load_test: LoadTest, *, cache: bool = True
) -> ClientApp:
    """The ClientApp that every site of a federation runs; arguments as for :func:`fedbraid.flower.client_app`."""
    experiment = federation.experiment
    return client_app(
        experiment.algorithm,
        experiment.shapes,
        with_labels_checked(load_data, experiment),
        preprocess=federation.description.preprocess,
        metrics=experiment.metrics,
        load_test=load_test,
        fingerprint=federation.fingerprint,
        cache=cache,
        secure=federation.secure,
        engine=federation.config.engine,
    )


def with_labels_checked(load_data: LoadData, experiment: Experiment) -> LoadData:
    """``load_data`` that refuses labels which the model cannot have, before this site trains on them."""
    targets, prepared = experiment.model.targets, experiment.description.prepared.get("y")

    def load(context: Context) -> Mapping[str, Any]:
        arrays = load_data(context)
        if isinstance(arrays, Mapping) and targets is not None and prepared is not None and "y" in arrays:
            check_labels(targets, np.asarray(arrays["y"]), np.dtype(prepared.dtype), "site's")
        return arrays

    return load


def federation_server_app(federation: Federation) -> ServerApp:
    """The ServerApp of a federation. It writes the run folder ``out`` of the run's config.

    If the folder holds a stopped run, that run is continued.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        config, experiment = federation.config, federation.experiment
        rounds = int(context.run_config.get("rounds", config.rounds))
        out = Path(str(context.run_config["out"])).expanduser().absolute()
        checkpoints = open_folder(out, config)
        score = evaluate = None
        if federation.evaluates and federation.data.test is not None:
            score = evaluator(experiment.metrics, federation.data.test)
            evaluate = partial(_on_server, score, clients_too=bool(federation.evaluate_clients))
        served = serve(
            experiment.algorithm,
            experiment.params,
            grid,
            schema=federation.schema,
            preprocess=federation.description.preprocess,
            rounds=rounds,
            population=federation.population,
            cohort=None if config.cohort == "all" else config.cohort,
            seed=config.seed,
            policy=federation.policy,
            evaluate=evaluate,
            metrics=experiment.metrics if federation.evaluate_clients else None,
            evaluate_clients=federation.evaluate_clients or None,
            eval_every=config.evaluation.every,
            checkpoints=checkpoints,
            checkpoint_every=federation.checkpoint_every,
            fingerprint=federation.fingerprint,
            secure=federation.secure,
            asynchrony=config.asynchrony,
            say=_say,
        )
        clients = served.clients
        if score and not federation.evaluate_clients:
            clients = score.by_client(served.params)
        declared, finished = experiment.metrics.declared, served.rounds == rounds
        summary = write_run(
            out,
            config,
            served,
            finished=finished,
            clients=clients,
            declared=declared,
            description=federation.description,
        )
        spent = f", epsilon {summary.final['epsilon']:.3g}" if "epsilon" in summary.final else ""
        _say(f"done: {summary.rounds} rounds in {summary.seconds:.1f} s{spent}, written to {out}")

    return app


def _say(text: str) -> None:
    """Print lines of progress. The tag distinguishes them from Flower's own lines in the log of a ServerApp."""
    print(*(TAG + line for line in text.splitlines()), sep="\n", flush=True)


def _on_server(score: Evaluator, params: PyTree, *, clients_too: bool) -> dict[str, Any]:
    """Scores on the server's own test split. If clients evaluate, too, their names begin with ``server_``."""
    if not clients_too:
        return score.summary(params)
    return {name: value for name, value in score.summary(params, "server_").items() if not is_client_column(name)}
