"""Arrays of one process on a mesh that several processes share: compared between them, and made global.

What a process has in host memory, or on devices of its own alone, may be a whole argument, the same in every process,
or this process's rows of it. Nothing in the array says which, and JAX copies to each device what the device's process
happens to have: rows would be dropped or mixed. So what several processes bring is compared by digest first.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError
from autoshard.jaxpr.arguments import argument_aval
from autoshard.plan.decisions import Place

Index = tuple[slice, ...] | None
Rows = tuple[int, int]
"""Indices of the dimension that a process brings a part of, from the first up to the second."""


def spans_processes(mesh: Mesh) -> bool:
    """Whether the devices of ``mesh`` are of more than one process."""
    return len({d.process_index for d in mesh.devices.flat}) > 1


def is_process_local(x: Any) -> bool:
    """Whether ``x`` is in host memory, or on devices that are all of this process."""
    return not isinstance(x, jax.Array) or (not jx.is_tracer(x) and x.is_fully_addressable)


def _padded(host: np.ndarray, place: Place, sharding: NamedSharding, local: bool) -> np.ndarray:
    """``host``, a whole argument or this process's rows of it, with the padding that it is stored with; as it is where
    it has another shape."""
    stored = place.stored_shape
    dim = local_dim(sharding, stored) if local else 0
    if dim and host.shape == place.shape:  # all of it, though a part along this dimension would do
        return jx.add_padding(host, stored)
    rows = local_rows(sharding, stored, dim) if local else np.arange(stored[0])
    if host.shape != _with_size(place.shape, dim, int((rows < place.shape[dim]).sum())):
        return host
    return jx.add_padding(host, _with_size(stored, dim, len(rows)))


def local_rows(sharding: NamedSharding, shape: Sequence[int], dim: int = 0) -> np.ndarray:
    """Which indices of a dimension the devices of this process hold, in order: int64 [rows]."""
    return held_rows(sharding.addressable_devices_indices_map(tuple(shape)).values(), shape, dim)


def held_rows(indices: Iterable[Index], shape: Sequence[int], dim: int) -> np.ndarray:
    """Which indices of a dimension the shards with these ``indices`` have, in order: int64 [rows]."""
    held = {_rows(index, shape, dim) for index in indices}
    return np.concatenate([np.arange(0), *(np.arange(*rows) for rows in sorted(held))])


def local_dim(sharding: NamedSharding, shape: Sequence[int]) -> int:
    """The dimension that a process brings a part of: the first that is split between processes; 0 where none is."""
    indices = sharding.devices_indices_map(tuple(shape))
    processes: dict[int, list[Index]] = defaultdict(list)
    for device, index in indices.items():
        processes[device.process_index].append(index)
    split = (d for d, n in enumerate(shape) if any(len(held_rows(held, shape, d)) < n for held in processes.values()))
    return next(split, 0)


def _with_size(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """``shape`` with another size of one dimension."""
    return (*shape[:dim], size, *shape[dim + 1 :])


def make_global(
    leaves: Sequence[Any],
    places: Sequence[Place],
    shardings: Sequence[NamedSharding],
    mesh: Mesh,
    name: str,
    *,
    local: bool = False,
) -> list[Any]:
    """``leaves``, those that are process-local as global arrays with ``shardings``, which are of ``mesh``.

    Every process of the mesh must call this.

    Args:
      leaves: arrays that are global already are returned as they are.
      places: the arguments of the step ``name`` that they are.
      local: process-local leaves are this process's rows, those of `local_rows`, every other dimension whole; otherwise
        they are whole. Rows are of dimension 0, or of the first that is split between processes.

    Raises:
      ArgumentError: an array of another shape; or, in every process, one of which two processes bring the same rows
        with different values.
    """
    hosts = [_on_host(x) if is_process_local(x) else None for x in leaves]
    if not any(x is not None for x in hosts):
        return list(leaves)
    for n, (host, place, sharding) in enumerate(zip(hosts, places, shardings, strict=True)):
        if host is not None and place.stored is not None:
            hosts[n] = _padded(host, place, sharding, local)
    places = [replace(p, shape=p.stored_shape, stored=None) for p in places]
    dims = _brought(hosts, places, shardings, mesh, name) if local else [0] * len(hosts)
    owned = [Owned(0, np.arange(0))] * len(hosts)
    for n, (host, place, sharding, dim) in enumerate(zip(hosts, places, shardings, dims, strict=True)):
        if not place.shape:
            continue
        owned[n] = Owned(dim, local_rows(sharding, place.shape, dim) if local else np.arange(place.shape[0]))
        if host is None:
            continue
        if host.shape[: len(place.shape)] != (want := _with_size(place.shape, dim, len(owned[n].rows))):
            raise ArgumentError(
                f"put: {place.path} of {name} is {list(place.shape)}, of which process {jax.process_index()} brings "
                f"{len(owned[n].rows)} rows, {list(want)}, and it was given {list(host.shape)}; "
                f"plan.local_rows({place.path!r}{f', {dim}' if dim else ''}) has the numbers of the rows"
            )
    _compare(hosts, places, shardings, mesh, owned, name, local)
    return [
        x if host is None else _assemble(x, host, place, sharding, own)
        for x, host, place, sharding, own in zip(leaves, hosts, places, shardings, owned, strict=True)
    ]


def _brought(
    hosts: Sequence[np.ndarray | None],
    places: Sequence[Place],
    shardings: Sequence[NamedSharding],
    mesh: Mesh,
    name: str,
) -> list[int]:
    """The dimension of each argument that a process brings rows of: `local_dim`, but 0 where all bring all of it.

    Raises:
      ArgumentError: in every process, if one brings all of an argument and another a part.
    """
    dims = [local_dim(sharding, place.shape) for place, sharding in zip(places, shardings, strict=True)]
    if not any(dims):
        return dims
    whole = [
        bool(dim) and host is not None and host.shape[: len(place.shape)] == place.shape
        for dim, host, place in zip(dims, hosts, places, strict=True)
    ]
    table = gather(mesh, np.tile(np.asarray(whole, np.uint32), (mesh.size, 1)))
    for place, found in zip(places, table.T, strict=True):
        if len({*found.tolist()}) > 1:
            raise ArgumentError(
                f"put: of {place.path} of {name}, {list(place.shape)}, one process brings all and another its rows"
            )
    return [0 if all_of_it else dim for all_of_it, dim in zip(whole, dims, strict=True)]


class Owned(NamedTuple):
    """What of an argument a process brings."""

    dim: int
    rows: np.ndarray
    """Indices of that dimension, ascending."""

    def take(self, host: np.ndarray, rows: Rows) -> np.ndarray:
        """``rows`` of what the process brings."""
        start = int(np.searchsorted(self.rows, rows[0]))
        return host[(*[slice(None)] * self.dim, slice(start, start + rows[1] - rows[0]))]


def _compare(
    hosts: Sequence[np.ndarray | None],
    places: Sequence[Place],
    shardings: Sequence[NamedSharding],
    mesh: Mesh,
    owned: Sequence[Owned],
    name: str,
    local: bool,
) -> None:
    """Raises `ArgumentError` in every process if two of them bring the same rows of an argument with other values."""
    owners = [d.process_index for d in mesh.devices.flat]
    parts = [
        _rows_by_device(place, sharding, mesh, own.dim, local)
        for place, sharding, own in zip(places, shardings, owned, strict=True)
    ]
    bringing: list[dict[Rows, set[int]]] = [defaultdict(set) for _ in parts]
    for by_device, processes in zip(parts, bringing, strict=True):
        for rows, owner in zip(by_device, owners, strict=True):
            processes[rows].add(owner)
    own = np.zeros((mesh.size, len(parts)), np.uint32)
    for n, (host, place, by_device) in enumerate(zip(hosts, places, parts, strict=True)):
        digests: dict[Rows, int] = {}
        for d, rows in enumerate(by_device):
            if host is None or owners[d] != jax.process_index() or len(bringing[n][rows]) < 2:
                continue
            if rows not in digests:
                digests[rows] = _digest(host if not place.shape else owned[n].take(host, rows))
            own[d, n] = digests[rows]
    if not any(len(processes) > 1 for by_rows in bringing for processes in by_rows.values()):
        return
    table = gather(mesh, own)
    for n, (place, by_device) in enumerate(zip(places, parts, strict=True)):
        first = {rows: d for d, rows in reversed([*enumerate(by_device)])}
        for d, rows in enumerate(by_device):
            if table[d, n] != table[first[rows], n]:
                of = f" of dimension {owned[n].dim}" if owned[n].dim else ""
                which = f"rows {rows[0]} to {rows[1] - 1}{of} of {place.path}" if local and place.shape else place.path
                raise ArgumentError(_difference(which, place, name, owners[first[rows]], owners[d], local))


def _difference(which: str, place: Place, name: str, one: int, other: int, local: bool) -> str:
    found = f"{name}: {which} {'are' if which != place.path else 'is'} not the same in processes {one} and {other}"
    if local:
        return f"{found}, which both have devices that hold them; they must bring the same values"
    return (
        f"{found}, which share the mesh: what is in a process's own memory is taken as the whole argument, "
        f"{place.dtype}{list(place.shape)}. Pass the same array in every process. Or let each bring its own rows: plan "
        "with the shapes of the whole arguments (jax.ShapeDtypeStruct will do), then call the step with "
        f"plan.put(*args, local=True); plan.local_rows({place.path!r}) has the numbers of a process's rows"
    )


def _rows_by_device(place: Place, sharding: NamedSharding, mesh: Mesh, dim: int, local: bool) -> list[Rows]:
    """The rows that each device's process brings for it, by the device's position in the mesh."""
    if not local or not place.shape:
        return [(0, place.shape[0] if place.shape else 1)] * mesh.size
    indices = sharding.devices_indices_map(place.shape)
    return [_rows(indices[d], place.shape, dim) for d in mesh.devices.flat]


def _rows(index: Index, shape: Sequence[int], dim: int) -> Rows:
    assert index is not None
    start, stop, _ = index[dim].indices(shape[dim])
    return start, stop


def _assemble(x: Any, host: np.ndarray, place: Place, sharding: NamedSharding, own: Owned) -> Any:
    def block(index: Index) -> np.ndarray:
        if not place.shape or index is None:
            return host
        rest = (*index[: own.dim], slice(None), *index[own.dim + 1 :])
        return own.take(host, _rows(index, place.shape, own.dim))[rest]

    made = jax.make_array_from_callback((*place.shape, *host.shape[len(place.shape) :]), sharding, block)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(x)) if _is_key(x) else made


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _on_host(x: Any) -> np.ndarray:
    """``x`` as `jax.jit` takes it, in host memory; of typed PRNG keys their data."""
    return np.asarray(jax.random.key_data(x)) if _is_key(x) else np.asarray(x, argument_aval(x)[1])


def _digest(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8), zlib.crc32(f"{x.dtype}{x.shape}".encode()))


def gather(mesh: Mesh, own: np.ndarray) -> np.ndarray:
    """A table with one row for each device of ``mesh``, in their order, of which each process brings those of its own.

    Args:
      own: [device, ...]; the rows of other processes' devices are ignored.
    """
    split, whole = _gathering(mesh)
    rows = jax.make_array_from_callback(own.shape, split, lambda index: own[index])
    with jax.sharding.use_abstract_mesh(split.mesh.abstract_mesh):
        return np.asarray(whole(rows))


@functools.cache
def _gathering(mesh: Mesh) -> tuple[NamedSharding, Any]:
    """A sharding of rows over all devices of ``mesh``, and a function that copies each row to every device."""
    line = Mesh(mesh.devices.reshape(-1), ("devices",), axis_types=(AxisType.Auto,))
    return NamedSharding(line, P("devices")), jax.jit(lambda x: x, out_shardings=NamedSharding(line, P()))
