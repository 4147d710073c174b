"""Seconds of the kernels for products of ragged groups."""

from __future__ import annotations

import pytest

from autoshard.backend.hlo.grouped_products import grouped_product_seconds
from autoshard.backend.hlo.text import parse_hlo
from autoshard.machine.hardware import load_hardware

HARDWARE = load_hardware("tpu-v5p")
TEXT = """HloModule jit_step, is_scheduled=true

ENTRY %main (t: s32[2], x: bf16[6144,2048], w: bf16[4,2048,1408], y: bf16[6144,1408]) -> bf16[4,2048,1408] {
  %t = s32[2] parameter(0)
  %x = bf16[6144,2048] parameter(1)
  %w = bf16[4,2048,1408] parameter(2)
  %y = bf16[6144,1408] parameter(3)
  %m = (s32[2], s32[48]) custom-call(%t), metadata={op_name="ragged-dot-metadata"}
  %of_rows = bf16[6144,1408] custom-call(%t, %x, %w), metadata={op_name="jit(f)/ragged-dot-none"}
  %even = bf16[6144,1408] custom-call(%t, %x, %w), metadata={op_name="rows_3_of_4/ragged-dot-none"}
  %other = bf16[6144,1408] custom-call(%t, %x, %w), metadata={op_name="jit(f)/kernel"}
  %n = s32[1] get-tuple-element(%m), index=0
  %named = bf16[6144,1408] custom-call(%n, %x, %w), metadata={op_name="rows_3_of_4/ragged-dot-none"}
  %nameless = bf16[6144,1408] custom-call(%n, %x, %w), metadata={op_name="ragged-dot-none"}
  %k = (s32[2], s32[48]) custom-call(%t), metadata={op_name="ragged-dot-metadata"}
  %l = s32[1] get-tuple-element(%k), index=0
  %alone = bf16[6144,1408] custom-call(%l, %x, %w), metadata={op_name="ragged-dot-none"}
  %given = (s32[1], s32[1]) parameter(4)
  %first = s32[1] get-tuple-element(%given), index=0
  %second = s32[1] get-tuple-element(%given), index=1
  %even_of_given = bf16[6144,1408] custom-call(%first, %x, %w), metadata={op_name="rows_1_of_2/ragged-dot-none"}
  %of_given = bf16[6144,1408] custom-call(%second, %x, %w), metadata={op_name="ragged-dot-none"}
  ROOT %of_groups = bf16[4,2048,1408] custom-call(%t, %x, %y), metadata={op_name="ragged-dot-none"}
}
"""


@pytest.mark.parametrize(
    ("name", "products"),
    [
        ("of_rows", 1),
        ("of_groups", 1),
        ("even", 0.75),
        ("nameless", 0.75),
        ("alone", 1),
        ("of_given", 1),
        ("m", 0),
        ("other", 0),
    ],
)
def test_every_row_is_multiplied_with_one_matrix(name: str, products: float):
    module = parse_hlo(TEXT)
    main = module.computations["main"]
    found = grouped_product_seconds(main.instructions[name], main, module, HARDWARE)
    flops = 2 * 6144 * 2048 * 1408
    overhead = HARDWARE.overhead if products else 0
    assert found == pytest.approx(products * flops / HARDWARE.peak_flops("bfloat16") + overhead)
