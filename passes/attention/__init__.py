"""Replaces softmax attention and its gradient by the primitives of `autoshard.transforms.attention_op`.

For a user ``passes=["attention"]`` does what calling a ring-attention library does, without touching the model: a plan
may shard the sequence of the primitives (`autoshard.rules.attention`). Where it does not, results are the same up to
rounding. Where the target has a kernel for attention (`Hardware.attention`), the attentions that it supports run as
that kernel. `finder` says what counts as an attention.

A backward part is found where it stands in the same jaxpr as its forward part, or recomputes the scores itself, as
under `jax.checkpoint` or after the pass ``recompute:full``. Where a scan over layers saves scores or weights for the
backward scan, that scan is first made to recompute them; then, to read the output instead (`held`).
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
from autoshard.passes.attention.candidate import AttentionCandidate
from autoshard.passes.attention.facts import Facts, OuterValues
from autoshard.passes.attention.finder import AttentionFinder
from autoshard.passes.attention.held import hold_results
from autoshard.passes.attention.loop_masks import masks_in_loops
from autoshard.strict_config import parse_bytes
from autoshard.transforms import remat
from autoshard.transforms.attention_kernels import KERNELS, kernel_flops_at_peak, unsupported_reason
from autoshard.transforms.attention_op import AttentionConfig, attention_backward_p, attention_p
from autoshard.transforms.pipeline import Pass

LARGE = "large"


@dataclass(frozen=True)
class Attention(Pass):
    """Replaces each self- or cross-attention by one primitive, and its gradient by another."""

    name: ClassVar[str] = "attention"

    min_bytes: str = ""
    """Attentions with fewer bytes of scores per device, sharded over all devices, are left as they are, unless the
    target has a kernel for them. A size such as ``32MiB``; or ``large``: a quarter of the on-chip memory, since smaller
    scores stay there anyway. Without on-chip memory no attention is large."""

    def __post_init__(self) -> None:
        try:
            _ = self.min_bytes in ("", LARGE) or parse_bytes(self.min_bytes)
        except ValueError as e:
            raise PassError(f"the pass {self}: {e}, or {LARGE!r}") from None

    def _bytes(self, mesh: LogicalMesh) -> float:
        """The least bytes of scores over all devices."""
        if self.min_bytes == LARGE:
            return mesh.hardware.on_chip / 4 * mesh.size or math.inf
        return parse_bytes(self.min_bytes) * mesh.size if self.min_bytes else 0

    def _selection(self, program: Program) -> _Selection:
        return _Selection(self._bytes(program.mesh), program.mesh.hardware, program.rules)

    def __call__(self, program: Program) -> Program:
        selection = self._selection(program)
        before = jx.eliminate_dead_code(program.jaxpr)
        recomputing = _recompute_scores(before, selection)
        narrow = masks_in_loops(recomputing, program.rules if selection.takes_segments else None)
        replaced = _rewritten(narrow, selection)
        after = hold_results(recomputing if replaced is narrow else replaced)
        return program if after is before else program.with_jaxpr(jx.eliminate_dead_code(after))

    def change(self, before: Program, after: Program) -> str:
        eqns = list(jx.walk(after.jaxpr))
        forward, backward = ([e for e in eqns if e.primitive is op] for op in (attention_p, attention_backward_p))
        text = f"{len(forward)} forward and {len(backward)} backward attentions replaced by one operation each"
        by_kernel = Counter(e.params["config"].kernel for e in (*forward, *backward) if e.params["config"].kernel)
        for name, count in by_kernel.items():
            all_of_them = count == len(forward) + len(backward)
            text += f", {'all' if all_of_them else count} of them run by {KERNELS[name].label}"
        selection = self._selection(after)
        plain = Counter(
            (jx.source(e) or "unknown line", reason)
            for e in (*forward, *backward)
            if (reason := selection.refusal(e.params["config"], e.invars[:3]))
        )
        text += "".join(f"; run by no kernel: {where}, {why}" for where, why in sorted(plain))
        alive = after.jaxpr if after is not before else jx.eliminate_dead_code(after.jaxpr)
        rejected = [c for c in _rejected(alive, selection) if c.bytes >= selection.min_reported_bytes]
        left = Counter(f"{c.where or 'unknown line'}, {c.reason}" for c in rejected)
        lines = [f"{where}" + (f" ({n} times)" if n > 1 else "") for where, n in sorted(left.items())]
        return text + "".join(f"; not replaced: {line}" for line in lines)


@dataclass(frozen=True)
class _Selection:
    """Which attentions are to be replaced."""

    min_bytes: float
    """The least bytes of scores, over all devices, of an attention that no kernel of the target supports."""
    hardware: Hardware
    rules: Rules

    @property
    def min_reported_bytes(self) -> float:
        """The least bytes of scores, over all devices, of an attention that is reported where it is not replaced."""
        return 0 if self._any_size else self.min_bytes

    @property
    def _any_size(self) -> bool:
        """Whether the target has a kernel that is used for small attentions too."""
        return self.hardware.attention is not None and KERNELS[self.hardware.attention.kernel].any_size

    @property
    def takes_segments(self) -> bool:
        """Whether the target has a kernel that takes segment ids."""
        return self.hardware.attention is not None and KERNELS[self.hardware.attention.kernel].segments

    def finder(self, jaxpr: jx.Jaxpr, outer: OuterValues | None) -> AttentionFinder:
        """The attentions of ``jaxpr``, with masks as the target's kernel takes them."""
        return AttentionFinder(jaxpr, self.rules, outer, segments=self.takes_segments)

    def refusal(self, config: AttentionConfig, operands: Sequence[jx.Atom]) -> str:
        """Why the target's kernel does not compute an attention of these operands; "" where it does, or there is
        none."""
        rates = self.hardware.attention
        query, key, value = map(jx.aval, operands)
        return "" if rates is None else unsupported_reason(config, query, key, value, rates.kernel)

    def kernel_refusal(self, candidate: AttentionCandidate, config: AttentionConfig) -> str:
        """Why the target's kernel does not support an attention; "" where it does."""
        assert candidate.value is not None
        return self.refusal(config, (candidate.query[0], candidate.key[0], candidate.value[0]))

    def config(self, candidate: AttentionCandidate, config: AttentionConfig) -> AttentionConfig | None:
        """The configuration of the primitive that replaces an attention; None where it is not replaced."""
        large = candidate.bytes >= self.min_bytes
        if self.hardware.attention and (large or self._any_size) and not self.kernel_refusal(candidate, config):
            return replace(config, kernel=self.hardware.attention.kernel)
        return config if large else None

    def selects(self, candidate: AttentionCandidate) -> bool:
        """Whether the attention is replaced, if that its scores are saved is all that speaks against it."""
        try:
            return candidate.bytes >= self.min_bytes or self.config(candidate, candidate.config()) is not None
        except PassError:
            return False

    def flops(self, config: AttentionConfig, operands: Sequence[jx.Var], backward: bool = False) -> float:
        """FLOPs of the products; of a kernel, its time in FLOPs at the rate that XLA's products reach."""
        rates = self.hardware.attention
        if not config.kernel or rates is None:
            return config.flops(*map(jx.aval, operands), backward=backward)
        query, key, value = map(jx.aval, operands)
        share = rates.backward if backward else rates.forward
        at_peak = kernel_flops_at_peak(config, query, key, value, share, backward=backward)
        return at_peak * self.hardware.product_efficiency


def _rejected(jaxpr: jx.Jaxpr, selection: _Selection, outer: OuterValues | None = None) -> Iterator[AttentionCandidate]:
    """The attentions left in a rewritten jaxpr, at every depth, each with the reason."""
    finder = selection.finder(jaxpr, outer)
    for candidate, config in finder.attentions():
        reason = "" if selection.config(candidate, config) else selection.kernel_refusal(candidate, config)
        candidate.reject(reason or "its results are used before its operands are computed", jx.source(candidate.eqn))
    yield from finder.rejected()
    for eqn in jx.eqns_with_regions(jaxpr):
        for region in jx.regions(eqn):
            yield from _rejected(region.body, selection, finder.env.facts.in_region(eqn, region))


def _recompute_scores(jaxpr: jx.Jaxpr, selection: _Selection, outer: OuterValues | None = None) -> jx.Jaxpr:
    """``jaxpr`` with its backward scans recomputing scores and weights that forward scans save for them."""
    recomputed: set[jx.JaxprEqn] = set()
    nests = jx.eqns_with_regions(jaxpr)
    if not nests:
        return jaxpr
    facts = Facts(jaxpr, selection.rules, outer)
    for eqn in nests:
        for region in jx.regions(eqn) if jx.scan_groups(eqn) and remat.is_forward(eqn) else ():
            finder = selection.finder(region.body, facts.in_region(eqn, region))
            saved = [c for c in finder.escaping if c.score_ops is not None and "out" in c.products]
            saved = [c for c in saved if selection.selects(c)]
            if saved:
                recomputed.update(finder.eqns_of(saved), _input_independent(region.body))
    changed = {
        e: jx.with_bodies(e, [_recompute_scores(r.body, selection, facts.in_region(e, r)) for r in jx.regions(e)])
        for e in nests
        if not jx.is_differentiated(e)
    }
    if any(now is not e for e, now in changed.items()):
        jaxpr = jx.with_eqns(jaxpr, [changed.get(e, e) for e in jaxpr.eqns])
    after = remat.recompute_in_scans(jaxpr, lambda e: e not in recomputed) if recomputed else jaxpr
    return jaxpr if after is jaxpr else jx.eliminate_dead_code(after)


def _input_independent(jaxpr: jx.Jaxpr) -> Iterator[jx.JaxprEqn]:
    """The equations that depend on no input of ``jaxpr``, such as those of a causal mask."""
    constant: set[jx.Var] = set()
    for eqn in jaxpr.eqns:
        inputs_constant = all(isinstance(a, jx.Literal) or a in constant for a in eqn.invars)
        if not jx.regions(eqn) and not eqn.effects and inputs_constant:
            constant.update(eqn.outvars)
            yield eqn


def _rewritten(jaxpr: jx.Jaxpr, selection: _Selection, outer: OuterValues | None = None) -> jx.Jaxpr:
    """``jaxpr`` with its attentions replaced, at every depth; itself where there are none."""
    finder = selection.finder(jaxpr, outer)
    changed = {
        e: jx.with_bodies(e, [_rewritten(r.body, selection, finder.env.facts.in_region(e, r)) for r in jx.regions(e)])
        for e in jx.eqns_with_regions(jaxpr)
    }
    eqns = [changed.get(e, e) for e in jaxpr.eqns] if changed else jaxpr.eqns
    selected = [(c, config) for c, found in finder.attentions() if (config := selection.config(c, found)) is not None]
    positions = _Positions(jaxpr) if selected else None
    staged: dict[Any, jx.JaxprEqn] = {}
    edits = [edit for c, config in selected if positions and (edit := _edit(positions, c, config, selection, staged))]
    if not edits:
        same = all(now is e for e, now in changed.items())
        return jaxpr if same else jx.with_eqns(jaxpr, eqns)
    added: dict[int, list[jx.JaxprEqn]] = {}
    for edit in edits:
        for at, new in edit.added:
            added.setdefault(at, []).extend(new)
    dropped = {at for edit in edits for at in edit.dropped}
    return jx.with_eqns(
        jaxpr,
        [
            e
            for at, eqn in enumerate([*eqns, None])
            for e in (*added.get(at, ()), *([eqn] if eqn and at not in dropped else []))
        ],
    )


@dataclass(frozen=True)
class _Edit:
    """What replacing one attention does to the equations of a jaxpr."""

    added: tuple[tuple[int, tuple[jx.JaxprEqn, ...]], ...]
    """(i, equations to insert before equation i)."""
    dropped: tuple[int, ...]
    """Indices of the equations to remove."""


class _Positions:
    """The indices of the equations that define the variables of a jaxpr, and of the first ones that use them."""

    def __init__(self, jaxpr: jx.Jaxpr) -> None:
        self.end = len(jaxpr.eqns)
        self.definition = {v: at for at, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.first_use: dict[jx.Var, int] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            for a in eqn.invars:
                if isinstance(a, jx.Var):
                    self.first_use.setdefault(a, at)


def _edit(
    positions: _Positions,
    candidate: AttentionCandidate,
    config: AttentionConfig,
    selection: _Selection,
    staged: dict[Any, jx.JaxprEqn],
) -> _Edit | None:
    """How ``candidate`` is replaced; None where a result is used before an operand is defined.

    Args:
      staged: equations traced before, by what they depend on: layers of a model share theirs.
    """
    extras = [v for v, _ in candidate.extras]
    assert candidate.value is not None
    operands = [candidate.query[0], candidate.key[0], candidate.value[0]]
    backward = [product for what, product in candidate.products.items() if what != "out"]
    forward = candidate.products.get("out")
    read = [*operands, *extras, *([candidate.cotangent[0]] if backward and candidate.cotangent else [])]
    defined = 1 + max([positions.definition.get(v, -1) for v in read])
    backward_at = max(min([product.at for product in backward], default=positions.end), defined)
    used = min([positions.first_use.get(p.eqn.outvars[0], positions.end) for p in backward], default=positions.end)
    if backward and (backward_at >= used or (forward is not None and forward.at >= backward_at)):
        return None
    like = forward.eqn if forward else backward[0].eqn
    flops = selection.flops(config, operands)
    out = [forward.eqn.outvars[0] if forward else None]
    attention = _equation(attention_p, [*operands, *extras], config, flops, like, out, staged)
    forward_at = forward.at if forward else backward_at
    if not backward:
        return _Edit(((forward_at, (attention,)),), (forward_at,))
    assert candidate.cotangent is not None
    results = [candidate.products[n].eqn.outvars[0] if n in candidate.products else None for n in ("dq", "dk", "dv")]
    flops = selection.flops(config, operands, backward=True)
    read = [*operands, *attention.outvars, candidate.cotangent[0], *extras]
    gradient = _equation(attention_backward_p, read, config, flops, backward[0].eqn, results, staged)
    separate = ((forward_at, (attention,)), (backward_at, (gradient,)))
    added = separate if forward else ((backward_at, (attention, gradient)),)
    return _Edit(added, tuple(product.at for product in candidate.products.values()))


def _equation(
    primitive: jx.Primitive,
    operands: Sequence[jx.Var],
    config: AttentionConfig,
    flops: float,
    like: jx.JaxprEqn,
    results: Sequence[jx.Var | None],
    staged: dict[Any, jx.JaxprEqn],
) -> jx.JaxprEqn:
    """The equation ``results = primitive(*operands)``, with new variables for results that are None or missing.

    Args:
      like: the equation whose source line and name stack it gets.
      staged: as in `_edit`.
    """

    def bind(*xs: Any) -> Any:
        return primitive.bind(*xs, config=config, flops=flops)

    avals = tuple(jax.ShapeDtypeStruct(jx.aval(v).shape, jx.aval(v).dtype) for v in operands)
    key = primitive, avals, config, flops
    if key not in staged:
        (staged[key],) = jax.make_jaxpr(bind)(*avals).eqns
    eqn = staged[key]
    given = [*results, *[None] * (len(eqn.outvars) - len(results))]
    outvars = [v if v is not None else jx.new_var(new) for v, new in zip(given, eqn.outvars, strict=True)]
    return eqn.replace(invars=list(operands), outvars=outvars, source_info=like.source_info)
