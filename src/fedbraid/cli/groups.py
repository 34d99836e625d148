"""Groups of command line options.

Typer makes one option of each parameter of a command's function. With `with_groups` a parameter may be a NamedTuple:
every field becomes an option, and the function gets them as one value.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

__all__ = ["Output", "with_groups"]


class Output(NamedTuple):
    """How a command prints its result."""

    json: Annotated[bool, typer.Option("--json", help="print one JSON object on stdout")] = False
    quiet: Annotated[bool, typer.Option("--quiet", help="no progress, no table")] = False

    @property
    def shown(self) -> bool:
        """Whether progress and tables are shown."""
        return not (self.json or self.quiet)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with its NamedTuple parameters replaced by one parameter per field.

    >>> @with_groups
    ... def tell(name: str, output: Output) -> None:
    ...     print(name, output.json, output.quiet)
    >>> list(inspect.signature(tell).parameters)
    ['name', 'json', 'quiet']
    >>> tell("x", quiet=True)
    x False True
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if name != "return" and hasattr(hint, "_field_defaults")}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name]))
            continue
        fields = get_type_hints(groups[name], include_extras=True)
        for field in groups[name]._fields:
            default = groups[name]._field_defaults[field]
            one = inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=fields[field])
            parameters.append(one)
    plain = [one for one in parameters if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    keyword = [one for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*plain, *keyword])

    @functools.wraps(command)
    def flat(*arguments: Any, **options: Any) -> None:
        given = signature.bind(*arguments, **options)
        given.apply_defaults()
        values = dict(given.arguments)
        grouped = {
            name: group(**{field: values.pop(field) for field in group._fields}) for name, group in groups.items()
        }
        return command(**values, **grouped)

    flat.__signature__ = signature  # type: ignore[attr-defined]
    flat.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
    return flat
