"""shardy: XLA's own propagation, asked on a copy of a lowered program.

A pass changes the module that it runs on, and JAX caches modules: so a copy is made by parsing its text.
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
"""What XLA does before it partitions; the collectives that it will need stand in the program afterwards."""
OP_RULES_PIPELINE = "builtin.module(func.func(sdy-populate-op-sharding-rules))"
"""Writes beside each operation the rule that Shardy has for it."""


def context() -> Any:
    """A fresh MLIR context that knows every dialect a lowered program is in."""
    return mlir.make_ir_context()


def run_passes(text: str, pipeline: str) -> str:
    """A program after a pipeline of passes, both as text."""
    with context():
        module = ir.Module.parse(text)
        apply_passes(module, pipeline)
        return str(module)


def apply_passes(module: ir.Module, pipeline: str) -> None:
    """Runs a pipeline of passes on ``module``, which it changes, inside of a `context`."""
    passmanager.PassManager.parse(pipeline).run(module.operation)


def propagate(lowered: jax.stages.Lowered) -> str:
    """The lowered program with the sharding that Shardy gives every value, and the collectives between them."""
    return run_passes(lowered.as_text(), PROPAGATION_PIPELINE)


def tensor_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR types of abstract values, inside of a `context`."""
    with ir.Location.unknown():
        return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
