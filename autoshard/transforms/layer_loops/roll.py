"""Blocks that repeat as scans, the forward's and the backward's: what a block leaves for another is stacked once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.transforms.layer_loops.repeats import Place, Repeat, find_repeats, transposed


def roll_layers(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` with the layers that it computes one after the other in scans; ``jaxpr`` itself where there are none.

    They are the row of blocks that repeat and hold products with most equations, and its backward or forward: the next
    such row that belongs to it. Layers that one of the rows lacks are left out of the other: the backward has no block
    of a layer whose input no gradient is taken of, or another where sums of gradients begin.
    """
    jaxpr = jx.eliminate_dead_code(jaxpr)
    repeats = find_repeats(jaxpr.eqns, jx.has_product)
    for partner in repeats[1:]:
        forward, backward = sorted((repeats[0], partner), key=lambda r: r.start)
        if pair := transposed(jaxpr.eqns, forward, backward):
            return _Rolling(jaxpr, pair).rolled()
    return _Rolling(jaxpr, repeats[:1]).rolled() if repeats else jaxpr


def roll_loops(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """`roll_layers` of ``jaxpr`` and of the bodies of its loops."""
    loops = {e: jx.map_bodies(e, roll_layers) for e in jaxpr.eqns if jx.scan_groups(e)}
    return roll_layers(jx.with_eqns(jaxpr, [loops.get(e, e) for e in jaxpr.eqns]))


class _Rolling:
    """Writes the equations anew, with scans in place of blocks."""

    def __init__(self, jaxpr: jx.Jaxpr, repeats: Sequence[Repeat]) -> None:
        self.jaxpr, self.repeats = jaxpr, repeats
        self.eqns: list[jx.JaxprEqn] = []
        self.values: dict[jx.Var, jx.Atom] = {}
        """What stands for variables of blocks."""
        self.rows: dict[jx.Var, tuple[jx.Atom, int]] = {}
        """The others: a stacked value, and which row of it."""
        self.stacks: list[tuple[tuple[jx.Atom, ...], jx.Atom]] = []
        """Values with a row for each layer, from the first to the last, and what they are stacked of."""
        self.like: jx.JaxprEqn = jaxpr.eqns[0]

    def rolled(self) -> jx.Jaxpr:
        at = 0
        for repeat in self.repeats:
            self._copy(at, repeat.start)
            self._roll(repeat)
            at = repeat.stop
        self._copy(at, len(self.jaxpr.eqns))
        outvars = [self._read(a) for a in self.jaxpr.outvars]
        return jx.eliminate_dead_code(jx.normalize(jx.with_eqns(self.jaxpr, self.eqns, outvars=outvars)))

    def _copy(self, start: int, stop: int) -> None:
        for eqn in self.jaxpr.eqns[start:stop]:
            self.like = eqn
            operands = [self._read(a) for a in eqn.invars]
            self.eqns.append(eqn.replace(invars=operands))

    def _emit(self, fun: Any, *operands: jx.Atom) -> list[jx.Atom]:
        eqns, results = jx.emit(fun, self.like, *operands)
        self.eqns += eqns
        return results

    def _read(self, atom: jx.Atom) -> jx.Atom:
        if isinstance(atom, jx.Literal) or (atom not in self.values and atom not in self.rows):
            return atom
        if atom not in self.values:
            stack, row = self.rows[atom]
            (self.values[atom],) = self._emit(lambda x: lax.index_in_dim(x, row, keepdims=False), stack)
        return self.values[atom]

    def _stacked(self, atoms: tuple[jx.Atom, ...]) -> jx.Atom:
        """``atoms``, of the first layer first, as one value."""
        for known, stack in self.stacks:
            if len(known) == len(atoms) and all(a is b for a, b in zip(known, atoms, strict=True)):
                return stack
        (stack,) = self._emit(lambda *xs: jnp.stack(xs), *map(self._read, atoms))
        self.stacks.append((atoms, stack))
        return stack

    def _is_backward(self, repeat: Repeat) -> bool:
        """Whether the blocks read from the last to the first layer what blocks before them left."""
        stacked = [known for known, _ in self.stacks]
        turned = [atoms[::-1] for atoms in repeat.own]
        return any(all(a is b for a, b in zip(known, atoms, strict=True)) for known in stacked for atoms in turned)

    def _roll(self, repeat: Repeat) -> None:
        eqns, backward = self.jaxpr.eqns, self._is_backward(repeat)
        block = eqns[repeat.start : repeat.start + repeat.width]
        self.like = block[0]
        turn = slice(None, None, -1 if backward else 1)
        read = self._read_outside(repeat)
        places = [(j, o) for j, eqn in enumerate(block) for o in range(len(eqn.outvars))]
        left = [place for place in places if not read.isdisjoint(repeat.results(eqns, place))]
        shared = [self._read(a) for a in repeat.shared]
        init = [self._read(a) for a, _ in repeat.carried]
        own = [self._stacked(atoms[turn]) for atoms in repeat.own]
        body = self._body(repeat, block, left)

        def run(*operands: Any) -> list[Any]:
            a, b = len(shared), len(shared) + len(init)
            first = [jnp.asarray(x, jx.aval(body.outvars[n]).dtype) for n, x in enumerate(operands[a:b])]

            def layer(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
                outs = jx.as_fun(body)(*operands[:a], *carry, *xs)
                return outs[: len(init)], [*outs[len(init) :], *carry]

            last, ys = lax.scan(layer, first, list(operands[b:]), repeat.count, reverse=backward)
            return [*last, *ys]

        results = self._emit(run, *shared, *init, *own)
        last, ys, entered = (
            results[: len(init)],
            results[len(init) : len(init) + len(left)],
            results[len(init) + len(left) :],
        )
        for place, stack in zip(left, ys, strict=True):
            variables = repeat.results(eqns, place)[turn]
            self.stacks.append((variables, stack))
            self.rows |= {v: (stack, row) for row, v in enumerate(variables)}
        for (first, place), stack, end in zip(repeat.carried, entered, last, strict=True):
            variables = repeat.results(eqns, place)
            self.values[variables[-1]] = end
            self.stacks.append(((first, *variables[:-1])[turn], stack))

    def _read_outside(self, repeat: Repeat) -> set[jx.Var]:
        """What is read outside of the blocks."""
        outside = [*self.jaxpr.eqns[: repeat.start], *self.jaxpr.eqns[repeat.stop :]]
        read = [*(a for e in outside for a in e.invars), *self.jaxpr.outvars]
        return {a for a in read if isinstance(a, jx.Var)}

    def _body(self, repeat: Repeat, block: Sequence[jx.JaxprEqn], left: Sequence[Place]) -> jx.Jaxpr:
        """One block: takes what is shared, carried and its own; returns what is carried, and what is ``left``."""
        given = {
            "shared": [_variable(a) for a in repeat.shared],
            "carried": [_variable(a) for a, _ in repeat.carried],
            "own": [_variable(atoms[0]) for atoms in repeat.own],
        }

        def operand(kind: str, which: Any) -> jx.Atom:
            return block[which[0]].outvars[which[1]] if kind == "value" else given[kind][which]

        eqns = [
            eqn.replace(invars=[operand(*o) for o in operands])
            for eqn, operands in zip(block, repeat.operands, strict=True)
        ]
        results = [*(place for _, place in repeat.carried), *left]
        return jx.normalize(
            self.jaxpr.replace(
                constvars=[],
                consts=[],
                invars=[*given["shared"], *given["carried"], *given["own"]],
                eqns=eqns,
                outvars=[block[j].outvars[o] for j, o in results],
            )
        )


def _variable(atom: jx.Atom) -> jx.Var:
    """A new variable of the type of ``atom``."""
    return jx.Var(jx.aval(atom))
