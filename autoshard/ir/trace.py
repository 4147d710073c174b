"""Traces a step on abstract arguments into a `Program`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError, MeshError, SpecError
from autoshard.ir.program import Leaf, MemoryKind, PipelineRequest, Program, pinned
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec, checked_spec
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.machine.mesh import LogicalMesh

_EXPLICIT_AXES = (
    "the step uses a mesh with Explicit axes, and in a planned step all axes are Auto. In jax.shard_map, leave out "
    "mesh=, which is the step's; or pass axis_types=(jax.sharding.AxisType.Auto, ...) to jax.make_mesh. Instead of "
    "jax.reshard, use autoshard.annotate. JAX says: "
)

_BRING = (
    "and the step computes with it: bring it to the device, jax.device_put(x, jax.memory.Space.Device); or "
    "pin no memory, and strategy='offload:optimizer' keeps the optimizer's state on the host. JAX says"
)


_MEMORY_KINDS: Mapping[str, MemoryKind] = {
    "device": None,
    "pinned_host": "pinned_host",
    "unpinned_host": "unpinned_host",
}
"""By JAX's name of it."""


def trace(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: LogicalMesh,
    *,
    rules: Rules,
    in_shardings: Any = None,
    out_shardings: Any = None,
    donated: Collection[int | str] | None = None,
    pipeline: PipelineRequest | None = None,
) -> Program:
    """Traces ``jitted`` (the result of `jax.jit`) for these arguments: arrays or `jax.ShapeDtypeStruct`s. Of their
    shardings only the memory is read.

    ``in_shardings`` and ``out_shardings`` become pins. They are pytree prefixes of `PartitionSpec`, `NamedSharding` or
    None for the positional arguments that are not static, and for the result. A `NamedSharding` pins the memory too;
    what replaces an argument so pinned to the host's memory returns there, unless it is pinned itself.

    Args:
      donated: positions, among the arguments that are not static, and names of those that are donated; None: those that
        ``jitted`` donates, which under `jax_debug_nans` are none.
      pipeline: of which ``mesh`` is one stage's.

    Raises:
      SpecError: a sharding that does not fit its value or the mesh.
      ArgumentError: a prefix with another structure than the arguments or the result; or the step computes with what is
        in the host's memory.
      MeshError: the function uses Explicit mesh axes, or is called under a mesh of another size.
    """
    whole = mesh if pipeline is None else pipeline.mesh
    whole.require_same_size_around(getattr(jitted, "__name__", "step"))
    with jax.sharding.use_abstract_mesh(whole.abstract_mesh()), jax.disable_jit(False):
        try:
            traced = jitted.trace(*args, **kwargs)
        except ValueError as e:
            if "axis_types=(Explicit" in str(e) or "AxisType.Auto" in str(e):
                raise MeshError(_EXPLICIT_AXES + str(e)) from e
            if "memory_space" in str(e) and (paths := [*_paths_on_host(args, kwargs)]):
                more = f" (and {len(paths) - 1} more)" if paths[1:] else ""
                raise ArgumentError(f"{paths[0]}{more} is in the host's memory, {_BRING}: {e}") from e
            raise
    info = traced.args_info if donated is None else _mark_donated(traced.args_info, donated)
    flat_info, in_tree = jax.tree.flatten(info)
    names = _argument_paths(traced.jaxpr.debug_info.arg_names, info)
    dynamic = info[0]
    in_pins = _pins(in_shardings, dynamic, "in_shardings") + [None] * len(jax.tree.leaves(info[1]))
    flat_out, out_tree = jax.tree.flatten(traced.out_info)
    out_pins = _pins(out_shardings, traced.out_info, "out_shardings")
    out_paths = jax.tree_util.tree_flatten_with_path(traced.out_info)[0]
    out_names = ["result" + jax.tree_util.keystr(p) for p, _ in out_paths]
    jaxpr = jx.traced_jaxpr(traced)

    def leaf(path: str, of: Any, pin: Any, aval: Any, *, donated: bool) -> Leaf:
        kind, demanded = _memory(pin, aval)
        shape = jax.ShapeDtypeStruct(of.shape, of.dtype)
        unpinned = Leaf(path, shape, donated, memory_kind=kind, memory_pinned=demanded)
        return pinned(unpinned, _check(pin, of.shape, whole, path), pipeline)

    inputs = tuple(
        leaf(n, i, p, a, donated=i.donated)
        for n, i, p, a in zip(names, flat_info, in_pins, jaxpr.in_avals, strict=True)
    )
    outputs = tuple(
        leaf(n, o, p, a, donated=False)
        for n, o, p, a in zip(out_names, flat_out, out_pins, jaxpr.out_avals, strict=True)
    )
    carries = match_carries([*info[0], *(info[1][k] for k in sorted(info[1]))], traced.out_info)
    demanded = {
        o: inputs[i].memory_kind for i, o in carries if inputs[i].memory_pinned and not outputs[o].memory_pinned
    }
    return Program(
        name=traced.fun_name,
        jaxpr=jaxpr,
        mesh=mesh,
        rules=rules,
        inputs=inputs,
        outputs=tuple(replace(leaf, memory_kind=demanded.get(o) or leaf.memory_kind) for o, leaf in enumerate(outputs)),
        in_tree=in_tree,
        out_tree=out_tree,
        carries=carries,
        source=next((s for s in map(jx.source, traced.jaxpr.eqns) if s), ""),
        pipeline=pipeline,
    )


def _paths_on_host(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[str]:
    """What of the arguments is in the host's memory."""
    named = [*((f"argument {n}", a) for n, a in enumerate(args)), *kwargs.items()]
    for name, arg in named:
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            if _MEMORY_KINDS.get(getattr(getattr(leaf, "sharding", None), "memory_kind", "device")):
                yield name + jax.tree_util.keystr(path)


def _mark_donated(info: tuple[tuple[Any, ...], dict[str, Any]], donated: Collection[int | str]) -> Any:
    """``info``, the `jax.stages.ArgInfo`s of the arguments, where those at ``donated`` are donated and no others."""

    def mark(arg: Any, key: int | str) -> Any:
        return jax.tree.map(lambda i: replace(i, donated=key in donated), arg)

    return tuple(mark(a, n) for n, a in enumerate(info[0])), {k: mark(a, k) for k, a in info[1].items()}


def match_carries(args: Sequence[Any], result: Any) -> tuple[tuple[int, int], ...]:
    """Carried state: pairs of flat positions of each argument and of the part of the result that replaces it.

    The result, or one of its top-level elements, replaces an argument where it has the same tree structure and shapes,
    and the argument is donated or has several leaves; the first argument and the first such part are paired first. A
    leaf whose dtype changes has no pair.
    """
    whole = jax.tree.structure(result)
    children, offset = [], 0
    for part in [result] if not isinstance(result, (tuple, list)) else [*result]:
        children.append((offset, part))
        offset += jax.tree.structure(part).num_leaves
    parts = [(0, result), *children] if whole.num_leaves else children
    taken: set[int] = set()
    pairs: list[tuple[int, int]] = []
    start = 0
    for arg in args:
        leaves, tree = jax.tree.flatten(arg)
        shapes = [x.shape for x in leaves]
        if leaves and (len(leaves) > 1 or all(x.donated for x in leaves)):
            for at, part in parts:
                outs, out_tree = jax.tree.flatten(part)
                span = set(range(at, at + len(outs)))
                same = [i for i, (a, b) in enumerate(zip(leaves, outs, strict=False)) if a.dtype == b.dtype]
                if out_tree == tree and same and not span & taken and [x.shape for x in outs] == shapes:
                    taken |= span
                    pairs += [(start + i, at + i) for i in same]
                    break
        start += len(leaves)
    return tuple(pairs)


def _argument_paths(names: Sequence[str | None] | None, info: Any) -> list[str]:
    paths = [p for p, _ in jax.tree_util.tree_flatten_with_path(info)[0]]
    plain = [f"args{jax.tree_util.keystr(p[1:])}" if p[0].idx == 0 else jax.tree_util.keystr(p[1:]) for p in paths]
    if names is None or len(names) != len(plain):
        return plain
    return [n or q for n, q in zip(names, plain, strict=True)]


def _pins(prefix: Any, tree: Any, what: str) -> list[Any]:
    def is_pin(x: Any) -> bool:
        return x is None or isinstance(x, (PartitionSpec, NamedSharding))

    try:
        full = jax.tree.broadcast(prefix, tree, is_leaf=is_pin)
    except ValueError:
        whose = "arguments" if what[0] == "i" else "result"
        where = _mismatch(prefix, tree, is_pin, what, whose)
        raise ArgumentError(
            f"{what} is no pytree prefix of the {whose}: {where}; None, or one spec for a subtree, is a prefix too"
        ) from None
    values = jax.tree.leaves(tree, is_leaf=is_pin)
    pins = [p for p, v in zip(jax.tree.leaves(full, is_leaf=is_pin), values, strict=True) if v is not None]
    for pin in pins:
        if not is_pin(pin):
            raise ArgumentError(f"{what} has {pin!r} as a leaf; leaves are PartitionSpec, NamedSharding or None")
    return pins


def _mismatch(prefix: Any, tree: Any, is_pin: Callable[[Any], bool], what: str, whose: str) -> str:
    """Where ``prefix`` first differs from the structure of ``tree``, as text; empty where it is a prefix."""
    if is_pin(prefix):
        return ""

    def children(x: Any) -> list[Any]:
        return jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]

    parts, subtrees = children(prefix), children(tree)
    keys, expected = ([jax.tree_util.keystr(path) for path, _ in side] for side in (parts, subtrees))
    if type(prefix) is not type(tree):
        return f"{what} is a {type(prefix).__name__}, in the {whose} it is a {type(tree).__name__}"
    if keys != expected:
        return f"{what} has {', '.join(keys) or 'nothing'}, in the {whose} it has {', '.join(expected) or 'nothing'}"
    found = (_mismatch(p, t, is_pin, what + k, whose) for k, (_, p), (_, t) in zip(keys, parts, subtrees, strict=True))
    return next(filter(None, found), "")


def _check(pin: Any, shape: Sequence[int], mesh: LogicalMesh, path: str) -> Spec | None:
    if pin is None:
        return None
    if isinstance(pin, NamedSharding):
        if dict(pin.mesh.shape) != mesh.shape:
            raise SpecError(f"{path}: its sharding is over the mesh {dict(pin.mesh.shape)}, the step's is {mesh.shape}")
        pin = pin.spec
    return checked_spec(pin, shape, mesh.shape, path)


def pinned_memory(in_shardings: Any, args: Sequence[Any]) -> list[tuple[MemoryKind, bool]]:
    """For each flat array of ``args``, the positional arguments that are not static, the memory that ``in_shardings``
    demands, and whether it demands any.

    Raises:
      ArgumentError, SpecError: as `trace`.
    """
    return [_memory(pin, None) for pin in _pins(in_shardings, tuple(args), "in_shardings")]


def _memory(pin: Any, aval: Any) -> tuple[MemoryKind, bool]:
    """The memory that a pin demands, or else that an array of type ``aval`` is in, and whether the pin demands it."""
    if not isinstance(pin, NamedSharding) or pin.memory_kind is None:
        return "pinned_host" if in_host_memory(aval) else None, False
    return _MEMORY_KINDS[pin.memory_kind], True
