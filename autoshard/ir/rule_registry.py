"""registry: how an operation comes to its rule: by its own name, by its primitive, or because it carries one.

A kernel, a foreign function or a function with derivatives of its own is one primitive for all of them; what
tells them apart is a name, so a table of rules is keyed by primitives and by names. Names come first.
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
from autoshard.ir import shardy_mlir, shardy_notation
from autoshard.ir.rule import Local, Rule, RuleFn, RuleTable, parse, replicated_rule
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.machine.collective import CollectiveKind
from autoshard.machine.mesh import LogicalMesh

Key = Primitive | str
AnyRule = Rule | str | tuple[str, Mapping[str, Any]] | RuleFn | Any
"""Every form in which a rule may be given; the last is JAX's `SdyShardingRule`."""


@dataclass(frozen=True)
class Rules(Mapping[Key, RuleFn]):
    """Several tables, the first that has a key deciding. A view: it shows what is in them now."""

    step_rules: Mapping[Key, RuleFn]
    """Those of one step."""
    base_tables: tuple[RuleTable, ...]
    known_traits: Mapping[Primitive, Traits]

    @property
    def _tables(self) -> tuple[Mapping[Key, RuleFn], ...]:
        return cast("tuple[Mapping[Key, RuleFn], ...]", (self.step_rules, *self.base_tables))

    def traits(self, primitive: Primitive) -> Traits:
        """What is known of ``primitive`` beside its rule; nothing of one that is no part of JAX."""
        return self.known_traits.get(primitive, UNKNOWN)

    def __getitem__(self, key: Key) -> RuleFn:
        for table in self._tables:
            if key in table:
                return table[key]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(key in table for table in self._tables)

    def __iter__(self) -> Iterator[Key]:
        return iter(dict.fromkeys(itertools.chain(*self._tables)))

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class FixedRule:
    """The same rule whatever the operands."""

    rule: Rule

    def __call__(self, *_: Any, **__: Any) -> Rule:
        return self.rule


@dataclass(frozen=True)
class EinsumRule:
    """A rule in Shardy's terms, for operands of any ranks that it leaves open."""

    einsum: shardy_notation.EinsumTemplate
    form: Local | None

    def __call__(self, *avals: Any, **_: Any) -> Rule:
        rule = self.einsum.rule([tuple(getattr(a, "shape", ())) for a in avals])
        return rule if self.form is None else _with_local(rule, self.form)


def table_key(of: Key | Callable[..., Any]) -> Key:
    """What stands in a table for ``of``: a primitive, its name, the name of a kernel or function, or a function.

    Raises:
      RuleError: it is none of these.
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


def rule_items(rules: Any) -> list[tuple[Key | Callable[..., Any], AnyRule]]:
    """``rules``, as a step takes them, as operations and their rules.

    Raises:
      RuleError: it is no mapping.
    """
    if rules is not None and not isinstance(rules, Mapping):
        raise RuleError(
            f"rules is a mapping from operations to their rules, such as {{'sin': 'ij -> ij'}}; not {rules!r}"
        )
    return list((rules or {}).items())


def rule_fn(rule: AnyRule, local: Local | Callable[..., Any] | None = None) -> RuleFn:
    """``rule`` as a function of the operation's abstract values and parameters.

    Raises:
      RuleError: a text that is no rule, or a local form that does not go with it.
    """
    form = Local(local, _silent) if callable(local) else local
    if isinstance(rule, str) and not shardy_notation.is_attribute(rule) and not shardy_notation.is_words(rule):
        rule = parse(rule)
    if isinstance(rule, Rule):
        return FixedRule(_with_local(rule, form))
    read = _read(rule)
    if isinstance(read, shardy_notation.EinsumTemplate):
        return EinsumRule(read, form)
    return read if form is None else lambda *avals, **params: _with_local(read(*avals, **params), form)


def lookup_rule(eqn: jx.JaxprEqn, rules: Rules, mesh: LogicalMesh) -> Rule | None:
    """The rule of ``eqn``; None where it has none.

    Raises:
      RuleError: a kernel has a rule that splits it and no form in which to run a part.
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
            f"the rule {rule} for {keys[0]!r} splits a kernel, which XLA cannot: give "
            "local=lambda axes, *parts: ..., the call on the parts of its operands"
        )
    return _with_local(rule, Local(None, _silent))


def has_own_rule(eqn: jx.JaxprEqn, rules: Rules) -> bool:
    """Whether a function has a rule of its own, so that its body is not looked into."""
    return any(n in rules for n in jx.op_names(eqn))


def custom_partitioning_rule(eqn: jx.JaxprEqn, mesh: LogicalMesh) -> Rule | None:
    """The rule that a `custom_partitioning` operation brings along, as it stands; None where there is none."""
    found = jx.sharding_rule(eqn)
    if found is None:
        return None
    rule, static = found
    operands, results = ([jx.aval(a) for a in side] for side in (eqn.invars, eqn.outvars))
    options: Mapping[str, Any] = {}
    if callable(rule):
        with shardy_mlir.context():
            rule = rule(*static, mesh.abstract_mesh(), shardy_mlir.tensor_types(operands), shardy_mlir.tensor_types(results))
        if isinstance(rule, tuple | list) and not hasattr(rule, "operand_mappings"):
            rule, options = rule
    read = shardy_notation.parse_words(rule, **options) if isinstance(rule, str) else shardy_notation.from_sdy_rule(rule)
    return read.rule([a.shape for a in operands], [a.shape for a in results])


def fallback_rule(eqn: jx.JaxprEqn) -> Rule:
    """The rule of an operation that has none: kept whole, with what to do about it."""
    called = jx.op_names(eqn)
    strange = [jx.aval(a).str_short() for a in (*eqn.invars, *eqn.outvars) if not jx.is_shaped(a)]
    if eqn.primitive is jx.CALL_HI_PRIMITIVE and strange:
        text = f"{called[-1]} takes or gives {strange[0]}, which is no array, so it is not looked into"
    elif called:
        text = f"no rule for {called[0]!r}; autoshard.register_rule({called[1]!r}, ...) gives one"
    else:
        text = f"no rule for the primitive {eqn.primitive.name!r}"
    rule = replicated_rule(text, map(jx.aval, eqn.invars), map(jx.aval, eqn.outvars))
    alone = jx.is_opaque(eqn) and not jx.accepts_shards(eqn) and not jx.is_interpreted(eqn)  # XLA does not even repeat it
    return replace(rule, local=Local(None, _silent)) if alone else rule


def check_used(rules: Rules, names: set[str]) -> None:
    """Raises `RuleError` for a name among a step's own rules that stands nowhere in its program."""
    for k in rules.step_rules:
        if isinstance(k, str) and k not in names:
            raise RuleError(
                f"rules names {k!r}, which is no primitive of this JAX and no kernel or function of "
                f"the step{nearest(k, {*names, *jx.all_primitives()})}"
            )


def near_misses(rules: Rules, names: set[str]) -> Iterator[str]:
    """What to say of names registered for every step that this one has not, but one much alike: perhaps slips, perhaps
    operations of other steps."""
    for k in rules:
        if isinstance(k, str) and k not in names and not jx.find_primitive(k):
            for close in difflib.get_close_matches(k, names, n=1, cutoff=0.8):
                yield f"a rule is registered for {k!r}, which the step has not; did you mean {close!r}?"


def display_name(of: Key | Callable[..., Any]) -> str:
    """``of`` as a person would write it."""
    k = table_key(of)
    return k.name if isinstance(k, Primitive) else k


def _silent(parts: int, sizes: Sequence[int]) -> tuple[tuple[CollectiveKind, int], ...]:
    """The moves of a form without collectives."""
    return ()


def _read(rule: Any) -> shardy_notation.EinsumTemplate | RuleFn:
    if isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[1], Mapping):
        return shardy_notation.parse_words(rule[0], **rule[1])
    if isinstance(rule, str):
        text, _, kinds = rule.partition("{") if shardy_notation.is_words(rule) else (rule, "", "")
        if kinds:
            raise RuleError(
                f"rule {rule!r}: beside factors in words, kinds are given as "
                f"({text.strip()!r}, {{'reduction_factors': (...)}}), or write one letter a factor"
            )
        return shardy_notation.parse_words(rule) if shardy_notation.is_words(rule) else shardy_notation.parse_attribute(rule)
    if hasattr(rule, "operand_mappings"):
        return shardy_notation.from_sdy_rule(rule)
    if callable(rule):
        return cast(RuleFn, rule)
    raise RuleError(f"{rule!r} is no rule: give a Rule, its text, Shardy's, or a function that returns one")


def _with_local(rule: Rule, form: Local | None) -> Rule:
    locals_ = [f for f, kind in rule.kinds if kind == "local"]
    form = form or rule.local
    if len(locals_) > 1 or (locals_ and form is None):
        raise RuleError(
            f"rule {rule} splits {', '.join(locals_)} in a local form: give one factor of that kind, and "
            "local=Local(fun, moves)"
        )
    halos = [f for f, kind in rule.kinds if kind == "halo"]
    if halos and form is not None and not locals_:
        raise RuleError(
            f"rule {rule}: the parts of an operation that XLA cannot split do not see their neighbours; "
            f"make {', '.join(halos)} whole, or local with a form that fetches the edges"
        )
    return replace(rule, local=form)
