"""The MLIR objects that a Shardy rule given as a function is called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir


def context() -> Any:
    """A fresh MLIR context with every dialect of lowered programs."""
    return mlir.make_ir_context()


def tensor_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR tensor types of abstract values; for use inside a `context`."""
    with ir.Location.unknown():
        return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
