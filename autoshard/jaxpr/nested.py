"""Regions: the jaxprs nested in control-flow and call equations, with their operands, results and loop carries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax._src import core as _core
from jax._src import flattree as _ft
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jax.extend.core import primitives as _prims

from autoshard.jaxpr import hi_primitives
from autoshard.jaxpr.equation import contraction_flops
from autoshard.jaxpr.value import Atom, aval

INLINED = frozenset({_prims.jit_p, _prims.closed_call_p, _prims.call_p})
"""Calls that `normalize` inlines."""
_ONE_BODY = {
    _prims.remat_p: "jaxpr",
    _prims.custom_jvp_call_p: "call_jaxpr",
    _prims.custom_vjp_call_p: "call_jaxpr",
}
_NESTING = frozenset(
    {_prims.scan_p, _prims.while_p, _prims.cond_p, _prims.linear_solve_p, hi_primitives.CALL_HI_PRIMITIVE, *_ONE_BODY}
)
"""Primitives with regions."""
_RESIZABLE = frozenset({_prims.scan_p, _prims.while_p, _prims.cond_p, _prims.remat_p})
"""Those whose parameters say nothing of sizes but what the jaxprs in them say."""


@dataclass(frozen=True)
class Wire:
    """A value that enters or leaves a region: positions in the equation and in the region's body."""

    outside: int
    inside: int
    stacked: bool = False
    """Whether the outside value has one more leading dimension, over which the loop iterates (a scan's xs and ys)."""


@dataclass(frozen=True)
class Region:
    """A jaxpr nested in an equation, and how its inputs and outputs connect to the equation's."""

    body: Jaxpr
    trip_count: int
    """Executions of the body per execution of the equation; 1 where unknown."""
    trip_count_known: bool
    inputs: tuple[Wire, ...]
    """Equation operand -> body input."""
    outputs: tuple[Wire, ...]
    """Body output -> equation result."""
    carries: tuple[tuple[int, int], ...] = ()
    """Body output -> body input of the next iteration."""


def regions(eqn: JaxprEqn) -> tuple[Region, ...]:
    """The regions of a control-flow or call equation; empty for any other."""
    if eqn.primitive not in _NESTING:
        return ()
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
    if eqn.primitive is _prims.linear_solve_p:  # the body is the solve; the other jaxprs serve differentiation
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
    body = p[_ONE_BODY[eqn.primitive]] if eqn.primitive in _ONE_BODY else hi_primitives.traced_body(eqn)
    if body is not None:
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


def calls_one_body(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` runs one body once, on its own operands: under `jax.checkpoint`, or with custom derivatives."""
    return eqn.primitive in _ONE_BODY


def takes_other_sizes(eqn: JaxprEqn) -> bool:
    """Whether ``eqn`` is a loop or call whose operands may get other sizes if its bodies get them too."""
    return eqn.primitive in _RESIZABLE


def with_bodies(eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> JaxprEqn:
    """``eqn`` with other bodies of its regions, in the order of `regions`; ``eqn`` itself where they are the same."""
    if all(r.body is b for r, b in zip(regions(eqn), bodies, strict=True)):
        return eqn
    p = eqn.params
    if eqn.primitive is _prims.scan_p:
        return eqn.replace(params=dict(p, jaxpr=bodies[0]))
    if eqn.primitive is _prims.while_p:
        return eqn.replace(params=dict(p, cond_jaxpr=bodies[0], body_jaxpr=bodies[1]))
    if eqn.primitive is _prims.cond_p:
        return eqn.replace(params=dict(p, branches=tuple(bodies)))
    if eqn.primitive is _prims.linear_solve_p:
        return eqn.replace(params=dict(p, jaxprs=p["jaxprs"]._replace(solve=bodies[0])))
    if eqn.primitive is hi_primitives.CALL_HI_PRIMITIVE:
        return hi_primitives.with_body(eqn, bodies[0])
    return eqn.replace(params=dict(p, **{_ONE_BODY[eqn.primitive]: bodies[0]}))


def map_bodies(eqn: JaxprEqn, change: Callable[[Jaxpr], Jaxpr]) -> JaxprEqn:
    """``eqn`` with ``change`` applied to the body of each region; ``eqn`` itself where that changes nothing."""
    if eqn.primitive not in _NESTING:
        return eqn
    return with_bodies(eqn, [change(r.body) for r in regions(eqn)])


def eqns_with_regions(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """The equations of ``jaxpr`` that can have regions."""
    return [e for e in jaxpr.eqns if e.primitive in _NESTING]


def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Every equation of ``jaxpr`` and of its regions at any depth; an equation before those of its regions."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive in _NESTING:
            for region in regions(eqn):
                yield from walk(region.body)


def subjaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Every jaxpr among the equation's parameters, of primitives without regions too."""
    traced = hi_primitives.traced_body(eqn)
    return [traced] if traced is not None else list(_core.jaxprs_in_params(eqn.params)) if eqn.params else []


def has_product(eqn: JaxprEqn) -> bool:
    """Whether there is a matrix product or a convolution in it, at any depth."""
    return contraction_flops(eqn) > 0 or any(has_product(e) for r in regions(eqn) for e in r.body.eqns)


def product_flops(jaxpr: Jaxpr) -> dict[str, float]:
    """FLOPs of all matrix products and convolutions, by the wider dtype of their operands.

    Loops count as often as they turn, once where that is unknown; of a branch the one with the most.
    """
    found: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        if flops := contraction_flops(eqn):
            operands = [aval(x) for x in eqn.invars[:2]]
            parts = {str(max(operands, key=lambda a: a.dtype.itemsize).dtype): flops}
        elif eqn.primitive in INLINED:
            parts = _total(product_flops(body) for body in subjaxprs(eqn))
        else:
            bodies = [(region.trip_count, product_flops(region.body)) for region in regions(eqn)]
            each = [{dtype: count * flops for dtype, flops in body.items()} for count, body in bodies]
            branch = eqn.primitive is _prims.cond_p
            parts = max(each, key=lambda part: sum(part.values()), default={}) if branch else _total(each)
        found = _total((found, parts))
    return found


def _total(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for dtype, flops in part.items():
            total[dtype] = total.get(dtype, 0.0) + flops
    return total


@dataclass(frozen=True)
class ScanGroups:
    """Numbers of a scan's operands that are constants, carries and xs, in this order, as the body's inputs are."""

    consts: int
    carry: int
    xs: int
    length: int
    iterates: bool
    """Whether a loop remains after lowering: False where it is fully unrolled or runs at most once."""


def scan_groups(eqn: JaxprEqn) -> ScanGroups | None:
    """The operand groups of a scan; None where ``eqn`` is no scan or has effects on references."""
    if eqn.primitive is not _prims.scan_p or any(hasattr(e, "input_index") for e in eqn.effects):
        return None
    p = eqn.params
    consts, carry, xs = (len(group) for group in p["ft_in"].unpack())
    return ScanGroups(consts, carry, xs, p["length"], iterates=p["length"] > max(1, int(p["unroll"])))


def rebuild_scan(
    eqn: JaxprEqn,
    body: Jaxpr,
    groups: tuple[int, int, int],
    operands: Sequence[Atom],
    results: Sequence[Var],
    length: int | None = None,
) -> JaxprEqn:
    """The scan ``eqn`` with another body, operands and results, and another ``length`` where one is given; ``groups``:
    how many operands are consts, carry, xs."""
    consts, carry, xs = map(_ft.nones, groups)
    resized = {} if length is None else {"length": length, "unroll": min(int(eqn.params["unroll"]), length)}
    params = dict(
        eqn.params,
        **resized,
        jaxpr=body,
        ft_in=_ft.pack((consts, carry, xs)),
        ft_out=_ft.pack((carry, _ft.nones(len(results) - groups[1]))),
    )
    return eqn.replace(invars=list(operands), outvars=list(results), params=params)


def bodies_with_operand(eqn: JaxprEqn, bodies: Sequence[Jaxpr]) -> JaxprEqn:
    """A loop, branch or `jax.checkpoint` with other bodies, each of which has one more input before the others. Its
    parameters alone are valid, for operands as `operands_with` gives them."""
    p = eqn.params
    if eqn.primitive is _prims.scan_p:
        consts, carry, xs = (len(group) for group in p["ft_in"].unpack())
        return rebuild_scan(eqn, bodies[0], (consts + 1, carry, xs), eqn.invars, eqn.outvars)
    if eqn.primitive is _prims.while_p:
        p = dict(p, cond_nconsts=p["cond_nconsts"] + 1, body_nconsts=p["body_nconsts"] + 1)
        eqn = eqn.replace(params=p)
    return with_bodies(eqn, bodies)


def operands_with(eqn: JaxprEqn, operand: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands of `bodies_with_operand`, where each body's first input is ``operand``."""
    if eqn.primitive is _prims.while_p:
        n = eqn.params["cond_nconsts"]
        return [operand, *operands[:n], operand, *operands[n:]]
    first = 1 if eqn.primitive is _prims.cond_p else 0
    return [*operands[:first], operand, *operands[first:]]
