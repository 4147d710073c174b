"""uneven: a program on its way to one in which dimensions divide over the mesh: what is made of which variable.

`autoshard.transforms.pad_uneven` says what for, `autoshard.transforms.window` what a variable is as long as nothing needs it as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms.window import Place, View, of, placed

LONGER = 8
"""At most one row in this many is one that means nothing."""
SIZED = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
"""Parameters that state the result's shape."""
FREE = frozenset({"broadcast_in_dim", "iota"})
"""Operations whose results can be made longer as they are made."""


@dataclass
class Body:
    """One jaxpr on its way."""

    rules: Rules
    mesh: LogicalMesh
    eqns: list[jx.JaxprEqn] = field(default_factory=list[jx.JaxprEqn])
    views: dict[jx.Var, View] = field(default_factory=dict[jx.Var, View])
    """Variables that are not computed as they are in the program, or not yet."""
    makers: dict[jx.Var, jx.JaxprEqn] = field(default_factory=dict[jx.Var, jx.JaxprEqn])
    """The equations of views, and of what has no size of its own (`FREE`)."""
    pending: set[jx.Var] = field(default_factory=set[jx.Var])
    """The views whose equations make them, if those are still to be run."""
    made: dict[Any, tuple[View, jx.Atom]] = field(default_factory=dict[Any, tuple[View, jx.Atom]])
    """By view and places."""
    changed: bool = False

    def view(self, atom: jx.Atom) -> View:
        return self.views[atom] if isinstance(atom, jx.Var) and atom in self.views else of(atom)

    def see(self, eqn: jx.JaxprEqn, views: Sequence[View]) -> None:
        """The results of ``eqn`` are ``views``."""
        self.views.update(zip(eqn.outvars, views, strict=True))
        self.makers.update(dict.fromkeys(eqn.outvars, eqn))

    def become(
        self, eqn: jx.JaxprEqn, fun: Callable[..., Any], operands: Sequence[jx.Atom], shapes: Sequence[Sequence[int]]
    ) -> None:
        """The results of ``eqn`` are what ``fun`` of ``operands`` begins with."""
        found = self.emitted(fun, eqn, *operands)
        self.see(eqn, [of(x, shape) for x, shape in zip(found, shapes, strict=True)])

    def emitted(self, fun: Callable[..., Any], like: jx.JaxprEqn, *operands: jx.Atom) -> list[jx.Atom]:
        """What ``fun`` of ``operands`` gives, its equations attributed to ``like``'s source."""
        eqns, found = jx.emit(fun, like, *operands)
        self.eqns += eqns
        self.changed = True
        return found

    def exact(self, atom: jx.Atom) -> jx.Atom:
        """``atom`` as the program has it."""
        if not isinstance(atom, jx.Var) or atom not in self.views:
            return atom
        view, maker = self.views[atom], self.makers[atom]
        moved = [m != n and math.gcd(m, n, self.mesh.size) > 1 for m, n in zip(view.shape, view.around, strict=True)]
        if atom not in self.pending or maker.invars[0] in self.views or sum(moved) > 1:  # one dimension at a time
            return self.place(view, [(0, n) for n in view.shape], maker)
        self.eqns.append(maker.replace(invars=[self.exact(a) for a in maker.invars]))
        for v in maker.outvars:
            self.views.pop(v, None)
        return atom

    def lengthened(self, atom: jx.Atom, sizes: Sequence[int], like: jx.JaxprEqn) -> jx.Atom:
        """An array of ``sizes`` that begins with ``atom``."""
        maker = self.makers.get(atom) if isinstance(atom, jx.Var) and atom not in self.views else None
        if maker is None or tuple(sizes) == jx.aval(atom).shape or not _free(maker, sizes):
            return self.place(self.view(atom), [(0, n) for n in sizes], like)
        params = {**maker.params, SIZED[maker.primitive.name]: tuple(sizes)}
        return self.emitted(lambda *xs: maker.primitive.bind(*xs, **params), maker, *maker.invars)[0]

    def place(self, view: View, places: Sequence[Place], like: jx.JaxprEqn) -> jx.Atom:
        """An array that holds ``view`` at ``places``."""
        there = [(w.at, n) for w, n in zip(view.windows, view.around, strict=True)] == list(places)
        if there and (view.fill is None or not places):
            return view.base
        key = view.base, view.windows, id(view.fill), tuple(places)
        if key not in self.made:
            given = [view.base] if view.fill is None else [view.base, view.fill]
            (found,) = self.emitted(placed(view, places), like, *given)
            self.made[key] = view, found  # the view, lest its fill be freed and its number go to another
        return self.made[key][1]

    def uneven(self, size: int, around: int) -> bool:
        """Whether a dimension of ``size`` divides less than one that it is a part of, or is around."""
        return math.gcd(size, self.mesh.size) < math.gcd(around, self.mesh.size)

    def length(self, size: int, around: int) -> int | None:
        """How long a dimension is made: itself where it is even; None where that would be much longer."""
        if not self.uneven(size, around):
            return size
        options = (around, -(-size // self.mesh.size) * self.mesh.size)
        return next((n for n in options if 0 <= n - size <= n // LONGER), None)


def _free(maker: jx.JaxprEqn, sizes: Sequence[int]) -> bool:
    """Whether what ``maker`` makes can be made of other sizes: where they differ, its operand has nothing."""
    if maker.primitive.name == "iota":
        return not maker.invars
    if len(maker.invars) != 1:
        return False
    own = zip(maker.params["broadcast_dimensions"], jx.aval(maker.invars[0]).shape, strict=True)
    old = jx.aval(maker.outvars[0]).shape
    return all(n == 1 or sizes[d] == old[d] for d, n in own)
