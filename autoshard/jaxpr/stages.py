"""stages: what lies between a program and its executable."""

from __future__ import annotations

import jax


def kept_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...]:
    """The flat arguments that the lowered program takes: those that it uses."""
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))
