"""Runs Shardy's MLIR passes on the text of a lowered program.

Passes modify a module in place and JAX caches modules, so each run parses its own copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

PROPAGATION_PIPELINE = (
    "builtin.module(sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true}),func.func(sdy-reshard-to-collectives))"
)
"""Shardy's propagation, and its reshards as explicit collectives: what XLA does before it partitions."""
OP_RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
"""Attaches Shardy's sharding rule to each operation."""


def context() -> Any:
    """A fresh MLIR context with every dialect of lowered programs."""
    return mlir.make_ir_context()


def run_passes(text: str, pipeline: str) -> str:
    """The program ``text`` after a pass pipeline, as text."""
    with context():
        module = ir.Module.parse(text)
        apply_passes(module, pipeline)
        return str(module)


def apply_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a pass pipeline on ``module``, in place; for use inside a `context`."""
    passmanager.PassManager.parse(pipeline).run(module.operation)


def propagate(lowered: jax.stages.Lowered) -> str:
    """The lowered program after Shardy's propagation: the sharding of every value, and explicit collectives."""
    return run_passes(lowered.as_text(), PROPAGATION_PIPELINE)


def tensor_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR tensor types of abstract values; for use inside a `context`."""
    with ir.Location.unknown():
        return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
