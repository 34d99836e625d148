"""Options of the engine: how a run is computed, as one frozen dataclass.

Results do not depend on these options beyond rounding, except that dropout with ``microbatch`` draws other masks. To
add an option, add a field here (or in :class:`fedbraid.lowering.options.LoweringOptions` if it changes how clients are
compiled), the code that reads it, and a line in ``docs/scale.md``. Configurations and the command line read the fields
from this class.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from fedbraid.core import check_choice, check_count
from fedbraid.lowering.options import LoweringOptions

__all__ = ["EngineOptions", "engine_options"]

PLANS = ("auto", "sequential", "chunks", "lanes")
PLACES = ("auto", "device", "host")


@dataclass(frozen=True)
class EngineOptions(LoweringOptions):
    """How a run is computed. The defaults adapt to the machine.

    plan: "sequential" runs one client at a time on each device, "chunks" runs padded chunks of clients under ``vmap``,
        "lanes" packs clients into parallel lanes. "auto" is sequential on a CPU and lanes on an accelerator.
    chunk [clients]: number of clients (or lanes) at a time on each device; "auto" chooses by the memory of the device.
        ``fedbraid tune-engine`` measures which plan and chunk are fastest. If a device runs out of memory, the chunk is
        halved and the round repeated.
    devices [devices]: devices of each host to use; None uses all.
    model_devices [devices]: devices over which the model of each client is divided, for models that do not fit on one
        device beside the clients' data. It must divide the number of devices.
    data_in: "device" copies all examples to the devices, "host" streams each cohort; "auto" copies if they fit.
    ahead [cohorts]: cohorts of streamed examples that are gathered while another one trains.
    states_in: where client states are kept: "device", "host" (memory), or the path of a folder; "auto" chooses.

    >>> EngineOptions(plan="lanes", chunk=8).chunk
    8
    """

    plan: Literal["auto", "sequential", "chunks", "lanes"] = "auto"
    chunk: int | Literal["auto"] = "auto"
    devices: int | None = None
    model_devices: int = 1
    data_in: Literal["auto", "device", "host"] = "auto"
    states_in: str | Path = "auto"
    ahead: int = 2

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}  # configurations refuse unknown keys

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("plan", self.plan, PLANS)
        check_chunk(self.chunk)
        if self.devices is not None:
            check_count("devices", self.devices)
        check_count("model_devices", self.model_devices)
        if self.model_devices > 1 and self.plan == "lanes":
            raise ValueError(
                f'model_devices = {self.model_devices}: models over several devices need the plan "chunks", or '
                '"sequential" if all devices hold one model, got plan = "lanes"'
            )
        check_choice("data_in", self.data_in, PLACES)
        check_count("ahead", self.ahead)

    @property
    def states_folder(self) -> Path | None:
        """The folder of client states, if ``states_in`` names one."""
        return None if self.states_in in PLACES else Path(self.states_in)


def check_chunk(chunk: Any) -> None:
    """Refuse a chunk that is neither a count nor "auto"."""
    if isinstance(chunk, str) and chunk == "auto":
        return
    try:
        check_count("chunk", chunk)
    except ValueError:
        raise ValueError(f"chunk must be a whole number of at least 1 or 'auto', got {chunk!r}") from None


def engine_options(engine: EngineOptions | None, changes: dict[str, Any]) -> EngineOptions:
    """``engine`` (default: all defaults) with some fields changed; refuses names that are not fields."""
    known = [field.name for field in fields(EngineOptions)]
    for name in changes:
        if name not in known:
            raise TypeError(f"simulate has no option {name!r}; options of the engine are {', '.join(known)}")
    return replace(engine or EngineOptions(), **changes)
