"""Recompute: the backward part makes values again instead of holding them, as a policy of `jax.checkpoint` says.

For a user, ``passes=["recompute:full"]`` is what `jax.checkpoint` around each layer is, without touching the
model: it works on the step as traced, already differentiated. How is in `autoshard.transforms.remat`.

Between holding nothing and all lie ``recompute:products:1``, ``2``, ...: so many products of the forward part are held,
those first that take most work for each byte; a product in all layers counts as one.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax

from autoshard import jaxpr as jx
from autoshard.errors import PassError, nearest
from autoshard.ir.program import Program
from autoshard.transforms import remat
from autoshard.transforms.pipeline import Pass

Policy = Callable[..., Any]


def _named() -> Mapping[str, Policy]:
    """The policies of JAX that are one themselves, rather than make one from names or other policies."""
    found = {
        name: policy
        for name, policy in vars(jax.checkpoint_policies).items()
        if any(p.kind is p.VAR_KEYWORD for p in inspect.signature(policy).parameters.values())
    }
    return {"full": jax.checkpoint_policies.nothing_saveable, **found}


POLICIES = _named()
Product = tuple[str, str, tuple[int, ...], str]
"""Line, operation, shape and dtype, alike in all layers."""


@dataclass(frozen=True)
class Recompute(Pass):
    """Holds for the backward part only what the policy allows, what stands at the edges of layers, and inputs.

    The values that the step gives are the same up to how the compiler rounds when it fuses differently. Equations
    with effects run once. What `jax.checkpoint` already does in the step stays as it is; so do the results of
    branches, and of loops that are no scans, and the report says so.
    """

    name: ClassVar[str] = "recompute"

    policy: str | Policy = "full"
    """``"full"``, ``"products:3"``, or a policy as `jax.checkpoint` takes, by name or itself: (primitive, *avals,
    **params) -> bool."""

    def __post_init__(self) -> None:
        if isinstance(self.policy, str) and self.policy not in POLICIES and self._count is None:
            known = (*POLICIES, "products:1")
            raise PassError(f"recompute has no policy {self.policy!r}{nearest(self.policy, known)}")
        if not isinstance(self.policy, str) and not callable(self.policy):
            raise PassError(f"recompute takes a policy's name or a function, not {self.policy!r}")

    def __call__(self, program: Program) -> Program:
        after = _rewritten(program.jaxpr, self.keep(program))
        return program if after is program.jaxpr else program.with_jaxpr(jx.eliminate_dead_code(after))

    def variants(self, program: Program) -> tuple[Pass, ...]:
        """What holds most products, to what holds none."""
        count = len(products(program.jaxpr))
        return tuple(Recompute(f"products:{n}" if n else "full") for n in range(count, -1, -1))

    def change(self, before: Program, after: Program) -> str:
        sizes = " -> ".join(f"{remat.residual_bytes(p) / 2**20:.3g}" for p in (before, after))
        left = [f"{size / 2**20:.3g} MiB of {what}" for what, size in sorted(self._left(after).items())]
        return f"residuals {sizes} MiB" + ("; left as they were: " + ", ".join(left) if left else "")

    def __str__(self) -> str:
        policy = self.policy if isinstance(self.policy, str) else getattr(self.policy, "__name__", "policy")
        return f"{self.name}:{policy}"

    def keep(self, program: Program) -> remat.SavePolicy:
        """Whether an equation's results are held: the policy allows it, here or inside, or it must not run twice."""
        chosen = set(products(program.jaxpr)[: self._count]) if self._count else frozenset[Product]()

        def allows(eqn: jx.JaxprEqn) -> bool:
            here = _product(eqn) in chosen if self._count is not None else self._allows(eqn)
            return here or any(allows(inner) for r in jx.regions(eqn) for inner in r.body.eqns)

        return lambda eqn: not remat.is_recomputable(eqn, program.rules) or allows(eqn)

    @property
    def _count(self) -> int | None:
        """How many products are held, where the policy says it so."""
        found = re.fullmatch(r"products:(\d+)", self.policy) if isinstance(self.policy, str) else None
        return int(found[1]) if found else None

    def _allows(self, eqn: jx.JaxprEqn) -> bool:
        policy = POLICIES[self.policy] if isinstance(self.policy, str) else self.policy
        answer = policy(eqn.primitive, *(a.aval for a in eqn.invars), **eqn.params)
        if not isinstance(answer, bool):
            raise PassError(
                f"recompute: the policy {self} gives {answer!r} for {eqn.primitive.name} at "
                f"{jx.source(eqn)}; it takes policies that give True or False"
            )
        return answer

    def _left(self, program: Program) -> Mapping[str, int]:
        """Residuals of loops and branches that the policy would not hold: what they are -> bytes."""
        found, keep = Counter[str](), self.keep(program)
        for body in remat.differentiated_bodies(program.jaxpr):
            for var, eqn in remat.residuals(body).items():
                if remat.is_forward(eqn) and jx.regions(eqn) and any(not keep(e) for e in _makers(eqn, var)):
                    found[f"{eqn.primitive.name} at {jx.source(eqn) or 'unknown line'}"] += jx.aval_bytes(var.aval)
        return found


def _makers(eqn: jx.JaxprEqn, var: jx.Var) -> Iterator[jx.JaxprEqn]:
    """The equations inside ``eqn`` that make its result ``var``; none for what a loop carries round."""
    place = eqn.outvars.index(var)
    for region in jx.regions(eqn):
        carried = {end for end, _ in region.carries}
        for wire in region.outputs:
            if wire.outside == place and wire.inside not in carried:
                end = region.body.outvars[wire.inside]
                yield from (e for e in region.body.eqns if end in e.outvars)


def _rewritten(jaxpr: jx.Jaxpr, keep: remat.SavePolicy) -> jx.Jaxpr:
    eqns = [  # bodies that may hold both parts are rewritten by themselves, as when gradients are taken in a loop
        e if jx.is_differentiated(e) else jx.map_bodies(e, lambda b: _rewritten(b, keep)) for e in jaxpr.eqns
    ]
    if any(a is not b for a, b in zip(eqns, jaxpr.eqns, strict=True)):
        jaxpr = jx.with_eqns(jaxpr, eqns)
    return remat.recompute_in_straight_line(remat.recompute_in_scans(jaxpr, keep), keep)


def products(jaxpr: jx.Jaxpr) -> list[Product]:
    """The products of the forward part, at every depth: most work for each byte held first, of equals the smallest."""

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
    made = jx.aval(eqn.outvars[0])
    return jx.source(eqn), eqn.primitive.name, made.shape, jx.dtype_name(made.dtype)
