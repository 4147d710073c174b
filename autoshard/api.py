"""`jit`, the decorator, and `register_rule`. The one module that joins the engine with the rules and the passes."""

from __future__ import annotations

import functools
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
from autoshard.machine.mesh_config import AUTO, MeshConfig, MeshLike, mesh_config
from autoshard.passes import PASSES, Microbatch, Offload, Recompute
from autoshard.plan.planner import PlanRequest
from autoshard.plan.record import PlanRecord
from autoshard.rules import SHIPPED, STRUCTURAL
from autoshard.runtime.options import Options
from autoshard.runtime.plan import Plan
from autoshard.runtime.signature import Names, Nums, positions_and_names
from autoshard.runtime.step import BoundStep, Step
from autoshard.schedule.schedule import Schedule
from autoshard.search.strategies import PRESETS
from autoshard.strict_config import parse_bytes
from autoshard.transforms.pipeline import Pass, parse_passes

DEFAULT_PASSES = (
    "dead_code",
    "one_hot",
    "transposed_products",
    "norms",
    "attention:large",
    "rotary",
    "attention_operands",
    "sum_products",
    "pad_uneven",
)
MEMORY_SAVING_PASSES = (*DEFAULT_PASSES[:-4], "recompute", *DEFAULT_PASSES[-4:])
"""Tried too where memory rules out the fastest layout: the default passes with variants of ``recompute`` among them."""
OPTIONAL_PASSES = ("accumulate", "experts", "sum_products:through", "losses")
"""Tried before the others, or in the place of the one of the same name: ``losses`` where memory rules out the fastest
layout, the others in any case. Kept where the step is faster with it."""


def jit(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: MeshLike = None,
    strategy: str | Plan = "auto",
    like: Plan | Step | BoundStep | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: Nums = None,
    static_argnames: Names = None,
    donate_argnums: Nums = None,
    donate_argnames: Names = None,
    memory_budget: int | str | None = None,
    microbatches: int | None = None,
    schedule: str | Schedule | None = None,
    pad_state: bool = False,
    recompute: Mapping[str, int | str] | None = None,
    passes: Sequence[str | Pass] | None = None,
    rules: Mapping[Primitive | str, AnyRule] | None = None,
    strict: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    refine: int | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Any:
    """Plans and compiles a step over a device mesh: `jax.jit` that chooses every sharding.

    Args:
      fun: any function that `jax.jit` takes. Its NNX module arguments may be mutated in place, as under `nnx.jit`.
      mesh: a `jax.sharding.Mesh`, an `AbstractMesh`, axis sizes by name (one may be -1), the path of a mesh config,
        a `MeshConfig`, or None: all devices, in the axes that make the step fastest.
      strategy: ``"auto"``, a preset (``"dp"``, ``"fsdp"``, ``"tp"``, ``"fsdp_tp"``, ``"zero1"``, ``"zero2"``,
        ``"zero3"``, ``"replicated"``), either of them with the optimizer's state kept in the host's memory
        (``"fsdp+offload:optimizer"``, ``"offload:optimizer"`` for "auto"), parameters of layers too
        (``"offload:state"``), or with an axis of the mesh as the stages of a pipeline (``"fsdp+pipeline:stage"``,
        ``"pipeline:stage"``), or a `Plan` made earlier. Of such a plan's compiler options, those that may do more than
        change how the step is compiled must be in ``compiler_options`` too.
        Presets split the batch, as `autoshard.ir.batch` finds it and `Plan.batch` says, over the axes that divide
        it; arguments that are not carried and have none of it are parameters. Under "auto", arguments that are on the
        mesh already when the step is planned, and that no result replaces, keep the specs that they have there.
      like: a plan of another step, or that step, planned before this one is called. Arguments that both steps have keep
        the specs that they have there: those of the same path, shape and dtype, where a path may begin anywhere in
        the other's (``params`` is ``state.params``). So evaluation and decoding take the state as training leaves it.
        The mesh is that plan's.
      in_shardings, out_shardings: pytree prefixes of `PartitionSpec`, `NamedSharding` or None. A sharding given here is
        never overruled; None leaves it to the planner. So is the memory kind of a `NamedSharding`; without one, an
        argument is in the memory that it comes in, and a result in that which the step moves it to.
      static_argnums, static_argnames, donate_argnums, donate_argnames: as `jax.jit`.
      memory_budget: bytes per device, or text such as ``"14GiB"``; None takes the mesh config's, then the chip's.
      microbatches: the number of parts of the batch that the step is computed in, one after the other; of a pipeline,
        those that its stages pass on. Gradients and other sums over the batch are added up, the optimizer runs once,
        and results are those of the whole batch. The number must divide the batch; a step that needs all of it at once,
        as for batch norm, is refused. None leaves it to the planner, which takes several where memory rules out the
        fastest layout and that is faster than to recompute more, unless ``passes`` are given.
      schedule: of a pipeline, for which the mesh config names an axis (``pipeline:``): ``"gpipe"``, ``"1f1b"``,
        ``"interleaved:N"``, ``"zb-h1"``, ``"zb:N"``, ``"zb-v"``, or a `Schedule`. None leaves it to the planner.
        With ``pipeline: auto`` it takes an axis for the stages only where that makes the step faster.
      pad_state: whether state that the mesh does not divide is stored with padding: 50,257 rows as 50,264 over 8
        devices, where they would be whole on each else. Such an argument comes back as a `PaddedArray`: a `jax.Array`
        with its true shape and values, whose `stored` has the padding. Nothing that the step computes changes.
      recompute: what the backward part makes again instead of holding it: names or patterns of values, as
        ``plan.residuals`` has them, and in how many layers, the first ones, or ``"all"``: ``{"*.mlp.up": 12,
        "attention": "all"}``. With ``"host"`` a loop over layers holds a value in the host's memory, with ``"host:4"``
        that of the first four layers, with ``"12+host"`` or ``"12+host:4"`` that of the next ones after twelve. Of
        patterns that match one name the last counts. Other results of products and what is named by
        `jax.ad_checkpoint.checkpoint_name` are held on the device; all else is made again from these. None leaves it to
        the planner, which holds everything on the device where that fits.
      passes: rewrites of the program before it is planned, as ``"dead_code"``, ``"recompute:full"`` or `Pass` objects;
        no others run. None means ``["dead_code", "one_hot", "transposed_products", "norms", "attention:large",
        "rotary", "attention_operands", "sum_products", "pad_uneven"]``; before them ``"accumulate"`` over the mesh
        axes, if any, with which the step is fastest, or ``"experts"`` or ``"experts:recompute"``, or
        ``"sum_products:through"`` in place of ``"sum_products"``, where it is faster so; and where memory rules out the
        fastest layout, among them ``"recompute:full"``, or values to make again or to hold on the host by name and
        number of layers, ``"recompute:mlp.up=12,attention=all,mlp.gate=host"``, or ``"losses"`` before them so that
        less is recomputed, if that is faster than other layouts; and ``"offload:optimizer"`` after them where nothing
        else fits, or only what is slower, or ``"offload:state"`` where nothing else fits.
      rules: rules for this step only, as in `register_rule`, by primitive, name of a primitive, or name of a kernel or
        function; they take precedence over all others.
      strict: an operation that has no rule, and so would be replicated, is an error rather than a diagnostic.
      compiler_options: passed to XLA.
      refine: number of distinct layouts, those with the least predicted time, that are compiled to choose from: of
        those that fit in memory, the one whose compiled HLO has the least estimated time. 0 or None chooses by
        predicted time, and compiles no other.
      cache: folder of cached compilations for ``refine``; None means the environment variable ``AUTOSHARD_CACHE``, then
        ``autoshard`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``).

    Returns:
      A `Step`; without ``fun``, a decorator that returns one.

    Raises:
      ArgumentError, ConfigError, PassError, RuleError: an invalid option. Errors that depend on the arguments are
        raised when the step is planned for them.

    Example:
      >>> def train_step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> step = autoshard.jit(train_step, mesh={"data": 8}, strategy="fsdp", donate_argnums=0)
      >>> w, x = jnp.ones((16, 16)), jnp.ones((64, 16))
      >>> step.plan(w, x).in_specs
      (P(None, 'data'), P('data',))
      >>> step(w, x).shape
      (16, 16)
    """
    if fun is None:
        return functools.partial(
            jit,
            mesh=mesh,
            strategy=strategy,
            like=like,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            donate_argnames=donate_argnames,
            memory_budget=memory_budget,
            microbatches=microbatches,
            schedule=schedule,
            pad_state=pad_state,
            recompute=recompute,
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
    preset, offload, stages = _parse_strategy(strategy)
    config = config if stages is None else _with_pipeline(config, stages)
    if type(pad_state) is not bool:
        raise ArgumentError(f"pad_state={pad_state!r}: must be True or False")
    _check_pipeline(config, microbatches, schedule, strategy, refine, pad_state)
    if refine is not None and (type(refine) is not int or refine < 0):
        raise ArgumentError(f"refine={refine!r}: must be the number of layouts to compile and choose from, 0 or more")
    if refine and isinstance(strategy, Plan):
        raise ArgumentError(f"refine={refine}: a plan given as the strategy is not refined; leave one of them out")
    if recompute is not None and passes is not None:
        raise ArgumentError("recompute= and passes=: put 'recompute:NAME=all' among the passes, or leave one out")
    request = PlanRequest(
        preset,
        budget,
        strict,
        compiler_options=tuple(sorted((compiler_options or {}).items())),
    )
    decided = passes is not None or recompute is not None
    static_nums, static_names = positions_and_names(fun, static_argnums, static_argnames)
    pipeline = None if config is None else config.pipeline
    alone = microbatches == 1 and pipeline is None
    whole = alone or (microbatches is None and passes is not None and pipeline in (None, AUTO))
    donate_nums, donate_names = positions_and_names(fun, donate_argnums, donate_argnames)
    return Step(
        fun,
        Options(
            mesh=config or mesh,
            plan=strategy if isinstance(strategy, Plan) else None,
            like=_like(like, strategy),
            request=request,
            rules=_rules(rules),
            passes=(*_passes(passes, recompute), *offload),
            memory_saving_passes=() if decided else (*parse_passes(MEMORY_SAVING_PASSES, PASSES), *offload),
            optional_passes=parse_passes(OPTIONAL_PASSES if passes is None else None, PASSES),
            microbatch=None if whole else Microbatch(microbatches or 0),
            offload=() if offload or passes is not None else (Offload(), Offload("state")),
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            static_nums=static_nums,
            static_names=static_names,
            donate_nums=donate_nums,
            donate_names=donate_names,
            microbatches=microbatches,
            schedule=schedule,
            pad_state=pad_state,
            refine=refine or 0,
            cache=cache,
        ),
    )


def _passes(passes: Sequence[str | Pass] | None, recompute: Mapping[str, int | str] | None) -> tuple[Pass, ...]:
    """The passes that run in any case: those given, or the default ones with what ``recompute`` says among them."""
    if recompute is None:
        return parse_passes(DEFAULT_PASSES if passes is None else passes, PASSES)
    again = Recompute.by_name(recompute)
    return tuple(again if isinstance(p, Recompute) else p for p in parse_passes(MEMORY_SAVING_PASSES, PASSES))


def _parse_strategy(strategy: Any) -> tuple[str, tuple[Pass, ...], str | None]:
    """The preset that ``strategy`` names, what it says should be offloaded, and the axis of a pipeline:
    ``"fsdp+offload:optimizer+pipeline:stage"``.

    Raises:
      ArgumentError: it names no preset, or two axes.
      PassError: what it names cannot be offloaded.
    """
    if isinstance(strategy, Plan):
        return strategy.strategy, (), None
    names = strategy.split("+") if isinstance(strategy, str) else []
    offload = dict.fromkeys(n for n in names if n.partition(":")[0] == Offload.name)
    axes = {n: n.partition(":")[2].strip() for n in names if n.startswith("pipeline:")}
    preset = "+".join(n for n in names if n not in offload and n not in axes) or "auto" if names else strategy
    if preset not in PRESETS or len(axes) > 1:
        raise ArgumentError(f"strategy {strategy!r} is not known{nearest(str(preset), PRESETS)}")
    return preset, parse_passes(offload, PASSES), next(iter(axes.values()), None)


def _with_pipeline(config: MeshConfig | None, axis: str) -> MeshConfig:
    """``config`` with the pipeline that a strategy names."""
    if config is None or config.pipeline not in (None, axis):
        given = "a mesh of devices" if config is None else f"pipeline={config.pipeline!r}"
        raise ArgumentError(
            f"strategy 'pipeline:{axis}' with {given}: give mesh=MeshConfig(axes=..., pipeline={axis!r})"
        )
    return MeshConfig.model_validate({n: getattr(config, n) for n in config.model_fields_set} | {"pipeline": axis})


def _check_pipeline(
    config: MeshConfig | None,
    microbatches: Any,
    schedule: Any,
    strategy: Any,
    refine: Any,
    pad_state: Any,
) -> None:
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1):
        raise ArgumentError(f"microbatches={microbatches!r}: must be a number of parts of the batch, 1 or more")
    if isinstance(schedule, Schedule):
        schedule.check()
    elif isinstance(schedule, str):
        Schedule.named(schedule, stages=1, microbatches=1)
    elif schedule is not None:
        raise ArgumentError(f"schedule={schedule!r}: must be the name of a schedule, or a Schedule")
    if config is None or config.pipeline is None:
        if schedule is not None:
            raise ArgumentError(
                f"schedule={schedule!r} is of a pipeline, and the mesh has none: name an axis, as in "
                'MeshConfig(axes={"stage": 4, "data": 2}, pipeline="stage")'
            )
        return
    given = {"strategy=": isinstance(strategy, Plan), "refine=": refine, "pad_state=": pad_state}
    for name, value in given.items():
        if value:
            raise ArgumentError(
                f"{name}: not with a pipeline yet (pipeline={config.pipeline!r}); leave one of them out"
            )


def _like(like: Any, strategy: str | Plan) -> Callable[[], PlanRecord] | None:
    """What gives the plan whose specs shared arguments keep."""
    if like is None:
        return None
    if isinstance(strategy, Plan):
        raise ArgumentError("like=: a plan given as the strategy has a spec for every argument; leave one of them out")
    if isinstance(like, Plan):
        return lambda: like
    if isinstance(like, Step | BoundStep):
        return like.first_plan
    raise ArgumentError(f"like= takes a plan or a decorated step, not {type(like).__name__}")


def register_rule(
    op: Primitive | Callable[..., Any] | str,
    rule: AnyRule,
    *,
    local: Local | Callable[..., Any] | None = None,
    example: Sequence[Any] | None = None,
) -> None:
    """Registers the sharding rule of an operation, for every step planned from now on.

    Steps that are already planned keep their plan; a plan saved under other rules is refused by its fingerprint. A
    rule registered again replaces the former one; it takes precedence over one that ships. Under differentiation JAX
    replaces a function by its forward and backward functions: kernels in these have names of their own.

    Args:
      op: a primitive or its name; a Pallas kernel by the name given to `pallas_call` or by its function's; a foreign
        function by its target; a `custom_partitioning`, `custom_vjp` or `custom_jvp` function, a `HiPrim` class of
        `jax.experimental.hijax`, or the name of one (``"SearchSorted"``), whose body is then not planned. Where a
        name is ambiguous: ``"pallas_call:flash"``, ``"ffi_call:flash"``, ``"custom_vjp_call:flash"``.
      rule: a `Rule`, its text (``"bsd, de -> bse {d: sum}"``), a function from the operation's abstract values and
        parameters to a `Rule`, or Shardy's: the text of `custom_partitioning` (``"i j, j k -> i k"``, one word a
        factor), that text and its options as a pair, an `SdyShardingRule`, or the attribute that Shardy prints.
      local: how each device computes its shard: ``fun(axes, *shards)`` without collectives of its own, or a `Local`
        that declares them. A kernel needs this: XLA partitions primitives, and functions by their body, but no kernels.
        A foreign function without it is called on its shards.
      example: the operation's operands, as arrays or `jax.ShapeDtypeStruct`s, and after them its results if known. A
        rule that does not fit them is refused at once. Without an example a rule is refused at once if its ranks differ
        from those of the primitive, the function, or ``local`` over no axes, where these can be evaluated for operands
        of the rule's ranks; else when a step with the operation is planned.

    Raises:
      RuleError: an unknown kind of operation, text that is not a rule, or a rule that does not fit the operation.

    Example:
      >>> from jax.extend.core import Primitive
      >>> negate = Primitive("negate")
      >>> shape = negate.def_abstract_eval(lambda x: x)
      >>> autoshard.register_rule("negate", "ij -> ij | sum: 0")
      >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> autoshard.jit(negate.bind, mesh={"data": 8}, strategy="dp", strict=True).plan(x).out_specs
      P('data',)
      >>> autoshard.unregister_rule("negate")
    """
    _registered.update(_rule_entry(op, rule, local, example))


def unregister_rule(op: Primitive | Callable[..., Any] | str) -> None:
    """Removes the rule that `register_rule` registered for ``op``; steps that are already planned keep their plan.

    Raises:
      RuleError: nothing is registered for it.

    Example:
      >>> autoshard.register_rule("my_kernel", "ij -> ij")
      >>> autoshard.unregister_rule("my_kernel")
      >>> autoshard.unregister_rule("my_kernel")
      Traceback (most recent call last):
          ...
      autoshard.errors.RuleError: no rule is registered for 'my_kernel'
    """
    name = rule_registry.display_name(op)  # under which it is registered if the primitive was not defined by then
    removed = [_registered.pop(key, None) for key in (rule_registry.table_key(op), name)]
    if not any(removed):
        known = [rule_registry.display_name(k) for k in _registered]
        raise RuleError(f"no rule is registered for {name!r}{nearest(name, known)}")


_registered: dict[rule_registry.OperationKey, RuleFn] = {}


def _rules(rules: Mapping[Primitive | str, AnyRule] | None) -> rule_registry.Rules:
    """The rules of a step, in order of precedence: its own, those registered, those that ship."""
    own = [_rule_entry(op, rule, None, None) for op, rule in rule_registry.rule_items(rules)]
    step_rules = {k: fn for entry in own for k, fn in entry.items()}
    return replace(SHIPPED, step_rules=step_rules, base_tables=(_registered, *SHIPPED.base_tables))


def _rule_entry(
    op: Any, rule: AnyRule, local: Any, example: Sequence[Any] | None
) -> dict[rule_registry.OperationKey, RuleFn]:
    key = rule_registry.table_key(op)
    if isinstance(key, Primitive) and key.name in STRUCTURAL:
        raise RuleError(
            f"{key.name} takes no rule ({STRUCTURAL[key.name]}); give one to a function or operation by its name"
        )
    fn = rule_registry.rule_fn(rule, local)
    check_rule(key if isinstance(key, Primitive) else op, fn, local, example)
    return {key: fn}
