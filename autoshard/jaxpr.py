"""The one file that touches jaxpr internals or `jax._src`; what depends on the JAX version sits here.

It offers a jaxpr as the rest of autoshard wants it: every variable defined once in the whole tree
(`normalize`), nested programs as `Region`s with their wiring stated, source lines, and rewriting by
replacing equations.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import core as _core
from jax._src import flattree as _ft
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.shard_map import shard_map_p as _shard_map_p
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun
from jax.extend.core import primitives as _prims
from jax.sharding import NamedSharding, PartitionSpec

__all__ = ["Jaxpr", "JaxprEqn", "Literal", "Primitive", "Region", "Var"]

Atom = Var | Literal
INLINED = frozenset({_prims.jit_p, _prims.closed_call_p, _prims.call_p})
"""Calls that mean nothing but their body."""
CONSTRAINT = _prims.sharding_constraint_p
SIDE_BY_SIDE = frozenset({_lax.optimization_barrier_p, _prims.device_put_p})
"""Operations whose results are their operands, one by one."""
_ONE_BODY = {
    _prims.remat_p: "jaxpr",
    _prims.custom_jvp_call_p: "call_jaxpr",
    _prims.custom_vjp_call_p: "call_jaxpr",
}


@dataclass(frozen=True)
class Wire:
    """A value crossing a region's border. ``lifted``: outside it has one more leading dimension."""

    outside: int
    inside: int
    lifted: bool = False


@dataclass(frozen=True)
class Region:
    """One program nested in an equation, and how its values meet those outside."""

    body: Jaxpr
    times: int
    """How often the body runs each time the equation does; 1 when that is not known."""
    known: bool
    entries: tuple[Wire, ...]
    """Equation operand -> body input."""
    exits: tuple[Wire, ...]
    """Equation result <- body output."""
    loops: tuple[tuple[int, int], ...] = ()
    """Body output -> body input of the next turn."""


def regions(eqn: JaxprEqn) -> tuple[Region, ...]:
    """The programs nested in a control-flow or call equation; empty for any other."""
    p = eqn.params
    if eqn.primitive is _prims.scan_p:
        consts, carry, xs = (len(group) for group in p["ft_in"].unpack())
        n, body = consts + carry, p["jaxpr"]
        entries = tuple(Wire(i, i, i >= n) for i in range(n + xs))
        exits = tuple(Wire(i, i, i >= carry) for i in range(len(body.outvars)))
        return (Region(body, p["length"], True, entries, exits, tuple((i, consts + i) for i in range(carry))),)
    if eqn.primitive is _prims.while_p:
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        carry = len(eqn.invars) - nc - nb
        cond = tuple(Wire(i if i < nc else i + nb, i) for i in range(nc + carry))
        body = tuple(Wire(nc + i, i) for i in range(nb + carry))
        return (
            Region(p["cond_jaxpr"], 1, False, cond, ()),
            Region(
                p["body_jaxpr"],
                1,
                False,
                body,
                tuple(Wire(i, i) for i in range(carry)),
                tuple((i, nb + i) for i in range(carry)),
            ),
        )
    if eqn.primitive is _prims.cond_p:
        return tuple(
            Region(
                b,
                1,
                True,
                tuple(Wire(i + 1, i) for i in range(len(b.invars))),
                tuple(Wire(i, i) for i in range(len(b.outvars))),
            )
            for b in p["branches"]
        )
    if eqn.primitive is _prims.linear_solve_p:  # the body is how it is solved; the rest is for its derivatives
        lengths = p["const_lengths"]
        first, consts = lengths.matvec + lengths.vecmat, lengths.solve
        operands = [*range(first, first + consts), *range(sum(lengths), len(eqn.invars))]
        return (
            Region(
                p["jaxprs"].solve,
                1,
                True,
                tuple(Wire(o, i) for i, o in enumerate(operands)),
                tuple(Wire(i, i) for i in range(len(eqn.outvars))),
            ),
        )
    if eqn.primitive in _ONE_BODY:
        body = p[_ONE_BODY[eqn.primitive]]
        return (
            Region(
                body,
                1,
                True,
                tuple(Wire(i, i) for i in range(len(body.invars))),
                tuple(Wire(i, i) for i in range(len(body.outvars))),
            ),
        )
    return ()


def with_bodies(eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> JaxprEqn:
    """``eqn`` with the bodies of its regions replaced, in the order of `regions`."""
    p = eqn.params
    if eqn.primitive is _prims.scan_p:
        return eqn.replace(params=dict(p, jaxpr=bodies[0]))
    if eqn.primitive is _prims.while_p:
        return eqn.replace(params=dict(p, cond_jaxpr=bodies[0], body_jaxpr=bodies[1]))
    if eqn.primitive is _prims.cond_p:
        return eqn.replace(params=dict(p, branches=tuple(bodies)))
    if eqn.primitive is _prims.linear_solve_p:
        return eqn.replace(params=dict(p, jaxprs=p["jaxprs"]._replace(solve=bodies[0])))
    return eqn.replace(params=dict(p, **{_ONE_BODY[eqn.primitive]: bodies[0]}))


def normalize(jaxpr: Jaxpr) -> Jaxpr:
    """The same program with calls inlined and every variable, at every depth, defined exactly once."""
    return _Normalizer().jaxpr(jaxpr)


class _Normalizer:
    """Copies a jaxpr tree; one per tree, so that no two copies share a variable."""

    def jaxpr(self, jaxpr: Jaxpr) -> Jaxpr:
        env: dict[Var, Atom] = {}
        consts: list[tuple[Var, Any]] = []
        invars = [self._bind(env, v) for v in jaxpr.invars]
        eqns: list[JaxprEqn] = []
        outvars = self._body(jaxpr, env, eqns, consts)
        return jaxpr.replace(
            constvars=[v for v, _ in consts], consts=[c for _, c in consts], invars=invars, eqns=eqns, outvars=outvars
        )

    def _bind(self, env: dict[Var, Atom], var: Var) -> Var:
        env[var] = fresh = Var(var.aval)
        return fresh

    def _body(
        self, jaxpr: Jaxpr, env: dict[Var, Atom], eqns: list[JaxprEqn], consts: list[tuple[Var, Any]]
    ) -> list[Atom]:
        consts.extend((self._bind(env, v), c) for v, c in zip(jaxpr.constvars, jaxpr.consts, strict=True))

        def read(atom: Atom) -> Atom:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in jaxpr.eqns:
            operands = [read(a) for a in eqn.invars]
            if eqn.primitive in INLINED:
                body = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
                inner: list[JaxprEqn] = []
                results = self._body(body, dict(zip(body.invars, operands, strict=True)), inner, consts)
                eqns += [_called(e, eqn, body) for e in inner]
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            bodies = [self.jaxpr(r.body) for r in regions(eqn)]
            copy = with_bodies(eqn, bodies) if bodies else eqn
            eqns.append(copy.replace(invars=operands, outvars=[self._bind(env, v) for v in eqn.outvars]))
        return [read(a) for a in jaxpr.outvars]


def _called(eqn: JaxprEqn, call: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """``eqn`` of the inlined ``body`` as part of its caller.

    JAX traces a library's function once and remembers the lines of its first caller, so the equations of a
    body that a library wrote take the line of this call.
    """
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    info = eqn.source_info.replace(name_stack=stack)
    written = (body.debug_info.func_src_info or "").partition(" at ")[2]
    if written.startswith(_LIBRARIES) or not _line(eqn.source_info.traceback):
        info = info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)


def program(traced: Any) -> Jaxpr:
    """The jaxpr of a `jax.stages.Traced`, normalized. Values of a surrounding trace are among its constants."""
    jaxpr, outer = traced.jaxpr, traced._consts[: traced._num_consts]
    before, own = jaxpr.invars[: len(outer)], jaxpr.invars[len(outer) :]
    return normalize(jaxpr.replace(constvars=[*jaxpr.constvars, *before], consts=[*jaxpr.consts, *outer], invars=own))


def constrain(var: Var, result: Var, sharding: NamedSharding, like: JaxprEqn | None) -> JaxprEqn:
    """The equation ``result = with_sharding_constraint(var, sharding)``, attributed to ``like``'s source."""
    template = _constraint(sharding, len(aval(var).shape))
    source = template.source_info if like is None else like.source_info
    return template.replace(invars=[var], outvars=[result], source_info=source)


def splice(fun: Callable[..., Any], eqn: JaxprEqn, invars: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations that compute ``fun`` of ``invars`` in place of ``eqn``, attributed to its source.

    Raises:
      TypeError: the results are not those of ``eqn``.
    """
    traced = jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(aval(a).shape, aval(a).dtype) for a in invars))
    made = normalize(traced)
    if [(aval(v).shape, aval(v).dtype) for v in made.outvars] != [(aval(v).shape, aval(v).dtype) for v in eqn.outvars]:
        raise TypeError(f"the local form of {eqn.primitive.name} gives {made.out_avals}, not {eqn.outvars}")
    results = {v: w for v, w in zip(made.outvars, eqn.outvars, strict=True) if isinstance(v, Var)}
    operands: dict[Var, Atom] = dict(zip(made.invars, invars, strict=True))
    operands |= {v: Literal(c, v.aval) for v, c in zip(made.constvars, made.consts, strict=True)}

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else operands.get(atom, results.get(atom, atom))

    return [
        e.replace(
            invars=[read(a) for a in e.invars],
            outvars=[results.get(v, v) for v in e.outvars],
            source_info=eqn.source_info,
        )
        for e in made.eqns
    ]


@functools.lru_cache(maxsize=4096)
def _constraint(sharding: NamedSharding, rank: int) -> JaxprEqn:
    def fun(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    size = sharding.mesh.size
    return jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((size,) * rank, "float32")).eqns[0]


def as_fun(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function of its flat inputs; its constants are its own."""
    return jaxpr_as_fun(jaxpr)


def dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without the equations that no output and no effect needs; its inputs stay."""
    return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]


def check(jaxpr: Jaxpr) -> None:
    """Raises when ``jaxpr`` is not well formed (types, scopes, effects)."""
    _core.check_jaxpr(jaxpr)


def subjaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Every jaxpr among the equation's parameters, also of equations that are no region."""
    return iter(_core.jaxprs_in_params(eqn.params))


_LIBRARIES = tuple(
    os.path.join(base, name) + os.sep
    for base in sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    for name in ("jax", "flax", "optax", "chex", "autoshard")
) + (os.path.dirname(os.path.realpath(__file__)) + os.sep,)


@functools.lru_cache(maxsize=65536)
def _line(traceback: Any) -> str:
    frames = list(_source.user_frames(traceback)) if traceback is not None else []
    chosen = next((f for f in frames if not f.file_name.startswith(_LIBRARIES)), frames[0] if frames else None)
    return f"{chosen.file_name}:{chosen.start_line}" if chosen else ""


def source(eqn: JaxprEqn) -> str:
    """``file:line`` of the user's code that made the equation, beneath JAX, Flax and Optax; "" if unknown."""
    return _line(eqn.source_info.traceback)


def backward(eqn: JaxprEqn) -> bool:
    """Whether the equation comes from the transposition of a differentiated function."""
    return "transpose(" in str(eqn.source_info.name_stack)


def differentiated(eqn: JaxprEqn) -> bool:
    """Whether the equation lies inside a differentiated function, forward or backward."""
    return "jvp(" in str(eqn.source_info.name_stack)


def manual_specs(eqn: JaxprEqn) -> tuple[tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]] | None:
    """Specs of the operands and results of a `shard_map` over every axis of its mesh; None of anything else."""
    if eqn.primitive is not _shard_map_p or set(eqn.params["newly_manual_axes"]) != set(eqn.params["mesh"].axis_names):
        return None
    return eqn.params["in_specs"], eqn.params["out_specs"]


NAMED = {
    "custom_jvp_call": "call_jaxpr",
    "custom_partitioning": "call",
    "custom_vjp_call": "call_jaxpr",
    "ffi_call": "",
    "pallas_call": "jaxpr",
}
"""Primitives that stand for many operations, told apart by a name; and which of their parameters is the program."""


def names(eqn: JaxprEqn) -> tuple[str, ...]:
    """What an operation is called beside its primitive: ``("pallas_call:flash", "flash")``. Of most: nothing.

    A kernel goes by the name given to `pallas_call` and by its function's, a foreign function by its target, the
    rest by the name of their function.
    """
    op, p = eqn.primitive.name, eqn.params
    if op not in NAMED:
        return ()
    body = p.get(NAMED[op])
    written = (body.debug_info.func_src_info or "").partition(" at ")[0] if body is not None else ""
    called = dict.fromkeys(n for n in (p.get("name"), p.get("target_name"), written) if n)
    return tuple(text for n in called for text in (f"{op}:{n}", n))


def opaque(eqn: JaxprEqn) -> bool:
    """Whether XLA sees a kernel or foreign function, which it cannot split, instead of operations."""
    return eqn.primitive.name in {"ffi_call", "pallas_call"}


def resizable(eqn: JaxprEqn) -> bool:
    """Whether an opaque operation can be called on parts of its operands as it stands."""
    return eqn.primitive.name == "ffi_call"


def interpreted(eqn: JaxprEqn) -> bool:
    """Whether a kernel is run as plain operations, for want of a machine that it is for."""
    return bool(eqn.params.get("interpret"))


def on_part(eqn: JaxprEqn, shapes: Sequence[Sequence[int]]) -> Callable[..., list[Any]]:
    """``eqn``'s operation for parts of its operands; ``shapes`` are those of the parts of its results."""
    params = dict(eqn.params)
    if "result_avals" in params:
        params["result_avals"] = tuple(
            a.update(shape=tuple(s)) for a, s in zip(params["result_avals"], shapes, strict=True)
        )

    def part(*operands: Any) -> list[Any]:
        out = eqn.primitive.bind(*operands, **params)
        return list(out) if eqn.primitive.multiple_results else [out]

    return part


def sharding_rule(eqn: JaxprEqn) -> tuple[Any, tuple[Any, ...]] | None:
    """What a `custom_partitioning` operation says of itself to Shardy, and its static arguments; or None."""
    if eqn.primitive.name != "custom_partitioning" or eqn.params["sharding_rule"] is None:
        return None
    return eqn.params["sharding_rule"], eqn.params["static_args"]


def kept_arguments(lowered: jax.stages.Lowered) -> tuple[int, ...]:
    """The flat arguments that the lowered program takes: those that it uses."""
    return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))


def is_tracer(x: Any) -> bool:
    """Whether ``x`` stands for a value that is being traced."""
    return isinstance(x, _core.Tracer)


def aval(atom: Atom) -> Any:
    """The abstract value of ``atom``. JAX types it by a base class that has neither shape nor dtype."""
    return atom.aval


def is_shaped(atom: Atom) -> bool:
    """Whether ``atom`` has a shape and a dtype: no token, no reference."""
    return isinstance(atom.aval, _core.ShapedArray)


def typeof(x: Any) -> Any:
    """The abstract value of ``x``, an array or a number.

    Raises:
      TypeError: ``x`` is neither; a reference to an array is none.
    """
    found = jax.typeof(x)
    if not isinstance(found, _core.ShapedArray):
        raise TypeError(f"{type(x).__name__} is no array")
    return found


def is_array(var: Var) -> bool:
    """Whether ``var`` is an array of plain numbers: no token, reference or key."""
    dtype = getattr(var.aval, "dtype", None)
    return is_shaped(var) and not jax.dtypes.issubdtype(dtype, jax.dtypes.extended)


def signature(eqn: JaxprEqn) -> Any:
    """What alike equations share, hashable; None where parameters cannot be compared."""
    operands = tuple((aval(a).shape, aval(a).dtype) if is_shaped(a) else a.aval for a in eqn.invars)
    key = (eqn.primitive, operands, tuple(sorted(eqn.params.items())))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def contraction_flops(eqn: JaxprEqn) -> float:
    """Floating-point operations of a matrix product or convolution, multiply and add counted, or what an operation says
    of itself in a parameter ``flops``; else 0."""
    if eqn.primitive is _prims.dot_general_p:
        (lhs, _), _ = eqn.params["dimension_numbers"]
        out, left = aval(eqn.outvars[0]).shape, aval(eqn.invars[0]).shape
        return 2.0 * math.prod(out) * math.prod(left[d] for d in lhs)
    if eqn.primitive is _prims.conv_general_dilated_p:
        spec = eqn.params["dimension_numbers"].rhs_spec
        kernel, out = aval(eqn.invars[1]).shape, aval(eqn.outvars[0]).shape
        return 2.0 * math.prod(out) * math.prod(kernel[d] for d in spec[1:])
    return float(eqn.params.get("flops", 0.0))


def dtype_bits(dtype: Any) -> int:
    """Bits that one element takes; sub-byte types count as what they are."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=dtype._impl.name)))
        return key.size * key.dtype.itemsize * 8
    if dtype == bool:
        return 8
    info = jax.numpy.iinfo if jax.dtypes.issubdtype(dtype, jax.numpy.integer) else jax.numpy.finfo
    if jax.dtypes.issubdtype(dtype, jax.numpy.complexfloating):
        return dtype.itemsize * 8
    try:
        return int(info(dtype).bits)
    except ValueError:
        return dtype.itemsize * 8


def dtype_name(dtype: Any) -> str:
    """Name of a dtype that `dtype_named` reads back; of keys it holds the generator: ``key<threefry2x32>``."""
    return f"key<{dtype._impl.name}>" if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else str(dtype)


def dtype_named(name: str) -> Any:
    """The inverse of `dtype_name`.

    Raises:
      ValueError, TypeError: there is no such dtype or generator.
    """
    if name.startswith("key<"):
        return jax.eval_shape(lambda: jax.random.key(0, impl=name[4:-1])).dtype
    return jax.numpy.dtype(name)


@functools.cache
def all_primitives() -> dict[str, Primitive]:
    """Every primitive that the imported JAX defines, by name (the first defined, where names repeat)."""
    found = [p for p in gc.get_objects() if isinstance(p, Primitive)]
    public = {id(v) for v in vars(_prims).values()}
    return {p.name: p for p in sorted(found, key=lambda p: (p.name, id(p) in public))}


def primitive(name: str) -> Primitive | None:
    """The primitive called ``name``, or None when this JAX has none."""
    return all_primitives().get(name)


# Rewriting: equations run again elsewhere, and scans taken apart and put together.


@dataclass(frozen=True)
class Scan:
    """How a scan's operands and results fall into groups. Body inputs and outputs stand in the same order."""

    consts: int
    carry: int
    xs: int
    length: int
    loops: bool
    """Whether anything is left to loop over: False when it is unrolled whole or runs at most once."""


def scan(eqn: JaxprEqn) -> Scan | None:
    """The groups of a scan, or None where ``eqn`` is something else or reads or writes mutable arrays."""
    if eqn.primitive is not _prims.scan_p or any(hasattr(e, "input_index") for e in eqn.effects):
        return None
    p = eqn.params
    consts, carry, xs = (len(group) for group in p["ft_in"].unpack())
    return Scan(consts, carry, xs, p["length"], loops=p["length"] > max(1, int(p["unroll"])))


def with_scan(
    eqn: JaxprEqn, body: Jaxpr, groups: tuple[int, int, int], operands: Sequence[Atom], results: Sequence[Var]
) -> JaxprEqn:
    """The scan ``eqn`` with another body and wiring; ``groups``: how many operands are consts, carry and xs."""
    consts, carry, xs = map(_ft.nones, groups)
    params = dict(
        eqn.params,
        jaxpr=body,
        ft_in=_ft.pack((consts, carry, xs)),
        ft_out=_ft.pack((carry, _ft.nones(len(results) - groups[1]))),
    )
    return eqn.replace(invars=list(operands), outvars=list(results), params=params)


def lift(var: Var, length: int) -> Var:
    """A new variable for ``length`` values like ``var``, stacked along a new leading dimension."""
    return Var(_core.unmapped_aval(length, 0, var.aval))


def with_code(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
) -> Jaxpr:
    """``jaxpr`` with other equations, and other inputs and outputs where given; its constants stay."""
    return jaxpr.replace(
        eqns=list(eqns),
        invars=jaxpr.invars if invars is None else list(invars),
        outvars=jaxpr.outvars if outvars is None else list(outvars),
    )


def again(eqn: JaxprEqn, operands: Sequence[Atom], like: JaxprEqn | None = None) -> JaxprEqn:
    """``eqn`` on other operands, with results and bodies of its own; counted to the phase of ``like``."""
    bodies = [normalize(r.body) for r in regions(eqn)]
    copy = with_bodies(eqn, bodies) if bodies else eqn
    stack = eqn.source_info.name_stack
    if like is not None:
        stack = like.source_info.name_stack.extend("recompute") + stack
    return copy.replace(
        invars=list(operands),
        outvars=[Var(v.aval) for v in eqn.outvars],
        source_info=eqn.source_info.replace(name_stack=stack),
    )


def barrier(operands: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    """An optimization barrier: results equal to ``operands`` that no compiler may identify with them."""
    return _barrier().replace(
        invars=list(operands), outvars=[Var(v.aval) for v in operands], source_info=like.source_info
    )


@functools.cache
def _barrier() -> JaxprEqn:
    return jax.make_jaxpr(jax.lax.optimization_barrier)(0.0).eqns[0]


def replayable(eqn: JaxprEqn) -> bool:
    """Whether running the equation twice gives the same values, does nothing else twice, and calls no host."""
    if eqn.effects or eqn.primitive.name in {"pure_callback", "rng_uniform"}:
        return False
    return all(replayable(inner) for body in subjaxprs(eqn) for inner in body.eqns)


def fresh(var: Var) -> Var:
    """A new variable for a value like ``var``."""
    return Var(var.aval)


def aval_bytes(aval: Any) -> int:
    """Size of a value in bytes; 0 for what is no array, such as a token."""
    return -(-math.prod(aval.shape) * dtype_bits(aval.dtype) // 8) if hasattr(aval, "dtype") else 0
