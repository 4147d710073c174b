"""State of the padding pass: which (possibly padded) array now carries each original variable."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import LogicalMesh
from autoshard.passes.pad_uneven.window import Placement, Window, leading_window, place_window

MOST_PADDING = 8
"""At most one in this many elements of a padded dimension is padding."""


@dataclass
class PaddingState:
    """One jaxpr while it is rewritten."""

    rules: Rules
    mesh: LogicalMesh
    stored: frozenset[tuple[int, int]] = frozenset()
    """Sizes of dimensions of the state that is stored with padding, without and with it."""
    eqns: list[jx.JaxprEqn] = field(default_factory=list[jx.JaxprEqn])
    """The rewritten equations."""
    windows: dict[jx.Var, Window] = field(default_factory=dict[jx.Var, Window])
    """Variables that are not computed as in the program, or not yet, each as a window on the array that carries it."""
    producers: dict[jx.Var, jx.JaxprEqn] = field(default_factory=dict[jx.Var, jx.JaxprEqn])
    """The original equations of those variables, and of broadcasts, whose results can be made of another size."""
    deferred: set[jx.Var] = field(default_factory=set[jx.Var])
    """Variables in ``windows`` whose own equation would still compute them."""
    placed: dict[Any, tuple[Window, jx.Atom]] = field(default_factory=dict[Any, tuple[Window, jx.Atom]])
    """Arrays that windows were placed in, by window and placements."""
    changed: bool = False

    def window_of(self, atom: jx.Atom) -> Window:
        """The window that carries ``atom``: the whole of itself where nothing was changed."""
        return self.windows[atom] if isinstance(atom, jx.Var) and atom in self.windows else leading_window(atom)

    def set_windows(self, eqn: jx.JaxprEqn, windows: Sequence[Window]) -> None:
        """Lets ``windows`` carry the results of ``eqn``."""
        self.windows.update(zip(eqn.outvars, windows, strict=True))
        self.producers.update(dict.fromkeys(eqn.outvars, eqn))

    def replace_eqn(
        self, eqn: jx.JaxprEqn, fun: Callable[..., Any], operands: Sequence[jx.Atom], shapes: Sequence[Sequence[int]]
    ) -> None:
        """Emits ``fun`` of ``operands`` for ``eqn``, whose results, of ``shapes``, are at the beginning of its."""
        found = self.emit(fun, eqn, *operands)
        self.set_windows(eqn, [leading_window(x, shape) for x, shape in zip(found, shapes, strict=True)])

    def emit(self, fun: Callable[..., Any], like: jx.JaxprEqn, *operands: jx.Atom) -> list[jx.Atom]:
        """The results of ``fun`` of ``operands``, its equations attributed to the source of ``like``."""
        eqns, found = jx.emit(fun, like, *operands)
        self.eqns += eqns
        self.changed = True
        return found

    def unpadded(self, atom: jx.Atom) -> jx.Atom:
        """``atom`` with the shape that it has in the program."""
        if not isinstance(atom, jx.Var) or atom not in self.windows:
            return atom
        window, producer = self.windows[atom], self.producers[atom]
        sizes = zip(window.shape, window.base_shape, strict=True)
        moved = [m != n and math.gcd(m, n, self.mesh.size) > 1 for m, n in sizes]
        moved_operand = any(a in self.windows for a in producer.invars[:1])
        if atom not in self.deferred or moved_operand or sum(moved) > 1:  # one dimension at a time
            return self.place(window, [(0, n) for n in window.shape], producer)
        self.eqns.append(producer.replace(invars=[self.unpadded(a) for a in producer.invars]))
        for v in producer.outvars:
            self.windows.pop(v, None)
            if not self.rules.traits(producer.primitive).broadcasts:  # else it can still be made of another size
                self.producers.pop(v, None)
        return atom

    def padded(self, atom: jx.Atom, sizes: Sequence[int], like: jx.JaxprEqn) -> jx.Atom:
        """An array of ``sizes`` that begins with ``atom``."""
        producer = self.producers.get(atom) if isinstance(atom, jx.Var) and atom not in self.windows else None
        if producer is None or tuple(sizes) == jx.aval(atom).shape or not _can_make(producer, sizes):
            return self.place(self.window_of(atom), [(0, n) for n in sizes], like)
        return self._made(producer, sizes)

    def broadcast(self, eqn: jx.JaxprEqn) -> bool:
        """Has ``eqn``, a broadcast, make its result as long as the state with such dimensions is stored; False where
        there is none."""
        shape = jx.aval(eqn.outvars[0]).shape
        sizes = [next((m for k, m in sorted(self.stored) if k == n), n) for n in shape]
        if tuple(sizes) == tuple(shape) or not _can_make(eqn, sizes):
            return False
        self.set_windows(eqn, [leading_window(self._made(eqn, sizes), shape)])
        self.deferred.update(eqn.outvars)
        return True

    def _made(self, producer: jx.JaxprEqn, sizes: Sequence[int]) -> jx.Atom:
        """The result of ``producer``, a broadcast, made with other ``sizes``."""
        shape_param = self.rules.traits(producer.primitive).shape_param
        assert shape_param is not None
        params = {**producer.params, shape_param: tuple(sizes)}
        return self.emit(lambda *xs: producer.primitive.bind(*xs, **params), producer, *producer.invars)[0]

    def place(self, window: Window, placements: Sequence[Placement], like: jx.JaxprEqn) -> jx.Atom:
        """An array with ``window`` at ``placements``."""
        there = [(w.start, n) for w, n in zip(window.dims, window.base_shape, strict=True)] == list(placements)
        if there and (window.fill is None or not placements):
            return window.base
        key = window.base, window.dims, id(window.fill), tuple(placements)
        if key not in self.placed:
            given = [window.base] if window.fill is None else [window.base, window.fill]
            (found,) = self.emit(place_window(window, placements), like, *given)
            self.placed[key] = window, found  # the window, lest its fill be freed and its id be given to another
        return self.placed[key][1]

    def is_uneven(self, size: int, base_size: int) -> bool:
        """Whether a dimension of ``size`` divides over fewer devices than one of ``base_size``."""
        return math.gcd(size, self.mesh.size) < math.gcd(base_size, self.mesh.size)

    def padded_size(self, size: int, base_size: int) -> int | None:
        """The size that a dimension is padded to: its own where it is even; None where that would be too much."""
        if not self.is_uneven(size, base_size):
            return size
        if (size, base_size) in self.stored:
            return base_size
        options = (base_size, -(-size // self.mesh.size) * self.mesh.size)
        return next((n for n in options if 0 <= n - size <= n // MOST_PADDING), None)


def _can_make(producer: jx.JaxprEqn, sizes: Sequence[int]) -> bool:
    """Whether a broadcast can make its result of other ``sizes``: where they differ, its operand has no elements."""
    if producer.primitive is _prims.iota_p:
        return not producer.invars
    if len(producer.invars) != 1:
        return False
    own = zip(producer.params["broadcast_dimensions"], jx.aval(producer.invars[0]).shape, strict=True)
    old = jx.aval(producer.outvars[0]).shape
    return all(n == 1 or sizes[d] == old[d] for d, n in own)
