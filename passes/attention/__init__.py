"""Attention: softmax attention becomes one operation, forward and backward, that a plan can run as a ring.

For a user, ``passes=["attention"]`` is what calling a library for attention over split sequences would be, without
touching the model. What counts as attention is found in `reader`; the operations are in `autoshard.transforms.attention_op`. Where
the sequence is not split they are the composition that they replace, up to how it is rounded. Where the target has a
library with a kernel for them (`Hardware.attention`), it computes those that it takes.

The backward part is found where it lies beside its forward part, or makes the scores again itself: under
`jax.checkpoint`, or after the pass ``recompute:full``. Where the layers of a scan hold scores or weights for the loop
of the backward part, that is made to make them again first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.ir.rule_registry import Rules
from autoshard.machine.mesh import Hardware, LogicalMesh
from autoshard.passes.attention.facts import Above, Facts
from autoshard.passes.attention.reader import Reader
from autoshard.passes.attention.site import Site
from autoshard.strict_config import parse_bytes
from autoshard.transforms import remat
from autoshard.transforms.attention_op import AttentionConfig, attention_backward_p, attention_p
from autoshard.transforms.cudnn_attention import kernel_flops_at_peak, unsupported_reason
from autoshard.transforms.pipeline import Pass

LARGE = "large"


@dataclass(frozen=True)
class Attention(Pass):
    """Puts one operation in the place of each self- or cross-attention, and one in that of its gradient."""

    name: ClassVar[str] = "attention"

    least: str = ""
    """An attention whose scores would take less, were they split over all devices, is left as it is, unless the target
    has a kernel for it. A size such as ``32MiB``; or ``large``, a quarter of the memory on the chip: less has room
    there anyway, and without such memory there is nothing to gain but room."""

    def __post_init__(self) -> None:
        try:
            _ = self.least in ("", LARGE) or parse_bytes(self.least)
        except ValueError as e:
            raise PassError(f"the pass {self}: {e}, or {LARGE!r}") from None

    def _bytes(self, mesh: LogicalMesh) -> float:
        """The least bytes of scores, of all devices together."""
        if self.least == LARGE:
            return mesh.hardware.on_chip / 4 * mesh.size or math.inf
        return parse_bytes(self.least) * mesh.size if self.least else 0

    def _wanted(self, program: Program) -> _Wanted:
        return _Wanted(self._bytes(program.mesh), program.mesh.hardware, program.rules)

    def __call__(self, program: Program) -> Program:
        wanted = self._wanted(program)
        before = jx.eliminate_dead_code(program.jaxpr)
        again = _held_no_more(before, wanted)
        after = _rewritten(again, wanted)
        return program if after is before else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        eqns = [eqn for eqn in jx.walk(after.jaxpr) if eqn.primitive in (attention_p, attention_backward_p)]
        made = Counter([eqn.primitive for eqn in eqns])
        text = f"{made[attention_p]} forward and {made[attention_backward_p]} backward made one operation each"
        if fused := sum(eqn.params["config"].fused for eqn in eqns):
            text += f", {'all' if fused == len(eqns) else fused} of them run by cuDNN"
        wanted = self._wanted(after)
        alive = after.jaxpr if after is not before else jx.eliminate_dead_code(after.jaxpr)
        found = [s for s in _refused(alive, wanted) if s.bytes >= wanted.told]
        left = Counter(f"{s.where or 'unknown line'}, {s.reason}" for s in found)
        lines = [f"{where}" + (f" ({n} times)" if n > 1 else "") for where, n in sorted(left.items())]
        return text + "".join(f"; left alone: {line}" for line in lines)


@dataclass(frozen=True)
class _Wanted:
    """Which attentions are to be replaced."""

    least: float
    """The least bytes of scores, of all devices together, where the target has no kernel."""
    hardware: Hardware
    rules: Rules

    @property
    def told(self) -> float:
        """The least bytes of scores of which it is said why they are left alone."""
        return 0 if self.hardware.attention else self.least

    def unfit(self, site: Site, config: AttentionConfig) -> str:
        """Why the target's kernel does not take it."""
        assert site.value is not None
        return unsupported_reason(config, *map(jx.aval, (site.query[0], site.key[0], site.value[0])))

    def config(self, site: Site, config: AttentionConfig) -> AttentionConfig | None:
        """The config in which it is replaced; None where it is not."""
        if self.hardware.attention and not self.unfit(site, config):
            return replace(config, fused=True)
        return config if site.bytes >= self.least else None

    def takes(self, site: Site) -> bool:
        """Whether it is replaced, if nothing else is wrong with it."""
        try:
            return site.bytes >= self.least or self.config(site, site.config()) is not None
        except PassError:
            return False

    def flops(self, config: AttentionConfig, operands: Sequence[jx.Var], backward: bool = False) -> float:
        """FLOPs of the products; of a kernel, what the peak does while it runs."""
        if not config.fused or self.hardware.attention is None:
            return config.flops(*map(jx.aval, operands), backward=backward)
        query, key, value = map(jx.aval, operands)
        return kernel_flops_at_peak(config, query, key, value, self.hardware.attention[backward], backward=backward)


def _refused(jaxpr: jx.Jaxpr, wanted: _Wanted, above: Above | None = None) -> Iterator[Site]:
    reader = Reader(jaxpr, wanted.rules, above)
    for site, config in reader.attentions():
        reason = "" if wanted.config(site, config) else wanted.unfit(site, config)
        site.refuse(reason or "its results are used before its operands are there", jx.source(site.eqn))
    yield from reader.refused()
    for eqn in jx.eqns_with_regions(jaxpr):
        for region in jx.regions(eqn):
            yield from _refused(region.body, wanted, reader.known.facts.inside(eqn, region))


def _held_no_more(jaxpr: jx.Jaxpr, wanted: _Wanted, above: Above | None = None) -> jx.Jaxpr:
    """``jaxpr`` with the loops of its backward part making scores and weights again that are held for them."""
    inner: set[jx.JaxprEqn] = set()
    nests = jx.eqns_with_regions(jaxpr)
    if not nests:
        return jaxpr
    facts = Facts(jaxpr, wanted.rules, above)
    for eqn in nests:
        for region in jx.regions(eqn) if jx.scan_groups(eqn) and remat.is_forward(eqn) else ():
            reader = Reader(region.body, wanted.rules, facts.inside(eqn, region))
            leaving = [s for s in reader.leaving if s.steps is not None and "out" in s.roles and wanted.takes(s)]
            if leaving:
                inner.update(reader.within(leaving), _of_nothing(region.body))
    changed = {
        e: jx.with_bodies(e, [_held_no_more(r.body, wanted, facts.inside(e, r)) for r in jx.regions(e)])
        for e in nests
        if not jx.is_differentiated(e)
    }
    if any(now is not e for e, now in changed.items()):
        jaxpr = jx.with_eqns(jaxpr, [changed.get(e, e) for e in jaxpr.eqns])
    after = remat.recompute_in_scans(jaxpr, lambda e: e not in inner) if inner else jaxpr
    return jaxpr if after is jaxpr else jx.eliminate_dead_code(after)


def _of_nothing(jaxpr: jx.Jaxpr) -> Iterator[jx.JaxprEqn]:
    """The equations that depend on no operand of ``jaxpr``, such as those of a causal mask."""
    made: set[jx.Var] = set()
    for eqn in jaxpr.eqns:
        if not jx.regions(eqn) and not eqn.effects and all(isinstance(a, jx.Literal) or a in made for a in eqn.invars):
            made.update(eqn.outvars)
            yield eqn


def _rewritten(jaxpr: jx.Jaxpr, wanted: _Wanted, above: Above | None = None) -> jx.Jaxpr:
    """``jaxpr`` with its attentions replaced, at every depth; itself where there are none."""
    reader = Reader(jaxpr, wanted.rules, above)
    changed = {
        e: jx.with_bodies(e, [_rewritten(r.body, wanted, reader.known.facts.inside(e, r)) for r in jx.regions(e)])
        for e in jx.eqns_with_regions(jaxpr)
    }
    eqns = [changed.get(e, e) for e in jaxpr.eqns] if changed else jaxpr.eqns
    sites = [
        (site, config) for site, found in reader.attentions() if (config := wanted.config(site, found)) is not None
    ]
    places = _Places(jaxpr) if sites else None
    known: dict[Any, jx.JaxprEqn] = {}
    plans = [plan for site, config in sites if places and (plan := _plan(places, site, config, wanted, known))]
    if not plans:
        same = all(now is e for e, now in changed.items())
        return jaxpr if same else jx.with_eqns(jaxpr, eqns)
    added: dict[int, list[jx.JaxprEqn]] = {}
    for plan in plans:
        for at, new in plan.added:
            added.setdefault(at, []).extend(new)
    dropped = {at for plan in plans for at in plan.dropped}
    return jx.with_eqns(
        jaxpr,
        [
            e
            for at, eqn in enumerate([*eqns, None])
            for e in (*added.get(at, ()), *([eqn] if eqn and at not in dropped else []))
        ],
    )


@dataclass(frozen=True)
class _Plan:
    """Equations to put before others, by these's places, and the places of those that go."""

    added: tuple[tuple[int, tuple[jx.JaxprEqn, ...]], ...]
    dropped: tuple[int, ...]


class _Places:
    """Which equation of a jaxpr makes a variable, and which is the first to read it."""

    def __init__(self, jaxpr: jx.Jaxpr) -> None:
        self.end = len(jaxpr.eqns)
        self.made = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.read: dict[jx.Var, int] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            for a in eqn.invars:
                if isinstance(a, jx.Var):
                    self.read.setdefault(a, at)


def _plan(
    places: _Places, site: Site, config: AttentionConfig, wanted: _Wanted, known: dict[Any, jx.JaxprEqn]
) -> _Plan | None:
    """How ``site`` is replaced; None where an operand comes too late. ``known``: equations that were staged."""
    extras = [v for v, _ in site.extras]
    assert site.value is not None
    ours = [site.query[0], site.key[0], site.value[0]]
    backward = [r for n, r in site.roles.items() if n != "out"]
    forward = site.roles.get("out")
    given = [*ours, *extras, *([site.cotangent[0]] if backward and site.cotangent else [])]
    ready = 1 + max([places.made.get(v, -1) for v in given])
    first = min([r.at for r in backward], default=places.end)
    late = max(first, ready)
    used = min([places.read.get(r.eqn.outvars[0], places.end) for r in backward], default=places.end)
    if backward and (late >= used or (forward is not None and forward.at >= late)):
        return None
    like = forward.eqn if forward else backward[0].eqn
    flops = wanted.flops(config, ours)
    out = [forward.eqn.outvars[0] if forward else None]
    ahead = _equation(attention_p, [*ours, *extras], config, flops, like, out, known)
    at = forward.at if forward else late
    if not backward:
        return _Plan(((at, (ahead,)),), (at,))
    assert site.cotangent is not None
    results = [site.roles[n].eqn.outvars[0] if n in site.roles else None for n in ("dq", "dk", "dv")]
    flops = wanted.flops(config, ours, backward=True)
    given = [*ours, *ahead.outvars, site.cotangent[0], *extras]
    behind = _equation(attention_backward_p, given, config, flops, backward[0].eqn, results, known)
    added = ((at, (ahead,)), (late, (behind,))) if forward else ((late, (ahead, behind)),)
    return _Plan(added, tuple(r.at for r in site.roles.values()))


def _equation(
    primitive: jx.Primitive,
    operands: Sequence[jx.Var],
    config: AttentionConfig,
    flops: float,
    like: jx.JaxprEqn,
    results: Sequence[jx.Var | None],
    known: dict[Any, jx.JaxprEqn],
) -> jx.JaxprEqn:
    """``results`` = ``primitive`` of ``operands``, new variables for results that are None or not given."""

    def bind(*xs: Any) -> Any:
        return primitive.bind(*xs, config=config, flops=flops)

    avals = tuple(jax.ShapeDtypeStruct(jx.aval(v).shape, jx.aval(v).dtype) for v in operands)
    key = primitive, avals, config, flops
    if key not in known:
        (known[key],) = jax.make_jaxpr(bind)(*avals).eqns
    eqn = known[key]
    wanted = [*results, *[None] * (len(eqn.outvars) - len(results))]
    outvars = [w if w is not None else jx.new_var(v) for w, v in zip(wanted, eqn.outvars, strict=True)]
    return eqn.replace(invars=list(operands), outvars=outvars, source_info=like.source_info)
