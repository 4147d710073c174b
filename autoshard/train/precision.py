"""Precision as a choice: the dtypes of parameters, of what is computed, of a master copy, and the scale of the loss.

After "Mixed Precision Training" (Micikevicius et al., 2018): parameters may be stored in fewer bits than the copy that
the optimizer updates, and where gradients are float16 the loss is multiplied by a scale that follows what these hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import optax
from pydantic import model_validator

from autoshard.errors import ArgumentError
from autoshard.strict_config import Config
from autoshard.train.sources import Tree

Float = Literal["float32", "bfloat16", "float16"]
FIRST_SCALE, MOST_SCALE = 2.0**15, 2.0**24
"""Where a dynamic scale begins, and what it is at most; it is one at least."""
GROWS_AFTER = 2000
"""Steps whose gradients were finite, after which a dynamic scale doubles; after one that is not it halves."""


@dataclass(frozen=True)
class Precision:
    """Mixed precision around a loss and an optimizer, as a state of arrays: sharded, saved and restored as any other.

    Args:
      params: of the parameters in the state; None: as they come.
      compute: to which the parameters are cast where they are used; by default that of ``params``.
      master: of a copy that the optimizer updates, and from which the parameters are rounded; None: there is none, and
        the optimizer updates the parameters.
      loss_scale: the number by which the loss is multiplied, and the gradients divided; or ``"dynamic"``: it halves,
        and the step changes nothing else, where a gradient is not finite.

    Raises:
      ArgumentError: another dtype or scale, or a master of fewer bits than the parameters.

    Example:
      >>> import optax
      >>> precision, optimizer = autoshard.train.Precision(params="bfloat16", master="float32"), optax.sgd(2.0**-12)
      >>> state = precision.init({"w": jnp.ones(2)}, optimizer)
      >>> loss, gradients = precision.value_and_grad(lambda params, x: (params["w"] * x).sum())(state, 1.0)
      >>> state, metrics = precision.update(optimizer, state, gradients)
      >>> print(state["params"]["w"], state["master"]["w"])
      [1 1] [0.99975586 0.99975586]
      >>> precision.cast({"mask": jnp.ones(2)})["mask"].dtype
      dtype(bfloat16)
    """

    params: Float | None = "float32"
    compute: Float | None = None
    master: Float | None = None
    loss_scale: float | Literal["dynamic"] | None = None

    def __post_init__(self) -> None:
        for name in ("params", "compute", "master"):
            dtype = getattr(self, name)
            if dtype not in ("float32", "bfloat16", "float16", None):
                raise ArgumentError(f"{name}={dtype!r}: must be float32, bfloat16 or float16")
        if self.master is not None and self.master not in ("float32", self.params):
            raise ArgumentError(f"master={self.master!r}: a master copy has all bits of the parameters: use float32")
        scale = self.loss_scale
        if isinstance(scale, bool) or not (scale is None or scale == "dynamic" or _is_scale(scale)):
            raise ArgumentError(f"loss_scale={scale!r}: must be a number above 0, or 'dynamic'")

    def cast(self, tree: Tree) -> Tree:
        """``tree`` with its floats as they are computed with: for what a loss takes beside the parameters."""
        return _cast(tree, self.compute or self.params)

    def init(self, params: Tree, optimizer: optax.GradientTransformation) -> dict[str, Any]:
        """The state: ``params``, ``opt_state``, and, where they are asked for, ``master`` and ``loss_scale``."""
        updated = _cast(params, self.master or self.params)
        state: dict[str, Any] = {"params": _cast(params, self.params), "opt_state": optimizer.init(updated)}
        if self.master is not None:
            state["master"] = updated
        if self.loss_scale == "dynamic":
            state["loss_scale"] = {"scale": jnp.float32(FIRST_SCALE), "good_steps": jnp.zeros((), jnp.int32)}
        return state

    def value_and_grad(self, loss_of: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Tree]]:
        """``loss_of(params, *args)`` and its gradients, as `jax.value_and_grad` gives them, of the state in place of
        the parameters: ``f(state, *args)``. Gradients are of the dtype that the optimizer updates, no longer scaled.

        With ``f(state, *args, overwritten=tree)``, which ``loss_of`` gets by that name, it gives gradients and the next
        ``tree``: the scales and histories of float8 products, which Flax gives as their gradients.
        """

        def run(state: Tree, *args: Any, overwritten: Tree | None = None) -> tuple[Any, Tree]:
            scale = self._scale(state)

            def scaled(params: Tree, overwritten: Tree | None) -> tuple[jax.Array, Any]:
                named = {} if overwritten is None else {"overwritten": overwritten}
                found = loss_of(self.cast(params), *args, **named)
                loss, aux = found if has_aux else (found, None)
                loss = loss.astype(jnp.float32)
                return (loss if scale is None else loss * scale), (loss, aux)

            differentiated = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)
            (_, (loss, aux)), (gradients, after) = differentiated(state["params"], overwritten)
            dtype = self.master or self.params
            if scale is None:
                gradients = _cast(gradients, dtype)
            else:  # in float32: the scale may be more than float16 holds
                gradients = jax.tree.map(lambda g: (g.astype(jnp.float32) / scale).astype(dtype or g.dtype), gradients)
            return ((loss, aux) if has_aux else loss), (gradients if overwritten is None else (gradients, after))

        return run

    def update(
        self, optimizer: optax.GradientTransformation, state: Tree, gradients: Tree
    ) -> tuple[Tree, dict[str, jax.Array]]:
        """The next state, and with a dynamic scale the metrics ``loss_scale`` [] and ``skipped`` [], 1 where a gradient
        was not finite and the state stays.
        """
        old = state.get("master", state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], old)
        new = optax.apply_updates(old, updates)
        changed: dict[str, Any] = {"params": _cast(new, self.params), "opt_state": opt_state}
        if self.master is not None:
            changed["master"] = new
        if self.loss_scale != "dynamic":
            return {**state, **changed}, {}
        good = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)]))
        kept = jax.tree.map(lambda n, o: jnp.where(good, n, o), changed, {name: state[name] for name in changed})
        scale, steps = state["loss_scale"]["scale"], state["loss_scale"]["good_steps"] + 1
        grown = jnp.where(steps >= GROWS_AFTER, jnp.minimum(scale * 2, MOST_SCALE), scale)
        after = {
            "scale": jnp.where(good, grown, jnp.maximum(scale / 2, 1)),
            "good_steps": jnp.where(good & (steps < GROWS_AFTER), steps, 0),
        }
        metrics = {"loss_scale": scale, "skipped": 1 - good.astype(jnp.int32)}
        return {**state, **kept, "loss_scale": after}, metrics

    def _scale(self, state: Tree) -> jax.Array | None:
        if self.loss_scale == "dynamic":
            return state["loss_scale"]["scale"]
        return None if self.loss_scale is None else jnp.float32(self.loss_scale)


def _is_scale(x: Any) -> bool:
    return isinstance(x, int | float) and 0 < x < float("inf")


def _cast(tree: Tree, dtype: str | None) -> Tree:
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


class PrecisionConfig(Config):
    """The dtypes of a model's parameters and of what it computes; see `autoshard.train.Precision`."""

    params: Float = "float32"
    """Of the parameters in the state."""
    compute: Float | None = None
    """To which parameters and inputs are cast where they are used; that of ``params`` if absent."""
    master: Float | None = None
    """Of a copy of the parameters that the optimizer updates."""
    loss_scale: Literal["dynamic"] | float | None = None
    """By which the loss is multiplied while gradients are computed; ``dynamic`` follows what they can hold."""

    @property
    def precision(self) -> Precision:
        """What a step is made with."""
        return Precision(self.params, self.compute, self.master, self.loss_scale)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        try:
            _ = self.precision
        except ArgumentError as error:
            raise ValueError(str(error)) from None
        return self
