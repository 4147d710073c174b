"""Checks a rule's ranks against its operation at registration, before any program uses it.

The result shapes of the operation are evaluated abstractly, by calling a primitive, a function with custom derivatives,
or a kernel's local form. Operands are the user's example, or synthetic ones of sizes that the rule admits. What cannot
be called like that (for lack of parameters, or with arguments that are not arrays) is checked when a program uses it.
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
from autoshard.ir.rule_registry import EinsumRule, FixedRule, OperationKey, display_name

_SIZES = ((8, 8), (8, 1))
"""Synthetic sizes: of factors, and of dimensions without one."""
_DTYPES = ("float32", "int32", "bool")


def check_rule(
    of: OperationKey | Callable[..., Any],
    fn: RuleFn,
    local: Local | Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
) -> None:
    """Checks the rule ``fn`` of the operation ``of``.

    Args:
      local: the rule's local form, as the user gave it.
      example: operands of the operation, and after them, optionally, its results.

    Raises:
      RuleError: another number of operands, results or dimensions than the operation's, or sizes that do not fit the
        example.
    """
    calls = list(_callables(of, local))
    if example is not None:
        _check_example(of, fn, calls, example)
    elif isinstance(fn, FixedRule | EinsumRule):
        _check_synthetic(of, fn, calls)


def _check_example(of: Any, fn: RuleFn, calls: Sequence[Callable[..., Any]], example: Sequence[Any]) -> None:
    avals: list[Any] = [a if isinstance(a, jax.ShapeDtypeStruct) else jax.typeof(a) for a in example]
    count = _num_operands(fn, len(avals))
    operands, results = avals[:count], avals[count:]
    if len(operands) < count:
        raise RuleError(f"the rule for {display_name(of)} is for {count} operands, the example has {len(operands)}")
    try:
        rule = fn(*operands)
    except TypeError as e:
        raise RuleError(f"the rule for {display_name(of)} needs more than the example's operands: {e}") from None
    if not results:
        results = next(filter(None, (_eval_results(call, operands) for call in calls)), [])
    _check_ranks(of, rule, operands, results)
    if results:
        rule.factor_sizes([tuple(a.shape) for a in (*operands, *results)])


def _check_synthetic(of: Any, fn: FixedRule | EinsumRule, calls: Sequence[Callable[..., Any]]) -> None:
    """Raises `RuleError` where the operation accepts some synthetic operands, but the rule fits none of its results."""
    first_error: RuleError | None = None
    for (size, rest), dtype, call in itertools.product(_SIZES, _DTYPES, calls):
        operands = [jax.ShapeDtypeStruct(s, dtype) for s in _operand_shapes(fn, size, rest)]
        results = _eval_results(call, operands)
        if results is None:
            continue
        try:
            return _check_ranks(of, fn(*operands), operands, results)
        except RuleError as e:
            first_error = first_error or e
    if first_error is not None:
        raise first_error


def _operand_shapes(fn: FixedRule | EinsumRule, size: int, rest: int) -> list[tuple[int, ...]]:
    """Operand shapes of the rule's ranks: ``size`` per factor, ``rest`` for a dimension without one, no ellipsis."""
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


def _callables(of: Any, local: Local | Callable[..., Any] | None) -> Iterator[Callable[..., Any]]:
    """Functions of the operands that may return the operation's results."""
    form = local.fun if isinstance(local, Local) else local
    if isinstance(of, Primitive):
        yield of.bind
    elif callable(of):
        yield of
    if form is not None:
        yield functools.partial(form, ())  # over no axes the one shard is the whole array


def _eval_results(call: Callable[..., Any], operands: Sequence[Any]) -> list[Any] | None:
    try:
        return jax.tree.leaves(jax.eval_shape(call, *operands)) or None
    except Exception:  # of any kind: it needs parameters, or is a kernel that runs inside another only
        return None


def _num_operands(fn: RuleFn, given: int) -> int:
    """How many of the ``given`` values of an example are operands, by the rule's signature."""
    if isinstance(fn, FixedRule):
        return len(fn.rule.operands)
    if isinstance(fn, EinsumRule):
        return len(fn.einsum.operands)
    kinds = [p.kind for p in inspect.signature(fn).parameters.values()]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return given
    return sum(k in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD) for k in kinds)


def _check_ranks(of: Any, rule: Rule, operands: Sequence[Aval], results: Sequence[Aval]) -> None:
    """Raises `RuleError` where ``rule`` has other numbers of operands, results (unless empty) or dimensions."""
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
                    f"{tuple(aval.shape)}: write a factor for each dimension, '.' for one that is never split"
                )
