"""Lowered and compiled stages: executing a flat executable, and JAX's C++ dispatch from a call to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def with_call_structure(lowered: jax.stages.Lowered, in_tree: Any, out_tree: Any) -> jax.stages.Lowered:
    """A lowering for flat arguments as one for calls with ``in_tree``, the structure of (args, kwargs)."""
    info = in_tree.unflatten(jax.tree.leaves(lowered.args_info))
    return jax.stages.Lowered(lowered._lowering, info, out_tree)


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
) -> tuple[Any, FastPath]:
    """Runs an executable on flat arguments: its result as ``out_tree``, and the fast path for the next call.

    ``shardings``, where given, restate those of the results on a mesh with other axis types; no data moves.
    """
    executable: Any = compiled._executable
    consts = executable.shard_const_args(compiled._params.const_args)
    flat = executable.call(*consts, *leaves)
    if shardings is not None:
        flat = jax.device_put(flat, list(shardings))
    fast_path = _pjit._get_fastpath_data(executable, out_tree, list(leaves), flat, effects, [], None, consts)
    if shardings is not None and fast_path is not None:
        plain = not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in flat)
        fast_path = fast_path._replace(out_shardings=list(shardings)) if plain else None
    return out_tree.unflatten(flat), fast_path


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
        return fun(*args, **kwargs)

    def unoptimized(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves((args, kwargs))):
            raise FloatingPointError(
                f"{name}: a result has a value that jax_debug_nans or jax_debug_infs forbids. Which operation makes it "
                "is unknown, as an argument was donated and is gone: set jax_debug_nans before the first call, or "
                "call the step's clear_cache() after it is set"
            )
        return fun(*args, **kwargs)

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
