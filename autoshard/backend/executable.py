"""A planned step for one set of argument shapes: lowered with the plan's constraints, compiled once, and called."""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.backend.compilation import stage
from autoshard.backend.latencies import compile_with_latencies
from autoshard.backend.lower import constrain
from autoshard.backend.process_local import make_global, spans_processes
from autoshard.backend.same_plan import SAME_COMPILER, check_agreement, collective_order, plan_summary
from autoshard.backend.stage_branches import without_strays
from autoshard.cost.compiler_options import user_options
from autoshard.errors import PACKAGE, MeshError, PlacementWarning, PlanError
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import ArgumentAval, abstract_argument, argument_aval, in_host_memory
from autoshard.pipelining.chain import find_chain
from autoshard.pipelining.executor import pipelined_jaxpr
from autoshard.pipelining.stages import Stages
from autoshard.plan.record import PlanRecord
from autoshard.plan.serialize import plan_to_json

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
"""What JAX's devices call the platforms that its lowering has several names for."""
_NAMED = 3
"""Most arguments that a warning spells out."""


@dataclass(eq=False)
class Executable[P: PlanRecord]:
    """A planned step for one set of argument shapes.

    It is lowered and compiled once, as a function of flat arguments. One executable serves every call form (positional
    or keyword arguments) and every placement of the arguments: on the host, on one device, or as planned.
    """

    program: Program
    graph: Graph
    plan: P
    avals: tuple[ArgumentAval, ...]
    """Of each flat argument as the program takes it: in the memory that is pinned, if one is, or that the plan put it
    in, and with the padding that it is stored with, if any."""
    unpadded: Callable[[], Executable[PlanRecord]] | None = None
    """Makes the executable of the program without padding, planned with the same argument and result specs. Used when
    the step is traced by an outer transform (grad): gradients through padding would give 0 * inf = NaN. None where the
    program has no padding."""
    prelowered: jax.stages.Lowered | None = None
    """The step as `refine` lowered it to compare layouts; it caches its compilation."""

    def __post_init__(self) -> None:
        pairs = zip(self.program.inputs, self.avals, strict=True)
        self.avals = tuple((tuple(x.aval.shape), *aval[1:3], x.memory_kind == "pinned_host") for x, aval in pairs)

    @property
    def jaxpr(self) -> jx.Jaxpr:
        """The program with the plan's sharding constraints, over this machine's devices; a pipeline staged.

        Raises:
          PipelineError: stages of the pipeline would wait for each other for ever.
        """
        return self._staged[0]

    @functools.cached_property
    def _staged(self) -> tuple[jx.Jaxpr, jax.stages.Lowered | None]:
        """`jaxpr`, and it lowered, where it was compiled to know that its stages do not wait for each other."""
        jaxpr, pipeline = constrain(self.graph, self.plan, self.plan.jax_mesh), self.plan.pipeline
        if pipeline is None:
            return jaxpr, None
        chain = find_chain(jaxpr, self.program.name, self.program.rules)

        def staged(together: bool) -> jx.Jaxpr:
            stages = Stages(pipeline.axis, pipeline.schedule, pipeline.layers, pipeline.stored, together, chain.turned)
            return pipelined_jaxpr(jaxpr, chain, stages, self.plan.jax_mesh)

        if not self.plan.mesh.is_available or self.closes_over_tracers:
            return staged(together=self.closes_over_tracers), None

        def lower(jaxpr: jx.Jaxpr) -> jax.stages.Lowered:
            return self._lower(self._in_order, jaxpr)

        return without_strays(self.program.name, staged, lower, self._compile, self.plan.mesh, pipeline.axis)

    @property
    def _is_on_gpus(self) -> bool:
        """Whether XLA for GPUs orders collectives among compute."""
        return self.plan.mesh.platform == "gpu" and self.plan.mesh.size > 1

    @property
    def _in_order(self) -> range:
        return range(len(self.avals))

    @functools.cached_property
    def spans_processes(self) -> bool:
        """Whether the plan's mesh has devices of several processes."""
        return spans_processes(self.plan.jax_mesh)

    @functools.cached_property
    def closes_over_tracers(self) -> bool:
        """Whether the program closes over tracers of an outer trace, and so is valid within that trace only."""
        return jx.any_tracer(self.program.jaxpr.consts)

    def eval_jaxpr(self, leaves: Sequence[Any], jaxpr: jx.Jaxpr | None = None) -> Any:
        """Evaluates the constrained program, `jaxpr` or the one given, on flat arguments; called while `jax.jit`
        traces.
        """
        assert tuple(map(argument_aval, leaves)) == self.avals
        return self.program.out_tree.unflatten(jx.as_fun(jaxpr or self.jaxpr)(*leaves))

    @functools.cached_property
    def nested_jit(self) -> Any:
        """The `jax.jit` object called with flat arguments inside an outer trace.

        Its arguments have no `in_shardings`: a tracer does not expose where its value is placed, so the planned
        shardings are constraints inside. They and its results have their true shapes.
        """
        if self.unpadded is not None:
            return self.unpadded().nested_jit

        def planned(*leaves: Any) -> Any:
            stored = [
                x if p.stored is None else jx.add_padding(x, p.stored)
                for x, p in zip(leaves, self.plan.inputs, strict=True)
            ]
            placed = list(map(_constrained, stored, self.plan.flat_in_shardings))
            results = map(_constrained, jax.tree.leaves(self.eval_jaxpr(placed)), self.plan.flat_out_shardings)
            found = [
                x if p.stored is None else jx.cut_padding(x, p.shape)
                for x, p in zip(results, self.plan.outputs, strict=True)
            ]
            return self.program.out_tree.unflatten(found)

        def step(*leaves: Any) -> Any:
            if self._result_shardings_on_caller_mesh() is None:
                return planned(*leaves)
            specs = jax.tree.map(lambda s: s.spec, self.plan.out_shardings)
            return jax.sharding.auto_axes(planned, out_sharding=specs)(*leaves)

        donated = [i for i, leaf in enumerate(self.program.inputs) if leaf.donated]
        # JAX refuses our own here: they are for whole programs.
        given = dict(user_options(self.plan.compiler_options, self.plan.mesh))
        return jax.jit(step, donate_argnums=donated, compiler_options=given or None)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The step lowered as a function of flat arguments."""
        return self.prelowered or self._staged[1] or self._lower(self._in_order)

    def lower_for_call(self, tree: Any, order: Sequence[int], **options: Any) -> jax.stages.Lowered:
        """The step lowered for calls whose ``(args, kwargs)`` have the structure ``tree``.

        Args:
          order: for each flat argument of the program, its position among the leaves of such a call.
          options: those of `jax.stages.Traced.lower`, as `jax.export.export` gives them.

        Raises:
          MeshError: ``options`` name another platform than that of the plan's mesh.
          PlanError: there are ``options``, and state is stored with padding.
        """
        platform = self.plan.mesh.platform
        for name in options.get("lowering_platforms") or ():
            if _PLATFORMS.get(name, name) != platform:
                raise MeshError(
                    f"{self.program.name} is planned over {self.plan.mesh}, a mesh of {platform} devices, and cannot "
                    f"be lowered for {name}: name {platform} alone (platforms=[...] of jax.export.export), or plan the "
                    f"step over a mesh of {name} devices"
                )
        as_is = not options and list(order) == list(self._in_order)
        lowered = self.lowered if as_is else self._lower(order, **options)
        if self.stores_padding:
            if options:
                raise PlanError(
                    f"{self.program.name} stores state with padding, and cannot be exported so: plan it without "
                    "pad_state"
                )
            places = [order.index(i) for i in range(len(self.avals))]
            stored = [(self.plan.inputs[i].stored, self.plan.flat_in_shardings[i]) for i in places]
            true = [self.program.inputs[i].shape for i in places]
            lowered = jx.with_padded_arguments(lowered, stored, true, self._true_results)
        lowered = jx.with_call_structure(lowered, tree, self.program.out_tree)
        return lowered if self.plan.mesh.is_available else jx.CompileOnlyLowered(lowered, self._refuse_other_machine)

    @functools.cached_property
    def stores_padding(self) -> bool:
        """Whether an argument or a result is stored with padding."""
        return any(p.stored is not None for p in (*self.plan.inputs, *self.plan.outputs))

    @functools.cached_property
    def _true_results(self) -> list[tuple[int, ...] | None]:
        """The true shape of each result that is stored with padding."""
        return [None if p.stored is None else p.shape for p in self.plan.outputs]

    def _refuse_other_machine(self, *_: Any, **__: Any) -> None:
        self.plan.mesh.require_available(self.program.name)

    def _lower(self, order: Sequence[int], jaxpr: jx.Jaxpr | None = None, **options: Any) -> jax.stages.Lowered:
        places = [order.index(i) for i in range(len(self.avals))]  # the program's argument at each position of the call

        def step(*given: Any) -> Any:
            return jax.tree.leaves(self.eval_jaxpr([given[i] for i in order], jaxpr))

        step.__name__ = self.program.name
        jx.name_arguments(step, [self.plan.inputs[i].path for i in places])
        mesh = self.plan.jax_mesh
        jitted = jax.jit(
            step,
            in_shardings=tuple(self.plan.flat_in_shardings[i] for i in places),
            out_shardings=self.plan.flat_out_shardings,
            donate_argnums=[n for n, i in enumerate(places) if self.program.inputs[i].donated],
            compiler_options=dict(self.plan.compiler_options) or None,
        )
        shapes = [abstract_argument(self.avals[i]) for i in places]
        caller_mesh_overridden = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
        with caller_mesh_overridden, stage("lower", self.program.name):
            lowered = jitted.trace(*shapes).lower(**options)
        if not self.plan.mesh.is_available:
            kinds = [self.plan.inputs[i].memory_kind for i in places], [p.memory_kind for p in self.plan.outputs]
            jx.set_memory_kinds(lowered, *kinds)
        if self._is_on_gpus:
            lowered = jx.with_compilation(lowered, functools.partial(compile_with_latencies, mesh=self.plan.mesh))
        return lowered

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The compiled step, a function of flat arguments."""
        return self._compile(self.lowered)

    def _compile(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        with stage("compile", self.program.name):
            return lowered.compile()

    def call(self, leaves: Sequence[Any], out_tree: Any) -> tuple[Any, jx.FastPath]:
        """Runs the compiled step on flat arguments that are placed as planned or uncommitted.

        Returns:
          The result with the structure ``out_tree``, and the fast path for the next call with such arguments.
        """
        assert not self.spans_processes or self._sends_alike
        shardings = self._result_shardings_on_caller_mesh()
        return jx.execute(self.compiled, leaves, out_tree, self.program.jaxpr.effects, shardings, self._true_results)

    def _result_shardings_on_caller_mesh(self) -> list[NamedSharding] | None:
        """Shardings of the results over the mesh that the caller has set; None unless that is the plan's mesh with
        Explicit axes.

        The caller's operations on the results are then checked by their types, which name that mesh.
        """
        around, mesh = jax.sharding.get_abstract_mesh(), self.plan.jax_mesh
        if dict(around.shape) != dict(mesh.shape) or set(around.axis_types) <= {AxisType.Auto}:
            return None
        typed = Mesh(mesh.devices, mesh.axis_names, axis_types=around.axis_types)
        return [NamedSharding(typed, s.spec, memory_kind=s.memory_kind) for s in self.plan.flat_out_shardings]

    def device_put(self, leaves: Sequence[Any]) -> list[Any]:
        """Copies of ``leaves`` as the program takes them; what is process-local must be the same in every process."""
        return jax.device_put(self.plan.stored(self._global(leaves)), self.plan.flat_in_shardings)

    def _global(self, leaves: Sequence[Any]) -> list[Any]:
        """``leaves``, those that are process-local as global arrays where several processes share the mesh."""
        if jx.is_tracing() or not self.spans_processes:
            return list(leaves)
        assert self._agreed
        return make_global(leaves, self.plan.inputs, self.plan.flat_in_shardings, self.plan.jax_mesh, self.program.name)

    @functools.cached_property
    def _agreed(self) -> bool:
        """Whether all processes that share the mesh have made the same plan of the same program: else they would wait
        for one another, or compute with other numbers.

        Raises:
          PlanError: in every process, if they have not; names the first differences.
        """
        text, summary = json.dumps(plan_to_json(self.plan), sort_keys=True), functools.partial(plan_summary, self.plan)
        check_agreement(self.plan.jax_mesh, text, f"the plan of {self.program.name}", summary)
        program = self.lowered.as_text()  # numbers that are written in it are no part of the plan
        if "callback" not in program:  # has the address of its function, another one in each process
            check_agreement(self.plan.jax_mesh, program, f"the program of {self.program.name}", summary)
        return True

    @functools.cached_property
    def _sends_alike(self) -> bool:
        """Whether what each process compiled starts the same collectives in the same order: else they would wait for
        one another.

        Raises:
          PlanError: in every process, if not; names the first that differ.
        """
        order = collective_order(self.compiled.as_text() or "")
        what = f"the order of collectives in the compiled {self.program.name}"
        check_agreement(self.plan.jax_mesh, json.dumps(order), what, lambda: order, SAME_COMPILER)
        return True

    def _is_result(self, i: int, leaf: jax.Array) -> bool:
        """Whether the flat argument ``i``, which is not donated, may be a result of the step's last call: one has its
        shape, dtype and placement."""
        place = self.plan.inputs[i]
        results = zip(self.plan.outputs, self.plan.flat_out_shardings, strict=True)
        return not place.donated and any(
            (p.shape, p.dtype) == (place.shape, place.dtype) and s.is_equivalent_to(leaf.sharding, leaf.ndim)
            for p, s in results
        )

    def move_misplaced(self, leaves: Sequence[Any], warned: set[str]) -> list[Any]:
        """``leaves``, those committed to another sharding than planned moved. One warning names all that are moved for
        the first time.

        Args:
          warned: argument paths already reported; extended here.

        Raises:
          ArgumentError: one is process-local, and not the same in the processes that share the mesh.
          PlanError: these have made different plans.
        """
        placed = self._global(leaves)
        moved: list[str] = []
        for i, (leaf, want) in enumerate(zip(placed, self.plan.flat_in_shardings, strict=True)):
            stored = self.plan.inputs[i].stored
            if jx.is_tracer(leaf) or (stored is not None and jx.is_tracing()):
                continue
            if stored is not None and np.shape(leaf) != stored:
                placed[i] = jx.as_stored(leaf, stored, want)
                leaf = leaf.stored if isinstance(leaf, jx.PaddedArray) else leaf
            if not isinstance(leaf, jax.Array) or not leaf.committed:
                continue
            if leaf.shape != self.plan.inputs[i].stored_shape or not leaf.sharding.is_equivalent_to(want, leaf.ndim):
                path = self.program.inputs[i].path
                if path not in warned:
                    warned.add(path)
                    where = f"{_placement_text(leaf.sharding)}, the plan has {want.spec}{_memory_text(want)}"
                    where += "" if stored is None else f" of {list(stored)}, with padding"
                    remedy = " (as a result is placed: donated, it keeps its spec)" if self._is_result(i, leaf) else ""
                    moved.append(f"{path} is on {where}{remedy}")
                if stored is None:
                    placed[i] = jax.device_put(leaf, want)
        if moved:
            rest = [f"{len(moved) - _NAMED} more"] if len(moved) > _NAMED else []
            warnings.warn(
                f"{self.program.name}: {'; '.join([*moved[:_NAMED], *rest])}: resharded at this call, and silently at "
                "later ones; plan.put(...) places arguments beforehand, and autoshard.jit(..., like=other_step) plans "
                "for them as another step has them",
                PlacementWarning,
                skip_file_prefixes=(PACKAGE,),
            )
        return placed


def _constrained(x: Any, sharding: NamedSharding) -> Any:
    """``x``, in a trace, with a sharding's spec and in its memory, which a constraint alone does not change."""
    x, host = jax.lax.with_sharding_constraint(x, sharding), sharding.memory_kind == "pinned_host"
    space = jax.memory.Space.Host if host else jax.memory.Space.Device
    return x if in_host_memory(jax.typeof(x)) == host else jax.device_put(x, space)


def _placement_text(sharding: jax.sharding.Sharding) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{dict(sharding.mesh.shape)} as {sharding.spec}{_memory_text(sharding)}"
    return ", ".join(map(str, sorted(sharding.device_set, key=lambda d: d.id))) + _memory_text(sharding)


def _memory_text(sharding: jax.sharding.Sharding) -> str:
    return "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
