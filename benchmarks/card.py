"""What the programs of gpu.py do on an H200, found by compiling them for one: no GPU is needed.

    pip install --no-deps jax-cuda12-plugin==VERSION jax-cuda12-pjrt==VERSION   # VERSION of the installed jax
    python benchmarks/card.py [--only NAME ...] [--kernels] [--out [FILE]] [--check [FILE]]

For a round of each row: the kernels it starts, the bytes they read and write, and the memory that the program needs
besides its arguments and results. Rows of LoRA (lora.py) also have the memory of everything together, compared with the
frozen weights and the activations of one step.
`--kernels` lists the kernels by the bytes they move. `--out` writes the numbers into FILE (default:
benchmarks/results/h200-programs.json). `--check` compares with FILE: it names rows that start more kernels, move more
bytes or need more memory by more than 2%, and fails if there are any.

Times need a card (gpu.py). But a rewrite that no longer applies, or a pass over memory that came back, is seen here, in
half a minute a row. XLA chooses between kernels for products by timing them. Without a card it takes its defaults. So
compare numbers of this program with each other only. Loops whose length is not known to the compiler count once: a
ragged cohort is one step and one event. Kernels of this library count with all of their operands: those that read only
a part (the LSTM's, and rows of dense weights) move fewer bytes than it says.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the plugin would look for a GPU
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # CUDA's libraries are not needed to compile

import jax
from jax.experimental import topologies

import record
from fedbraid.lowering import captured, kernels
from published import PROGRAMS, read, stamp, write

ROWS = (
    "cnn, 100 lanes",
    "cnn, 100 lanes, bfloat16",
    "cnn-ragged, 25 lanes, bfloat16",
    "resnet, bfloat16",
    "gpt, bfloat16",
    "lstm, lanes, bfloat16",
)
LORA = {"lora, bfloat16": False, "lora, bfloat16, remat": True}  # of lora.py
MORE = 0.02  # share by which a number may grow
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


# --- compiling -------------------------------------------------------------------------------------------------------


class _Compiled(Exception):
    """Ends a simulation whose program was compiled: it cannot run here."""


@contextmanager
def as_on_a_card() -> Iterator[None]:
    """Programs are traced as for an H200."""
    there = {"platform": lambda: "cuda", "_recent": lambda: True, "interpreted": lambda: False}
    here = {name: getattr(kernels, name) for name in there}
    _set(there)
    try:
        with kernels.lowered_for():
            yield
    finally:
        _set(here)


def for_a_card(program: Any, args: tuple) -> Any:
    """A program, compiled for an H200."""
    device = topologies.get_topology_desc("h200", "cuda", target_config=H200, topology="1x1x1").devices[0]
    there = jax.sharding.SingleDeviceSharding(device)
    lifted = program._of(args)
    inner = program._plain if lifted is None else lifted.program
    given = args if lifted is None else (lifted.captured, program._leaves(args))
    shapes = jax.tree.map(lambda leaf: _shape(leaf, there), given)
    return inner.trace(*shapes).lower(lowering_platforms=("cuda",)).compile()


def compiled(simulate: Callable[[], Any]) -> Any:
    """The compiled rounds of a simulation, for an H200."""
    plainly = captured.Program.__call__

    def stop(program: Any, *args: Any) -> Any:
        if program._is_inside(args) or not program._plain.__wrapped__.__qualname__.endswith("_Rounds.many"):
            return plainly(program, *args)
        raise _Compiled(for_a_card(program, args))

    try:
        captured.Program.__call__ = stop  # pyright: ignore[reportAttributeAccessIssue]
        with as_on_a_card():
            simulate()
    except _Compiled as found:
        return found.args[0]
    finally:
        captured.Program.__call__ = plainly
    raise RuntimeError("the simulation compiled no rounds")


def _shape(leaf: Any, there: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=there, weak_type=getattr(aval, "weak_type", False))


def _set(functions: dict[str, Any]) -> None:
    """Replace functions of `fedbraid.lowering.kernels`, also where they were imported by name."""
    for module in [m for name, m in sys.modules.items() if name.startswith("fedbraid.") and m is not None]:
        for name, function in functions.items():
            if getattr(module, name, None) is getattr(kernels, name) and module is not kernels:
                setattr(module, name, function)
    for name, function in functions.items():
        setattr(kernels, name, function)


# --- reading a compiled program --------------------------------------------------------------------------------------

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
BYTES |= {"f64": 8, "s64": 8, "u64": 8}
ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\]")
HEAD = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\) -> .* \{$")
LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
NAME = re.compile(r"%([\w.\-]+)")
FREE = ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id")
PARTS = ("dynamic-slice", "gather", "slice")
START = "fusion-start"  # a kernel that runs while others do; jax 0.11 copies slices so


class Line(NamedTuple):
    """An instruction of a compiled program."""

    name: str
    shape: str
    operation: str
    rest: str

    @property
    def operands(self) -> list[str]:
        return NAME.findall(self.rest.split("), ")[0])

    def computation(self, role: str) -> str | None:
        found = re.search(rf"{role}=%([\w.\-]+)", self.rest)
        return None if found is None else found[1]


@dataclass(frozen=True)
class Kernel:
    """A kernel that a round starts ``times`` times; each time it moves ``moved`` bytes."""

    name: str
    shape: str
    times: int
    moved: int


def size(shape: str) -> int:
    """The bytes of the arrays in a shape.

    >>> size("(bf16[20,3]{1,0}, f32[])")
    124
    """
    return sum(BYTES[kind] * math.prod(int(n) for n in sizes.split(",") if n) for kind, sizes in ARRAY.findall(shape))


def kernels_of(text: str) -> list[Kernel]:
    """The kernels of a compiled program of rounds, for one round."""
    parts: dict[str, list[Line]] = {}
    current: list[Line] = []
    entry = ""
    for line in text.splitlines():
        if head := HEAD.match(line):
            current = parts[head[2]] = []
            entry = head[2] if head[1] else entry
        elif found := LINE.match(line):
            current.append(Line(*found.groups()))
    return list(_walk(parts, entry, 1))


def _walk(parts: dict[str, list[Line]], name: str, times: int) -> Iterator[Kernel]:
    shapes = {line.name: line.shape for line in parts[name]}
    for line in parts[name]:
        if line.operation == "while":
            count = re.search(r'known_trip_count":\{"n":"(\d+)"', line.rest)
            yield from _walk(parts, str(line.computation("body")), times * int(count[1] if count else 1))
        elif line.operation == "call":
            yield from _walk(parts, str(line.computation("to_apply")), times)
        elif line.operation == "conditional":
            for branch in NAME.findall(line.rest.split("), ", 1)[1]):
                yield from _walk(parts, branch, times) if branch in parts else ()
        elif line.operation not in FREE and not line.operation.endswith("-done"):  # its work is counted at the start
            inside = parts.get(line.computation("calls") or "", [])
            moved = _written(line, inside) + sum(
                _read(inside, i, size(shapes.get(operand, ""))) for i, operand in enumerate(line.operands)
            )
            shape = inside[-1].shape if line.operation == START else line.shape
            yield Kernel(_name(line), shape.split("{")[0].lstrip("("), times, moved)


def _name(line: Line) -> str:
    kernel = re.search(r'name = "([^"]+)"', line.rest)  # of Pallas
    return kernel[1] if kernel else re.sub(r"[.\d]+$", "", line.name)


def _written(line: Line, inside: list[Line]) -> int:
    """The bytes that a kernel writes: a part of its result if it is updated in place."""
    if line.operation == START:
        line = line._replace(shape=inside[-1].shape)  # that of the line holds the operands, too
    if inside and inside[-1].operation == "dynamic-update-slice":
        return size({each.name: each.shape for each in inside}[inside[-1].operands[1]])
    return size(line.shape)


def _read(inside: list[Line], index: int, whole: int) -> int:
    """The bytes that a kernel reads of an operand: parts of it, if it uses only parts."""
    name = next((e.name for e in inside if e.operation == "parameter" and e.rest.startswith(f"{index})")), None)
    uses = [each for each in inside if name in each.operands]
    if not uses or any(use.operands[0] != name for use in uses):
        return whole
    if all(use.operation in PARTS for use in uses):
        return sum(size(use.shape) for use in uses)
    return 0 if all(use.operation == "dynamic-update-slice" for use in uses) else whole


def summary(program: Any) -> dict[str, Any]:
    """The numbers of one row."""
    found = kernels_of(program.as_text())
    return {
        "kernels": sum(kernel.times for kernel in found),
        "bytes": sum(kernel.times * kernel.moved for kernel in found),
        "memory": program.memory_analysis().temp_size_in_bytes,
    }


def lora_summary(remat: bool) -> tuple[Any, dict[str, Any]]:
    """The program of lora.py, and its numbers: all its memory as a multiple of frozen weights and activations."""
    import lora

    options, how = lora.arguments().parse_args([]), "bfloat16"
    work = lora.task(options, remat)
    program = compiled(lambda: lora.simulated(options, work, how, lambda _: None))
    with as_on_a_card():
        activations = for_a_card(*lora.gradient(options, work, how)).memory_analysis().temp_size_in_bytes
    used, base = program.memory_analysis(), sum(leaf.nbytes for leaf in jax.tree.leaves(work.weights))
    total = used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes
    return program, summary(program) | {"total": total, "multiple": round(total / (base + activations), 3)}


def grown_rows(old: dict[str, Any], new: dict[str, Any], *, allowed: float = MORE) -> list[str]:
    """Sentences about numbers that became larger.

    >>> grown_rows({"gpt": {"kernels": 1000, "bytes": 5e9}}, {"gpt": {"kernels": 1010, "bytes": 6e9}})
    ['gpt: bytes 6,000,000,000, before 5,000,000,000: 20% more']
    """
    return [
        f"{row}: {key} {value:,.0f}, before {old[row][key]:,.0f}: {value / old[row][key] - 1:.0%} more"
        for row, one in new.items()
        for key, value in one.items()
        if key in old.get(row, {}) and not isinstance(value, str) and value > (1 + allowed) * old[row][key]
    ]


def listed(program: Any, many: int = 40) -> Iterator[str]:
    """Lines about the kernels that move the most."""
    found: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for kernel in kernels_of(program.as_text()):
        found[kernel.name, kernel.shape] += kernel.times * kernel.moved
        times[kernel.name, kernel.shape] += kernel.times
    for (name, shape), moved in found.most_common(many):
        yield f"  {moved / 1e6:10,.1f} MB  {times[name, shape]:5} x {name} {shape}"


def main() -> int:
    import gpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only rows whose name contains one of these words")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--out", nargs="?", const=PROGRAMS, type=Path, metavar="FILE")
    parser.add_argument("--check", nargs="?", const=PROGRAMS, type=Path, metavar="FILE")
    options = parser.parse_args()
    missing = [name for name in ("jax_plugins.xla_cuda12", "jax_cuda12_plugin") if not _installed(name)]
    if missing:
        _refuse(f"not installed: {', '.join(missing)}")
    rows, report = gpu.measurements(), {}
    for name in (*ROWS, *LORA):
        if options.only and not any(word in name for word in options.only):
            continue
        if name in LORA:
            program, report[name] = lora_summary(LORA[name])
        else:
            program = compiled(rows[name])
            report[name] = summary(program)
        print(_line(name, report[name]), flush=True)
        if options.kernels:
            print("\n".join(listed(program)), flush=True)
    worse = grown_rows(read(options.check).get("rows", {}), report) if options.check else []
    print("\n".join(worse), end="\n" if worse else "")
    if options.out:
        about = record.about()
        stamped = {name: one | stamp(about) for name, one in report.items()}
        write(options.out, {"about": about, "rows": read(options.out).get("rows", {}) | stamped})
    return 1 if worse else 0


def _line(name: str, one: dict[str, Any]) -> str:
    moved, memory = one["bytes"] / 1e9, one["memory"] / 1e9
    text = f"{name:32} {one['kernels']:6,} kernels move {moved:7.2f} GB, {memory:5.2f} GB of memory"
    if "total" in one:
        text += f"; all {one['total'] / 1e9:.2f} GB, {one['multiple']:.2f} of frozen weights and activations"
    return text


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _refuse(why: str) -> NoReturn:
    version = jax.__version__
    sys.exit(f"{why}: pip install --no-deps jax-cuda12-plugin=={version} jax-cuda12-pjrt=={version}")


if __name__ == "__main__":
    sys.exit(main())
