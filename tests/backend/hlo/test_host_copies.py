"""Copies between the memories of device and host, as XLA for TPU prints them (libtpu 0.0.50.1)."""

from __future__ import annotations

import pytest

from autoshard.backend.hlo.host_copies import host_copies
from autoshard.backend.hlo.text import parse_hlo
from autoshard.machine.host_link import FROM_HOST, TO_HOST

STACK, ROW = "bf16[16,8,128]{2,1,0:T(8,128)(2,1)S(5)}", "bf16[1,8,128]{2,1,0:T(8,128)(2,1)}"
TEXT = f"""HloModule jit_step, is_scheduled=true

ENTRY %main (p: bf16[16,8,128], q: bf16[1,8,128], i: s32[]) -> bf16[1,8,128] {{
  %p = {STACK} parameter(0)
  %q = {ROW} parameter(1)
  %i = s32[] parameter(2)
  %handed = {STACK} custom-call(%p), custom_call_target="x"
  BODY
  ROOT %end = {ROW} add(%q, %q)
}}
"""
BYTES = 8 * 128 * 2


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"%c = ({STACK}, {STACK}, u32[]{{:S(2)}}) dynamic-update-slice-start(%p, %q, %i, %i, %i)", (BYTES, TO_HOST)),
        (f"%c = {STACK} dynamic-update-slice(%p, %q, %i, %i, %i)", (BYTES, TO_HOST)),
        (f"%c = (({STACK}, s32[]), {ROW}, u32[]{{:S(2)}}) dynamic-slice-start(%p, %i, %i, %i)", (BYTES, FROM_HOST)),
        (f"%c = {ROW} dynamic-slice(%p, %i, %i, %i)", (BYTES, FROM_HOST)),
        ("%c = (bf16[16,8,128]{2,1,0}, bf16[16,8,128]{2,1,0}, u32[]) copy-start(%p)", (16 * BYTES, FROM_HOST)),
        ("%c = bf16[1,8,128]{2,1,0:S(5)} copy(%q)", (BYTES, TO_HOST)),
        (f"%c = {ROW} copy(%q)", None),
        (f"%c = {STACK} copy(%p)", None),
        ("%c = bf16[1,8,128]{2,1,0:T(8,128)S(1)} copy(%q)", None),
        ("%c = bf16[1,4,128]{2,1,0} dynamic-slice(%q, %i, %i, %i)", None),
    ],
)
def test_what_is_copied_which_way(line, found):
    copies = host_copies(parse_hlo(TEXT.replace("BODY", line)))
    assert copies == ({} if found is None else {("main", "c"): found})
