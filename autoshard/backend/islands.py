"""What a lowered plan runs on shards: an equation in its local form, or several together, as a `jax.shard_map`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard import jaxpr as jx
from autoshard.backend.on_shards import extend_with_halos, product_in_ring, reduce_partials
from autoshard.backend.rings.kernel_rings import WeightRing, gathered_in_turn, reduced_in_turn
from autoshard.backend.rings.operand_gathers import Bundle, Change
from autoshard.backend.rings.ring import Ring, gathered_products
from autoshard.cost.node_strategy import local_algorithm
from autoshard.ir.graph import OpKind
from autoshard.ir.rule import halo_axes
from autoshard.ir.rule_registry import Rules
from autoshard.ir.spec import Spec
from autoshard.machine.mesh import LogicalMesh
from autoshard.plan.decisions import Island


@dataclass(frozen=True)
class Islands:
    """The islands of a plan."""

    by_node: Mapping[int, tuple[OpKind, Island]]
    kernels: Set[int]
    """Nodes whose products run in a local form."""
    weight_rings: Mapping[int, Sequence[WeightRing]]
    """Weights that kernels gather in rings, by node."""
    sum_rings: Mapping[int, Ring]
    """Those in which products are summed, by node."""
    mesh: Mesh
    logical_mesh: LogicalMesh
    """The mesh with devices, and with links."""
    rules: Rules

    def alone(self, eqn: jx.JaxprEqn, invars: list[jx.Var | jx.Literal], node: int) -> list[jx.JaxprEqn]:
        """``eqn`` as a `jax.shard_map` of its local form, over all axes but those with a halo left to XLA; a gather or
        a scatter that has none on shards."""
        kind, island = self.by_node[node]
        rule, local, sizes = kind.rule, kind.rule.local, self.mesh.shape
        left_to_xla = halo_axes(rule, island.in_specs, island.out_specs)
        if left_to_xla == set(sizes):
            return [eqn.replace(invars=invars)]
        rings, read = self.weight_rings.get(node, ()), list(island.in_specs)
        for one in rings:
            read[one.operand] = one.before
        in_specs, out_specs = (
            tuple(s.without(left_to_xla).partition_spec() for s in side) for side in (read, island.reduced_specs)
        )
        placed = (*island.in_specs, *island.out_specs) if local is not None and local.takes_specs else island.axes
        indexed = self._indexed(eqn, island) if local is None else None
        same_op = jx.bind_on_shards(
            eqn,
            [
                [n // math.prod(sizes[a] for a in axes) for n, axes in zip(jx.aval(v).shape, s.dims, strict=True)]
                for v, s in zip(eqn.outvars, island.out_specs, strict=True)
            ],
        )

        algorithm = local_algorithm(kind, island.in_specs, island.out_specs, self.logical_mesh)
        ring = self.sum_rings.get(node)
        in_turn = node in self.kernels and self.logical_mesh.hardware.blocking_reduce_scatters

        def on_shards(*operands: Any) -> tuple[Any, ...]:
            operands = extend_with_halos(gathered_in_turn(operands, rings), rule, island, sizes)
            if ring is not None:
                return (product_in_ring(ring, same_op, operands, island.reduced_specs[0], self.logical_mesh),)
            if local is None or local.fun is None:
                out = (indexed or same_op)(*operands)
            else:
                out = (local.fun if algorithm is None else algorithm.fun)(placed, *operands)
            results = out if isinstance(out, tuple | list) else (out,)
            if in_turn:
                return reduced_in_turn(results, island.out_specs, island.reduced_specs, self.logical_mesh)
            specs = zip(results, island.out_specs, island.reduced_specs, strict=True)
            return tuple(reduce_partials(x, spec, reduced, self.logical_mesh) for x, spec, reduced in specs)

        mapped = jax.shard_map(
            on_shards,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
            axis_names=set(sizes) - left_to_xla,
        )
        return jx.splice(mapped, eqn, invars)

    def _indexed(self, eqn: jx.JaxprEqn, island: Island) -> Callable[..., Any] | None:
        """A gather or a scatter on shards; None of another operation."""
        split, traits = island.in_specs[0].dims, self.rules.traits(eqn.primitive)
        if traits.gathers:
            return jx.gather_on_shards(eqn, split)
        if traits.scatters:
            return jx.scatter_on_shards(eqn, split, [a for a, _ in island.out_specs[0].partial])
        return None

    def in_one_ring(
        self,
        bundle: Bundle,
        nodes: Sequence[int],
        operands: Sequence[Sequence[jx.Atom]],
        change: Change,
        whole: jx.Var | None,
    ) -> list[jx.JaxprEqn]:
        """Products of these nodes that gather one operand in one ring.

        Args:
          change: the specs of the operand.
          whole: what it is as gathered, if others read it too.
        """
        islands = [self.by_node[n][1] for n in nodes]
        ops = [jx.bind_on_shards(eqn, []) for eqn in bundle.eqns]
        ins = [
            [change.before if i == ring.operand else s for i, s in enumerate(island.in_specs)]
            for island, ring in zip(islands, bundle.rings, strict=True)
        ]

        def on_shards(each: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
            alone = [lambda *parts, op=op: op(*parts)[0] for op in ops]
            made, gathered = gathered_products(bundle.rings, alone, each, keep=whole is not None)
            results = [
                reduce_partials(x, island.out_specs[0], island.reduced_specs[0], self.logical_mesh)
                for x, island in zip(made, islands, strict=True)
            ]
            return tuple(results) if whole is None else (*results, gathered)

        outvars, outs = [eqn.outvars[0] for eqn in bundle.eqns], [island.reduced_specs[0] for island in islands]
        if whole is not None:
            outvars, outs = [*outvars, whole], [*outs, change.after]
        return self.together(on_shards, bundle.eqns[0].replace(outvars=outvars), operands, ins, outs)

    def together(
        self,
        on_shards: Callable[[Sequence[Sequence[Any]]], tuple[Any, ...]],
        like: jx.JaxprEqn,
        operands: Sequence[Sequence[jx.Atom]],
        in_specs: Sequence[Sequence[Spec]],
        out_specs: Sequence[Spec],
    ) -> list[jx.JaxprEqn]:
        """Several equations as one `jax.shard_map`, of the shards of the operands of each, with the results of
        ``like``."""
        ends = list(itertools.accumulate(map(len, operands)))

        def flat(*shards: Any) -> tuple[Any, ...]:
            return on_shards([shards[end - len(atoms) : end] for end, atoms in zip(ends, operands, strict=True)])

        mapped = jax.shard_map(
            flat,
            mesh=self.mesh,
            in_specs=tuple(s.partition_spec() for specs in in_specs for s in specs),
            out_specs=tuple(s.partition_spec() for s in out_specs),
            check_vma=False,
        )
        return jx.splice(mapped, like, [a for atoms in operands for a in atoms])
