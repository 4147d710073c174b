"""align: values that miss a few rows of a dimension keep them, so that the dimension still divides over the mesh.

``x[1:] - x[:-1]`` of 1024 rows has 1023, which no mesh divides; each slice would have to be gathered first. Here it is
computed of 1024 rows, the last of which means nothing: a shift of ``x``, which neighbours hand on, less ``x``. What
means nothing goes along through every operation whose rule has that dimension pass, is overwritten by the neutral
element before it is reduced, and is cut off where the value is put together with others, padded, or a result.

So a chain of slices, padding and concatenations, as `jax.numpy.roll` is one, becomes one shift of its operand a piece.
Programs in which no such size arises stay as they are. Values are the same, up to the order in which sums are added.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard import jaxpr as jx
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules, sealed
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms.pad_elementwise import longer
from autoshard.transforms.pad_moves import laid, tiled, viewed
from autoshard.transforms.pad_state import FREE, Body

MOVES = {"concatenate": laid, "pad": viewed, "slice": viewed, "split": viewed, "tile": tiled}


def aligned(program: Program) -> Program:
    """``program`` with its uneven values made longer; the same object where there are none."""
    jaxpr = _aligned(program.jaxpr, program.rules, program.mesh)
    return program if jaxpr is program.jaxpr else replace(program, jaxpr=jaxpr, written=program.jaxpr)


def _aligned(jaxpr: jx.Jaxpr, rules: Rules, mesh: LogicalMesh) -> jx.Jaxpr:
    body = Body(rules, mesh)
    for eqn in jaxpr.eqns:
        _run(body, eqn)
    outvars = [body.exact(a) for a in jaxpr.outvars]
    return jx.with_code(jaxpr, body.eqns, outvars=outvars) if body.changed else jaxpr


def _run(body: Body, eqn: jx.JaxprEqn) -> None:
    """Adds to ``body`` what ``eqn`` becomes."""
    name = eqn.primitive.name
    uneven = bool(body.views) and any(isinstance(a, jx.Var) and a in body.views for a in eqn.invars)
    if not uneven and name not in MOVES and not jx.regions(eqn):
        if name in FREE:
            body.makers[eqn.outvars[0]] = eqn
        body.eqns.append(eqn)
        return
    shaped = [a for a in (*eqn.invars, *eqn.outvars) if jx.is_shaped(a)]
    full = all(map(jx.is_array, eqn.outvars)) and all(math.prod(jx.aval(a).shape) for a in shaped)
    if full and name in MOVES and MOVES[name](body, eqn):
        return
    inner = sealed(eqn, body.rules)
    if full and uneven and (_called(body, eqn) if name == "custom_jvp_call" and not inner else longer(body, eqn)):
        return
    eqn = eqn.replace(invars=[body.exact(a) for a in eqn.invars])
    if name in FREE:
        body.makers[eqn.outvars[0]] = eqn
    new = eqn if inner else jx.within(eqn, lambda b: _aligned(b, body.rules, body.mesh))
    body.changed |= new is not eqn
    body.eqns.append(new)


def _called(body: Body, eqn: jx.JaxprEqn) -> bool:
    """Runs the body of a function with a derivative of its own, of which no derivative is taken any more."""
    (region,), views = jx.regions(eqn), [body.view(a) for a in eqn.invars]
    wider = any((body.length(m, n) or m) > m for v in views for m, n in zip(v.shape, v.around, strict=True))
    if region.body.constvars or not wider:
        return False
    body.views.update(zip(region.body.invars, views, strict=True))
    body.makers.update(dict.fromkeys(region.body.invars, eqn))
    for e in region.body.eqns:
        _run(body, e)
    body.see(eqn, [body.view(a) for a in region.body.outvars])
    body.changed = True
    return True
