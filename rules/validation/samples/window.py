"""Samples of reductions over sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from autoshard.rules.validation.samples.sample import RandomArrays, Sample, bind


def samples(d: RandomArrays) -> Iterator[Sample]:
    x = d.real(4, 12, 3)
    geometry = (
        ((1, 2, 1), (1, 2, 1), "VALID"),
        ((1, 3, 1), (1, 1, 1), "SAME"),
        ((1, 3, 1), (1, 2, 1), "SAME"),
        ((1, 3, 1), (1, 1, 1), "VALID"),
        ((2, 2, 1), (2, 2, 1), "VALID"),
        ((1, 12, 1), (1, 1, 1), "VALID"),
    )
    for window, strides, padding in geometry:
        for op, init, reducer in (("sum", 0.0, lax.add), ("max", -np.inf, lax.max), ("min", np.inf, lax.min)):
            yield Sample(
                f"reduce_window_{op}",
                lambda x, r=reducer, i=init, w=window, s=strides, p=padding: lax.reduce_window(
                    x, np.float64(i), r, w, s, p
                ),
                (x,),
            )
    yield Sample(
        "reduce_window", lambda x: lax.reduce_window(x, np.float64(1), lax.mul, (1, 2, 1), (1, 2, 1), "VALID"), (x,)
    )
    for window, strides in (((1, 2, 1), (1, 2, 1)), ((1, 3, 1), (1, 2, 1))):

        def pool(x: Any, w: Any = window, s: Any = strides) -> Any:
            return lax.reduce_window(x, np.float64(-np.inf), lax.max, w, s, "VALID")

        yield Sample("select_and_scatter_add", lambda x, f=pool: jax.grad(lambda y: (f(y) ** 2).sum())(x), (x,))
        yield Sample("select_and_gather_add", lambda x, t, f=pool: jax.jvp(f, (x,), (t,))[1], (x, d.real(4, 12, 3)))
    yield Sample("select_and_scatter", _scatter_windows, (x, d.real(4, 6, 3)))


def _scatter_windows(x: Any, source: Any) -> Any:
    scalar = jax.ShapeDtypeStruct((), np.float64)
    jaxprs = [jax.make_jaxpr(f)(scalar, scalar) for f in (lax.ge, lax.mul)]
    return bind(
        "select_and_scatter",
        select_jaxpr=jaxprs[0],
        select_consts=(),
        scatter_jaxpr=jaxprs[1],
        scatter_consts=(),
        window_dimensions=(1, 2, 1),
        window_strides=(1, 2, 1),
        padding=((0, 0),) * 3,
    )(x, source, np.float64(1.5))
