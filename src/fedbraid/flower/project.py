"""``fedbraid deploy init``: a complete Flower app, written from an experiment's configuration."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from string import Template
from typing import Any, Literal

import fedbraid
from fedbraid import files
from fedbraid.experiment.assembly import assemble, find_parts, load_named, lora_weights
from fedbraid.experiment.config import Arrival, Config, ConfigError, dump
from fedbraid.experiment.judging import notice_unused
from fedbraid.flower.federation import (
    EXPERIMENT,
    FEDERATION,
    evaluating_clients,
    read_secure,
    written_description,
)
from fedbraid.flower.policy import Policy
from fedbraid.flower.secure.messages import check_sums
from fedbraid.lowering import LoweringOptions
from fedbraid.names import files_in, requirement
from fedbraid.notices import notice
from fedbraid.simulation.clock import Clock
from fedbraid.simulation.options import EngineOptions

__all__ = ["package_of", "write_app"]

PACKAGE = "federation"

PYPROJECT = """\
# The Flower app. fab-include: the files that are sent to the nodes. In [tool.flwr.app.config], out is the run folder,
# on the machine of the SuperLink.

"""

CLIENT = Template('''\
"""The client of this federation: every site runs it on its own data.

load_data and load_test below load a site's data. Nothing else in this file needs a change.
"""

from pathlib import Path

import numpy as np

from fedbraid.flower import federation_client_app, load_federation
from fedbraid.models.registry import resolve

FEDERATION = load_federation(Path(__file__).parent)

# Dtype and shape of one example of each field. These are the settings of federation.toml, for reading only.
SCHEMA = $schema


def load_data(context):
    """This site's own examples: one array per field, one row per example.

    Every site's data must fit the schema above. Otherwise the site is refused at the start, with the reason.

    --- Put the loading of sites' own data here. ---
    Flower sends this file to every site, so settings of one site are in its --node-config:
        loader="module:function"   a function of the context, in a module that is installed at the site
        data="/path/examples.npz"  a file with one array per field
        partition-id=0             for rehearsals: the data of this client of the experiment
    """
    site = context.node_config
    if "loader" in site:
        return resolve(site["loader"])(context)
    if "data" in site:
        return read(site["data"])
    return FEDERATION.rehearsal_rows(site.get("partition-id"))


def load_test(context):
    """This site's own test examples, with the same fields, or None. Used by evaluate_clients of federation.toml.

    They stay at the site: it sends only sums and counts of the model's metrics. In a site's --node-config:
        test-loader="module:function"   a function of the context, as above
        test-data="/path/test.npz"      a file with one array per field
    """
    site = context.node_config
    if "test-loader" in site:
        return resolve(site["test-loader"])(context)
    if "test-data" in site:
        return read(site["test-data"])
    if "loader" in site or "data" in site:
        return None
    return FEDERATION.rehearsal_test(site.get("partition-id"))


def read(place):
    with np.load(place, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


app = federation_client_app(FEDERATION, load_data, load_test)
''')

SERVER = '''\
"""The server of this federation. Its settings are in experiment.toml and federation.toml in this folder."""

from pathlib import Path

from fedbraid.flower import federation_server_app, load_federation

app = federation_server_app(load_federation(Path(__file__).parent))
'''

README = Template("""\
# A Flower app written by fedbraid

$what. $population clients, $rounds rounds.

| file | content |
| --- | --- |
| `$package/client.py` | `load_data` and `load_test`: edit them to load the sites' own data |
| `$package/experiment.toml` | algorithm, transforms, model, seed |
| `$package/federation.toml` | number of clients, deadlines, the schema that every site's data must fit |
| `$package/server.py` | nothing to edit |

Rehearse on one machine:

    fedbraid deploy up . --nodes $nodes
    fedbraid deploy run .
    fedbraid deploy down .

Check a site's data before its node joins:

    fedbraid deploy check . --node-config 'data="/path/to/examples.npz"'
""")


def write_app(
    folder: Path, config: Config, *, evaluate_clients: int | Literal["all"] = 0, secure: bool = False
) -> dict[str, Any]:
    """Write the app that deploys ``config``; returns its folder, population and files, as plain values.

    evaluate_clients: number of clients that evaluate the model on their own test data; if not 0, the server does not.
    secure: use secure aggregation, with the default settings.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: choose another folder for the app")
    data = load_named(config)
    description = data.description
    experiment = assemble(config, description)  # raises an error now if sites could not build model or algorithm
    _say_unused(config)
    about = written_description(description) | {"policy": Policy()._asdict()}
    tested = evaluating_clients(evaluate_clients, description.population)
    about["federation"] |= {
        "evaluate": data.test is not None and not tested,
        "evaluate_clients": evaluate_clients,
        "checkpoint_every": 1,
    }
    if secure:
        check_sums(experiment.algorithm)
        agreed = read_secure({}, config, description.population)
        about["secure"] = {"threshold": agreed.threshold, "bits": agreed.bits, "bound": agreed.bound} if agreed else {}
    population = description.population
    # names come from data and configuration: they are written as literals, and in texts only as plain words
    what = re.sub(r"[^\w ./:+-]", "?", f"{config.algorithm.name} on {config.data.name}")[:200]
    schema = {name: (field["dtype"], field["shape"]) for name, field in about["schema"].items()}
    words = {"what": what, "package": PACKAGE, "rounds": config.rounds, "population": population}
    carried, requirements = _code(config)
    package = folder / PACKAGE
    texts = {
        folder / "pyproject.toml": PYPROJECT + _toml(_pyproject(folder, what, config.rounds, requirements)),
        folder / "README.md": README.substitute(words, nodes=min(population, 3)),
        package / "__init__.py": f"{what + ', deployed.'!r}\n",
        package / "client.py": CLIENT.substitute(schema=_literal(schema)),
        package / "server.py": SERVER,
        package / EXPERIMENT: dump(config.model_copy(update={"modules": None})),
        package / FEDERATION: _federation(about),
    }
    texts |= {package / name: place.read_text() for name, place in carried.items()}
    _check_texts(texts, schema, config.data.name)
    for place, text in texts.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        files.write_text(place, text)
    return {"app": str(folder), "population": population, "files": [str(p.relative_to(folder)) for p in texts]}


def _say_unused(config: Config) -> None:
    """Say which settings of a configuration a deployment does not use, and which file it needs at every site."""
    notice_unused(config, "deployments")
    for section, given in (("arrival", config.arrival != Arrival()), ("clock", config.clock != Clock())):
        if given:
            notice(f"[{section}] of the configuration simulates slow and lost uploads: deployments ignore it")
    used = {field.name for field in fields(LoweringOptions)} - {"matrices"}
    unused = [
        f.name for f in fields(EngineOptions) if f.name not in used and getattr(config.engine, f.name) != f.default
    ]
    if unused:
        notice(
            f"engine.{', engine.'.join(unused)}: deployments ignore it, because a deployed client runs alone on its "
            "device"
        )
    weights = lora_weights(config)
    if weights is not None:
        notice(
            f"the server and every site need the file {weights} with the frozen weights, at this path seen from the "
            "folder in which their programs start; a site with another file is refused"
        )


def _literal(schema: dict[str, Any]) -> str:
    rows = "".join(f"    {name!r}: {value!r},\n" for name, value in schema.items())
    return f"{{\n{rows}}}"


def _toml(values: dict[str, Any]) -> str:
    import tomli_w

    return tomli_w.dumps(values)


def _pyproject(folder: Path, what: str, rounds: int, requirements: list[str]) -> dict[str, Any]:
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower())[:64].strip("-")
    app = {
        "publisher": "fedbraid",
        "fab-include": [f"{PACKAGE}/**/*.py", f"{PACKAGE}/**/*.toml"],
        "components": {"serverapp": f"{PACKAGE}.server:app", "clientapp": f"{PACKAGE}.client:app"},
        "config": {"out": "run", "rounds": rounds},
    }
    return {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {
            "name": name or "federation",
            "version": "1.0.0",
            "description": f"{what}, deployed with fedbraid",
            "license": "Apache-2.0",
            "dependencies": [f"fedbraid[flower]=={fedbraid.__version__}", *requirements],
        },
        "tool": {"hatch": {"build": {"targets": {"wheel": {"packages": [PACKAGE]}}}}, "flwr": {"app": app}},
    }


def _check_texts(texts: dict[Path, str], schema: dict[str, Any], data: str) -> None:
    """Refuse names that would not be read back as they are, before anything is written."""
    found = {}
    for place, text in texts.items():
        try:
            text.encode("utf-8")
            if place.suffix == ".toml":
                found[place.name] = tomllib.loads(text)
            elif place.suffix == ".py":
                compile(text, str(place), "exec", dont_inherit=True)
        except (ValueError, SyntaxError) as error:
            raise ConfigError(
                f"{place.name} of the app cannot be written for the data {data!r} with the fields {list(schema)!r}: "
                f"{error}; rename them"
            ) from None
    if list(found[FEDERATION]["schema"]) != list(schema) or found[EXPERIMENT]["data"]["name"] != data:
        raise ConfigError(
            f"the names of the data {data!r} and its fields {list(schema)!r} do not survive TOML: rename them"
        )


def _code(config: Config) -> tuple[dict[str, Path], list[str]]:
    """The code of others that sites need: files beside the configuration, which the app carries, and packages."""
    folder = None if config.modules is None else Path(config.modules)
    files: dict[str, Path] = {}
    packages: dict[str, None] = {}
    for section, found in find_parts(config).items():
        if found.own or found.module.partition(".")[0] == fedbraid.__name__:
            continue
        mine, package = files_in(found, folder), requirement(found)
        if not mine and package is None:
            raise ConfigError(
                f"{section} {found.name!r} is in {found.source}, which is neither beside the configuration nor part of "
                "an installed package, so sites would not have it: put the module beside the configuration file"
            )
        files |= mine
        if not mine and package is not None:
            packages[package] = None
    taken = sorted({"__init__.py", "client.py", "server.py"} & files.keys())
    if taken:
        raise ConfigError(f"the app has its own {taken[0]}: rename your module {taken[0]} beside the configuration")
    return files, list(packages)


def _federation(about: dict[str, Any]) -> str:
    head = (
        "# Settings that all sites share: every site and the server must have the same file.\n"
        "# population: number of clients. evaluate: the server tests on the experiment's own test split.\n"
        '# evaluate_clients: number of clients (or "all") that test the model on their own test data.\n'
        "# policy: see fedbraid.flower.Policy; too_few is wait, skip or abort.\n"
        "# secure: with this section, uploads are masked (secure aggregation): see docs/secure-aggregation.md.\n\n"
    )
    return head + _toml(about)


def package_of(folder: Path) -> Path:
    """The package folder of an app, or a ConfigError if ``folder`` does not hold an app."""
    package = folder / PACKAGE
    if not (folder / "pyproject.toml").is_file() or not (package / FEDERATION).is_file():
        raise ConfigError(f"{folder} is not an app: make one with fedbraid deploy init {folder} CONFIG.toml")
    return package
