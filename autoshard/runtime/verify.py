"""verify: sharded against unsharded, and the first equation where they part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard import jaxpr as jx
from autoshard.errors import VerificationError
from autoshard.ir.program import aval_text
from autoshard.runtime.step import Step

NARROW_TOLERANCE = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
"""Least tolerance of narrow types: four steps of their own resolution."""


@dataclass(frozen=True)
class Difference:
    """How far one value is off: the largest error, absolute and as a share of the value's largest entry."""

    path: str
    absolute: float
    relative: float
    tolerance: float
    """Of `relative`."""

    @property
    def equal(self) -> bool:
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return f"{self.path}: off by {self.absolute:.3g}, {self.relative:.3g} of its largest entry"


@dataclass(frozen=True)
class Verification:
    """Every result compared, the worst first."""

    results: tuple[Difference, ...]

    def __str__(self) -> str:
        if not self.results:
            return "no results to compare"
        return f"{len(self.results)} results equal; the largest difference is {self.results[0]}"


def verify(step: Any, *args: Any, rtol: float = 1e-4, **kwargs: Any) -> Verification:
    """Runs ``step`` as planned and on one device, and compares every result.

    Arguments are copied, so nothing is donated and no module is changed. Floating-point results agree when no
    entry is off by more than ``rtol`` (narrow types: four steps of their resolution) of the result's largest entry, for
    float addition is not associative, and an optimizer that divides by small gradients enlarges that; all others must
    be equal, typed PRNG keys word by word. NaNs agree with NaNs.

    Args:
      step: what `autoshard.jit` returned.

    Raises:
      VerificationError: some result differs. The message names it, and the first equation whose value differs, with
        its source line.
      ArgumentError and others: as calling the step would.
    """
    if not isinstance(step, Step):
        raise VerificationError(f"verify takes what autoshard.jit returned, not {type(step).__name__}")
    entry = step.executable(*args, **kwargs)
    leaves = [_host_copy(x) for x in jax.tree.leaves(step.dynamic(*args, **kwargs))]
    expected = _evaluate(entry.program.unpadded_jaxpr or entry.program.jaxpr, leaves)
    got = _evaluate(entry.jaxpr, entry.device_put(leaves))
    paths = [leaf.path for leaf in entry.program.outputs]
    results = sorted(_compare_all(paths, expected, got, rtol), key=lambda d: -d.relative)
    wrong = [d for d in results if not d.equal]
    if wrong:
        where = _first_divergence(entry.program.jaxpr, entry.jaxpr, leaves, entry.device_put(leaves), rtol)
        raise VerificationError(
            f"{entry.program.name}: {len(wrong)} of {len(results)} results differ between {entry.plan.mesh} and one "
            f"device; {wrong[0]}. {where}"
        )
    return Verification(tuple(results))


def _evaluate(jaxpr: jx.Jaxpr, leaves: Sequence[Any]) -> list[Any]:
    fun: Callable[..., list[Any]] = jx.as_fun(jaxpr)
    return [_host_copy(x) for x in jax.jit(fun)(*leaves)]


def _compare_all(paths: Sequence[str], expected: Sequence[Any], got: Sequence[Any], rtol: float) -> list[Difference]:
    return [compare(p, e, g, rtol) for p, e, g in zip(paths, expected, got, strict=True)]


def compare(path: str, expected: Any, got: Any, rtol: float) -> Difference:
    """How far ``got`` is from ``expected``, as `verify` judges it."""
    a, b = np.asarray(_key_words(expected)), np.asarray(_key_words(got))
    if a.dtype.kind not in "fcV" or a.size == 0:
        wrong = float(np.sum(a != b)) if a.size else 0.0
        return Difference(path, wrong, wrong, 0.0)
    name, wide = str(a.dtype), np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    worst = float(np.max(np.where(np.isnan(off), np.inf, off)))
    scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
    coarse = NARROW_TOLERANCE.get(name, 2.0**-2 if name.startswith("float8") else 0.0)
    return Difference(path, worst, worst / scale if scale else worst, max(rtol, coarse))


def _first_divergence(
    plain: jx.Jaxpr, planned: jx.Jaxpr, leaves: Sequence[Any], placed: Sequence[Any], rtol: float
) -> str:
    """Evaluates both programs with every intermediate as a result, and says where they part."""
    eqns = [e for e in plain.eqns if e.outvars and not e.effects]
    made = {v for e in planned.eqns for v in e.outvars}
    shown = [(e, v) for e in eqns for v in e.outvars if v in made and jx.is_array(v)]
    both = [
        _evaluate(j.replace(outvars=[v for _, v in shown]), given) for j, given in ((plain, leaves), (planned, placed))
    ]
    for (eqn, var), a, b in zip(shown, *both, strict=True):
        d = compare("", a, b, rtol)
        if not d.equal:
            where = jx.source(eqn) or "an equation without a source line"
            return (
                f"They part first at {where}: {eqn.primitive.name} -> {aval_text(var.aval)}, off by "
                f"{d.absolute:.3g} ({d.relative:.3g} of its largest entry)"
            )
    return "No equation differs once every intermediate is kept: the difference comes with fusion or scheduling"


def _key_words(x: Any) -> Any:
    """The words of typed PRNG keys; anything else as it is."""
    keys = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if keys else x


def _host_copy(x: Any) -> Any:
    """``x`` on the host, where it can be there; nothing that is done with it can then reach the caller's array."""
    if not isinstance(x, jax.Array):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.numpy.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return np.array(x)
