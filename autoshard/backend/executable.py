"""entry: a step planned for one set of shapes, compiled once, and called."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from autoshard import jaxpr as jx
from autoshard.backend.lower import constrain
from autoshard.cost.compiler_options import user_options
from autoshard.errors import PlacementWarning
from autoshard.ir.graph import Graph
from autoshard.ir.program import Program
from autoshard.jaxpr.arguments import ArgumentAval, argument_aval
from autoshard.plan.record import PlanRecord

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


@dataclass(eq=False)
class Executable[P: PlanRecord]:
    """A step planned, for one set of shapes.

    It is traced and compiled once, as a function of flat arguments, in whatever form the step is called and however
    the arguments come: on the host, on one device, or as planned.
    """

    program: Program
    graph: Graph
    plan: P
    avals: tuple[ArgumentAval, ...]
    """Of each flat argument."""
    unpadded: Callable[[], Executable[PlanRecord]] | None = None
    """The step laid out alike, without elements that mean nothing, where the program has some: slopes around the step
    would run through what stands there, and zero times infinity is no number."""
    prelowered: jax.stages.Lowered | None = None
    """The step lowered, where that was done to choose its plan; it keeps what it was compiled to."""

    @functools.cached_property
    def jaxpr(self) -> jx.Jaxpr:
        """The program with its constraints, on this machine's devices."""
        return constrain(self.graph, self.plan, self.plan.jax_mesh)

    @functools.cached_property
    def closes_over_tracers(self) -> bool:
        """Whether the program holds values of a trace around the step."""
        return jx.any_tracer(self.program.jaxpr.consts)

    def eval_jaxpr(self, leaves: Sequence[Any]) -> Any:
        """The constrained program on flat arguments, while `jax.jit` traces it."""
        assert tuple(map(argument_aval, leaves)) == self.avals
        return self.program.out_tree.unflatten(jx.as_fun(self.jaxpr)(*leaves))

    @functools.cached_property
    def nested_jit(self) -> Any:
        """The `jax.jit` object that takes flat arguments inside another trace, and is traced anew there.

        It takes them as they lie: a tracer does not tell where its values are, and cannot be moved beforehand.
        """
        if self.unpadded is not None:
            return self.unpadded().nested_jit

        def planned(*leaves: Any) -> Any:
            placed = jax.lax.with_sharding_constraint(list(leaves), self.plan.flat_in_shardings)
            return jax.lax.with_sharding_constraint(self.eval_jaxpr(placed), self.plan.out_shardings)

        def step(*leaves: Any) -> Any:
            if self._result_shardings_on_caller_mesh() is None:
                return planned(*leaves)
            return jax.sharding.auto_axes(planned, out_sharding=self.plan.out_specs)(*leaves)

        donated = [i for i, leaf in enumerate(self.program.inputs) if leaf.donated]
        given = dict(user_options(self.plan.compiler_options))  # which JAX refuses here: they are for whole programs
        return jax.jit(step, donate_argnums=donated, compiler_options=given or None)

    @functools.cached_property
    def lowered(self) -> jax.stages.Lowered:
        """The step lowered, of flat arguments."""
        return self.prelowered or self._lower(range(len(self.avals)))

    def lower_for_call(self, tree: Any, order: Sequence[int]) -> jax.stages.Lowered:
        """The step lowered for calls whose ``(args, kwargs)`` have the structure ``tree``.

        Args:
          order: where among the leaves of such a call each flat argument of the program stands.
        """
        as_is = list(order) == list(range(len(self.avals)))
        lowered = jx.with_call_structure(self.lowered if as_is else self._lower(order), tree, self.program.out_tree)
        return lowered if self.plan.mesh.is_available else jx.CompileOnlyLowered(lowered, self._refuse_other_machine)

    def _refuse_other_machine(self, *_: Any, **__: Any) -> None:
        self.plan.mesh.require_available(self.program.name)

    def _lower(self, order: Sequence[int]) -> jax.stages.Lowered:
        places = [order.index(i) for i in range(len(self.avals))]  # the program's argument at each place of the call

        def step(*given: Any) -> Any:
            return jax.tree.leaves(self.eval_jaxpr([given[i] for i in order]))

        step.__name__ = self.program.name
        mesh = self.plan.jax_mesh
        jitted = jax.jit(
            step,
            in_shardings=tuple(self.plan.flat_in_shardings[i] for i in places),
            out_shardings=self.plan.flat_out_shardings,
            donate_argnums=[n for n, i in enumerate(places) if self.program.inputs[i].donated],
            compiler_options=dict(self.plan.compiler_options) or None,
        )
        shapes = [jax.ShapeDtypeStruct(a[0], a[1], weak_type=a[2]) for a in map(self.avals.__getitem__, places)]
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # rather than one that the caller has set
            return jitted.lower(*shapes)

    @functools.cached_property
    def compiled(self) -> jax.stages.Compiled:
        """The executable, of flat arguments."""
        return self.lowered.compile()

    def call(self, leaves: Sequence[Any], out_tree: Any) -> tuple[Any, jx.FastPath]:
        """Runs the executable on flat arguments that lie as planned or in no particular place.

        Returns:
          The result in the form of ``out_tree``, and the shortcut to the next call with such arguments.
        """
        return jx.execute(
            self.compiled, leaves, out_tree, self.program.jaxpr.effects, self._result_shardings_on_caller_mesh()
        )

    def _result_shardings_on_caller_mesh(self) -> list[NamedSharding] | None:
        """Where results lie, on the mesh that the caller has set, if that is the plan's with Explicit axes.

        What the caller then does with them is checked by their types, and those name that mesh.
        """
        around, mesh = jax.sharding.get_abstract_mesh(), self.plan.jax_mesh
        if dict(around.shape) != dict(mesh.shape) or set(around.axis_types) <= {AxisType.Auto}:
            return None
        typed = Mesh(mesh.devices, mesh.axis_names, axis_types=around.axis_types)
        return [NamedSharding(typed, s.spec) for s in self.plan.flat_out_shardings]

    def device_put(self, leaves: Sequence[Any]) -> list[Any]:
        """Copies of ``leaves``, placed as planned."""
        return jax.device_put(list(leaves), self.plan.flat_in_shardings)

    def move_misplaced(self, leaves: Sequence[Any], warned: set[str]) -> list[Any]:
        """``leaves``, those committed elsewhere than planned moved, which is reported once for each argument."""
        placed = list(leaves)
        for i, (leaf, want) in enumerate(zip(leaves, self.plan.flat_in_shardings, strict=True)):
            if jx.is_tracer(leaf) or not isinstance(leaf, jax.Array):
                continue
            if leaf.committed and not leaf.sharding.is_equivalent_to(want, leaf.ndim):
                path = self.program.inputs[i].path
                if path not in warned:
                    warned.add(path)
                    warnings.warn(
                        f"{path} was on {_placement_text(leaf.sharding)}, the plan wants {want.spec}: moved at this call, and "
                        "silently at later ones; plan.put(...) places arguments beforehand",
                        PlacementWarning,
                        skip_file_prefixes=(_PACKAGE,),
                    )
                placed[i] = jax.device_put(leaf, want)
        return placed


def _placement_text(sharding: jax.sharding.Sharding) -> str:
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{dict(sharding.mesh.shape)} as {sharding.spec}"
    return ", ".join(map(str, sorted(sharding.device_set, key=lambda d: d.id)))
