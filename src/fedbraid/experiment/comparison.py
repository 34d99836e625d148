"""The definition of a comparison: methods, settings and tuning, read from one TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbraid import files
from fedbraid.costs import Cost
from fedbraid.experiment.config import Config, ConfigError, dump, parse, read_tree, sentences
from fedbraid.experiment.lab import SweepSettings, parse_settings
from fedbraid.experiment.runfolder import read_sealed_toml
from fedbraid.metric import Better
from fedbraid.sealed import seal_lines

__all__ = [
    "CompareSettings",
    "Comparison",
    "Method",
    "Protocol",
    "cohorts_of",
    "global_model",
    "load_comparison",
    "own_models",
    "reopen_comparison",
    "rows_by_model",
    "write_comparison",
]

COMPARE = "compare.toml"
COMMON = "common"  # name of the [algorithm] section of a comparison: it holds the options that all methods share
Protocol = Literal["rounds", "client-communication", "total-communication"]


class Method(BaseModel):
    """One entry of ``[[methods]]``: an algorithm with its options, and the grid it is tuned over.

    name: name of the algorithm; other keys are its options.
    label: what tables and pictures call it; default: its name.
    over: the options that are tuned, each with its values.
    transforms: transforms of this method; default: those of the configuration.
    asynchrony: section [asynchrony] of this method; default: that of the configuration.
    rounds [rounds]: number of rounds (for FedBuff: server steps) of this method; default: that of the configuration.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)
    name: str
    label: str = ""
    over: dict[str, Any] = {}
    transforms: list[dict[str, Any]] | None = None
    asynchrony: dict[str, Any] | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class CompareSettings(BaseModel):
    """How methods are compared: the ``[compare]`` section.

    seeds [seeds]: number of runs of each method.
    protocol: what is equal for all methods: "rounds", or the bytes of a round, sent by clients or both ways.
    metric: what methods are compared by; default: the accuracy if there is one, else the loss.
    better: the direction of the metric; default: as the metric declares.
    last [rounds]: number of last rounds that a result averages over.
    target [that of the metric]: if given, the table has the rounds and bytes to this value.
    drift [rounds]: number of first rounds in which client drift is recorded; 0: none.
    baselines: baselines in the table: "local" (each client alone), "pooled" (one machine with all data).
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)
    seeds: Annotated[int, Field(ge=1)] = 3
    protocol: Protocol = "rounds"
    metric: str | None = None
    better: Better | None = None
    last: Annotated[int, Field(ge=1)] = 100
    target: float | None = None
    drift: Annotated[int, Field(ge=0)] = 2
    baselines: tuple[Literal["local", "pooled"], ...] = ("local", "pooled")


class Comparison(NamedTuple):
    """The methods, their common configuration, and how each is tuned."""

    base: Config
    methods: tuple[Method, ...]
    settings: CompareSettings
    tuning: SweepSettings

    def config(self, i: int, cohort: int | None = None) -> Config:
        """The configuration of method ``i`` before it is tuned."""
        method = self.methods[i]
        common = {} if self.base.algorithm.name != COMMON else self.base.algorithm.options
        tree = self.base.model_dump()
        tree["algorithm"] = {"name": method.name, **common, **method.options}
        if method.transforms is not None:
            tree["transforms"] = method.transforms
        if method.asynchrony is not None:
            tree["asynchrony"] = method.asynchrony
        if method.rounds is not None:
            tree["rounds"] = method.rounds
        if cohort is not None:
            tree["cohort"] = cohort
        try:
            return parse(tree)
        except ConfigError as error:
            raise ConfigError(f"method {method.label!r}: {error}") from None

    def tuning_of(self, i: int) -> SweepSettings | None:
        """How method ``i`` is tuned; None if it has no grid."""
        over = {key if "." in key else f"algorithm.{key}": values for key, values in self.methods[i].over.items()}
        if not over:
            return None
        settings = self.settings
        judged = {"metric": settings.metric, "better": settings.better, "last": settings.last}
        return self.tuning.model_copy(update={"over": over, **judged})


def load_comparison(path: Path | None = None, settings: Sequence[str] = ()) -> Comparison:
    """A comparison from a TOML file (default: the embedded one), changed by ``key.path=value`` settings.

    >>> [method.label for method in load_comparison().methods][:2]
    ['FedAvg', 'FedAvgM']
    """
    if path is None:
        tree = tomllib.loads(resources.files("fedbraid.experiment").joinpath("files/compare.toml").read_text())
        tree = _merged(tree, read_tree(None, settings))
    else:
        tree = read_tree(path, settings)
    methods, section, sweep = tree.pop("methods", None), tree.pop("compare", {}), tree.pop("sweep", {})
    if not isinstance(methods, list) or not methods:
        raise ConfigError(
            'nothing to compare: add [[methods]] entries, each with name = "fedavg" or another algorithm, its options, '
            'and over = { client_lr = "logspace(-3, 0, 7)" }'
        )
    if tree.get("algorithm", {}).get("name", COMMON) != COMMON:
        raise ConfigError(
            "in a comparison [algorithm] holds the options that all methods share: move its name to a [[methods]] entry"
        )
    base = parse(tree | {"algorithm": {"name": COMMON, **tree.get("algorithm", {})}})
    try:
        chosen = CompareSettings.model_validate(section)
    except ValidationError as error:
        raise ConfigError(sentences(error, CompareSettings, "compare")) from None
    if "over" in sweep:
        raise ConfigError("in a comparison every method declares its own grid: move over from [sweep] to [[methods]]")
    tuning = parse_settings(sweep)
    clash = set(tuning.seed_list) & set(range(base.seed, base.seed + chosen.seeds))
    if clash:
        raise ConfigError(f"seeds {sorted(clash)} are used both for tuning and for the results; set another sweep.seed")
    comparison = Comparison(base, _methods(methods), chosen, tuning)
    for i, method in enumerate(comparison.methods):
        for key in method.over:
            if "." in key and key.split(".")[0] not in ("algorithm", "transforms"):
                raise ConfigError(f"method {method.label!r}: {key!r} is the same for all methods, so it is not tuned")
        comparison.config(i)
    return comparison


def _merged(tree: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        here = tree.get(key)
        tree[key] = _merged(dict(here), value) if isinstance(here, dict) and isinstance(value, dict) else value
    return tree


def _methods(given: Sequence[Any]) -> tuple[Method, ...]:
    methods: list[Method] = []
    for i, one in enumerate(given):
        try:
            method = Method.model_validate(one)
        except ValidationError as error:
            raise ConfigError(sentences(error, Method, f"methods[{i}]")) from None
        label = method.label or method.name
        if folder_name(label) in [folder_name(m.label) for m in methods]:
            if method.label:
                raise ConfigError(f"methods[{i}].label = {label!r} is used twice; labels must differ")
            label = f"{label} {1 + sum(m.name == method.name for m in methods)}"
        methods.append(method.model_copy(update={"label": label}))
    return tuple(methods)


def folder_name(label: str) -> str:
    """The folder of a method.

    >>> folder_name("FedAvg, 2 epochs")
    'fedavg-2-epochs'
    """
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "method"


def own_models(label: str) -> str:
    """The label of a row about the clients' own models."""
    return f"{label} (personal)"


def global_model(label: str) -> str:
    """The label of a row about the global model of a method whose clients have own models."""
    return f"{label} (global)"


def rows_by_model(methods: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a comparison's table: two for a method whose clients have own models, one for every other.

    >>> [row["label"] for row in rows_by_model([{"label": "fedper", "personal": {"score": 0.9}}, {"label": "fedavg"}])]
    ['fedper (personal)', 'fedper (global)', 'fedavg']
    """
    rows: list[dict[str, Any]] = []
    for row in methods:
        own = row.get("personal")
        if own is None:
            rows.append(dict(row))
        else:
            rows += [{**row, **own, "label": own_models(row["label"])}, {**row, "label": global_model(row["label"])}]
    return rows


def cohorts_of(protocol: Protocol, cohort: int, costs: Sequence[Cost]) -> list[int]:
    """Clients per round of each method: ``cohort`` for the cheapest; for others the most that send no more bytes.

    >>> from fedbraid.costs import ExchangeCost
    >>> fedavg, mime_adam = (Cost((ExchangeCost("train", down, up),), 4) for down, up in ((4, 4), (20, 8)))
    >>> cohorts_of("total-communication", 20, [fedavg, mime_adam])
    [20, 5]
    """
    if protocol == "rounds":
        return [cohort] * len(costs)
    bytes_of = [one.up if protocol == "client-communication" else one.down + one.up for one in costs]
    budget = cohort * min(bytes_of)
    for i, each in enumerate(bytes_of):
        if each > budget:
            raise ConfigError(
                f"protocol = {protocol!r}: method number {i + 1} sends {each / min(bytes_of):.3g} times the bytes per "
                f"client of the cheapest, so with cohort = {cohort} it would have no clients; use a larger cohort"
            )
    return [budget // each for each in bytes_of]


def write_comparison(path: Path, comparison: Comparison) -> None:
    """Write what `load_comparison` reads."""
    files.write_text(path, seal_lines(_text(comparison)))


def _text(comparison: Comparison) -> str:
    import tomli_w

    tree = tomllib.loads(dump(comparison.base))
    tree["algorithm"].pop("name")
    tree["compare"] = comparison.settings.model_dump(mode="json", exclude_none=True)
    tree["sweep"] = comparison.tuning.model_dump(mode="json", exclude_none=True, exclude={"over"})
    tree["methods"] = [method.model_dump(mode="json", exclude_none=True) for method in comparison.methods]
    return tomli_w.dumps(tree)


def reopen_comparison(folder: Path) -> Comparison:
    """Read a stopped comparison, to continue it."""
    if not (folder / COMPARE).is_file():
        raise ConfigError(
            f"{folder} is not the folder of a comparison: it has no {COMPARE}. If the comparison was stopped before it "
            f"wrote this file, start it again with --out {folder}"
        )
    read_sealed_toml(folder / COMPARE, lambda: _text(load_comparison(folder / COMPARE)))
    return load_comparison(folder / COMPARE)
