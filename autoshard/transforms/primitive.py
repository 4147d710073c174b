"""primitive: operations of our own, which passes put in place of several of JAX's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def define_primitive(name: str, plain: Callable[..., Any], shapes: Callable[..., Any]) -> Primitive:
    """An operation that is the composition ``plain`` wherever a plan does not run it otherwise.

    Under differentiation and batching it dissolves into that composition.

    Args:
      plain: ``plain(*operands, **params)`` -> a tuple of results.
      shapes: the same, of abstract values.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return jax.jvp(functools.partial(plain, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        out = jax.vmap(functools.partial(plain, **params), list(dims))(*operands)
        return out, (0,) * len(out)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(plain)
    primitive.def_abstract_eval(shapes)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(plain, multiple_results=True))
    return primitive
