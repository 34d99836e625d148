"""The check of a site before its node joins: load the data as the node would, and check that it fits the schema."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.common.config import parse_config_args

from fedbraid.flower.evaluate import rows_of
from fedbraid.flower.federation import load_federation, with_labels_checked
from fedbraid.flower.identity import check_data
from fedbraid.flower.project import PACKAGE, package_of

__all__ = ["check_site"]


def check_site(app: Path, node_config: str = "") -> dict[str, Any]:
    """Numbers of examples that the app loads with a node config, and its fingerprint; ValueError if they do not fit."""
    federation = load_federation(package_of(app))
    sys.path.insert(0, str(app.resolve()))
    try:
        client = importlib.import_module(f"{PACKAGE}.client")
    finally:
        sys.path.remove(str(app.resolve()))
    try:
        config = parse_config_args([node_config]) if node_config else {}
    except Exception as error:  # Flower raises different exceptions here
        raise ValueError(f"the node config {node_config!r} cannot be read: {error}") from None
    context = Context(0, 0, config, RecordDict(), {})
    found = {}
    for name, loader, count in (("examples", "load_data", check_data), ("test_examples", "load_test", rows_of)):
        load: Any = getattr(client, loader, lambda context: None)  # an older app has no load_test
        load = with_labels_checked(load, federation.experiment)
        try:
            found[name] = count(federation.schema, load(context))  # pyright: ignore[reportArgumentType]
        except OSError as error:
            raise ValueError(f"{loader} cannot read the data: {error}") from None
        except ValueError as error:
            raise ValueError(f"{loader}: {error}") from None
    return {**found, "fingerprint": federation.fingerprint}
