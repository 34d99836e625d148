"""How benchmarks/card.py reads a compiled program. To compile for a card, it needs a plugin of jax that tests lack."""

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PROGRAM = """HloModule rounds

%update (p0: f32[8,100], p1: f32[100], p2: s32[]) -> f32[8,100] {
  %p0 = f32[8,100]{1,0} parameter(0)
  %p1 = f32[100]{0} parameter(1)
  %row = f32[1,100]{1,0} bitcast(%p1)
  %p2 = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = f32[8,100]{1,0} dynamic-update-slice(%p0, %row, %p2, %p2)
}

%part (p0: f32[8,100], p1: s32[]) -> bf16[100] {
  %p0 = f32[8,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice.1 = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,100}
  ROOT %convert.1 = bf16[100]{0} convert(%slice.1)
}

%steps (state: (s32[], f32[8,100], f32[100])) -> (s32[], f32[8,100], f32[100]) {
  %state = (s32[], f32[8,100]{1,0}, f32[100]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %all = f32[8,100]{1,0} get-tuple-element(%state), index=1
  %one = f32[100]{0} get-tuple-element(%state), index=2
  %loop_fusion.3 = bf16[100]{0} fusion(%all, %i), kind=kLoop, calls=%part
  %pallas_call.7 = f32[100]{0} custom-call(%loop_fusion.3, %one), custom_call_target="__gpu$xla.gpu.triton", backend_config={name = "attention", x = 1}
  %update_fusion.1 = f32[8,100]{1,0} fusion(%all, %pallas_call.7, %i), kind=kLoop, calls=%update
  ROOT %tuple.1 = (s32[], f32[8,100]{1,0}, f32[100]{0}) tuple(%i, %update_fusion.1, %pallas_call.7)
}

ENTRY %main (a: (s32[], f32[8,100], f32[100])) -> f32[8,100] {
  %a = (s32[], f32[8,100]{1,0}, f32[100]{0}) parameter(0)
  %while.1 = (s32[], f32[8,100]{1,0}, f32[100]{0}) while(%a), condition=%until, body=%steps, backend_config={"known_trip_count":{"n":"5"}}
  %all.2 = f32[8,100]{1,0} get-tuple-element(%while.1), index=1
  ROOT %copy.9 = f32[8,100]{1,0} copy(%all.2)
}
"""  # noqa: E501


@pytest.fixture
def card(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("JAX_PLATFORMS", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        monkeypatch.setenv(name, "cpu")
    yield importlib.import_module("card")
    for name in ("card", "published", "record", "workloads", "gpu", "turns"):
        sys.modules.pop(name, None)


def test_kernels_are_counted_as_often_as_their_loop_runs_with_the_bytes_they_move(card):
    found = {kernel.name: (kernel.times, kernel.moved) for kernel in card.kernels_of(PROGRAM)}
    assert found == {
        "loop_fusion": (5, 400 + 4 + 200),  # one row, its number, and the row in half the size
        "attention": (5, 200 + 400 + 400),
        "update_fusion": (5, 400 + 400 + 4),  # in place: the other rows are not read
        "copy": (1, 3200 + 3200),
    }


@pytest.mark.parametrize("name", ["loop_fusion.3", "update_fusion.1"])
def test_kernels_that_run_beside_others_are_counted_once(card, name):
    """jax 0.11 starts some kernels in one place and waits for them in another."""
    line = next(line for line in PROGRAM.splitlines() if f"%{name} =" in line)
    result, call = line.split(" = ")[1].split(" fusion(")
    start = f"  %fusion-start.2 = ((f32[8,100]{{1,0}}, s32[]), {result}, u32[]) fusion-start({call}"
    done = f"  %{name} = {result} fusion-done(%fusion-start.2)"

    def counted(program):
        return {kernel.name: (kernel.times, kernel.moved) for kernel in card.kernels_of(program)}

    plain = counted(PROGRAM)
    plain["fusion-start"] = plain.pop(name.split(".")[0])
    assert counted(PROGRAM.replace(line, f"{start}\n{done}")) == plain


def test_numbers_that_grew_are_named(card):
    old = {"gpt": {"kernels": 100, "bytes": 1000, "memory": 50, "commit": "abc"}}
    new = {"gpt": {"kernels": 101, "bytes": 1100, "memory": 49, "commit": "def"}, "new": {"kernels": 1}}
    assert card.grown_rows(old, new) == ["gpt: bytes 1,100, before 1,000: 10% more"]


def test_the_file_has_the_rows_of_the_benchmark(card):
    import gpu  # pyright: ignore[reportMissingImports]

    rows = card.read(card.PROGRAMS)["rows"]
    assert set(card.ROWS) <= set(gpu.measurements())
    assert set(rows) == {*card.ROWS, *card.LORA}
    assert all(rows[name]["multiple"] <= 1.3 for name in card.LORA)
    assert all(one["kernels"] > 0 and one["bytes"] > 0 and one["memory"] > 0 for one in rows.values())
