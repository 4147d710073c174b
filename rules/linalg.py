"""Rules of linear algebra: batch dimensions are parallel, matrix dimensions are kept whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import Label, build, dim_labels, table


def batched(operands: Sequence[int], results: Sequence[int], passthrough: str = "") -> RuleFn:
    """The rule of an operation on batches.

    Args:
      operands, results: of each, the number of trailing dimensions that are kept whole.
    """

    def rule(*avals: Aval, **_: Any) -> Rule:
        return _batched_rule(avals[0].shape[: len(avals[0].shape) - operands[0]], operands, results, passthrough)

    return rule


def _batched_rule(batch: Sequence[int], operands: Sequence[int], results: Sequence[int], passthrough: str = "") -> Rule:
    labels = dim_labels(batch)
    before, after = ([[*labels, *[None] * n] for n in side] for side in (operands, results))
    return build(before, after, passthrough=passthrough)


def eig(x: Aval, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool, **_: Any) -> Rule:
    """Results: eigenvalues, then the eigenvectors asked for."""
    return _batched_rule(x.shape[:-2], [2], [1, *[2] * (compute_left_eigenvectors + compute_right_eigenvectors)])


def fft(x: Aval, *, fft_lengths: Sequence[int], **_: Any) -> Rule:
    """Transformed dimensions are kept whole; linear."""
    n = len(fft_lengths)
    return _batched_rule(x.shape[: len(x.shape) - n], [n], [n], "sum: 0")


def qr(x: Aval, *, pivoting: bool = False, **_: Any) -> Rule:
    """Results: Q and R, then the pivots if asked for."""
    return _batched_rule(x.shape[:-2], [2], [2, 2, 1] if pivoting else [2, 2])


def schur(x: Aval, *, compute_schur_vectors: bool, **_: Any) -> Rule:
    """Results: the triangular matrix, then the Schur vectors if asked for."""
    return _batched_rule(x.shape[:-2], [2], [2, 2] if compute_schur_vectors else [2])


def svd(x: Aval, *, compute_uv: bool, **_: Any) -> Rule:
    """Results: singular values, then U and V if asked for."""
    return _batched_rule(x.shape[:-2], [2], [1, 2, 2] if compute_uv else [1])


def symmetric_product(a: Aval, c: Aval, *, beta: float = 0.0, **_: Any) -> Rule:
    """``alpha * a @ a.T + beta * c``: both dimensions of the result are the same one of ``a``, and are kept whole.

    The contracted dimension leaves partial sums, unless each of them would contain ``c``.
    """
    labels: list[Label] = list(dim_labels(a.shape[:-2]))
    matrix = [*labels, None, None]
    return build([[*labels, None, "contracted"], matrix], [matrix], {"contracted": "whole" if beta else "sum"})


def triangular_solve(a: Aval, b: Aval, *, left_side: bool = False, **_: Any) -> Rule:
    """Right-hand sides are parallel; linear in them."""
    labels: list[Label] = list(dim_labels(a.shape[:-2]))
    sides = [*labels, None, "side"] if left_side else [*labels, "side", None]
    return build([[*labels, None, None], sides], [sides], passthrough="sum: 1")


def tridiagonal_solve(dl: Aval, d: Aval, du: Aval, b: Aval, **_: Any) -> Rule:
    """Right-hand sides are parallel; linear in them."""
    labels: list[Label] = list(dim_labels(d.shape[:-1]))
    diagonal, sides = [*labels, None], [*labels, None, "side"]
    return build([diagonal] * 3 + [sides], [sides], passthrough="sum: 3")


RULES: dict[str, RuleFn] = {
    "cholesky": batched([2], [2]),
    "cholesky_update": batched([2, 1], [2]),
    "eig": eig,
    "eigh": batched([2], [2, 1]),
    "fft": fft,
    "geqp3": batched([2, 1], [2, 1, 1]),
    "geqrf": batched([2], [2, 1]),
    "hessenberg": batched([2], [2, 1]),
    "householder_product": batched([2, 1], [2]),
    "lu": batched([2], [2, 1, 1]),
    "lu_pivots_to_permutation": batched([1], [1]),
    "ormqr": batched([2, 1, 2], [2], "sum: 2"),
    "qr": qr,
    "schur": schur,
    "svd": svd,
    "symmetric_product": symmetric_product,
    "triangular_solve": triangular_solve,
    "tridiagonal": batched([2], [2, 1, 1, 1]),
    "tridiagonal_solve": tridiagonal_solve,
}
TABLE = table(RULES)
