"""Runs a chain of layers as a pipeline: one `jax.shard_map`, manual over the axis of the stages, that scans over ticks.

`stage_program` has what a stage runs. Here is what surrounds it: what is the same in every micro-batch is computed
before, and recurrences that no layer takes part in. All other mesh axes stay automatic.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain, scan_groups
from autoshard.pipelining.stage_program import Known, StageProgram, Values
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.sums_of_parts import added_up, additions, sum_after


def pipelined_jaxpr(jaxpr: jx.Jaxpr, chain: Chain, stages: Stages, mesh: Mesh) -> jx.Jaxpr:
    """``jaxpr`` with its loop over micro-batches as a pipeline over ``mesh``; ``chain``: of ``jaxpr``."""
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in map(jx.aval, jaxpr.invars)]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.make_jaxpr(lambda *xs: run_pipelined(jaxpr, chain, stages, mesh, xs))(*shapes)


def run_pipelined(jaxpr: jx.Jaxpr, chain: Chain, stages: Stages, mesh: Mesh, operands: Sequence[Any]) -> Values:
    """The results of ``jaxpr`` on flat ``operands``, with its loop over micro-batches as a pipeline over ``mesh``.

    To be called while `jax.jit` traces, with the abstract mesh of ``mesh`` as the context's.

    Args:
      chain: of ``jaxpr``.
    """
    values: Known = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    values.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: jx.Atom) -> Any:
        return atom.val if isinstance(atom, jx.Literal) else values[atom]

    added = additions(jaxpr, chain)
    done = {eqn for eqns in added.values() for eqn in eqns}
    for eqn in jaxpr.eqns:
        if eqn in done:
            continue
        given, results = [read(a) for a in eqn.invars], eqn.outvars
        if eqn is chain.loop:
            found = _Pipeline(StageProgram(chain, stages, added), mesh).loop(given)
            results = [sum_after(chain, added, i) if i in added else v for i, v in enumerate(results)]
        else:
            found = jx.replay_equation(eqn, given, jax.sharding.get_abstract_mesh(), stages.axis)
        values.update(zip(results, found, strict=True))
    return [read(a) for a in jaxpr.outvars]


class _Pipeline:
    """The loop over micro-batches, pipelined."""

    def __init__(self, program: StageProgram, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        self.chain, self.stages = program.chain, program.stages

    def loop(self, operands: Values) -> Values:
        """The results of the loop."""
        groups = self.chain.groups
        known = dict(zip(self.program.consts, [*self.chain.body.consts, *operands[: groups.consts]], strict=True))
        init = operands[groups.consts : groups.consts + groups.carry]
        batch = dict(zip(self.program.batch, operands[groups.consts + groups.carry :], strict=True))
        read_inside = self._read_inside()
        known.update(zip(read_inside, self.program.evaluate(None, known, read_inside), strict=True))
        ends, recurrent, easy = self._recurrences(known, init, batch)
        weights = [known[v] for v in self.program.weights]
        whole = {v: known[v] for v in read_inside if v not in self.program.weights or self._read_whole(v)}
        of_batch = {**batch, **recurrent}
        split, rest = PartitionSpec(self.stages.axis), PartitionSpec()
        run = jax.shard_map(
            functools.partial(self.program.run, [*whole], [*of_batch]),
            mesh=self.mesh,
            in_specs=(split if self.stages.splits_layers else rest, rest, rest),
            out_specs=(split, rest, rest),
            axis_names={self.stages.axis},
            check_vma=False,
        )
        layer_sums, sums, outs = run(weights, [*whole.values()], [*of_batch.values()])
        found = dict(zip(self.program.layer_sums, map(self.stages.by_layer, layer_sums), strict=True))
        found |= dict(zip(self.program.sums, sums, strict=True))
        before = [self._before(i, x) for i, x in enumerate(init)]
        carries = [ends[i] if i in ends else before[i] + found[i] for i in range(groups.carry)]
        stacked = dict(zip(self.program.outs, outs, strict=True))
        return [*carries, *(stacked[n] if n in stacked else easy[n] for n, _ in self.program.stacked_out)]

    def _before(self, carry: int, x: Any) -> Any:
        """The initial value of a carry, its parts added up: zeros, of which nothing has to move."""
        eqns = [e for e in self.program.additions.get(carry, ()) if not jx.is_constraint(e)]
        return added_up(eqns, x, self.stages.axis)

    def _read_inside(self) -> list[jx.Var]:
        """The variables, the same in every iteration, that something else reads."""
        invariant, body = self.chain.invariant, self.chain.body
        eqns = [e for e in body.eqns if not invariant.issuperset(e.outvars) or e in (self.program.f, self.program.b)]
        read = [*(a for e in eqns for a in e.invars), *self.chain.sums.values(), *body.outvars]
        return [*dict.fromkeys(a for a in read if isinstance(a, jx.Var) and a in invariant)]

    def _read_whole(self, var: jx.Var) -> bool:
        """Whether a value with one row a layer is read otherwise too."""
        for eqn in self.chain.body.eqns:
            xs = self.program.xs(eqn, scan_groups(eqn)) if eqn in (self.program.f, self.program.b) else []
            if eqn.invars.count(var) > xs.count(var) and var not in self.chain.invariant.intersection(eqn.outvars):
                return True
        return False

    def _recurrences(self, known: Known, init: Values, batch: Known) -> tuple[dict[int, Any], Known, dict[int, Any]]:
        """What any stage can compute of all micro-batches: the last value of carries that no stage adds to, their
        values before each micro-batch, and stacked results."""
        carried = sorted(self.chain.recurrent)
        easy = [n for n, v in self.program.stacked_out if not self.chain.where(v)]
        if not carried and not easy:
            return {}, {}, {}

        def step(carry: Values, xs: Values) -> tuple[Values, tuple[Values, Values]]:
            now = {
                **known,
                **dict(zip(batch, xs, strict=True)),
                **{self.program.carries[i]: x for i, x in zip(carried, carry, strict=True)},
            }
            body = self.chain.body.outvars
            new = self.program.evaluate(None, now, [body[i] for i in carried])
            return new, (carry, self.program.evaluate(None, now, [body[len(self.program.carries) + n] for n in easy]))

        last, (before, stacked) = lax.scan(
            step, [init[i] for i in carried], [*batch.values()], self.chain.groups.length
        )
        values = {self.program.carries[i]: x for i, x in zip(carried, before, strict=True)}
        return dict(zip(carried, last, strict=True)), values, dict(zip(easy, stacked, strict=True))
