"""notation: Shardy's ways of writing a rule, read as ours.

Three forms, all of which `jax.experimental.custom_partitioning` or Shardy itself use:

- words, one factor each: ``"i j, j k -> i k"``, with ``...`` for leading dimensions and ``(a b)`` for a
  dimension of two factors; the kinds stand beside it, as arguments;
- the `SdyShardingRule` object that JAX makes of that;
- the attribute that Shardy prints: ``([i, k], [k, j])->([i, j]) {i=8, j=12, k=16} reduction={k}``.

A reduction is read as a sum, a need for replication as `whole`, a permutation as `halo`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import RuleError, nearest
from autoshard.ir.rule import Dim, Dims, Rule, factor_names

KINDS = {
    "reduction_factors": "sum",
    "need_replication_factors": "whole",
    "permutation_factors": "halo",
    "blocked_propagation_factors": "whole",
}
"""Shardy's groups of factors, and what kind they are here."""
_PLAIN = re.compile(r"[A-Za-z][0-9]*")
_WORD = re.compile(r"\s*(?:(?P<rest>\.\.\.[0-9]*)|(?P<f>[A-Za-z]\w*)|(?P<open>\()|(?P<close>\)))")
_VALUES = r"(?:\[[a-z0-9_, ]*\](?:, *|(?=\))))*"
_ATTRIBUTE = re.compile(
    rf"\s*(?:#sdy\.op_sharding_rule<)?\((?P<ins>{_VALUES})\)\s*->\s*\((?P<outs>{_VALUES})\)(?P<rest>[^<>]*?)>?\s*"
)


@dataclass(frozen=True)
class EinsumTemplate:
    """A rule whose leading dimensions may be left open: a word ``...n`` stands for any number of them."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    sizes: tuple[tuple[str, int], ...] = ()

    def rule(self, shapes: Sequence[Sequence[int]], results: Sequence[Sequence[int]] = ()) -> Rule:
        """The rule for operands, and where known results, of these shapes.

        A factor to which two dimensions give different sizes is taken out, with a reason.

        Raises:
          RuleError: another number of operands or dimensions.
        """
        if len(shapes) != len(self.operands) or (results and len(results) != len(self.results)):
            raise RuleError(
                f"the rule {self} is for {len(self.operands)} operands and {len(self.results)} results, "
                f"the operation has {len(shapes)} and {len(results)}"
            )
        open_ranks: dict[str, int] = {}
        for i, (dims, shape) in enumerate(zip((*self.operands, *self.results), (*shapes, *results), strict=False)):
            rest = _rest(dims)
            rank = len(dims) - bool(rest)
            if len(shape) < rank or (not rest and len(shape) > rank):
                raise RuleError(f"the rule {self} gives value {i} {rank} dimensions, it has the shape {tuple(shape)}")
            if rest and open_ranks.setdefault(rest, len(shape) - rank) != len(shape) - rank:
                raise RuleError(
                    f"the rule {self}: {rest} stands for {open_ranks[rest]} dimensions and for {len(shape) - rank}"
                )
        ins, outs = (tuple(_spread(dims, open_ranks) for dims in side) for side in (self.operands, self.results))
        return _renamed(ins, outs, dict(self.kinds), dict(self.sizes), (*shapes, *results))

    def __str__(self) -> str:
        def side(values: tuple[Dims, ...]) -> str:
            return ", ".join(" ".join(f"({' '.join(d)})" if len(d) > 1 else "".join(d) for d in v) for v in values)

        return f"'{side(self.operands)} -> {side(self.results)}'"


def parse_words(text: str, **options: Any) -> EinsumTemplate:
    """Reads the form in words.

    Args:
      text: such as ``"... i j, j k -> ... i k"``.
      options: ``reduction_factors``, ``need_replication_factors``, ``permutation_factors``: tuples of factors; and
        the sizes of the factors that stand only inside parentheses.

    Raises:
      RuleError: the text is not a rule, or an option names no factor of it.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r} needs one '->' between its operands and its results")
    operands, results = (tuple(_words(value, text) for value in side.split(",")) for side in sides)
    return _einsum(operands, results, options, text)


def from_sdy_rule(rule: Any) -> EinsumTemplate:
    """Reads an `SdyShardingRule`: anything with its attributes."""

    def value(mapping: Sequence[Any]) -> Dims:
        return tuple(
            ("..." + d[1:].lstrip("0"),)
            if isinstance(d, str) and d.startswith("…")
            else (d,)
            if isinstance(d, str)
            else tuple(d)
            for d in mapping
        )

    options = {group: tuple(getattr(rule, group, ())) for group in KINDS}
    return _einsum(
        tuple(map(value, rule.operand_mappings)),
        tuple(map(value, rule.result_mappings)),
        {**options, **rule.factor_sizes},
        str(rule),
    )


def parse_attribute(text: str) -> EinsumTemplate:
    """Reads what Shardy prints, with or without ``#sdy.op_sharding_rule<...>`` around it.

    Raises:
      RuleError: it is not that.
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
    """Whether a text is in Shardy's words rather than in our letters: factors stand apart, or dots lead.

    Where both readings give the same rule, as in ``"i j -> j i"``, it does not matter.
    """
    values = text.partition("{")[0].partition("|")[0].replace("->", ",").split(",")
    return "..." in text or any(len(v.split()) > 1 and re.search(r"\w\w", v) for v in values)


def is_attribute(text: str) -> bool:
    """Whether a text is a rule as Shardy prints it."""
    return bool(re.match(r"\s*(#sdy\.op_sharding_rule<|\(\[|\(\)\s*->)", text))


def _einsum(operands: tuple[Dims, ...], results: tuple[Dims, ...], options: Mapping[str, Any], text: str) -> EinsumTemplate:
    factors = {f for dims in (*operands, *results) for d in dims for f in d}
    kinds: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name, value in options.items():
        if isinstance(value, int):
            sizes[name] = value
        elif name in KINDS:
            kinds |= dict.fromkeys(value, KINDS[name])
        else:
            raise RuleError(f"rule {text!r}: {name!r} is no group of factors{nearest(name, KINDS)}")
    strangers = sorted({*kinds, *sizes} - factors)
    if strangers:
        raise RuleError(f"rule {text!r} says something of {strangers}, which stands nowhere in it")
    return EinsumTemplate(operands, results, tuple(sorted(kinds.items())), tuple(sorted(sizes.items())))


def _words(text: str, rule: str) -> Dims:
    dims: list[Dim] = []
    group: list[str] | None = None
    at, text = 0, text.rstrip()
    while at < len(text):
        m = _WORD.match(text, at)
        if not m or (m["rest"] and (dims or group is not None)) or (m["open"] and group is not None):
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
            dims.append((m["f"] or m["rest"],))
    if group is not None:
        raise RuleError(f"rule {rule!r}: a parenthesis in {text.strip()!r} does not close")
    return tuple(dims)


def _rest(dims: Dims) -> str:
    """The word for open leading dimensions, or ""."""
    return dims[0][0] if dims and dims[0] and dims[0][0].startswith("...") else ""


def _spread(dims: Dims, ranks: Mapping[str, int]) -> Dims:
    rest = _rest(dims)
    return (*((f"{rest}:{i}",) for i in range(ranks.get(rest, 0))), *dims[1:]) if rest else dims


def _renamed(
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    kinds: Mapping[str, str],
    sizes: dict[str, int],
    shapes: Sequence[Sequence[int]],
) -> Rule:
    """The rule with names that the text form can print, and without the factors whose sizes disagree."""
    found: dict[str, set[int]] = {}
    inside = {f for dims in (*operands, *results) for d in dims if len(d) != 1 for f in d}
    for dims, shape in zip((*operands, *results), shapes, strict=False):
        for dim, n in zip(dims, shape, strict=True):
            if len(dim) == 1:
                found.setdefault(dim[0], set()).add(n)
    off = {f for f, ns in found.items() if len(ns) > 1}
    everything = list(dict.fromkeys(f for dims in (*operands, *results) for d in dims for f in d))
    kept = {f for f in everything if _PLAIN.fullmatch(f)}
    spare = (n for n in factor_names(len(everything) + len(kept)) if n not in kept)
    new = {f: f if f in kept else next(spare) for f in everything}

    def value(dims: Dims) -> Dims:
        return tuple(() if off & set(d) else tuple(new[f] for f in d) for d in dims)

    ins, outs = tuple(map(value, operands)), tuple(map(value, results))
    left = {f for dims in (*ins, *outs) for d in dims for f in d}
    reason = f"its rule gives {', '.join(sorted(off))} different sizes" if off else ""
    return Rule(
        ins,
        outs,
        tuple(sorted((new[f], k) for f, k in kinds.items() if new[f] in left)),
        sizes=tuple(sorted((new[f], n) for f, n in sizes.items() if new[f] in left and f in inside)),
        reason=reason,
    )
