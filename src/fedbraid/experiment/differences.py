"""Keys at which configurations differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedbraid.experiment.config import Config

__all__ = ["config_difference", "flat"]


def config_difference(configs: Mapping[str, Config]) -> list[tuple[str, list[str | None]]]:
    """The keys at which configurations differ, with each value as JSON; None where it is the default."""
    each = [flat(config.model_dump(mode="json")) for config in configs.values()]
    rows = []
    for key in sorted({key for one in each for key in one} - {"seed"}):
        if len({json.dumps(one[key]) if key in one else None for one in each}) > 1:
            rows.append((key, [_shown(one[key]) if key in one else None for one in each]))
    return rows


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def flat(tree: Any, before: str = "") -> dict[str, Any]:
    """Nested mappings as one flat mapping, with dotted keys.

    >>> flat({"a": {"b": 1}, "c": [{"d": 2}]})
    {'a.b': 1, 'c.0.d': 2}
    """
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, list) and any(isinstance(one, Mapping) for one in tree):
        items = enumerate(tree)
    else:
        return {before: tree}
    return {k: v for name, one in items for k, v in flat(one, f"{before}.{name}" if before else str(name)).items()}
