"""Defines the primitives that passes put in the place of several equations of a traced program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def define_primitive(name: str, impl: Callable[..., Any], abstract_eval: Callable[..., Any]) -> Primitive:
    """A primitive that is evaluated, lowered, differentiated and batched as the JAX code of ``impl``.

    Args:
      name: what the primitive is called in a jaxpr.
      impl: ``impl(*operands, **params)`` -> a tuple of results.
      abstract_eval: ``abstract_eval(*avals, **params)`` -> a tuple of abstract values.
    """

    def jvp(primals: Any, tangents: Any, **params: Any) -> Any:
        return jax.jvp(functools.partial(impl, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))

    def batch(operands: Any, dims: Any, **params: Any) -> Any:
        out = jax.vmap(functools.partial(impl, **params), list(dims))(*operands)
        return out, (0,) * len(out)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(impl)
    primitive.def_abstract_eval(abstract_eval)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(impl, multiple_results=True))
    return primitive
