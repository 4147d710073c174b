"""Properties of one equation: names, parameters, FLOPs, and whether it can run on shards or twice."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import mlir as _mlir
from jax._src.lax.lax import ragged_dot_general_p as _ragged_dot_general_p
from jax._src.shard_map import shard_map_p as _shard_map_p
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as _prims
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.jaxpr import hi_primitives
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.jaxpr.value import aval, is_shaped

NAMED_CALLS = {
    "call_hi_primitive": "_prim",
    "custom_jvp_call": "call_jaxpr",
    "custom_partitioning": "call",
    "custom_vjp_call": "call_jaxpr",
    "ffi_call": "",
    "pallas_call": "jaxpr",
}
"""Primitives that stand for many operations, which differ by name; and the parameter that is their body, if any."""

DEFAULT_PRECISIONS = {None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT)}
"""JAX's default precision, as a product's parameter says it."""


def manual_specs(eqn: JaxprEqn) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]] | None:
    """``in_specs`` and ``out_specs`` of a `shard_map` that is manual over its whole mesh; None for anything else."""
    if eqn.primitive is not _shard_map_p or set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names):
        return None
    return eqn.params["in_specs"], eqn.params["out_specs"]


def op_names(eqn: JaxprEqn) -> tuple[str, ...]:
    """Names of an operation beside its primitive's: ``("pallas_call:flash", "flash")``. Most have none.

    A kernel has the name given to `pallas_call` and its function's, a foreign function its target's, a `HiPrim` its
    class's, any other call its function's.
    """
    op, p = eqn.primitive.name, eqn.params
    if op not in NAMED_CALLS:
        return ()
    if eqn.primitive is hi_primitives.CALL_HI_PRIMITIVE:
        found = hi_primitives.hi_primitive_names(eqn)
    else:
        body = p.get(NAMED_CALLS[op])
        function = body.debug_info.func_name if body is not None else ""
        found = dict.fromkeys(n for n in (p.get("name"), p.get("target_name"), function) if n)
    return tuple(text for n in found for text in (f"{op}:{n}", n))


def op_params(eqn: JaxprEqn) -> dict[str, Any]:
    """The parameters of an equation as its sharding rule takes them; those of the `HiPrim` where it calls one."""
    return hi_primitives.hi_primitive_params(eqn) if eqn.primitive is hi_primitives.CALL_HI_PRIMITIVE else eqn.params


def is_opaque(eqn: JaxprEqn) -> bool:
    """Whether XLA sees a custom call (a kernel or foreign function), which it cannot partition."""
    return eqn.primitive.name in {"ffi_call", "pallas_call"}


def accepts_shards(eqn: JaxprEqn) -> bool:
    """Whether an opaque operation can be bound on shards of its operands without being rebuilt for their shapes."""
    return eqn.primitive.name == "ffi_call"


def is_interpreted(eqn: JaxprEqn) -> bool:
    """Whether a Pallas kernel is in interpret mode, and so lowered to plain operations."""
    return bool(eqn.params.get("interpret"))


def bind_on_shards(eqn: JaxprEqn, shapes: Sequence[Sequence[int]]) -> Callable[..., list[Any]]:
    """A function that binds ``eqn``'s primitive on operand shards; ``shapes``: the shapes of its results' shards."""
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
    """Shardy rule (or function that returns it) and static arguments of a `custom_partitioning` equation, else None."""
    if eqn.primitive.name != "custom_partitioning" or eqn.params["sharding_rule"] is None:
        return None
    return eqn.params["sharding_rule"], eqn.params["static_args"]


def eqn_key(eqn: JaxprEqn) -> Any:
    """Hashable key of an equation, equal for equal primitives, operand types and parameters; None if not hashable."""
    operands = tuple(
        (aval(a).shape, aval(a).dtype, in_host_memory(a.aval)) if is_shaped(a) else a.aval for a in eqn.invars
    )
    key = (eqn.primitive, operands, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def contraction_flops(eqn: JaxprEqn) -> float:
    """FLOPs of a matrix product, ragged or not, or convolution (a multiply-add is two), or the equation's parameter
    ``flops``, or 0.

    A convolution reads no holes of a dilated operand, as in the gradient of a strided one; padding counts as read.
    """
    if eqn.primitive is _prims.dot_general_p:
        (lhs, _), _ = eqn.params["dimension_numbers"]
        out, left = aval(eqn.outvars[0]).shape, aval(eqn.invars[0]).shape
        return 2.0 * math.prod(out) * math.prod(left[d] for d in lhs)
    if eqn.primitive is _ragged_dot_general_p:
        return _ragged_flops(eqn)
    if eqn.primitive is _prims.conv_general_dilated_p:
        p = eqn.params
        rhs, result = p["dimension_numbers"].rhs_spec, p["dimension_numbers"].out_spec
        kernel, out = aval(eqn.invars[1]).shape, aval(eqn.outvars[0]).shape
        low = [low for low, _ in p["padding"]]
        windows = zip(p["window_strides"], low, p["lhs_dilation"], p["rhs_dilation"], strict=True)
        reads = [window_reads(out[o], kernel[k], *w) for o, k, w in zip(result[2:], rhs[2:], windows, strict=True)]
        return 2.0 * out[result[0]] * out[result[1]] * kernel[rhs[1]] * math.prod(reads)
    return float(eqn.params.get("flops", 0.0))


def rounds_operands(eqn: JaxprEqn) -> bool:
    """Whether it is a matrix product or convolution of floating-point numbers at JAX's default precision, which XLA
    may round; those of ragged groups have a kernel that takes them as they are."""
    if eqn.primitive not in (_prims.dot_general_p, _prims.conv_general_dilated_p):
        return False
    floats = all(jnp.issubdtype(aval(x).dtype, jnp.floating) for x in eqn.invars[:2])
    return floats and eqn.params["precision"] in DEFAULT_PRECISIONS


def _ragged_flops(eqn: JaxprEqn) -> float:
    """FLOPs of a product of ragged groups: each row is multiplied with one group's matrix."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    rest = {*contracted, *batch, *numbers.rhs_group_dimensions}
    rhs = aval(eqn.invars[1]).shape
    return 2.0 * math.prod(aval(eqn.invars[0]).shape) * math.prod(n for d, n in enumerate(rhs) if d not in rest)


class Convolution(NamedTuple):
    """Which dimension of a convolution's operands and result is what."""

    lhs: tuple[int, ...]
    """Of the image: batch, features, then spatial dimensions."""
    rhs: tuple[int, ...]
    """Of the kernel: features made, features read by each group, then spatial dimensions."""
    out: tuple[int, ...]
    """Of the result: batch, features, then spatial dimensions."""
    grouped: bool
    """Whether features, or the batch, are in several groups."""


def convolution(eqn: JaxprEqn) -> Convolution | None:
    """The dimensions of a convolution; None of any other operation."""
    if eqn.primitive is not _prims.conv_general_dilated_p:
        return None
    p = eqn.params
    lhs, rhs, out = (tuple(dims) for dims in p["dimension_numbers"])
    return Convolution(lhs, rhs, out, p["feature_group_count"] > 1 or p["batch_group_count"] > 1)


def window_reads(outputs: int, size: int, stride: int, low: int, base_dilation: int, dilation: int) -> int:
    """Elements that windows read along one dimension, without the holes of a dilated base, with padding.

    Args:
      outputs: number of windows; ``size`` of one, ``dilation`` apart; each ``stride`` after the one before it.
      low: padding before the first element.
      base_dilation: distance of the base's elements; between them are holes.
    """
    if base_dilation == 1:
        return outputs * size
    read = np.arange(outputs)[:, None] * stride + np.arange(size) * dilation - low
    return int((read % base_dilation == 0).sum())


def all_primitives() -> dict[str, Primitive]:
    """Every primitive that is defined so far, by name; of several with one name, the public one."""
    return _all_primitives(len(_mlir._lowerings), sum(map(len, _mlir._platform_specific_lowerings.values())))


@functools.lru_cache(maxsize=1)
def _all_primitives(lowerings: int, platform_lowerings: int) -> dict[str, Primitive]:
    """`all_primitives` as long as JAX can lower so many: a primitive that it cannot lower is in no step."""
    found = [p for p in gc.get_objects() if isinstance(p, Primitive)]
    public = {id(v) for v in vars(_prims).values()}
    return {p.name: p for p in sorted(found, key=lambda p: (p.name, id(p) in public))}


def find_primitive(name: str) -> Primitive | None:
    """The primitive named ``name``, or None where this version of JAX has none."""
    return all_primitives().get(name)


def destination_specs(eqn: JaxprEqn) -> dict[int, PartitionSpec]:
    """The specs of the `NamedSharding`s that a `jax.device_put` in a step names, by the position of the result."""
    places: Sequence[Any] = eqn.params["devices"] if eqn.primitive is _prims.device_put_p else ()
    return {i: place.spec for i, place in enumerate(places) if isinstance(place, NamedSharding)}
