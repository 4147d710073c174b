"""Stores the state of a step with padding, where the mesh cannot split it evenly: 50,257 rows as 50,264 over 8 devices.

The arguments and results of the program become longer; it begins by cutting the padding off and ends by adding zeros.
`autoshard.passes.pad_uneven` then computes on what is stored, with the padding masked wherever it would be reduced, so
that nothing is cut off, or gathered for that, between one step and the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from autoshard import jaxpr as jx
from autoshard.ir.program import Leaf, Program
from autoshard.machine.mesh import LogicalMesh

Shape = tuple[int, ...]

MOST_PADDING = 4
"""At most one in this many elements of a stored dimension is padding: 6 heads may be stored as 8, not 5 as 8."""
FREE_PADDING = 64
"""Where no more than one in this many is padding, a dimension is padded although others can be split."""


def padded_shapes(program: Program) -> dict[int, Shape]:
    """For each flat argument that a result replaces and that the mesh divides better with padding: its shape with it.

    Arguments that the user pinned, those in the host's memory, and those that are no plain arrays, are left as they
    are.
    """
    found: dict[int, Shape] = {}
    for i, o in program.carries:
        leaf, pair = program.inputs[i], (program.inputs[i], program.outputs[o])
        free = all(x.pin is None and x.memory_kind is None and x.padded_from is None for x in pair)
        if free and jx.is_array(program.jaxpr.invars[i]):
            shape = stored_shape(leaf.shape, program.mesh)
            if shape != leaf.shape:
                found[i] = shape
    return found


def stored_shape(shape: Shape, mesh: LogicalMesh) -> Shape:
    """The shape to store an array with: the one with the smallest shards over all of ``mesh``, of equal ones the one
    with the least padding, then the one that pads what else can be split least. Dimensions in which padding costs next
    to nothing are always padded.
    """
    if not math.prod(shape):
        return shape
    free = (_sizes(n, mesh, FREE_PADDING) for n in shape)
    best = tuple(max(sizes, key=lambda m: math.gcd(m, mesh.size)) for sizes in free)
    for _ in shape:
        padded = [(d, m) for d, n in enumerate(shape) for m in _sizes(n, mesh, MOST_PADDING) if m > best[d]]
        options = [best, *((*best[:d], m, *best[d + 1 :]) for d, m in padded)]
        best = min(options, key=lambda s: (_shard_elements(s, mesh), math.prod(s), _split_before(s, shape, mesh)))
    return best


def _split_before(stored: Shape, shape: Shape, mesh: LogicalMesh) -> int:
    """Into how many parts the dimensions that ``stored`` pads could be split without that."""
    return math.prod(math.gcd(n, mesh.size) for m, n in zip(stored, shape, strict=True) if m != n)


def _sizes(n: int, mesh: LogicalMesh, one_in: int) -> list[int]:
    """``n``, and the sizes that a dimension of ``n`` may be padded to, where one in ``one_in`` may be padding."""
    parts = {1}
    for size in mesh.shape.values():
        parts |= {size * p for p in parts}
    sizes = [-(-n // p) * p for p in sorted(parts)]
    return [m for m in sizes if (m - n) * one_in <= m]


def _shard_elements(shape: Shape, mesh: LogicalMesh) -> int:
    """The fewest elements that the largest shard of an array of ``shape`` can have on ``mesh``."""
    rests = {shape}
    for size in mesh.shape.values():
        rests |= {(*r[:d], n // size, *r[d + 1 :]) for r in rests for d, n in enumerate(r) if n % size == 0}
    return min(map(math.prod, rests))


def pad_state(program: Program, shapes: Mapping[int, Shape]) -> Program:
    """``program`` with the flat arguments ``shapes`` stored in these shapes, and the results that replace them too.

    The padding of a result is zero; that of an argument may be anything.
    """
    if not shapes or not program.jaxpr.eqns:
        return program
    jaxpr, first, last = program.jaxpr, program.jaxpr.eqns[0], program.jaxpr.eqns[-1]
    inputs, outputs = list(program.inputs), list(program.outputs)
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    begin: list[jx.JaxprEqn] = []
    end: list[jx.JaxprEqn] = []
    for i, shape in shapes.items():
        var, true = invars[i], inputs[i].shape
        invars[i] = jx.resized_var(var, shape)
        begin += jx.splice(lambda x, true=true: jx.cut_padding(x, true), first.replace(outvars=[var]), [invars[i]])
        inputs[i] = _stored(inputs[i], shape)
    for i, o in program.carries:
        if i in shapes:
            eqns, (outvars[o],) = jx.emit(lambda x, to=shapes[i]: jx.add_padding(x, to), last, outvars[o])
            end += eqns
            outputs[o] = _stored(outputs[o], shapes[i])
    jaxpr = jx.with_eqns(jaxpr, [*begin, *jaxpr.eqns, *end], invars=invars, outvars=outvars)
    return replace(program, jaxpr=jaxpr, inputs=tuple(inputs), outputs=tuple(outputs))


def _stored(leaf: Leaf, shape: Shape) -> Leaf:
    return replace(leaf, padded_from=leaf.shape, aval=leaf.aval.update(shape=shape))
