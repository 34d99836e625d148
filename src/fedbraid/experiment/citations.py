"""The paper of a method, read from the docstring of its factory or, if that cites none, of its module."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fedbraid import algorithms, transforms
from fedbraid.simulation.asynchrony import fedasync, fedbuff, semi_synchronous

__all__ = ["Citation", "citation"]


MODES = {"fedbuff": fedbuff, "fedasync": fedasync, "semi-synchronous": semi_synchronous}
PAPER = re.compile(r"\.\s.*\b(19|20)\d\d\b", re.DOTALL)  # authors, a full stop, and a year


class Citation(NamedTuple):
    """The source of a method: the first lines of its docstring, and the paper that it cites."""

    name: str
    about: str
    paper: str


def citation(kind: str, name: str, folder: Path | None = None) -> Citation:
    """The citation of an algorithm, a transform or an asynchrony, from its docstrings.

    ``folder`` is searched for the module of an algorithm or a transform.

    >>> citation("algorithm", "scaffold").paper.split(".")[-3].strip()
    'ICML 2020'
    >>> citation("algorithm", "fedavg").paper.split(",")[0]
    'H. B. McMahan'
    """
    if kind == "asynchrony":
        factory: Callable = MODES[name]
    else:
        factory = (algorithms.NAMES if kind == "algorithm" else transforms.NAMES).find(name, folder).thing
    module = inspect.getmodule(factory)
    about, *own = (inspect.getdoc(factory) or "").split("\n\n")
    shared = (inspect.getdoc(module) or "").split("\n\n")[1:] if module else []
    paper = next((p for p in [*own, *shared] if PAPER.search(p) and not p.startswith((" ", ">>>", "Args"))), "")
    return Citation(name, " ".join(about.split()), " ".join(paper.split()))
