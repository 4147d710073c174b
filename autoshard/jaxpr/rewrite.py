"""Building jaxprs: equations of traced functions spliced in, cloned, constrained; dead code elimination; checks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.sharding import NamedSharding

from autoshard.jaxpr.arguments import IN_HOST_MEMORY, in_host_memory
from autoshard.jaxpr.nested import regions, with_bodies
from autoshard.jaxpr.normalization import normalize
from autoshard.jaxpr.origin import RECOMPUTE
from autoshard.jaxpr.value import Atom, aval


def constrain_variable(var: Atom, result: Var, sharding: NamedSharding, like: JaxprEqn | None) -> JaxprEqn:
    """The equation ``result = with_sharding_constraint(var, sharding)``, attributed to ``like``'s source."""
    template = _constraint(sharding, len(aval(var).shape), _config.trace_context())
    source = _source.new_source_info() if like is None else like.source_info
    return template.replace(invars=[var], outvars=[result], source_info=source)


@functools.lru_cache(maxsize=4096)
def _constraint(sharding: NamedSharding, rank: int, settings: Any) -> JaxprEqn:
    """A constraint on a value of ``rank`` dimensions; ``settings``: those that JAX's tracing depends on."""

    def fun(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    size = sharding.mesh.size
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):  # instead of a mesh set by the caller
        return jax.make_jaxpr(fun)(jax.ShapeDtypeStruct((size,) * rank, "float32")).eqns[0]


def stage_out(fun: Callable[..., Any], eqn: JaxprEqn, invars: Sequence[Atom]) -> Jaxpr:
    """The jaxpr of ``fun`` for operands of the types of ``invars``, with the source of ``eqn``, for `splice`."""
    with _source.user_context(eqn.source_info.traceback):
        return jax.make_jaxpr(fun)(*(_operand(aval(a)) for a in invars))


def _operand(of: Any) -> jax.ShapeDtypeStruct:
    """An abstract operand of this shape and dtype, in the memory of ``of``."""
    return jax.ShapeDtypeStruct(of.shape, of.dtype, sharding=IN_HOST_MEMORY if in_host_memory(of) else None)


def splice(fun: Callable[..., Any] | Jaxpr, eqn: JaxprEqn, invars: Sequence[Atom]) -> list[JaxprEqn]:
    """The equations of ``fun`` on ``invars`` with the results of ``eqn``, which they replace, attributed to its source.

    Raises:
      TypeError: the results have other shapes or dtypes than those of ``eqn``.
    """
    made = normalize(fun if isinstance(fun, Jaxpr) else stage_out(fun, eqn, invars))
    computed = {v for e in made.eqns for v in e.outvars}
    results = {v for v in made.outvars if isinstance(v, Var) and v in computed}
    if len(results) < len(made.outvars):  # an operand, a number, or one result twice
        made = stage_out(_copied(jaxpr_as_fun(made)), eqn, made.invars)
    if [(aval(v).shape, aval(v).dtype) for v in made.outvars] != [(aval(v).shape, aval(v).dtype) for v in eqn.outvars]:
        raise TypeError(f"the local form of {eqn.primitive.name} returns {made.out_avals}, not {eqn.outvars}")
    renamed = {v: w for v, w in zip(made.outvars, eqn.outvars, strict=True) if isinstance(v, Var)}
    return _substitute(made, eqn, invars, renamed)


def _copied(fun: Callable[..., Any]) -> Callable[..., list[Any]]:
    """``fun``, each of whose results an equation of its own makes."""
    return lambda *operands: [_lax.copy_p.bind(x) for x in fun(*operands)]


def emit(fun: Callable[..., Any], like: JaxprEqn, *invars: Atom) -> tuple[list[JaxprEqn], list[Atom]]:
    """The equations of ``fun`` on ``invars``, attributed to ``like``'s source, and their results."""
    made = normalize(stage_out(fun, like, invars))
    operands = dict(zip(made.invars, invars, strict=True))
    results = [v if isinstance(v, Literal) else operands.get(v, v) for v in made.outvars]
    return _substitute(made, like, invars, {}), results


def _substitute(made: Jaxpr, like: JaxprEqn, invars: Sequence[Atom], results: Mapping[Any, Var]) -> list[JaxprEqn]:
    """The equations of ``made`` on ``invars``, with ``results`` substituted, attributed to ``like``'s source."""
    operands: dict[Var, Atom] = dict(zip(made.invars, invars, strict=True))
    operands |= {v: Literal(c, v.aval) for v, c in zip(made.constvars, made.consts, strict=True)}

    def read(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else operands.get(atom, results.get(atom, atom))

    return [
        e.replace(
            invars=[read(a) for a in e.invars],
            outvars=[results.get(v, v) for v in e.outvars],
            source_info=like.source_info,
        )
        for e in made.eqns
    ]


def as_fun(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """``jaxpr`` as a function of its flat inputs, its constants closed over."""
    return jaxpr_as_fun(jaxpr)


def eliminate_dead_code(jaxpr: Jaxpr) -> Jaxpr:
    """``jaxpr`` without equations that no output and no effect depends on; all inputs stay.

    Without effects and primitives with a DCE rule, one reverse pass replaces JAX's slower `dce_jaxpr`.
    """
    if jaxpr.effects or not _pe.dce_rules.keys().isdisjoint([e.primitive for e in jaxpr.eqns]):
        return _pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
    used = {a for a in jaxpr.outvars if isinstance(a, Var)}
    eqns: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if not used.isdisjoint(eqn.outvars):
            eqns.append(eqn)
            for a in eqn.invars:
                if isinstance(a, Var):
                    used.add(a)
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns[::-1])


def check_jaxpr(jaxpr: Jaxpr, known: Jaxpr | None = None) -> None:
    """Raises TypeError where ``jaxpr`` is not well formed (types, scopes, effects). Types of equations that it shares
    with ``known``, a well-formed jaxpr, are not checked again."""
    old = set(known.eqns if known else ())
    new = [e for e in jaxpr.eqns if e not in old]
    defined = {*jaxpr.constvars, *jaxpr.invars}
    for e in jaxpr.eqns:
        for a in e.invars:
            if isinstance(a, Var) and a not in defined:
                raise TypeError(f"{e.primitive.name} reads a variable that no earlier equation defines:\n{e}")
        defined.update(e.outvars)
    if not defined.issuperset(a for a in jaxpr.outvars if isinstance(a, Var)):
        raise TypeError("no equation defines an output")
    if any(hasattr(f, "input_index") for f in jaxpr.effects):  # effects on inputs refer to their positions
        _core.check_jaxpr(jaxpr)
        return
    made = {v for e in new for v in e.outvars}
    ins = list(dict.fromkeys(a for e in new for a in e.invars if isinstance(a, Var) and a not in made))
    _core.check_jaxpr(jaxpr.replace(constvars=[], consts=[], invars=ins, eqns=new, outvars=[]))


def bind_equation(eqn: JaxprEqn, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
    """The results of ``eqn``'s primitive for other operands and parameters, attributed to its source while traced."""
    with _source.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
        out = eqn.primitive.bind(*operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


def use_counts(jaxpr: Jaxpr) -> Counter[Var]:
    """Uses of each variable as an operand or a result of ``jaxpr``, not counting those within regions."""
    found = Counter([a for e in jaxpr.eqns for a in e.invars if isinstance(a, Var)])
    found.update(a for a in jaxpr.outvars if isinstance(a, Var))
    return found


def with_eqns(
    jaxpr: Jaxpr,
    eqns: Sequence[JaxprEqn],
    *,
    invars: Sequence[Var] | None = None,
    outvars: Sequence[Atom] | None = None,
) -> Jaxpr:
    """``jaxpr`` with other equations, and other inputs and outputs where given; constants stay."""
    return jaxpr.replace(
        eqns=list(eqns),
        invars=jaxpr.invars if invars is None else list(invars),
        outvars=jaxpr.outvars if outvars is None else list(outvars),
    )


def clone_eqn(eqn: JaxprEqn, operands: Sequence[Atom], like: JaxprEqn | None = None) -> JaxprEqn:
    """A copy of ``eqn`` on other operands, with fresh results and bodies; with the autodiff phase of ``like``.

    `is_made_again` is true of it.
    """
    bodies = [normalize(r.body) for r in regions(eqn)]
    copy = with_bodies(eqn, bodies) if bodies else eqn
    stack = eqn.source_info.name_stack
    before = _source.NameStack() if like is None else like.source_info.name_stack
    stack = before.extend(RECOMPUTE) + stack
    return copy.replace(
        invars=list(operands),
        outvars=[Var(v.aval) for v in eqn.outvars],
        source_info=eqn.source_info.replace(name_stack=stack),
    )


def optimization_barrier(operands: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    """An equation `jax.lax.optimization_barrier` of ``operands``, whose results XLA may not identify with them."""
    return like.replace(
        invars=list(operands),
        outvars=[Var(v.aval) for v in operands],
        primitive=_lax.optimization_barrier_p,
        params={},
        effects=_core.no_effects,
    )
