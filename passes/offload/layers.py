"""An optimizer's update of stacked layers as a loop over them, which reads and writes the host's memory layer by layer.

A loop has no array of state on the device, but slices of it: XLA copies one layer's in while it updates the layer
before. Each array is written where it was read, so that neither memory needs a second one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.transforms.batch_parts.cut import Cut, CutEquation, cut_equation


@dataclass(frozen=True)
class Layers:
    """An update of arrays that have a row for each layer."""

    before: tuple[jx.JaxprEqn, ...]
    """What runs before it."""
    equations: tuple[CutEquation, ...]
    """What runs for each layer."""
    cuts: Mapping[jx.Var, Cut]
    """The values that have a row for each layer: a cut of their leading dimension."""
    results: tuple[jx.Var, ...]
    """What else reads of it."""


@dataclass(frozen=True)
class StepJaxpr:
    """The jaxpr of a step, of which all updates ask the same."""

    jaxpr: jx.Jaxpr

    @functools.cached_property
    def uses(self) -> Counter[jx.Var]:
        """How often each variable is read."""
        return jx.use_counts(self.jaxpr)

    @functools.cached_property
    def scanned(self) -> set[jx.Var]:
        """The variables whose rows a loop goes through."""
        return _scanned(self.jaxpr)


def layers_of(
    step: StepJaxpr,
    before: Sequence[jx.JaxprEqn],
    update: Sequence[jx.JaxprEqn],
    state: Mapping[jx.Var, jx.Var],
    program: Program,
) -> Layers:
    """``update`` as one of layers.

    Args:
      step: the jaxpr that it is in.
      before: the equations that run before it. Elementwise ones that it alone reads become part of it.
      state: the arrays on the host, of which it reads some.

    Raises:
      ChunkError: it is none: no loop of the step has these layers, or the update of a layer depends on others.
    """
    if not step.scanned:
        raise ChunkError("no loop of the step has these layers", "")
    read = [a for e in update for a in e.invars if isinstance(a, jx.Var)]
    sizes = {jx.aval(v).shape[0] for v in read if v in state}
    layers = sizes.pop()
    if sizes or layers < 2:
        raise ChunkError("the arrays have different leading dimensions", "")
    cuts = {v: Cut(0, 1, layers) for v in read if v in state}
    equations = [_cut(e, cuts, program) for e in update]
    left, uses = list[jx.JaxprEqn](), step.uses
    inside = jx.use_counts(jx.with_eqns(step.jaxpr, update, outvars=[]))
    for e in reversed(before):
        alone = any(v in cuts for v in e.outvars) and all(inside[v] == uses[v] for v in e.outvars)
        if alone and _is_elementwise(e):
            try:
                equations.insert(0, _cut(e, cuts, program))
                inside.update(a for a in e.invars if isinstance(a, jx.Var))
                continue
            except ChunkError:
                pass
        left.append(e)
    made = [v for c in equations for v in c.eqn.outvars]
    given = [v for v in cuts if v not in made]
    if step.scanned.isdisjoint(v for v in given if v not in state):
        raise ChunkError("no loop of the step has these layers", "")
    results = tuple(v for v in made if uses[v] > inside[v])
    return Layers(tuple(reversed(left)), tuple(equations), cuts, results)


def _cut(eqn: jx.JaxprEqn, cuts: dict[jx.Var, Cut], program: Program) -> CutEquation:
    """``eqn`` for one layer; adds the cuts of what it reads and makes to ``cuts``.

    Raises:
      ChunkError: it needs other layers too.
    """
    atoms, whole = (*eqn.invars, *eqn.outvars), next(iter(cuts.values()))
    known = {i: whole for i, a in enumerate(atoms) if isinstance(a, jx.Var) and a in cuts}
    found = cut_equation(eqn, known, program.rules, program.mesh)
    ends = (*found.operands, *found.results)
    rows = {a for a, cut in zip(atoms, ends, strict=True) if isinstance(a, jx.Var) and cut == whole}
    if not all(cut in (None, whole) for cut in ends) or not rows.issuperset([*eqn.outvars, *(atoms[i] for i in known)]):
        raise ChunkError(f"{eqn.primitive.name} takes all layers together", jx.source(eqn))
    cuts.update(dict.fromkeys(rows, whole))
    return found


def _is_elementwise(eqn: jx.JaxprEqn) -> bool:
    """Whether ``eqn`` computes each element of its result from one of each operand, and nothing else."""
    shapes = {tuple(jx.aval(a).shape) for a in (*eqn.invars, *eqn.outvars)} - {()}
    return len(shapes) == 1 and not (eqn.effects or jx.regions(eqn) or jx.contraction_flops(eqn))


def _scanned(jaxpr: jx.Jaxpr) -> set[jx.Var]:
    """The variables of ``jaxpr`` whose rows a loop reads or makes in turn, at any depth; and what is computed of such
    element by element, as sums of gradients are, or put together, or is cast to such or has them among others."""
    found = set[jx.Var]()
    for e in jx.eqns_with_regions(jaxpr):
        for r in jx.regions(e):
            inner = _scanned(r.body)
            for wires, outside, inside in ((r.inputs, e.invars, r.body.invars), (r.outputs, e.outvars, r.body.outvars)):
                ends = [outside[w.outside] for w in wires if w.stacked or inside[w.inside] in inner]
                found.update(a for a in ends if isinstance(a, jx.Var))
    for e in reversed(jaxpr.eqns):
        if (e.primitive is lax.convert_element_type_p or e.primitive is lax.slice_p) and not found.isdisjoint(
            e.outvars
        ):
            found.update(a for a in e.invars if isinstance(a, jx.Var))
    for e in [e for e in jaxpr.eqns if e.primitive is lax.concatenate_p or _is_elementwise(e)]:
        if any(isinstance(a, jx.Var) and a in found for a in e.invars):
            found.update(e.outvars)
    return found


def layer_loop(
    layers: Layers,
    state: Mapping[jx.Var, jx.Var],
    results: Mapping[jx.Var, jx.Var],
    carried: Mapping[jx.Var, jx.Var],
    rules: Rules,
) -> list[jx.JaxprEqn]:
    """The loop over ``layers``.

    Args:
      state: by array, what it is on the host.
      results: by result, what it is on the host, where it goes there.
      carried: by result, the argument that it replaces, in whose place it is written.

    Raises:
      ChunkError: a result replaces no argument, or an operation does not run on one layer.
    """
    equations, cuts = layers.equations, layers.cuts
    made = {v for c in equations for v in c.eqn.outvars}
    places = {v: carried[v] for v in layers.results if v in carried}
    if len(places) < len(layers.results) or any((v in state) != (w in results) for w, v in places.items()):
        raise ChunkError("a result of the update replaces no argument", jx.source(equations[0].eqn))
    read = (a for c in equations for a in c.eqn.invars if isinstance(a, jx.Var) and a not in made)
    inputs = list(dict.fromkeys((*read, *places.values())))
    count = next(iter(cuts.values())).chunks

    def loop(*values: Any) -> list[Any]:
        given = dict(zip(inputs, values, strict=True))

        def body(i: Any, buffers: list[Any]) -> list[Any]:
            rows: dict[jx.Var, Any] = {}
            arrays = given | dict(zip(places.values(), buffers, strict=True))

            def operand(atom: jx.Atom, cut: Cut | None) -> Any:
                if isinstance(atom, jx.Literal):
                    return atom.val
                if cut is None:
                    return given[atom]
                if atom not in rows:
                    row = _row(arrays[atom], i)
                    rows[atom] = jax.device_put(row, jax.memory.Space.Device) if atom in state else row
                return rows[atom]

            for c in equations:
                operands = [operand(a, cut) for a, cut in zip(c.eqn.invars, c.operands, strict=True)]
                rows.update(zip(c.eqn.outvars, c.run(operands, rules), strict=True))
            return [
                _with_row(x, jax.device_put(rows[v], jax.memory.Space.Host) if v in results else rows[v], i)
                for v, x in zip(places, buffers, strict=True)
            ]

        return lax.fori_loop(0, count, body, [given[v] for v in places.values()])

    like = jx.outside_autodiff(equations[0].eqn).replace(outvars=[results.get(v, v) for v in places])
    operands = [state.get(v, v) for v in inputs]
    try:
        return jx.splice(jx.eliminate_dead_code(jx.normalize(jx.stage_out(loop, like, operands))), like, operands)
    except (TypeError, ValueError) as e:
        raise ChunkError(f"its operations do not run on one layer: {e}", jx.source(like)) from e


def _row(x: Any, i: Any) -> Any:
    """Row ``i`` of ``x``, as an array of one row."""
    start = (i, *(np.int32(0),) * (x.ndim - 1))
    return lax.dynamic_slice(x, start, (1, *x.shape[1:]), allow_negative_indices=False)


def _with_row(x: Any, row: Any, i: Any) -> Any:
    """``x`` with ``row`` in place of row ``i``."""
    start = (i, *(np.int32(0),) * (x.ndim - 1))
    return lax.dynamic_update_slice(x, row, start, allow_negative_indices=False)
