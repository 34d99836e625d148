"""The description of a run's data as plain values, for files: of a deployed app, and of stored parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fedbraid.data.description import DataDescription
from fedbraid.data.preprocess import pipeline
from fedbraid.experiment.assembly import steps_of

__all__ = ["read_description", "written_description"]


def written_description(description: DataDescription) -> dict[str, Any]:
    """A data description as plain values: three sections of ``federation.toml``."""
    fields = {
        name: {"shape": list(field.shape), "dtype": jax.dtypes.canonicalize_dtype(field.dtype).name}
        for name, field in description.fields.items()
    }
    about: dict[str, Any] = {"population": description.population}
    if description.classes is not None:
        about["classes"] = description.classes
    return {"federation": about, "schema": fields, "preprocess": steps_of(description)}


def read_description(about: Mapping[str, Any], name: str) -> DataDescription:
    """The inverse of `written_description`."""
    federation = about["federation"]
    return DataDescription(
        fields={
            name: jax.ShapeDtypeStruct(tuple(field["shape"]), field["dtype"]) for name, field in about["schema"].items()
        },
        population=federation["population"],
        classes=federation.get("classes"),
        preprocess=pipeline(about.get("preprocess")),
        name=name,
    )
