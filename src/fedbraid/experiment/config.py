"""The configuration of a run: read from TOML and checked, with a default for every key.

In sections with a ``name`` (data, model, algorithm, transforms) all other keys are options of the named factory. They
are checked against the factory's signature. All errors are reported before anything runs, with the key, the given
value, the allowed values and the nearest valid name.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError

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


class ConfigError(ValueError):
    """A configuration that cannot run; the message names the key and says how to correct it."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Named(BaseModel):
    """A section with a name, and options that depend on the name."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__ or {})


class Arrival(_Section):
    """Which uploads arrive. ``drop``: share that is lost at random. ``deadline``: uploads after it are lost."""

    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    deadline: Annotated[float, Field(gt=0)] | None = None
    seconds_per_step: Annotated[float, Field(ge=0)] = 1.0
    latency_median: Annotated[float, Field(gt=0)] = 1.0
    latency_sigma: Annotated[float, Field(ge=0)] = 0.5


class Attack(_Section):
    """Byzantine clients in a simulation: a ``share`` of all send ``factor`` times their upload; -1 flips its sign.

    They are drawn with a separate seed, so they are the same for every seed of a comparison.
    """

    share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    factor: Annotated[float, Field(allow_inf_nan=False)] = -1.0
    seed: Annotated[int, Field(ge=0)] = 0


class Evaluation(_Section):
    """Evaluation on the test split. ``metrics``: further metrics, "f1" or "auc" for classes, "r2" for values."""

    every: Annotated[int, Field(ge=1)] = 10
    metrics: tuple[Literal["f1", "auc", "r2"], ...] = ()


class Checkpoint(_Section):
    every: Annotated[int, Field(ge=1)] = 50


class Config(_Section):
    """One run."""

    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=1)] = 200
    cohort: Annotated[int, Field(ge=1)] | Literal["all"] = 10
    data: Named = Named(name="digits")
    model: Named = Named.model_validate({"name": "mlp", "hidden": [64]})
    algorithm: Named = Named(name="fedavg")
    transforms: tuple[Named, ...] = ()
    arrival: Arrival = Arrival()
    attack: Attack = Attack()
    evaluation: Evaluation = Evaluation()
    engine: EngineOptions = EngineOptions()
    checkpoint: Checkpoint = Checkpoint()


def unknown(what: str, given: str, allowed: Iterable[str]) -> str:
    """The error message for an unknown name: the allowed names, and the nearest one."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {given!r} does not exist{guess} (there are: {', '.join(allowed)})"


def options_of(factory: Callable, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The keyword options of a factory and their defaults; for options of a typed ``**`` parameter it is None."""
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for typed in get_args(get_type_hints(factory).get(name)):  # of Unpack[a TypedDict]
                options |= dict.fromkeys(get_type_hints(typed))
        elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            options[name] = parameter.default
    return {name: default for name, default in options.items() if name not in skip}


def load_config(path: Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file (default: the embedded one), changed by ``key.path=value`` settings.

    >>> load_config(settings=["algorithm.name=fedprox", "algorithm.alpha=0.5", "rounds=7"]).algorithm.options
    {'alpha': 0.5}
    """
    return parse(read_tree(path, settings))


def read_tree(path: Path | None = None, settings: Sequence[str] = ()) -> dict[str, Any]:
    """A TOML file as nested mappings, changed by ``key.path=value`` settings; it is not checked yet."""
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    for setting in settings:
        _apply(tree, setting)
    return tree


def parse(tree: Mapping[str, Any]) -> Config:
    """A checked configuration from a nested mapping."""
    tree = dict(tree)
    for section in ("data", "model", "algorithm"):  # `name` may be left out to set options of the default
        given = tree.get(section)
        default: Named = Config.model_fields[section].default
        if isinstance(given, Mapping) and given.get("name", default.name) == default.name:
            tree[section] = {"name": default.name, **default.options, **given}
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(sentences(error, Config)) from None


def sentences(error: ValidationError, model: type[BaseModel], section: str = "") -> str:
    """The errors in the input of a model, one line per key; ``section`` is the section that holds the model's keys."""
    return "\n".join(_sentence(one, model, section) for one in error.errors())


def _apply(tree: dict[str, Any], setting: str) -> None:
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"a setting reads key=value, such as algorithm.client_lr=0.05; got {setting!r}")
    *parents, last = key.strip().split(".")
    here = tree
    for part in parents:
        here = here.setdefault(part, {})
        if not isinstance(here, dict):
            raise ConfigError(f"{key.strip()!r}: {part!r} is a value, not a section")
    try:
        here[last] = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        here[last] = text.strip()  # a bare word is a string


def _fields_at(model: Any, location: Sequence[Any]) -> list[str]:
    for part in location:
        annotation = model.model_fields[part].annotation if part in getattr(model, "model_fields", {}) else None
        if dataclasses.is_dataclass(annotation):
            return [field.name for field in dataclasses.fields(annotation)]
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _sentence(error: Mapping[str, Any], model: type[BaseModel], section: str) -> str:
    location = [part for part in error["loc"] if isinstance(part, str | int)]
    before = [section] if section else []
    key = ".".join(map(str, [*before, *location]))
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):  # of a section, of engine options
        parent = ".".join(map(str, [*before, *location[:-1]]))
        return unknown(f"key in [{parent}]" if parent else "key", str(location[-1]), _fields_at(model, location[:-1]))
    given = json.dumps(error["input"], default=str)
    if error["type"] == "value_error":  # raised by our own check: its message is complete
        return f"{key} = {given}: {error['msg'].removeprefix('Value error, ')}"
    return f"{key} = {given}: {error['msg'].lower()}"


def dump(config: Config) -> str:
    """The configuration as TOML, every key written out: a run folder's ``config.toml``."""
    import tomli_w

    def clean(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if v is not None}
        return [clean(v) for v in value] if isinstance(value, list | tuple) else value

    return tomli_w.dumps(clean(config.model_dump(mode="json")))
