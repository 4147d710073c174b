"""normal: a program with calls inlined and every variable defined once."""

from __future__ import annotations

from typing import Any

from jax._src import core as _core
from jax._src.state.discharge import discharge_state
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AxisType

from autoshard.jaxpr.high import with_traced_body
from autoshard.jaxpr.nested import INLINED, regions, with_bodies
from autoshard.jaxpr.origin import LIBRARIES, line
from autoshard.jaxpr.value import Atom


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
            if _says_nothing(eqn):
                env.update(zip(eqn.outvars, operands, strict=True))
                continue
            if eqn.primitive in INLINED:
                body = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
                inner: list[JaxprEqn] = []
                results = self._body(body, dict(zip(body.invars, operands, strict=True)), inner, consts)
                eqns += [_called(e, eqn, body) for e in inner]
                env.update(zip(eqn.outvars, results, strict=True))
                continue
            eqn = with_traced_body(eqn)
            bodies = [self.jaxpr(r.body) for r in regions(eqn)]
            copy = with_bodies(eqn, bodies) if bodies else eqn
            eqns.append(copy.replace(invars=operands, outvars=[self._bind(env, v) for v in eqn.outvars]))
        return [read(a) for a in jaxpr.outvars]


def _says_nothing(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a reshard that JAX puts in where it traces on a mesh of Auto axes, to a place on that mesh:
    there, only a program's constraints say how a value lies. (One to no mesh at all has its rule.)"""
    if eqn.primitive.name != "reshard":
        return False
    mesh = eqn.params["dst_sharding"].mesh
    return not mesh.empty and all(kind == AxisType.Auto for kind in mesh.axis_types)


def _called(eqn: JaxprEqn, call: JaxprEqn, body: Jaxpr) -> JaxprEqn:
    """``eqn`` of the inlined ``body`` as part of its caller.

    JAX traces a library's function once and remembers the lines of its first caller, so the equations of a
    body that a library wrote take the line of this call.
    """
    stack = call.source_info.name_stack + eqn.source_info.name_stack
    info = eqn.source_info.replace(name_stack=stack)
    written = (body.debug_info.func_src_info or "").partition(" at ")[2]
    if written.startswith(LIBRARIES) or not line(eqn.source_info.traceback):
        info = info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)


def traced_jaxpr(traced: Any) -> Jaxpr:
    """The jaxpr of a `jax.stages.Traced`, normalized: values of a surrounding trace are among its constants, and arrays
    that it makes and writes to in place are values that follow one another, as JAX has them compiled."""
    jaxpr, outer = traced.jaxpr, traced._consts[: traced._num_consts]
    if any(isinstance(e, _core.InternalMutableArrayEffect) for e in jaxpr.effects):
        jaxpr = discharge_state(jaxpr)
    before, own = jaxpr.invars[: len(outer)], jaxpr.invars[len(outer) :]
    return normalize(jaxpr.replace(constvars=[*jaxpr.constvars, *before], consts=[*jaxpr.consts, *outer], invars=own))
