"""Estimates read from HLO as the TPU compiler writes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from autoshard.backend.estimate import estimate
from autoshard.backend.hlo.roofline import roofline_seconds
from autoshard.backend.hlo.text import parse_hlo
from tests.programs import CHIP, mesh

TEXT = """HloModule jit_step, is_scheduled=true

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %f = f32[8] fusion(%x), kind=kLoop, calls=%inner, backend_config={"window_config":{"estimated_cycles":"100"}}
  %r = f32[8] all-reduce(%f), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %out = (s32[], f32[8]) tuple(%next, %r)
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] constant(LIMIT)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8]) tuple(%zero, %p)
  %loop = (s32[], f32[8]) while(%start), condition=%condition, body=%body
  %y = f32[8] get-tuple-element(%loop), index=1
  ROOT %g = f32[8] fusion(%y), kind=kLoop, calls=%last, backend_config={"estimated_cycles":"7"}
}
"""
MESH = replace(mesh(data=4), hardware=replace(CHIP, clock=1e9, bandwidth=1e3))
"""Its memory is so slow that the cycles always are fewer than those of the bytes."""


GROUPED = """HloModule jit_step

ENTRY %main (x: bf16[64,32], w: bf16[4,32,16]) -> bf16[64,16] {
  %x = bf16[64,32] parameter(0)
  %w = bf16[4,32,16] parameter(1)
  ROOT %y = bf16[64,16] custom-call(%x, %w), custom_call_target="tpu_custom_call", metadata={op_name="ragged-dot-none"}
}
"""


@dataclass
class Compiled:
    text: str

    def as_text(self) -> str:
        return self.text


def test_kernels_of_grouped_products_are_estimated_too():
    moved = 2 * (64 * 32 + 4 * 32 * 16 + 64 * 16) / MESH.hardware.bandwidth
    assert estimate(Compiled(GROUPED), MESH).compute == pytest.approx(moved + MESH.hardware.overhead)


def test_instructions_without_cycles_are_estimated_by_the_roofline():
    text = TEXT.replace("LIMIT", "5").replace('"estimated_cycles":"7"', f'"estimated_cycles":"{2**63 - 1}"')
    hardware = MESH.hardware
    last = 2 * 32 / hardware.bandwidth + hardware.overhead
    assert estimate(Compiled(text), MESH).compute == pytest.approx(500e-9 + last, abs=1e-9)


def test_cycles_and_collectives_of_a_loop_count_once_per_iteration():
    found = estimate(Compiled(TEXT.replace("LIMIT", "5")), MESH)
    assert found.exact
    assert found.compute == pytest.approx(507e-9)
    once = 2 * (3 / 4 * 32 / 1e10 + 3e-6) + 1e-6
    assert found.transfers == pytest.approx(5 * once)
    assert found.seconds == pytest.approx(found.compute + found.transfers)
    assert found.overlapped == pytest.approx(found.transfers)


SWEEP = """HloModule jit_step, is_scheduled=true

%inside (a: f32[1000,1000], b: f32[1000,1000]) -> f32[1000,1000] {
  %a = f32[1000,1000] parameter(0)
  %b = f32[1000,1000] parameter(1)
  ROOT %o = f32[1000,1000] OPERATION
}

ENTRY %main (p: f32[1000,1000]) -> f32[1000,1000] {
  %p = f32[1000,1000] parameter(0)
  ROOT %g = f32[1000,1000] fusion(%p, %p), kind=kLoop, calls=%inside, backend_config={"estimated_cycles":"9000000"}
}
"""
DOT = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("operation", "capped"),
    [("add(%a, %b)", True), (DOT, False), ("sort(%a, %b), dimensions={0}", False), ("gather(%a, %b)", False)],
)
def test_what_sweeps_over_memory_takes_at_most_what_its_bytes_take(operation: str, capped: bool):
    hardware = replace(CHIP, clock=1e9, bandwidth=1e10, memory_efficiency=0.8, overhead=1e-6)
    found = estimate(Compiled(SWEEP.replace("OPERATION", operation)), replace(MESH, hardware=hardware))
    bytes_seconds = 3 * 4e6 / 8e9 + 1e-6
    assert bytes_seconds < 9e-3
    assert found.compute == pytest.approx(bytes_seconds if capped else 9e-3)


GATHERS = """HloModule jit_step, is_scheduled=true

%apart (p: f32[8]) -> f32[32] {
  %p = f32[8] parameter(0)
  ROOT %inner = f32[32] all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8] parameter(0)
  %begun = (f32[8], f32[32]) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}
  %called = ((f32[8]), f32[32], u32[]) async-start(%p), calls=%apart
  %f = f32[8] fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"CYCLES"}
  %a = f32[32] all-gather-done(%begun)
  %b = f32[32] async-done(%called)
  %c = f32[32] all-gather(%f), replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %g = f32[8] fusion(%a, %b, %c), kind=kLoop, calls=%last, backend_config={"estimated_cycles":"7"}
}
"""


@pytest.mark.parametrize("cycles", [10, 100_000])
def test_compute_hides_the_collectives_beside_it_as_far_as_it_lasts(cycles: int):
    found = estimate(Compiled(GATHERS.replace("CYCLES", str(cycles))), MESH)
    once = found.transfers / 3
    assert found.blocking == pytest.approx(once + max(2 * once - cycles * 1e-9, 0))
    assert found.scheduled == pytest.approx(once + max(cycles * 1e-9, 2 * once) + 7e-9)
    assert found.overlapped <= found.scheduled < found.seconds


def test_what_is_waited_for_at_once_is_not_hidden():
    lines = GATHERS.splitlines()
    (work,) = (line for line in lines if "%f = " in line)
    lines.remove(work)
    lines.insert(next(n for n, line in enumerate(lines) if "%c = " in line), work)
    found = estimate(Compiled("\n".join(lines).replace("CYCLES", "100000")), MESH)
    assert found.blocking == found.transfers > 0
    assert found.scheduled == found.seconds


COPIES = """HloModule jit_step, is_scheduled=true

ENTRY %main (p: f32[4,1000], h: f32[4,1000]) -> f32[4,1000] {
  %p = ROW parameter(0)
  %h = STACK parameter(1)
  %i = s32[] parameter(2)
  %in = ((STACK, s32[], s32[]), ROW, u32[]) dynamic-slice-start(%h, %i, %i)
  %out = ((STACK, ROW, s32[], s32[]), STACK, u32[]) dynamic-update-slice-start(%h, %p, %i, %i)
  %f = f32[8] fusion(%p), kind=kLoop, calls=%x, backend_config={"estimated_cycles":"CYCLES"}
  %came = ROW dynamic-slice-done(%in)
  %sent = STACK dynamic-update-slice-done(%out)
  ROOT %g = f32[8] fusion(%came, %sent), kind=kLoop, calls=%last, backend_config={"estimated_cycles":"7"}
}
""".replace("STACK", "f32[4,1000]{1,0:T(8,128)S(5)}").replace("ROW", "f32[1,1000]{1,0:T(8,128)}")


@pytest.mark.parametrize("cycles", [10, 3_000, 100_000])
def test_copies_to_the_host_and_back_are_hidden_as_far_as_compute_lasts(cycles: int):
    """Each of 4,000 bytes, at the same time; they are no transfers between devices."""
    hosted = replace(MESH, hardware=replace(MESH.hardware, host_bandwidth=1e9))
    found = estimate(Compiled(COPIES.replace("CYCLES", str(cycles))), hosted)
    assert found.host == found.blocking == pytest.approx(max(4e-6 - cycles * 1e-9, 0), abs=1e-12)
    assert found.transfers == 0
    assert found.seconds == found.scheduled == pytest.approx(max(4e-6, cycles * 1e-9) + 7e-9)
    one_memory = replace(MESH, hardware=replace(MESH.hardware, host_bandwidth=0.0))
    assert estimate(Compiled(COPIES.replace("CYCLES", str(cycles))), one_memory).host == 0


def test_a_loop_of_unknown_trip_count_counts_once_and_is_not_exact():
    found = estimate(Compiled(TEXT.replace("constant(LIMIT)", "custom-call()")), MESH)
    assert not found.exact
    assert found.compute == pytest.approx(107e-9)


def test_without_a_clock_the_estimate_is_the_roofline():
    found = estimate(Compiled(TEXT.replace("LIMIT", "5")), mesh(data=4))
    assert found.cycles is None
    assert found.compute == pytest.approx(roofline_seconds(parse_hlo(TEXT.replace("LIMIT", "5")), CHIP)[0])
    assert found.transfers == pytest.approx(estimate(Compiled(TEXT.replace("LIMIT", "5")), MESH).transfers)


def test_so_it_is_of_what_the_compiler_gave_no_cycles():
    text = re.sub(r'"estimated_cycles":"\d+"', '"other":"1"', TEXT.replace("LIMIT", "5"))
    found = estimate(Compiled(text), MESH)
    assert found.cycles is None
    assert found.compute == pytest.approx(roofline_seconds(parse_hlo(text), MESH.hardware)[0])
    assert found.compute > 0
