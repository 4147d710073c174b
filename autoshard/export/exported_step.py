"""A step that was exported, as a function."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from autoshard.errors import ArgumentError
from autoshard.export.artifact import Artifact, read_artifact
from autoshard.jaxpr.arguments import argument_aval
from autoshard.plan.record import PlanRecord
from autoshard.plan.treedef import leaf_paths


class ExportedStep:
    """A step that was exported: takes and returns what it did, on as many devices as it was planned for.

    Containers of classes that are not stored (named tuples, dataclasses, states of modules) are taken by the paths of
    their leaves, and come back as stand-ins whose leaves have the same paths, as those of a loaded `Plan`.

    Example:
      >>> content = autoshard.jit(lambda x: x * 2, mesh={"data": 8}, strategy="dp").export(jnp.ones(16))
      >>> served = autoshard.load_exported(content)
      >>> served.plan.in_specs, float(served(jnp.ones(16)).sum())
      ((P('data',),), 32.0)
      >>> served.name, served.exported.nr_devices
      ('<lambda>', 8)
    """

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact
        self._paths = [jax.tree_util.keystr(path) for path in leaf_paths(artifact.in_tree)]

    def __repr__(self) -> str:
        return f"<ExportedStep of {self.name}, on {self.plan.mesh}>"

    @property
    def name(self) -> str:
        """Of the function that was exported."""
        return self._artifact.name

    @property
    def plan(self) -> PlanRecord:
        """The plan that it was exported with: specs, cost, memory."""
        return self._artifact.plan

    @property
    def exported(self) -> jax.export.Exported:
        """What `jax.export` has of it."""
        return self._artifact.exported

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step: the results of the one that was exported. Donated arguments are gone.

        Raises:
          ArgumentError: other arguments than it was exported for; names the first.
          MeshError: there are too few devices, or others.
        """
        self.plan.mesh.require_available(self.name)
        found = jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
        paths = [jax.tree_util.keystr(path) for path, _ in found]
        if paths != self._paths:
            other = next((p for p in paths if p not in self._paths), None)
            lacking = next((p for p in self._paths if p not in paths), None)
            what = f"{other} is new" if other else f"{lacking} is missing" if lacking else "they are in another order"
            raise ArgumentError(
                f"{self.name} was exported for {len(self._paths)} arrays and is given {len(paths)}: of (args, kwargs) "
                f"{what}"
            )
        leaves = [leaf for _, leaf in found]
        for path, leaf, aval in zip(paths, leaves, self.exported.in_avals, strict=True):
            try:
                shape, dtype = argument_aval(leaf)[:2]
            except TypeError:
                raise ArgumentError(f"{self.name}: {path} of (args, kwargs) is a {type(leaf).__name__}") from None
            if dtype != aval.dtype or not _fits(shape, aval.shape):
                raise ArgumentError(
                    f"{self.name}: {path} of (args, kwargs) is {dtype}{list(shape)}, and {aval.dtype}"
                    f"{list(aval.shape)} was exported"
                )
        call, shardings = self._call
        try:
            results = call(*jax.device_put(leaves, shardings))
        except ValueError as error:
            if not any(jax.export.is_symbolic_dim(d) for aval in self.exported.in_avals for d in aval.shape):
                raise
            raise ArgumentError(f"{self.name}: {error}") from None
        return self._artifact.out_tree.unflatten(results)

    @functools.cached_property
    def _call(self) -> tuple[Any, list[Any]]:
        """The compiled function of flat arguments, and their shardings."""
        exported, mesh = self.exported, self.plan.jax_mesh
        replicated = jax.sharding.NamedSharding(mesh, PartitionSpec())
        given, made = (
            [s or replicated for s in of(mesh)] for of in (exported.in_shardings_jax, exported.out_shardings_jax)
        )

        def flat(*leaves: Any) -> Any:
            args, kwargs = exported.in_tree.unflatten(leaves)
            return jax.tree.leaves(exported.call(*args, **kwargs))

        flat.__name__ = self.name
        options = dict(self.plan.compiler_options) or None
        jitted = jax.jit(
            flat,
            in_shardings=given,
            out_shardings=made,
            donate_argnums=self._artifact.donated,
            compiler_options=options,
        )
        return jitted, given


def _fits(shape: Sequence[int], exported: Sequence[Any]) -> bool:
    """Whether ``shape`` is one that was exported; what symbols stand for is left to JAX."""
    return len(shape) == len(exported) and all(
        jax.export.is_symbolic_dim(b) or a == b for a, b in zip(shape, exported, strict=True)
    )


def load_exported(content: bytes) -> ExportedStep:
    """The step that `Step.export` wrote, as a function.

    Raises:
      ExportError: ``content`` is no exported step, a damaged one, or one that this version of JAX does not read.

    Example:
      >>> step = autoshard.jit(lambda x: x * 2, mesh={"data": 8}, strategy="dp")
      >>> float(autoshard.load_exported(step.export(jnp.ones(16)))(jnp.ones(16)).sum())
      32.0
      >>> autoshard.load_exported(b"something else")
      Traceback (most recent call last):
          ...
      autoshard.errors.ExportError: ...
    """
    return ExportedStep(read_artifact(bytes(content)))
