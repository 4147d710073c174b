"""Runs a chain of layers as a pipeline: one `jax.shard_map`, manual over the axis of the stages, that scans over ticks.

At each tick a stage runs its operation, or nothing, and sends what the next one needs. A stage has the weights of its
layers, slots for what it received and for what its forwards leave for their backwards, and sums over micro-batches.
What stands before the chain runs on the first stage, what stands after it on the last, with their micro-batch; what any
stage can compute is computed where it is read. All other mesh axes stay automatic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain, scan_groups
from autoshard.pipelining.exchange import exchanged
from autoshard.pipelining.rings import cast_as, choose, pick, put, summed, without_specs, zeros
from autoshard.pipelining.segment import evaluate
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.tick_tables import TickTables, tick_tables

type Values = list[Any]
type Known = dict[jx.Var, Any]


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

    for eqn in jaxpr.eqns:
        given = [read(a) for a in eqn.invars]
        if eqn is chain.loop:
            results = _Pipeline(chain, stages, mesh).loop(given)
        else:
            results = jx.replay_equation(eqn, given, jax.sharding.get_abstract_mesh(), stages.axis)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in jaxpr.outvars]


class _Pipeline:
    """The loop over micro-batches, pipelined.

    Values of a micro-batch's parts are `Known` by the variables of the loop's body.
    """

    def __init__(self, chain: Chain, stages: Stages, mesh: Mesh) -> None:
        self.chain, self.stages, self.mesh, self.axis = chain, stages, mesh, stages.axis
        self.tables: TickTables = tick_tables(stages.schedule)
        self.parts = stages.schedule.stages * stages.schedule.chunks
        groups, body = chain.groups, chain.body
        self.consts = [*body.constvars, *body.invars[: groups.consts]]
        self.carries = body.invars[groups.consts : groups.consts + groups.carry]
        self.batch = body.invars[groups.consts + groups.carry :]
        self.stacked_out = list(enumerate(body.outvars[groups.carry :]))
        self.f, self.b = chain.forward, chain.backward
        self.f_groups = scan_groups(self.f)
        self.sums = [i for i in chain.sums if not self._per_layer(chain.sums[i])]
        self.layer_sums = [i for i in chain.sums if self._per_layer(chain.sums[i])]
        self.outs = [n for n, v in self.stacked_out if chain.where(v)]
        xs = [] if self.b is None else self._xs(self.b, scan_groups(self.b))
        self.residuals = list(dict.fromkeys(a for a in xs if chain.where(a)))
        stacked = [a for a in (*self._xs(self.f, self.f_groups), *xs) if self._is_invariant(a)]
        self.weights = list(dict.fromkeys(stacked))
        self.split = split_backward(self.b) if self.b is not None and stages.schedule.splits_backward else None

    def _xs(self, eqn: jx.JaxprEqn, groups: jx.ScanGroups) -> list[Any]:
        return eqn.invars[groups.consts + groups.carry :]

    def _per_layer(self, atom: jx.Atom) -> bool:
        return isinstance(atom, jx.Var) and atom in self.chain.per_layer

    def _is_invariant(self, atom: jx.Atom) -> bool:
        return isinstance(atom, jx.Var) and atom in self.chain.invariant

    # --- around the pipeline -------------------------------------------------------------------------------------

    def loop(self, operands: Values) -> Values:
        """The results of the loop."""
        groups = self.chain.groups
        known = dict(zip(self.consts, [*self.chain.body.consts, *operands[: groups.consts]], strict=True))
        init = operands[groups.consts : groups.consts + groups.carry]
        batch = dict(zip(self.batch, operands[groups.consts + groups.carry :], strict=True))
        read_inside = self._read_inside()
        known.update(zip(read_inside, self._evaluate(None, known, read_inside), strict=True))
        ends, recurrent, easy = self._recurrences(known, init, batch)
        weights = [known[v] for v in self.weights]
        whole = {v: known[v] for v in read_inside if v not in self.weights or self._read_whole(v)}
        of_batch = {**batch, **recurrent}
        split, rest = PartitionSpec(self.axis), PartitionSpec()
        run = jax.shard_map(
            functools.partial(self._on_stage, [*whole], [*of_batch]),
            mesh=self.mesh,
            in_specs=(split if self.stages.splits_layers else rest, rest, rest),
            out_specs=(split if self.stages.in_order else rest, rest, rest),
            axis_names={self.axis},
            check_vma=False,
        )
        layer_sums, sums, outs = run(weights, [*whole.values()], [*of_batch.values()])
        found = dict(zip(self.layer_sums, layer_sums, strict=True))
        found |= dict(zip(self.sums, sums, strict=True))
        carries = [ends[i] if i in ends else init[i] + found[i] for i in range(groups.carry)]
        stacked = dict(zip(self.outs, outs, strict=True))
        return [*carries, *(stacked[n] if n in stacked else easy[n] for n, _ in self.stacked_out)]

    def _read_inside(self) -> list[jx.Var]:
        """The variables, the same in every iteration, that something else reads."""
        invariant, body = self.chain.invariant, self.chain.body
        eqns = [e for e in body.eqns if not invariant.issuperset(e.outvars) or e in (self.f, self.b)]
        read = [*(a for e in eqns for a in e.invars), *self.chain.sums.values(), *body.outvars]
        return [*dict.fromkeys(a for a in read if isinstance(a, jx.Var) and a in invariant)]

    def _read_whole(self, var: jx.Var) -> bool:
        """Whether a value with one row a layer is read otherwise too."""
        for eqn in self.chain.body.eqns:
            xs = self._xs(eqn, scan_groups(eqn)) if eqn in (self.f, self.b) else []
            if eqn.invars.count(var) > xs.count(var) and var not in self.chain.invariant.intersection(eqn.outvars):
                return True
        return False

    def _recurrences(self, known: Known, init: Values, batch: Known) -> tuple[dict[int, Any], Known, dict[int, Any]]:
        """What any stage can compute of all micro-batches: the last value of carries that no stage adds to, their
        values before each micro-batch, and stacked results."""
        carried = sorted(self.chain.recurrent)
        easy = [n for n, v in self.stacked_out if not self.chain.where(v)]
        if not carried and not easy:
            return {}, {}, {}

        def step(carry: Values, xs: Values) -> tuple[Values, tuple[Values, Values]]:
            now = {
                **known,
                **dict(zip(batch, xs, strict=True)),
                **{self.carries[i]: x for i, x in zip(carried, carry, strict=True)},
            }
            body = self.chain.body.outvars
            new = self._evaluate(None, now, [body[i] for i in carried])
            return new, (carry, self._evaluate(None, now, [body[len(self.carries) + n] for n in easy]))

        last, (before, stacked) = lax.scan(
            step, [init[i] for i in carried], [*batch.values()], self.chain.groups.length
        )
        values = {self.carries[i]: x for i, x in zip(carried, before, strict=True)}
        return dict(zip(carried, last, strict=True)), values, dict(zip(easy, stacked, strict=True))

    def _evaluate(self, place: Any, known: Known, results: Sequence[jx.Atom]) -> Values:
        return evaluate(self.chain, place, known, results, self.axis)

    # --- on one stage --------------------------------------------------------------------------------------------

    def _on_stage(
        self,
        whole_names: Sequence[jx.Var],
        batch_names: Sequence[jx.Var],
        weights: Values,
        whole: Values,
        of_batch: Values,
    ) -> tuple[Values, Values, Values]:
        """This stage's sums for each of its layers; the other sums; and stacked results."""
        known, batch = dict(zip(whole_names, whole, strict=True)), dict(zip(batch_names, of_batch, strict=True))
        weights = [self.stages.own_rows(w) for w in weights]
        stage, tables = lax.axis_index(self.axis), self.tables
        columns = {
            name: jnp.asarray(getattr(tables, name))[:, stage]
            for name in (
                "operation", "chunk", "microbatch", "part", "activation", "gradient", "residual", "kept", "final",
            )
        }  # fmt: skip
        columns["exchange"] = jnp.asarray(tables.exchange)
        for name, routes in (("a", tables.activations), ("g", tables.gradients)):
            columns |= {f"{name}{n}": jnp.asarray(r.slot)[:, stage] for n, r in enumerate(routes)}

        def tick(state: dict[str, Values], row: dict[str, Any]) -> tuple[Any, None]:
            branches = [self._idle, self._forward, *([self._backward] if self.b is not None else [])]
            branches += [self._weights_backward] if self.split else []
            runs = [functools.partial(b, weights=weights, whole=known, batch=batch) for b in branches]
            opened = [lambda *xs, run=run: without_specs(run(*xs)) for run in runs]
            state, activation, gradient = lax.switch(row["operation"], opened, state, row)
            arrived = exchanged(tables, self.axis, activation, gradient, row["exchange"])
            for name, routes in zip("ag", arrived, strict=True):
                for n, values in enumerate(routes):
                    kept = zip(state[name], values, strict=True)
                    state = {**state, name: [put(ring, x, row[f"{name}{n}"]) for ring, x in kept]}
            return state, None

        state, _ = lax.scan(tick, self._empty(), columns)
        totals = [[summed(x, self.axis) for x in state[name]] for name in ("sums", "outs")]
        return [self.stages.by_layer(x) for x in state["layer_sums"]], totals[0], totals[1]

    def _empty(self) -> dict[str, Values]:
        """Empty slots, and sums of nothing."""
        chain, chunks, rows = self.chain, self.stages.schedule.chunks, self.stages.rows.shape[1]
        slots = self.tables.slots

        def ring(count: int, variables: Sequence[Any], *leading: int) -> Values:
            return [zeros((count, *leading, *jx.aval(v).shape[len(leading) :]), v) for v in variables]

        f_carry, b_carry = self._carry(self.f), self._carry(self.b)
        length = chain.groups.length
        return {
            "a": ring(slots[0], f_carry),
            "g": ring(slots[1], b_carry),
            "residuals": ring(slots[2], self.residuals, rows),
            "kept": ring(slots[3], [jx.stacked_var(v, rows) for v in self.split.kept]) if self.split else [],
            "final": ring(slots[4], f_carry),
            "layer_sums": [
                zeros((chunks, rows, *jx.aval(self.carries[i]).shape[1:]), self.carries[i]) for i in self.layer_sums
            ],
            "sums": [zeros(jx.aval(self.carries[i]).shape, self.carries[i]) for i in self.sums],
            "outs": [
                zeros((length, *jx.aval(v).shape), v)
                for v in (chain.body.outvars[len(self.carries) + n] for n in self.outs)
            ],
        }

    def _carry(self, eqn: jx.JaxprEqn | None) -> list[jx.Var]:
        """What a scan over layers carries, as the variables of its last values."""
        return [] if eqn is None else eqn.outvars[: scan_groups(eqn).carry]

    def _idle(self, state: Any, row: Any, **_: Any) -> tuple[Any, Values, Values]:
        return state, *self._nothing()

    def _nothing(self) -> tuple[Values, Values]:
        sent = self._carry(self.f), self._carry(self.b)
        return tuple([zeros(jx.aval(v).shape, v) for v in side] for side in sent)  # pyright: ignore[reportReturnType]

    def _forward(self, state: Any, row: Any, weights: Values, whole: Known, batch: Known) -> tuple[Any, Values, Values]:
        known = {**whole, **{v: pick(x, row["microbatch"]) for v, x in batch.items()}}
        groups, eqn = self.f_groups, self.f
        init = eqn.invars[groups.consts : groups.consts + groups.carry]
        carry = self._first_or_received(
            row["part"] == 0,
            lambda: cast_as(self._evaluate(None, known, init), self._carry(eqn)),
            state["a"],
            row["activation"],
        )
        consts, xs = (
            self._evaluate(None, known, eqn.invars[: groups.consts]),
            self._own_rows(eqn, groups, known, state, weights, row),
        )
        outs = self._over_layers(eqn, jx.regions(eqn)[0].body, groups.carry, consts, carry, xs, row)
        made = dict(zip(eqn.outvars, outs, strict=True))
        kept = self._evaluate("forward", {**known, **made}, self.residuals)
        rings = zip(state["residuals"], kept, strict=True)
        state = {**state, "residuals": [put(ring, x, row["residual"]) for ring, x in rings]}
        out = outs[: groups.carry]
        made |= known
        state = self._add("forward", state, made, row)
        if self.b is None:
            end = row["part"] == self.parts - 1
            state = choose(end, lambda s: self._add("last", s, made, row), lambda s: s, state)
        else:
            finals = zip(state["final"], out, strict=True)
            state = {**state, "final": [put(ring, x, row["final"]) for ring, x in finals]}
        return state, out, self._nothing()[1]

    def _backward(
        self, state: Any, row: Any, weights: Values, whole: Known, batch: Known
    ) -> tuple[Any, Values, Values]:
        known = {**whole, **{v: pick(x, row["microbatch"]) for v, x in batch.items()}}
        eqn, groups = self._transpose()
        init, carries = eqn.invars[groups.consts : groups.consts + groups.carry], self._carry(self.f)

        def on_last(state: Any) -> tuple[Any, Values]:
            final = {v: pick(r, row["final"]) for v, r in zip(carries, state["final"], strict=True)}
            there = {**known, **final}
            begin = cast_as(self._evaluate("last", there, init), self._carry(eqn))
            return self._add("last", state, there, row), begin

        def elsewhere(state: Any) -> tuple[Any, Values]:
            return state, [pick(ring, row["gradient"]) for ring in state["g"]]

        state, carry = choose(row["part"] == self.parts - 1, on_last, elsewhere, state)
        xs = self._own_rows(eqn, groups, known, state, weights, row)
        consts, count = self._evaluate(None, known, eqn.invars[: groups.consts]), groups.carry
        if self.split is None:
            outs = self._over_layers(eqn, jx.regions(eqn)[0].body, count, consts, carry, xs, row)
            made = {**known, **dict(zip(eqn.outvars, outs, strict=True))}
            state = self._add("backward", state, made, row)
        else:
            outs = self._over_layers(eqn, self.split.of_input, count, consts, carry, xs, row)
            made = {**known, **dict(zip(eqn.outvars[:count], outs[:count], strict=True))}
            rings = zip(state["kept"], outs[count:], strict=True)
            state = {**state, "kept": [put(ring, x, row["kept"]) for ring, x in rings]}
        state = choose(row["part"] == 0, lambda s: self._add("first", s, made, row), lambda s: s, state)
        return state, self._nothing()[0], outs[:count]

    def _weights_backward(
        self, state: Any, row: Any, weights: Values, whole: Known, batch: Known
    ) -> tuple[Any, Values, Values]:
        assert self.split is not None
        known = {**whole, **{v: pick(x, row["microbatch"]) for v, x in batch.items()}}
        eqn, groups = self._transpose()
        kept = [pick(ring, row["kept"]) for ring in state["kept"]]
        xs = [*self._own_rows(eqn, groups, known, state, weights, row), *kept]
        consts = self._evaluate(None, known, eqn.invars[: groups.consts])
        outs = self._over_layers(eqn, self.split.of_weights, 0, consts, [], xs, row)
        made = {**known, **dict(zip(eqn.outvars[groups.carry :], outs, strict=True))}
        return self._add("backward", state, made, row), *self._nothing()

    def _transpose(self) -> tuple[jx.JaxprEqn, jx.ScanGroups]:
        assert self.b is not None
        return self.b, scan_groups(self.b)

    def _first_or_received(self, is_first: Any, make: Callable[[], Values], ring: Values, slot: Any) -> Values:
        return choose(is_first, make, lambda: [pick(r, slot) for r in ring])

    def _own_rows(
        self, eqn: jx.JaxprEqn, groups: jx.ScanGroups, known: Known, state: Any, weights: Values, row: Any
    ) -> Values:
        """What a scan over layers reads of each of those of this stage."""
        mine = {v: pick(w, row["chunk"]) for v, w in zip(self.weights, weights, strict=True)}
        if eqn is self.b:
            mine |= {v: pick(r, row["residual"]) for v, r in zip(self.residuals, state["residuals"], strict=True)}
        own = jnp.asarray(self.stages.rows)[row["part"]]

        def rows_of(a: jx.Atom) -> Any:
            if isinstance(a, jx.Var) and a in mine:
                return mine[a]
            return jnp.take(self._evaluate(None, known, [a])[0], own, axis=0)

        return [rows_of(a) for a in self._xs(eqn, groups)]

    def _over_layers(
        self, eqn: jx.JaxprEqn, body: jx.Jaxpr, carries: int, consts: Values, carry: Values, xs: Values, row: Any
    ) -> Values:
        """The results of ``body`` on the layers of this stage, in the order of the scan ``eqn``.

        Args:
          carries: how many results of ``body`` are its carry.
        """
        count = jnp.asarray(self.stages.layers)[row["part"]]
        even = len(set(self.stages.layers)) == 1

        def layer(carry: Values, row: Any) -> tuple[Values, Values]:
            index, xs = row

            def run(carry: Values) -> tuple[Values, Values]:
                outs = jx.replay(body, [*consts, *carry, *xs], self.axis)
                return outs[:carries], outs[carries:]

            def leave(carry: Values) -> tuple[Values, Values]:
                return carry, [zeros(jx.aval(v).shape, v) for v in body.outvars[carries:]]

            return run(carry) if even else choose(index < count, run, leave, carry)

        length = self.stages.rows.shape[1]
        out, ys = lax.scan(layer, carry, (jnp.arange(length), xs), length, reverse=eqn.params["reverse"])
        return [*out, *ys]

    def _add(self, place: Any, state: Any, known: Known, row: Any) -> Any:
        """``state`` with what ``place`` adds to the sums."""
        chain = self.chain
        layered, plain = ([chain.sums[i] for i in side] for side in (self.layer_sums, self.sums))
        stacked = [chain.body.outvars[len(self.carries) + n] for n in self.outs]
        found = self._terms(place, known, [*layered, *plain, *stacked])
        a, b = len(layered), len(layered) + len(plain)
        layer_sums = [
            s if x is None else s.at[row["chunk"]].add(x.astype(s.dtype))
            for s, x in zip(state["layer_sums"], found[:a], strict=True)
        ]
        sums = [s if x is None else s + x.astype(s.dtype) for s, x in zip(state["sums"], found[a:b], strict=True)]
        outs = [
            s if x is None else s.at[row["microbatch"]].add(x.astype(s.dtype))
            for s, x in zip(state["outs"], found[b:], strict=True)
        ]
        return {**state, "layer_sums": layer_sums, "sums": sums, "outs": outs}

    def _terms(self, place: Any, known: Known, results: Sequence[jx.Atom]) -> Values:
        """The terms of ``results`` that ``place`` computes, None of others."""
        where = [self.chain.where(a) for a in results]
        ours = [a for a, w in zip(results, where, strict=True) if place in w or (not w and place == "last")]
        found = iter(self._evaluate(place, known, ours))
        return [next(found) if place in w or (not w and place == "last") else None for w in where]
