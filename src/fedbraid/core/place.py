"""Where an error was raised in the user's own code: file, line and function, for the messages of errors."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import jax

__all__ = ["failure", "place_of"]

_LIBRARIES = tuple(
    f"{Path(folder).resolve()}{os.sep}"
    for folder in {
        str(Path(__file__).parents[1]),  # fedbraid itself
        *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)


def place_of(error: BaseException) -> str:
    """The innermost line outside of fedbraid and of installed packages that the error went through; empty if none.

    >>> place_of(ValueError("never raised"))
    ''
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<") and not _is_library(Path(frame.filename).resolve()):
            return f"{Path(frame.filename).name}, line {frame.lineno}, in {frame.name}"
    return ""


def _is_library(path: Path) -> bool:
    return str(path).startswith(_LIBRARIES) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)


_OF_TRACING = (  # jax's errors for code that needs the values of arrays; their messages are pages long
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def failure(what: str, error: BaseException) -> str:
    """One message: what failed, where in the user's code, and with which error."""
    place = place_of(error)
    head = f"{what} failed{f' at {place}' if place else ''}: {type(error).__name__}: "
    if isinstance(error, _OF_TRACING):
        hint = (
            "Python's if, while, int() and float(), and functions of NumPy, cannot use the values of arrays: use "
            "jnp.where (torch.where in a PyTorch module), jax.lax.cond and jax.numpy"
        )
        return f"{head}{str(error).splitlines()[0].rstrip('.')}. {hint}"
    return f"{head}{error}"
