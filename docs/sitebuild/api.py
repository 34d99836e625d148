"""The pages of the API: one per package, with every public name.

Public is what ``docs/policy.md`` says: the names in ``__all__`` of packages, and of the modules directly in
``fedbraid``, whose path has no part that begins with an underscore, except `INTERNAL`.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any, NamedTuple

import fedbraid

FIRST = ("fedbraid", "fedbraid.core", "fedbraid.local", "fedbraid.algorithms", "fedbraid.transforms", "fedbraid.data")
INTERNAL = ("cli", "drawing", "files", "limited_json", "sealed", "start", "units")  # see docs/policy.md
VALUE = 300  # characters of the value of a constant
TOP_LEVEL = ("fedbraid.algorithms", "fedbraid.transforms")  # `fedbraid` repeats their names


class Listed(NamedTuple):
    """A public name. ``path``: where it is documented; None: it is documented on the page of ``home``."""

    name: str
    path: str | None
    home: str


def packages() -> list[ModuleType]:
    """The packages with public names: those that people use most first."""
    found = [fedbraid]
    for module in pkgutil.walk_packages(fedbraid.__path__, "fedbraid."):
        parts = module.name.split(".")
        hidden = parts[1] in INTERNAL or any(part.startswith("_") for part in parts)
        if not hidden and (module.ispkg or module.name.count(".") == 1):
            found.append(importlib.import_module(module.name))
    found = [module for module in found if getattr(module, "__all__", ())]
    order = {name: i for i, name in enumerate(FIRST)}
    return sorted(found, key=lambda module: (order.get(module.__name__, len(order)), module.__name__))


def public_names() -> dict[str, list[Listed]]:
    """The public names of every package, and where each is documented."""
    homes: dict[int, str] = {}
    owners = [importlib.import_module(name) for name in TOP_LEVEL]
    owned = {name: owner.__name__ for owner in owners for name in owner.__all__}
    listed: dict[str, list[Listed]] = {}
    for package in packages():
        rows = []
        for name in sorted(package.__all__, key=lambda name: (name.lower(), name)):
            thing = getattr(package, name)
            path = f"{package.__name__}.{name}"
            if package is fedbraid and name in owned:
                rows.append(Listed(path, None, owned[name]))
            elif inspect.ismodule(thing):
                rows.append(Listed(path, None, thing.__name__))
            elif _has_identity(thing) and homes.get(id(thing), package.__name__) != package.__name__:
                rows.append(Listed(path, None, homes[id(thing)]))
            else:
                homes[id(thing)] = package.__name__
                rows.append(Listed(path, path, package.__name__))
        listed[package.__name__] = rows
    return listed


def _has_identity(thing: Any) -> bool:
    """Whether the same object means the same name: small constants are shared by chance."""
    return inspect.isclass(thing) or inspect.isroutine(thing)


def page_of(package: str) -> str:
    return f"reference/api/{package}.md"


def api_pages() -> dict[str, str]:
    """The Markdown of every page, by its path in the site."""
    pages = {}
    listed = public_names()
    for package, rows in listed.items():
        about = (inspect.getdoc(importlib.import_module(package)) or "").split("\n")[0]
        lines = [f"# {package}", "", about, ""]
        elsewhere: dict[str, list[str]] = {}
        for row in rows:
            if row.path is None:
                elsewhere.setdefault(row.home, []).append(row.name)
        for home, names in elsewhere.items():
            where = f"[{home}]({home}.md)" if home in listed and home != package else f"`{home}`"
            short = ", ".join(f"`{name}`" for name in names)
            lines += [f"Documented in {where}: {short}.", ""]
        for row in rows:
            if row.path is not None:
                lines += [*_entry(row.path, package), ""]
        pages[page_of(package)] = "\n".join(lines)
    pages["reference/api/index.md"] = _index(listed)
    return pages


def _entry(path: str, package: str) -> list[str]:
    """A class or function for mkdocstrings; a constant or a type alias with its value."""
    name = path.removeprefix(f"{package}.")
    thing = getattr(importlib.import_module(package), name)
    if _has_identity(thing):
        return [f"::: {path}"]
    shown = " ".join(repr(thing).split())
    value = (
        []
        if " at 0x" in shown
        else ["", "```python", f"{name} = {shown[:VALUE]}{' ...' if len(shown) > VALUE else ''}", "```"]
    )
    return [f"## `{name}` {{ #{path} }}", "", f"A constant or alias, of type `{type(thing).__name__}`.", *value]


def _index(listed: dict[str, list[Listed]]) -> str:
    lines = [
        "# API reference",
        "",
        "Every public name, from the source of the library. [What stays stable](../../policy.md) says what is public.",
        "Names are listed on the page of the package that you import them from.",
        "",
        "| package | what it is | names |",
        "| --- | --- | --- |",
    ]
    for package, rows in listed.items():
        about = (inspect.getdoc(importlib.import_module(package)) or "").split("\n")[0].replace("|", "\\|")
        lines.append(f"| [{package}]({package}.md) | {about} | {len(rows)} |")
    return "\n".join(lines) + "\n"
