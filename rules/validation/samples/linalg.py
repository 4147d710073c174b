"""Samples of linear algebra."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from jax import lax
from jax.lax import linalg

from autoshard.rules.validation.samples.sample import RandomArrays, Sample, bind


def samples(d: RandomArrays) -> Iterator[Sample]:
    square, tall = d.real(6, 4, 4), d.real(6, 4, 2)
    definite = d.positive_definite(6, n=4)
    yield Sample("cholesky", bind("cholesky"), (definite,))
    yield Sample("cholesky_update", linalg.cholesky_update, (np.linalg.cholesky(definite[0]).T, d.real(4)))
    yield Sample("eig", linalg.eig, (square,))
    yield Sample("eigh", linalg.eigh, (definite,))
    for kind, n in (("FFT", 4), ("IFFT", 4), ("RFFT", 4), ("IRFFT", 6)):
        x = d.real(6, 2, 4) if kind == "RFFT" else d.complex_numbers(6, 2, 4)
        yield Sample("fft", lambda x, k=kind, n=n: lax.fft(x, k, (n,)), (x,))
    yield Sample("geqrf", bind("geqrf"), (tall,))
    yield Sample("geqp3", bind("geqp3", use_magma=None), (tall, np.zeros((6, 2), np.int32)))
    yield Sample("hessenberg", linalg.hessenberg, (square,))
    yield Sample("householder_product", linalg.householder_product, (tall, d.real(6, 2)))
    yield Sample("lu", linalg.lu, (square,))
    yield Sample(
        "lu_pivots_to_permutation",
        partial(linalg.lu_pivots_to_permutation, permutation_size=4),
        (np.asarray([[1, 2, 2, 3], [0, 3, 2, 3]] * 3, np.int32),),
    )
    yield Sample("ormqr", linalg.ormqr, (tall, d.real(6, 2), d.real(6, 4, 3)))
    yield Sample("qr", linalg.qr, (tall,))
    yield Sample("schur", linalg.schur, (square,))
    yield Sample("svd", linalg.svd, (tall,))
    yield Sample("symmetric_product", partial(linalg.symmetric_product, beta=0.5), (tall, definite))
    yield Sample("symmetric_product", linalg.symmetric_product, (tall, definite))
    lower = np.tril(square) + 3 * np.eye(4)
    for left in (True, False):
        yield Sample(
            "triangular_solve",
            partial(linalg.triangular_solve, left_side=left, lower=True),
            (lower, d.real(6, 4, 2) if left else d.real(6, 2, 4)),
        )
    yield Sample("tridiagonal", linalg.tridiagonal, (definite,))
    yield Sample(
        "tridiagonal_solve",
        linalg.tridiagonal_solve,
        (d.real(6, 4), 5 * d.positive(6, 4), d.real(6, 4), d.real(6, 4, 2)),
    )
