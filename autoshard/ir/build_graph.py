"""Builds the `Graph` of a `Program`: equations become nodes with rules, regions are flattened in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from autoshard import jaxpr as jx
from autoshard.errors import PipelineError, RuleError, SpecError
from autoshard.ir.annotate import annotate_p
from autoshard.ir.combined_reductions import combined_reduction_counts
from autoshard.ir.graph import BACKWARD, PLAIN, Diagnostic, FactoredDim, Graph, Node, OpKind, OpKinds, Value
from autoshard.ir.program import Program
from autoshard.ir.rule import Rule, factor_names, replicated_rule, single_factor_dims
from autoshard.ir.rule_registry import check_used, fallback_rule, has_own_rule, lookup_rule, near_misses
from autoshard.ir.spec import Spec, checked_spec, replicated, unconstrained_dims
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.jaxpr.arguments import in_host_memory
from autoshard.machine.host_link import FROM_HOST, TO_HOST
from autoshard.machine.mesh import LogicalMesh

MOVABLE_BITS = 4
"""Fewest bits of an element that XLA for CPU (JAX 0.12) can move between devices: with fewer its collectives write past
their buffers. So values of such dtypes are whole there, and so is each dimension of what is computed from or into
them."""


def build_graph(program: Program, *, strict: bool = False, kinds: OpKinds | None = None) -> Graph:
    """The graph of ``program``, with the rule of every equation looked up.

    An equation without a rule is kept whole (no dimension split), and reported in `Graph.diagnostics`.

    Args:
      strict: whether that is an error.
      kinds: of graphs of other programs on the same mesh with the same rules.

    Raises:
      RuleError: a rule that does not fit its equation; a name in the step's ``rules=`` that no operation has; with
        ``strict``, an equation without a rule.
      SpecError: a pin inside the step that does not fit its value or the mesh; on CPU, a pin that splits a value whose
        elements have fewer than `MOVABLE_BITS`.
    """
    builder = _Builder(program, strict, OpKinds() if kinds is None else kinds)
    builder.jaxpr(program.jaxpr, 1, PLAIN)
    check_used(program.rules, builder.names)
    builder.diagnostics += [Diagnostic(text) for text in near_misses(program.rules, builder.names)]
    ids = builder.ids
    inputs = tuple(ids[v] for v in program.jaxpr.invars)
    outputs = tuple(builder.read(a) for a in program.jaxpr.outvars)
    for x, gradient in builder.gathered_with_gradients():
        builder.tie("gradient", x, gradient, False, 0, "", PLAIN)
    builder.tie_parts()
    for i, count in combined_reduction_counts(
        builder.nodes, builder.values, any_shape=program.mesh.hardware.combined_all_reduces
    ).items():
        kind = builder.kinds.variant(builder.nodes[i].kind, combined_count=count)
        builder.nodes[i] = builder.nodes[i]._replace(kind=kind)
    for i, o in program.carries:  # the next call's argument is this call's result
        builder.tie("carry", outputs[o], inputs[i], False, 1, "", PLAIN)
    leaves = (*zip(inputs, program.inputs, strict=True), *zip(outputs, program.outputs, strict=True))
    for v, leaf in leaves:
        if leaf.pin is not None and v:
            builder.pins.setdefault(v, leaf.pin)
    for v, leaf in zip(inputs, program.inputs, strict=True):
        old = builder.values[v]
        builder.values[v] = Value(old.shape, old.bits, old.dtype, leaf.path, leaf.memory_kind is not None)
    if not program.mesh.hardware.host_bandwidth:
        builder.diagnostics += _unmoved(builder, outputs)
    names = {v: leaf.path for v, leaf in reversed(leaves)}
    builder.pins |= _unmovable_pins(builder.values, builder.pins, names, program.mesh)
    return Graph(
        program,
        tuple(builder.values),
        tuple(builder.nodes),
        inputs,
        outputs,
        ids,
        builder.pins,
        tuple(dict.fromkeys(builder.diagnostics)),
        builder.unconstrained_dims,
        tuple(builder.loops),
        builder.kinds,
    )


class _Builder:
    """Accumulates one graph; value 0 stands for every literal."""

    def __init__(self, program: Program, strict: bool, kinds: OpKinds) -> None:
        self.program, self.rules, self.strict, self.kinds = program, program.rules, strict, kinds
        self.values: list[Value] = [Value((), 32, "float32", "literal")]
        self.nodes: list[Node] = []
        self.ids: dict[jx.Var, int] = {}
        self.pins: dict[int, Spec] = {}
        self.unconstrained_dims: dict[int, frozenset[int]] = {}
        self.diagnostics: list[Diagnostic] = []
        self.kinds_by_id: dict[tuple[int, ...], OpKind] = {}
        """By ids of the equation's parameters and abstract values: a first look-up, cheaper than `kinds`. The program
        keeps these objects alive."""
        self.reported = set[OpKind]()
        """Kinds without a rule."""
        self.value_types: dict[Any, Value] = {}
        """By shape and dtype."""
        self.value_types_by_id: dict[int, Value] = {}
        """By id of the abstract value."""
        self.names: set[str] = set()
        """Names of all operations, to report rules that match none."""
        self.loops: list[tuple[int, int]] = []
        self.parts: dict[tuple[int, str], list[tuple[int, int]]] = {}
        """First and last node of the scans that are parts of one, by `jx.part_of_scan`."""

    def read(self, atom: jx.Var | jx.Literal) -> int:
        return 0 if isinstance(atom, jx.Literal) else self.ids[atom]

    def define(self, var: jx.Var) -> int:
        self.ids[var] = self.value(jx.aval(var))
        return self.ids[var]

    def pin(self, value: int, entries: PartitionSpec, source: str, free: frozenset[int] = frozenset()) -> None:
        shape = self.values[value].shape
        self.unconstrained_dims[value] = free | unconstrained_dims(entries)
        what, pipeline = f"the value pinned at {source}", self.program.pipeline
        spec = checked_spec(entries, shape, self.program.whole_mesh.shape, what)
        if pipeline is not None and pipeline.axis in spec.axes:
            raise PipelineError(
                f"{what}: its spec {spec} splits it over {pipeline.axis!r}, the axis of a pipeline's stages, each of "
                "which has layers of its own: leave that axis out"
            )
        self.pins[value] = spec

    def value(self, aval: Any) -> int:
        found = self.value_types_by_id.get(id(aval))
        if found is None:
            key = tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None), in_host_memory(aval)
            name = "token" if key[1] is None else jx.dtype_name(key[1])
            found = self.value_types.setdefault(key, Value(key[0], _bits(aval), name, host=key[2]))
            self.value_types_by_id[id(aval)] = found
        self.values.append(found)
        return len(self.values) - 1

    def jaxpr(self, jaxpr: jx.Jaxpr, trip_count: int, phase: str) -> None:
        for var in (*jaxpr.constvars, *jaxpr.invars):
            if var not in self.ids:
                self.define(var)
        for eqn in jaxpr.eqns:
            inner = jx.autodiff_phase(eqn) or phase
            self.names.add(eqn.primitive.name)
            self.names.update(jx.op_names(eqn))
            regions = jx.regions(eqn)
            regions = () if regions and has_own_rule(eqn, self.rules) else regions
            if regions:
                self.regions(eqn, regions, trip_count, inner)
            elif jx.manual_specs(eqn):
                self.shard_map(eqn, trip_count, inner)
            elif self.rules.traits(eqn.primitive).identity:
                self.identities(eqn, trip_count, inner)
            else:
                self.equation(eqn, trip_count, inner)

    def equation(self, eqn: jx.JaxprEqn, trip_count: int, phase: str) -> None:
        operands = tuple(map(self.read, eqn.invars))
        results = tuple(map(self.define, eqn.outvars))
        source = jx.source(eqn)
        key = id(eqn.primitive), id(eqn.params), *[id(jx.aval(a)) for a in eqn.invars]
        kind = self.kinds_by_id.get(key)
        if kind is None:
            kind = self.kinds_by_id[key] = self.kind(eqn, source)
        literals = tuple([str(a.val) for a in eqn.invars if isinstance(a, jx.Literal)])
        self.nodes.append(Node(kind, operands, results, trip_count, source, phase, literals))
        if kind.traits.constrains:
            entries = eqn.params["spec"] if eqn.primitive is annotate_p else eqn.params["sharding"].spec
            self.pin(results[0], entries, source, frozenset(eqn.params.get("unconstrained_dims", ())))

    def shard_map(self, eqn: jx.JaxprEqn, trip_count: int, phase: str) -> None:
        """A `shard_map` of the user's: its operands and results are pinned to its specs, its body is not read."""
        specs, source = jx.manual_specs(eqn), jx.source(eqn)
        assert specs is not None
        name, traits = eqn.primitive.name, self.rules.traits(eqn.primitive)
        for operand, spec in zip(eqn.invars, specs[0], strict=True):
            inside = self.value(jx.aval(operand))
            self.tie(name, self.read(operand), inside, False, trip_count, source, phase, traits)
            self.pin(inside, spec, source)
        results = tuple(map(self.define, eqn.outvars))
        for result, spec in zip(results, specs[1], strict=True):
            self.pin(result, spec, source)
        avals = [jx.aval(v) for v in eqn.outvars]
        shapes, bits = tuple(tuple(a.shape) for a in avals), tuple(map(_bits, avals))
        # A tie, so that no transfer is charged: the results have their specs from the start.
        kind = _kind(name, traits, replicated_rule("", (), avals), shapes, bits, "", 0.0, source, tie=True)
        self.nodes.append(Node(kind, (), results, trip_count, source, phase))
        text = f"{name} is used as written; its compute and collectives are not costed"
        self.diagnostics.append(Diagnostic(text, source))

    def identities(self, eqn: jx.JaxprEqn, trip_count: int, phase: str) -> None:
        """A tie from each operand to its result; the pairs are independent of each other."""
        traits = self.rules.traits(eqn.primitive)
        specs = jx.destination_specs(eqn)
        for i, (operand, result) in enumerate(zip(eqn.invars, eqn.outvars, strict=True)):
            read, made, source = self.read(operand), self.define(result), jx.source(eqn)
            there, here = self.values[read].host, self.values[made].host
            moved = "" if there == here else TO_HOST if here else FROM_HOST
            self.tie(eqn.primitive.name, read, made, False, trip_count, source, phase, traits, host_transfer=moved)
            if moved and (spec := specs.get(i)) is not None:
                self.pin(made, spec, source)

    def kind(self, eqn: jx.JaxprEqn, source: str) -> OpKind:
        key = jx.eqn_key(eqn)
        kind = self.kinds.by_key.get(key) if key is not None else None
        if kind is None:
            kind = self.new_kind(eqn, source)
            if key is not None:
                self.kinds.by_key[key] = kind
        if kind.rule.reason and kind not in self.reported:
            self.reported.add(kind)
            text = f"{kind.op} is kept whole: {kind.rule.reason}"
            if self.strict:
                raise RuleError(f"{source}: {text}; give a rule for it, or drop strict")
            self.diagnostics.append(Diagnostic(text, source))
        return kind

    def new_kind(self, eqn: jx.JaxprEqn, source: str) -> OpKind:
        ins, outs = [jx.aval(a) for a in eqn.invars], [jx.aval(v) for v in eqn.outvars]
        name = eqn.primitive.name
        traits = self.rules.traits(eqn.primitive)
        if traits.constrains:
            rule = _identity(len(ins[0].shape))
        else:
            rule = self.rule(eqn, source)
        bits = tuple(map(_bits, (*ins, *outs)))
        rule = _without_unmovable_splits(rule, bits, self.program.mesh)
        shapes = tuple(tuple(getattr(a, "shape", ())) for a in (*ins, *outs))
        flops = jx.contraction_flops(eqn)
        factors = [a for a in ins if hasattr(a, "dtype") and jax.dtypes.issubdtype(a.dtype, np.inexact)] or ins
        product_dtype = str(getattr(max(factors[:2], key=_bits, default=None), "dtype", "")) if flops else ""
        kind = _kind(name, traits, rule, shapes, bits, product_dtype, flops, source, jx.convolution(eqn))
        rounds = jx.rounds_operands(eqn)
        return replace(kind, factor_bits=self.program.mesh.hardware.operand_bits) if rounds else kind

    def rule(self, eqn: jx.JaxprEqn, source: str) -> Rule:
        try:
            return lookup_rule(eqn, self.rules, self.program.mesh) or fallback_rule(eqn)
        except RuleError as e:
            raise RuleError(f"{source}: {eqn.primitive.name}: {e}") from None

    def regions(self, eqn: jx.JaxprEqn, regions: tuple[jx.Region, ...], trip_count: int, phase: str) -> None:
        results = [self.define(v) for v in eqn.outvars]
        operands = [self.read(a) for a in eqn.invars]
        source, name, traits = jx.source(eqn), eqn.primitive.name, self.rules.traits(eqn.primitive)
        if not all(r.trip_count_known for r in regions):
            text = f"{name}: its trip count is unknown; costed as one iteration"
            self.diagnostics.append(Diagnostic(text, source))
        for region in regions:
            inner, begin = trip_count * region.trip_count, len(self.nodes)
            inside = [self.define(v) for v in region.body.invars]
            for wire in region.inputs:
                count = inner if wire.stacked else trip_count
                self.tie(name, operands[wire.outside], inside[wire.inside], wire.stacked, count, source, phase, traits)
            self.jaxpr(region.body, inner, phase)
            ends = [self.read(a) for a in region.body.outvars]
            for end, start in region.carries:
                self.tie(name, ends[end], inside[start], False, inner, source, phase, traits)
            for wire in region.outputs:
                count = inner if wire.stacked else trip_count
                self.tie(name, ends[wire.inside], results[wire.outside], wire.stacked, count, source, phase, traits)
            if region.carries or region.trip_count > 1 or not region.trip_count_known:
                self.loops.append((begin, len(self.nodes) - 1))
            if (of := jx.part_of_scan(eqn)) is not None:
                self.parts.setdefault(of, []).append((begin, len(self.nodes)))

    def tie_parts(self) -> None:
        """Ties the values of the layers of a scan that was cut in parts, which differ in what they hold and in nothing
        else: they are to have one layout, and the layout problem stays as small as it was."""
        for parts in self.parts.values():
            same: dict[tuple[int, str, str], list[list[int]]] = {}
            for p, (begin, end) in enumerate(parts):
                for i in range(begin, end):
                    node = self.nodes[i]
                    each = same.setdefault((id(node.kind), node.source, node.phase), [[] for _ in parts])
                    each[p].append(i)
            for first, *others in same.values():
                for other in others:
                    for i, j in zip(first, other, strict=True) if len(first) == len(other) else ():
                        a, b = self.nodes[i], self.nodes[j]
                        for v, w in zip(a.results, b.results, strict=True):
                            self.tie("layers", v, w, False, 0, a.source, a.phase)

    def gathered_with_gradients(self) -> list[tuple[int, int]]:
        """Arrays that are gathered from, each with its gradient: the backward scatter-add at the same indices.

        No operation reads both, so nothing else would propagate an embedding's spec to its gradient.
        """
        nodes, first = self.nodes, dict[tuple[int, tuple[int, ...]], int]()
        for n in nodes:
            if n.kind.traits.gathers:
                first.setdefault((n.operands[1], n.kind.shapes[0]), n.operands[0])
        pairs = (
            (first.get((n.operands[1], n.kind.shapes[0])), n.results[0])
            for n in nodes
            if n.kind.traits.scatter_adds and n.phase == BACKWARD
        )
        return [(x, gradient) for x, gradient in pairs if x]

    def tie(
        self,
        name: str,
        a: int,
        b: int,
        stacked: bool,
        trip_count: int,
        source: str,
        phase: str,
        traits: Traits = UNKNOWN,
        *,
        host_transfer: str = "",
    ) -> None:
        """Adds a tie: ``b`` is ``a`` or, where ``stacked``, one is a slice of the other along its leading dimension."""
        if not a or not b:
            return
        va, vb = self.values[a], self.values[b]
        rule = _slice_rule(len(va.shape), len(vb.shape)) if stacked else _identity(len(va.shape))
        key = ("tie", name, traits, va.shape, vb.shape, va.bits, vb.bits, host_transfer)
        kind = self.kinds.by_key.get(key)
        if kind is None:
            shapes, bits = (va.shape, vb.shape), (va.bits, vb.bits)
            kind = _kind(name, traits, rule, shapes, bits, "", 0.0, source, tie=True, host_transfer=host_transfer)
            self.kinds.by_key[key] = kind
        self.nodes.append(Node(kind, (a,), (b,), trip_count, source, phase))


def _kind(
    op: str,
    traits: Traits,
    rule: Rule,
    shapes: tuple[tuple[int, ...], ...],
    bits: tuple[int, ...],
    product_dtype: str,
    flops: float,
    source: str,
    convolution: jx.Convolution | None = None,
    *,
    tie: bool = False,
    host_transfer: str = "",
) -> OpKind:
    try:
        if [len(d) for d in (*rule.operands, *rule.results)] != [len(s) for s in shapes]:
            raise RuleError(f"rule {rule} has other ranks than the shapes {list(shapes)}")
        sizes = rule.factor_sizes(shapes)
    except (RuleError, ValueError) as e:
        raise RuleError(f"{source}: {op}: {e}") from None
    order = sorted(range(len(shapes)), key=lambda i: (-math.prod(shapes[i]) * bits[i], i))
    dims = (*rule.operands, *rule.results)
    factored = tuple(FactoredDim(i, d, dim) for i in order for d, dim in enumerate(dims[i]) if dim)
    sized = tuple(sizes.items())
    return OpKind(
        op, traits, rule, shapes, bits, product_dtype, sized, factored, flops, convolution, tie, host_transfer
    )


def _unmoved(builder: _Builder, outputs: tuple[int, ...]) -> Iterator[Diagnostic]:
    """What the step moves to the host's memory and XLA leaves where it is: all that does not leave the step."""
    leaving = set(outputs)
    for n in reversed(builder.nodes):
        if (n.tie or n.kind.traits.in_place_operand is not None) and not leaving.isdisjoint(n.results):
            leaving.update(n.operands)
    for n in builder.nodes:
        if n.kind.host_transfer == TO_HOST and leaving.isdisjoint(n.results):
            text = (
                f"{n.kind.op} to the host's memory: on {builder.program.mesh.hardware.name} XLA moves arguments and "
                "results of the step there, and leaves other values where they are"
            )
            yield Diagnostic(text, n.source)


@functools.cache
def _identity(rank: int) -> Rule:
    return Rule((single_factor_dims(factor_names(rank)),), (single_factor_dims(factor_names(rank)),))


@functools.cache
def _slice_rule(before: int, after: int) -> Rule:
    inner, outer = min(before, after), max(before, after)
    small, large = single_factor_dims(factor_names(inner)), ((), *single_factor_dims(factor_names(inner)))
    assert outer == inner + 1
    return Rule((small if before < after else large,), (small if after < before else large,))


def _bits(aval: Any) -> int:
    return jx.dtype_bits(aval.dtype) if hasattr(aval, "dtype") else 0


def _is_unmovable(bits: int, mesh: LogicalMesh) -> bool:
    return 0 < bits < MOVABLE_BITS and mesh.platform == "cpu"


def _without_unmovable_splits(rule: Rule, bits: Sequence[int], mesh: LogicalMesh) -> Rule:
    """``rule`` with every factor kept whole that an unmovable operand or result has; ``bits``: of operands, results."""
    dims = zip((*rule.operands, *rule.results), bits, strict=True)
    kept = {f for ds, b in dims if _is_unmovable(b, mesh) for d in ds for f in d}
    if not kept:
        return rule
    before = dict(rule.kinds)
    if rule.local is not None and rule.local.in_place is not None and any(before.get(f) == "local" for f in kept):
        kept.add(rule.local.in_place)
    kinds = before | dict.fromkeys(kept, "whole")
    local = None if "local" in before.values() and "local" not in kinds.values() else rule.local
    return replace(rule, kinds=tuple(sorted(kinds.items())), local=local)


def _unmovable_pins(
    values: Sequence[Value], pins: Mapping[int, Spec], names: Mapping[int, str], mesh: LogicalMesh
) -> dict[int, Spec]:
    """A pin to every device for each of ``values`` that cannot be moved. ``names``: paths of arguments and results.

    Raises:
      SpecError: a pin of the user's splits one.
    """
    found = {v: replicated(len(x.shape)) for v, x in enumerate(values) if _is_unmovable(x.bits, mesh)}
    for v in found.keys() & pins.keys():
        if pins[v].axes:
            raise SpecError(
                f"{names.get(v, 'a value pinned in the step')}, of dtype {values[v].dtype}, is pinned to {pins[v]}; "
                f"XLA for CPU (JAX 0.12) cannot move elements of fewer than {MOVABLE_BITS} bits between devices; "
                "leave out the pin, or store it as int4 or int8"
            )
    return found
