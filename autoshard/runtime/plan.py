"""Plan: the record of what was decided, with what a user can do with it: place arrays, explain, compare, save, load."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import jaxpr as jx
from autoshard.backend.process_local import local_rows, make_global, spans_processes
from autoshard.errors import ArgumentError, PlanError, SpecError, nearest
from autoshard.ir.spec import replicated
from autoshard.jaxpr import dtype_name
from autoshard.jaxpr.arguments import argument_aval
from autoshard.pages.browser import open_page
from autoshard.pages.comparison import Comparison
from autoshard.pages.gallery import as_file, draw, profile_of
from autoshard.pages.page import page, short_page
from autoshard.pages.picture import Picture
from autoshard.pages.trace_events import trace_events
from autoshard.plan import render, serialize
from autoshard.plan.decisions import Place
from autoshard.plan.document import plural
from autoshard.plan.record import PlanRecord
from autoshard.plan.treedef import difference
from autoshard.runtime import nnx
from autoshard.runtime.study import Study
from autoshard.strict_files import parse_json, read_text

MAX_PLAN_BYTES = 2**26
"""Of a plan's file; a plan of some thousand equations has less than a hundredth."""


@dataclass(frozen=True, eq=False, repr=False)
class Plan(PlanRecord):
    """The specs of a step's arguments, results and constrained intermediates, their predicted cost, and methods.

    Example:
      >>> def train_step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> w, x = jax.ShapeDtypeStruct((16, 16), jnp.float32), jax.ShapeDtypeStruct((64, 16), jnp.float32)
      >>> plan = autoshard.jit(train_step, mesh={"data": 8}, strategy="fsdp", donate_argnums=0).plan(w, x)
      >>> plan.init(lambda key: jax.random.normal(key, (16, 16)), jax.random.key(0)).sharding.spec
      P(None, 'data')
      >>> plan.put(np.ones((16, 16)), np.ones((64, 16)))[1].addressable_shards[0].data.shape
      (8, 16)
      >>> plan.local_rows("x").size
      64
      >>> folder = tempfile.mkdtemp()
      >>> plan.save(folder + "/plan.json")
      >>> autoshard.Plan.load(folder + "/plan.json") == plan == autoshard.Plan.from_json(plan.to_json())
      True
      >>> f'"fingerprint": "{plan.fingerprint}"' in plan.json_text()
      True
      >>> report, page = plan.explain(), plan.show(folder + "/plan.html")
      >>> picture = plan.plot("memory", folder + "/memory.svg")
      >>> plan.trace(folder + "/step.json")
      >>> other = plan.what_if({"w": P()})
      >>> other.in_specs[0], "float32[16, 16] has spec" in plan.why("w")
      (P(), True)
      >>> "Arguments" in str(plan.diff(other))
      True
    """

    study: Study | None = field(default=None, compare=False, repr=False)
    """The step that the plan was made for, for `what_if` and `why`; None for a loaded plan."""

    @classmethod
    def of(cls, record: PlanRecord, study: Study | None = None) -> Self:
        """``record`` as a `Plan`."""
        return cls(**{f.name: getattr(record, f.name) for f in dataclasses.fields(PlanRecord)}, study=study)

    def init(self, fn: Callable[..., Any], *args: Any, argnum: int = 0) -> Any:
        """Runs ``fn(*args)`` so that its result is created with the shardings of argument ``argnum`` of the step.

        No device ever holds more than its shards. ``fn`` may make NNX modules.

        Raises:
          ArgumentError: the step has no such argument, or the result is not what it takes there: names the first
            array or container that differs.
        """
        self.mesh.require_available(f"init for {self.name}")
        avals = self.in_avals
        if not -len(avals) <= argnum < len(avals):
            raise ArgumentError(f"init: argnum={argnum}, and {self.name} takes {plural(len(avals), 'argument')}")
        argnum %= len(avals)
        start, end = (jax.tree.structure(avals[:n]).num_leaves for n in (argnum, argnum + 1))
        rebuild: list[Callable[[Sequence[Any]], Any]] = []

        def parts(*given: Any) -> Any:
            return nnx.split((fn(*given),)).states[0]

        def flat(*given: Any) -> list[Any]:
            leaves, back = nnx.leaves_of(fn(*given))
            rebuild[:] = [back]
            return [
                x if p.stored is None else jx.add_padding(x, p.stored)
                for x, p in zip(leaves, self.inputs[start:end], strict=True)
            ]

        made = jax.eval_shape(parts, *args)
        misfit = self._misfit(self.inputs[start:end], avals[argnum], made, "the function makes")
        if misfit:
            raise ArgumentError(f"init: {misfit}")
        if spans_processes(self.jax_mesh):
            args = self._replicated(args)
        leaves = jax.jit(flat, out_shardings=self.flat_in_shardings[start:end])(*args)
        return rebuild[0](jx.with_true_shapes(leaves, [p.shape for p in self.inputs[start:end]]))

    def _replicated(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `init`, the same in every process, replicated over the mesh."""
        paths, tree = jax.tree_util.tree_flatten_with_path(args)
        avals = [(f"args{jax.tree_util.keystr(path)}", *argument_aval(x)) for path, x in paths]
        places = [Place(path, shape, dtype_name(dtype), replicated(len(shape))) for path, shape, dtype, *_ in avals]
        shardings = [NamedSharding(self.jax_mesh, PartitionSpec())] * len(places)
        return tree.unflatten(
            make_global([x for _, x in paths], places, shardings, self.jax_mesh, f"init for {self.name}")
        )

    def put(self, *args: Any, local: bool = False) -> Any:
        """Places the positional arguments with the plan's shardings; a single one is returned by itself. NNX modules
        are replaced by new ones, which share the variables that the given ones share.

        Args:
          local: where several processes share the mesh, what is in a process's own memory is not the whole argument
            but this process's rows of it: those that `local_rows` names, with every other dimension whole. Rows are
            of dimension 0, or of the first that is split between processes: of positions [3, batch, seq] they may be
            those of dimension 1. Scalars are the same in every process. All processes of the mesh must call `put`.

        Raises:
          ArgumentError: they differ from the plan's in structure or shape; names the first that does. Or, in every
            process, what two processes bring of one argument is not the same.
        """
        self.mesh.require_available(f"put for {self.name}")
        avals = self.in_avals
        if len(args) > len(avals):
            raise ArgumentError(f"put: {self.name} takes {plural(len(avals), 'argument')}, {len(args)} were given")
        parts = nnx.split(args)
        given, tree = jax.tree.flatten(parts.states)
        several = spans_processes(self.jax_mesh)
        end = 0
        for arg, want in zip(parts.states, avals, strict=False):
            start, end = end, end + jax.tree.structure(want).num_leaves
            shapes = not (local and several)
            misfit = self._misfit(self.inputs[start:end], want, arg, "it was given", shapes=shapes, dtypes=False)
            if misfit:
                raise ArgumentError(f"put: {misfit}")
        shardings = self.flat_in_shardings[: len(given)]
        if several:
            given = make_global(given, self.inputs[: len(given)], shardings, self.jax_mesh, self.name, local=local)
        arrays = jax.device_put(self.stored(given), shardings)
        shapes = [p.shape for p in self.inputs[: len(given)]]
        placed = jax.tree.unflatten(tree, jx.with_true_shapes(arrays, shapes))
        placed = nnx.merge(parts, placed, {})[0] if parts.module_args else placed
        return placed[0] if len(args) == 1 else placed

    def local_rows(self, path: str, dim: int = 0) -> np.ndarray:
        """Which rows (indices of dimension ``dim``) of the argument ``path`` the devices of this process hold, in
        order: int64 [rows]. On a mesh of one process, all.

        Of data that every process can read, ``data[plan.local_rows("x")]`` is what it brings to `put` with
        ``local=True``; each array of a batch has its own rows, of as many as it has.

        Raises:
          SpecError: no argument has this path, or it is a scalar, which has no rows, or has no such dimension.
          MeshError: this process lacks the mesh's devices.
        """
        self.mesh.require_available(f"local_rows for {self.name}")
        paths = [p.path for p in self.inputs]
        if path not in paths:
            raise SpecError(f"no argument of {self.name} is called {path!r}{nearest(path, paths)}")
        place = self.inputs[paths.index(path)]
        if not place.shape:
            raise SpecError(f"{path} of {self.name} is a scalar, which has no rows: every process brings it")
        if not 0 <= dim < len(place.shape):
            raise SpecError(f"{path} of {self.name} is {list(place.shape)}, and has no dimension {dim}")
        rows = local_rows(self.flat_in_shardings[paths.index(path)], place.stored_shape, dim)
        return rows[rows < place.shape[dim]]

    def _misfit(
        self,
        places: Sequence[Place],
        want: Any,
        got: Any,
        verb: str,
        *,
        shapes: bool = True,
        dtypes: bool = True,
    ) -> str:
        """Where ``got`` is not the argument ``want``, whose arrays are ``places``; the empty string if it is."""
        (wanted, want_tree), (given, tree) = map(jax.tree_util.tree_flatten_with_path, (want, got))
        for place, (path, _), (at, leaf) in zip(places, wanted, given, strict=False):
            name, shape = jax.tree_util.keystr(at), jax.numpy.shape(leaf)
            if jax.tree_util.keystr(path) != name:
                return (
                    f"{self.name} takes {place.path}, {verb} {name or 'one array'} in its place: the structures differ"
                )
            if (shapes and place.shape != shape) or (dtypes and place.dtype != dtype_name(leaf.dtype)):
                dtype = dtype_name(leaf.dtype) if dtypes else ""
                return f"{place.path} of {self.name} is {place.dtype}{list(place.shape)}, {verb} {dtype}{list(shape)}"
        if len(given) != len(places):
            return f"{self.name} takes {plural(len(places), 'array')}, {verb} {len(given)}: the structures differ"
        found = difference(tree, want_tree)
        return f"{self.name} takes another structure: {verb} one in which {found}" if found else ""

    def explain(self) -> str:
        """A report in plain text: what is split, what it is predicted to cost, and why other layouts lost."""
        return render.explain(self)

    def show(self, path: str | os.PathLike[str] | None = None, compiled: jax.stages.Compiled | None = None) -> Path:
        """Writes one HTML page that needs nothing else, to ``path`` or a new file, and opens it where there is a
        screen: arrays on the devices, memory and time over the step, the layouts that lost, your lines with what they
        cost, all values. With ``compiled``, which is ``step.lower(...).compile()``, also its time, memory and
        collectives beside the planned ones. Returns the path."""
        return open_page(page(self, compiled), path, self.name)

    def plot(self, picture: str = "memory", path: str | os.PathLike[str] | None = None) -> Picture:
        """A picture of the plan: ``"arrays"``, ``"layouts"``, ``"memory"`` or ``"timeline"``, and of a pipeline
        ``"schedule"``. Printed it is text, in a notebook it is drawn. A ``path`` ending in ``.svg`` is written as its
        ``.svg``, one in ``.png`` as an image, two pixels to each unit, that matplotlib draws
        (``pip install 'autoshard[plots]'``).

        Raises:
          ArgumentError: there is no such picture, ``path`` ends in neither, or matplotlib is not installed.
          PlanError: the plan holds no profile of the step, or is of no pipeline, and the picture is drawn from that.
        """
        drawn = draw(self, picture)
        if path is not None:
            epath.Path(path).write_bytes(as_file(drawn, epath.Path(path).suffix))
        return drawn

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the predicted step as trace events (JSON), which ui.perfetto.dev and Chrome's tracing open: compute,
        collectives by mesh axis, and bytes per device.

        Raises:
          PlanError: the plan holds no profile of the step.
        """
        epath.Path(path).write_text(json.dumps(trace_events(self, profile_of(self))))

    def diff(self, other: Plan) -> Comparison:
        """What changes from this plan to ``other`` of the same step: specs, and the cost by source line. Of another
        step, such as evaluation beside training: which arguments that both take have other specs, and so move. It is
        text; its ``show(path=None)`` draws both.

        Raises:
          PlanError: they are of different steps that share no argument.
        """
        return Comparison(self, other)

    def what_if(self, pins: Mapping[str, PartitionSpec]) -> Plan:
        """The plan that would be made with further pins, by argument path or glob; `diff` compares the two.

        Raises:
          PlanError: this plan was loaded, so it has no step.
          ConfigError, SpecError: a pin that matches no argument, or does not fit it.
          MemoryBudgetError: no layout with these pins fits.
        """
        return Plan.of(*self._study("what_if").what_if(pins))

    def why(self, path: str) -> str:
        """Why the argument ``path`` has its spec: its dimension classes, and what every other spec would cost.

        Raises:
          PlanError: this plan was loaded, so it has no step.
          SpecError: no argument has this path.
        """
        return render.as_text(self._study("why").why(self, path))

    def _study(self, asked: str) -> Study:
        if self.study is None:
            raise PlanError(f"{asked}: a loaded plan has no step; ask the plan that the step itself makes")
        return self.study

    def _repr_html_(self) -> str:
        return short_page(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled plan is its JSON: no step, no device."""
        return type(self).from_json, (self.to_json(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As `save` and `load`, with the classes of the containers."""
        del memo  # nothing mutable is in it
        trees = {"in_tree": self.in_tree, "out_tree": self.out_tree}
        return dataclasses.replace(type(self).from_json(self.to_json()), **trees)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values. The inverse of `Plan.from_json`."""
        return serialize.plan_to_json(self)

    @classmethod
    def from_json(cls, stored: Any) -> Self:
        """Reads what `to_json` wrote, strictly.

        Raises:
          PlanError: not a plan, another version, a field that is missing, unknown or of the wrong type, or a spec that
            does not fit its value or the mesh.
        """
        return cls.of(serialize.plan_from_json(stored))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON; missing parent folders are created."""
        file = epath.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.json_text())

    def json_text(self) -> str:
        """What `save` writes; made once."""
        return self._json_text

    @functools.cached_property
    def _json_text(self) -> str:
        return json.dumps(self.to_json(), indent=1)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a plan that `save` wrote. It is data: nothing in it is executed.

        It equals the plan that was saved. In its pytrees, tuples, lists, dicts, ordered dicts and None are as before. A
        node of any other class (a named tuple, a dataclass, an NNX state) is an `autoshard.plan.treedef.UnknownNode`,
        since classes are not stored: ``in_specs[0]["opt"][0].mu`` works and leaves have the same paths, but
        `jax.tree.map` over such specs and the state itself finds two classes.
        ``autoshard.jit(step, strategy=plan).plan(state, batch)`` is the same plan with the classes of its arguments.

        Raises:
          PlanError: no such file, or it is not a plan.
        """
        try:
            stored = parse_json(read_text(path, MAX_PLAN_BYTES), non_finite=True)
        except FileNotFoundError:
            raise PlanError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise PlanError(f"{path}: a directory; a plan is a JSON file") from None
        except OSError as e:
            raise PlanError(f"{path}: it cannot be read: {e.strerror}") from None
        except ValueError as e:
            raise PlanError(f"{path}: {e}") from None
        try:
            return cls.from_json(stored)
        except PlanError as e:
            raise PlanError(f"{path}: {e}") from None
