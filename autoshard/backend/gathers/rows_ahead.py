"""What a scan over layers makes of its rows, made one layer ahead: weights gathered, values fetched from the host.

An iteration of a scan over layers reads its row of each stacked array, and gathers it or copies it to the device. The
compiler starts that as the iteration begins, or late in the one before, and the products that read it wait. Here an
iteration makes it of the rows of the next one, and carries it there: all of its products are beside it. It takes the
memory of one more layer's, and the last iteration makes its own once more. The plan says which weights
(`Constraint.ahead`); what is fetched is said in `autoshard.backend.host_copies`.

XLA for TPU moves what it finds to be copied from the host's memory one iteration ahead itself, if it depends on the
number of the iteration alone (libtpu 0.0.50.1). So that it leaves these copies where they are, their number is that of
the iteration once what the iteration carries is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.jaxpr.arguments import in_host_memory


class _Made(NamedTuple):
    """What a scan's body makes of a row of a stacked operand."""

    row: int
    """Among the stacked operands."""
    eqns: tuple[jx.JaxprEqn, ...]
    """From the row to what is made."""

    @property
    def result(self) -> jx.Var:
        return self.eqns[-1].outvars[0]

    @property
    def fetched(self) -> bool:
        """Whether it comes from the host's memory."""
        return in_host_memory(self.eqns[0].invars[0].aval)


def made_ahead(
    jaxpr: jx.Jaxpr, early: Set[jx.Var], awaited: Mapping[jx.Var, Sequence[jx.Var]] | None = None
) -> jx.Jaxpr:
    """``jaxpr`` with what its scans make of their rows, if it is among ``early``, made an iteration ahead; also in
    bodies of loops. Itself where there is nothing of the kind.

    Args:
      awaited: by the result of a barrier of one value, those of ``early`` that are to be there before it: as the next
        iteration reads them.
    """
    if not early:
        return jaxpr
    eqns: list[jx.JaxprEqn] = []
    for eqn in jaxpr.eqns:
        new = jx.map_bodies(eqn, lambda body: made_ahead(body, early, awaited))
        eqns += _ahead(new, early, awaited or {}) or [new]
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jx.with_eqns(jaxpr, eqns)


def _ahead(scan: jx.JaxprEqn, early: Set[jx.Var], awaited: Mapping[jx.Var, Sequence[jx.Var]]) -> list[jx.JaxprEqn]:
    """``scan`` and what comes before it; empty where it makes none of ``early``."""
    groups = jx.scan_groups(scan)
    body = jx.regions(scan)[0].body if groups is not None else None
    if groups is None or body is None:
        return []
    begin = groups.consts + groups.carry
    found = list(_made(body, body.invars[begin:], early))
    if not found:
        return []
    rows = sorted({m.row for m in found})
    stacks, backward = [scan.invars[begin + row] for row in rows], scan.params["reverse"]

    def first(*stacks: Any) -> list[Any]:
        at = groups.length - 1 if backward else 0
        return [jnp.int32(at), *(lax.index_in_dim(x, at, keepdims=False) for x in stacks)]

    def following(at: Any, *stacks: Any) -> list[Any]:
        after = jnp.clip(at - 1 if backward else at + 1, 0, groups.length - 1)
        return [after, *(lax.dynamic_index_in_dim(x, after, keepdims=False) for x in stacks)]

    before, (start, *first_rows) = jx.emit(first, scan, *stacks)
    eqns, starts = _on_rows(found, dict(zip(rows, first_rows, strict=True)))
    before += eqns
    at, inner = jx.Var(jx.aval(start)), [jx.Var(jx.aval(x)) for x in stacks]
    carried = body.invars[groups.consts : begin]
    new, number, now = list[jx.JaxprEqn](), at, dict[jx.Var, jx.Atom]()
    array = next((v for v in carried if jx.is_array(v) and jx.aval(v).shape), None)
    if array is not None and any(m.fetched for m in found):
        new, (now[array], number) = jx.emit(_together, scan, array, at)
    following_eqns, (after, *next_rows) = jx.emit(following, scan, number, *inner)
    eqns, ends = _on_rows(found, dict(zip(rows, next_rows, strict=True)))
    new += [*following_eqns, *eqns]
    end_of = {m.result: n for n, m in enumerate(found)}
    for e in _without(found, body):
        e = e.replace(invars=[a if isinstance(a, jx.Literal) else now.get(a, a) for a in e.invars])
        waits = [end_of[v] for v in awaited.get(e.outvars[0], ()) if v in end_of] if e.outvars else []
        if waits:
            eqns, (now[e.outvars[0]], *there) = jx.emit(_together, e, e.invars[0], *(ends[n] for n in waits))
            new += eqns
            for n, end in zip(waits, there, strict=True):
                ends[n] = end
        else:
            new.append(e)
    outs = [a if isinstance(a, jx.Literal) else now.get(a, a) for a in body.outvars]
    read = {a for a in (*(a for e in new for a in e.invars), *outs) if isinstance(a, jx.Var)}
    kept = [n for n, v in enumerate(body.invars[begin:], begin) if v in read]
    ahead = jx.with_eqns(
        body,
        new,
        invars=[
            *body.invars[: groups.consts],
            *inner,
            *carried,
            at,
            *(m.result for m in found),
            *(body.invars[n] for n in kept),
        ],
        outvars=[*outs[: groups.carry], after, *ends, *outs[groups.carry :]],
    )
    sizes = groups.consts + len(inner), groups.carry + 1 + len(found), len(kept)
    operands = [
        *scan.invars[: groups.consts],
        *stacks,
        *scan.invars[groups.consts : begin],
        start,
        *starts,
        *(scan.invars[n] for n in kept),
    ]
    left = [jx.Var(jx.aval(at)), *(jx.new_var(m.result) for m in found)]
    results_out = [*scan.outvars[: groups.carry], *left, *scan.outvars[groups.carry :]]
    return [*before, jx.rebuild_scan(scan, ahead, sizes, operands, results_out)]


def _without(found: Sequence[_Made], body: jx.Jaxpr) -> list[jx.JaxprEqn]:
    """The equations of ``body`` that are left once what is ``found`` is made elsewhere."""
    there, makes = {m.result for m in found}, {v for m in found for e in m.eqns for v in e.outvars}
    read, left = {v for v in body.outvars if isinstance(v, jx.Var)}, list[jx.JaxprEqn]()
    for e in reversed(body.eqns):
        if makes.issuperset(e.outvars) and read.difference(there).isdisjoint(e.outvars):
            continue
        left.append(e)
        read.update(v for v in e.invars if isinstance(v, jx.Var))
    return left[::-1]


def _together(*values: Any) -> Any:
    """The same values, none of which is there before all are."""
    return lax.optimization_barrier(values)


def _on_rows(found: Sequence[_Made], rows: Mapping[int, jx.Atom]) -> tuple[list[jx.JaxprEqn], list[jx.Atom]]:
    """The equations of ``found`` on other rows, and what they make."""
    eqns: list[jx.JaxprEqn] = []
    made: list[jx.Atom] = []
    for m in found:
        x = rows[m.row]
        for e in m.eqns:
            eqns.append(e.replace(invars=[x], outvars=[jx.new_var(e.outvars[0])]))
            x = eqns[-1].outvars[0]
        made.append(x)
    return eqns, made


def _made(body: jx.Jaxpr, rows: Sequence[jx.Var], early: Set[jx.Var]) -> Iterator[_Made]:
    """Those of ``early`` that ``body`` makes of one of ``rows`` each, with how."""
    made = {v: e for e in body.eqns for v in e.outvars}
    for v in filter(early.__contains__, made):
        eqns, read = list[jx.JaxprEqn](), [v]
        while len(read) == 1 and read[0] in made:
            eqns.insert(0, made[read[0]])
            read = [a for a in eqns[0].invars if isinstance(a, jx.Var)]
        if len(read) == 1 and read[0] in rows:
            yield _Made(rows.index(read[0]), tuple(eqns))
