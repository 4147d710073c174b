"""PaddedArray: an array that is stored with padding, so that a mesh divides it; everything but a step sees its values.

JAX has no array whose shards differ in size. A step that stores 50,257 rows over 8 devices takes and returns an
ordinary array of 50,264 rows; this class is that array with its true shape. It is a `jax.Array` and a leaf of pytrees,
registered with JAX as typed PRNG keys are. An operation on it outside of a step reads its `value`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src import tree_util as _tree_util
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jax.sharding import NamedSharding, PartitionSpec

Shape = tuple[int, ...]

_OPERATORS = (
    "abs add and array_namespace bool ceil complex divmod dlpack dlpack_device eq float floor floordiv format ge "
    "getitem gt index int invert iter le lshift lt matmul mod mul ne neg or pos pow radd rand rdivmod rfloordiv "
    "rlshift rmatmul rmod rmul ror round rpow rrshift rshift rsub rtruediv rxor sub truediv trunc xor"
)


class PaddedArray(jax.Array):
    """An array with padding at the end of some of its dimensions in `stored`, and without it everywhere else.

    Args:
      stored: what is on the devices: an array that its sharding divides.
      shape: the true shape; the rest of ``stored`` is padding.

    Example:
      >>> step = autoshard.jit(lambda w: w + 1, mesh={"data": 8}, strategy="fsdp", pad_state=True, donate_argnums=0)
      >>> w = step(jnp.zeros((13, 3)))
      >>> type(w).__name__, w.shape, w.stored.shape, float(w.sum())
      ('PaddedArray', (13, 3), (16, 3), 39.0)
      >>> w.value.shape, w.value.sharding.spec
      ((13, 3), P())
    """

    __slots__ = ("_true_shape", "stored")
    __hash__ = None
    __array_priority__ = 100

    def __init__(self, stored: Any, shape: Shape) -> None:
        self.stored, self._true_shape = stored, tuple(shape)

    @property
    def value(self) -> jax.Array:
        """The array as an ordinary `jax.Array`, with `sharding`: dimensions with padding are whole on every device."""
        on_device = jax.device_put(self.stored, _on_device(self.stored.sharding))
        return jax.device_put(_cut(self._true_shape, _on_device(self.sharding))(on_device), self.sharding)

    @property
    def sharding(self) -> Any:
        """That of `value`; ``stored.sharding`` is the one of the shards in memory."""
        return true_sharding(self.stored.sharding, self.stored.shape, self._true_shape)

    @property
    def shape(self) -> Any:
        return self._true_shape

    @property
    def dtype(self) -> Any:
        return self.stored.dtype

    @property
    def ndim(self) -> int:
        return len(self._true_shape)

    @property
    def size(self) -> int:
        return int(np.prod(self._true_shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def aval(self) -> Any:
        return self.stored.aval.update(shape=self._true_shape)

    @property
    def weak_type(self) -> bool:
        return self.stored.weak_type

    @property
    def committed(self) -> bool:
        return self.stored.committed

    @property
    def _committed(self) -> bool:
        return self.stored.committed

    @property
    def device(self) -> Any:
        return self.sharding

    @property
    def is_fully_addressable(self) -> bool:
        return self.stored.is_fully_addressable

    @property
    def is_fully_replicated(self) -> bool:
        return self.sharding.is_fully_replicated

    @property
    def addressable_shards(self) -> Any:
        return self.value.addressable_shards

    @property
    def global_shards(self) -> Any:
        return self.value.global_shards

    def addressable_data(self, index: int) -> Any:
        return self.value.addressable_data(index)

    def devices(self) -> Any:
        return self.stored.devices()

    def copy_to_host_async(self) -> None:
        self.stored.copy_to_host_async()

    def block_until_ready(self) -> PaddedArray:
        self.stored.block_until_ready()
        return self

    def delete(self) -> None:
        self.stored.delete()

    def is_deleted(self) -> bool:
        return self.stored.is_deleted()

    def on_device_size_in_bytes(self) -> int:
        return self.stored.on_device_size_in_bytes()

    def copy(self) -> PaddedArray:
        return PaddedArray(self.stored.copy(), self._true_shape)

    def __copy__(self) -> PaddedArray:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> PaddedArray:
        return self.copy()

    def __reduce__(self) -> Any:
        return jax.numpy.asarray, (np.asarray(self),)  # as of a `jax.Array`, a pickle has the values alone

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, context: Any = None, copy: bool | None = None) -> np.ndarray:
        found = np.asarray(self.stored)[tuple(map(slice, self._true_shape))]
        return np.array(found, dtype) if copy or dtype is not None else found

    def __len__(self) -> int:
        return self._true_shape[0]

    def __repr__(self) -> str:
        return f"Padded{np.asarray(self)!r}".replace("Paddedarray", "PaddedArray", 1)

    def __str__(self) -> str:
        return str(np.asarray(self))


def _operator(name: str) -> Callable[..., Any]:
    def operator(self: PaddedArray, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.value, name)(*(a.value if isinstance(a, PaddedArray) else a for a in args), **kwargs)

    operator.__name__ = name
    return operator


def _of_value(name: str) -> property:
    return property(lambda self: getattr(self.value, name))


for _name in _OPERATORS.split():
    setattr(PaddedArray, f"__{_name}__", _operator(f"__{_name}__"))
for _name in dir(jax.Array):
    if not _name.startswith("_") and _name not in vars(PaddedArray):
        setattr(PaddedArray, _name, _of_value(_name))


def true_sharding(sharding: NamedSharding, stored: Shape, shape: Shape) -> NamedSharding:
    """``sharding`` of what is stored, of shape ``stored``, for the array of ``shape``: whole where there is padding."""
    entries = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    kept = [e if m == n else None for e, m, n in zip(entries, stored, shape, strict=True)]
    while kept and kept[-1] is None:
        kept.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*kept), memory_kind=sharding.memory_kind)


def add_padding(x: Any, stored: Shape) -> Any:
    """``x`` with zeros at the end of each dimension, up to the shape ``stored``; in a trace, or of numpy."""
    extra = [m - n for m, n in zip(stored, x.shape, strict=True)]
    if isinstance(x, np.ndarray):
        return np.pad(x, [(0, n) for n in extra])
    return jax.lax.pad(x, np.zeros((), x.dtype), [(0, n, 0) for n in extra])


def cut_padding(x: Any, shape: Shape) -> Any:
    """``x`` without its padding; in a trace."""
    return jax.lax.slice(x, (0,) * len(shape), shape)


def as_stored(x: Any, stored: Shape, sharding: NamedSharding) -> Any:
    """The stored form of ``x``, an array of the true shape in any form: one of the shape ``stored`` with ``sharding``.

    Only its shards reach a device, unless ``x`` is on these devices already.
    """
    if isinstance(x, PaddedArray):
        if x.stored.shape == stored:
            placed = x.stored.sharding.is_equivalent_to(sharding, len(stored))
            return x.stored if placed else jax.device_put(x.stored, sharding)
        x = x.value
    if isinstance(x, jax.Array) and x.committed and x.sharding.device_set == sharding.device_set:
        on_device = x.sharding.with_memory_kind("device")
        return jax.device_put(_pad(stored, _on_device(sharding))(jax.device_put(x, on_device)), sharding)
    return jax.device_put(add_padding(np.asarray(x), stored), sharding)


@functools.lru_cache(maxsize=1024)
def _pad(stored: Shape, sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: add_padding(x, stored), out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _cut(shape: Shape, sharding: NamedSharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: cut_padding(x, shape), out_shardings=sharding)


def _on_device(sharding: NamedSharding) -> NamedSharding:
    return NamedSharding(sharding.mesh, sharding.spec)


class Dispatched:
    """A `PaddedArray` on its way through JAX's C++ dispatch, which sees what is stored and keeps the true shape."""

    __slots__ = ("shape", "stored")

    def __init__(self, stored: Any, shape: Shape) -> None:
        self.stored, self.shape = stored, shape


def to_dispatch(x: Any) -> Any:
    """``x`` as JAX's C++ dispatch takes it."""
    return Dispatched(x.stored, x.shape) if isinstance(x, PaddedArray) else x


def from_dispatch(x: Any) -> Any:
    """The inverse of `to_dispatch`."""
    return PaddedArray(x.stored, x.shape) if isinstance(x, Dispatched) else x


def with_true_shapes(arrays: Sequence[Any], shapes: Sequence[Shape | None]) -> list[Any]:
    """``arrays``, those with a true shape in ``shapes`` as `PaddedArray`s."""
    return [x if s is None or x.shape == s else PaddedArray(x, s) for x, s in zip(arrays, shapes, strict=True)]


def _typed(x: PaddedArray) -> Any:
    return _core.update_aval_with_sharding(x.aval, x.sharding)


def _shard_args(xs: Any, shardings: Any, layouts: Any, copies: Any) -> Any:
    return _pxla.shard_args(shardings, layouts, copies, [x.value for x in xs])


def _constant(val: Any, aval: Any) -> Any:
    return _mlir.get_constant_handler(np.ndarray)(np.asarray(val), aval)


_tree_util.dispatch_registry.register_node(
    Dispatched, lambda x: ((x.stored,), x.shape), lambda shape, stored: Dispatched(stored[0], shape)
)
_core.pytype_aval_mappings[PaddedArray] = _typed
_dtypes.register_canonicalize_value_handler(PaddedArray, None)
_pxla.shard_arg_handlers[PaddedArray] = _shard_args
_mlir.register_constant_handler(PaddedArray, _constant)
