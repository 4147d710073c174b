"""Normalization: calls inlined, and every variable of a jaxpr tree defined exactly once."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import core as _core
from jax._src.state.discharge import discharge_state
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.extend.core import primitives as _prims
from jax.sharding import AxisType

from autoshard.jaxpr.hi_primitives import with_traced_body
from autoshard.jaxpr.nested import INLINED, regions, with_bodies
from autoshard.jaxpr.origin import LIBRARIES, PACKAGE, user_line
from autoshard.jaxpr.value import Atom, represents_indices


def normalize(jaxpr: Jaxpr) -> Jaxpr:
    """A copy of ``jaxpr`` with calls inlined and every variable, at any depth, defined exactly once."""
    return _Normalizer().jaxpr(jaxpr)


class _Normalizer:
    """Copies one jaxpr tree to fresh variables."""

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
            if _is_tracing_artifact(eqn):
                env.update(zip(eqn.outvars, operands, strict=True))
                continue
            if _rounds_positions(eqn):
                counted: list[JaxprEqn] = []
                results = self._body(_positions_cast_once(eqn), {}, counted, consts)
                eqns += [e.replace(source_info=eqn.source_info) for e in counted]
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            if eqn.primitive in INLINED:
                body = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
                inner: list[JaxprEqn] = []
                results = self._body(body, dict(zip(body.invars, operands, strict=True)), inner, consts)
                eqns += [_attributed(e, eqn, body) for e in inner]
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            eqn = with_traced_body(eqn)
            bodies = [self.jaxpr(r.body) for r in regions(eqn)]
            copy = with_bodies(eqn, bodies) if bodies else eqn
            eqns.append(copy.replace(invars=operands, outvars=[self._bind(env, v) for v in eqn.outvars]))
        return [read(a) for a in jaxpr.outvars]


def _is_tracing_artifact(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a reshard to a mesh of Auto axes: JAX inserts it while tracing, and it constrains nothing.
    (A reshard to an empty mesh is an operation with a rule.)"""
    if eqn.primitive.name != "reshard":
        return False
    mesh = eqn.params["dst_sharding"].mesh
    return not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _rounds_positions(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` counts in a float dtype that does not represent every index.

    XLA (JAX 0.12), which has each shard count from its own offset, would round the offset and then the sum with it.
    """
    p = eqn.params
    if eqn.primitive is not _prims.iota_p or p["sharding"] is not None:
        return False
    return not represents_indices(p["dtype"], p["shape"][p["dimension"]])


def _positions_cast_once(eqn: JaxprEqn) -> Jaxpr:
    """The positions of ``eqn``, an iota, counted in integers."""
    dtype, shape, dimension = (eqn.params[k] for k in ("dtype", "shape", "dimension"))
    return jax.make_jaxpr(
        lambda: jax.lax.convert_element_type(jax.lax.broadcasted_iota("int32", shape, dimension), dtype)
    )()


def _attributed(eqn: JaxprEqn, call: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """``eqn`` of an inlined ``body`` with the name stack of ``call``, and its traceback where a library wrote the body.

    JAX caches the trace of a library function with the source lines of its first caller. Where autoshard calls itself,
    as the decoder that ships its layers, the body's own lines say more.
    """
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    info = eqn.source_info.replace(name_stack=stack)
    file = body.debug_info.func_filename or ""
    ours = file.startswith(PACKAGE) and user_line(call.source_info.traceback).startswith(PACKAGE)
    if (file.startswith(LIBRARIES) and not ours) or not user_line(eqn.source_info.traceback):
        info = info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)


def traced_jaxpr(traced: Any) -> Jaxpr:
    """The normalized jaxpr of a `jax.stages.Traced`. Values closed over from an outer trace become constants, and
    mutable arrays that the function creates become values, by JAX's state discharge."""
    jaxpr, outer = traced.jaxpr, traced._consts[: traced._num_consts]
    if any(isinstance(e, _core.InternalMutableArrayEffect) for e in jaxpr.effects):
        jaxpr = discharge_state(jaxpr)
    before, own = jaxpr.invars[: len(outer)], jaxpr.invars[len(outer) :]
    return normalize(jaxpr.replace(constvars=[*jaxpr.constvars, *before], consts=[*jaxpr.consts, *outer], invars=own))
