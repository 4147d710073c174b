"""High-level primitives (JAX's `HiPrim`, such as ``SearchSorted``): operations with autodiff rules of their own, which
JAX expands into others at lowering.

All are calls of the one primitive ``call_hi_primitive``, with the body as a Python method. Here the body is traced into
the equation as a jaxpr, so that passes can read and rewrite it.
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
    """``eqn`` with its body as a jaxpr, where it calls a `HiPrim` on arrays; else unchanged."""
    if eqn.primitive is not CALL_HI_PRIMITIVE or traced_body(eqn) is not None:
        return eqn
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    if not all(isinstance(a, _core.ShapedArray) for a in avals):
        return eqn
    expansion = functools.partial(CALL_HI_PRIMITIVE.to_lojax, **eqn.params)
    with _source.user_context(eqn.source_info.traceback), eqn.ctx.manager:
        return with_body(eqn, jax.make_jaxpr(expansion)(*avals[: len(eqn.invars)]))


def traced_body(eqn: JaxprEqn) -> Jaxpr | None:
    """The body stored in ``eqn`` by `with_body`, or None."""
    return eqn.params["_prim"].params.get(_PROGRAM) if eqn.primitive is CALL_HI_PRIMITIVE else None


def with_body(eqn: JaxprEqn, program: Jaxpr) -> JaxprEqn:
    """``eqn`` with the body ``program``, into which it is expanded at lowering; its autodiff rules stay the same."""
    prim = copy.copy(eqn.params["_prim"])

    def expand(*operands: Any) -> Any:
        leaves = prim.in_tree.flatten_up_to(operands)
        return prim.out_tree.unflatten(jaxpr_as_fun(program)(*leaves))

    dce = functools.partial(_hijax.HiPrim.dce, prim)  # kept entire: DCE inside would leave another operation
    vars(prim).update(params={**prim.params, _PROGRAM: program}, expand=expand, dce=dce)
    return eqn.replace(params=dict(eqn.params, _prim=prim))


def hi_primitive_params(eqn: JaxprEqn) -> dict[str, Any]:
    """Parameters of the `HiPrim` that ``eqn`` calls, without the stored body."""
    return {k: v for k, v in eqn.params["_prim"].params.items() if k != _PROGRAM}


def hi_primitive_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of the `HiPrim` that ``eqn`` calls: its function's, if it wraps one with custom rules, and its class's."""
    prim = eqn.params["_prim"]
    function = getattr(getattr(prim, "traced", None), "fun_name", None)
    return tuple(n for n in (function, type(prim).__name__) if n)
