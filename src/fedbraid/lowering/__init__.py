"""Fast programs: how the work of clients is rewritten before it is compiled. See docs/lowering.md.

Engines call :func:`lower` (an algorithm), :func:`lower_metrics` (an evaluation) and, for clients on lanes,
:func:`grow`. Algorithms and models need not know about it.
"""

from fedbraid.lowering.explanation import Explanation, Lanes, explain, notice_unmet
from fedbraid.lowering.grown import Extent, Growth, extent_of, grow
from fedbraid.lowering.options import LoweringOptions
from fedbraid.lowering.programs import lower, lower_function, lower_metrics
from fedbraid.lowering.rewrite import explain_function, fast_convolutions

__all__ = [
    "Explanation",
    "Extent",
    "Growth",
    "Lanes",
    "LoweringOptions",
    "explain",
    "explain_function",
    "extent_of",
    "fast_convolutions",
    "grow",
    "lower",
    "lower_function",
    "lower_metrics",
    "notice_unmet",
]
