"""Linear algebra: batch dimensions pass, matrix dimensions stay whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.ir.rule import Aval, Rule, RuleFn
from autoshard.rules.builders import Label, build, rows, table


def batched(operands: Sequence[int], results: Sequence[int], lets: str = "") -> RuleFn:
    """``operands`` and ``results``: of each, the number of trailing dimensions that stay whole."""

    def rule(*avals: Aval, **_: Any) -> Rule:
        return _batched(avals[0].shape[: len(avals[0].shape) - operands[0]], operands, results, lets)

    return rule


def _batched(batch: Sequence[int], operands: Sequence[int], results: Sequence[int], lets: str = "") -> Rule:
    labels = rows(batch)
    before, after = ([[*labels, *[None] * n] for n in side] for side in (operands, results))
    return build(before, after, lets=lets)


def eig(x: Aval, *, compute_left_eigenvectors: bool, compute_right_eigenvectors: bool, **_: Any) -> Rule:
    """Eigenvalues, then the eigenvectors asked for."""
    return _batched(x.shape[:-2], [2], [1, *[2] * (compute_left_eigenvectors + compute_right_eigenvectors)])


def fft(x: Aval, *, fft_lengths: Sequence[int], **_: Any) -> Rule:
    """Transformed dimensions are whole. Linear."""
    n = len(fft_lengths)
    return _batched(x.shape[: len(x.shape) - n], [n], [n], "sum: 0")


def qr(x: Aval, *, pivoting: bool = False, **_: Any) -> Rule:
    """Q and R, then the pivots if asked for."""
    return _batched(x.shape[:-2], [2], [2, 2, 1] if pivoting else [2, 2])


def schur(x: Aval, *, compute_schur_vectors: bool, **_: Any) -> Rule:
    """The triangle, then the vectors if asked for."""
    return _batched(x.shape[:-2], [2], [2, 2] if compute_schur_vectors else [2])


def svd(x: Aval, *, compute_uv: bool, **_: Any) -> Rule:
    """Singular values, then the two bases if asked for."""
    return _batched(x.shape[:-2], [2], [1, 2, 2] if compute_uv else [1])


def symmetric_product(a: Aval, c: Aval, *, beta: float = 0.0, **_: Any) -> Rule:
    """``alpha * a @ a.T + beta * c``: both dimensions of the result are the same one of ``a``, and stay whole.

    The contracted dimension leaves sums unless ``c`` would be added with each.
    """
    labels: list[Label] = list(rows(a.shape[:-2]))
    matrix = [*labels, None, None]
    return build([[*labels, None, "contracted"], matrix], [matrix], {"contracted": "whole" if beta else "sum"})


def triangular_solve(a: Aval, b: Aval, *, left_side: bool = False, **_: Any) -> Rule:
    """Right-hand sides pass, and are linear."""
    labels: list[Label] = list(rows(a.shape[:-2]))
    sides = [*labels, None, "side"] if left_side else [*labels, "side", None]
    return build([[*labels, None, None], sides], [sides], lets="sum: 1")


def tridiagonal_solve(dl: Aval, d: Aval, du: Aval, b: Aval, **_: Any) -> Rule:
    """Right-hand sides pass, and are linear."""
    labels: list[Label] = list(rows(d.shape[:-1]))
    diagonal, sides = [*labels, None], [*labels, None, "side"]
    return build([diagonal] * 3 + [sides], [sides], lets="sum: 3")


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
