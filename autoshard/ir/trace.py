"""trace: a function and abstract arguments -> Program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.errors import ArgumentError, MeshError, SpecError
from autoshard.ir.program import Leaf, Program
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec, checked_spec
from autoshard.machine.mesh import LogicalMesh

_EXPLICIT = (
    "the step names a mesh with Explicit axes, and in a planned step all axes are Auto. In jax.shard_map, leave mesh= "
    "out: it is the step's; or give jax.make_mesh axis_types=(jax.sharding.AxisType.Auto, ...). In place of "
    "jax.reshard there is autoshard.annotate. JAX says: "
)


def trace(
    jitted: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: LogicalMesh,
    *,
    rules: Rules,
    in_shardings: Any = None,
    out_shardings: Any = None,
) -> Program:
    """Traces ``jitted`` (a `jax.jit` object) for these arguments: arrays or `jax.ShapeDtypeStruct`s.

    ``in_shardings`` and ``out_shardings`` are pytree prefixes of `PartitionSpec`, `NamedSharding` or None over
    the positional arguments that are not static, and over the result.

    Raises:
      SpecError: a pin that does not fit its value or the mesh.
      ArgumentError: a prefix whose structure does not match.
      MeshError: the function works with Explicit mesh axes.
    """
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh()), jax.disable_jit(False):
        try:
            traced = jitted.trace(*args, **kwargs)
        except ValueError as e:
            if "axis_types=(Explicit" in str(e) or "AxisType.Auto" in str(e):
                raise MeshError(_EXPLICIT + str(e)) from e
            raise
    info = traced.args_info
    flat_info, in_tree = jax.tree.flatten(info)
    names = _in_names(traced.jaxpr.debug_info.arg_names, info)
    dynamic = info[0]
    in_pins = _pins(in_shardings, dynamic, "in_shardings") + [None] * len(jax.tree.leaves(info[1]))
    flat_out, out_tree = jax.tree.flatten(traced.out_info)
    out_pins = _pins(out_shardings, traced.out_info, "out_shardings")
    out_paths = jax.tree_util.tree_flatten_with_path(traced.out_info)[0]
    out_names = ["result" + jax.tree_util.keystr(p) for p, _ in out_paths]
    inputs = tuple(
        Leaf(n, jax.ShapeDtypeStruct(i.shape, i.dtype), i.donated, _check(p, i.shape, mesh, n))
        for n, i, p in zip(names, flat_info, in_pins, strict=True)
    )
    outputs = tuple(
        Leaf(n, jax.ShapeDtypeStruct(o.shape, o.dtype), False, _check(p, o.shape, mesh, n))
        for n, o, p in zip(out_names, flat_out, out_pins, strict=True)
    )
    jaxpr = jx.traced_jaxpr(traced)
    return Program(
        name=traced.fun_name,
        jaxpr=jaxpr,
        mesh=mesh,
        rules=rules,
        inputs=inputs,
        outputs=outputs,
        in_tree=in_tree,
        out_tree=out_tree,
        carries=match_carries([*info[0], *(info[1][k] for k in sorted(info[1]))], traced.out_info),
        source=next((s for s in map(jx.source, traced.jaxpr.eqns) if s), ""),
    )


def match_carries(args: Sequence[Any], result: Any) -> tuple[tuple[int, int], ...]:
    """Pairs each argument with the part of the result that replaces it at the next call.

    The result itself, or one of its top-level elements, replaces an argument when it has the same tree and
    shapes, and the argument is donated or has several leaves. First come, first paired. A leaf whose dtype the
    step changes has no pair.
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
        wanted = [x.shape for x in leaves]
        if leaves and (len(leaves) > 1 or all(x.donated for x in leaves)):
            for at, part in parts:
                outs, out_tree = jax.tree.flatten(part)
                span = set(range(at, at + len(outs)))
                same = [i for i, (a, b) in enumerate(zip(leaves, outs, strict=False)) if a.dtype == b.dtype]
                if out_tree == tree and same and not span & taken and [x.shape for x in outs] == wanted:
                    taken |= span
                    pairs += [(start + i, at + i) for i in same]
                    break
        start += len(leaves)
    return tuple(pairs)


def _in_names(names: Sequence[str | None] | None, info: Any) -> list[str]:
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
        where = _misfit(prefix, tree, is_pin, what, whose)
        raise ArgumentError(
            f"{what} is no prefix of the {whose}: {where}; None, or one spec for all that lies there, is a prefix too"
        ) from None
    values = jax.tree.leaves(tree, is_leaf=is_pin)
    pins = [p for p, v in zip(jax.tree.leaves(full, is_leaf=is_pin), values, strict=True) if v is not None]
    for pin in pins:
        if not is_pin(pin):
            raise ArgumentError(f"{what} holds {pin!r}; it takes PartitionSpec, NamedSharding or None")
    return pins


def _misfit(prefix: Any, tree: Any, is_pin: Callable[[Any], bool], what: str, whose: str) -> str:
    """Where ``prefix`` first leaves the structure of ``tree``; empty if it does not."""
    if is_pin(prefix):
        return ""

    def children(x: Any) -> list[Any]:
        return jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)[0]

    parts, wanted = children(prefix), children(tree)
    keys, known = ([jax.tree_util.keystr(path) for path, _ in side] for side in (parts, wanted))
    if type(prefix) is not type(tree):
        return f"{what} is a {type(prefix).__name__}, and the {whose} have a {type(tree).__name__} there"
    if keys != known:
        return f"{what} has {', '.join(keys) or 'nothing'}, and the {whose} have {', '.join(known) or 'nothing'} there"
    found = (_misfit(p, t, is_pin, what + k, whose) for k, (_, p), (_, t) in zip(keys, parts, wanted, strict=True))
    return next(filter(None, found), "")


def _check(pin: Any, shape: Sequence[int], mesh: LogicalMesh, path: str) -> Spec | None:
    if pin is None:
        return None
    if isinstance(pin, NamedSharding):
        if dict(pin.mesh.shape) != mesh.shape:
            raise SpecError(f"{path}: its sharding is over the mesh {dict(pin.mesh.shape)}, the step's is {mesh.shape}")
        pin = pin.spec
    return checked_spec(pin, shape, mesh.shape, path)
