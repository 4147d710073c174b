"""The gradient of a norm over channels is written once for both gradients of the depthwise convolution before it.

XLA computes elementwise operands where they are read. For TPUs (libtpu 0.0.50) a depthwise convolution then computes
them for each window, of parts that overlap, and again for the kernel's gradient. Of batch norms that costs no more than
writing them would; of norms over channels, which take a number of each position and spread it over the lanes, twice
what the convolution takes alone. A barrier has XLA write the array before both read it.
"""

from __future__ import annotations

from jax.extend.core.primitives import add_jaxvals_p

from autoshard import jaxpr as jx
from autoshard.ir.rule_registry import Rules
from autoshard.passes.norms.centered import Values


def written_gradients(jaxpr: jx.Jaxpr, rules: Rules) -> tuple[jx.Jaxpr, list[jx.JaxprEqn]]:
    """``jaxpr`` with a barrier before what both gradients of a depthwise convolution read, and the equations that make
    it; itself where there is none."""
    values, channels, in_kernels = Values(jaxpr), dict[jx.Atom, int](), set[jx.Atom]()
    for eqn in jaxpr.eqns:
        dims = jx.convolution(eqn)
        if dims is None or not dims.grouped:
            continue
        image, cotangent = eqn.invars
        if eqn.params["feature_group_count"] == jx.aval(image).shape[dims.lhs[1]]:
            channels[image] = dims.lhs[1]
        elif eqn.params["batch_group_count"] == jx.aval(image).shape[dims.lhs[0]]:
            in_kernels.add(cotangent)
    made = {v: e for v, d in channels.items() if v in in_kernels and (e := _normed_over(v, d, values, rules))}
    if not made:
        return jaxpr, []
    barriers = {e: jx.optimization_barrier(e.outvars, e) for e in made.values()}
    written = {v: b for e, barrier in barriers.items() for v, b in zip(e.outvars, barrier.outvars, strict=True)}
    eqns = list[jx.JaxprEqn]()
    for eqn in jaxpr.eqns:
        reads = jx.convolution(eqn) is not None
        eqns.append(eqn.replace(invars=[written.get(a, a) for a in eqn.invars]) if reads else eqn)  # type: ignore[arg-type]
        eqns += [barriers[eqn]] if eqn in barriers else []
    return jx.with_eqns(jaxpr, eqns), [*barriers]


def _normed_over(value: jx.Atom, channels: int, values: Values, rules: Rules) -> jx.JaxprEqn | None:
    """The elementwise equation that makes a value, where it or those before it read an array that is constant along
    ``channels`` and along no other dimension; else None."""
    last, todo, seen = values.maker(value), [value], set[jx.Atom]()
    shape = jx.aval(value).shape
    while todo:
        atom = todo.pop()
        eqn = values.maker(atom)
        if eqn is None or atom in seen or not _is_elementwise(eqn, rules):
            continue
        seen.add(atom)
        for operand in eqn.invars:
            sizes = jx.aval(operand).shape
            if not sizes:
                continue
            alone = all(values.constant_along(operand, [d], shape) is None for d in range(len(shape)) if d != channels)
            if values.constant_along(operand, [channels], shape) is not None and alone:
                return last
            todo += [operand] if sizes == shape else []
    return None


def _is_elementwise(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    traits = rules.traits(eqn.primitive)
    return eqn.primitive is add_jaxvals_p or traits.stretches or traits.casts
