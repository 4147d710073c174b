"""Lowered and compiled stages: executing a flat executable, and JAX's C++ dispatch from a call to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax._src import api_util as _api_util
from jax._src import config as _config
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import tree_util as _tree_util
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax.sharding import NamedSharding

from autoshard.jaxpr.padded_array import Shape, as_stored, from_dispatch, to_dispatch, with_true_shapes
from autoshard.jaxpr.value import is_tracer

FastPath = Any
"""JAX's C++ fast-path data, by which its dispatch calls an executable without Python; None where that is impossible."""

_SET_BY_AUTOSHARD = {"abstract_mesh_context_manager", "jax_disable_jit", "mesh_context_manager"}


class CompileOnlyLowered(jax.stages.Lowered):
    """A lowering for devices that this process lacks: it compiles; calling the executable calls ``refuse`` instead."""

    def __init__(self, lowered: jax.stages.Lowered, refuse: Callable[..., Any]) -> None:
        super().__init__(lowered._lowering, lowered.args_info, lowered.out_tree)
        self._refuse = refuse

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        compiled = super().compile(*args, **kwargs)
        compiled._call = self._refuse
        return compiled


def with_compilation(
    lowered: jax.stages.Lowered, compile: Callable[[Callable[[Mapping[str, Any]], Any]], Any]
) -> jax.stages.Lowered:
    """A lowering that is compiled by ``compile``, which takes what compiles it with more compiler options."""
    lowering: Any = _OwnCompilation(lowered._lowering, compile)
    return jax.stages.Lowered(lowering, lowered.args_info, lowered.out_tree)


class _OwnCompilation:
    """A lowering as `with_compilation` compiles it, once where no compiler options are given."""

    def __init__(self, lowering: Any, compile: Callable[[Callable[[Mapping[str, Any]], Any]], Any]) -> None:
        self._lowering, self._compile, self._found = lowering, compile, None

    def compile(self, compiler_options: Mapping[str, Any] | None = None, **others: Any) -> Any:
        def run(more: Mapping[str, Any]) -> Any:
            return self._lowering.compile({**(compiler_options or {}), **more} or None, **others)

        if compiler_options or others.get("device_assignment") is not None:
            return self._compile(run)
        if self._found is None:
            self._found = self._compile(run)
        return self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowering, name)


def with_call_structure(lowered: jax.stages.Lowered, in_tree: Any, out_tree: Any) -> jax.stages.Lowered:
    """A lowering for flat arguments as one for calls with ``in_tree``, the structure of (args, kwargs)."""
    info = in_tree.unflatten(jax.tree.leaves(lowered.args_info))
    return jax.stages.Lowered(lowered._lowering, info, out_tree)


def with_padded_arguments(
    lowered: jax.stages.Lowered,
    stored: Sequence[tuple[Shape | None, NamedSharding]],
    given: Sequence[Shape],
    results: Sequence[Shape | None],
) -> jax.stages.Lowered:
    """A lowering of flat arguments with padding as one for arguments of their true shapes, ``given``.

    Args:
      stored: of each argument the shape that it is stored in, None where that is its own, and its sharding.
      results: the true shape of each result that is stored with padding.
    """
    infos = jax.tree.leaves(lowered.args_info)
    true = [replace(i, _aval=i._aval.update(shape=s)) for i, s in zip(infos, given, strict=True)]
    tree = jax.tree.structure(lowered.args_info)
    lowering: Any = _PaddedLowering(lowered._lowering, stored, results)
    return jax.stages.Lowered(lowering, tree.unflatten(true), lowered.out_tree)


class _PaddedLowering:
    """A lowering whose executable takes and returns arrays of their true shapes."""

    def __init__(self, lowering: Any, stored: Any, results: Sequence[Shape | None]) -> None:
        self._lowering, self._stored, self._results = lowering, stored, results

    @property
    def compile_args(self) -> dict[str, Any]:
        args = self._lowering.compile_args
        pairs = zip(args["global_out_avals"], self._results, strict=True)
        return {**args, "global_out_avals": [a if s is None else a.update(shape=s) for a, s in pairs]}

    def compile(self, *args: Any, **kwargs: Any) -> Any:
        return _PaddedExecutable(self._lowering.compile(*args, **kwargs), self._stored, self._results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lowering, name)


class _PaddedExecutable:
    """An executable as `_PaddedLowering` compiles it."""

    def __init__(self, executable: Any, stored: Any, results: Sequence[Shape | None]) -> None:
        self._executable, self._stored, self._results = executable, stored, results

    def call(self, *leaves: Any) -> list[Any]:
        given = len(leaves) - len(self._stored)  # constants come first
        pairs = zip(leaves[given:], self._stored, strict=True)
        placed = [x if shape is None else as_stored(x, shape, sharding) for x, (shape, sharding) in pairs]
        return with_true_shapes(self._executable.call(*leaves[:given], *placed), self._results)

    def create_cpp_call(self, params: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executable, name)


def trace_context() -> tuple[Any, ...]:
    """The JAX settings that a step depends on: those that `jax.jit` keys its traces by, except what autoshard sets, and
    the checks of results.
    """
    names, values = _config.trace_context_names(), _config.trace_context()
    checks = jax.config.jax_debug_nans, jax.config.jax_debug_infs  # with these, lowering does not donate
    return *(v for n, v in zip(names, values, strict=True) if n not in _SET_BY_AUTOSHARD), checks


def execute(
    compiled: jax.stages.Compiled,
    leaves: Sequence[Any],
    out_tree: Any,
    effects: Any,
    shardings: Sequence[NamedSharding] | None = None,
    padded_from: Sequence[tuple[int, ...] | None] = (),
) -> tuple[Any, FastPath]:
    """Runs an executable on flat arguments: its result as ``out_tree``, and the fast path for the next call.

    ``shardings``, where given, restate those of the results on a mesh with other axis types; no data moves. Results
    with a true shape in ``padded_from`` become `PaddedArray`s, which the fast path takes and gives as `Dispatched`.
    """
    executable: Any = compiled._executable
    consts = executable.shard_const_args(compiled._params.const_args)
    flat = executable.call(*consts, *leaves)
    if shardings is not None:
        flat = jax.device_put(flat, list(shardings))
    results = with_true_shapes(flat, padded_from or [None] * len(flat))
    given = list(map(to_dispatch, results))
    fast_path = _pjit._get_fastpath_data(executable, out_tree, list(leaves), given, effects, [], None, consts)
    if shardings is not None and fast_path is not None:
        plain = not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in flat)
        fast_path = fast_path._replace(out_shardings=list(shardings)) if plain else None
    return out_tree.unflatten(results), fast_path


def make_dispatcher(
    name: str,
    fun: Callable[..., Any],
    miss: Callable[..., tuple[Any, FastPath]],
    static_nums: Sequence[int],
    static_names: Sequence[str],
) -> Callable[..., Any]:
    """A callable that caches its calls as `jax.jit` does, in C++, by argument structure, shapes, dtypes and shardings,
    values of static arguments, and JAX's settings.

    A cache miss calls ``miss`` for the result and the fast path of further calls with the same key. Under
    `jax.disable_jit`, ``fun`` itself is called; and so it is, operation by operation, where `jax_debug_nans` or
    `jax_debug_infs` is set and a result has one, to raise the error of the operation that makes it.
    """

    def plain(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = jax.tree.map(from_dispatch, (args, kwargs))
        return fun(*args, **kwargs)

    def unoptimized(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves((args, kwargs))):
            raise FloatingPointError(
                f"{name}: a result has a value that jax_debug_nans or jax_debug_infs forbids. Which operation makes it "
                "is unknown, as an argument was donated and is gone: set jax_debug_nans before the first call, or "
                "call the step's clear_cache() after it is set"
            )
        return plain(*args, **kwargs)

    def cache_miss(*args: Any, **kwargs: Any) -> tuple[Any, FastPath, bool]:
        try:
            return *miss(*args, **kwargs), False
        except _api_util.InternalFloatingPointError as e:
            _api_util.maybe_recursive_nan_check(e, unoptimized, args, kwargs)

    dispatcher: Any = _jax.pjit(
        name,
        plain,
        cache_miss,
        list(static_nums),
        list(static_names),
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )
    dispatcher._fun = unoptimized  # what JAX calls where a result of the fast path is not a number
    return dispatcher


def clear_dispatcher(dispatcher: Callable[..., Any]) -> None:
    """Empties the cache of a callable that `make_dispatcher` made."""
    cached: Any = dispatcher
    cached._clear_cache()


def is_tracing() -> bool:
    """Whether JAX is tracing, so that a call becomes part of that trace."""
    return not _core.trace_state_clean()


def any_tracer(leaves: Sequence[Any]) -> bool:
    """Whether any of ``leaves`` is a tracer."""
    return any(map(is_tracer, leaves))
