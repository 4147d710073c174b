"""Moves carried arrays of a program to the host's memory: in before the equations that update them, out after those.

All that depends on these arrays is an *update*: the equations that share a value belong to one. Updates run after all
else, one after the other, so that the state of one is on the device while the others wait on the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import cast

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.program import Program
from autoshard.passes.offload.layers import StepJaxpr, layer_loop, layers_of
from autoshard.passes.offload.parameters import with_rows_from_host
from autoshard.transforms.held_values.on_host import moved

Updates = list[list[jx.JaxprEqn]]


def offload_carried(
    program: Program, jaxpr: jx.Jaxpr, pairs: Mapping[int, int], parameters: Collection[int] = ()
) -> jx.Jaxpr:
    """``jaxpr`` with the inputs ``pairs`` in the host's memory, and the outputs that replace them too.

    Args:
      program: of which ``jaxpr`` is that, or that without padding.
      pairs: output by input, both as flat positions.
      parameters: those of the inputs that loops over layers read.
    """
    invars, outvars = list(jaxpr.invars), list(jaxpr.outvars)
    on_host = {invars[i]: jx.host_var(invars[i]) for i in pairs}
    jaxpr = with_rows_from_host(jaxpr, {invars[i]: on_host[invars[i]] for i in parameters}) if parameters else jaxpr
    carried = {v: invars[i] for i, o in program.carries if isinstance(v := outvars[o], jx.Var)}
    results = {v: jx.host_var(v) for o in pairs.values() if (v := outvars[o]) in carried and v not in on_host}
    step, (eqns, updates) = StepJaxpr(jaxpr), _updates(jaxpr, on_host)
    for update in updates:
        try:
            layers = layers_of(step, eqns, update, on_host, program)
            eqns = [*layers.before, *layer_loop(layers, on_host, results, carried, program.rules)]
        except ChunkError:
            eqns += _whole(update, on_host, results)
    made, last = {v for e in eqns for v in e.outvars}, jaxpr.eqns[-1]
    eqns += [_device_put(v, host, last) for v, host in results.items() if host not in made]
    hosts = {**on_host, **results}
    for o in pairs.values():
        outvars[o] = hosts[cast(jx.Var, outvars[o])]
    eqns += [_device_put(host, v, last) for v, host in hosts.items() if v in {*outvars} - made]
    return jx.with_eqns(jaxpr, eqns, invars=[on_host.get(v, v) for v in invars], outvars=outvars)


def _updates(jaxpr: jx.Jaxpr, state: Mapping[jx.Var, jx.Var]) -> tuple[list[jx.JaxprEqn], Updates]:
    """The equations that do not depend on ``state``, and the updates; one of all equations where some have effects,
    whose order is kept."""
    group: dict[jx.Var, int] = {v: n for n, v in enumerate(state)}
    joined = list(range(len(group)))

    def root(n: int) -> int:
        while joined[n] != n:
            n = joined[n]
        return n

    rest, dependent = list[jx.JaxprEqn](), list[jx.JaxprEqn]()
    for e in jaxpr.eqns:
        read = [group[a] for a in e.invars if isinstance(a, jx.Var) and a in group]
        (dependent if read else rest).append(e)
        for n in read:
            joined[root(n)] = root(read[0])
        group.update(dict.fromkeys(e.outvars, read[0]) if read else {})
    if any(e.effects for e in dependent):
        return [], [list(jaxpr.eqns)]
    found: dict[int, list[jx.JaxprEqn]] = defaultdict(list)
    for e in dependent:
        found[root(next(group[a] for a in e.invars if isinstance(a, jx.Var) and a in group))].append(e)
    return rest, list(found.values())


def _whole(
    update: Sequence[jx.JaxprEqn], on_host: Mapping[jx.Var, jx.Var], results: Mapping[jx.Var, jx.Var]
) -> Iterator[jx.JaxprEqn]:
    """``update`` with each array that it reads brought in before the first equation that does, and each result sent
    out as it is made."""
    brought = set[jx.Var]()
    for e in update:
        for v in dict.fromkeys(a for a in e.invars if isinstance(a, jx.Var)):
            if v in on_host and v not in brought:
                brought.add(v)
                yield _device_put(on_host[v], v, e)
        yield e
        yield from (_device_put(v, results[v], e) for v in e.outvars if v in results)


def _device_put(source: jx.Atom, result: jx.Var, like: jx.JaxprEqn) -> jx.JaxprEqn:
    """The equation that copies ``source`` to the memory of ``result``."""
    (eqn,) = moved(source, result, jx.outside_autodiff(like))
    return eqn
