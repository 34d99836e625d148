"""The configuration of a run: read from TOML and checked, with a default for every key.

In sections with a ``name`` (data, model, algorithm, transforms) all other keys are options of the named factory. They
are checked against the factory's signature. All errors are reported before anything runs, with the key, the given
value, the allowed values and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedbraid.names import is_reference, options_of, unknown
from fedbraid.simulation.asynchrony import Asynchrony
from fedbraid.simulation.clock import Clock
from fedbraid.simulation.options import EngineOptions

__all__ = [
    "Config",
    "ConfigError",
    "dump",
    "load_config",
    "options_of",
    "parse",
    "read_tree",
    "sentences",
    "unknown",
]


SEEDS = 2**63  # seeds are 64-bit integers
MOST_ROUNDS = 10**9  # at a thousand rounds per second this takes eleven days
_SHOWN = 200  # characters of a value in an error message
_LINE = 2000  # characters of a line
_LISTED = 8  # files in an error message
_KIND = re.compile(r"(constrained-|function-|literal\[|tuple\[|list\[|dict\[)|(int|str|float|bool|none)$")


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and says how to correct it."""

    def __init__(self, message: str) -> None:
        """Very long lines, of very long values, are cut in the middle."""
        lines = message.split("\n")
        cut = [line if len(line) <= _LINE else f"{line[:_SHOWN]} ... {line[-_SHOWN:]}" for line in lines]
        super().__init__("\n".join(cut))


class _Section(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """A section with a name, and options that depend on the name."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Arrival(_Section):
    """Which uploads arrive, in a simulation.

    drop [share]: share of the uploads that are lost, at random.
    deadline [seconds]: uploads that take longer are lost; none: the server waits for all. The time of a client is its
        latency plus that of its local steps.
    seconds_per_step [seconds]: time that a client needs for one local step.
    latency_median [seconds]: the median of the clients' latencies, which are log-normal.
    latency_sigma [standard deviation of the logarithm]: how much the latencies differ.
    """

    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    deadline: Annotated[float, Field(gt=0)] | None = None
    seconds_per_step: Annotated[float, Field(ge=0)] = 1.0
    latency_median: Annotated[float, Field(gt=0)] = 1.0
    latency_sigma: Annotated[float, Field(ge=0)] = 0.5


class Attack(_Section):
    """Byzantine clients in a simulation: a ``share`` of all send ``factor`` times their upload; -1 flips its sign.

    They are drawn with a separate seed, so they are the same for every seed of a comparison.

    share [share]: share of the clients that attack.
    factor [times the upload]: what an attacker sends; -1 flips the sign of the upload.
    seed [number]: seed that chooses the attackers.
    """

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    factor: Annotated[float, Field(allow_inf_nan=False)] = -1.0
    seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0


class Evaluation(_Section):
    """Evaluation on the test split.

    every [rounds]: rounds between two evaluations; the last round is always evaluated.
    metrics: further metrics, "f1" or "auc" for classes, "r2" for values.
    """

    every: Annotated[int, Field(ge=1)] = 10
    metrics: tuple[Literal["f1", "auc", "r2"], ...] = ()


class Checkpoint(_Section):
    """What a run saves, so that it can be continued.

    every [rounds]: rounds between two checkpoints.
    best: also keep the parameters of the best evaluation, by the metric of [stop].
    """

    every: Annotated[int, Field(ge=1)] = 50
    best: bool = True


class Stop(_Section):
    """When a run ends before its last round, by an evaluated metric (default: the accuracy, else the loss).

    metric: the column of the evaluations, such as "test_accuracy".
    target [that of the metric]: end when the metric reaches this value and keeps it: an evaluation is at the target or
        better, and so is the mean of that evaluation and the ``keep - 1`` evaluations after it.
    keep [evaluations]: number of evaluations over which the target must be kept.
    patience [evaluations]: end when the best value is this many evaluations old.
    """

    metric: str | None = None
    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    keep: Annotated[int, Field(ge=1)] = 5
    patience: Annotated[int, Field(ge=1)] | None = None


class Track(_Section):
    """Where the numbers of a run are sent while it runs.

    to: any of tensorboard:FOLDER, mlflow:URI and wandb:PROJECT.
    """

    to: tuple[str, ...] = ()


class Config(_Section):
    """One run.

    seed [number]: the seed of all random numbers of the run.
    rounds [rounds]: number of rounds to train.
    cohort [clients]: number of clients that take part in a round; "all": every client in every round.
    data: the data set and how it is divided; other keys are options of the data set and of its partition.
    model: the model; other keys are its options.
    algorithm: the method; other keys are its options. Without a name it is FedAuto ahead, which measures its learning
        rates and needs no tuning (docs/advice-benchmark.md); name = "fedavg" gives FedAvg.
    transforms: changes of the method, the first one innermost; other keys of an entry are its options.
    modules: the folder in which your own modules (names of the form ``module:attribute``) are searched, besides the
        installed ones. Default: the folder of the configuration file.
    """

    seed: Annotated[int, Field(ge=0, lt=SEEDS)] = 0
    rounds: Annotated[int, Field(ge=1, le=MOST_ROUNDS)] = 200
    cohort: Annotated[int, Field(ge=1)] | Literal["all"] = 10
    data: Named = Named(name="digits")
    model: Named = Named.model_validate({"name": "mlp", "hidden": [64]})
    algorithm: Named = Named(name="fedauto_ahead")
    transforms: tuple[Named, ...] = ()
    arrival: Arrival = Arrival()
    clock: Clock = Clock()
    asynchrony: Asynchrony = Asynchrony()
    attack: Attack = Attack()
    evaluation: Evaluation = Evaluation()
    engine: EngineOptions = EngineOptions()
    checkpoint: Checkpoint = Checkpoint()
    stop: Stop = Stop()
    track: Track = Track()
    modules: str | None = None


def load_config(path: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file (default: the embedded one), changed by ``key.path=value`` settings.

    >>> load_config(settings=["algorithm.name=fedprox", "algorithm.alpha=0.5", "rounds=7"]).algorithm.options
    {'alpha': 0.5}
    """
    return parse(read_tree(None if path is None else Path(path), settings))


def read_tree(path: Path | None = None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file as nested mappings, changed by ``key.path=value`` settings; it is not checked yet."""
    for setting in settings:  # before the file: of `--set KEY VALUE`, VALUE is taken for the name of the file
        _parts_of(setting)
    tree = {} if path is None else _read(path)
    for setting in settings:
        _apply(tree, setting)
    beside = Path.cwd() if path is None else path.absolute().parent
    if isinstance(folder := tree.get("modules"), str):
        tree["modules"] = str(beside / folder)
    elif folder is None and any(map(is_reference, _names_in(tree))):
        tree["modules"] = str(beside)
    return tree


def _read(path: Path) -> dict[str, Any]:
    """A TOML file as nested mappings. Errors name the file, the line and the next step."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"cannot read the configuration {path}: {_missing(path)}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
    except ValueError as error:  # of the encoding
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also of numbers with thousands of digits
        raise ConfigError(f"{path} is not valid TOML: {error}{_toml_hint(text, str(error))}") from None
    except RecursionError:
        raise ConfigError(f"{path} is not valid TOML: it is nested too deeply") from None


def _missing(path: Path) -> str:
    """What a message says about a configuration file that does not exist: the files that are there."""
    folder = path.parent
    if not folder.is_dir():
        return f"the folder {folder} does not exist"
    there = sorted(file.name for file in folder.glob("*.toml"))
    near = difflib.get_close_matches(path.name, there, n=1, cutoff=0.75)
    guess = f"; did you mean {near[0]}?" if near else ""
    listed = ", ".join(there[:_LISTED]) + (", ..." if len(there) > _LISTED else "")
    return f"the file does not exist{guess} ({f'TOML files there: {listed}' if there else 'no TOML file is there'})"


def _toml_hint(text: str, error: str) -> str:
    """The line in which a TOML file is wrong, and what is usually the cause."""
    place = re.search(r"at line (\d+)", error)
    lines = text.splitlines()
    if place is None or not 0 < int(place[1]) <= len(lines):
        return ""
    line = lines[int(place[1]) - 1].strip()
    usual = (
        '; write text in quotes, such as name = "digits"' if "Invalid value" in error and not line.endswith("=") else ""
    )
    return f": {_short(line)}{usual}"


def _names_in(tree: Any) -> Iterator[str]:
    """The names of parts anywhere in a tree: of sections, transforms, methods of a comparison and partitions."""
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, str) and key in ("name", "partition"):
            yield value
        elif isinstance(value, Mapping | list):
            yield from _names_in(value)


def parse(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from a nested mapping."""
    tree = dict(tree)
    _refuse_truth_values(tree, Config)
    for section in ("data", "model", "algorithm"):  # `name` may be left out to set options of the default
        given = tree.get(section)
        default: Named = Config.model_fields[section].default
        if isinstance(given, Mapping) and given.get("name", default.name) == default.name:
            tree[section] = {"name": default.name, **default.options, **given}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentences(error, Config)) from None
    except RecursionError:
        raise ConfigError("the configuration is nested too deeply") from None


_hints = functools.cache(get_type_hints)  # it takes longer than all other checks of a configuration


def _refuse_truth_values(tree: Mapping[str, Any], model: type[BaseModel], section: str = "") -> None:
    """Refuse true and false where a number is expected: pydantic would take them for 1 and 0."""
    for key, field in model.model_fields.items():
        value, kind = tree.get(key), field.annotation
        if isinstance(value, Mapping) and dataclasses.is_dataclass(kind):
            hints = _hints(kind)
            words = [name for name, given in value.items() if isinstance(given, bool) and hints.get(name) is not bool]
            if words:
                raise ConfigError(_not_a_truth_value(f"{section}{key}.{words[0]}", value[words[0]]))
        elif isinstance(value, Mapping) and isinstance(kind, type) and issubclass(kind, _Section):
            _refuse_truth_values(value, kind, f"{section}{key}.")
        elif isinstance(value, bool) and kind is not bool:
            raise ConfigError(_not_a_truth_value(f"{section}{key}", value))


def _not_a_truth_value(key: str, value: bool) -> str:
    return f"{key} = {str(value).lower()}: true and false are not allowed here"


def sentences(error: ValidationError, model: type[BaseModel], section: str = "") -> str:
    """The errors in the input of a model, one line per key; ``section`` is the section that holds the model's keys."""
    alternatives: dict[str, list[Mapping[str, Any]]] = {}  # of a key that may have values of several kinds
    for one in error.errors():
        alternatives.setdefault(".".join(map(str, _location(one))), []).append(one)
    return "\n".join(_sentence(several, model, section) for several in alternatives.values())


def _parts_of(setting: str) -> tuple[str, str]:
    """The key and the value of a ``key=value`` setting."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"a setting has the form key=value, without spaces, such as algorithm.client_lr=0.05; got {setting!r}"
        )
    return key.strip(), text


def _apply(tree: dict[str, Any], setting: str) -> None:
    key, text = _parts_of(setting)
    *parents, last = key.split(".")
    here = tree
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{key!r}: {part!r} is a value, not a section")
    try:
        here[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        here[last] = text.strip()  # a bare word is a string
    except (ValueError, RecursionError):
        raise ConfigError(f"{key}: the value {_short(text)} is too long or nested too deeply") from None


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _fields_at(model: Any, location: Sequence[Any]) -> list[str]:
    for part in location:
        annotation = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        if dataclasses.is_dataclass(annotation):
            return [field.name for field in dataclasses.fields(annotation)]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _location(error: Mapping[str, Any]) -> list[str | int]:
    """The path of a key. Pydantic adds the kind of value that it tried, such as ``constrained-int``: left out."""
    return [part for part in error["loc"] if not (isinstance(part, str) and _KIND.match(part))]


# What is allowed, by pydantic's type of an error; its own message ("input should be a valid tuple") names Python types.
_ALLOWED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "tuple_type": 'a list in brackets, such as ["a", "b"]',
    "list_type": 'a list in brackets, such as ["a", "b"]',
    "model_type": "a section or a table",
    "model_attributes_type": "a section or a table",
    "dataclass_type": "a section or a table",
}


def _allowed(error: Mapping[str, Any]) -> str:
    message = _ALLOWED.get(error["type"]) or error["msg"].lower().removeprefix("input should be ")
    return message if message.startswith("input") else f"must be {message}"


def _sentence(errors: Sequence[Mapping[str, Any]], model: type[BaseModel], section: str) -> str:
    error, location = errors[0], _location(errors[0])
    before = [section] if section else []
    key = ".".join(map(str, [*before, *location]))
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a section, of engine options
        parent = ".".join(map(str, [*before, *location[:-1]]))
        return unknown(f"key in [{parent}]" if parent else "key", str(location[-1]), _fields_at(model, location[:-1]))
    given = _short(json.dumps(error["input"], default=str))
    if error["type"] == "value_error":  # raised by our own check: its message is complete
        return f"{key} = {given}: {error['msg'].removeprefix('Value error, ')}"
    if hint := _table_hint(location, error["input"]):
        return f"{key} = {given}: {hint}"
    allowed = [_allowed(one) for one in errors]
    return f"{key} = {given}: {' or '.join([allowed[0], *(one.removeprefix('must be ') for one in allowed[1:])])}"


def _table_hint(location: Sequence[Any], given: Any) -> str:
    """What to write instead of a bare name for a part, or of something else than a list of transforms."""
    name = given if isinstance(given, str) else "NAME"
    if location == ["transforms"]:
        return 'must be a list of tables, such as [{name = "clip", bound = 1.0}]'
    if len(location) == 2 and location[0] == "transforms" and not isinstance(given, Mapping):
        return f'must be a table with a name, such as {{name = "{name}"}}'
    if location in (["data"], ["model"], ["algorithm"]) and not isinstance(given, Mapping):
        return f'must be a section with a name: {location[0]}.name = "{name}" (or --set {location[0]}.name={name})'
    return ""


def dump(config: Config) -> str:
    """The configuration as TOML, every key written out: a run folder's ``config.toml``."""
    import tomli_w

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    return tomli_w.dumps(clean(config.model_dump(mode="json")))
