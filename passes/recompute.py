"""The backward part recomputes values of the forward part instead of saving them, as a `jax.checkpoint` policy says.

For a user ``passes=["recompute:full"]`` does what `jax.checkpoint` around each layer does, without touching the model:
it works on the traced step, which is differentiated already. `autoshard.transforms.remat` is the rewrite.

Between saving nothing and saving all are ``recompute:products:1``, ``products:2``, ...: that many matrix products of
the forward part are saved, those with most FLOPs per byte first; the same product in all layers counts as one. And
``recompute:*.mlp.up=12,attention=all`` makes values again by name (`autoshard.transforms.held_values.names`), each in
so many layers, the first ones, and holds the other products. A scan over layers is cut in two for that.
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

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program
from autoshard.transforms import remat
from autoshard.transforms.held_values.in_order import choose_again, price_of_again
from autoshard.transforms.held_values.names import ALL, ResidualGroup, asked_for, layers_again, residual_groups
from autoshard.transforms.held_values.sets import Price, layer_loops
from autoshard.transforms.held_values.split_scans import split_scans
from autoshard.transforms.pipeline import Pass

Policy = Callable[..., Any]


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
    """``"full"``, ``"products:3"``, the name of a policy in `jax.checkpoint_policies`, a policy: (primitive, *avals,
    **params) -> whether results are saved; or ``"*.mlp.up=12,attention=all"``: what is made again, by pattern, and in
    how many layers."""

    @classmethod
    def by_name(cls, again: Any) -> Recompute:
        """The pass that makes values again, in so many layers or ``"all"`` of them by name or pattern.

        Raises:
          PassError: a name or a count that is none.
        """
        if not isinstance(again, Mapping):
            raise PassError(f"recompute={again!r}: must map names or patterns to numbers of layers or {ALL!r}")
        for pattern, count in again.items():
            if not isinstance(pattern, str) or not pattern or set(pattern) & set(",= \t\n"):
                raise PassError(f"recompute: {pattern!r} is no name or pattern of a value")
            if count != ALL and (type(count) is not int or count < 0):
                raise PassError(f"recompute: {pattern!r} is made again in {count!r} layers; say a number or {ALL!r}")
        return cls(",".join(f"{pattern}={count}" for pattern, count in again.items()) or "*=0")

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in POLICIES and self._count is None and not self.asked:
            known = (*POLICIES, "products:1", "NAME=all")
            raise PassError(f"recompute has no policy {self.policy!r}{nearest(self.policy, known)}")
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise PassError(f"recompute takes a policy or the name of one, not {self.policy!r}")

    def __call__(self, program: Program) -> Program:
        if self.asked:
            after = self._by_name(program)
        else:
            after = _rewritten(program.jaxpr, self.is_saved(program))
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """From the one that saves all products to the one that saves none."""
        count = len(products(program.jaxpr))
        return tuple(Recompute(f"products:{n}" if n else "full") for n in range(count, -1, -1))

    def within(
        self,
        program: Program,
        prices: Mapping[str, tuple[float, float]],
        held: Mapping[str, int],
        layouts: Sequence[tuple[float, float]],
    ) -> tuple[Pass, float] | None:
        """The variant by name that takes least time (`autoshard.transforms.held_values.sets`)."""
        every = residual_groups(program)
        groups = [g for g in every if g.name in prices]
        priced = {name: Price(*price) for name, price in prices.items()}
        loops = layer_loops(program.jaxpr, groups, priced, lambda e: not remat.is_recomputable(e, program.rules))
        now = price_of_again(loops, groups, {g.name: g.layers - held.get(g.name, 0) for g in groups})
        may_differ = program.pipeline is None and not any(e.effects for e in jx.walk(program.jaxpr))
        found: list[tuple[float, dict[str, int]]] = []
        for seconds, room in layouts if loops else ():
            if now.bytes + room >= 0:
                again, price = choose_again(loops, groups, now.bytes + room, may_differ=may_differ)
                found.append((seconds - now.seconds + price.seconds, again))
        if not found:
            return None
        seconds, again = min(found, key=lambda f: f[0])
        needed = {name for loop in loops for name in loop.needed}
        if all(again[g.name] >= g.layers for g in groups if g.name in needed):
            return Recompute("full"), seconds
        return Recompute.by_name(asked_for(every, again)), seconds

    def change(self, before: Program, after: Program) -> str:
        sizes = " -> ".join(f"{remat.residual_bytes(p) / 2**20:.3g}" for p in (before, after))
        left = (
            []
            if self.asked
            else [f"{size / 2**20:.3g} MiB of {what}" for what, size in sorted(self._left(after).items())]
        )
        return f"residuals {sizes} MiB" + ("; not recomputed: " + ", ".join(left) if left else "")

    def __str__(self) -> str:
        policy = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "policy")
        return f"{self.name}:{policy}"

    def is_saved(self, program: Program) -> remat.SavePolicy:
        """An equation's results are saved if the policy allows it, for it or inside of it, or if it must not run
        twice."""
        saved = set(products(program.jaxpr)[: self._count]) if self._count else frozenset[Product]()

        def allows(eqn: jx.JaxprEqn) -> bool:
            here = _product(eqn) in saved if self._count is not None else self._allows(eqn)
            return here or any(allows(inner) for r in jx.regions(eqn) for inner in r.body.eqns)

        return lambda eqn: not remat.is_recomputable(eqn, program.rules) or allows(eqn)

    @functools.cached_property
    def asked(self) -> Mapping[str, int | None]:
        """By name or pattern, in how many layers a value is made again, None for all; empty of other policies."""
        parts = self.policy.split(",") if isinstance(self.policy, str) and "=" in self.policy else []
        found: dict[str, int | None] = {}
        for part in parts:
            name, _, count = part.strip().rpartition("=")
            if not name.strip() or not (count == ALL or count.isdecimal()):
                raise PassError(f"recompute: {part!r} is not NAME={ALL} or NAME=NUMBER of layers")
            found.pop(name.strip(), None)
            found[name.strip()] = None if count == ALL else int(count)
        return found

    def again(self, program: Program) -> tuple[tuple[ResidualGroup, int], ...] | None:
        """Each value that may be held, and in how many layers it is made again; None of a policy that says no such.

        Raises:
          PassError: names that `layers_again` refuses.
        """
        groups = residual_groups(program)
        if self.asked:
            counts = layers_again(groups, self.asked)
            return tuple((g, counts[g.name]) for g in groups)
        return None

    def _by_name(self, program: Program) -> jx.Jaxpr:
        """The jaxpr that makes again what `asked` names, scans cut where layers differ."""
        members: dict[jx.JaxprEqn, int] = {}
        cuts: dict[jx.JaxprEqn, frozenset[int]] = {}
        for group, count in self.again(program) or ():
            for member, here in group.first(count):
                members[member.eqn] = here
                if member.scan is not None and 0 < here < member.layers:
                    cuts[member.scan] = cuts.get(member.scan, frozenset()) | {here}
        for scan in cuts:
            if scan.effects or program.pipeline is not None:
                why = "it has effects" if scan.effects else "a pipeline runs it"
                raise PassError(
                    f"recompute: the layers of the scan at {jx.source(scan)} cannot differ, for {why}; say {ALL!r} or 0"
                )

        copies: dict[jx.JaxprEqn, tuple[jx.JaxprEqn, int]] = {}

        def is_held(eqn: jx.JaxprEqn) -> bool:
            known, first = copies.get(eqn, (eqn, 0))
            held = known in members and members[known] <= first
            return held or any(is_held(inner) for r in jx.regions(eqn) for inner in r.body.eqns)

        def is_saved(eqn: jx.JaxprEqn) -> bool:
            return not remat.is_recomputable(eqn, program.rules) or is_held(eqn)

        def split(jaxpr: jx.Jaxpr) -> jx.Jaxpr:
            jaxpr, found = split_scans(jaxpr, cuts)
            copies.update(found)
            return jaxpr

        return _rewritten(program.jaxpr, is_saved, split)

    @property
    def _count(self) -> int | None:
        """N of the policy ``products:N``; None for other policies."""
        found = re.fullmatch(r"products:(\d+)", self.policy) if isinstance(self.policy, str) else None
        return int(found[1]) if found else None

    def _allows(self, eqn: jx.JaxprEqn) -> bool:
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        answer = policy(eqn.primitive, *(a.aval for a in eqn.invars), **eqn.params)
        if not isinstance(answer, bool):
            raise PassError(
                f"recompute: the policy {self} returns {answer!r} for {eqn.primitive.name} at "
                f"{jx.source(eqn)}; it must return True or False"
            )
        return answer

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
    jaxpr: jx.Jaxpr, is_saved: remat.SavePolicy, split: Callable[[jx.Jaxpr], jx.Jaxpr] = lambda j: j
) -> jx.Jaxpr:
    eqns = [  # bodies may have a forward and a backward part of their own, as in gradient accumulation
        e if jx.is_differentiated(e) else jx.map_bodies(e, lambda b: _rewritten(b, is_saved, split)) for e in jaxpr.eqns
    ]
    if any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jx.with_eqns(jaxpr, eqns)
    jaxpr = split(jaxpr)
    return remat.recompute_in_straight_line(remat.recompute_in_scans(jaxpr, is_saved), is_saved)


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
