"""Shardy's factors of one operation, followed through all that JAX lowers it to.

Each of XLA's operations gets Shardy's rule. Dimensions of two values that share a factor of one of them are joined, and
so on from the operands to the results, through calls, loops and branches.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from autoshard import jaxpr as jx
from autoshard.ir import shardy_notation
from tests.shardy_check import OP_RULES_PIPELINE, apply_passes

Leaf = int


@dataclass
class Factors:
    """Dimensions of a program's values, joined where one factor of an operation is in both."""

    sizes: list[int] = field(default_factory=list)
    above: list[Leaf] = field(default_factory=list)
    parts: dict[Leaf, list[Leaf]] = field(default_factory=dict)
    kinds: dict[Leaf, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    dims: dict[tuple[int, Any], list[Leaf]] = field(default_factory=dict)
    calls: int = 0

    def new(self, size: int) -> Leaf:
        self.sizes.append(size)
        self.above.append(len(self.above))
        return len(self.above) - 1

    def value(self, value: Any, call: int) -> list[Leaf]:
        """One leaf a dimension; ``call`` tells the calls of a function apart."""
        key = call, ir.Value(value)
        if key not in self.dims:
            shaped = isinstance(value.type, ir.RankedTensorType)
            self.dims[key] = [self.new(n) for n in value.type.shape] if shaped else []
        return self.dims[key]

    def leaves(self, leaf: Leaf) -> list[Leaf]:
        """What the leaf is made of, as far as is known."""
        while self.above[leaf] != leaf:
            leaf = self.above[leaf]
        return [x for part in self.parts[leaf] for x in self.leaves(part)] if leaf in self.parts else [leaf]

    def mark(self, leaf: Leaf, kind: str) -> None:
        for x in self.leaves(leaf):
            self.kinds[x].add(kind)

    def join(self, a: Leaf, b: Sequence[Leaf]) -> None:
        """Dimension ``a`` is made of ``b``, major to minor."""
        mine, theirs = self.leaves(a), [x for y in b for x in self.leaves(y)]
        if len(mine) == len(theirs):
            for x, y in zip(mine, theirs, strict=True):
                self._same(x, y)
        elif len(mine) == 1:
            self._made(mine[0], theirs)
        elif len(theirs) == 1:
            self._made(theirs[0], mine)
        else:  # two ways to take one dimension apart: nothing is common to both
            for x in (*mine, *theirs):
                self.kinds[x].add("whole")

    def _same(self, x: Leaf, y: Leaf) -> None:
        if x != y:
            self.above[y] = x
            self.kinds[x] |= self.kinds.pop(y, set())

    def _made(self, whole: Leaf, of: list[Leaf]) -> None:
        if whole not in of:
            self.parts[whole] = of
            for kind in self.kinds.pop(whole, set()):
                for x in of:
                    self.kinds[x].add(kind)

    def kind(self, leaf: Leaf) -> str:
        found = self.kinds.get(leaf, set())
        return next((k for k in ("whole", "reduced", "moved") if k in found), "parallel")


Shape = tuple[tuple[tuple[int, ...], ...], ...]
KIND = {"sum": "reduced", "whole": "whole", "halo": "moved"}
FREE = {"stablehlo.constant", "stablehlo.iota", "stablehlo.rng"}
"""Operations without operands, each part of which can be made by itself."""


@dataclass(frozen=True)
class Map:
    """Factors of the operands' and results' dimensions, numbered in order of appearance, with their kinds.

    Left out are factors of size one, those that must be whole, and those that are in one place only and couple nothing.
    """

    values: Shape
    kinds: tuple[str, ...]

    def __str__(self) -> str:
        def dims(value: tuple[tuple[int, ...], ...]) -> str:
            texts = ("".join(chr(97 + f) for f in d) or "." for d in value)
            return "".join(t if len(t) == 1 else f"({t})" for t in texts)

        marked = ", ".join(f"{chr(97 + i)}: {k}" for i, k in enumerate(self.kinds) if k != "parallel")
        return ", ".join(map(dims, self.values)) + (f" {{{marked}}}" if marked else "")


def canonical(values: Sequence[Sequence[Sequence[Any]]], kind: Callable[[Any], str], size: Callable[[Any], int]) -> Map:
    places = collections.Counter(f for value in values for dim in value for f in dim)
    lone = {f for f, n in places.items() if n == 1 and kind(f) in ("parallel", "moved")}
    numbers: dict[Any, int] = {}
    kept = tuple(
        tuple(
            tuple(
                numbers.setdefault(f, len(numbers))
                for f in dim
                if kind(f) != "whole" and size(f) != 1 and f not in lone
            )
            for dim in value
        )
        for value in values
    )
    return Map(kept, tuple(map(kind, numbers)))


def theirs(eqn: jx.JaxprEqn) -> Map:
    """What Shardy makes of the operation."""

    def run(*xs: Any) -> Any:
        return eqn.primitive.bind(*xs, **eqn.params)

    shapes = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in eqn.invars]
    with make_ir_context():
        module = parsed(jax.jit(run, keep_unused=True).lower(*shapes))
        apply_passes(module, OP_RULES_PIPELINE)
        functions = {
            ir.StringAttr(f.attributes["sym_name"]).value: f
            for f in module.body.operations
            if f.operation.name == "func.func"
        }
        factors = Factors()
        values = follow(functions, "main", factors)
        ranks = [len(a.aval.shape) for a in (*eqn.invars, *eqn.outvars)]  # a key's words are no dimension of its
        dims = [[factors.leaves(d) for d in v[:rank]] for v, rank in zip(values, ranks, strict=True)]
        return canonical(dims, factors.kind, factors.sizes.__getitem__)


def parsed(lowered: jax.stages.Lowered) -> ir.Module:
    """A copy of the lowered program, with what is not in StableHLO spelled out, as XLA does on the way to HLO."""
    text = lowered.as_text()
    if "chlo." in text:
        hlo = lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()
        with contextlib.suppress(ir.MLIRError):  # not everything is read back
            return ir.Module.parse(mlir.hlo_to_stablehlo(hlo))
    return ir.Module.parse(text)


Values = list[list[Leaf]]


def follow(functions: dict[str, Any], name: str, factors: Factors) -> Values:
    """Joins what a call of a function joins. Returns its arguments and results."""
    body = functions[name].regions[0].blocks[0]
    factors.calls += 1
    return Call(functions, factors, factors.calls).run(body)


@dataclass(frozen=True)
class Call:
    """One call of a function."""

    functions: dict[str, Any]
    factors: Factors
    number: int

    def values(self, values: Any) -> Values:
        return [self.factors.value(v, self.number) for v in values]

    def run(self, block: Any) -> Values:
        """Joins what the operations of ``block`` join. Returns its arguments, and the values that it ends with."""
        *ops, end = block.operations
        for op in ops:
            self.operation(op.operation)
        return self.values([*block.arguments, *end.operation.operands])

    def operation(self, op: Any) -> None:
        operands, results = self.values(op.operands), self.values(op.results)
        both = [*operands, *results]
        if "sdy.sharding_rule" in op.attributes:
            self.rule(str(op.attributes["sdy.sharding_rule"]), both)
        elif op.name == "func.call":
            self.tie(both, follow(self.functions, ir.FlatSymbolRefAttr(op.attributes["callee"]).value, self.factors))
        elif op.name == "stablehlo.while":
            cond, body = (self.run(r.blocks[0]) for r in op.regions)
            self.tie(operands, cond[: len(operands)])
            self.tie([*operands, *operands], body)
            self.tie(operands, results)
        elif op.name == "stablehlo.case":
            for region in op.regions:
                self.tie(results, self.run(region.blocks[0]))
        elif op.name == "stablehlo.optimization_barrier":
            self.tie(operands, results)
        elif op.name not in FREE:
            for leaf in (x for value in both for x in value):
                self.factors.mark(leaf, "whole")

    def tie(self, a: Values, b: Values) -> None:
        """The values are the same."""
        for x, y in zip(a, b, strict=True):
            for d, e in zip(x, y, strict=True):
                self.factors.join(d, [e])

    def rule(self, text: str, values: Values) -> None:
        rule = shardy_notation.parse_attribute(text)
        leaves = {f: self.factors.new(n) for f, n in rule.sizes}
        for value, dims in zip(values, (*rule.operands, *rule.results), strict=True):
            for leaf, dim in zip(value, dims, strict=True):
                self.factors.join(leaf, [leaves[f] for f in dim])
        for f, kind in rule.kinds:
            self.factors.mark(leaves[f], KIND[kind])
