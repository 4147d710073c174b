"""The chain of layers in a loop over micro-batches: two scans, forward and backward, and where everything else belongs.

Each iteration of the loop computes something *before* the chain, runs the layers forward, computes something on the
*last* stage (head, loss and its backward), runs the layers backward, and computes something on the *first* stage (the
backward of what was before). The loop carries sums over micro-batches. `places` says of every value of the body where
it is known: nowhere in particular, since any stage can compute it (an empty set), on the first or the last stage, or on
each stage its own (of its layers, after their forward or their backward).

A sum may have terms of several places: what is linear in all of them is computed of each alone, zero in place of the
others, and added up over the stages after the loop.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import jax
import numpy as np
from jax.extend.core import primitives as prims

from autoshard import jaxpr as jx
from autoshard.errors import PipelineError
from autoshard.ir.rule_registry import Rules

type Place = Literal["forward", "last", "backward", "first"]
"""Where a value is known: on each stage, of its layers' forward; on the last stage; on each stage, of its layers'
backward; on the first stage."""
type Places = frozenset[Place]

_ENDS = frozenset[Place]({"first", "last"})
_FORWARD = frozenset[Place]({"forward"})
_SCALING = frozenset({prims.mul_p, prims.div_p})


@dataclass(frozen=True)
class Chain:
    """A loop over micro-batches with a chain of layers in it."""

    loop: jx.JaxprEqn
    """The scan over micro-batches; an iteration is a micro-batch."""
    forward: jx.JaxprEqn
    """The scan over layers in its body."""
    backward: jx.JaxprEqn | None
    """Its transpose; None of a step that takes no gradients."""
    places: Mapping[jx.Var, Places]
    """Of every variable of the body."""
    per_layer: frozenset[jx.Var]
    """The variables known on each stage whose first dimension is that of the layers."""
    invariant: frozenset[jx.Var]
    """The variables that are the same in every iteration."""
    sums: Mapping[int, jx.Atom]
    """By carry: what an iteration adds to it."""
    recurrent: frozenset[int]
    """The other carries, of which any stage computes all."""
    rules: Rules = field(repr=False)

    @property
    def groups(self) -> jx.ScanGroups:
        """Those of the loop over micro-batches."""
        return scan_groups(self.loop)

    @property
    def body(self) -> jx.Jaxpr:
        """Of the loop."""
        return jx.regions(self.loop)[0].body

    @property
    def layers(self) -> int:
        return scan_groups(self.forward).length

    @functools.cached_property
    def constraints(self) -> Mapping[jx.Var, jx.JaxprEqn]:
        """Of values of the body that a sharding constraint alone reads, that one."""
        readers = Counter(a for e in self.body.eqns for a in {v for v in e.invars if isinstance(v, jx.Var)})
        readers.update(a for a in self.body.outvars if isinstance(a, jx.Var))
        one = [(e.invars[0], e) for e in self.body.eqns if jx.is_constraint(e)]
        return {a: e for a, e in one if isinstance(a, jx.Var) and readers[a] == 1}

    @property
    def turned(self) -> bool:
        """Whether the input goes into the last layer, and the output comes from the first."""
        return self.forward.params["reverse"]

    @property
    def scans(self) -> dict[Place, jx.JaxprEqn]:
        """The scans over layers, by where they run."""
        found: dict[Place, jx.JaxprEqn] = {"forward": self.forward}
        return found if self.backward is None else {**found, "backward": self.backward}

    def where(self, atom: jx.Atom) -> Places:
        """The places of a value; of a literal none."""
        return frozenset() if isinstance(atom, jx.Literal) else self.places[atom]


def find_chain(jaxpr: jx.Jaxpr, name: str, rules: Rules) -> Chain:
    """The largest chain of layers in a loop over micro-batches of ``jaxpr``, the step ``name``.

    Raises:
      PipelineError: there is none, or something in the loop stands against it; names its source line.
    """
    if found := _candidates(jaxpr, rules):
        return _Analysis(*max(found, key=lambda f: _stacked_bytes(f[1])), rules).chain()
    alone = _forward_chains(jaxpr, rules)
    for chain in alone:
        if isinstance(chain, Chain):
            return chain
    for refused in alone:
        if isinstance(refused, PipelineError):
            raise refused
    raise PipelineError(
        f"{name} has no chain of layers to make stages of{_heaviest(jaxpr)}: there is no loop over micro-batches in "
        "which layers that are equal but for their arrays, scanned over or one after the other, are followed by their "
        "backward, if the step has one. Give layers the same shapes and operations; give microbatches=N, 2 or more, "
        "where the step has no loop over micro-batches of its own"
    )


def _forward_chains(jaxpr: jx.Jaxpr, rules: Rules) -> list[Chain | PipelineError]:
    """The chains of a step without gradients: scans over rows of what is the same in every iteration of a loop; those
    of most bytes first. In place of one that no pipeline runs, why."""
    loops = [eqn for eqn in jaxpr.eqns if jx.scan_groups(eqn)]
    scans = [(loop, e) for loop in loops for e in jx.regions(loop)[0].body.eqns if jx.scan_groups(e)]
    found: list[Chain | PipelineError] = []
    for loop, scan in sorted(scans, key=lambda pair: -_stacked_bytes(pair[1])):
        analysis, groups = _Analysis(loop, scan, None, rules), scan_groups(scan)
        rows = scan.invars[groups.consts + groups.carry :]
        if groups.carry and any(isinstance(a, jx.Var) and a in analysis.invariant for a in rows):
            try:
                found.append(analysis.chain())
            except PipelineError as e:
                found.append(e)
    return found


def _heaviest(jaxpr: jx.Jaxpr) -> str:
    """Where most FLOPs are, as the middle of a sentence."""
    eqn = max(jx.walk(jaxpr), key=jx.contraction_flops, default=None)
    line = jx.source(eqn) if eqn is not None and jx.contraction_flops(eqn) else ""
    return f", and most of its FLOPs are at {line}" if line else ""


def has_chain(jaxpr: jx.Jaxpr, rules: Rules) -> bool:
    """Whether ``jaxpr`` has a loop over micro-batches with the forward and the backward of layers in it, whether a
    pipeline can run them or not, or with a forward alone that one can run."""
    if _candidates(jaxpr, rules):
        return True
    return any(isinstance(chain, Chain) for chain in _forward_chains(jaxpr, rules))


def has_scanned_layers(jaxpr: jx.Jaxpr, rules: Rules) -> bool:
    """Whether ``jaxpr``, or a loop over micro-batches in it, has a scan over layers and its transpose."""
    return bool(_pairs(jaxpr, rules)) or has_chain(jaxpr, rules)


def layer_scans(jaxpr: jx.Jaxpr, rules: Rules) -> set[jx.JaxprEqn]:
    """The scans over layers of ``jaxpr`` that have a transpose, and these."""
    return {scan for pair in _pairs(jaxpr, rules) for scan in pair}


def _candidates(jaxpr: jx.Jaxpr, rules: Rules) -> list[tuple[jx.JaxprEqn, jx.JaxprEqn, jx.JaxprEqn]]:
    """Loops with the forward and the backward of a chain."""
    loops = [eqn for eqn in jaxpr.eqns if jx.scan_groups(eqn)]
    return [(loop, *pair) for loop in loops for pair in _pairs(jx.regions(loop)[0].body, rules)]


def _pairs(body: jx.Jaxpr, rules: Rules) -> list[tuple[jx.JaxprEqn, jx.JaxprEqn]]:
    """The scans of ``body`` of which one reads, in reverse order, what the other stacks."""
    scans = [e for e in body.eqns if jx.scan_groups(e)]
    reached = {e: _derived(body, e, rules) for e in scans}

    def is_pair(one: jx.JaxprEqn, other: jx.JaxprEqn) -> bool:
        a, b = scan_groups(one), scan_groups(other)
        turned = one.params["reverse"] != other.params["reverse"]
        xs = [v for v in other.invars[b.consts + b.carry :] if isinstance(v, jx.Var)]
        return a.length == b.length and turned and not reached[one].isdisjoint(xs)

    return [(f, b) for n, f in enumerate(scans) for b in scans[n + 1 :] if is_pair(f, b)]


def _derived(body: jx.Jaxpr, eqn: jx.JaxprEqn, rules: Rules) -> set[jx.Var]:
    """What ``eqn`` stacks, also where it is constrained or cast."""
    found = set(eqn.outvars[scan_groups(eqn).carry :])
    for e in body.eqns:
        if _keeps_elements(e, rules) and isinstance(e.invars[0], jx.Var) and e.invars[0] in found:
            found.update(e.outvars)
    return found


def _keeps_elements(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    """Whether the result is the operand, constrained, cast, copied or negated."""
    traits, p = rules.traits(eqn.primitive), eqn.primitive
    return traits.constrains or traits.casts or p is prims.copy_p or p is prims.neg_p


def scan_groups(eqn: jx.JaxprEqn) -> jx.ScanGroups:
    """The operand groups of ``eqn``, a scan without effects on references."""
    groups = jx.scan_groups(eqn)
    assert groups is not None
    return groups


def _stacked_bytes(forward: jx.JaxprEqn) -> int:
    groups = scan_groups(forward)
    return sum(jx.aval_bytes(jx.aval(a)) for a in forward.invars[groups.consts + groups.carry :])


class _Analysis:
    """Finds the places of the values of a loop's body."""

    def __init__(self, loop: jx.JaxprEqn, forward: jx.JaxprEqn, backward: jx.JaxprEqn | None, rules: Rules) -> None:
        self.rules = rules
        self.loop, self.forward, self.backward = loop, forward, backward
        self.groups, self.body = scan_groups(loop), jx.regions(loop)[0].body
        self.producer = {v: e for e in self.body.eqns for v in e.outvars}
        self.places: dict[jx.Var, Places] = {}
        self.per_layer = set[jx.Var]()
        self.recurrent, self.invariant = self._recurrent(), self._invariant()

    def chain(self) -> Chain:
        """The chain, once everything in the loop has its place.

        Raises:
          PipelineError: something has none.
        """
        sums, adds = self._sums()
        for v in (*self.body.constvars, *self.body.invars):
            self.places[v] = frozenset()
        for eqn in self.body.eqns:
            if eqn.effects:
                raise self._refused(eqn, "has an effect, which a pipeline would run in another order")
            if eqn in adds:
                self.places.update(dict.fromkeys(eqn.outvars, frozenset()))
            elif eqn is self.forward:
                self._place_forward(eqn)
            elif eqn is self.backward:
                self._place_backward(eqn)
            else:
                places, per_layer = self._place(eqn)
                self.places.update(dict.fromkeys(eqn.outvars, places))
                if per_layer:
                    self.per_layer.update(eqn.outvars)
        for v in self.body.outvars[self.groups.carry :]:
            if v in self.per_layer:
                raise self._refused(self.producer[v], "returns what each layer has of every micro-batch")
        return Chain(
            self.loop,
            self.forward,
            self.backward,
            self.places,
            frozenset(self.per_layer),
            self.invariant,
            sums,
            self.recurrent,
            self.rules,
        )

    def _recurrent(self) -> frozenset[int]:
        """The carries that no value of the chain reaches."""
        consts, inputs = self.groups.consts, self.body.invars
        reached = {*self.forward.outvars, *(() if self.backward is None else self.backward.outvars)}
        while True:
            for eqn in self.body.eqns:
                if not reached.isdisjoint(a for a in eqn.invars if isinstance(a, jx.Var)):
                    reached.update(eqn.outvars)
            new = {inputs[consts + i] for i, v in enumerate(self.body.outvars[: self.groups.carry]) if v in reached}
            if new <= reached:
                outs = enumerate(self.body.outvars[: self.groups.carry])
                return frozenset(i for i, v in outs if v not in reached)
            reached |= new

    def _sums(self) -> tuple[dict[int, jx.Atom], set[jx.JaxprEqn]]:
        """By carry, what is added to it; and the equations that add, with constraints before and after.

        Raises:
          PipelineError: a carry is used otherwise.
        """
        readers: dict[jx.Var, list[jx.JaxprEqn]] = {}
        for eqn in self.body.eqns:
            for a in dict.fromkeys(a for a in eqn.invars if isinstance(a, jx.Var)):
                readers.setdefault(a, []).append(eqn)
        sums, adds = dict[int, jx.Atom](), set[jx.JaxprEqn]()
        for i in sorted(set(range(self.groups.carry)) - self.recurrent):
            var, added = self.body.invars[self.groups.consts + i], None
            while var is not self.body.outvars[i]:
                uses = readers.get(var, [])
                is_sum = len(uses) == 1 and (jx.is_constraint(uses[0]) or (self._adds(uses[0]) and added is None))
                if not is_sum or var in self.body.outvars:
                    what = uses[0] if uses else self.loop
                    raise self._refused(what, "carries from one micro-batch to the next what is no sum over them")
                adds.add(uses[0])
                if self._adds(uses[0]):
                    a, b = uses[0].invars
                    added = b if a is var else a
                (var,) = uses[0].outvars
            assert added is not None
            sums[i] = added
        return sums, adds

    def _invariant(self) -> frozenset[jx.Var]:
        found = {*self.body.constvars, *self.body.invars[: self.groups.consts]}
        for eqn in self.body.eqns:
            known = all(isinstance(a, jx.Literal) or a in found for a in eqn.invars)
            if known and eqn not in (self.forward, self.backward):
                found.update(eqn.outvars)
        return frozenset(found)

    def _of(self, atom: jx.Atom) -> Places:
        return frozenset() if isinstance(atom, jx.Literal) else self.places[atom]

    def _place_forward(self, eqn: jx.JaxprEqn) -> None:
        for a in eqn.invars:
            if self._of(a):
                raise self._refused(eqn, "reads what only a part of the stages knows")
        carry = scan_groups(eqn).carry
        self.places.update(dict.fromkeys(eqn.outvars[:carry], frozenset({"last"})))
        self.places.update(dict.fromkeys(eqn.outvars[carry:], frozenset({"forward"})))
        self.per_layer.update(eqn.outvars[carry:])

    def _place_backward(self, eqn: jx.JaxprEqn) -> None:
        groups = scan_groups(eqn)
        for n, a in enumerate(eqn.invars):
            places = self._of(a)
            if n < groups.consts:
                right, what = not places, "every layer reads what only the last stage knows"
            elif n < groups.consts + groups.carry:
                right, what = places <= {"last"}, "begins with what is not known on the last stage"
            else:
                right = not places or (places == _FORWARD and a in self.per_layer)
                what = "reads for each layer what its forward does not make"
            if not right:
                raise self._refused(eqn, f"is the backward of the layers, and {what}")
        self.places.update(dict.fromkeys(eqn.outvars[: groups.carry], frozenset({"first"})))
        self.places.update(dict.fromkeys(eqn.outvars[groups.carry :], frozenset({"backward"})))
        self.per_layer.update(eqn.outvars[groups.carry :])

    def _place(self, eqn: jx.JaxprEqn) -> tuple[Places, bool]:
        """The places of the results of an equation, and whether each layer has its own."""
        known = [self._of(a) for a in eqn.invars]
        places = frozenset[Place]().union(*known)
        if len(places) < 2 and places <= _ENDS:
            return places, False
        layered = [isinstance(a, jx.Var) and a in self.per_layer for a in eqn.invars]
        if any(layered):
            return self._place_per_layer(eqn, places, layered)
        if not self._is_linear(eqn, [bool(k) for k in known]):
            raise self._refused(eqn, f"is not linear in what {_and(places)} computes")
        return places, False

    def _place_per_layer(self, eqn: jx.JaxprEqn, places: Places, layered: list[bool]) -> tuple[Places, bool]:
        p, scalars = eqn.primitive, [not jx.aval(a).shape for a in eqn.invars]
        if len(places) == 1:
            if _keeps_elements(eqn, self.rules) or (self._adds(eqn) and all(layered)):
                return places, True
            if p in _SCALING and layered[0] and scalars[1] and not self._of(eqn.invars[1]):
                return places, True
            if p is prims.mul_p and layered[1] and scalars[0] and not self._of(eqn.invars[0]):
                return places, True
            if p is prims.transpose_p and eqn.params["permutation"][0] == 0:
                return places, True
            if p is prims.reduce_sum_p:
                return places, 0 not in eqn.params["axes"]
        raise self._refused(eqn, f"takes together what {_and(places)} computes of each layer")

    def _is_linear(self, eqn: jx.JaxprEqn, known: list[bool]) -> bool:
        """Whether the results are linear in the operands of which ``known`` holds, all together."""
        traits = self.rules.traits(eqn.primitive)
        positions = {i for i, k in enumerate(known) if k}
        if not traits.constrains and not any(positions <= {*s} for s in traits.linear):
            return False
        floats = all(jax.dtypes.issubdtype(jx.aval(a).dtype, np.inexact) for a in (*eqn.invars, *eqn.outvars))
        if (traits.casts or traits.linear_in_inexact) and not floats:
            return False
        places = frozenset[Place]().union(*(self._of(a) for a in eqn.invars))
        return all(known) or not any(len(s) > 1 and positions <= {*s} for s in traits.linear) or bool(places & _ENDS)

    def _adds(self, eqn: jx.JaxprEqn) -> bool:
        return self.rules.traits(eqn.primitive).adds

    def _refused(self, eqn: jx.JaxprEqn, what: str) -> PipelineError:
        line = jx.source(eqn)
        op = eqn.primitive.name
        return PipelineError(f"{f'{line}: ' if line else ''}no pipeline runs this loop over micro-batches: {op} {what}")


def _and(places: Places) -> str:
    texts = {"forward": "each stage's forward", "last": "the last stage", "backward": "each stage's backward"}
    return " and ".join(texts.get(p, "the first stage") for p in sorted(places))
