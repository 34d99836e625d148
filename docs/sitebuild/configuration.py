"""The page of the configuration: every key with its default, its range, its unit and what it does.

Defaults and ranges are those of the classes that check a configuration. Units and texts are in the docstrings of these
classes, as ``key [unit]: text``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from fedbraid.experiment.comparison import CompareSettings, Method
from fedbraid.experiment.config import Config, Named
from fedbraid.experiment.lab import SweepSettings
from fedbraid.flower import Policy
from fedbraid.masking import Secure

ENTRY = re.compile(r"^(\w+)(?: \[([^\]]+)\])?: (.*(?:\n    .*)*)", re.M)
KINDS = {
    "algorithms": "`[algorithm]`: options by algorithm",
    "transforms": "`[[transforms]]`: options by transform",
    "models": "`[model]`: options by model",
    "datasets": "`[data]`: options by data set",
    "partitions": "`[data]`: options by partition",
}


TITLES = {
    "": "Top level",
    "methods": "`[[methods]]`",
    "policy": "`[policy]` of federation.toml",
    "secure": "`[secure]` of federation.toml",
}


class Key(NamedTuple):
    """One key of a configuration."""

    section: str
    name: str
    default: str
    allowed: str
    unit: str
    text: str
    numeric: bool


def sections() -> dict[str, type]:
    """The sections of a configuration and of a comparison, with the class that checks each; "" is the top level."""
    found: dict[str, type] = {"": Config}
    for name, field in Config.model_fields.items():
        if inspect.isclass(field.annotation) and field.annotation is not Named and _checks(field.annotation):
            found[name] = field.annotation
    return found | {
        "sweep": SweepSettings,
        "compare": CompareSettings,
        "methods": Method,
        "policy": Policy,
        "secure": Secure,
    }


def _checks(kind: type) -> bool:
    return dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)


def keys_of(section: str, kind: type) -> Iterator[Key]:
    """The keys of a section."""
    texts = _texts(kind)
    hints = get_type_hints(kind, include_extras=True)
    for name, default in _fields(kind).items():
        hint = hints[name]
        unit, text = texts.get(name, ("", ""))
        yield Key(section, name, _default(default), _allowed(hint), unit, text, _numeric(hint))


def _fields(kind: type) -> dict[str, Any]:
    """The keys that a class checks, with their defaults; sections of the top level are no keys."""
    if dataclasses.is_dataclass(kind):
        return {
            f.name: PydanticUndefined if f.default is dataclasses.MISSING else f.default
            for f in dataclasses.fields(kind)
        }
    if issubclass(kind, BaseModel):
        inner = sections() if kind is Config else ()
        return {name: field.default for name, field in kind.model_fields.items() if name not in inner}
    return dict(kind._field_defaults)  # a NamedTuple


def _texts(kind: type) -> dict[str, tuple[str, str]]:
    """Unit and text of each key, from the docstrings of the class and of those it is derived from."""
    found: dict[str, tuple[str, str]] = {}
    for one in reversed(kind.__mro__):
        for name, unit, text in ENTRY.findall(inspect.cleandoc(one.__dict__.get("__doc__") or "")):
            found[name] = (unit, " ".join(text.split()))
    return found


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, BaseModel):
        value = {"name": value.name, **value.options} if isinstance(value, Named) else value.model_dump()
        return f"`{{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in value.items())} }}`"
    return f"`{json.dumps(value, default=str)}`"


def _allowed(hint: Any) -> str:
    """The allowed values in words."""
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        limits = [one for field in metadata for one in getattr(field, "metadata", [field])]
        words = [_limit(one) for one in limits]
        return ", ".join([_allowed(inner), *(word for word in words if word)])
    if get_origin(hint) is Literal:
        return ", ".join(f"`{json.dumps(value)}`" for value in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_allowed(one) for one in get_args(hint) if one is not type(None))
    if get_origin(hint) in (tuple, list):
        return f"list of {_allowed(get_args(hint)[0]).replace('table', 'tables')}"
    if get_origin(hint) is dict:
        return "table"
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Named: "table with a `name`"}
    return names.get(hint, getattr(hint, "__name__", str(hint)).lower())


def _limit(one: Any) -> str:
    for kind, word, name in ((Ge, "from", "ge"), (Gt, "above", "gt"), (Le, "to", "le"), (Lt, "below", "lt")):
        if isinstance(one, kind):
            value = getattr(one, name)
            return f"{word} {'2^63' if value == 2**63 else format(value, ',')}"
    return ""


def _numeric(hint: Any) -> bool:
    if get_origin(hint) is Annotated:
        return _numeric(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return any(_numeric(one) for one in get_args(hint))
    return hint in (int, float)


def configuration_page() -> str:
    """The page as Markdown."""
    lines = [
        "# Configuration",
        "",
        "A configuration is a TOML file. Every key has a default, so an empty file is a valid configuration. On",
        "the command line `--set SECTION.KEY=VALUE` changes one key. The sections `[sweep]`, `[compare]` and",
        "`[[methods]]` are for [sweeps and comparisons](../sweeps.md). `[policy]` and `[secure]` belong to a separate",
        "file, `federation.toml`, of [a deployment](../deploy.md). All other sections are for every [run](../runs.md).",
        "",
    ]
    for section, kind in sections().items():
        title = TITLES.get(section, f"`[{section}]`")
        about = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0].split("\n")[0].replace("``", "`")
        lines += [f"## {title}", "", about, ""]
        lines += ["| key | default | allowed | unit | what it does |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(key) for key in keys_of(section, kind)] + [""]
    lines += _options()
    return "\n".join(lines)


def _row(key: Key) -> str:
    name = f"{key.section}.{key.name}" if key.section else key.name
    cells = (f"`{name}`", key.default, key.allowed, key.unit, key.text.replace("``", "`"))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _options() -> Iterator[str]:
    """Tables of the options that depend on a name, as ``fedbraid list`` prints them."""
    from fedbraid.cli.listing import _entry, _names

    for kind, title in KINDS.items():
        yield from (f"## {title}", "", "| name | what it is | options with defaults |", "| --- | --- | --- |")
        for found in _names(kind).listed():
            if isinstance(found, str) or found.source != "fedbraid":
                continue
            entry = _entry(kind, found)
            options = ", ".join(
                f"`{name}`" if value is None else f"`{name} = {json.dumps(value)}`"
                for name, value in entry["options"].items()
            )
            yield f"| `{entry['name']}` | {entry['about']} | {options} |".replace("<", "&lt;")
        yield ""
