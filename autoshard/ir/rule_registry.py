"""Rule lookup: from an equation to its `Rule`, by name, by primitive, or from the equation itself.

All Pallas kernels share one primitive, as do all foreign functions and all functions with custom derivatives. They
differ by name, so rule tables are keyed by primitives and by names; a name takes precedence.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from jax.extend.core import Primitive

from autoshard import jaxpr as jx
from autoshard.errors import RuleError, nearest
from autoshard.ir import shardy_notation
from autoshard.ir.rule import CollectiveBytes, Local, Rule, RuleFn, RuleTable, parse, replicated_rule
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.machine.mesh import LogicalMesh

OperationKey = Primitive | str
AnyRule = Rule | str | tuple[str, Mapping[str, Any]] | RuleFn | Any
"""Every form in which a user may give a rule: `Rule`, its text, Shardy's text with options, a function of the abstract
operands, or JAX's `SdyShardingRule`."""


@dataclass(frozen=True)
class Rules(Mapping[OperationKey, RuleFn]):
    """Layered rule tables, of which the first with a key decides, and traits. A view: tables may still change."""

    step_rules: Mapping[OperationKey, RuleFn]
    """The rules of one step (``rules=``)."""
    base_tables: tuple[RuleTable, ...]
    """The rules of all steps: registered ones, then those that ship."""
    known_traits: Mapping[Primitive, Traits]
    """Of the primitives that ship; a step or a user adds none."""

    @property
    def _tables(self) -> tuple[Mapping[OperationKey, RuleFn], ...]:
        return cast("tuple[Mapping[OperationKey, RuleFn], ...]", (self.step_rules, *self.base_tables))

    def traits(self, primitive: Primitive) -> Traits:
        """The traits of ``primitive``; none for one that is not JAX's."""
        return self.known_traits.get(primitive, UNKNOWN)

    def __getitem__(self, key: OperationKey) -> RuleFn:
        for table in self._tables:
            if key in table:
                return table[key]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(key in table for table in self._tables)

    def __iter__(self) -> Iterator[OperationKey]:
        return iter(dict.fromkeys(itertools.chain(*self._tables)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class FixedRule:
    """A rule function that returns ``rule`` for any operands."""

    rule: Rule

    def __call__(self, *_: Any, **__: Any) -> Rule:
        return self.rule


@dataclass(frozen=True)
class EinsumRule:
    """A rule function that instantiates a rule in Shardy's notation for the ranks of its operands."""

    einsum: shardy_notation.EinsumTemplate
    local: Local | None

    def __call__(self, *avals: Any, **_: Any) -> Rule:
        rule = self.einsum.rule([tuple(getattr(a, "shape", ())) for a in avals])
        return rule if self.local is None else _with_local(rule, self.local)


def table_key(of: OperationKey | Callable[..., Any]) -> OperationKey:
    """The key in a rule table of ``of``: a primitive or its name, a function, or the name of a kernel or function.

    Raises:
      RuleError: ``of`` is none of these.
    """
    if isinstance(of, Primitive):
        return of
    if not isinstance(of, str):
        name = getattr(of, "__name__", "")
        if not callable(of) or not name:
            raise RuleError(f"a rule is for a primitive, a function, or the name of one, not for {of!r}")
        return name
    kind, colon, name = of.partition(":")
    if colon and kind not in jx.NAMED_CALLS:
        raise RuleError(f"{of!r}: {kind!r} is no kind of named operation{nearest(kind, jx.NAMED_CALLS)}")
    if colon and not name:
        raise RuleError(f"{of!r}: there is no name after the colon")
    return of if colon else jx.find_primitive(of) or of


def rule_items(rules: Any) -> list[tuple[OperationKey | Callable[..., Any], AnyRule]]:
    """The argument ``rules=`` of a step as (operation, rule) pairs.

    Raises:
      RuleError: ``rules`` is no mapping.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise RuleError(
            f"rules= takes a mapping from operations to rules, such as {{'sin': 'ij -> ij'}}, not {rules!r}"
        )
    return list((rules or {}).items())


def rule_fn(rule: AnyRule, local: Local | Callable[..., Any] | None = None) -> RuleFn:
    """``rule`` as a function of the operation's abstract operands and parameters, with its local form.

    Raises:
      RuleError: a text that is no rule, or a local form that does not fit it.
    """
    form = Local(local, _no_collectives) if callable(local) else local
    if isinstance(rule, str) and not shardy_notation.is_attribute(rule) and not shardy_notation.is_words(rule):
        rule = parse(rule)
    if isinstance(rule, Rule):
        return FixedRule(_with_local(rule, form))
    parsed = _parse(rule)
    if isinstance(parsed, shardy_notation.EinsumTemplate):
        return EinsumRule(parsed, form)
    return parsed if form is None else lambda *avals, **params: _with_local(parsed(*avals, **params), form)


def lookup_rule(eqn: jx.JaxprEqn, rules: Rules, mesh: LogicalMesh) -> Rule | None:
    """The rule of ``eqn``; None where it has none.

    Raises:
      RuleError: a rule splits a kernel and has no local form to run on shards.
    """
    keys = [*jx.op_names(eqn), eqn.primitive, eqn.primitive.name]
    fn = next((rules[k] for k in keys if k in rules), None)
    operands = [jx.aval(a) for a in eqn.invars]
    if fn is None:
        rule = custom_partitioning_rule(eqn, mesh)
    else:
        rule = fn(*operands, **jx.op_params(eqn))
    if rule is None or rule.local is not None or not jx.is_opaque(eqn):
        return rule
    if any(rule.kind(f) != "whole" for f in rule.factors) and not jx.accepts_shards(eqn):
        raise RuleError(
            f"the rule {rule} for {keys[0]!r} splits a kernel, which XLA cannot partition: give "
            "local=lambda axes, *shards: ..., the kernel's call on shards of its operands"
        )
    return _with_local(rule, Local(None, _no_collectives))


def has_own_rule(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    """Whether a function has a rule of its own, so that its body is not read."""
    return any(n in rules for n in jx.op_names(eqn))


def custom_partitioning_rule(eqn: jx.JaxprEqn, mesh: LogicalMesh) -> Rule | None:
    """The sharding rule given to `jax.experimental.custom_partitioning`, if ``eqn`` is a call of that and has one."""
    found = jx.sharding_rule(eqn)
    if found is None:
        return None
    rule, static = found
    operands, results = ([jx.aval(a) for a in side] for side in (eqn.invars, eqn.outvars))
    options: Mapping[str, Any] = {}
    if callable(rule):
        with shardy_notation.mlir_context():
            types = [shardy_notation.tensor_types(side) for side in (operands, results)]
            rule = rule(*static, mesh.abstract_mesh(), *types)
        if isinstance(rule, tuple | list) and not hasattr(rule, "operand_mappings"):
            rule, options = rule
    einsum = (
        shardy_notation.parse_words(rule, **options) if isinstance(rule, str) else shardy_notation.from_sdy_rule(rule)
    )
    return einsum.rule([a.shape for a in operands], [a.shape for a in results])


def fallback_rule(eqn: jx.JaxprEqn) -> Rule:
    """The rule of an operation that has none: kept whole, with the reason and the remedy."""
    names = jx.op_names(eqn)
    not_arrays = [jx.aval(a).str_short() for a in (*eqn.invars, *eqn.outvars) if not jx.is_shaped(a)]
    if eqn.primitive is jx.CALL_HI_PRIMITIVE and not_arrays:
        text = f"{names[-1]} takes or returns {not_arrays[0]}, which is not an array, so its body is not read"
    elif names:
        text = f"no rule for {names[0]!r}; autoshard.register_rule({names[1]!r}, ...) gives one"
    else:
        text = f"no rule for the primitive {eqn.primitive.name!r}"
    rule = replicated_rule(text, map(jx.aval, eqn.invars), map(jx.aval, eqn.outvars))
    # XLA cannot even run a kernel replicated on every device: that takes a shard_map.
    needs_shard_map = jx.is_opaque(eqn) and not jx.accepts_shards(eqn) and not jx.is_interpreted(eqn)
    return replace(rule, local=Local(None, _no_collectives)) if needs_shard_map else rule


def check_used(rules: Rules, names: set[str]) -> None:
    """Raises `RuleError` for a name in a step's ``rules=`` that is not among ``names``, those of its operations."""
    for k in rules.step_rules:
        if isinstance(k, str) and k not in names:
            raise RuleError(
                f"rules= names {k!r}, which is no primitive of this JAX version and no kernel or function of "
                f"the step{nearest(k, {*names, *jx.all_primitives()})}"
            )


def near_misses(rules: Rules, names: set[str]) -> Iterator[str]:
    """Diagnostics for registered names that match no operation of this step but nearly match one: they may be misspelt,
    or be of other steps."""
    for k in rules:
        if isinstance(k, str) and k not in names and not jx.find_primitive(k):
            for close in difflib.get_close_matches(k, names, n=1, cutoff=0.8):
                yield f"a rule is registered for {k!r}, which is not in the step; did you mean {close!r}?"


def display_name(of: OperationKey | Callable[..., Any]) -> str:
    """The name of the operation ``of``, for messages."""
    k = table_key(of)
    return k.name if isinstance(k, Primitive) else k


def _no_collectives(parts: int, sizes: Sequence[int]) -> CollectiveBytes:
    """`Local.collectives` of a local form without any."""
    return ()


def _parse(rule: Any) -> shardy_notation.EinsumTemplate | RuleFn:
    if isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Mapping):
        return shardy_notation.parse_words(rule[0], **rule[1])
    if isinstance(rule, str):
        text, _, kinds = rule.partition("{") if shardy_notation.is_words(rule) else (rule, "", "")
        if kinds:
            raise RuleError(
                f"rule {rule!r}: with factors of several letters, kinds are given as "
                f"({text.strip()!r}, {{'reduction_factors': (...)}}); or write one letter per factor"
            )
        words = shardy_notation.is_words(rule)
        return shardy_notation.parse_words(rule) if words else shardy_notation.parse_attribute(rule)
    if hasattr(rule, "operand_mappings"):
        return shardy_notation.from_sdy_rule(rule)
    if callable(rule):
        return cast(RuleFn, rule)
    raise RuleError(f"{rule!r} is no rule: give a Rule, its text, Shardy's text, or a function that returns a Rule")


def _with_local(rule: Rule, form: Local | None) -> Rule:
    locals_ = [f for f, kind in rule.kinds if kind == "local"]
    form = form or rule.local
    if len(locals_) > 1 or (locals_ and form is None):
        raise RuleError(
            f"rule {rule} has the local factors {', '.join(locals_)}: it may have one, and needs "
            "local=Local(fun, collectives)"
        )
    halos = [f for f, kind in rule.kinds if kind == "halo"]
    if halos and form is not None and not locals_:
        raise RuleError(
            f"rule {rule}: XLA exchanges no halos for an operation that it cannot partition; make "
            f"{', '.join(halos)} whole, or local with a local form that exchanges them"
        )
    return replace(rule, local=form)
