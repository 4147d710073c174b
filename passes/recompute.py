"""The backward part recomputes values of the forward part instead of saving them, as a `jax.checkpoint` policy says.

For a user ``passes=["recompute:full"]`` does what `jax.checkpoint` around each layer does, without touching the model:
it works on the traced step, which is differentiated already. `autoshard.transforms.remat` is the rewrite.

Between saving nothing and saving all are ``recompute:products:1``, ``products:2``, ...: that many matrix products of
the forward part are saved, those with most FLOPs per byte first; the same product in all layers counts as one. And
``recompute:*.mlp.up=12,attention=all`` makes values again by name (`autoshard.transforms.held_values.names`), each in
so many layers, the first ones, and holds the other products. A scan over layers is cut in two for that. With
``*.mlp.gate=host`` a value is held in the host's memory (`autoshard.transforms.held_values.on_host`).
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from jax import ad_checkpoint

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program
from autoshard.transforms import remat
from autoshard.transforms.held_values.in_order import choose_counts, price_of_counts
from autoshard.transforms.held_values.names import (
    ALL,
    HOST,
    LayerCounts,
    asked_for,
    layer_counts,
    residual_groups,
)
from autoshard.transforms.held_values.on_host import send_to_host
from autoshard.transforms.held_values.sets import Price, host_link, layer_loops
from autoshard.transforms.held_values.split_scans import split_scans
from autoshard.transforms.pipeline import Pass

Policy = Callable[..., Any]
_HELD, _AGAIN = "held", "again"
"""Beside `HOST`, what a policy says of a value."""
MIN_CUT_GAIN = 0.01
"""Least share of the step's time for which a scan over layers is cut in two: it compiles for twice as long."""


def _named() -> Mapping[str, Policy]:
    """JAX's policies by name, without the functions that make a policy from names or from other policies."""
    found = {
        name: policy
        for name, policy in vars(jax.checkpoint_policies).items()
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(policy).parameters.values())
    }
    return {"full": jax.checkpoint_policies.nothing_saveable, **found}


POLICIES = _named()
Product = tuple[str, str, tuple[int, ...], str]
"""As `residual_key` has it."""


@dataclass(frozen=True)
class Recompute(Pass):
    """Saves for the backward part only what the policy allows, values between layers, and inputs.

    Results are the same up to rounding, which depends on what the compiler fuses. Equations with effects run once.
    What `jax.checkpoint` in the step does is kept. Residuals of branches and `while` loops stay saved, which the
    report says.
    """

    name: ClassVar[str] = "recompute"
    decides_held: ClassVar[bool] = True

    policy: str | Policy = "full"
    """``"full"``, ``"products:3"``, the name of a policy in `jax.checkpoint_policies`; a policy, (primitive, *avals,
    **params) -> whether results are saved, or `jax.ad_checkpoint.Offloadable` to ``pinned_host``; or
    ``"*.mlp.up=12,attention=all,*.mlp.gate=host"``: what is made again or on the host meanwhile, by pattern, and in how
    many layers."""

    @classmethod
    def by_name(cls, again: Any) -> Recompute:
        """The pass that makes values again, in so many layers or ``"all"`` of them by name or pattern; of ``"host"``,
        ``"host:4"``, ``"12+host"`` and ``"12+host:4"`` those after these layers, or so many of them, are on the host.

        Raises:
          PassError: a name or a count that is none.
        """
        if not isinstance(again, Mapping):
            raise PassError(
                f"recompute={again!r}: must map names or patterns to numbers of layers, {ALL!r} or {HOST!r}"
            )
        for pattern, count in again.items():
            if not isinstance(pattern, str) or not pattern or set(pattern) & set(",= \t\n"):
                raise PassError(f"recompute: {pattern!r} is no name or pattern of a value")
            is_count = type(count) is int and count >= 0
            if not is_count and (not isinstance(count, str) or LayerCounts.parse(count) is None):
                raise PassError(
                    f"recompute: {pattern!r} is made again in {count!r} layers; say a number, {ALL!r}, {HOST!r}, "
                    "'host:NUMBER' or 'NUMBER+host'"
                )
        return cls(",".join(f"{pattern}={count}" for pattern, count in again.items()) or "*=0")

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in POLICIES and self._count is None and not self.asked:
            known = (*POLICIES, "products:1", "NAME=all", "NAME=host")
            raise PassError(f"recompute has no policy {self.policy!r}{nearest(self.policy, known)}")
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise PassError(f"recompute takes a policy or the name of one, not {self.policy!r}")

    def __call__(self, program: Program) -> Program:
        if self.asked:
            after = self._by_name(program)
        else:
            after = _rewritten(program.jaxpr, self.is_saved(program), is_on_host=self._offloads)
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """From the one that saves all products to the one that saves none."""
        count = len(products(program.jaxpr))
        return tuple(Recompute(f"products:{n}" if n else "full") for n in range(count, -1, -1))

    def within(
        self,
        program: Program,
        prices: Mapping[str, tuple[float, float]],
        counts: Mapping[str, tuple[int, int]],
        layouts: Sequence[tuple[float, float]],
    ) -> tuple[Pass, float] | None:
        """The variant by name that takes least time (`autoshard.transforms.held_values.sets`).

        On GPUs no scan is cut in two, as XLA hides less of what two loops send: GPT-3 of 66B on 4 x 8 H100, predicted
        at 6,491 ms so and at 6,530 with one loop, is compiled to 6,471 and 6,129 as scheduled (JAX 0.12.0.1).
        """
        every = residual_groups(program)
        groups = [g for g in every if g.name in prices]
        priced = {name: Price(*price) for name, price in prices.items()}
        link = host_link(program.mesh) if program.pipeline is None else None
        loops = layer_loops(program.jaxpr, groups, priced, lambda e: not remat.is_recomputable(e, program.rules), link)
        now = price_of_counts(loops, groups, {name: LayerCounts(*n) for name, n in counts.items()})
        cuts = program.pipeline is None and program.mesh.platform != "gpu"
        may_differ = cuts and not any(e.effects for e in jx.walk(program.jaxpr))
        found: list[tuple[float, dict[str, LayerCounts]]] = []
        for seconds, room in layouts if loops else ():
            if now.bytes + room >= 0:
                chosen, price = choose_counts(loops, groups, now.bytes + room, may_differ=False)
                if may_differ:
                    cut, less = choose_counts(loops, groups, now.bytes + room)
                    if less.seconds < price.seconds - MIN_CUT_GAIN * seconds:
                        chosen, price = cut, less
                found.append((seconds - now.seconds + price.seconds, chosen))
        if not found:
            return None
        seconds, chosen = min(found, key=lambda f: f[0])
        needed = {name for loop in loops for name in loop.needed}
        if all(chosen[g.name].of(g.layers)[0] >= g.layers for g in groups if g.name in needed):
            return Recompute("full"), seconds
        return Recompute.by_name(asked_for(every, chosen)), seconds

    def change(self, before: Program, after: Program) -> str:
        sizes = " -> ".join(f"{remat.residual_bytes(p) / 2**20:.3g}" for p in (before, after))
        found = f"residuals {sizes} MiB"
        if self.asked:
            outside = ", ".join(self._outside_loops(before))
            return found + (f"; on the device, since no loop has its layers: {outside}" if outside else "")
        if outside := ", ".join(dict.fromkeys(self._offloaded_outside_loops(after))):
            found += f"; on the device, since no loop has its layers: {outside}"
        left = [f"{size / 2**20:.3g} MiB of {what}" for what, size in sorted(self._left(after).items())]
        return found + ("; not recomputed: " + ", ".join(left) if left else "")

    def __str__(self) -> str:
        policy = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "policy")
        return f"{self.name}:{policy}"

    def is_saved(self, program: Program) -> remat.SavePolicy:
        """An equation's results are saved if the policy allows it, for it or inside of it, or if it must not run
        twice."""
        saved = set(products(program.jaxpr)[: self._count]) if self._count else frozenset[Product]()

        def allows(eqn: jx.JaxprEqn) -> bool:
            here = _product(eqn) in saved if self._count is not None else self._answer(eqn) != _AGAIN
            return here or any(allows(inner) for r in jx.regions(eqn) for inner in r.body.eqns)

        return lambda eqn: not remat.is_recomputable(eqn, program.rules) or allows(eqn)

    @functools.cached_property
    def asked(self) -> Mapping[str, LayerCounts]:
        """By name or pattern, what becomes of a value in how many layers; empty of other policies."""
        parts = self.policy.split(",") if isinstance(self.policy, str) and "=" in self.policy else []
        found: dict[str, LayerCounts] = {}
        for part in parts:
            name, _, text = part.strip().rpartition("=")
            counts = LayerCounts.parse(text)
            if not name.strip() or counts is None:
                raise PassError(f"recompute: {part!r} is not NAME={ALL}, NAME={HOST} or NAME=NUMBER of layers")
            found.pop(name.strip(), None)
            found[name.strip()] = counts
        return found

    def _outside_loops(self, program: Program) -> Iterator[str]:
        """What is asked for on the host, and is held on the device since it is in no loop."""
        groups = residual_groups(program)
        counts = layer_counts(groups, self.asked)
        for group in groups:
            if any(m.scan is None and held > made for m, made, held in group.parted(counts[group.name])):
                yield group.name

    def _by_name(self, program: Program) -> jx.Jaxpr:
        """The jaxpr that makes again what `asked` names, or has it on the host, scans cut where layers differ."""
        members: dict[jx.JaxprEqn, tuple[int, int]] = {}
        cuts: dict[jx.JaxprEqn, frozenset[int]] = {}
        groups = residual_groups(program)
        counts = layer_counts(groups, self.asked)
        for group in groups:
            for member, made, held in group.parted(counts[group.name]):
                members[member.eqn] = made, held
                inside = frozenset({made, held} - {0, member.layers})
                if member.scan is not None and inside:
                    cuts[member.scan] = cuts.get(member.scan, frozenset()) | inside
        for scan in cuts:
            if scan.effects or program.pipeline is not None:
                why = "it has effects" if scan.effects else "a pipeline runs it"
                raise PassError(
                    f"recompute: the layers of the scan at {jx.source(scan)} cannot differ, for {why}; say {ALL!r} or 0"
                )

        copies: dict[jx.JaxprEqn, tuple[jx.JaxprEqn, int]] = {}

        def anywhere(eqn: jx.JaxprEqn, holds: Callable[[int, int, int], bool]) -> bool:
            known, first = copies.get(eqn, (eqn, 0))
            here = known in members and holds(*members[known], first)
            return here or any(anywhere(inner, holds) for r in jx.regions(eqn) for inner in r.body.eqns)

        def is_held(eqn: jx.JaxprEqn) -> bool:
            return anywhere(eqn, lambda made, _, first: made <= first)

        def is_on_host(eqn: jx.JaxprEqn) -> bool:
            return anywhere(eqn, lambda made, held, first: made <= first < held)

        def is_saved(eqn: jx.JaxprEqn) -> bool:
            return not remat.is_recomputable(eqn, program.rules) or is_held(eqn)

        def split(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
            jaxpr, found = split_scans(jaxpr, cuts)
            copies.update(found)
            return jaxpr

        return _rewritten(program.jaxpr, is_saved, split, is_on_host)

    @property
    def _count(self) -> int | None:
        """N of the policy ``products:N``; None for other policies."""
        found = re.fullmatch(r"products:(\d+)", self.policy) if isinstance(self.policy, str) else None
        return int(found[1]) if found else None

    def _answer(self, eqn: jx.JaxprEqn) -> str:
        """What the policy says of the results of ``eqn``: `_HELD`, `_AGAIN` or `HOST`."""
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        answer = policy(eqn.primitive, *(a.aval for a in eqn.invars), **eqn.params)
        if isinstance(answer, ad_checkpoint.Offloadable) and answer.dst == "pinned_host":
            return HOST
        for said, meant in (
            (True, _HELD),
            (ad_checkpoint.Saveable, _HELD),
            (False, _AGAIN),
            (ad_checkpoint.Recompute, _AGAIN),
        ):
            if answer is said:
                return meant
        raise PassError(
            f"recompute: the policy {self} returns {answer!r} for {eqn.primitive.name} at {jx.source(eqn)}; it must "
            "return True, False, or Offloadable(src='device', dst='pinned_host')"
        )

    def _offloads(self, eqn: jx.JaxprEqn) -> bool:
        return not isinstance(self.policy, str) and self._answer(eqn) == HOST

    def _offloaded_outside_loops(self, program: Program) -> Iterator[str]:
        """What the policy has on the host, and is held on the device since it is in no loop."""
        for body in remat.differentiated_bodies(program.jaxpr):
            for eqn in remat.residuals(body).values():
                if not jx.regions(eqn) and self._offloads(eqn):
                    yield f"{eqn.primitive.name} at {jx.source(eqn) or 'unknown line'}"

    def _left(self, program: Program) -> Mapping[str, int]:
        """Bytes of the residuals that the policy does not save and that are saved all the same, by what they are."""
        found, is_saved = Counter[str](), self.is_saved(program)
        for body in remat.differentiated_bodies(program.jaxpr):
            for var, eqn in remat.residuals(body).items():
                if (
                    remat.is_forward(eqn)
                    and jx.regions(eqn)
                    and any(not is_saved(e) for e in _inner_definitions(eqn, var))
                ):
                    found[f"{eqn.primitive.name} at {jx.source(eqn) or 'unknown line'}"] += jx.aval_bytes(var.aval)
        return found


def _inner_definitions(eqn: jx.JaxprEqn, var: jx.Var) -> Iterator[jx.JaxprEqn]:
    """The equations in the bodies of ``eqn`` that compute its result ``var``; none for loop carries."""
    result = eqn.outvars.index(var)
    for region in jx.regions(eqn):
        carried = {end for end, _ in region.carries}
        for wire in region.outputs:
            if wire.outside == result and wire.inside not in carried:
                end = region.body.outvars[wire.inside]
                yield from (e for e in region.body.eqns if end in e.outvars)


def _rewritten(
    jaxpr: jx.Jaxpr,
    is_saved: remat.SavePolicy,
    split: Callable[[jx.Jaxpr], jx.Jaxpr] = lambda j: j,
    is_on_host: Callable[[jx.JaxprEqn], bool] = lambda e: False,
) -> jx.Jaxpr:
    eqns = [  # bodies may have a forward and a backward part of their own, as in gradient accumulation
        e if jx.is_differentiated(e) else jx.map_bodies(e, lambda b: _rewritten(b, is_saved, split, is_on_host))
        for e in jaxpr.eqns
    ]
    if any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jx.with_eqns(jaxpr, eqns)
    jaxpr = split(jaxpr)
    jaxpr = remat.recompute_in_straight_line(remat.recompute_in_scans(jaxpr, is_saved), is_saved)
    return send_to_host(jaxpr, is_on_host)


def products(jaxpr: jx.Jaxpr) -> list[Product]:
    """The matrix products of the forward part, at every depth: most FLOPs per byte of result first, then smallest."""

    def walk(eqns: Iterable[jx.JaxprEqn], *, inside: bool) -> Iterator[tuple[float, int, Product]]:
        for eqn in eqns:
            if found := _product(eqn) if inside or remat.is_forward(eqn) else None:
                size = sum(jx.aval_bytes(v.aval) for v in eqn.outvars)
                yield -jx.contraction_flops(eqn) / max(1, size), size, found
            if inside or remat.is_forward(eqn) or not jx.is_differentiated(eqn):
                for region in jx.regions(eqn):
                    yield from walk(region.body.eqns, inside=inside or remat.is_forward(eqn))

    return list(dict.fromkeys(p for _, _, p in sorted(walk(jaxpr.eqns, inside=False))))


def _product(eqn: jx.JaxprEqn) -> Product | None:
    if not jx.contraction_flops(eqn):
        return None
    result = jx.aval(eqn.outvars[0])
    return jx.source(eqn), eqn.primitive.name, result.shape, jx.dtype_name(result.dtype)
