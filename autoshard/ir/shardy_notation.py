"""Parsers for Shardy's notations of sharding rules, into `Rule`.

Three forms, used by `jax.experimental.custom_partitioning` and by Shardy itself:

- text in words, one per factor: ``"i j, j k -> i k"``, with ``...`` for leading dimensions and ``(a b)`` for a
  dimension of two factors; the kinds of factors are given separately, as keyword arguments;
- the `SdyShardingRule` object that JAX makes of that;
- the MLIR attribute that Shardy prints: ``([i, k], [k, j])->([i, j]) {i=8, j=12, k=16} reduction={k}``.

Shardy's reduction factors become kind `sum`, its need-replication factors `whole`, its permutation factors `halo`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir
from jax.interpreters import mlir

from autoshard.errors import RuleError, nearest
from autoshard.ir.rule import Dim, Dims, Rule, factor_names

_KIND_OF_GROUP = {
    "reduction_factors": "sum",
    "need_replication_factors": "whole",
    "permutation_factors": "halo",
    "blocked_propagation_factors": "whole",
}
"""Kind of factor by Shardy's name for the group."""
_FACTOR_NAME = re.compile(r"[A-Za-z][0-9]*")
_WORD = re.compile(r"\s*(?:(?P<ellipsis>\.\.\.[0-9]*)|(?P<f>[A-Za-z]\w*)|(?P<open>\()|(?P<close>\)))")
_VALUES = r"(?:\[[a-z0-9_, ]*\](?:, *|(?=\))))*"
_ATTRIBUTE = re.compile(
    rf"\s*(?:#sdy\.op_sharding_rule<)?\((?P<ins>{_VALUES})\)\s*->\s*\((?P<outs>{_VALUES})\)(?P<rest>[^<>]*?)>?\s*"
)


@dataclass(frozen=True)
class EinsumTemplate:
    """A rule for operands of any rank: a word ``...n`` as the first of a value stands for any number of dimensions."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    def rule(self, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]] = ()) -> Rule:
        """The rule for these shapes of the operands and, where known, results.

        A factor of dimensions with different sizes is removed, and `Rule.reason` says so.

        Raises:
          RuleError: another number of operands, results or dimensions.
        """
        if len(shapes) != len(self.operands) or (results and len(results) != len(self.results)):
            raise RuleError(
                f"the rule {self} is for {len(self.operands)} operands and {len(self.results)} results, "
                f"the operation has {len(shapes)} and {len(results)}"
            )
        ellipsis_ranks: dict[str, int] = {}
        for i, (dims, shape) in enumerate(zip((*self.operands, *self.results), (*shapes, *results), strict=False)):
            ellipsis = _ellipsis(dims)
            rank = len(dims) - bool(ellipsis)
            if len(shape) < rank or (not ellipsis and len(shape) > rank):
                raise RuleError(f"the rule {self} has {rank} dimensions for value {i}, whose shape is {tuple(shape)}")
            if ellipsis and ellipsis_ranks.setdefault(ellipsis, len(shape) - rank) != len(shape) - rank:
                raise RuleError(
                    f"the rule {self}: {ellipsis} stands for both {ellipsis_ranks[ellipsis]} and "
                    f"{len(shape) - rank} dimensions"
                )
        ins, outs = (
            tuple(_expand_ellipsis(dims, ellipsis_ranks) for dims in side) for side in (self.operands, self.results)
        )
        return _canonical(ins, outs, dict(self.kinds), dict(self.sizes), (*shapes, *results))

    def __str__(self) -> str:
        def side(values: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(f"({' '.join(d)})" if len(d) > 1 else "".join(d) for d in v) for v in values)

        return f"'{side(self.operands)} -> {side(self.results)}'"


def parse_words(text: str, **options: Any) -> EinsumTemplate:
    """Reads the text form in words.

    Args:
      text: such as ``"... i j, j k -> ... i k"``.
      options: ``reduction_factors``, ``need_replication_factors``, ``permutation_factors``: tuples of factors; and
        sizes by factor, of those that occur in parentheses only.

    Raises:
      RuleError: the text is not a rule, or an option names a factor that it lacks.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r} needs one '->' between its operands and its results")
    operands, results = (tuple(_words(value, text) for value in side.split(",")) for side in sides)
    return _einsum(operands, results, options, text)


def from_sdy_rule(rule: Any) -> EinsumTemplate:
    """Reads an `SdyShardingRule`, or anything with its attributes."""

    def value(mapping: Sequence[Any]) -> Dims:
        return tuple(
            ("..." + d[1:].lstrip("0"),)
            if isinstance(d, str) and d.startswith("…")
            else (d,)
            if isinstance(d, str)
            else tuple(d)
            for d in mapping
        )

    options = {group: tuple(getattr(rule, group, ())) for group in _KIND_OF_GROUP}
    return _einsum(
        tuple(map(value, rule.operand_mappings)),
        tuple(map(value, rule.result_mappings)),
        {**options, **rule.factor_sizes},
        str(rule),
    )


def parse_attribute(text: str) -> EinsumTemplate:
    """Reads the MLIR attribute that Shardy prints, with or without ``#sdy.op_sharding_rule<...>`` around it.

    Raises:
      RuleError: the text is no such attribute.
    """
    found = _ATTRIBUTE.fullmatch(text)
    if not found:
        raise RuleError(f"{text!r} is no sharding rule as Shardy prints them: ([i, k], [k, j])->([i, j]) {{i=8, ...}}")

    def side(values: str) -> tuple[Dims, ...]:
        return tuple(
            tuple(tuple(re.findall(r"[a-z](?:_[0-9]+)?", dim)) for dim in value.split(",") if dim.strip())
            for value in re.findall(r"\[(.*?)\]", values)
        )

    sizes = {f: int(n) for f, n in re.findall(r"([a-z](?:_[0-9]+)?)=([0-9]+)", found["rest"])}
    groups = {
        f"{group}_factors": tuple(re.findall(r"[a-z](?:_[0-9]+)?", factors))
        for group, factors in re.findall(r"(\w+)=\{([^}]*)\}", found["rest"])
    }
    return _einsum(side(found["ins"]), side(found["outs"]), {**sizes, **groups}, text)


def is_words(text: str) -> bool:
    """Whether a rule's text is in Shardy's words rather than autoshard's letters: separate factors, or a ``...``.

    Text that reads the same both ways, such as ``"i j -> j i"``, may get either answer.
    """
    values = text.partition("{")[0].partition("|")[0].replace("->", ",").split(",")
    return "..." in text or any(len(v.split()) > 1 and re.search(r"\w\w", v) for v in values)


def is_attribute(text: str) -> bool:
    """Whether a rule's text is an MLIR attribute as Shardy prints it."""
    return bool(re.match(r"\s*(#sdy\.op_sharding_rule<|\(\[|\(\)\s*->)", text))


def _einsum(
    operands: tuple[Dims, ...], results: tuple[Dims, ...], options: Mapping[str, Any], text: str
) -> EinsumTemplate:
    factors = {f for dims in (*operands, *results) for d in dims for f in d}
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, value in options.items():
        if isinstance(value, int):
            sizes[name] = value
        elif name in _KIND_OF_GROUP:
            kinds |= dict.fromkeys(value, _KIND_OF_GROUP[name])
        else:
            raise RuleError(f"rule {text!r}: {name!r} is no group of factors{nearest(name, _KIND_OF_GROUP)}")
    unknown = sorted({*kinds, *sizes} - factors)
    if unknown:
        raise RuleError(f"rule {text!r}: its options name {unknown}, which no operand or result has")
    return EinsumTemplate(operands, results, tuple(sorted(kinds.items())), tuple(sorted(sizes.items())))


def _words(text: str, rule: str) -> Dims:
    dims: list[Dim] = []
    group: list[str] | None = None
    at, text = 0, text.rstrip()
    while at < len(text):
        m = _WORD.match(text, at)
        if not m or (m["ellipsis"] and (dims or group is not None)) or (m["open"] and group is not None):
            raise RuleError(f"rule {rule!r}: {text[at:].strip()!r} is no factor, '...' at the beginning, or group")
        at = m.end()
        if m["open"]:
            group = []
        elif m["close"]:
            if group is None:
                raise RuleError(f"rule {rule!r}: the parentheses in {text.strip()!r} do not match")
            dims.append(tuple(group))
            group = None
        elif group is not None:
            group.append(m["f"])
        else:
            dims.append((m["f"] or m["ellipsis"],))
    if group is not None:
        raise RuleError(f"rule {rule!r}: a parenthesis in {text.strip()!r} does not close")
    return tuple(dims)


def _ellipsis(dims: Dims) -> str:
    """The ellipsis that ``dims`` starts with, or ""."""
    return dims[0][0] if dims and dims[0] and dims[0][0].startswith("...") else ""


def _expand_ellipsis(dims: Dims, ranks: Mapping[str, int]) -> Dims:
    ellipsis = _ellipsis(dims)
    return (*((f"{ellipsis}:{i}",) for i in range(ranks.get(ellipsis, 0))), *dims[1:]) if ellipsis else dims


def _canonical(
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    kinds: Mapping[str, str],
    sizes: dict[str, int],
    shapes: Sequence[Sequence[int]],
) -> Rule:
    """The rule with factor names that the text form can print, and without factors of different sizes."""
    sizes_of: dict[str, set[int]] = {}
    inside = {f for dims in (*operands, *results) for d in dims if len(d) != 1 for f in d}
    for dims, shape in zip((*operands, *results), shapes, strict=False):
        for dim, n in zip(dims, shape, strict=True):
            if len(dim) == 1:
                sizes_of.setdefault(dim[0], set()).add(n)
    inconsistent = {f for f, ns in sizes_of.items() if len(ns) > 1}
    everything = list(dict.fromkeys(f for dims in (*operands, *results) for d in dims for f in d))
    kept = {f for f in everything if _FACTOR_NAME.fullmatch(f)}
    spare = (n for n in factor_names(len(everything) + len(kept)) if n not in kept)
    new = {f: f if f in kept else next(spare) for f in everything}

    def value(dims: Dims) -> Dims:
        return tuple(() if inconsistent & set(d) else tuple(new[f] for f in d) for d in dims)

    ins, outs = tuple(map(value, operands)), tuple(map(value, results))
    left = {f for dims in (*ins, *outs) for d in dims for f in d}
    reason = f"its rule gives {', '.join(sorted(inconsistent))} different sizes" if inconsistent else ""
    return Rule(
        ins,
        outs,
        tuple(sorted((new[f], k) for f, k in kinds.items() if new[f] in left)),
        sizes=tuple(sorted((new[f], n) for f, n in sizes.items() if new[f] in left and f in inside)),
        reason=reason,
    )


def mlir_context() -> Any:
    """A fresh MLIR context with every dialect of lowered programs, in which a rule given as a function is called."""
    return mlir.make_ir_context()


def tensor_types(avals: Sequence[Any]) -> list[Any]:
    """The MLIR tensor types of abstract values; for use inside a `mlir_context`."""
    with ir.Location.unknown():
        return [ir.RankedTensorType.get(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in avals]
