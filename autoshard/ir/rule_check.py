"""ranks: whether a rule fits its operation, found out before the operation is met.

What the operation makes of its operands is asked of whatever can be called without a program around it: a primitive,
a function with derivatives of its own, or the form in which a kernel runs on its parts. Operands are those of an
example, or, without one, of any sizes that the rule admits. What cannot be asked (it takes parameters, or arguments
that are no arrays) is not judged here, and refused where it is first met.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive

from autoshard.errors import RuleError
from autoshard.ir.rule import Aval, Local, Rule, RuleFn
from autoshard.ir.rule_registry import FixedRule, Key, EinsumRule, display_name

_SIZES = ((8, 8), (8, 1))
"""Of factors, and of dimensions without one."""
_DTYPES = ("float32", "int32", "bool")


def check_rule(
    of: Key | Callable[..., Any],
    fn: RuleFn,
    local: Local | Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
) -> None:
    """Holds the rule ``fn`` of the operation ``of`` against what the operation makes of its operands.

    Args:
      local: the rule's form, as it was given.
      example: the operation's operands and, where they are given, after them its results.

    Raises:
      RuleError: another number of operands, results or dimensions, or sizes of an example that do not fit.
    """
    calls = list(_calls(of, local))
    if example is not None:
        _exemplified(of, fn, calls, example)
    elif isinstance(fn, FixedRule | EinsumRule):
        _invented(of, fn, calls)


def _exemplified(of: Any, fn: RuleFn, calls: Sequence[Callable[..., Any]], example: Sequence[Any]) -> None:
    avals: list[Any] = [a if isinstance(a, jax.ShapeDtypeStruct) else jax.typeof(a) for a in example]
    count = _count(fn, len(avals))
    operands, results = avals[:count], avals[count:]
    if len(operands) < count:
        raise RuleError(f"the rule for {display_name(of)} is for {count} operands, the example has {len(operands)}")
    try:
        rule = fn(*operands)
    except TypeError as e:
        raise RuleError(f"the rule for {display_name(of)} cannot be asked about the example alone: {e}") from None
    if not results:
        results = next(filter(None, (_results(call, operands) for call in calls)), [])
    _fits(of, rule, operands, results)
    if results:
        rule.factor_sizes([tuple(a.shape) for a in (*operands, *results)])


def _invented(of: Any, fn: FixedRule | EinsumRule, calls: Sequence[Callable[..., Any]]) -> None:
    """Refuses a rule that fits nothing of what the operation makes of such operands as the rule is for."""
    wrong: RuleError | None = None
    for (size, rest), dtype, call in itertools.product(_SIZES, _DTYPES, calls):
        operands = [jax.ShapeDtypeStruct(s, dtype) for s in _shapes(fn, size, rest)]
        results = _results(call, operands)
        if results is None:
            continue
        try:
            return _fits(of, fn(*operands), operands, results)
        except RuleError as e:
            wrong = wrong or e
    if wrong is not None:
        raise wrong


def _shapes(fn: FixedRule | EinsumRule, size: int, rest: int) -> list[tuple[int, ...]]:
    """Of operands that the rule is for; ``rest`` is the size of dimensions without a factor, open ones are left out."""
    rule = fn.rule if isinstance(fn, FixedRule) else fn.einsum
    sizes = dict(rule.sizes)
    return [
        tuple(
            math.prod(sizes.get(f, size) for f in dim) if dim else rest
            for dim in dims
            if not dim or not dim[0].startswith("...")
        )
        for dims in rule.operands
    ]


def _calls(of: Any, local: Local | Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """What can be asked for results."""
    form = local.fun if isinstance(local, Local) else local
    if isinstance(of, Primitive):
        yield of.bind
    elif callable(of):
        yield of
    if form is not None:
        yield functools.partial(form, ())  # over no axes, the only part is the whole


def _results(call: Callable[..., Any], operands: Sequence[Any]) -> list[Any] | None:
    try:
        return jax.tree.leaves(jax.eval_shape(call, *operands)) or None
    except Exception:  # of any kind: it wants parameters, or is a kernel that runs only inside of another
        return None


def _count(fn: RuleFn, given: int) -> int:
    """How many of so many values the rule takes for operands."""
    if isinstance(fn, FixedRule):
        return len(fn.rule.operands)
    if isinstance(fn, EinsumRule):
        return len(fn.einsum.operands)
    kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return given
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)


def _fits(of: Any, rule: Rule, operands: Sequence[Aval], results: Sequence[Aval]) -> None:
    """Raises `RuleError` where ``rule`` has another number of values or dimensions; no results are not judged."""
    for what, dims, avals in (("operand", rule.operands, operands), ("result", rule.results, results)):
        if what == "result" and not avals:
            continue
        if len(dims) != len(avals):
            raise RuleError(
                f"the rule {rule} for {display_name(of)} is for {len(dims)} {what}s, there are {len(avals)}: "
                f"{', '.join(str(tuple(a.shape)) for a in avals)}"
            )
        for i, (ds, aval) in enumerate(zip(dims, avals, strict=True)):
            if len(ds) != len(aval.shape):
                raise RuleError(
                    f"the rule {rule} for {display_name(of)} has rank {len(ds)} for {what} {i}, whose shape is "
                    f"{tuple(aval.shape)}: write a factor for each dimension, '.' for one that stays whole"
                )
