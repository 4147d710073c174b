"""equation: what an operation is, asks for, and can be taken for."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.lax import lax as _lax
from jax._src.shard_map import shard_map_p as _shard_map_p
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as _prims
from jax.sharding import PartitionSpec

from autoshard.jaxpr import high
from autoshard.jaxpr.value import aval, is_shaped

CONSTRAINT = _prims.sharding_constraint_p
VARIADIC_IDENTITIES = frozenset({_lax.optimization_barrier_p, _prims.device_put_p})
"""Operations whose results are their operands, one by one."""
NAMED_CALLS = {
    "call_hi_primitive": "_prim",
    "custom_jvp_call": "call_jaxpr",
    "custom_partitioning": "call",
    "custom_vjp_call": "call_jaxpr",
    "ffi_call": "",
    "pallas_call": "jaxpr",
}
"""Primitives that stand for many operations, told apart by a name; and which of their parameters is the program."""


def manual_specs(eqn: JaxprEqn) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]] | None:
    """Specs of the operands and results of a `shard_map` over every axis of its mesh; None of anything else."""
    if eqn.primitive is not _shard_map_p or set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names):
        return None
    return eqn.params["in_specs"], eqn.params["out_specs"]


def op_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """What an operation is called beside its primitive: ``("pallas_call:flash", "flash")``. Of most: nothing.

    A kernel goes by the name given to `pallas_call` and by its function's, a foreign function by its target, a
    high-level operation by its class, the rest by the name of their function.
    """
    op, p = eqn.primitive.name, eqn.params
    if op not in NAMED_CALLS:
        return ()
    if eqn.primitive is high.CALL_HI_PRIMITIVE:
        called = high.hi_primitive_names(eqn)
    else:
        body = p.get(NAMED_CALLS[op])
        written = (body.debug_info.func_src_info or "").partition(" at ")[0] if body is not None else ""
        called = dict.fromkeys(n for n in (p.get("name"), p.get("target_name"), written) if n)
    return tuple(text for n in called for text in (f"{op}:{n}", n))


def op_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation's operation, by name, as a rule takes them."""
    return high.hi_primitive_params(eqn) if eqn.primitive is high.CALL_HI_PRIMITIVE else eqn.params


def is_opaque(eqn: JaxprEqn) -> bool:
    """Whether XLA sees a kernel or foreign function, which it cannot split, instead of operations."""
    return eqn.primitive.name in {"ffi_call", "pallas_call"}


def accepts_shards(eqn: JaxprEqn) -> bool:
    """Whether an opaque operation can be called on parts of its operands as it stands."""
    return eqn.primitive.name == "ffi_call"


def is_interpreted(eqn: JaxprEqn) -> bool:
    """Whether a kernel is run as plain operations, for want of a machine that it is for."""
    return bool(eqn.params.get("interpret"))


def bind_on_shards(eqn: JaxprEqn, shapes: Sequence[Sequence[int]]) -> Callable[..., list[Any]]:
    """``eqn``'s operation for parts of its operands; ``shapes`` are those of the parts of its results."""
    params = dict(eqn.params)
    if "result_avals" in params:
        params["result_avals"] = tuple(
            a.update(shape=tuple(s)) for a, s in zip(params["result_avals"], shapes, strict=True)
        )

    def part(*operands: Any) -> list[Any]:
        out = eqn.primitive.bind(*operands, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return part


def sharding_rule(eqn: JaxprEqn) -> tuple[Any, tuple[Any, ...]] | None:
    """What a `custom_partitioning` operation says of itself to Shardy, and its static arguments; or None."""
    if eqn.primitive.name != "custom_partitioning" or eqn.params["sharding_rule"] is None:
        return None
    return eqn.params["sharding_rule"], eqn.params["static_args"]


def eqn_key(eqn: JaxprEqn) -> Any:
    """What alike equations share, hashable; None where parameters cannot be compared."""
    operands = tuple((aval(a).shape, aval(a).dtype) if is_shaped(a) else a.aval for a in eqn.invars)
    key = (eqn.primitive, operands, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def contraction_flops(eqn: JaxprEqn) -> float:
    """Floating-point operations of a matrix product or convolution, multiply and add counted, or what an operation says
    of itself in a parameter ``flops``; else 0."""
    if eqn.primitive is _prims.dot_general_p:
        (lhs, _), _ = eqn.params["dimension_numbers"]
        out, left = aval(eqn.outvars[0]).shape, aval(eqn.invars[0]).shape
        return 2.0 * math.prod(out) * math.prod(left[d] for d in lhs)
    if eqn.primitive is _prims.conv_general_dilated_p:
        spec = eqn.params["dimension_numbers"].rhs_spec
        kernel, out = aval(eqn.invars[1]).shape, aval(eqn.outvars[0]).shape
        return 2.0 * math.prod(out) * math.prod(kernel[d] for d in spec[1:])
    return float(eqn.params.get("flops", 0.0))


@functools.cache
def all_primitives() -> dict[str, Primitive]:
    """Every primitive that the imported JAX defines, by name (the first defined, where names repeat)."""
    found = [p for p in gc.get_objects() if isinstance(p, Primitive)]
    public = {id(v) for v in vars(_prims).values()}
    return {p.name: p for p in sorted(found, key=lambda p: (p.name, id(p) in public))}


def find_primitive(name: str) -> Primitive | None:
    """The primitive called ``name``, or None when this JAX has none."""
    return all_primitives().get(name)
