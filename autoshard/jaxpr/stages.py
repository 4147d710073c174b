"""stages: from a program to its executable, and the fast way from a call to that, which is JAX's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import pjit as _pjit
from jax._src import tree_util as _tree_util
from jax._src.interpreters import pxla as _pxla
from jax._src.lib import _jax
from jax.sharding import NamedSharding

from autoshard.jaxpr.value import is_tracer

FastPath = Any
"""What JAX's dispatch needs to run an executable again without Python; None where there is no such way."""

_OWN = {"abstract_mesh_context_manager", "jax_disable_jit", "mesh_context_manager"}


def kept_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...]:
    """The flat arguments that the lowered program takes: those that it uses."""
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))


class CompileOnlyLowered(jax.stages.Lowered):
    """A lowering for devices that are not here: it compiles, and calling what comes of it calls ``refuse`` instead."""

    def __init__(self, lowered: jax.stages.Lowered, refuse: Callable[..., Any]) -> None:
        super().__init__(lowered._lowering, lowered.args_info, lowered.out_tree)
        self._refuse = refuse

    def compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        compiled = super().compile(*args, **kwargs)
        compiled._call = self._refuse
        return compiled


def with_call_structure(lowered: jax.stages.Lowered, in_tree: Any, out_tree: Any) -> jax.stages.Lowered:
    """The lowering of a function of flat arguments, for calls with ``in_tree``, the structure of (args, kwargs)."""
    info = in_tree.unflatten(jax.tree.leaves(lowered.args_info))
    return jax.stages.Lowered(lowered._lowering, info, out_tree)


def trace_context() -> tuple[Any, ...]:
    """The settings that `jax.jit` keys its traces by, except for those that autoshard gives its own value."""
    names, values = _config.trace_context_names(), _config.trace_context()
    return tuple(v for n, v in zip(names, values, strict=True) if n not in _OWN)


def execute(
    compiled: jax.stages.Compiled,
    leaves: Sequence[Any],
    out_tree: Any,
    effects: Any,
    shardings: Sequence[NamedSharding] | None = None,
) -> tuple[Any, FastPath]:
    """Runs an executable of flat arguments: its result in the form of ``out_tree``, and the shortcut to the next.

    ``shardings``, where given, are of the results on a mesh with other axis types; they stay where they are.
    """
    executable: Any = compiled._executable
    consts = executable.shard_const_args(compiled._params.const_args)
    flat = executable.call(*consts, *leaves)
    if shardings is not None:
        flat = jax.device_put(flat, list(shardings))
    shortcut = _pjit._get_fastpath_data(executable, out_tree, list(leaves), flat, effects, [], None, consts)
    if shardings is not None and shortcut is not None:
        plain = not any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) for x in flat)
        shortcut = shortcut._replace(out_shardings=list(shardings)) if plain else None
    return out_tree.unflatten(flat), shortcut


def make_dispatcher(
    fun: Callable[..., Any],
    miss: Callable[..., tuple[Any, FastPath]],
    static_nums: Sequence[int],
    static_names: Sequence[str],
) -> Callable[..., Any]:
    """A callable that tells its calls apart as `jax.jit` does, in C++, and takes the shortcut of those it knows.

    A call that it does not know goes to ``miss``, for the result and a shortcut for all that are alike: in the
    structure, shapes, dtypes and places of the arguments, in the values of static ones, and in JAX's settings.
    Where JAX is told not to compile, ``fun`` is called as it stands.
    """

    def plain(*args: Any, **kwargs: Any) -> Any:
        return fun(*args, **kwargs)

    def cache_miss(*args: Any, **kwargs: Any) -> tuple[Any, FastPath, bool]:
        return *miss(*args, **kwargs), False

    return _jax.pjit(
        getattr(fun, "__name__", "step"),
        plain,
        cache_miss,
        list(static_nums),
        list(static_names),
        _pxla.JitGlobalCppCacheKeys(),
        _tree_util.dispatch_registry,
        _pxla.cc_shard_arg,
    )


def is_tracing() -> bool:
    """Whether something is being traced: what is called now becomes part of that."""
    return not _core.trace_state_clean()


def any_tracer(leaves: Sequence[Any]) -> bool:
    """Whether a value among ``leaves`` is being traced."""
    return any(map(is_tracer, leaves))
