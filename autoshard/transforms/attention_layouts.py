"""Where what attention reads and writes is laid out for it (`autoshard.passes.rotary`, `.attention_operands`)."""

from __future__ import annotations

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import in_host_memory


def lays_out_attention(program: Program) -> bool:
    """Whether it pays on this chip: on some not where the step sends values to the host, which XLA then fetches too
    late (`Hardware.layouts_delay_host_copies`)."""
    hardware = program.mesh.hardware
    if not hardware.attention_layouts or not hardware.layouts_delay_host_copies:
        return hardware.attention_layouts
    return not any(in_host_memory(v.aval) for eqn in jx.walk(program.jaxpr) for v in eqn.outvars)
