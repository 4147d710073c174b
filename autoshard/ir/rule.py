"""Rules: how an operation may be sharded, as data.

A rule names the *factors* of an operation, as einsum does, and says what splitting each of them means (after Shardy's
`OpShardingRule`)::

    mk, kn -> mn {k: sum} | sum: 0 1

Each operand and result lists the factors of its dimensions. ``(ab)`` is one dimension made of two factors, ``a`` major;
``.`` is a dimension without a factor, which is never split. In braces are the factors that are not parallel:

- ``sum max min prod and or``: a reduction: splitting it makes the results without it partial;
- ``whole``: it must not be split;
- ``halo``: it may be split; neighbours exchange halos;
- ``local``: it may be split where each shard runs the rule's *local form*, with collectives of its own.

After the bar is the partial passthrough: ``sum: 0 1`` means that a sum-partial operand 0 or a sum-partial operand 1,
but not both, gives a sum-partial result; ``sum: 0+1`` that both operands must be partial.

Propagation in both directions, the legal strategies, partial results and costs all follow from the rule. `str` prints
the text form and `parse` reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from jax.extend.core import Primitive

from autoshard.errors import RuleError, nearest
from autoshard.ir.halo import Halo
from autoshard.ir.spec import REDUCTION_KINDS as REDUCTIONS
from autoshard.ir.spec import Spec
from autoshard.machine.collective import CollectiveKind

FACTOR_KINDS = (*REDUCTIONS, "whole", "halo", "local")
Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
CollectiveBytes = tuple[tuple[CollectiveKind, int], ...]
"""Collectives as (kind, bytes as `autoshard.machine.collective` defines them)."""


class Aval(Protocol):
    """An abstract value, as far as a rule may read it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


class LocalWork(NamedTuple):
    """What one device computes and stores of an operation of several steps."""

    flops: float
    bytes: int
    """Of what one step writes and another reads."""
    moved: int = 0
    """Bytes that kernels which compute nothing, such as gathers, read and write."""
    rounds: int = 1
    """In how many rounds it runs: what one sends can be hidden by what another computes."""


class LocalAlgorithm(NamedTuple):
    """One way to compute a local form, where there are several."""

    fun: Callable[..., Any]
    """``fun(axes, *operands)``, as `Local.fun`."""
    collectives: CollectiveBytes
    """What it sends before it computes, or when it has computed."""
    hops: CollectiveBytes = ()
    """What it sends from round to round beside what it computes."""
    rounds: int = 1
    """In how many rounds it computes."""
    work: float = 1.0
    """FLOPs of the busiest shard over the mean of those that the operation is priced at; less than 1 where it skips
    more of a mask than these leave out."""
    moved: int = 0
    """Bytes that copies read and write on each device."""

    @property
    def sent(self) -> CollectiveBytes:
        """All of its collectives."""
        return (*self.collectives, *self.hops)


@dataclass(frozen=True, slots=True)
class Local:
    """A local form: how each device computes its shard of an operation that XLA would gather for, or cannot partition.

    It runs inside a `jax.shard_map`. By default it is used where the rule's `local` factor is split; with a `halo`
    factor, where that is split, with its axes left to XLA, which exchanges the halos; with neither, always. All other
    factors may be split at the same time; the lowering reduces the partial results that they leave.

    Example:
      >>> def centred(axes, x):  # each device has some of the columns, and needs the mean of all
      ...     mean = jnp.mean(x, 1, keepdims=True)
      ...     return x - (jax.lax.pmean(mean, axes) if axes else mean)
      >>> local = autoshard.Local(centred, lambda parts, sizes: (("all-reduce", sizes[0] // 16),))
      >>> local.collectives(8, [4096])
      (('all-reduce', 256),)
    """

    fun: Callable[..., Any] | None
    """``fun(axes, *operands)`` -> a result or a tuple of them, all shards. ``axes`` are the mesh axes that split the
    local factor, major to minor: an ``axis_name`` for `jax.lax`'s collectives. None: the operation itself."""
    collectives: Callable[[int, Sequence[int]], CollectiveBytes | None]
    """``collectives(parts, sizes)`` -> the collectives that ``fun`` executes over ``axes``; None where ``fun`` is not
    to be used for so many ``parts``. ``sizes``: bytes of one shard of each operand and then of each result."""
    used_when: Literal["split", "always", "partial", "scattered"] = "split"
    """``always``: also, with no ``axes``, where the local factor is not split, since XLA would gather for any other.
    ``partial``: only where a reduced factor is split. ``scattered``: only where the partial sums of a split reduced
    factor are reduce-scattered, or operands come with halos."""
    algorithms: Callable[[int, Sequence[int]], Sequence[LocalAlgorithm]] | None = None
    """``algorithms(parts, sizes)`` -> the ways to compute it where its factor is split, of which the one with the least
    predicted seconds runs, in place of ``fun`` and ``collectives``; None: there is one way, and all shards have equal
    work."""
    work: Callable[[Mapping[str, int]], LocalWork] | None = None
    """``work(parts)`` -> the work of one device, where each factor is split into so many ``parts``, of an operation of
    several steps; None: its FLOPs are divided by all parts, and it stores nothing but its results."""
    starts: tuple[tuple[int, ...], ...] = ()
    """Sets of operands, each of which suffices for a first step; () where it takes all of them."""
    takes_specs: bool = False
    """Whether ``fun`` takes, in place of ``axes``, the specs of the operands and then of the results: it asks where in
    the whole its shards are, along any factor."""
    alongside: str | None = None
    """A factor whose dimensions the axes of the local factor split too, minor to its own: what they hold is exchanged
    among the devices of these axes, so that no result is partial over them."""
    in_place: str | None = None
    """A factor of kind ``sum`` that no dimension has, to split in place of the local factor: its axes split the
    dimensions of that one, and none ``alongside``. Nothing is exchanged, and results without these dimensions are
    partial: each device computes its part of what all of them have."""
    parallel: frozenset[str] = frozenset()
    """Reduced factors that no product among the steps contracts: products compute independent elements along them,
    which a later step sums."""
    read_after: tuple[float, ...] = ()
    """Of each operand, which part of the operation's FLOPs comes before the first product that needs it; () where the
    first one needs all."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of every dimension of the operands and results, their kinds, and partial passthrough.

    Example:
      >>> product = autoshard.Rule(((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),), (("k", "sum"),))
      >>> print(product)
      mk, kn -> mn {k: sum}
      >>> product.kind("k"), product.kind("m"), product.factor_sizes([(8, 4), (4, 2), (8, 2)])
      ('sum', 'parallel', {'m': 8, 'k': 4, 'n': 2})
      >>> product.factors
      ('m', 'k', 'n')
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    kinds: tuple[tuple[str, str], ...] = ()
    """Kind by factor, of those that are not parallel; sorted."""
    partial_passthrough: tuple[tuple[str, tuple[tuple[int, ...], ...]], ...] = ()
    """By reduction kind: the sets of operands that, if exactly these are partial, make the results partial."""
    sizes: tuple[tuple[str, int], ...] = ()
    """Sizes of the factors that occur in compound dimensions only; sorted."""
    reason: str = ""
    """Why the operation, or a dimension of it, is kept whole (never split); empty where none is."""
    halos: tuple[Halo, ...] = ()
    """Halos that shards read. Along a `halo` factor XLA exchanges them; along a reduced factor the local form gets
    operands with their halos, and zeros beyond the first and the last shard."""
    local: Local | None = field(default=None, compare=False)
    """Required with a `local` factor, of which there is at most one, and where XLA cannot partition the operation."""

    def kind(self, factor: str) -> str:
        """The factor's kind; ``"parallel"`` by default."""
        return dict(self.kinds).get(factor, "parallel")

    def halo_factor(self, halo: Halo) -> str:
        """The factor that ``halo`` is read along."""
        return self.operands[halo.operand][halo.dim][0]

    @property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of first appearance."""
        return tuple(dict.fromkeys(f for dims in (*self.operands, *self.results) for d in dims for f in d))

    def factor_sizes(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Size of each factor, for these shapes of the operands and then the results.

        Raises:
          RuleError: the rule does not fit the shapes.
        """
        sizes = dict(self.sizes)
        dim_sizes = [
            (d, n)
            for dims, shape in zip((*self.operands, *self.results), shapes, strict=True)
            for d, n in zip(dims, shape, strict=True)
        ]
        for dim, n in dim_sizes:
            if len(dim) == 1 and sizes.setdefault(dim[0], n) != n:
                raise RuleError(f"rule {self}: factor {dim[0]!r} has the sizes {sizes[dim[0]]} and {n}")
        for dim, n in dim_sizes:
            product = 1
            for f in dim:
                if f not in sizes:
                    raise RuleError(f"rule {self}: the size of factor {f!r} is unknown; pass sizes={{{f!r}: ...}}")
                product *= sizes[f]
            if dim and product != n:
                raise RuleError(f"rule {self}: a dimension of size {n} has factors of product {product}")
        return sizes

    def __str__(self) -> str:
        return unparse(self)


RuleFn = Callable[..., Rule]
"""Returns the rule of an operation for its operands and parameters: ``fn(*avals, **params) -> Rule``."""
RuleTable = Mapping[Primitive, RuleFn] | Mapping[Primitive | str, RuleFn]
"""By primitive, and by name of a kernel or function (`autoshard.jaxpr.op_names`)."""

_TOKEN = re.compile(r"\s*(?:(?P<f>[A-Za-z][0-9]*)|(?P<dot>\.)|(?P<open>\()|(?P<close>\)))")


def parse(text: str, sizes: Mapping[str, int] | None = None) -> Rule:
    """Reads the text form; ``sizes``: of factors that occur in compound dimensions only.

    Raises:
      RuleError: the text is not a rule; the message names the part that is wrong.
    """
    body, _, passthrough = text.partition("|")
    body, brace, kinds = body.partition("{")
    sides = body.split("->")
    if len(sides) != 2:
        raise RuleError(f"rule {text!r} needs one '->' between its operands and its results")
    if brace and not kinds.strip().endswith("}"):
        raise RuleError(f"rule {text!r}: the braces do not close")
    operands, results = (tuple(_dims(t, text) for t in side.split(",")) for side in sides)
    rule = Rule(
        operands, results, _kinds(kinds, text), _passthrough(passthrough, text), tuple(sorted((sizes or {}).items()))
    )
    unknown = {f for f, _ in rule.kinds} - set(rule.factors)
    if unknown:
        raise RuleError(f"rule {text!r} gives a kind to {sorted(unknown)}, which no operand or result has")
    return rule


def unparse(rule: Rule) -> str:
    """The canonical text form of ``rule``; factors keep their names."""

    def dims(ds: Dims) -> str:
        return "".join("." if not d else d[0] if len(d) == 1 else f"({''.join(d)})" for d in ds)

    text = f"{', '.join(map(dims, rule.operands))} -> {', '.join(map(dims, rule.results))}"
    if rule.kinds:
        text += " {" + ", ".join(f"{f}: {k}" for f, k in rule.kinds) + "}"
    if rule.partial_passthrough:
        text += " | " + ", ".join(
            f"{k}: {' '.join('+'.join(map(str, s)) for s in sets)}" for k, sets in rule.partial_passthrough
        )
    return text.strip()


def replicated_rule(reason: str, operands: Iterable[Aval], results: Iterable[Aval]) -> Rule:
    """The rule under which no dimension is split, and why."""
    return Rule(
        tuple(((),) * len(a.shape) for a in operands), tuple(((),) * len(a.shape) for a in results), reason=reason
    )


def factor_names(n: int, start: int = 0) -> tuple[str, ...]:
    """``n`` factor names: a, b, ..., z, a1, b1, ..."""
    return tuple(chr(97 + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(start, start + n))


def single_factor_dims(factors: Iterable[str | None]) -> Dims:
    """Dimensions of one factor each, or none where None is given."""
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


def _passthrough(text: str, rule: str) -> tuple[tuple[str, tuple[tuple[int, ...], ...]], ...]:
    passthrough: dict[str, tuple[tuple[int, ...], ...]] = {}
    for item in filter(str.strip, text.split(",")):
        kind, _, sets = (part.strip() for part in item.partition(":"))
        if kind not in REDUCTIONS:
            raise RuleError(f"rule {rule!r}: {kind!r} is no kind of partial{nearest(kind, REDUCTIONS)}")
        passthrough[kind] = tuple(tuple(int(i) for i in s.split("+")) for s in sets.split())
    return tuple(sorted(passthrough.items()))


def halo_axes(rule: Rule, in_specs: Sequence[Spec], out_specs: Sequence[Spec]) -> set[str]:
    """The mesh axes that split a `halo` factor: those that XLA exchanges halos over, in a local form too."""
    return {
        a
        for side, specs in ((rule.operands, in_specs), (rule.results, out_specs))
        for dims, s in zip(side, specs, strict=True)
        for dim, axes in zip(dims, s.dims, strict=True)
        if dim and rule.kind(dim[0]) == "halo"
        for a in axes
    }
