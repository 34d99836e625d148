"""The paper of a method, read from the docstrings of its factory and of its module."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

from fedbraid import algorithms, transforms

__all__ = ["Citation", "citation"]


class Citation(NamedTuple):
    """The source of a method: the first lines of its docstring, and the paper cited in its module's docstring."""

    name: str
    about: str
    paper: str


def citation(kind: str, name: str, folder: Path | None = None) -> Citation:
    """The citation of an algorithm or a transform, from its docstrings; ``folder`` is searched for its module.

    >>> citation("algorithm", "scaffold").paper.split(".")[-3].strip()
    'ICML 2020'
    """
    factory = (algorithms.NAMES if kind == "algorithm" else transforms.NAMES).find(name, folder).thing
    module = inspect.getmodule(factory)
    about = (inspect.getdoc(factory) or "").split("\n\n")[0]
    paragraphs = (inspect.getdoc(module) or "").split("\n\n")[1:] if module else []
    paper = next((p for p in paragraphs if re.search(r"\b(19|20)\d\d\b", p) and not p.startswith(" ")), "")
    return Citation(name, " ".join(about.split()), " ".join(paper.split()))
