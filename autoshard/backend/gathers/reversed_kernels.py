"""Kernels of convolutions gathered before they are reversed.

The gradient of a convolution's input is a convolution with the reversed kernel. XLA for GPUs (JAX 0.12) calls cuDNN's
own routine for it where that convolution reads the reversal itself. Where it reads a gathered one, it is computed as
any other convolution: of a strided one, of an operand that is mostly zeros, which takes as many times longer as the
stride takes positions. Reversing and placing an array commute, so that what a convolution reads of a reversal is placed
first.
"""

from __future__ import annotations

from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx


def place_before_reversal(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
    """``jaxpr`` in which no sharding constraint stands between a reversal and the convolution that alone reads it; also
    in bodies of loops. Itself where there is nothing of the kind."""
    eqns = [jx.map_bodies(e, place_before_reversal) for e in jaxpr.eqns]
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    uses, made = jx.use_counts(jaxpr), {v: n for n, e in enumerate(eqns) for v in e.outvars}
    for eqn in eqns:
        if eqn.primitive is not _prims.conv_general_dilated_p:
            continue
        chain, kernel = list[int](), eqn.invars[1]
        while isinstance(kernel, jx.Var) and kernel in made and uses[kernel] == 1:
            chain.insert(0, made[kernel])
            if not jx.is_constraint(eqns[chain[0]]):
                break
            kernel = eqns[chain[0]].invars[0]
        if len(chain) > 1 and eqns[chain[0]].primitive is _prims.rev_p:
            _move_last(eqns, chain)
            changed = True
    return jx.with_eqns(jaxpr, eqns) if changed else jaxpr


def _move_last(eqns: list[jx.JaxprEqn], chain: list[int]) -> None:
    """Puts the first of a chain of equations, each of which reads the result of the one before, at its end."""
    first, *others = (eqns[n] for n in chain)
    (operand,), (result,) = first.invars, others[-1].outvars
    for n, eqn in zip(chain, others, strict=False):
        placed = jx.Var(operand.aval)
        eqns[n] = eqn.replace(invars=[operand], outvars=[placed])
        operand = placed
    eqns[chain[-1]] = first.replace(invars=[operand], outvars=[result])
