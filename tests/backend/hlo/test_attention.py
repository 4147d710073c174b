"""Attention kernels in compiled HLO: found by what they are called, and priced by shape, mask and chip."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoshard.backend.estimate import estimated_cycles
from autoshard.backend.hlo.text import parse_hlo
from autoshard.machine.hardware import load_hardware
from autoshard.transforms.attention_kernels import peak_share

V6E = load_hardware("tpu-v6e")
OPERANDS = """
  %next = s8[1,8,8]{2,1,0} constant({...})
  %computed = s8[1,8,8]{2,1,0} constant({...})
  %q = bf16[12,8192,128]{2,1,0} parameter(0)
  %k = bf16[3,8192,128]{2,1,0} parameter(1)
  %v = bf16[3,8192,128]{2,1,0} parameter(2)
"""
RESULTS = {
    "splash_mha_fwd_residuals": "(bf16[12,8192,128]{2,1,0}, f32[12,8192,128]{2,1,0})",
    "splash_mha_dkv_no_residuals": "(bf16[4,12,8192,128]{3,2,1,0}, bf16[3,8192,128]{2,1,0}, bf16[3,8192,128]{2,1,0})",
    "splash_mha_dkv_segmented_no_residuals": "(bf16[3,8192,128]{2,1,0}, bf16[3,8192,128]{2,1,0})",
    "splash_mha_dq_no_residuals": "bf16[12,8192,128]{2,1,0}",
}


def program(kernel, scope):
    """As libtpu prints it: what the kernel says of itself is on a line of its own, and a brace begins the next."""
    says = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block_q\\": 1024, \\"block_kv\\": 1024}"\n}}'
    name = f'metadata={{op_name="jit(step)/{scope}/jit(_splash_attention)/{kernel}/{kernel}/pallas_call"}}'
    call = f"%{kernel}.1 = {RESULTS[kernel]} custom-call(%next, %computed, %q, %k, %v), " + (
        f'custom_call_target="tpu_custom_call", {says}, {name}'
    )
    after = '  ROOT %out = bf16[12,8192,128]{2,1,0} copy(%q), backend_config={"estimated_cycles":"1000"}'
    return f"HloModule jit_step\n\nENTRY %main () -> bf16[] {{{OPERANDS}  {call}\n{after}\n}}\n"


@pytest.mark.parametrize(
    ("kernel", "products", "blocks", "share", "length"),
    [
        ("splash_mha_fwd_residuals", 2, (36, 64), V6E.attention.forward, 1024),
        ("splash_mha_dkv_no_residuals", 5, (20, 32), V6E.attention.backward, 2048),
        ("splash_mha_dkv_segmented_no_residuals", 4, (20, 32), V6E.attention.backward, 2048),
        ("splash_mha_dq_no_residuals", 3, (64, 64), V6E.attention.backward, 1024),
    ],
)
def test_splash_attention_runs_at_its_share_of_the_peak(kernel, products, blocks, share, length):
    """Of 12 query heads and 3 key heads; what comes after the kernel counts too."""
    done, of = blocks
    module = parse_hlo(program(kernel, f"splash_blocks_{done}_of_{of}/static_sparsity_splash"))
    seconds = products * 2 * 12 * 8192**2 * 128 * done / of / peak_share("splash", share, length) / 918e12
    assert estimated_cycles(module, V6E) == (pytest.approx(seconds * V6E.clock + 1000, abs=1), True)


def test_a_kernel_of_another_make_has_no_estimate():
    module = parse_hlo(program("splash_mha_dq_no_residuals", "somebody"))
    assert estimated_cycles(module, V6E) == (1000, True)


def test_a_table_without_the_kernel_prices_it_at_the_peak():
    module = parse_hlo(program("splash_mha_dq_no_residuals", "splash_blocks_1_of_1"))
    bare = replace(V6E, attention=None)
    assert estimated_cycles(module, bare)[0] < estimated_cycles(module, V6E)[0]
