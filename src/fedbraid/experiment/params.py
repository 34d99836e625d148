"""The parameters in a run folder: ``params.safetensors`` after the last round, ``best.safetensors`` the best ones.

Arrays are named by their path in the pytree. The metadata says after which round they are, and describes the data, so
that the model can be built again without the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedbraid.data.description import DataDescription
from fedbraid.experiment.config import ConfigError
from fedbraid.experiment.described import read_description, written_description
from fedbraid.experiment.tensors import Tensors, named_arrays, read_tensors, write_tensors
from fedbraid.limited_json import read_json
from fedbraid.sealed import Damaged
from fedbraid.version import __version__

__all__ = ["BEST", "PARAMS", "description_in", "params_sha256", "read_params", "write_params"]

PARAMS, BEST = "params.safetensors", "best.safetensors"


def write_params(
    path: Path, params: Any, *, round: int, description: DataDescription | None = None, **about: Any
) -> None:
    """Replace a file of parameters. ``about``: further metadata."""
    metadata = {"fedbraid": __version__, "round": str(round), **{key: str(value) for key, value in about.items()}}
    if description is not None:
        with contextlib.suppress(ConfigError):  # if preprocessing is a Python function, a reader has to load the data
            metadata["data"] = json.dumps(written_description(description))
    write_tensors(path, named_arrays(params), metadata)


def read_params(path: Path) -> Tensors:
    """Read a file of parameters; a missing or damaged one is refused."""
    folder = path.parent
    if not path.is_file():
        raise ConfigError(f"{folder} has no {path.name}; write it again with: fedbraid run --resume {folder}")
    try:
        return read_tensors(path, sealed=True)
    except Damaged as error:
        raise ConfigError(f"{error}; write it again with: fedbraid run --resume {folder}") from None


def description_in(tensors: Tensors, name: str) -> DataDescription | None:
    """The description of the data in a file of parameters; None if there is none."""
    text = tensors.metadata.get("data")
    return None if text is None else read_description(read_json(text), name)


def params_sha256(params: Any) -> str:
    """A hash of the bytes of the parameters in tree order."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return digest.hexdigest()
