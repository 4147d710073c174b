"""Compares a sharded step with the same step on one device, and finds the first equation where they differ; and the
program before each pass with that after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard import jaxpr as jx
from autoshard.errors import VerificationError
from autoshard.ir.program import aval_text
from autoshard.runtime.step import Step
from autoshard.transforms.pipeline import AppliedPass


@dataclass(frozen=True)
class Difference:
    """The difference of one result: its largest error, absolute and relative to the result's largest entry."""

    path: str
    absolute: float
    relative: float
    tolerance: float
    """Largest `relative` that counts as equal."""

    @property
    def equal(self) -> bool:
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return f"{self.path}: error {self.absolute:.3g}, {self.relative:.3g} of its largest entry"


@dataclass(frozen=True, repr=False)
class Verification:
    """The comparison of every result, largest difference first.

    Example:
      >>> autoshard.verify(autoshard.jit(lambda x: x + 1, mesh={"data": 8}), jnp.ones(8))
      <Verification: 1 results equal; the largest difference is result: error 0, 0 of its largest entry>
    """

    results: tuple[Difference, ...]
    passes: tuple[tuple[str, Difference], ...] = ()
    """Where passes were compared: each that rewrote the program, with the largest difference that it makes."""

    def __str__(self) -> str:
        if not self.results:
            return "no results to compare"
        text = f"{len(self.results)} results equal; the largest difference is {self.results[0]}"
        return "; ".join([text, *(f"across the pass {name}, {d}" for name, d in self.passes)])

    def __repr__(self) -> str:
        return f"<Verification: {self}>"


def verify(step: Any, *args: Any, rtol: float = 1e-4, passes: bool = False, **kwargs: Any) -> Verification:
    """Runs ``step`` as planned and on one device, and compares every result.

    Arguments are copied, so nothing is donated and no module is changed. Floating-point results are equal if no entry
    differs by more than ``rtol`` (narrow dtypes: four times their unit roundoff) of the result's largest entry: float
    addition is not associative, and an optimizer that divides by small gradients amplifies that. All others must be
    identical, typed PRNG keys by their key data. NaN equals NaN. In a program of several processes all must call it,
    and each compares all results.

    Args:
      step: a `Step`, as from `autoshard.jit`.
      args, kwargs: its arguments.
      rtol: the largest difference that is none, as a share of the result's largest entry.
      passes: whether to compare, before that, the program as traced with the program after each pass, on one device. By
        itself the sharded program is compared with what the passes made of the step.

    Raises:
      VerificationError: a result differs. The message names it, and the first equation whose value differs, with its
        source line; or the pass across which it differs.
      ArgumentError and others: as calling the step would.

    Example:
      >>> step = autoshard.jit(lambda x: jnp.tanh(x) @ x.T, mesh={"data": 4, "model": 2}, strategy="dp")
      >>> found = autoshard.verify(step, jnp.ones((64, 16)))
      >>> len(found.results), found.results[0].equal
      (1, True)
    """
    if not isinstance(step, Step):
        raise VerificationError(f"verify takes a step made by autoshard.jit, not a {type(step).__name__}")
    executable = step.executable(*args, **kwargs)
    program = executable.program
    leaves = [_host_copy(x) for x in jax.tree.leaves(step.dynamic(*args, **kwargs))]
    stored = zip(leaves, program.inputs, strict=True)
    leaves = [x if p.stored_shape is None else jx.add_padding(np.asarray(x), p.stored_shape) for x, p in stored]
    paths = [leaf.path for leaf in program.outputs]
    across = tuple(_compare_passes(step.rewrites(*args, **kwargs), leaves, rtol)) if passes else ()
    expected = _evaluate(program.unpadded_jaxpr or program.jaxpr, leaves)
    got = _evaluate(executable.jaxpr, executable.device_put(leaves))
    results = _compare_all(paths, expected, got, rtol)
    wrong = [d for d in results if not d.equal]
    if wrong:
        where = _first_divergence(program.jaxpr, executable.jaxpr, leaves, executable.device_put(leaves), rtol)
        raise VerificationError(
            f"{program.name}: {len(wrong)} of {len(results)} results differ between {executable.plan.mesh} and one "
            f"device; {wrong[0]}. {where}"
        )
    return Verification(tuple(results), across)


def _compare_passes(
    rewrites: Iterable[AppliedPass], leaves: Sequence[Any], rtol: float
) -> Iterator[tuple[str, Difference]]:
    """Each pass that rewrote the program, with the largest difference of a result before and after it.

    Raises:
      VerificationError: that is too large.
    """
    before: list[Any] = []
    for rewrite in rewrites:
        if rewrite.after.jaxpr is rewrite.before.jaxpr:
            continue
        program, report = rewrite.before, rewrite.report
        before = before or _evaluate(program.jaxpr, leaves)
        after = _evaluate(rewrite.after.jaxpr, leaves)
        found = _compare_all([leaf.path for leaf in program.outputs], before, after, rtol)
        if any(not d.equal for d in found):
            raise VerificationError(
                f"{program.name}: the pass {report.written} changes {sum(not d.equal for d in found)} of {len(found)} "
                f"results on one device; {next(d for d in found if not d.equal)}. It did: {report.change}"
            )
        if found:
            yield report.written, found[0]
        before = after


def _evaluate(jaxpr: jx.Jaxpr, leaves: Sequence[Any]) -> list[Any]:
    """The results of ``jaxpr``, whose arguments may be in other memories than ``leaves``."""
    fun: Callable[..., list[Any]] = jx.as_fun(jaxpr)
    spaces = [getattr(aval, "memory_space", None) for aval in jaxpr.in_avals]

    def evaluated(*given: Any) -> list[Any]:
        return fun(*(x if s is None else jax.device_put(x, s) for x, s in zip(given, spaces, strict=True)))

    return [_host_copy(x) for x in jax.jit(evaluated)(*leaves)]


def _compare_all(paths: Sequence[str], expected: Sequence[Any], got: Sequence[Any], rtol: float) -> list[Difference]:
    """The difference of each result, the largest first."""
    found = [compare_arrays(p, e, g, rtol) for p, e, g in zip(paths, expected, got, strict=True)]
    return sorted(found, key=lambda d: -d.relative)


def compare_arrays(path: str, expected: Any, got: Any, rtol: float) -> Difference:
    """The difference of ``got`` from ``expected``, with the tolerance for their dtype."""
    a, b = np.asarray(_key_words(expected)), np.asarray(_key_words(got))
    if not jax.dtypes.issubdtype(a.dtype, np.inexact) or a.size == 0:
        wrong = float(np.sum(a != b)) if a.size else 0.0
        return Difference(path, wrong, wrong, 0.0)
    narrow = 2 * float(jax.numpy.finfo(a.dtype).eps) if jx.dtype_bits(a.dtype) < 32 else 0.0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        error = np.where(same, 0.0, np.abs(a - b))
    largest = float(np.max(np.where(np.isnan(error), np.inf, error)))
    scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
    return Difference(path, largest, largest / scale if scale else largest, max(rtol, narrow))


def _first_divergence(
    unsharded: jx.Jaxpr, constrained: jx.Jaxpr, leaves: Sequence[Any], placed: Sequence[Any], rtol: float
) -> str:
    """Evaluates both programs with every intermediate as a result; a sentence on the first equation that differs."""
    eqns = [e for e in unsharded.eqns if e.outvars and not e.effects]
    common = {v for e in constrained.eqns for v in e.outvars}
    compared = [(e, v) for e in eqns for v in e.outvars if v in common and jx.is_array(v)]
    expected, got = (
        _evaluate(jaxpr.replace(outvars=[v for _, v in compared]), arguments)
        for jaxpr, arguments in ((unsharded, leaves), (constrained, placed))
    )
    for (eqn, var), a, b in zip(compared, expected, got, strict=True):
        d = compare_arrays("", a, b, rtol)
        if not d.equal:
            where = jx.source(eqn) or "an equation without a source line"
            return (
                f"They differ first at {where}: {eqn.primitive.name} -> {aval_text(var.aval)}, error "
                f"{d.absolute:.3g} ({d.relative:.3g} of its largest entry)"
            )
    return "No equation differs if every intermediate is a result: the difference comes from fusion or scheduling"


def _key_words(x: Any) -> Any:
    """The key data of typed PRNG keys; anything else unchanged."""
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _host_copy(x: Any) -> Any:
    """A copy of all of ``x`` on the host, so that the caller's array is not used; of typed PRNG keys, on the default
    device. Where other processes have parts of ``x``, all of them must make the copy.
    """
    if isinstance(x, jx.PaddedArray):
        return _host_copy(x.stored)[tuple(map(slice, x.shape))]
    if not isinstance(x, jax.Array):
        return x
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jax.numpy.array(_host_copy(jax.random.key_data(x))), impl=jax.random.key_impl(x)
        )
    if not x.is_fully_addressable and not x.is_fully_replicated:
        return multihost_utils.process_allgather(x, tiled=True)
    return np.array(x)
