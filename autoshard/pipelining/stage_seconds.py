"""Seconds of what stages run, and what they send each other within, from the charges of a step's loop on one stage's
devices."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from jax.extend.core import primitives as prims

from autoshard import jaxpr as jx
from autoshard.cost.cost import Charge, scheduled_seconds
from autoshard.ir.graph import Graph, Node
from autoshard.ir.propagate import Layout
from autoshard.ir.spec import Spec
from autoshard.machine.collective import Collective, collective_seconds
from autoshard.pipelining.chain import Chain, Place, scan_groups
from autoshard.pipelining.segment import equations_of
from autoshard.pipelining.split_backward import split_backward
from autoshard.pipelining.stage_dims import StageDims
from autoshard.pipelining.stages import Stages
from autoshard.pipelining.sums_of_parts import additions
from autoshard.schedule.slots import Operation
from autoshard.search.candidates import Search


@dataclass(frozen=True)
class StageSeconds:
    """Seconds on one stage's devices: of a layer and of what is around the layers, for one micro-batch."""

    forward: float
    backward: float
    """Where it is split, of its first part."""
    weights: float
    """Of its second part."""
    each_forward: float
    """Of what any stage can compute and all layers read, as an encoder's result: every part's forward computes it."""
    each_backward: float
    """The same of backwards."""
    before: float
    """On the first part, in its forward."""
    last: float
    """On the last part: its loss, in the backward."""
    first: float
    """On the first part, in its backward."""
    outside: float
    """Of a call, outside of the loop."""
    compute_share: float
    collectives: tuple[Collective, ...]
    """Of a call, on one stage, but for those of layers."""
    of_each_layer: tuple[Collective, ...]
    """The same of layers: ``count`` is of one layer and all micro-batches."""
    trains: bool = True
    """Whether the chain has a backward; without one the last part's forward computes what comes after it."""

    @classmethod
    def of(
        cls, graph: Graph, layout: Layout, models: Search, chain: Chain, split: StageDims, *, splits: bool
    ) -> StageSeconds:
        region: dict[int, str | jx.JaxprEqn] = dict(_regions(graph, chain, splits=splits))
        if splits and chain.backward is not None:
            late = split_backward(chain.backward).of_weights.eqns
            made = (v for e in late for v in (*e.outvars, *(u for r in jx.regions(e) for u in _defined(r.body))))
            region |= {graph.ids[v]: "weights" for v in made if v in graph.ids}
        scanned = {graph.ids[v] for v in _in_scans(chain) if v in graph.ids}
        before = {graph.ids[v] for v in chain.invariant if v in graph.ids}
        own = {graph.ids[v] for v in _sums_of_layers(graph, chain) if v in graph.ids}
        sums = _LayerSums(graph, layout, models, chain)
        stages = split.mesh.shape[split.axis]

        def share_of(v: int) -> float:
            return min(split.share(v), 1 / stages if v in own else 1.0)

        computed, waited = defaultdict[str | jx.JaxprEqn, float](float), defaultdict[str | jx.JaxprEqn, float](float)
        sent, of_layers = list[Collective](), list[Collective]()
        over_all = dict[tuple[Spec, Spec, int], Collective]()
        for charge in models.cost_model.charges(layout):
            node = graph.nodes[charge.node] if charge.node < len(graph.nodes) else None
            results = () if node is None else node.results
            where = next((region[v] for v in results if v in region), "outside")
            share = min(map(share_of, results), default=1.0) if where == "outside" else 1.0
            computed[where] += sums.compute(charge, node) * share
            for t in charge.transfers:
                c, runs = t.collective, t.collective.count
                if where == "outside" or (t.value in before and not t.of_result):
                    # What is the same in every micro-batch is resharded once, before the pipeline.
                    once = runs if where == "outside" else 1
                    if t.before and t.after and not split.splits_as_planned(t.before, t.after, t.value):
                        over_all[t.before, t.after, t.value] = replace(c, count=once)
                        continue
                    part = share_of(t.value) if t.value else share
                    sent.append(replace(c, count=once, bytes=round(c.bytes * part)))
                    waited["outside"] += (t.seconds + t.hidden) * part * once / runs
                    continue
                waited[where] += t.seconds
                if where in _LAYERS and scanned.isdisjoint(results):  # of all layers together
                    of_layers.append(replace(c, bytes=c.bytes // chain.layers))
                elif where in _LAYERS:
                    of_layers.append(replace(c, count=runs // chain.layers))
                else:
                    sent.append(c)
        for reshard, planned in over_all.items():
            for c in split.reshard(*reshard):
                sent.append(replace(c, count=planned.count, source=planned.source))
                waited["outside"] += collective_seconds(c.kind, c.axes or (), c.bytes, split.mesh) * planned.count
        hardware = split.mesh.hardware
        in_rings = hardware.blocking_gathers and hardware.blocking_reduce_scatters
        hidden = 0.0 if in_rings else HIDDEN_IN_STAGES.get(split.mesh.platform, 0.0) * hardware.hidden_collectives
        found = {
            where: scheduled_seconds(computed[where], waited[where], 0.0 if where == "outside" else hidden)
            for where in {**computed, **waited}
        }
        found = defaultdict[str | jx.JaxprEqn, float](float, found)
        everything = sum(found.values())
        ran = _Recomputed(chain, found)
        begin, each, each_back, last, first = ran.seconds
        count, layers = chain.groups.length, chain.layers
        return cls(
            forward=found["forward"] / count / layers,
            backward=found["backward"] / count / layers,
            weights=found["weights"] / count / layers,
            each_forward=each / count,
            each_backward=each_back / count,
            before=begin / count,
            last=(found["last"] + last) / count,
            first=(found["first"] + first) / count,
            outside=found["outside"] + ran.outside,
            compute_share=sum(computed.values()) / everything if everything else 1.0,
            collectives=tuple(sent),
            of_each_layer=tuple(of_layers),
            trains=chain.backward is not None,
        )

    def of_layers(self) -> dict[Operation, float]:
        """Of each operation on a layer."""
        back = self.backward
        return {
            Operation.FORWARD: self.forward,
            Operation.BACKWARD: back,
            Operation.INPUT_GRADIENT: back,
            Operation.WEIGHT_GRADIENT: self.weights,
        }

    def of_part(self, operation: Operation, part: int, layers: int, parts: int) -> float:
        """Of one operation of a part of the model, for a micro-batch."""
        if operation is Operation.FORWARD:
            ends = self.before * (part == 0) + (self.last * (part == parts - 1) if not self.trains else 0.0)
            return layers * self.forward + self.each_forward + ends
        if operation is Operation.WEIGHT_GRADIENT:
            return layers * self.weights + self.each_backward
        return layers * self.backward + self.each_backward + self.last * (part == parts - 1) + self.first * (part == 0)

    def of_slot(self, stages: Stages, stage: int, slot: object) -> float:
        """Of what a stage runs at a tick; 0 where it is idle."""
        if slot is None:
            return 0.0
        operation, chunk, _ = slot  # pyright: ignore[reportGeneralTypeIssues]
        part = stages.schedule.placement[chunk][stage]
        return self.of_part(operation, part, stages.layers[part], len(stages.layers))


HIDDEN_IN_STAGES = {"tpu": 0.67}
"""By platform, of the share of collectives that XLA runs beside compute in a whole step, what it does within a stage's
operation: of pipelines compiled for v5p 0 to 2.3 times that, the median 0.8. On chips that wait for gathers, as v5e,
only what runs in rings beside products is hidden (`autoshard.cost.overlap`). For GPUs it is half of it, but what stages
compute takes as much longer than predicted: none is counted."""
_LAYERS = ("forward", "backward", "weights")
"""Where layers run."""


class _Recomputed:
    """Seconds, for all micro-batches, of what any stage can compute, where it is read: maybe at several places."""

    def __init__(self, chain: Chain, found: Mapping[str | jx.JaxprEqn, float]) -> None:
        self.chain, self.found, self.ran = chain, found, set[jx.JaxprEqn]()
        groups, body = chain.groups, chain.body
        self.known = {*chain.invariant, *body.invars}
        ends = [*chain.sums.values(), *body.outvars[groups.carry :]]
        each, init = self._read(chain.forward)
        each_back, begin = ([], []) if chain.backward is None else self._read(chain.backward)
        carries = set(chain.forward.outvars[: scan_groups(chain.forward).carry])
        self.seconds = (
            self._of(None, init),
            self._of(None, each),
            self._of(None, each_back),
            self._of("last", [*begin, *ends], carries),
            self._of("first", ends, set(() if chain.backward is None else chain.backward.outvars)),
        )
        """Of the first part's forward, every part's forward and backward, the last part's loss, and the first part's
        backward."""
        self.outside = sum(seconds for e, seconds in found.items() if isinstance(e, jx.JaxprEqn) and e not in self.ran)

    def _read(self, eqn: jx.JaxprEqn) -> tuple[list[jx.Atom], list[jx.Atom]]:
        """What a scan over layers reads that any stage can compute for itself: on each stage, and at its beginning."""
        groups = scan_groups(eqn)
        begin, rows = groups.consts, groups.consts + groups.carry
        each = [a for a in (*eqn.invars[:begin], *eqn.invars[rows:]) if not self.chain.where(a)]
        return each, eqn.invars[begin:rows]

    def _of(self, place: Place | None, results: Sequence[jx.Atom], known: Set[jx.Var] = frozenset()) -> float:
        """Of what ``place`` runs beside what is its own alone."""
        eqns = equations_of(self.chain, place, self.known | known, results)
        anywhere = [e for e in eqns if e in self.found]
        self.ran.update(anywhere)
        return sum(self.found[e] for e in anywhere)


class _LayerSums:
    """Sums over micro-batches with a row for each layer, which a pipeline for TPUs adds up layer by layer: the terms of
    all layers are never made, and the product that makes a layer's adds it up."""

    def __init__(self, graph: Graph, layout: Layout, models: Search, chain: Chain) -> None:
        self.layout, self.model, mesh = layout, models.memory_model, graph.program.mesh
        self.memory_rate = mesh.hardware.memory_rate
        rows = list(_rows_added(chain)) if mesh.platform == "tpu" else []
        self.fused_terms = {graph.ids[v] for r in rows for v in r.stacks if v in graph.ids}
        self.product_of = {
            graph.ids[r.total]: None if r.product is None else graph.ids.get(r.product)
            for r in rows
            if r.total in graph.ids
        }
        self.products = dict[int | None, float]()
        """By result, seconds of what has been asked for."""

    def compute(self, charge: Charge, node: Node | None) -> float:
        """Seconds that what ``charge`` stands for computes in a pipeline; products before what adds them up."""
        if node is None:
            return charge.compute
        if not self.fused_terms.isdisjoint(node.results):
            return 0.0
        self.products.update(dict.fromkeys(node.results, charge.compute))
        for v in filter(self.product_of.__contains__, node.results):
            both = 2 * self.model.size(v, self.layout.specs[v]) * node.trip_count / self.memory_rate
            return max(0.0, both - self.products.get(self.product_of[v], 0.0))
        return charge.compute


class _RowsAdded(NamedTuple):
    """Terms with a row for each layer that a backward adds up over micro-batches: in a pipeline layer by layer."""

    total: jx.Var
    """The sum after an iteration, as it is added up."""
    stacks: tuple[jx.Var, ...]
    """All layers' terms."""
    product: jx.Var | None
    """What makes a layer's term and can add it up itself; None where nothing can."""


def _rows_added(chain: Chain) -> Iterator[_RowsAdded]:
    body, backward = chain.body, chain.backward
    made = {v: e for e in body.eqns for v in e.outvars}
    readers = Counter(a for e in body.eqns for a in e.invars if isinstance(a, jx.Var))
    readers.update(a for a in body.outvars if isinstance(a, jx.Var))
    for eqn, i in equations_that_add(chain).items():
        term, (total,) = chain.sums[i], eqn.outvars
        if not isinstance(term, jx.Var) or term not in chain.per_layer:
            continue
        stacks, v = [term], term
        while readers[v] == 1 and (e := made.get(v)) is not None and _keeps_values(e):
            (v,) = [a for a in e.invars if isinstance(a, jx.Var)]
            stacks.append(v)
        if readers[v] == 1 and backward is not None and made.get(v) is backward:
            layer = jx.regions(backward)[0].body
            yield _RowsAdded(total, tuple(stacks), _adding_product(layer, layer.outvars[backward.outvars.index(v)]))


def _keeps_values(eqn: jx.JaxprEqn) -> bool:
    return jx.is_constraint(eqn) or eqn.primitive is prims.convert_element_type_p


def _adding_product(layer: jx.Jaxpr, row: jx.Atom) -> jx.Var | None:
    """The product of ``layer`` that XLA for TPUs adds ``row`` up in: one whose last two dimensions, as the row has
    them, are one of each operand. Others it adds after the product."""
    made = {v: e for e in layer.eqns for v in e.outvars}
    last = [-2, -1]
    while isinstance(row, jx.Var) and (eqn := made.get(row)) is not None:
        rank = len(jx.aval(row).shape)
        if rank < 2:
            return None
        if eqn.primitive is prims.dot_general_p:
            (left, _), (batch, _) = eqn.params["dimension_numbers"]
            first_of_right = len(jx.aval(eqn.invars[0]).shape) - len(left)
            sides = {d % rank >= first_of_right for d in last}
            return row if len(sides) == 2 and all(d % rank >= len(batch) for d in last) else None
        if jx.calls_one_body(eqn):
            (body,) = [r.body for r in jx.regions(eqn)]
            made, row = {v: e for e in body.eqns for v in e.outvars}, body.outvars[eqn.outvars.index(row)]
            continue
        if eqn.primitive is prims.transpose_p:
            last = [eqn.params["permutation"][d] for d in last]
        elif not _keeps_values(eqn):
            return None
        (row,) = [a for a in eqn.invars if isinstance(a, jx.Var)]
    return None


def _sums_of_layers(graph: Graph, chain: Chain) -> Iterator[jx.Var]:
    """The sums with a row for each layer, of which a stage adds up the parts of its own."""
    added = additions(graph.program.jaxpr, chain)
    for i, a in chain.sums.items():
        if isinstance(a, jx.Var) and a in chain.per_layer:
            yield chain.loop.outvars[i]
            yield from (v for eqn in added.get(i, ()) for v in eqn.outvars)


def _in_scans(chain: Chain) -> Iterator[jx.Var]:
    """What the scans over layers compute, of each layer."""
    for eqn in filter(None, (chain.forward, chain.backward)):
        yield from (v for r in jx.regions(eqn) for v in _defined(r.body))


def _regions(graph: Graph, chain: Chain, *, splits: bool) -> Iterator[tuple[int, str | jx.JaxprEqn]]:
    """The values made in the loop, each with where it is: in the chain's scans, around them at which stage, or, where
    any stage can compute it, of which equation of the loop's body. Where backwards are split, what comes after the
    scan that is their whole comes after their second part."""
    adding = equations_that_add(chain)
    for eqn in chain.body.eqns:
        where = "forward" if eqn is chain.forward else "backward" if eqn is chain.backward else ""
        if eqn in adding:
            where = next(iter(sorted(chain.where(chain.sums[adding[eqn]]))), "last")
        if not where:
            places = chain.where(eqn.outvars[0]) if eqn.outvars and eqn.outvars[0] in chain.places else frozenset()
            where = next(iter(sorted(places)), "outside" if chain.invariant.issuperset(eqn.outvars) else eqn)
        if splits and where == "backward" and eqn is not chain.backward:
            where = "weights"
        made = [*eqn.outvars, *(v for r in jx.regions(eqn) for v in _defined(r.body))]
        yield from ((graph.ids[v], where) for v in made if v in graph.ids)


def equations_that_add(chain: Chain) -> dict[jx.JaxprEqn, int]:
    """The equations that add to a sum over micro-batches, each with the carry of the loop that it is: who has what is
    added runs them."""
    begin, found = chain.groups.consts, dict[jx.JaxprEqn, int]()
    sums = {chain.body.invars[begin + i]: i for i in chain.sums}
    for eqn in chain.body.eqns:
        for i in [sums[a] for a in eqn.invars if isinstance(a, jx.Var) and a in sums]:
            found[eqn] = sums[eqn.outvars[0]] = i
    return found


def _defined(jaxpr: jx.Jaxpr) -> Iterator[jx.Var]:
    yield from jaxpr.invars
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for r in jx.regions(eqn):
            yield from _defined(r.body)
