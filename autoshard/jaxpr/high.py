"""high: operations that JAX replaces by others when it compiles; until then they keep derivatives of their own.

Such an operation (a `HiPrim`, such as ``SearchSorted``) is one primitive for all of them, and has its program as a
method. Here it holds the program as a jaxpr too, so that it can be looked into and rewritten.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import jax
from jax._src import core as _core
from jax._src import hijax as _hijax
from jax._src import source_info_util as _source
from jax.extend.core import Jaxpr, JaxprEqn, jaxpr_as_fun

CALL_HI_PRIMITIVE = _hijax.call_hi_primitive_p
_PROGRAM = "_program"


def with_traced_body(eqn: JaxprEqn) -> JaxprEqn:
    """``eqn`` holding its program, where it is such an operation on arrays; anything else as it is."""
    if eqn.primitive is not CALL_HI_PRIMITIVE or traced_body(eqn) is not None:
        return eqn
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not all(isinstance(a, _core.ShapedArray) for a in avals):
        return eqn
    written = functools.partial(CALL_HI_PRIMITIVE.to_lojax, **eqn.params)
    with _source.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        return with_body(eqn, jax.make_jaxpr(written)(*avals[: len(eqn.invars)]))


def traced_body(eqn: JaxprEqn) -> Jaxpr | None:
    """The program that such an operation holds, or None."""
    return eqn.params["_prim"].params.get(_PROGRAM) if eqn.primitive is CALL_HI_PRIMITIVE else None


def with_body(eqn: JaxprEqn, program: Jaxpr) -> JaxprEqn:
    """``eqn`` holding ``program``, which takes its place when it is compiled. Its derivatives stay what they are."""
    prim = copy.copy(eqn.params["_prim"])

    def expand(*operands: Any) -> Any:
        leaves = prim.in_tree.flatten_up_to(operands)
        return prim.out_tree.unflatten(jaxpr_as_fun(program)(*leaves))

    dce = functools.partial(_hijax.HiPrim.dce, prim)  # whole or not at all: what is left of it would be another's
    vars(prim).update(params={**prim.params, _PROGRAM: program}, expand=expand, dce=dce)
    return eqn.replace(params=dict(eqn.params, _prim=prim))


def hi_primitive_params(eqn: JaxprEqn) -> dict[str, Any]:
    """What such an operation was made with, by name."""
    return {k: v for k, v in eqn.params["_prim"].params.items() if k != _PROGRAM}


def hi_primitive_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """What such an operation is called: its function, where it is one with derivatives of its own, and its class."""
    prim = eqn.params["_prim"]
    function = getattr(getattr(prim, "traced", None), "fun_name", None)
    return tuple(n for n in (function, type(prim).__name__) if n)
