"""How many cases the generators of the fault harness try."""

from __future__ import annotations

import os

WHOLE = os.environ.get("FEDBRAID_FAULTS", "sample") == "whole"


def cases(sample: int, whole: int) -> int:
    """``sample`` cases in `make test`, ``whole`` cases in `make faults`."""
    return whole if WHOLE else sample
