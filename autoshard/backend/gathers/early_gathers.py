"""Weights of scanned layers gathered one layer ahead of the products that read them.

An iteration of a scan over layers reads its row of each weight and gathers it. XLA for GPUs starts these gathers as the
iteration begins, one after the other, and the first products wait for them. Here an iteration gathers the rows of the
next one, and carries them there: all of its products are beside them. It takes the memory of one more layer's gathered
weights, and the last iteration gathers its own once more. The plan says which (`Constraint.ahead`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx


class _Gather(NamedTuple):
    """What a scan's body gathers of a row of a stacked operand."""

    row: int
    """Among the stacked operands."""
    eqns: tuple[jx.JaxprEqn, ...]
    """From the row to what is gathered."""

    @property
    def result(self) -> jx.Var:
        return self.eqns[-1].outvars[0]


def gather_early(jaxpr: jx.Jaxpr, early: Set[jx.Var]) -> jx.Jaxpr:
    """``jaxpr`` with what its scans make of their rows, if it is among ``early``, made an iteration ahead; also in
    bodies of loops. Itself where there is nothing of the kind."""
    if not early:
        return jaxpr
    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        new = jx.map_bodies(eqn, lambda body: gather_early(body, early))
        eqns += _ahead(new, early) or [new]
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jx.with_eqns(jaxpr, eqns)


def _ahead(scan: jx.JaxprEqn, early: Set[jx.Var]) -> list[jx.JaxprEqn]:
    """``scan`` and what comes before it; empty where it makes none of ``early``."""
    groups = jx.scan_groups(scan)
    body = jx.regions(scan)[0].body if groups is not None else None
    if groups is None or body is None or early.isdisjoint(v for e in body.eqns for v in e.outvars):
        return []
    begin = groups.consts + groups.carry
    gathers = list(_gathers(body, body.invars[begin:], early))
    rows = sorted({g.row for g in gathers})
    stacks, backward = [scan.invars[begin + row] for row in rows], scan.params["reverse"]

    def first(*stacks: Any) -> list[Any]:
        at = groups.length - 1 if backward else 0
        return [jnp.int32(at), *(lax.index_in_dim(x, at, keepdims=False) for x in stacks)]

    def following(at: Any, *stacks: Any) -> list[Any]:
        after = jnp.clip(at - 1 if backward else at + 1, 0, groups.length - 1)
        return [after, *(lax.dynamic_index_in_dim(x, after, keepdims=False) for x in stacks)]

    before, (start, *first_rows) = jx.emit(first, scan, *stacks)
    eqns, starts = _on_rows(gathers, dict(zip(rows, first_rows, strict=True)))
    before += eqns
    at, inner = jx.Var(jx.aval(start)), [jx.Var(jx.aval(x)) for x in stacks]
    new, (after, *next_rows) = jx.emit(following, scan, at, *inner)
    eqns, ends = _on_rows(gathers, dict(zip(rows, next_rows, strict=True)))
    results = {g.result for g in gathers}
    new += [*eqns, *(e for e in body.eqns if results.isdisjoint(e.outvars))]
    read = {a for a in (*(a for e in new for a in e.invars), *body.outvars) if isinstance(a, jx.Var)}
    kept = [n for n, v in enumerate(body.invars[begin:], begin) if v in read]
    carried = body.invars[groups.consts : begin]
    ahead = jx.with_eqns(
        body,
        new,
        invars=[
            *body.invars[: groups.consts],
            *inner,
            *carried,
            at,
            *(g.result for g in gathers),
            *(body.invars[n] for n in kept),
        ],
        outvars=[*body.outvars[: groups.carry], after, *ends, *body.outvars[groups.carry :]],
    )
    sizes = groups.consts + len(inner), groups.carry + 1 + len(gathers), len(kept)
    operands = [
        *scan.invars[: groups.consts],
        *stacks,
        *scan.invars[groups.consts : begin],
        start,
        *starts,
        *(scan.invars[n] for n in kept),
    ]
    left = [jx.Var(jx.aval(at)), *(jx.new_var(g.result) for g in gathers)]
    outs = [*scan.outvars[: groups.carry], *left, *scan.outvars[groups.carry :]]
    return [*before, jx.rebuild_scan(scan, ahead, sizes, operands, outs)]


def _on_rows(gathers: Sequence[_Gather], rows: Mapping[int, jx.Atom]) -> tuple[list[jx.JaxprEqn], list[jx.Atom]]:
    """The equations of ``gathers`` on other rows, and what they gather."""
    eqns: list[jx.JaxprEqn] = []
    gathered: list[jx.Atom] = []
    for g in gathers:
        x = rows[g.row]
        for e in g.eqns:
            eqns.append(e.replace(invars=[x], outvars=[jx.new_var(e.outvars[0])]))
            x = eqns[-1].outvars[0]
        gathered.append(x)
    return eqns, gathered


def _gathers(body: jx.Jaxpr, rows: Sequence[jx.Var], early: Set[jx.Var]) -> Iterator[_Gather]:
    """Those of ``early`` that ``body`` makes, each with how it is made of one of ``rows``."""
    made = {v: e for e in body.eqns for v in e.outvars}
    for v in filter(early.__contains__, made):
        eqns, x = list[jx.JaxprEqn](), v
        while x in made:
            eqns.insert(0, made[x])
            (x,) = (a for a in made[x].invars if isinstance(a, jx.Var))
        yield _Gather(rows.index(x), tuple(eqns))
