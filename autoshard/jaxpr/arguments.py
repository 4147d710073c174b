"""The abstract value of an argument, as `jax.jit` takes it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from autoshard.jaxpr.value import array_aval

ArgumentAval = tuple[tuple[int, ...], Any, bool, bool]
"""Shape, dtype, weak type, and whether it is in the host's memory (``pinned_host``), which is a part of JAX's types."""

IN_HOST_MEMORY = NamedSharding(AbstractMesh((), ()), PartitionSpec(), memory_kind="pinned_host")
"""The sharding of an abstract argument in the host's memory: it says that and nothing else."""


def argument_aval(x: Any) -> ArgumentAval:
    """The abstract value of an argument, as `jax.jit` sees it (64-bit types narrowed where x64 is off).

    Raises:
      TypeError: ``x`` is not an array.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return tuple(x.shape), dtype, bool(x.weak_type), in_host_memory(array_aval(x))
    aval = array_aval(x)
    x = x if isinstance(x, jax.Array) else aval
    weak = bool(getattr(x, "weak_type", False))  # key arrays have no weak_type
    return tuple(x.shape), x.dtype, weak, in_host_memory(aval)


def in_host_memory(aval: Any) -> bool:
    """Whether values of this type are in the host's memory."""
    return getattr(aval, "memory_space", None) is jax.memory.Space.Host


def abstract_argument(aval: ArgumentAval, host: bool = False) -> jax.ShapeDtypeStruct:
    """An argument with this abstract value; ``host``: in the host's memory in any case."""
    shape, dtype, weak, in_host = aval
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=IN_HOST_MEMORY if host or in_host else None)
