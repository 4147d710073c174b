"""Arrays of one process on a mesh that several processes share: compared between them, and made global.

What a process has in host memory, or on devices of its own alone, may be a whole argument, the same in every process,
or this process's rows of it. Nothing in the array says which, and JAX copies to each device what the device's process
happens to have: rows would be dropped or mixed. So what several processes bring is compared by digest first.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError, PlanError
from autoshard.jaxpr.arguments import argument_aval
from autoshard.plan.decisions import Place

Index = tuple[slice, ...] | None
Rows = tuple[int, int]
"""Indices of dimension 0, from the first up to the second."""


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
    rows = local_rows(sharding, stored) if local else np.arange(stored[0])
    if host.shape != (int((rows < place.shape[0]).sum()), *place.shape[1:]):
        return host
    return jx.add_padding(host, (len(rows), *stored[1:]))


def local_rows(sharding: NamedSharding, shape: Sequence[int]) -> np.ndarray:
    """Which rows (indices of dimension 0) the devices of this process hold, in order: int64 [rows]."""
    held = {_rows(index, shape) for index in sharding.addressable_devices_indices_map(tuple(shape)).values()}
    return np.concatenate([np.arange(0), *(np.arange(*rows) for rows in sorted(held))])


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
        they are whole.

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
    numbers = [np.arange(0)] * len(hosts)
    for n, (host, place, sharding) in enumerate(zip(hosts, places, shardings, strict=True)):
        if host is None or not place.shape:
            continue
        numbers[n] = local_rows(sharding, place.shape) if local else np.arange(place.shape[0])
        if host.shape[: len(place.shape)] != (want := (len(numbers[n]), *place.shape[1:])):
            raise ArgumentError(
                f"put: {place.path} of {name} is {list(place.shape)}, of which process {jax.process_index()} brings "
                f"{len(numbers[n])} rows, {list(want)}, and it was given {list(host.shape)}; "
                f"plan.local_rows({place.path!r}) has the numbers of the rows"
            )
    _compare(hosts, places, shardings, mesh, numbers, name, local)
    return [
        x if host is None else _assemble(x, host, place, sharding, own)
        for x, host, place, sharding, own in zip(leaves, hosts, places, shardings, numbers, strict=True)
    ]


def _compare(
    hosts: Sequence[np.ndarray | None],
    places: Sequence[Place],
    shardings: Sequence[NamedSharding],
    mesh: Mesh,
    numbers: Sequence[np.ndarray],
    name: str,
    local: bool,
) -> None:
    """Raises `ArgumentError` in every process if two of them bring the same rows of an argument with other values."""
    owners = [d.process_index for d in mesh.devices.flat]
    parts = [_rows_by_device(place, sharding, mesh, local) for place, sharding in zip(places, shardings, strict=True)]
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
                digests[rows] = _digest(host if not place.shape else _take(host, numbers[n], rows))
            own[d, n] = digests[rows]
    if not any(len(processes) > 1 for by_rows in bringing for processes in by_rows.values()):
        return
    table = gather(mesh, own)
    for n, (place, by_device) in enumerate(zip(places, parts, strict=True)):
        first = {rows: d for d, rows in reversed([*enumerate(by_device)])}
        for d, rows in enumerate(by_device):
            if table[d, n] != table[first[rows], n]:
                which = f"rows {rows[0]} to {rows[1] - 1} of {place.path}" if local and place.shape else place.path
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


def _rows_by_device(place: Place, sharding: NamedSharding, mesh: Mesh, local: bool) -> list[Rows]:
    """The rows that each device's process brings for it, by the device's position in the mesh."""
    if not local or not place.shape:
        return [(0, place.shape[0] if place.shape else 1)] * mesh.size
    indices = sharding.devices_indices_map(place.shape)
    return [_rows(indices[d], place.shape) for d in mesh.devices.flat]


def _rows(index: Index, shape: Sequence[int]) -> Rows:
    assert index is not None
    start, stop, _ = index[0].indices(shape[0])
    return start, stop


def _take(host: np.ndarray, numbers: np.ndarray, rows: Rows) -> np.ndarray:
    """``rows`` of an array whose own rows have the ``numbers``, ascending."""
    start = int(np.searchsorted(numbers, rows[0]))
    return host[start : start + rows[1] - rows[0]]


def _assemble(x: Any, host: np.ndarray, place: Place, sharding: NamedSharding, numbers: np.ndarray) -> Any:
    def block(index: Index) -> np.ndarray:
        if not place.shape or index is None:
            return host
        return _take(host, numbers, _rows(index, place.shape))[(slice(None), *index[1:])]

    made = jax.make_array_from_callback((*place.shape, *host.shape[len(place.shape) :]), sharding, block)
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(x)) if _is_key(x) else made


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _on_host(x: Any) -> np.ndarray:
    """``x`` as `jax.jit` takes it, in host memory; of typed PRNG keys their data."""
    return np.asarray(jax.random.key_data(x)) if _is_key(x) else np.asarray(x, argument_aval(x)[1])


def _digest(x: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(x).reshape(-1).view(np.uint8), zlib.crc32(f"{x.dtype}{x.shape}".encode()))


def check_agreement(mesh: Mesh, text: str, what: str) -> None:
    """Every process that has devices of ``mesh`` must call this, with the same ``text``.

    Raises:
      PlanError: in every process, if ``what`` the text describes differs.
    """
    devices = sorted(mesh.devices.flat, key=lambda d: d.id)  # the order of the axes is a part of what may differ
    digest = np.full((len(devices), 1), zlib.crc32(text.encode()), np.uint32)
    found = gather(Mesh(np.asarray(devices, dtype=object), ("devices",)), digest)[:, 0]
    other = next((d for d, one in zip(devices, found, strict=True) if one != found[0]), None)
    if other is not None:
        raise PlanError(
            f"{what} is not the same in processes {devices[0].process_index} and {other.process_index}, which share "
            "the mesh: the function, its options and the shapes of its arguments must be the same in every process"
        )


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
