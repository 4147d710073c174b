"""Replaces a region by a loop over chunks of its tokens."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError
from autoshard.ir.rule_registry import Rules
from autoshard.passes.losses.region import Region
from autoshard.transforms.batch_parts.cut import REDUCTIONS, Cut
from autoshard.transforms.per_part_sums import with_per_part_sums


def with_loop(jaxpr: jx.Jaxpr, region: Region, rules: Rules, parts: int) -> jx.Jaxpr:
    """``jaxpr`` with ``region`` replaced by a loop.

    Args:
      parts: how many partial sums the loop accumulates, to be added after it.

    Raises:
      ChunkError: an operation of the region does not run on chunks, or what runs in between has effects.
    """
    read = list(dict.fromkeys(v for v, _ in region.inputs))
    seed = region.seed.replace(outvars=region.results)
    try:
        staged = jx.normalize(
            jx.stage_out(lambda *xs: _loop(region, rules, dict(zip(read, xs, strict=True))), seed, read)
        )
    except (TypeError, ValueError) as e:
        raise ChunkError(f"its operations do not run on chunks: {e}", jx.source(region.seed)) from e
    staged = jx.eliminate_dead_code(staged)
    if parts > 1:
        staged = with_per_part_sums(staged, parts, rules)
    loop = jx.splice(staged, seed, read)
    made = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
    at = 1 + max([made[v] for v in read if v in made], default=-1)
    late, moved = set(region.results), list[jx.JaxprEqn]()
    before: list[jx.JaxprEqn] = []
    for i, eqn in enumerate(jaxpr.eqns[:at]):
        if i in region.replaced:
            continue
        if late.isdisjoint(a for a in eqn.invars if isinstance(a, jx.Var)):
            before.append(eqn)
            continue
        if eqn.effects:
            raise ChunkError(f"{eqn.primitive.name} has effects and reads it before all of it can be", jx.source(eqn))
        moved.append(eqn)
        late.update(eqn.outvars)
    after = [e for i, e in enumerate(jaxpr.eqns[at:], at) if i not in region.replaced]
    return jx.with_eqns(jaxpr, [*before, *loop, *moved, *after])


def _loop(region: Region, rules: Rules, given: dict[jx.Var, Any]) -> list[Any]:
    """The region's results, computed chunk by chunk."""
    cut = [(v, c) for v, c in region.inputs if c is not None]
    large = [(v, c) for v, c in cut if region.is_large(v)]
    sliced = [(v, c) for v, c in cut if not region.is_large(v)]
    whole: dict[tuple[jx.Var, Cut | None], Any] = {(v, None): given[v] for v, c in region.inputs if c is None}

    def body(totals: list[Any], at: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
        i, chunks = at
        env = whole | dict(zip(sliced, chunks, strict=True)) | {(v, c): c.chunk(given[v], i) for v, c in large}
        sums: dict[jx.Var, Any] = {}
        for step in region.equations:
            operands = [
                a.val if isinstance(a, jx.Literal) else env[a, c]
                for a, c in zip(step.eqn.invars, step.operands, strict=True)
            ]
            found = step.run(operands, rules)
            env.update(((v, c), x) for v, c, x in zip(step.eqn.outvars, step.results, found, strict=True))
            sums.update(zip(step.eqn.outvars, found, strict=True) if step.reduction else ())
        added = [
            REDUCTIONS[kind].combine(total, sums[v]) for total, (v, kind) in zip(totals, region.totals, strict=True)
        ]
        return added, [env[key] for key in region.token_results]

    start = [_start(v, kind) for v, kind in region.totals]
    slices = jnp.arange(region.chunks), [c.split(given[v]) for v, c in sliced]
    totals, rows = lax.scan(body, start, slices)
    joined = [c.join(x) for x, (_, c) in zip(rows, region.token_results, strict=True) if c is not None]
    ends = [lax.convert_element_type(x, jx.aval(v).dtype) for x, (v, _) in zip(totals, region.totals, strict=True)]
    return [*joined, *ends]


def _start(var: jx.Var, kind: str) -> Any:
    """What a total is before the first chunk; sums of few digits are accumulated in float32."""
    aval = jx.aval(var)
    short = kind == "sum" and jax.dtypes.issubdtype(aval.dtype, np.floating) and jx.dtype_bits(aval.dtype) < 32
    dtype = np.dtype(np.float32) if short else aval.dtype
    return jnp.full(aval.shape, REDUCTIONS[kind].neutral(dtype), dtype)
