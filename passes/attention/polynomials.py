"""terms: polynomials in what a softmax and its gradient are made of; `reader` says what the letters are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autoshard.errors import PassError
from autoshard.transforms.attention_op import ScoreOp

Term = tuple[tuple[Any, int], ...]
Terms = dict[Term, float]
E, Z, D, T = "e", "z", "d", "t"
WEIGHTS: Terms = {((E, 1), (Z, -1)): 1.0}


def combine(name: str, x: Terms, y: Terms) -> Terms:
    if name in {"add", "sub"}:
        sign = 1 if name == "add" else -1
        done = {t: x.get(t, 0.0) + sign * y.get(t, 0.0) for t in {**x, **y}}
    elif name == "mul":
        done: Terms = {}
        for s, a in x.items():
            for t, b in y.items():
                powers: dict[Any, int] = {}
                for atom, n in (*s, *t):
                    powers[atom] = 1 if isinstance(atom, int) else powers.get(atom, 0) + n
                term = tuple(sorted(((k, n) for k, n in powers.items() if n), key=lambda p: str(p[0])))
                done[term] = done.get(term, 0.0) + a * b
    elif name == "div" and len(y) == 1:
        ((term, c),) = y.items()
        if not c or any(a != Z for a, _ in term):
            raise PassError("a quotient by more than sums of exponentials")
        return combine("mul", x, {tuple((a, -n) for a, n in term): 1 / c})
    else:
        raise PassError(f"{name} of weights")
    return {t: c for t, c in done.items() if c}


def row_sum(terms: Terms, size: int) -> Terms:
    """The sums along the keys."""
    done: Terms = {}
    for term, c in terms.items():
        row = tuple((a, n) for a, n in term if a in {Z, T})
        cell = tuple((a, n) for a, n in term if a not in {Z, T})
        if not cell:
            added: Terms = {row: c * size}
        elif cell in {((E, 1),), ((D, 1), (E, 1))}:
            added = combine("mul", {row: c}, {((Z if len(cell) == 1 else T, 1),): 1.0})
        else:
            raise PassError("a sum of something else than weights, alone or times their cotangent")
        done = combine("add", done, added)
    return done


def is_cotangent(terms: Terms, steps: Sequence[ScoreOp]) -> bool:
    """Whether ``terms`` are the cotangent of the product of queries and keys."""
    scale = math.prod([s.constant for s in steps if s.kind == "scale"])
    kept = tuple((i, 1) for i, s in enumerate(steps) if s.is_mask)
    expected: Terms = {(): scale}
    for factor in ({((E, 1), (Z, -1)): 1.0}, {kept: 1.0}, {((D, 1),): 1.0, ((T, 1), (Z, -1)): -1.0}):
        expected = combine("mul", expected, factor)
    return terms.keys() == expected.keys() and all(math.isclose(c, expected[t], rel_tol=1e-6) for t, c in terms.items())
