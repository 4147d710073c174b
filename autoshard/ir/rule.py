"""Rules: how an operation may be split, as data.

A rule names the *factors* of an operation, einsum-like, and says what happens when each is split::

    mk, kn -> mn {k: sum} | sum: 0 1

Each operand and result lists the factors of its dimensions. ``(ab)`` is one dimension made of two
factors, ``a`` major; ``.`` is a dimension that carries no factor and must stay whole. In braces stand
the factors that are not plainly parallel:

- ``sum max min prod and or``: the factor is reduced, so splitting it leaves those results partial that lack it;
- ``whole``: the factor must not be split;
- ``halo``: it may be split, and neighbours exchange their edges;
- ``local``: it may be split where the rule's *local form* computes each part, with collectives of its own.

After the bar stands what the operation lets through: ``sum: 0 1`` means that a sum-partial operand 0,
or a sum-partial operand 1 (not both), gives a sum-partial result; ``sum: 0+1`` that both must be.

From one rule follow forward and backward propagation, the legal strategies, partial results and
cost. The text form is the one that `str` prints and `parse` reads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jax.extend.core import Primitive

from autoshard.errors import RuleError, nearest
from autoshard.ir.halo import Halo
from autoshard.ir.spec import REDUCTION_KINDS as REDUCTIONS
from autoshard.ir.spec import Spec
from autoshard.machine.collective import CollectiveKind

FACTOR_KINDS = (*REDUCTIONS, "whole", "halo", "local")
Dim = tuple[str, ...]
Dims = tuple[Dim, ...]


class Aval(Protocol):
    """What a rule may look at: an abstract value."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Local:
    """How each device computes its part of an operation, where XLA would gather or cannot split it at all.

    It is used inside `jax.shard_map`. With a rule that has a factor of the kind `local`, when that is split; with one
    that has a factor of the kind `halo`, when that is, and the axes that split it are left to XLA, which exchanges the
    edges; with any other, always; unless ``due`` says otherwise. All other factors may be split at the same time; what
    they reduce, the lowering combines.
    """

    fun: Callable[..., Any] | None
    """``fun(axes, *operands)`` -> a result or a tuple of them: parts in, parts out. ``axes`` are the mesh axes that
    split the local factor, major to minor: a valid ``axis_name`` of every collective. None: the operation itself."""
    collectives: Callable[[int, Sequence[int]], tuple[tuple[CollectiveKind, int], ...] | None]
    """``moves(parts, sizes)`` -> the collectives that ``fun`` makes over ``axes``, as (kind, bytes); None where so many
    parts are better gathered, so that ``fun`` is not asked. ``sizes`` are the bytes of one part of each operand and
    then of each result; bytes are as `autoshard.machine.collective` defines them."""
    used_when: Literal["split", "always", "partial", "scattered"] = "split"
    """``always``: also where the local factor is not split, with no ``axes``, since XLA gathers whatever else is.
    ``partial``: where a factor is split that is reduced, and nowhere else. ``scattered``: where the terms which that
    leaves are put together into parts, or operands come with their neighbours' edges, and nowhere else."""
    imbalance: Callable[[int, Sequence[float]], float] | None = None
    """``slowest(parts, sizes)`` -> the work of the part that has most, over an even share; None: all have as much."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Factors per dimension of every operand and result, their kinds, and what partials pass."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    """Kind by factor, for those not plainly parallel; sorted."""
    partial_passthrough: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    """For each reduction kind, the sets of operands that may be partial together."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of the factors that stand only inside compound dimensions; sorted."""
    reason: str = ""
    """Why the operation, or part of it, is kept whole; empty when nothing is."""
    halos: tuple[Halo, ...] = ()
    """What parts read of their neighbours. Along a factor of the kind `halo`, XLA exchanges it; along one that is
    reduced, operands come to the local form with it, and zeros beyond the first and the last part."""
    local: Local | None = field(default=None, compare=False)
    """There where a factor is of the kind `local`, of which there is at most one, or where XLA cannot split the
    operation."""

    def kind(self, factor: str) -> str:
        """The factor's kind; ``"parallel"`` when nothing is said."""
        return dict(self.kinds).get(factor, "parallel")

    def halo_factor(self, halo: Halo) -> str:
        """The factor along which neighbours exchange ``halo``."""
        return self.operands[halo.operand][halo.dim][0]

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        return tuple(dict.fromkeys(f for dims in (*self.operands, *self.results) for d in dims for f in d))

    def factor_sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Size of each factor, given the shapes of the operands and then the results.

        Raises:
          RuleError: the rule does not fit the shapes.
        """
        sizes = dict(self.sizes)
        places = [
            (d, n)
            for dims, shape in zip((*self.operands, *self.results), shapes, strict=True)
            for d, n in zip(dims, shape, strict=True)
        ]
        for dim, n in places:
            if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                raise RuleError(f"rule {self} gives factor {dim[0]!r} the sizes {sizes[dim[0]]} and {n}")
        for dim, n in places:
            product = 1
            for f in dim:
                if f not in sizes:
                    raise RuleError(f"rule {self} does not say the size of factor {f!r}")
                product *= sizes[f]
            if dim and product != n:
                raise RuleError(f"rule {self} makes a dimension of size {n} out of factors of {product}")
        return sizes

    def __str__(self) -> str:
        return unparse(self)


RuleFn = Callable[..., Rule]
"""A rule's signature is the operation's: ``fn(*avals, **params) -> Rule``."""
RuleTable = Mapping[Primitive, RuleFn] | Mapping[Primitive | str, RuleFn]
"""By primitive; and by the names of kernels and functions, as `autoshard.jaxpr.names` gives them."""

_TOKEN = re.compile(r"\s*(?:(?P<f>[A-Za-z][0-9]*)|(?P<dot>\.)|(?P<open>\()|(?P<close>\)))")


def parse(text: str, sizes: Mapping[str, int] | None = None) -> Rule:
    """Reads the text form.

    Raises:
      RuleError: the text is not a rule; the message names the part that is not.
    """
    body, _, lets = text.partition("|")
    body, brace, kinds = body.partition("{")
    sides = body.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r} needs one '->' between its operands and its results")
    if brace and not kinds.strip().endswith("}"):
        raise RuleError(f"rule {text!r}: the braces do not close")
    operands, results = (tuple(_dims(t, text) for t in side.split(",")) for side in sides)
    rule = Rule(operands, results, _kinds(kinds, text), _lets(lets, text), tuple(sorted((sizes or {}).items())))
    strangers = {f for f, _ in rule.kinds} - set(rule.factors)
    if strangers:
        raise RuleError(f"rule {text!r} gives a kind to {sorted(strangers)}, which stands nowhere in it")
    return rule


def unparse(rule: Rule) -> str:
    """The canonical text of ``rule``; factors keep their names."""

    def dims(ds: Dims) -> str:
        return "".join("." if not d else d[0] if len(d) == 1 else f"({''.join(d)})" for d in ds)

    text = f"{', '.join(map(dims, rule.operands))} -> {', '.join(map(dims, rule.results))}"
    if rule.kinds:
        text += " {" + ", ".join(f"{f}: {k}" for f, k in rule.kinds) + "}"
    if rule.partial_passthrough:
        text += " | " + ", ".join(f"{k}: {' '.join('+'.join(map(str, s)) for s in sets)}" for k, sets in rule.partial_passthrough)
    return text.strip()


def replicated_rule(reason: str, operands: Iterable[Aval], results: Iterable[Aval]) -> Rule:
    """The rule that splits nothing, and why."""
    return Rule(
        tuple(((),) * len(a.shape) for a in operands), tuple(((),) * len(a.shape) for a in results), reason=reason
    )


def factor_names(n: int, start: int = 0) -> tuple[str, ...]:
    """``n`` factor names: a, b, ..., z, a1, b1, ..."""
    return tuple(chr(97 + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(start, start + n))


def single_factor_dims(factors: Iterable[str | None]) -> Dims:
    """One dimension a factor; None is a dimension that carries none."""
    return tuple((f,) if f else () for f in factors)


def _dims(text: str, rule: str) -> Dims:
    dims: list[Dim] = []
    group: list[str] | None = None
    at, text = 0, text.rstrip()
    while at < len(text):
        m = _TOKEN.match(text, at)
        if not m:
            raise RuleError(f"rule {rule!r}: {text[at:].strip()!r} is not a factor, '.', or a group in parentheses")
        at = m.end()
        if m["f"] and group is not None:
            group.append(m["f"])
        elif m["f"]:
            dims.append((m["f"],))
        elif m["dot"] and group is None:
            dims.append(())
        elif m["open"] and group is None:
            group = []
        elif m["close"] and group is not None:
            dims.append(tuple(group))
            group = None
        else:
            raise RuleError(f"rule {rule!r}: the parentheses in {text.strip()!r} do not nest or do not match")
    if group is not None:
        raise RuleError(f"rule {rule!r}: a parenthesis in {text.strip()!r} does not close")
    return tuple(dims)


def _kinds(text: str, rule: str) -> tuple[tuple[str, str], ...]:
    kinds: dict[str, str] = {}
    for item in filter(str.strip, text.strip().removesuffix("}").split(",")):
        factor, _, kind = (part.strip() for part in item.partition(":"))
        if kind not in FACTOR_KINDS:
            raise RuleError(f"rule {rule!r}: {kind!r} is no kind of factor{nearest(kind, FACTOR_KINDS)}")
        kinds[factor] = kind
    return tuple(sorted(kinds.items()))


def _lets(text: str, rule: str) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    lets: dict[str, tuple[tuple[int, ...], ...]] = {}
    for item in filter(str.strip, text.split(",")):
        kind, _, sets = (part.strip() for part in item.partition(":"))
        if kind not in REDUCTIONS:
            raise RuleError(f"rule {rule!r}: {kind!r} is no kind of partial{nearest(kind, REDUCTIONS)}")
        lets[kind] = tuple(tuple(int(i) for i in s.split("+")) for s in sets.split())
    return tuple(sorted(lets.items()))


def halo_axes(rule: Rule, needs: Sequence[Spec], gives: Sequence[Spec]) -> set[str]:
    """The axes along which neighbours exchange edges: where an operation in its local form is left to XLA."""
    return {
        a
        for side, specs in ((rule.operands, needs), (rule.results, gives))
        for dims, s in zip(side, specs, strict=True)
        for dim, axes in zip(dims, s.dims, strict=True)
        if dim and rule.kind(dim[0]) == "halo"
        for a in axes
    }
