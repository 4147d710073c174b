"""Finds the part of a jaxpr that computes a loss of many classes, forward and backward, and can run chunk by chunk.

It begins with the product of hidden states [tokens, width] and a weight [width, classes]: the logits. Values computed
from them, as large, have a dimension of the tokens too, and every operation that reads or makes one must be computable
from a chunk of the tokens (`cut`): then results without the classes have the tokens, such as each token's loss or the
hidden states' gradient, or are sums over them, such as the weight's gradient. No spelling of a loss is assumed.

What cannot be so is a value that a large one is combined with and that is computed from all tokens' logits: the
cotangent of a loss that is not linear in its terms' sum, or other tokens' logits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms.batch_parts.cut import Cut, CutEquation, cut_equation

Chunk = tuple[jx.Var, Cut | None]
"""A value of which an iteration has a chunk, or the whole (None)."""


@dataclass(frozen=True)
class Region:
    """Equations that are computed chunk by chunk, with what they read and what is read of them."""

    equations: tuple[CutEquation, ...]
    inputs: tuple[Chunk, ...]
    token_results: tuple[Chunk, ...]
    """Results that have the tokens."""
    totals: tuple[tuple[jx.Var, str], ...]
    """Results that are reduced over the tokens, each with its name in `REDUCTIONS`."""
    replaced: frozenset[int]
    """Indices of the equations that nothing else reads: those that are not computed twice."""
    seed: jx.JaxprEqn
    """The product that makes the logits."""
    chunks: int

    def is_large(self, var: jx.Var) -> bool:
        """Whether a value that has the tokens is as large as logits."""
        return is_large(var, self.seed)

    @property
    def results(self) -> list[jx.Var]:
        """All results, in order."""
        return [v for v, _ in (*self.token_results, *self.totals)]


class RegionFinder:
    """Finds the regions of one jaxpr."""

    def __init__(self, jaxpr: jx.Jaxpr, rules: Rules, mesh: LogicalMesh) -> None:
        self.jaxpr, self.rules, self.mesh = jaxpr, rules, mesh
        self.made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        self.returned = {a for a in jaxpr.outvars if isinstance(a, jx.Var)}

    def region(self, seed: jx.JaxprEqn, cut: Cut) -> Region:
        """The region of the logits that ``seed`` computes, with their tokens cut as ``cut`` says.

        Raises:
          ChunkError: it is not computable in chunks.
        """
        found = self._search({seed.outvars[0]: cut}, seed)
        while more := found.other_sources():  # what else is computed from them belongs into the loop too, if it can be
            try:
                found = self._search({**found.seeds, **more}, seed)
            except ChunkError:
                break
        return found.region()

    def _search(self, seeds: Mapping[jx.Var, Cut], seed: jx.JaxprEqn) -> _Search:
        found = _Search(self, seeds, seed)
        found.run()
        return found


class _Search:
    """The search for one region."""

    def __init__(self, finder: RegionFinder, seeds: Mapping[jx.Var, Cut], seed: jx.JaxprEqn) -> None:
        self.finder, self.seeds, self.seed = finder, seeds, seed
        self.labels: dict[jx.Var, Cut] = {}
        """Values that are computed from logits and have the tokens."""
        self.blocked: dict[jx.Var, ChunkError] = {}
        """Values that are computed from logits and cannot be read in the loop, and why."""
        self.cuts: dict[int, CutEquation] = {}
        self.core: set[int] = set()
        """Equations that read or make a value as large as the logits."""
        self.needed: set[int] = set()
        """`core`, and what it is computed from among values that are computed from logits."""
        self.recomputed: dict[tuple[int, Cut], CutEquation] = {}
        """Equations that make large values from other sources than logits, such as one-hot labels."""
        self.inputs: dict[Chunk, None] = {}

    def is_large(self, var: jx.Var) -> bool:
        return is_large(var, self.seed)

    def is_like_logits(self, var: jx.Var) -> bool:
        """Whether a value may be the logits' cotangent."""
        return jx.aval(var).shape == jx.aval(self.seed.outvars[0]).shape

    def other_sources(self) -> dict[jx.Var, Cut]:
        """Large values that the loop computes from other sources than logits, such as one-hot labels."""
        found = {v: c for e in self.recomputed.values() for v, c in zip(e.eqn.outvars, e.results, strict=True)}
        return {v: c for v, c in found.items() if c is not None and v not in self.seeds}

    def run(self) -> None:
        """Fills the tables.

        Raises:
          ChunkError: as `RegionFinder.region`.
        """
        self.follow()
        eqns = self.finder.jaxpr.eqns
        self.needed = set(self.core)
        read = {a for i in self.core for a in eqns[i].invars if isinstance(a, jx.Var)}
        for i in sorted(self.cuts, reverse=True):
            if i in self.needed or not read.isdisjoint(eqns[i].outvars):
                self.needed.add(i)
                read.update(a for a in eqns[i].invars if isinstance(a, jx.Var))
        for i in sorted(self.needed):
            for a, cut in zip(eqns[i].invars, self.cuts[i].operands, strict=True):
                self.provide(a, cut)

    def follow(self) -> None:
        """Finds everything that is computed from logits, in order."""
        for i, eqn in enumerate(self.finder.jaxpr.eqns):
            operands = [a for a in eqn.invars if isinstance(a, jx.Var)]
            large = any(a in self.labels and self.is_large(a) for a in operands)
            count = len(eqn.invars)
            known = {k: self.labels[a] for k, a in enumerate(eqn.invars) if isinstance(a, jx.Var) and a in self.labels}
            seeded = {count + k: self.seeds[v] for k, v in enumerate(eqn.outvars) if v in self.seeds}
            why = next((self.blocked[a] for a in operands if a in self.blocked), None)
            if not known and not seeded and why is None:
                continue
            if known and not large and _is_product(eqn):
                why = why or ChunkError("between its forward and its backward part are further layers", jx.source(eqn))
            try:
                if why is not None:
                    raise why
                found = cut_equation(eqn, known | seeded, self.finder.rules, self.finder.mesh)
            except ChunkError as e:
                if large or seeded or any(self.is_like_logits(v) for v in eqn.outvars):
                    raise e from None
                self.blocked.update(dict.fromkeys(eqn.outvars, e))
                continue
            self.cuts[i] = found
            if found.reduction:
                text = f"it needs the {found.reduction} over all tokens that {eqn.primitive.name} computes"
                self.blocked.update(dict.fromkeys(eqn.outvars, ChunkError(text, jx.source(eqn))))
            self.labels.update((v, c) for v, c in zip(eqn.outvars, found.results, strict=True) if c is not None)
            makes = [v for v in eqn.outvars if v in self.labels and self.is_large(v)]
            if large or makes:
                self.core.add(i)
            for v in makes:
                if v in self.finder.returned:
                    raise ChunkError("the step, or the function that it is in, returns the logits", jx.source(eqn))

    def provide(self, atom: jx.Atom, cut: Cut | None) -> None:
        """Notes where the chunk of an operand comes from: an equation of the region, or an input."""
        if not isinstance(atom, jx.Var) or atom in self.labels or (atom, cut) in self.inputs:
            return
        i = self.finder.made.get(atom)
        if cut is not None and i is not None and self.is_large(atom):
            if (i, cut) in self.recomputed:
                return
            eqn = self.finder.jaxpr.eqns[i]
            position = len(eqn.invars) + eqn.outvars.index(atom)
            try:
                found = cut_equation(eqn, {position: cut}, self.finder.rules, self.finder.mesh)
            except ChunkError:
                pass  # it is read chunk by chunk where it is
            else:
                self.recomputed[i, cut] = found
                for a, c in zip(eqn.invars, found.operands, strict=True):
                    self.provide(a, c)
                return
        self.inputs[atom, cut] = None

    def region(self) -> Region:
        """The region that was found."""
        eqns = self.finder.jaxpr.eqns
        outside = set(self.finder.returned)
        for i, eqn in enumerate(eqns):
            if i not in self.needed:
                outside.update(a for a in eqn.invars if isinstance(a, jx.Var))
        read = [(i, v) for i in sorted(self.needed) for v in eqns[i].outvars if v in outside]
        recomputed = {(i, k): c for k, ((i, _), c) in enumerate(self.recomputed.items())}
        ordered = sorted({**recomputed, **{(i, -1): self.cuts[i] for i in self.needed}}.items(), key=lambda x: x[0])
        return Region(
            tuple(c for _, c in ordered),
            tuple(self.inputs),
            tuple((v, self.labels[v]) for _, v in read if v in self.labels),
            tuple((v, self.cuts[i].reduction) for i, v in read if v not in self.labels),
            frozenset(self.needed),
            self.seed,
            next(iter(self.seeds.values())).chunks,
        )


def is_large(var: jx.Var, seed: jx.JaxprEqn) -> bool:
    """Whether a value that has the tokens has at least half of the elements of the logits that ``seed`` makes."""
    return 2 * math.prod(jx.aval(var).shape) >= math.prod(jx.aval(seed.outvars[0]).shape)


def _is_product(eqn: jx.JaxprEqn) -> bool:
    return eqn.primitive is _prims.dot_general_p


def logits_products(jaxpr: jx.Jaxpr, least: float) -> list[jx.JaxprEqn]:
    """The products that make the logits of a loss: their result has at least ``least`` bytes and twice the elements of
    each operand, and the first that reads it, or what is computed from it as large, and makes something small, is no
    product. (In an MLP it is one.)"""
    found: list[jx.JaxprEqn] = []
    waiting: dict[jx.Var, jx.JaxprEqn] = {}
    for eqn in jaxpr.eqns:
        seeds = {seed: None for a in eqn.invars if isinstance(a, jx.Var) and (seed := waiting.get(a)) is not None}
        for seed in seeds:
            makes = [v for v in eqn.outvars if jx.is_shaped(v) and is_large(v, seed)]
            if not makes and eqn.primitive is _prims.reduce_sum_p and jx.is_backward(eqn):
                continue  # the gradient of a bias
            if _is_product(eqn) or not makes:
                waiting = {v: s for v, s in waiting.items() if s is not seed}
                found += [] if _is_product(eqn) else [seed]
            else:
                waiting.update(dict.fromkeys(makes, seed))
        if _is_product(eqn) and not eqn.params["dimension_numbers"][1][0]:
            sizes = [math.prod(jx.aval(a).shape) for a in (*eqn.invars, *eqn.outvars)]
            if sizes[2] >= 2 * max(sizes[:2]) > 0 and jx.aval_bytes(jx.aval(eqn.outvars[0])) >= least:
                waiting[eqn.outvars[0]] = eqn
    return found
