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
from jax.sharding import PartitionSpec

from autoshard import jaxpr as jx
from autoshard.pipelining.chain import Chain, Place, scan_groups
from autoshard.pipelining.exchange import exchanged
from autoshard.pipelining.operation import operate, operate_together, rows_of_ticks
from autoshard.pipelining.rings import (
    Rings,
    Rows,
    add_row,
    added_at,
    cast_as,
    choose,
    laid_out,
    on_shards,
    pick,
    planned_specs,
    put,
    put_row,
    sent_specs,
    split_as,
    summed,
    zeros,
)
from autoshard.pipelining.segment import evaluate, stacked_results
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.sums_of_parts import Additions, added_up, spec_after
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
        if self.split:
            self.specs = {**planned_specs(self.split.of_input), **self.specs}
        self.sent_specs = sent_specs([*self._carry(self.f), *self._carry(self.b)], self.specs)
        self.held: dict[str, tuple[Sequence[jx.Var], int, int, bool]] = {
            "residual": (self.residuals, 2, 1, True),
            "kept": (self.split.kept if self.split else (), 2, 0, True),
            "final": (self._carry(self.f), 1, 0, True),
            "layer_sums": ([self.carries[i] for i in self.layer_sums], 2, 1, False),
            "sums": ([self.carries[i] for i in self.sums], 0, 0, False),
        }
        """What a stage holds from tick to tick: variables, and how it is split (`split_as`)."""

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
        branches = [self._idle, self._forward, *([self._backward] if self.b is not None else [])]
        branches += [self._weights_backward] if self.split else []
        bound = [functools.partial(b, weights=weights, whole=known, batch=batch) for b in branches]
        operates = operate_together if self.stages.together else operate

        def tick(state: dict[str, Values], row: dict[str, Any]) -> tuple[Any, None]:
            state, activation, gradient = operates(bound, tables, state, row)
            activation, gradient = self._on_shards(activation, self.f), self._on_shards(gradient, self.b)
            arrived = exchanged(tables, self.axis, activation, gradient, row["exchange"])
            for name, routes in zip("ag", arrived, strict=True):
                for n, values in enumerate(routes):
                    kept = zip(state[name], values, strict=True)
                    state = {**state, name: [put(ring, x, row[f"{name}{n}"]) for ring, x in kept]}
            return self._split(state), None

        state, _ = lax.scan(tick, self._split(self._empty()), rows_of_ticks(tables, stage))
        sums = [
            summed(added_up(self.additions.get(i, ()), x, self.axis), self.axis, self._spec_after(i))
            for i, x in zip(self.sums, state["sums"], strict=True)
        ]
        outs = [summed(x, self.axis) for x in state["outs"]]
        return [*map(self._rows_to_store, self.layer_sums, state["layer_sums"])], sums, outs

    def _spec_after(self, carry: int) -> PartitionSpec | None:
        """How the plan splits a sum once its parts are added up, if it says so."""
        return spec_after(self.additions.get(carry, ()), self.specs.get(self.carries[carry]))

    def _rows_to_store(self, carry: int, x: Any) -> Any:
        """Of a sum with a row for each layer, [chunk, row, ...], those that this stage stores, their parts added up."""
        x = added_up(self.additions.get(carry, ()), x.reshape(-1, *x.shape[2:]), self.axis)
        return self.stages.rows_to_store(x, self._spec_after(carry))

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
            "residual": ring(slots[2], self.residuals, rows),
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
        """``state``, or a part of it, split as the plan has what it holds; what no constraint speaks of is left to
        XLA."""
        sent = {"a": self.f, "g": self.b}
        state = state | {name: self._on_shards(state[name], eqn, 1) for name, eqn in sent.items() if name in state}
        return state | {
            name: self._as_held(split_as, name, values) for name, values in state.items() if name in self.held
        }

    def _on_shards(self, values: Values, eqn: jx.JaxprEqn | None, added: int = 0) -> Values:
        """What stages send of what the scan ``eqn`` carries, or slots of it, split as finely as it can be."""
        return [on_shards(x, self.sent_specs.get(v), added) for x, v in zip(values, self._carry(eqn), strict=True)]

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
        carry = self.choose(
            row["part"] == 0,
            lambda: self._as_planned(cast_as(self.evaluate(None, known, init), self._carry(eqn)), eqn),
            lambda: [pick(ring, row["activation"]) for ring in state["a"]],
            once_in=self.chunks,
        )
        consts, xs = (
            self.evaluate(None, known, eqn.invars[: groups.consts]),
            self._own_rows(eqn, groups, known, weights, row),
        )
        state, out, made = self._over_layers(
            "forward", eqn, jx.regions(eqn)[0].body, eqn.outvars, consts, carry, xs, row, state, known, self.residuals
        )
        state = self._add("forward", state, made | known, row)
        if self.b is None:
            state = self._add_where(row["part"] == self.parts - 1, "last", state, made | known, row)
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

        ends = self._as_planned([pick(r, row["final"]) for r in state["final"]], self.f)
        final = dict(zip(carries, ends, strict=True))
        received = [pick(ring, row["gradient"]) for ring in state["g"]]

        def on_last(sums: Any) -> tuple[Any, Values]:
            there = {**known, **final}
            sums, begin = self._added("last", sums, there, row, init)
            return sums, self._as_planned(cast_as(begin, self._carry(eqn)), eqn)

        last, sums = row["part"] == self.parts - 1, self._sums_of(state)
        sums, carry = self.choose(last, on_last, lambda s: (s, received), sums, once_in=self.chunks)
        state = state | sums
        xs = self._own_rows(eqn, groups, known, weights, row)
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
                None, eqn, self.split.of_input, results, consts, carry, xs, row, state, known, self.split.kept
            )
            made |= known
        return self._add_where(row["part"] == 0, "first", state, made, row), self._nothing()[0], out

    def _weights_backward(
        self, state: Any, row: Any, weights: Values, whole: Known, batch: Known
    ) -> tuple[Any, Values, Values]:
        assert self.split is not None
        known = {**whole, **{v: pick(x, row["microbatch"]) for v, x in batch.items()}}
        eqn, groups = self._transpose()
        kept = [Rows(("kept", n), row["kept"], self.specs.get(v)) for n, v in enumerate(self.split.kept)]
        xs = [*self._own_rows(eqn, groups, known, weights, row), *kept]
        consts = self.evaluate(None, known, eqn.invars[: groups.consts])
        results, of_weights = eqn.outvars[groups.carry :], self.split.of_weights
        state, _, made = self._over_layers("backward", eqn, of_weights, results, consts, [], xs, row, state, known)
        return self._add("backward", state, made | known, row), *self._nothing()

    def _transpose(self) -> tuple[jx.JaxprEqn, jx.ScanGroups]:
        assert self.b is not None
        return self.b, scan_groups(self.b)

    def _as_held(self, split: Callable[..., Any], name: str, values: Values) -> Values:
        """Those of ``state[name]``, or none of them, by `split_as` or `laid_out`."""
        variables, *dims, whole = self.held[name]
        return [split(x, self.specs.get(v), *dims, whole=whole) for x, v in zip(values, variables, strict=False)]

    def _as_planned(self, values: Values, eqn: jx.JaxprEqn) -> Values:
        """What the scan ``eqn`` carries, split as the plan has it and not as it is sent."""
        return [split_as(x, self.specs.get(v), whole=True) for x, v in zip(values, self._carry(eqn), strict=True)]

    def _own_rows(self, eqn: jx.JaxprEqn, groups: jx.ScanGroups, known: Known, weights: Values, row: Any) -> list[Rows]:
        """What a scan over layers reads of each of those of this stage."""
        mine = {v: Rows(w, row["chunk"]) for v, w in zip(self.weights, weights, strict=True)}
        if eqn is self.b:
            for n, v in enumerate(self.residuals):
                mine[v] = Rows(("residual", n), row["residual"], self.specs.get(v), 1)
        own = jnp.asarray(self.stages.rows)[row["part"]]

        def rows_of(a: jx.Atom) -> Rows:
            if isinstance(a, jx.Var) and a in mine:
                return mine[a]
            return Rows(jnp.take(self.evaluate(None, known, [a])[0], own, axis=0)[None], 0)

        return [rows_of(a) for a in self.xs(eqn, groups)]

    def _over_layers(
        self,
        place: Place | None,
        eqn: jx.JaxprEqn,
        body: jx.Jaxpr,
        results: Sequence[jx.Var],
        consts: Values,
        carry: Values,
        xs: Sequence[Rows],
        row: Any,
        state: Any,
        known: Known,
        left: Sequence[jx.Var] = (),
    ) -> tuple[Any, Values, Known]:
        """Runs ``body`` on the layers of this stage, in the order of the scan ``eqn``: the state with what layers add
        to the sums with a row for each and with what they leave; the last carry; and ``results`` of ``body``, those
        with a row for each layer only where something else reads them whole.

        A layer reads and writes its rows of slots and sums where they are: of a whole slot XLA would make a copy. The
        loop carries all slots, also those that it only reads, or XLA would copy these at each tick.

        Args:
          place: where layers add to such sums; None where they do not, and leave what the second part of a backward
            reads.
          left: what each layer leaves in this operation's slot.
        """
        count = jnp.asarray(self.stages.layers)[row["part"]]
        even = len(set(self.stages.layers)) == 1
        carries = len(carry)
        stacked = results[carries:]
        added = [] if place is None else [self.chain.sums[i] for i in self.layer_sums]
        kept = [place is not None and v in self.stacked[place] for v in stacked]
        name = "kept" if place is None else "residual"

        def layer(carried: tuple[Values, Values, Rings], index: Any) -> tuple[tuple[Values, Values, Rings], Values]:
            carry, sums, rings = carried
            sums = self._as_held(laid_out, "layer_sums", sums)
            rings = {name: self._as_held(laid_out, name, values) for name, values in rings.items()}
            read = [x.row(rings, index) for x in xs]

            def run(carry: Values) -> tuple[Values, Values]:
                outs = jx.replay(body, [*consts, *carry, *read], self.axis)
                return outs[:carries], outs[carries:]

            def leave(carry: Values) -> tuple[Values, Values]:
                return carry, [zeros(jx.aval(v).shape, v) for v in body.outvars[carries:]]

            carry, ys = run(carry) if even else self.choose(index < count, run, leave, carry)
            here = {**known, **{v: jnp.expand_dims(y, 0) for v, y in zip(stacked, ys, strict=True)}}
            terms, leaves = self._terms(place, here, added, [*left])
            sums = [s if x is None else add_row(s, x, row["chunk"], index) for s, x in zip(sums, terms, strict=True)]
            if left:
                rings |= {name: [put_row(r, x, row[name], index) for r, x in zip(rings[name], leaves, strict=True)]}
            return (carry, sums, lax.optimization_barrier(rings)), [y for y, k in zip(ys, kept, strict=True) if k]

        carry = self._as_planned(carry, eqn) if carry else []
        begin = carry, [] if place is None else state["layer_sums"], {n: state[n] for n in ("residual", "kept")}
        rows = jnp.arange(self.stages.rows.shape[1])
        (out, sums, rings), ys = lax.scan(layer, begin, rows, reverse=eqn.params["reverse"])
        out = self._as_planned(out, eqn) if out else []
        made = dict(zip(results[:carries], out, strict=True))
        made |= dict(zip([v for v, k in zip(stacked, kept, strict=True) if k], ys, strict=True))
        return state | rings | ({} if place is None else {"layer_sums": sums}), out, made

    def _add(self, place: Any, state: Any, known: Known, row: Any) -> Any:
        """``state`` with what ``place`` adds to the sums without a row for each layer."""
        return self._added(place, state, known, row, [])[0]

    def _added(self, place: Any, state: Any, known: Known, row: Any, read: Values) -> tuple[Any, Values]:
        """`_add`, and the values of ``read`` at ``place``: computed together, as XLA merges no equal collectives."""
        plain, n = [self.chain.sums[i] for i in self.sums], len(self.sums)
        stacked = [self.chain.body.outvars[len(self.carries) + i] for i in self.outs]
        found, values = self._terms(place, known, [*plain, *stacked], read)
        sums = [s if x is None else s + x.astype(s.dtype) for s, x in zip(state["sums"], found[:n], strict=True)]
        outs = [
            s if x is None else added_at(s, row["microbatch"], x) for s, x in zip(state["outs"], found[n:], strict=True)
        ]
        return {**state, "sums": sums, "outs": outs}, values

    def _add_where(self, condition: Any, place: Any, state: Any, known: Known, row: Any) -> Any:
        """`_add` where ``condition`` holds."""
        add = functools.partial(self._add, place, known=known, row=row)
        return state | self.choose(condition, add, lambda s: s, self._sums_of(state), once_in=self.chunks)

    def _sums_of(self, state: Any) -> dict[str, Values]:
        """What `_add` reads and changes: what goes through a conditional takes XLA's default layout, which slots of
        residuals do not have, and would be copied whole."""
        return {name: state[name] for name in ("sums", "outs")}

    def _terms(self, place: Any, known: Known, results: Values, read: Values) -> tuple[Values, Values]:
        """The terms of ``results`` that ``place`` computes, None of others; and the values of ``read``."""
        ours = [place in w or (not w and place == "last") for w in map(self.chain.where, results)]
        wanted = [a for a, mine in zip(results, ours, strict=True) if mine]
        found = self.evaluate(place, known, [*wanted, *read])
        terms = iter(found)
        return [next(terms) if mine else None for mine in ours], found[len(wanted) :]
