"""Node costs: what a node costs under every option of the variable that decides how it runs, as arrays.

A *followed* node has an operand or result with every factor of its rule and runs as that value's spec says, so that
its cost is by the option of that value's variable (`NodeCosts.followed`, `NodeCosts.following_costs`). Any other node
has a variable of its own, whose options assign mesh axes to its factors (`NodeCosts.strategy_costs`). Either way an
option demands a spec of each operand and leaves each result with one; resharding from and to the values' own specs adds
unary and pairwise terms (`NodeCosts.cost_terms`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.cost.node_strategy import NodeStrategy, compute_seconds, node_strategy
from autoshard.cost.overlap.seconds_waited import seconds_waited
from autoshard.ir.graph import OpKind
from autoshard.ir.spec import REDUCTION_KINDS, Axes
from autoshard.search.problem import Array
from autoshard.search.spec_tables import Binding, OptionSpecs, SpecTables
from autoshard.search.value_groups import DimMap, ValueGroups


class NodeCosts:
    """Cost arrays of the nodes of one program; ``spec_tables`` holds the options of its variables."""

    def __init__(self, groups: ValueGroups, spec_tables: SpecTables) -> None:
        self.groups, self.spec_tables, self.mesh = groups, spec_tables, spec_tables.mesh
        self._strategies: dict[tuple[OpKind, tuple[Any, ...]], NodeStrategy] = groups.graph.kinds.strategies(self.mesh)
        self._elementwise: dict[OpKind, bool] = {}

    def is_elementwise(self, kind: OpKind) -> bool:
        """Whether all operands and results that are no scalars have one shape and the same factors, none reduced, and a
        part takes its share of the seconds: not where products hide some of them."""
        if kind not in self._elementwise:
            rule, coverage = kind.rule, self.groups.coverage(kind)
            dims = (*rule.operands, *rule.results)
            arrays = {(dims[p], shape) for p, shape in enumerate(kind.shapes) if shape or p >= len(rule.operands)}
            all_factors = all(dim or n == 1 for ds, shape in arrays for dim, n in zip(ds, shape, strict=True))
            whole = "whole" in {rule.kind(f) for f in rule.factors}
            separable = bool(coverage.covering) and not (coverage.reduces or rule.halos or whole)
            waits = kind.flops or kind.copied_beside is not None
            self._elementwise[kind] = len(arrays) == 1 and all_factors and separable and not waits
        return self._elementwise[kind]

    def follows(self, kind: OpKind, bindings: Iterable[Binding | None]) -> bool:
        """Whether the node follows one of its values; in a small program not if it reduces, or joins three variables:
        a choice of its own can then be cheaper."""
        coverage = self.groups.coverage(kind)
        chooses = self.groups.small_program and (coverage.reduces or len({b.variable for b in bindings if b}) > 2)
        return bool(coverage.covering) and not chooses

    def followed(self, kind: OpKind, bindings: Sequence[Binding | None]) -> dict[int, Binding]:
        """The values that the node can follow, by position, one for each variable: results before operands, then the
        largest first."""
        positions = (
            [p for p in self.groups.coverage(kind).covering if bindings[p]] if self.follows(kind, bindings) else []
        )
        found: dict[int, tuple[int, Binding]] = {}
        for p in sorted(positions, key=lambda p: (p < len(kind.rule.operands), -math.prod(kind.shapes[p]), p)):
            if (binding := bindings[p]) is not None:
                found.setdefault(binding.variable, (p, binding))
        return dict(found.values())

    def strategy(self, kind: OpKind, factor_axes: Mapping[str, Axes]) -> NodeStrategy:
        """`node_strategy`, computed once; factors that the rule keeps whole get no axes."""
        if any(k == "whole" for _, k in kind.rule.kinds):
            factor_axes = {f: axes for f, axes in factor_axes.items() if kind.rule.kind(f) != "whole"}
        key = kind, tuple(sorted(factor_axes.items()))
        if key not in self._strategies:
            self._strategies[key] = node_strategy(kind, factor_axes, self.mesh)
        return self._strategies[key]

    def strategy_costs(self, kind: OpKind, options: Sequence[Mapping[str, Axes]]) -> tuple[Array, list[OptionSpecs]]:
        """Under each of ``options`` (the axes of the factors): seconds of one execution without reshards, infinite if
        infeasible; and for each operand and result, the spec demanded or left."""
        found = [self.strategy(kind, axes) for axes in options]
        specs = [self.spec_tables.intern([s.in_specs[p] for s in found]) for p in range(len(kind.rule.operands))]
        specs += [self.spec_tables.intern([s.out_specs[p] for s in found]) for p in range(len(kind.rule.results))]
        return np.array([s.seconds(self.mesh) if s.feasible else math.inf for s in found]), specs

    def following_costs(self, kind: OpKind, p: int, variable: int, dim_map: DimMap) -> tuple[Array, list[OptionSpecs]]:
        """`strategy_costs` of a node that follows its value at position ``p``, under each option of that value's
        variable: computed for all options at once, except for convolutions, nodes with halos, and a factor that the
        value's dimension map does not cover."""
        rule = kind.rule
        dims = (*rule.operands, *rule.results)
        factor_dim = {
            dim[0]: d for dim, d in zip(dims[p], dim_map, strict=True) if dim and rule.kind(dim[0]) != "whole"
        }
        own = sum(bool(dim) and rule.kind(dim[0]) != "whole" for dim in dims[p])
        if rule.halos or kind.convolution or len(factor_dim) < own:
            return self.strategy_costs(kind, self._followed_axes(kind, p, variable, dim_map))
        maps = [tuple([factor_dim.get(dim[0], -1) if dim else -1 for dim in ds]) for ds in dims]
        partial = tuple((d, k) for f, k in rule.kinds if k in REDUCTION_KINDS and (d := factor_dim.get(f, -1)) >= 0)
        tables, operands = self.spec_tables, len(rule.operands)
        specs = [tables.value_specs(variable, m, partial if q >= operands else ()) for q, m in enumerate(maps)]
        local = [n / tables.shard_counts(s) for n, s in zip(kind.bytes, specs, strict=True)]
        parts = tables.shard_counts(tables.value_specs(variable, maps[p]))
        seconds = compute_seconds(kind, local, parts, self.mesh, _elementwise_min, _elementwise_max)
        return np.broadcast_to(seconds, len(tables.options[variable])), specs

    def _followed_axes(self, kind: OpKind, p: int, variable: int, dim_map: DimMap) -> list[dict[str, Axes]]:
        """The axes of the factors of a node that follows its value at position ``p``, for each option."""
        dims = (*kind.rule.operands, *kind.rule.results)[p]
        factor_dims = [(dim[0], d) for dim, d in zip(dims, dim_map, strict=True) if dim and d >= 0]
        return [{f: o.dims[d] for f, d in factor_dims if o.dims[d]} for o in self.spec_tables.options[variable]]

    def cost_terms(
        self,
        kind: OpKind,
        bindings: Sequence[Binding | None],
        variable: int,
        seconds: Array,
        specs: Sequence[OptionSpecs],
        executions: float,
    ) -> tuple[Array, dict[int, Array]]:
        """The terms of a node decided by ``variable``: unary, and by every other variable of its values pairwise,
        [options of variable, options of the other].

        Args:
          bindings: of each operand and result; None of values of one element.
          seconds: [options], of one execution without reshards.
          specs: for each operand and result, the spec demanded or left.
          executions: how often nodes of this kind on these values run, all together.
        """
        operands, tables = len(kind.rule.operands), self.spec_tables
        unary = executions * seconds
        pairwise: dict[int, Array] = {}
        for p, (binding, demanded) in enumerate(zip(bindings, specs, strict=True)):
            shape, bits = kind.shapes[p], kind.sent_bits[p]
            if binding is None:  # takes any spec, but a partial result is still reduced
                if p >= operands and any(s.partial for s in demanded.distinct_specs):
                    reduced = tables.intern([demanded.distinct_specs[k].reduced() for k in demanded.index])
                    unary += executions * tables.reshard_pairs(demanded, reduced, shape, bits)
                    if kind.combined_count > 1:
                        unary -= executions * tables.combined_savings(demanded, reduced, kind.combined_count).diagonal()
                continue
            own = tables.value_specs(*binding)
            src, dst = (own, demanded) if p < operands else (demanded, own)
            combined = kind.combined_count > 1 and any(s.partial for s in src.distinct_specs)
            if binding.variable == variable:
                pairs = tables.reshard_pairs(src, dst, shape, bits)
                if combined:
                    pairs = pairs - tables.combined_savings(src, dst, kind.combined_count).diagonal()
                part = tables.hideable_pairs(src, dst, kind, p)
                unary += executions * seconds_waited(pairs, kind, p, self.mesh, part)
            else:
                table = tables.reshard_matrix(src, dst, shape, bits)
                if combined:
                    table = table - tables.combined_savings(src, dst, kind.combined_count)
                table = seconds_waited(table, kind, p, self.mesh, tables.hideable_matrix(src, dst, kind, p))
                table = table.T if p < operands else table
                pairwise[binding.variable] = pairwise.get(binding.variable, 0.0) + executions * table
        return unary, pairwise


def _elementwise_min(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.minimum, arrays)


def _elementwise_max(arrays: Sequence[Any]) -> Array:
    return functools.reduce(np.maximum, arrays)
