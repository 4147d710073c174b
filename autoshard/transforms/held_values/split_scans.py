"""Scans over layers cut into several, one after the other, so that layers may differ in what they hold.

A forward scan is cut with the backward scans that read what it stacks: their residuals stay in parts. What comes in
stacked is sliced, which copies it; what goes out stacked and is read as a whole, or by a scan that is cut elsewhere, is
put together again. So arguments and results of the step keep their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import jax

from autoshard import jaxpr as jx


def split_scans(
    jaxpr: jx.Jaxpr, cuts: Mapping[jx.JaxprEqn, frozenset[int]]
) -> tuple[jx.Jaxpr, dict[jx.JaxprEqn, tuple[jx.JaxprEqn, int]]]:
    """``jaxpr`` with its scans cut before the layers ``cuts``, which are between 0 and their length.

    Args:
      cuts: by forward scan at the top of ``jaxpr``.

    Returns:
      The jaxpr, and for each equation of a new body the one that it is a copy of, and the first layer of its part.
    """
    found = _linked(jaxpr, cuts)
    if not found:
        return jaxpr, {}
    split = _Split(jaxpr, found)
    return split.jaxpr(), split.copies


def _linked(jaxpr: jx.Jaxpr, cuts: Mapping[jx.JaxprEqn, frozenset[int]]) -> dict[jx.JaxprEqn, frozenset[int]]:
    """The cuts of forward scans and of the backward scans that read their stacks layer by layer: the same for all."""
    found = {e: cuts[e] for e in jaxpr.eqns if cuts.get(e)}
    maker = {v: e for e in jaxpr.eqns if jx.scan_groups(e) for v in e.outvars}
    changed = bool(found)
    while changed:
        changed = False
        for eqn in jaxpr.eqns:
            groups = jx.scan_groups(eqn) if jx.is_backward(eqn) and not eqn.effects else None
            if groups is None:
                continue
            read = [
                maker[v] for v in eqn.invars[groups.consts + groups.carry :] if isinstance(v, jx.Var) and v in maker
            ]
            together = [e for e in (*read, eqn) if e in found and _length(e) == groups.length]
            union = frozenset().union(*(found[e] for e in together))
            for e in (*together, eqn) if together else ():
                if found.get(e) != union:
                    found[e], changed = union, True
    return found


def _length(eqn: jx.JaxprEqn) -> int:
    groups = jx.scan_groups(eqn)
    return groups.length if groups is not None else 0


class _Split:
    """One jaxpr, and the scans of it to cut."""

    def __init__(self, jaxpr: jx.Jaxpr, cuts: Mapping[jx.JaxprEqn, frozenset[int]]) -> None:
        self.before, self.cuts = jaxpr, cuts
        self.copies: dict[jx.JaxprEqn, tuple[jx.JaxprEqn, int]] = {}
        self.parts: dict[tuple[jx.Var, int, int], jx.Var] = {}
        """Stacks and layers (first, end) of them -> the variable that has those."""
        self.eqns: list[jx.JaxprEqn] = []
        self.read_whole = {v for v in jaxpr.outvars if isinstance(v, jx.Var)}
        maker = {v: e for e in cuts for v in e.outvars}
        for eqn in jaxpr.eqns:
            groups = jx.scan_groups(eqn) if eqn in cuts else None
            stacks = len(eqn.invars) if groups is None else groups.consts + groups.carry
            for i, v in enumerate(eqn.invars):
                if isinstance(v, jx.Var) and not (i >= stacks and v in maker and cuts[maker[v]] == cuts[eqn]):
                    self.read_whole.add(v)

    def jaxpr(self) -> jx.Jaxpr:
        for eqn in self.before.eqns:
            if eqn in self.cuts:
                self._split(eqn)
            else:
                self.eqns.append(eqn)
        return jx.with_eqns(self.before, self.eqns)

    def _split(self, eqn: jx.JaxprEqn) -> None:
        groups, body = jx.scan_groups(eqn), jx.regions(eqn)[0].body
        assert groups is not None
        n, m = groups.consts, groups.consts + groups.carry
        edges = [*pairwise((0, *sorted(self.cuts[eqn]), groups.length))]
        order = edges[::-1] if eqn.params["reverse"] else edges
        carry = list(eqn.invars[n:m])
        for first, end in order:
            last = (first, end) == order[-1]
            xs = [self._part(x, first, end, eqn) for x in eqn.invars[m:]]
            own = body if (first, end) == order[0] else jx.normalize(body)
            self._note(body, own, first)
            carried = eqn.outvars[: groups.carry]
            out = list(carried) if last else [jx.new_var(v) for v in carried]
            stacked = [_resized(v, end - first) for v in eqn.outvars[groups.carry :]]
            self.parts |= {(v, first, end): w for v, w in zip(eqn.outvars[groups.carry :], stacked, strict=True)}
            sizes, operands = (groups.consts, groups.carry, groups.xs), [*eqn.invars[:n], *carry, *xs]
            part = jx.rebuild_scan(eqn, own, sizes, operands, [*out, *stacked], end - first)
            self.eqns.append(jx.as_layers(part, first, end))
            carry = list(out)
        for v in eqn.outvars[groups.carry :]:
            if v in self.read_whole:
                self._join(v, [self.parts[v, *edge] for edge in edges], eqn)

    def _part(self, x: jx.Atom, first: int, end: int, like: jx.JaxprEqn) -> jx.Atom:
        """Layers ``first`` to ``end`` of ``x``; of a stack that was made in other parts, those are sliced."""
        if not isinstance(x, jx.Var):
            return x
        found = self.parts.get((x, first, end))
        if found is None:
            eqns, (made,) = jx.emit(lambda v: jax.lax.slice_in_dim(v, first, end), jx.outside_autodiff(like), x)
            assert isinstance(made, jx.Var)
            self.eqns += map(jx.outside_autodiff, eqns)
            found = self.parts[x, first, end] = made
        return found

    def _join(self, stack: jx.Var, parts: list[jx.Var], like: jx.JaxprEqn) -> None:
        eqns, (made,) = jx.emit(lambda *vs: jax.lax.concatenate(vs, 0), like, *parts)
        self.eqns += eqns[:-1]
        self.eqns.append(eqns[-1].replace(outvars=[stack]))
        assert eqns[-1].outvars == [made]

    def _note(self, body: jx.Jaxpr, copy: jx.Jaxpr, first: int) -> None:
        pairs = zip(jx.walk(body), jx.walk(copy), strict=True)
        self.copies |= {new: (old, first) for old, new in pairs}


def _resized(var: jx.Var, length: int) -> jx.Var:
    return jx.resized_var(var, (length, *jx.aval(var).shape[1:]))
