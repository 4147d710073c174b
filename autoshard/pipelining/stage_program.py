"""What one stage runs at each tick of a pipeline's schedule.

At each tick a stage runs its operation, or nothing, and sends what the next one needs. It has the weights of its
layers, slots for what it received and for what its forwards leave for their backwards, and sums over micro-batches.
What stands before the chain runs on the first stage, what stands after it on the last, with their micro-batch; what any
stage can compute is computed where it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain, Place, scan_groups
from autoshard.pipelining.exchange import exchanged
from autoshard.pipelining.operation import operate, operate_together
from autoshard.pipelining.rings import add_row, cast_as, choose, pick, planned_specs, put, split_as, summed, zeros
from autoshard.pipelining.segment import evaluate, stacked_results
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.sums_of_parts import Additions, added_up
from autoshard.pipelining.tick_tables import TickTables, tick_tables

type Values = list[Any]
type Known = dict[jx.Var, Any]


class StageProgram:
    """The loop over micro-batches as a stage runs it.

    Values of a micro-batch's parts are `Known` by the variables of the loop's body.
    """

    def __init__(self, chain: Chain, stages: Stages, additions: Additions) -> None:
        self.chain, self.stages, self.axis, self.additions = chain, stages, stages.axis, additions
        self.tables: TickTables = tick_tables(stages.schedule)
        self.specs = planned_specs(chain.body)
        self.choose = functools.partial(choose, together=stages.together)
        self.chunks = stages.schedule.chunks
        self.parts = stages.schedule.stages * self.chunks
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
        xs = [] if self.b is None else self.xs(self.b, scan_groups(self.b))
        self.residuals = list(dict.fromkeys(a for a in xs if chain.where(a)))
        read = [a for a in (*self.xs(self.f, self.f_groups), *xs) if self._is_invariant(a)]
        self.weights = list(dict.fromkeys(read))
        self.stacked = {place: stacked_results(chain, place) for place in chain.scans}
        self.split = split_backward(self.b) if self.b is not None and stages.schedule.splits_backward else None

    def xs(self, eqn: jx.JaxprEqn, groups: jx.ScanGroups) -> list[Any]:
        return eqn.invars[groups.consts + groups.carry :]

    def _per_layer(self, atom: jx.Atom) -> bool:
        return isinstance(atom, jx.Var) and atom in self.chain.per_layer

    def _is_invariant(self, atom: jx.Atom) -> bool:
        return isinstance(atom, jx.Var) and atom in self.chain.invariant

    def evaluate(self, place: Any, known: Known, results: Sequence[jx.Atom]) -> Values:
        """What ``place`` computes of ``results``."""
        return evaluate(self.chain, place, known, results, self.axis)

    def run(
        self,
        whole_names: Sequence[jx.Var],
        batch_names: Sequence[jx.Var],
        weights: Values,
        whole: Values,
        of_batch: Values,
    ) -> tuple[Values, Values, Values]:
        """This stage's sums for each of its layers; the other sums; and stacked results."""
        known, batch = dict(zip(whole_names, whole, strict=True)), dict(zip(batch_names, of_batch, strict=True))
        weights = [self.stages.own_rows(w, self.specs.get(v)) for v, w in zip(self.weights, weights, strict=True)]
        stage, tables = lax.axis_index(self.axis), self.tables
        columns = {
            name: jnp.asarray(getattr(tables, name))[:, stage]
            for name in (
                "operation", "chunk", "microbatch", "part", "activation", "gradient", "residual", "kept", "final",
            )
        }  # fmt: skip
        columns |= {"exchange": jnp.asarray(tables.exchange), "anywhere": jnp.asarray(tables.anywhere)}
        for name, routes in (("a", tables.activations), ("g", tables.gradients)):
            columns |= {f"{name}{n}": jnp.asarray(r.slot)[:, stage] for n, r in enumerate(routes)}

        branches = [self._idle, self._forward, *([self._backward] if self.b is not None else [])]
        branches += [self._weights_backward] if self.split else []
        bound = [functools.partial(b, weights=weights, whole=known, batch=batch) for b in branches]
        operates = operate_together if self.stages.together else operate

        def tick(state: dict[str, Values], row: dict[str, Any]) -> tuple[Any, None]:
            state, activation, gradient = operates(bound, tables, state, row)
            arrived = exchanged(tables, self.axis, activation, gradient, row["exchange"])
            for name, routes in zip("ag", arrived, strict=True):
                for n, values in enumerate(routes):
                    kept = zip(state[name], values, strict=True)
                    state = {**state, name: [put(ring, x, row[f"{name}{n}"]) for ring, x in kept]}
            return self._split(state), None

        state, _ = lax.scan(tick, self._split(self._empty()), columns)
        own = [added_up(self.additions.get(i, ()), x, self.axis) for i, x in zip(self.sums, state["sums"], strict=True)]
        sums, outs = ([summed(x, self.axis) for x in found] for found in (own, state["outs"]))
        return [*map(self._rows_to_store, self.layer_sums, state["layer_sums"])], sums, outs

    def _rows_to_store(self, carry: int, x: Any) -> Any:
        """Of a sum with a row for each layer, [chunk, row, ...], those that this stage stores, their parts added up."""
        eqns = self.additions.get(carry, ())
        spec = self.specs.get(self.carries[carry])
        if eqns:
            spec = eqns[-1].params["sharding"].spec if jx.is_constraint(eqns[-1]) else None
        return self.stages.rows_to_store(added_up(eqns, x.reshape(-1, *x.shape[2:]), self.axis), spec)

    def _empty(self) -> dict[str, Values]:
        """Empty slots, and sums of nothing."""
        chain, chunks, rows = self.chain, self.chunks, self.stages.rows.shape[1]
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

    def _split(self, state: dict[str, Values]) -> dict[str, Values]:
        """``state``, split as the plan has what is in it; what no constraint speaks of is left to XLA."""
        carried = {
            "a": (self._carry(self.f), 1, 0),
            "g": (self._carry(self.b), 1, 0),
            "residuals": (self.residuals, 2, 1),
            "final": (self._carry(self.f), 1, 0),
            "layer_sums": ([self.carries[i] for i in self.layer_sums], 2, 1),
            "sums": ([self.carries[i] for i in self.sums], 0, 0),
        }
        return state | {
            name: [split_as(x, self.specs.get(v), *dims) for x, v in zip(state[name], variables, strict=True)]
            for name, (variables, *dims) in carried.items()
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
            lambda: cast_as(self.evaluate(None, known, init), self._carry(eqn)),
            state["a"],
            row["activation"],
        )
        consts, xs = (
            self.evaluate(None, known, eqn.invars[: groups.consts]),
            self._own_rows(eqn, groups, known, state, weights, row),
        )
        state, out, made = self._over_layers(
            "forward", eqn, jx.regions(eqn)[0].body, eqn.outvars, consts, carry, xs, row, state, known
        )
        made |= known
        kept = self.evaluate("forward", made, self.residuals)
        rings = zip(state["residuals"], kept, strict=True)
        state = {**state, "residuals": [put(ring, x, row["residual"]) for ring, x in rings]}
        state = self._add("forward", state, made, row)
        if self.b is None:
            state = self._add_where(row["part"] == self.parts - 1, "last", state, made, row)
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

        final = {v: pick(r, row["final"]) for v, r in zip(carries, state["final"], strict=True)}
        received = [pick(ring, row["gradient"]) for ring in state["g"]]

        def on_last(sums: Any) -> tuple[Any, Values]:
            there = {**known, **final}
            begin = cast_as(self.evaluate("last", there, init), self._carry(eqn))
            return self._add("last", sums, there, row), begin

        last, sums = row["part"] == self.parts - 1, self._sums_of(state)
        sums, carry = self.choose(last, on_last, lambda s: (s, received), sums, once_in=self.chunks)
        state = state | sums
        xs = self._own_rows(eqn, groups, known, state, weights, row)
        consts = self.evaluate(None, known, eqn.invars[: groups.consts])
        if self.split is None:
            body = jx.regions(eqn)[0].body
            state, out, made = self._over_layers(
                "backward", eqn, body, eqn.outvars, consts, carry, xs, row, state, known
            )
            made |= known
            state = self._add("backward", state, made, row)
        else:
            results = [*eqn.outvars[: groups.carry], *self.split.kept]
            state, out, made = self._over_layers(
                None, eqn, self.split.of_input, results, consts, carry, xs, row, state, known
            )
            rings = zip(state["kept"], map(made.__getitem__, self.split.kept), strict=True)
            state = {**state, "kept": [put(ring, x, row["kept"]) for ring, x in rings]}
            made |= known
        return self._add_where(row["part"] == 0, "first", state, made, row), self._nothing()[0], out

    def _weights_backward(
        self, state: Any, row: Any, weights: Values, whole: Known, batch: Known
    ) -> tuple[Any, Values, Values]:
        assert self.split is not None
        known = {**whole, **{v: pick(x, row["microbatch"]) for v, x in batch.items()}}
        eqn, groups = self._transpose()
        kept = [pick(ring, row["kept"]) for ring in state["kept"]]
        xs = [*self._own_rows(eqn, groups, known, state, weights, row), *kept]
        consts = self.evaluate(None, known, eqn.invars[: groups.consts])
        results, of_weights = eqn.outvars[groups.carry :], self.split.of_weights
        state, _, made = self._over_layers("backward", eqn, of_weights, results, consts, [], xs, row, state, known)
        return self._add("backward", state, made | known, row), *self._nothing()

    def _transpose(self) -> tuple[jx.JaxprEqn, jx.ScanGroups]:
        assert self.b is not None
        return self.b, scan_groups(self.b)

    def _first_or_received(self, is_first: Any, make: Callable[[], Values], ring: Values, slot: Any) -> Values:
        return self.choose(is_first, make, lambda: [pick(r, slot) for r in ring], once_in=self.chunks)

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
            return jnp.take(self.evaluate(None, known, [a])[0], own, axis=0)

        return [rows_of(a) for a in self.xs(eqn, groups)]

    def _over_layers(
        self,
        place: Place | None,
        eqn: jx.JaxprEqn,
        body: jx.Jaxpr,
        results: Sequence[jx.Var],
        consts: Values,
        carry: Values,
        xs: Values,
        row: Any,
        state: Any,
        known: Known,
    ) -> tuple[Any, Values, Known]:
        """Runs ``body`` on the layers of this stage, in the order of the scan ``eqn``: the state with what layers add
        to the sums with a row for each, the last carry, and ``results`` of ``body``, those with a row for each layer
        only where something else reads them.

        Args:
          place: where layers add to such sums; None where they do not.
        """
        count = jnp.asarray(self.stages.layers)[row["part"]]
        even = len(set(self.stages.layers)) == 1
        carries = len(carry)
        stacked = results[carries:]
        added = [] if place is None else [self.chain.sums[i] for i in self.layer_sums]
        kept = [place is None or v in self.stacked[place] for v in stacked]

        def layer(state: tuple[Values, Values], of_layer: Any) -> tuple[tuple[Values, Values], Values]:
            (carry, sums), (index, xs) = state, of_layer

            def run(carry: Values) -> tuple[Values, Values]:
                outs = jx.replay(body, [*consts, *carry, *xs], self.axis)
                return outs[:carries], outs[carries:]

            def leave(carry: Values) -> tuple[Values, Values]:
                return carry, [zeros(jx.aval(v).shape, v) for v in body.outvars[carries:]]

            carry, ys = run(carry) if even else self.choose(index < count, run, leave, carry)
            here = {**known, **{v: jnp.expand_dims(y, 0) for v, y in zip(stacked, ys, strict=True)}}
            terms = self._terms(place, here, added)
            sums = [s if x is None else add_row(s, x, row["chunk"], index) for s, x in zip(sums, terms, strict=True)]
            return (carry, sums), [y for y, k in zip(ys, kept, strict=True) if k]

        length, begin = self.stages.rows.shape[1], [] if place is None else state["layer_sums"]
        rows = jnp.arange(length), xs
        (out, sums), ys = lax.scan(layer, (carry, begin), rows, length, reverse=eqn.params["reverse"])
        made = dict(zip(results[:carries], out, strict=True))
        made |= dict(zip([v for v, k in zip(stacked, kept, strict=True) if k], ys, strict=True))
        return (state if place is None else {**state, "layer_sums": sums}), out, made

    def _add(self, place: Any, state: Any, known: Known, row: Any) -> Any:
        """``state`` with what ``place`` adds to the sums without a row for each layer."""
        chain = self.chain
        plain = [chain.sums[i] for i in self.sums]
        stacked = [chain.body.outvars[len(self.carries) + n] for n in self.outs]
        found = self._terms(place, known, [*plain, *stacked])
        sums = [
            s if x is None else s + x.astype(s.dtype) for s, x in zip(state["sums"], found[: len(plain)], strict=True)
        ]
        outs = [
            s if x is None else s.at[row["microbatch"]].add(x.astype(s.dtype))
            for s, x in zip(state["outs"], found[len(plain) :], strict=True)
        ]
        return {**state, "sums": sums, "outs": outs}

    def _add_where(self, condition: Any, place: Any, state: Any, known: Known, row: Any) -> Any:
        """`_add` where ``condition`` holds."""
        add = functools.partial(self._add, place, known=known, row=row)
        return state | self.choose(condition, add, lambda s: s, self._sums_of(state), once_in=self.chunks)

    def _sums_of(self, state: Any) -> dict[str, Values]:
        """What `_add` reads and changes: what goes through a conditional takes XLA's default layout, which slots of
        residuals do not have, and would be copied whole."""
        return {name: state[name] for name in ("sums", "outs")}

    def _terms(self, place: Any, known: Known, results: Sequence[jx.Atom]) -> Values:
        """The terms of ``results`` that ``place`` computes, None of others."""
        where = [self.chain.where(a) for a in results]
        ours = [a for a, w in zip(results, where, strict=True) if place in w or (not w and place == "last")]
        found = iter(self.evaluate(place, known, ours))
        return [next(found) if place in w or (not w and place == "last") else None for w in where]
