"""A planned step for any batch and length: shapes with names in the place of some sizes.

A plan is for sizes. What it says of arguments and results holds for others, where their dimensions still divide over
the mesh; what is between is laid out by XLA, from these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import ExportError
from autoshard.ir.spec import Spec
from autoshard.plan.record import PlanRecord


def with_symbols(args: tuple[Any, ...], shapes: Sequence[Any], plan: PlanRecord) -> tuple[Any, ...]:
    """Abstract arguments with the plan's shardings and, where ``shapes`` has text, with the shapes that it says.

    Args:
      args: positional arguments of the step without the static ones.
      shapes: a pytree prefix of them, as `jax.export.symbolic_args_specs` takes it: ``(None, "8*b, s, _")``.

    Raises:
      ExportError: text that is no shape of its argument, or a dimension that may not divide over its mesh axes.
    """
    try:
        made = jax.export.symbolic_args_specs(args, tuple(shapes))
    except (TypeError, ValueError) as error:
        raise ExportError(f"{plan.name}: symbolic_shapes={shapes!r}: {error}") from error
    leaves, tree = jax.tree.flatten(made)
    for place, leaf in zip(plan.inputs, leaves, strict=False):
        for dim, axes in zip(leaf.shape, place.spec.dims, strict=True):
            if not _divides(parts := plan.mesh.axes_size(axes), dim):
                raise ExportError(
                    f"{plan.name}: {place.path} is split {parts} ways over {', '.join(axes)}, and {dim} may not divide "
                    f"so: write a multiple, as {parts}*{_name(dim)}, or pin the dimension to no axis with in_shardings="
                )
    shardings = plan.flat_in_shardings[: len(leaves)]
    return tree.unflatten(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)
    )


def export_with_symbols(
    fun: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], plan: PlanRecord, **options: Any
) -> jax.export.Exported:
    """The program of ``fun`` for abstract arguments as `with_symbols` makes them, jitted with ``options``. Results are
    whole in dimensions that may not divide as planned.

    Raises:
      ExportError: JAX cannot trace it so, as where what is computed depends on a size.
    """
    try:
        results = jax.tree.leaves(jax.jit(fun, **options).eval_shape(*args, **kwargs))
        places = zip(plan.outputs, results, strict=True)
        shardings = [NamedSharding(plan.jax_mesh, _dividing(place.spec, x, plan)) for place, x in places]
        tree = jax.tree.structure(plan.out_shardings)
        jitted = jax.jit(fun, out_shardings=tree.unflatten(shardings), **options)
        return jax.export.export(jitted)(*args, **kwargs)
    except (TypeError, ValueError, jax.errors.InconclusiveDimensionOperation) as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExportError(
            f"{plan.name} cannot be exported for every size: {why}; export it once for each size, without "
            "symbolic_shapes="
        ) from error


def _dividing(spec: Spec, result: Any, plan: PlanRecord) -> PartitionSpec:
    """``spec`` without the axes over which the result may not divide."""
    dims = zip(spec.dims, result.shape, strict=True)
    return Spec(tuple(axes if _divides(plan.mesh.axes_size(axes), d) else () for axes, d in dims)).partition_spec()


def _divides(parts: int, dim: Any) -> bool:
    """Whether a dimension is a multiple of ``parts`` whatever its symbols are; of a plan's own sizes, as it is."""
    rest = dim % parts if jax.export.is_symbolic_dim(dim) else 0
    return not jax.export.is_symbolic_dim(rest) and rest == 0


def _name(dim: Any) -> str:
    text = str(dim)
    return text if text.isidentifier() else f"({text})"
