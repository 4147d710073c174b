"""`autoshard.annotate`: a pin (hard sharding constraint) on an intermediate value, written inside the step.

It is a primitive of its own, so that it survives tracing under any mesh, autodiff and batching; in a step that is not
planned by autoshard it is the identity.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import ArgumentError, SpecError
from autoshard.ir.rule import Aval

annotate_p = Primitive("annotate")


def annotate[T](x: T, spec: PartitionSpec | NamedSharding) -> T:
    """Pins every array in ``x`` to ``spec`` when the step is planned; the values do not change.

    Planning never overrules a pin; an impossible one raises `SpecError` when the step is planned. The gradient with
    respect to ``x`` is pinned to the same spec.

    Args:
      x: an array or a pytree of arrays inside a traced step.
      spec: mesh axes per dimension, as for `jax.lax.with_sharding_constraint`; or a `NamedSharding` with that spec.

    Raises:
      ArgumentError: ``spec`` is neither.
      SpecError: ``spec`` has more entries than an array has dimensions, or is over another mesh than the step's.

    Example:
      >>> def step(x):
      ...     return autoshard.annotate(x * 2, P("data", None)) + 1
      >>> x = jax.ShapeDtypeStruct((64, 16), jnp.float32)
      >>> autoshard.jit(step, mesh={"data": 8}).plan(x).out_specs
      P('data',)
    """
    entries = _entries(spec)

    def pin(leaf: Any) -> Any:
        if len(entries) > jax.numpy.ndim(leaf):
            shape = jax.numpy.shape(leaf)
            raise SpecError(
                f"annotate: {entries} has {len(entries)} entries, and the array has {len(shape)} dimensions {shape}; "
                f"the longest spec that fits is {PartitionSpec(*entries[: len(shape)])}"
            )
        return annotate_p.bind(leaf, spec=entries)

    return jax.tree.map(pin, x)


def _entries(spec: Any) -> PartitionSpec:
    if isinstance(spec, PartitionSpec):
        return spec
    if not isinstance(spec, NamedSharding):
        hint = f"; for one axis write P({spec!r})" if isinstance(spec, str) else ""
        hint = "; P() replicates the array" if spec is None else hint
        raise ArgumentError(f"annotate takes a PartitionSpec or a NamedSharding, not {spec!r}{hint}")
    if spec.memory_kind not in (None, "device"):
        raise SpecError(
            f"annotate: the sharding is in {spec.memory_kind}, and annotate pins the spec alone; jax.device_put(x, "
            "jax.memory.Space.Host) inside the step moves x there"
        )
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty and dict(mesh.shape) != dict(spec.mesh.shape):
        raise SpecError(
            f"annotate: {spec.spec} is over the mesh {dict(spec.mesh.shape)}, and the step runs on "
            f"{dict(mesh.shape)}; pass the PartitionSpec alone, {spec.spec}, to use the step's mesh"
        )
    return spec.spec


def _identity(x: Any, *, spec: PartitionSpec) -> Any:
    del spec
    return x


def _batch(args: Any, dims: Any, *, spec: PartitionSpec) -> Any:
    (x,), (d,) = args, dims
    entries = list(spec) + [None] * (x.ndim - 1 - len(spec))
    entries.insert(d, PartitionSpec.UNCONSTRAINED)
    return annotate_p.bind(x, spec=PartitionSpec(*entries)), d


def _transpose(ct: Any, _: Aval, *, spec: PartitionSpec) -> Any:
    return [ct if type(ct) is ad.Zero else annotate_p.bind(ct, spec=spec)]


annotate_p.def_impl(_identity)
annotate_p.def_abstract_eval(_identity)
ad.deflinear2(annotate_p, _transpose)
batching.primitive_batchers[annotate_p] = _batch
mlir.register_lowering(annotate_p, mlir.lower_fun(_identity, multiple_results=False))
