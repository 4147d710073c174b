"""api: `jit`, the decorator. The one module that joins the engine with the rules and the passes."""

from __future__ import annotations

import functools
import inspect
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Primitive

from autoshard.errors import ArgumentError, RuleError, nearest
from autoshard.ir import rule_registry
from autoshard.ir.rule import Local, RuleFn
from autoshard.ir.rule_check import check_rule
from autoshard.ir.rule_registry import AnyRule
from autoshard.machine.mesh_config import MeshLike, mesh_config
from autoshard.passes import KNOWN
from autoshard.plan.planner import PlanRequest
from autoshard.rules import SHIPPED, STRUCTURAL
from autoshard.runtime.options import Options
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import Step
from autoshard.search.strategies import PRESETS
from autoshard.strict_config import parse_bytes
from autoshard.transforms.pipeline import Pass, parse_passes

DEFAULT_PASSES = ("dead_code", "one_hot", "transposed_products", "attention:large", "sum_products", "pad_uneven")
MEMORY_SAVING_PASSES = (
    "dead_code",
    "one_hot",
    "transposed_products",
    "recompute",
    "attention:large",
    "sum_products",
    "pad_uneven",
)
"""What else is weighed where memory stands in the way of the fastest layout and the user named no passes."""
OPTIONAL_PASSES = ("accumulate",)
"""What is weighed besides where the user named no passes."""
Names = str | Sequence[str] | None
Nums = int | Sequence[int] | None


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: MeshLike = None,
    strategy: str | Plan = "auto",
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Nums = None,
    static_argnames: Names = None,
    donate_argnums: Nums = None,
    donate_argnames: Names = None,
    memory_budget: int | str | None = None,
    passes: Sequence[str | Pass] | None = None,
    rules: Mapping[Primitive | str, AnyRule] | None = None,
    strict: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    refine: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Plans and compiles a step over a device mesh: `jax.jit` that decides every sharding itself.

    Args:
      fun: any function that `jax.jit` takes. Its NNX module arguments may be mutated in place, as under `nnx.jit`.
      mesh: a `jax.sharding.Mesh`, an `AbstractMesh`, axis sizes by name (one may be -1), the path of a mesh config,
        a `MeshConfig`, or None: all devices, the axes chosen.
      strategy: ``"auto"``, a preset (``"dp"``, ``"fsdp"``, ``"tp"``, ``"fsdp_tp"``, ``"zero1"``, ``"zero2"``,
        ``"zero3"``, ``"replicated"``), or a `Plan` made earlier.
      in_shardings, out_shardings: pytree prefixes of `PartitionSpec`, `NamedSharding` or None. What is given is
        never overruled; None leaves it to the planner.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as `jax.jit`.
      memory_budget: bytes per device, or text such as ``"14GiB"``; None takes the mesh config's, then the chip's.
      passes: rewrites of the program before it is planned, as ``"dead_code"``, ``"recompute:full"`` or `Pass` objects.
        None means ``["dead_code", "one_hot", "transposed_products", "attention:large", "sum_products",
        "pad_uneven"]``; before them ``"accumulate"`` along those axes of the mesh, if any, with which the step is
        fastest; and where memory stands in the way of the fastest layout, ``"recompute:products:N"`` or
        ``"recompute:full"`` beside them if that is faster than other layouts. Passes that are named here are all
        that run.
      rules: rules of this step alone, as `register_rule` takes them, by primitive, name of a primitive, or name of a
        kernel or function; they go before all others.
      strict: an operation that has to be kept whole is an error rather than a diagnostic.
      compiler_options: handed to XLA.
      refine: how many distinct layouts, the best by prediction, are compiled to take the one that the compiler likes
        best: what fits by its account, then the fewest estimated seconds. 0 or None leaves it to predictions.
      cache: the folder where the compiler's answers are kept for ``refine``; None means the environment variable
        ``AUTOSHARD_CACHE``, then ``autoshard`` in the user's own cache (``$XDG_CACHE_HOME``, ``~/.cache``).

    Returns:
      A `Step`; or, without ``fun``, a decorator that makes one.

    Raises:
      ArgumentError, ConfigError, PassError, RuleError: an option that is wrong, when the step is made. What depends on
        the arguments is raised when they are first seen.
    """
    if fun is None:
        return functools.partial(
            jit,
            mesh=mesh,
            strategy=strategy,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            memory_budget=memory_budget,
            passes=passes,
            rules=rules,
            strict=strict,
            compiler_options=compiler_options,
            refine=refine,
            cache=cache,
        )

    config = mesh_config(mesh)
    try:
        budget = parse_bytes(memory_budget) if memory_budget is not None else config.memory_budget if config else None
    except ValueError as e:
        raise ArgumentError(f"memory_budget: {e}") from None
    if not isinstance(strategy, Plan) and strategy not in PRESETS:
        raise ArgumentError(f"strategy {strategy!r} is not known{nearest(str(strategy), PRESETS)}")
    if refine is not None and (type(refine) is not int or refine < 0):
        raise ArgumentError(f"refine={refine!r}: it is how many layouts are compiled to choose from, 0 or more")
    if refine and isinstance(strategy, Plan):
        raise ArgumentError(f"refine={refine}: a plan that is given as the strategy is taken as it is; leave one out")
    request = PlanRequest(
        strategy if isinstance(strategy, str) else strategy.strategy,
        budget,
        strict,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
    )
    static_nums, static_names = _positions_and_names(fun, static_argnums, static_argnames)
    donate_nums, donate_names = _positions_and_names(fun, donate_argnums, donate_argnames)
    return Step(
        fun,
        Options(
            mesh=config or mesh,
            plan=strategy if isinstance(strategy, Plan) else None,
            request=request,
            rules=_rules(rules),
            passes=parse_passes(DEFAULT_PASSES if passes is None else passes, KNOWN),
            memory_saving_passes=parse_passes(MEMORY_SAVING_PASSES if passes is None else None, KNOWN),
            optional_passes=parse_passes(OPTIONAL_PASSES if passes is None else None, KNOWN),
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_nums=static_nums,
            static_names=static_names,
            donate_nums=donate_nums,
            donate_names=donate_names,
            refine=refine or 0,
            cache=cache,
        ),
    )


def _positions_and_names(fun: Callable[..., Any], nums: Nums, names: Names) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names that each stand for all of both, as `jax.jit` infers them from the signature."""
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    given = [] if nums is None else [nums] if isinstance(nums, int) else list(nums)
    called = [] if names is None else [names] if isinstance(names, str) else list(names)
    places = {operator.index(n) + (len(plain) if n < 0 else 0) for n in given}
    known = {p.name for p in parameters}
    for name in called:
        if known and name not in known and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ArgumentError(f"{getattr(fun, '__name__', fun)} has no argument {name!r}{nearest(name, known)}")
    places |= {plain.index(n) for n in called if n in plain}
    words = dict.fromkeys([*called, *(plain[n] for n in sorted(places) if n < len(plain))])
    return tuple(sorted(places)), tuple(words)


def register_rule(
    op: Primitive | Callable[..., Any] | str,
    rule: AnyRule,
    *,
    local: Local | Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
) -> None:
    """Gives an operation its rule, in every step that is planned from now on.

    Steps that are planned already keep their plan; a plan that was saved under other rules is refused by its
    fingerprint. What is registered again has the new rule, which also goes before the one that ships. Under
    differentiation, JAX puts a function's forward and backward functions in its place: kernels in there have names
    of their own.

    Args:
      op: a primitive or its name; a Pallas kernel by the name given to `pallas_call` or by its function's; a foreign
        function by its target; a `custom_partitioning`, `custom_vjp` or `custom_jvp` function, a `HiPrim` class of
        `jax.experimental.hijax`, or the name of one (``"SearchSorted"``), whose body is then not looked into. Where one
        name has several meanings: ``"pallas_call:flash"``, ``"ffi_call:flash"``, ``"custom_vjp_call:flash"``.
      rule: a `Rule`, its text (``"bsd, de -> bse {d: sum}"``), a function from the operation's abstract values and
        parameters to a `Rule`, or Shardy's: the text of `custom_partitioning` (``"i j, j k -> i k"``, one word a
        factor), that text and its options as a pair, an `SdyShardingRule`, or the attribute that Shardy prints.
      local: how each device computes its part: ``fun(axes, *parts)``, without collectives of its own, or a `Local`
        that declares them. XLA splits primitives, and functions by their body; it cannot split a kernel, which
        therefore needs this. A foreign function is called on its parts as it stands.
      example: arrays or `jax.ShapeDtypeStruct`s, the operation's operands and, where known, after them its results: a
        rule that does not fit them is refused at once. Without it, so is one whose ranks are not those that the
        primitive, the function, or ``local`` over no axes gives for operands such as the rule is for, if it can be
        asked; else where the operation is first met.

    Raises:
      RuleError: no such kind of operation, a text that is no rule, or one that does not fit the operation.
    """
    _registered.update(_entry(op, rule, local, example))


def unregister_rule(op: Primitive | Callable[..., Any] | str) -> None:
    """Takes back what `register_rule` gave ``op``; steps that are planned already keep their plan.

    Raises:
      RuleError: nothing is registered for it.
    """
    if _registered.pop(rule_registry.table_key(op), None) is None:
        known = [rule_registry.display_name(k) for k in _registered]
        name = rule_registry.display_name(op)
        raise RuleError(f"no rule is registered for {name!r}{nearest(name, known)}")


_registered: dict[rule_registry.Key, RuleFn] = {}


def _rules(rules: Mapping[Primitive | str, AnyRule] | None) -> rule_registry.Rules:
    """The step's own rules over those registered, and these over those that ship."""
    own = [_entry(op, rule, None, None) for op, rule in rule_registry.rule_items(rules)]
    step_rules = {k: fn for entry in own for k, fn in entry.items()}
    return replace(SHIPPED, step_rules=step_rules, base_tables=(_registered, *SHIPPED.base_tables))


def _entry(op: Any, rule: AnyRule, local: Any, example: Sequence[Any] | None) -> dict[rule_registry.Key, RuleFn]:
    key = rule_registry.table_key(op)
    if isinstance(key, Primitive) and key.name in STRUCTURAL:
        raise RuleError(
            f"{key.name} takes no rule ({STRUCTURAL[key.name]}); give one to a function or operation by its name"
        )
    fn = rule_registry.rule_fn(rule, local)
    check_rule(key if isinstance(key, Primitive) else op, fn, local, example)
    return {key: fn}
