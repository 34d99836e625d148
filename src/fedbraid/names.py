"""Names in configurations: of the library's own parts, of parts of installed packages, and ``module:attribute``.

Each room that has parts with names keeps one `Names`: algorithms, transforms, models, data sets and partitions. A name
is looked up in three places:

- the library's own table;
- the entry points of installed packages (groups ``fedbraid.algorithms``, ``fedbraid.transforms``, ``fedbraid.models``,
  ``fedbraid.datasets``, ``fedbraid.partitions``);
- the object at ``module:attribute``. The module may lie beside the configuration file.

Importing a module runs its code, so a configuration is trusted input. But an object is called only if it says that it
is a factory of the right kind, only with options that it declares, and its result is checked.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points, packages_distributions, version
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, Unpack, get_args, get_origin, get_type_hints

__all__ = ["Found", "Names", "factory", "is_reference", "nearest", "options_of", "resolve", "unknown"]

KINDS = ("algorithm", "transform", "model", "dataset", "partition")
OWN = "fedbraid"  # the source of the library's own parts
_MARK = "__fedbraid_factory__"
_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def factory(kind: str) -> Callable[[Callable], Callable]:
    """Mark a function as a factory of one kind, so that a configuration may name it as ``module:function``.

    kind: "algorithm", "transform", "model", "dataset" or "partition".

    >>> @factory("partition")
    ... def halves(n, *, seed=0):
    ...     return [range(0, n // 2), range(n // 2, n)]
    """
    if kind not in KINDS:
        raise ValueError(unknown("kind of factory", str(kind), KINDS))

    def mark(function: Callable) -> Callable:
        setattr(function, _MARK, kind)
        return function

    return mark


def is_reference(name: str) -> bool:
    """Whether a name has the form ``module:attribute``.

    >>> is_reference("my_package.methods:fedexp"), is_reference("fedavg"), is_reference("C:/stores/school")
    (True, False, False)
    """
    return _REFERENCE.fullmatch(name) is not None


def unknown(what: str, given: str, allowed: Iterable[str]) -> str:
    """The error message for an unknown name: the allowed names, and the nearest one."""
    allowed = sorted(allowed)
    near = difflib.get_close_matches(given, allowed, n=1, cutoff=0.5)
    guess = f"; did you mean {near[0]!r}?" if near else ""
    return f"{what} {given!r} does not exist{guess} (there are: {', '.join(allowed)})"


def nearest(given: str, allowed: Iterable[str]) -> str:
    """A suggestion inside an error message: the nearest of the allowed names; empty if none is near.

    >>> nearest("alfa", ["alpha", "clients"]), nearest("colour", ["alpha", "clients"])
    (" (did you mean 'alpha'?)", '')
    """
    near = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.65)
    return f" (did you mean {near[0]!r}?)" if near else ""


def options_of(function: Callable, skip: Sequence[str] = ()) -> dict[str, Any]:
    """The keyword options of a factory and their defaults; for options of a typed ``**`` parameter it is None."""
    options: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for typed in get_args(get_type_hints(function).get(name)):  # of Unpack[a TypedDict]
                options |= dict.fromkeys(get_type_hints(typed))
        elif parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            options[name] = parameter.default
    return {name: default for name, default in options.items() if name not in skip}


@dataclass(frozen=True)
class Found:
    """A part by its name. ``thing``: the entry of the library's table, a factory, or the object itself.

    source: "fedbraid", a package with its version, or the file that the module was read from.
    module: the module that another package's part was taken from.
    """

    name: str
    thing: Any
    source: str = OWN
    module: str = ""

    @property
    def own(self) -> bool:
        """Whether it is the library's own."""
        return self.source == OWN


@dataclass(frozen=True)
class Names:
    """The names of one kind of part.

    own: the library's own parts.
    result: the type that a factory returns; None if there is no such type, then a factory must be marked.
    first: a parameter that factories of this kind have; ``without``: one that they do not have.
    instances: whether the object itself may be named, besides a factory of it.
    """

    kind: str
    own: Mapping[str, Any]
    result: type | None = None
    first: str = ""
    without: str = ""
    instances: bool = False

    @property
    def path(self) -> str:
        """Where the type that a factory returns comes from."""
        return f"{self.result.__module__}.{self.result.__qualname__}" if self.result else ""

    @property
    def one(self) -> str:
        return f"an {self.kind}" if self.kind[0] in "aeiou" else f"a {self.kind}"

    @property
    def group(self) -> str:
        """The group of entry points."""
        return f"fedbraid.{self.kind}s"

    def all(self) -> list[str]:
        """The library's names, then those of installed packages. Nothing is imported."""
        return [*self.own, *(name for name in _entry_points(self.group) if name not in self.own)]

    def find(self, name: str, folder: Path | None = None) -> Found:
        """The part called ``name``; ``folder`` is searched for the module of a ``module:attribute``.

        Raises ValueError if there is none, if two packages have one, or if it is not a factory of this kind.
        """
        points = _entry_points(self.group).get(name, ())
        sources = [OWN] * (name in self.own) + [_package(point) for point in points]
        if len(sources) > 1:
            own = self.own.get(name)
            ways = [f"{own.__module__}:{own.__name__}"] if inspect.isfunction(own) and self.result else []
            ways += [point.value for point in points]
            raise ValueError(
                f"{self.kind} {name!r} is in {' and in '.join(sources)}: uninstall one, or write the one that you mean "
                f"as {' or '.join(map(repr, ways))}"
            )
        if name in self.own:
            return Found(name, self.own[name])
        if points:
            thing = resolve(points[0].value, what=f"{self.kind} {name!r} of {sources[0]}")
            return self._checked(Found(name, thing, sources[0], points[0].module))
        if is_reference(name):
            thing, module = resolve(name, folder), name.partition(":")[0]
            return self._checked(Found(name, thing, _file_of(module) or f"the module {module}", module))
        if self.kind == "dataset" and "/" in name:
            raise ValueError(
                f"store {name!r} does not exist: there is no such folder in {Path.cwd()}. Make one with `fedbraid data "
                f"import`, or name a data set of the library: {', '.join(sorted(self.all()))}"
            )
        raise ValueError(unknown(self.kind, name, self.all()) + ", or write 'module:attribute' for one of your own")

    def listed(self) -> list[Found | str]:
        """Every name with its part; for a part of another package that cannot be used, the reason."""
        found: list[Found | str] = []
        for name in self.all():
            try:
                found.append(self.find(name))
            except ValueError as error:
                found.append(f"{name}: {error}")
        return found

    def call(self, found: Found, options: Mapping[str, Any], offered: Mapping[str, Callable[[], Any]]) -> Any:
        """Call a factory of another package with options that it declares, and check the result.

        offered: arguments that are not options, by name; a factory gets those that it declares.
        """
        thing = found.thing
        if self.instances and self.result is not None and isinstance(thing, self.result):
            if options:
                raise ValueError(f"{found.name} is {self.one}, not a function, and takes no options: {min(options)}")
            return thing
        declared = options_of(thing)
        check_options(f"{self.kind} {found.name!r}", thing, options, skip=tuple(offered))
        made = thing(**{name: make() for name, make in offered.items() if name in declared}, **options)
        if self.result is not None and not isinstance(made, self.result):
            raise ValueError(f"{found.name} returned a {type(made).__name__}; {self.one} must be a {self.path}")
        return made

    def _checked(self, found: Found) -> Found:
        """Refuse what is not a factory of this kind, before it is called."""
        thing = found.thing
        if self.instances and self.result is not None and isinstance(thing, self.result):
            return found
        marked = inspect.getattr_static(thing, _MARK, None)
        if marked is not None and marked != self.kind:
            raise ValueError(f"{found.name} is marked as a factory of a {marked}, but it is used as {self.one}")
        plain = inspect.isfunction(thing) or inspect.ismethod(thing)
        if not (callable(thing) and marked) and not (plain and self._returns(thing)):
            or_type = f", or annotate what it returns: def ...(...) -> {self.path}" if self.result else ""
            raise ValueError(
                f"{found.name} is not declared as a factory of {self.one}, so it is not called. If it is one, mark "
                f'it with @fedbraid.factory("{self.kind}"){or_type}'
            )
        parameters = inspect.signature(thing).parameters
        if self.first and self.first not in parameters:
            raise ValueError(f"{found.name} has no parameter {self.first!r}: {self.one} is called with {self.first}")
        if self.without and self.without in parameters:
            raise ValueError(f"{found.name} has the parameter {self.without!r}: it is a transform, not {self.one}")
        return found

    def _returns(self, function: Callable) -> bool:
        """Whether the return annotation is the type of this kind. Text is looked up, never evaluated."""
        try:
            hint = inspect.get_annotations(function).get("return")
        except Exception:  # annotations are code, and evaluated late in newer Pythons
            return False
        if isinstance(hint, str):
            first, *rest = hint.strip().split(".")
            scope: Any = getattr(function, "__globals__", {}).get(first)
            hint = functools.reduce(lambda found, part: getattr(found, part, None), rest, scope)
        return self.result is not None and isinstance(hint, type) and issubclass(hint, self.result)


def check_options(what: str, function: Callable, options: Mapping[str, Any], *, skip: Sequence[str] = ()) -> None:
    """Refuse options that a factory does not declare, values that do not fit their annotations, and missing options.

    skip: parameters that are no options.
    """
    declared = options_of(function, skip=skip)
    for name in options:
        if name not in declared:
            raise ValueError(unknown(f"option of {what}:", name, declared))
    missing = [name for name, default in declared.items() if default is inspect.Parameter.empty and name not in options]
    if missing:
        raise ValueError(f"{what} needs the option {missing[0]!r}")
    check_types(what, function, options)


def check_types(what: str, function: Callable, options: Mapping[str, Any]) -> None:
    """Refuse plain values that do not fit the annotations of a factory.

    >>> def factory(*, tied: bool = True) -> None: ...
    >>> check_types("model 'gpt'", factory, {"tied": "no"})
    Traceback (most recent call last):
      ...
    ValueError: option tied of model 'gpt' must be true or false, got 'no'
    """
    hints = _hints(function)
    for name, value in options.items():
        if not _fits(value, hints.get(name, Any)):
            raise ValueError(f"option {name} of {what} must be {_in_words(hints[name])}, got {value!r}")


def _hints(function: Callable) -> dict[str, Any]:
    """The annotations of a factory's options, also of a typed ``**`` parameter; none if they cannot be read."""
    try:
        hints = get_type_hints(function)
        for hint in list(hints.values()):
            if get_origin(hint) is Unpack:
                hints |= get_type_hints(*get_args(hint))
    except Exception:  # annotations of others may name what does not exist at run time
        return {}
    return hints


_WORDS: Mapping[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}


def _in_words(hint: Any) -> str:
    """An annotation as words for people who do not know Python.

    >>> _in_words(int | None), _in_words(Literal["sum", "mean"] | float), _in_words(str | Mapping[str, float])
    ('a whole number', "'sum' or 'mean' or a number", 'text in quotes or a table')
    """
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(_in_words(one) for one in inside if one is not type(None))
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin in (Sequence, tuple, list):
        item = _WORDS.get(inside[0]) if inside else None
        return f"a list, each {item}" if item else "a list"
    if origin in (Mapping, dict) or hint in (Mapping, dict):
        return "a table"
    return _WORDS.get(hint) or (hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", ""))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value of a configuration fits an annotation. Other values and unusual annotations fit."""
    if hint is Any or not isinstance(value, bool | int | float | str | Mapping | tuple | list):
        return True
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inside)
    if origin is Literal:
        return value in inside and type(value) in map(type, inside)
    if origin is not None and isinstance(value, str):
        return False  # a text is a sequence, too
    if origin in (Mapping, dict):
        return isinstance(value, Mapping)
    if origin in (Sequence, tuple, list):
        item = inside[0] if inside else Any
        return isinstance(value, tuple | list) and all(_fits(one, item) for one in value)
    allowed = {bool: bool, int: int, float: (int, float), str: str, type(None): ()}.get(hint)
    if allowed is None:
        return True
    return isinstance(value, allowed) and (hint is bool or not isinstance(value, bool))


# --- packages --------------------------------------------------------------------------------------------------------


def _entry_points(group: str) -> dict[str, list[EntryPoint]]:
    return _points_on_path(group, tuple(sys.path))


@functools.cache
def _points_on_path(group: str, path: tuple[str, ...]) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name. A package that is found twice on the path counts once."""
    del path
    points: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=group):
        same = points.setdefault(point.name, [])
        if (_distribution(point), point.value) not in [(_distribution(one), one.value) for one in same]:
            same.append(point)
    return points


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else f"the package of {point.value}"


# --- module:attribute ------------------------------------------------------------------------------------------------


def resolve(reference: str, folder: Path | None = None, *, what: str = "") -> Any:
    """The object at ``"module:attribute"``. The module must be importable, or lie in ``folder``.

    >>> resolve("fedbraid.models:mlp").__name__
    'mlp'
    """
    what = what or repr(reference)
    if not is_reference(reference):
        raise ValueError(f"expected 'module:attribute', got {reference!r}")
    module, _, attribute = reference.partition(":")
    try:
        found: Any = _import(module, folder)
    except (Exception, SystemExit) as error:
        if isinstance(error, _ConflictError):
            raise
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        looked = f" (looked in {folder} and in the installed packages)" if folder is not None else ""
        raise ValueError(f"cannot import the module {module!r} of {what}: {why}{looked}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = nearest(part, (name for name in dir(found) if not name.startswith("_")))
            raise ValueError(f"{what}: {getattr(found, '__name__', found)} has no {part!r}{near}")
        found = getattr(found, part)
    return found


class _ConflictError(ValueError):
    """Two different modules of one name."""


def _import(module: str, folder: Path | None) -> Any:
    """Import a module. Modules in ``folder`` never replace installed ones or those of Python: that is an error."""
    top = module.partition(".")[0]
    beside = None if folder is None else PathFinder.find_spec(top, [str(folder)])
    if beside is not None and beside.origin is not None and beside.loader is not None:
        there = _origin(top)
        if there is not None and not _same_code(there, beside.origin):
            raise _ConflictError(
                f"there are two modules {top!r}: {beside.origin}, beside the configuration, and {there}; rename yours"
            )
        if top not in sys.modules:
            loaded = importlib.util.module_from_spec(beside)
            sys.modules[top] = loaded
            try:
                beside.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[top]
                raise
    return importlib.import_module(module)


def _origin(top: str) -> str | None:
    """Where Python finds a top-level module without our help; None if nowhere."""
    if top in sys.modules:
        return getattr(sys.modules[top], "__file__", None) or "part of Python"
    spec = importlib.util.find_spec(top)
    return None if spec is None else spec.origin or "a folder without __init__.py"


def _same_code(a: str, b: str) -> bool:
    """Whether two modules are the same file, or copies of one another; of packages, all their files."""

    def files(origin: str) -> dict[str, bytes]:
        place = Path(origin)
        if place.name != "__init__.py":
            return {"": place.read_bytes()}
        return {str(file.relative_to(place.parent)): file.read_bytes() for file in place.parent.rglob("*.py")}

    if not Path(a).is_file():
        return False
    return Path(a).samefile(b) or files(a) == files(b)


def _file_of(module: str) -> str | None:
    return getattr(sys.modules[module], "__file__", None)


# --- code that goes with a deployment --------------------------------------------------------------------------------


def files_in(found: Found, folder: Path | None) -> dict[str, Path]:
    """The Python files of a part whose module lies in ``folder``, by their place in it; else none."""
    top = found.module.partition(".")[0]
    place = Path(_file_of(top) or "") if top else None
    if folder is None or place is None or not place.is_file():
        return {}
    folder = folder.resolve()
    if place.name != "__init__.py":
        return {place.name: place} if place.parent.resolve() == folder else {}
    if place.parent.parent.resolve() != folder:
        return {}
    return {str(file.resolve().relative_to(folder)): file for file in sorted(place.parent.rglob("*.py"))}


def requirement(found: Found) -> str | None:
    """The installed package that has a part's module, as ``name==version``; None if no package has it."""
    own = packages_distributions().get(found.module.partition(".")[0], ())
    return f"{own[0]}=={version(own[0])}" if own else None
