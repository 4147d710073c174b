"""The values that a step may hold for its backward part, as the user knows them.

A *residual group* is one value of a layer: the result of a matrix product or of attention, or what the user calls by
`jax.ad_checkpoint.checkpoint_name`, in all layers together. All else is made again from these, which costs next to
nothing. A group is called, in this order, by the name of `checkpoint_name`; ``attention``; the path of the parameter
that the product multiplies by, without the argument's name (``params.mlp.up``); the user's named scopes; the source
line. Where the names of a group's layers differ by numbers they become ``*``; of two values with one name the second
is called ``name#2``, which patterns match as they match ``name``.
"""

from __future__ import annotations

import difflib
import fnmatch
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.jaxpr.paths import path_names, unnumbered
from autoshard.transforms import remat
from autoshard.transforms.attention_op import attention_p

ALL, HOST = "all", "host"
"""What is said of a value that is made again in all layers, and of one that is in the host's memory in all."""
_LAYER_COUNTS = r"^((\d+|all)|(?:(\d+)\+)?host(?::(\d+))?)$"
"""How `LayerCounts` are written."""

ResidualKey = tuple[str, str, tuple[int, ...], str]
"""Source line, primitive, shape and dtype: the same in all layers."""


class LayerCounts(NamedTuple):
    """What becomes of a value between the forward and the backward part, by number of layers in order of execution."""

    again: int | None = 0
    """The first ones: the backward part makes it again. None: all."""
    host: int | None = 0
    """The next ones: it is in the host's memory. None: all that are left. In the others it stays on the device."""

    @classmethod
    def parse(cls, text: str) -> LayerCounts | None:
        """Of ``"12"``, ``"all"``, ``"host"``, ``"host:12"``, ``"4+host"`` or ``"4+host:12"``; None of anything else."""
        found = re.fullmatch(_LAYER_COUNTS, text)
        if found is None:
            return None
        _, again, first, host = found.groups()
        if again is not None:
            return cls(None if again == ALL else int(again))
        return cls(int(first or 0), None if host is None else int(host))

    def __str__(self) -> str:
        if self.host == 0:
            return ALL if self.again is None else str(self.again)
        first = f"{self.again}+" if self.again else ""
        return f"{first}{HOST}" + ("" if self.host is None else f":{self.host}")

    def of(self, layers: int) -> tuple[int, int]:
        """Both numbers, of a value of so many layers; more than there are where too many are asked for."""
        again = layers if self.again is None else self.again
        return again, layers - again if self.host is None else self.host


class Member(NamedTuple):
    """A residual in one layer, or in all layers of a scan."""

    eqn: jx.JaxprEqn
    layers: int
    """Of the scan; 1 outside of one."""
    scan: jx.JaxprEqn | None
    """The scan over layers that it is in."""


@dataclass(frozen=True)
class ResidualGroup:
    """One value of a layer, in all layers."""

    name: str
    key: ResidualKey
    members: tuple[Member, ...]
    """In order of execution."""
    again: int = 0
    """In how many layers the backward part makes it again."""

    @property
    def layers(self) -> int:
        return sum(m.layers for m in self.members)

    def first(self, layers: int) -> Iterator[tuple[Member, int]]:
        """Each member, and how many of its layers are among the first ``layers`` of the group."""
        for member in self.members:
            here = min(layers, member.layers)
            layers -= here
            yield member, here

    def parted(self, counts: LayerCounts) -> Iterator[tuple[Member, int, int]]:
        """Each member, up to which of its layers the value is made again, and from there up to which on the host."""
        again, host = counts.of(self.layers)
        for (member, made), (_, sent) in zip(self.first(again), self.first(again + host), strict=True):
            yield member, made, sent


def residual_key(eqn: jx.JaxprEqn) -> ResidualKey | None:
    """What is equal for the same product, or the same named value, of all layers; None of anything else."""
    if not jx.contraction_flops(eqn) and jx.given_name(eqn) is None:
        return None
    result = jx.aval(eqn.outvars[0])
    return jx.source(eqn), eqn.primitive.name, result.shape, jx.dtype_name(result.dtype)


def residual_groups(program: Program) -> tuple[ResidualGroup, ...]:
    """The residual groups of the forward parts of ``program``, in order of first execution."""
    found: dict[tuple[ResidualKey, str], list[tuple[str, Member]]] = defaultdict(list)
    again: dict[tuple[ResidualKey, str], int] = defaultdict(int)
    for name, member, is_again in _Walk(program).members(program.jaxpr.eqns, _Place()):
        key = residual_key(member.eqn)
        assert key is not None
        if is_again:
            same = [k for k in found if k[0] == key]  # the parameter's path may be lost on the way
            which = (key, unnumbered(name))
            again[which if which in found else next(iter(same), which)] += member.layers
        else:
            found[key, unnumbered(name)].append((name, member))
    groups: list[ResidualGroup] = []
    taken: set[str] = set()
    for (key, common), members in found.items():
        names = {name for name, _ in members}
        plain = names.pop() if len(names) == 1 else common.replace("#", "*")
        numbered = (f"{plain}#{n}" for n in itertools.count(2))
        name = next(n for n in itertools.chain((plain,), numbered) if n not in taken)
        taken.add(name)
        groups.append(ResidualGroup(name, key, tuple(m for _, m in members), again[key, common]))
    return tuple(groups)


@dataclass(frozen=True)
class _Place:
    """Where equations are: in the forward part, in the backward part, in what that makes again, in which scan."""

    forward: bool = False
    backward: bool = False
    again: bool = False
    layers: int = 1
    scan: jx.JaxprEqn | None = None


class _Walk:
    """Finds the members and their names; knows which variables are parameters, as they are or as views."""

    def __init__(self, program: Program) -> None:
        self.rules: Rules = program.rules
        self.carried = {program.jaxpr.invars[i] for i, _ in program.carries}
        self.paths: dict[jx.Var, str] = {}
        for v, leaf in zip(program.jaxpr.invars, program.inputs, strict=True):
            names = path_names(leaf.path)
            self.paths[v] = ".".join(names[1:] or names)

    def members(self, eqns: Sequence[jx.JaxprEqn], at: _Place) -> Iterator[tuple[str, Member, bool]]:
        """Name, member, and whether it is one that the backward part makes again."""
        named = {e.invars[0]: name for e in eqns if (name := jx.given_name(e)) is not None}
        products = set[jx.Var]()
        for eqn in eqns:
            traits = self.rules.traits(eqn.primitive)
            if traits.identity:
                self._carry(eqn.invars, eqn.outvars)
            elif eqn.invars and (traits.view or traits.fused_into_consumer or traits.moves_data or traits.casts):
                self._carry(eqn.invars[:1], eqn.outvars[:1])
            backward, again = at.backward or jx.is_backward(eqn), at.again or jx.is_made_again(eqn)
            forward = at.forward or (remat.is_forward(eqn) and not backward and not again)
            if (forward or again) and residual_key(eqn):
                name = jx.given_name(eqn)
                if name is None:
                    products.update(eqn.outvars)
                    name = next((named[v] for v in eqn.outvars if v in named), None) or self._name(eqn)
                elif eqn.invars[0] in products:
                    continue  # the product is called so
                yield _plain(name), Member(eqn, at.layers, at.scan), again
            groups = jx.scan_groups(eqn) if jx.is_differentiated(eqn) and at.scan is None else None
            inside = replace(at, forward=forward, backward=backward, again=again)
            inside = inside if groups is None else replace(inside, layers=groups.length, scan=eqn)
            for region in jx.regions(eqn):
                carried = {i for _, i in region.carries}
                entering = [w for w in region.inputs if w.inside not in carried]
                self._carry([eqn.invars[w.outside] for w in entering], [region.body.invars[w.inside] for w in entering])
                yield from self.members(region.body.eqns, inside)

    def _carry(self, sources: Iterable[jx.Atom], targets: Iterable[jx.Var]) -> None:
        for a, b in zip(sources, targets, strict=True):
            if isinstance(a, jx.Var) and a in self.paths:
                self.paths[b] = self.paths[a]
                if a in self.carried:
                    self.carried.add(b)

    def _name(self, eqn: jx.JaxprEqn) -> str:
        operands = [v for v in eqn.invars if isinstance(v, jx.Var) and v in self.paths]
        operands.sort(key=lambda v: v in self.carried)
        if eqn.primitive is attention_p:
            return "attention"
        if operands:
            return self.paths[operands[-1]]
        return ".".join(jx.scopes(eqn)) or jx.source(eqn).rpartition("/")[2] or eqn.primitive.name


def _plain(name: str) -> str:
    """``name`` without the characters that separate names where they are written in one line."""
    return re.sub(r"[,=\s]+", "_", name)


def layer_counts(groups: Sequence[ResidualGroup], asked: Mapping[str, LayerCounts]) -> dict[str, LayerCounts]:
    """In how many of its layers each group is made again, and in how many it is on the host, by its name.

    Args:
      asked: by pattern (`fnmatch`; ``*.mlp.up`` is also ``mlp.up``). What is said of a group's own name counts for it,
        wherever that stands; else the last of the patterns that match. A name is a pattern too: ``attention`` is also
        ``attention#2``, unless that is asked for itself.

    Raises:
      PassError: a pattern that matches nothing, or more layers than there are.
    """
    found = {g.name: LayerCounts() for g in groups}
    for pattern, counts in asked.items():
        matched = [g for g in groups if matches(g.name, pattern)]
        if not matched:
            names = ", ".join(found) or "none: nothing is differentiated"
            near = difflib.get_close_matches(pattern.lstrip("*."), found, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if matches("attention", pattern):
                hint = (
                    " (the scores of a small attention are values like others, unless passes=['attention'] joins them)"
                )
            raise PassError(f"recompute: no value that may be held is called {pattern!r}{hint}; there are {names}")
        for group in matched:
            if group.name != pattern and group.name in asked:
                continue
            again, host = counts.of(group.layers)
            if host < 0 or again + host > group.layers:
                what = "made again or on the host" if counts.host else "made again"
                said = f" ({counts})" if counts.host else ""
                hint = "" if group.name == pattern else f" (it matches {pattern!r}; say its own number too)"
                raise PassError(
                    f"recompute: {group.name!r} cannot be {what} in {again + max(0, host)} layers{said}: it has "
                    f"{group.layers}{hint}"
                )
            found[group.name] = LayerCounts(again, host)
    return found


def asked_for(groups: Sequence[ResidualGroup], counts: Mapping[str, LayerCounts]) -> dict[str, str]:
    """By name, what `LayerCounts.parse` and `layer_counts` make just ``counts`` of, with nothing for other groups."""
    named = [g.name for g in groups if any(counts.get(g.name, ()))]
    return {
        g.name: str(_shortest(counts.get(g.name, LayerCounts()), g.layers))
        for g in groups
        if any(matches(g.name, name) for name in named)
    }


def _shortest(counts: LayerCounts, layers: int) -> LayerCounts:
    """The same, with None for what is left."""
    again, host = counts.of(layers)
    return LayerCounts(None if again >= layers else again, None if host and again + host >= layers else host)


def matches(name: str, pattern: str) -> bool:
    """Whether ``pattern`` names the group called ``name``."""
    plain = name.rpartition("#")[0] or name
    return name == pattern or any(fnmatch.fnmatchcase(n, pattern) for n in (name, plain, f".{name}", f".{plain}"))
