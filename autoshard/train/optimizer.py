"""The optimizer that a training configuration describes, from Optax."""

from __future__ import annotations

from typing import Any, Literal

import jax
import numpy as np
import optax
from pydantic import Field

from autoshard.errors import ConfigError
from autoshard.strict_config import Config

MAX_STEPS = 2**31 - 1
"""Of a run; steps are counted in 32 bits."""


class OptimizerConfig(Config):
    """AdamW with linear warm-up, cosine decay and gradient clipping by global norm."""

    learning_rate: float = Field(default=1e-3, gt=0)
    """The largest, after the warm-up."""
    warmup: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps in which the learning rate rises from zero to ``learning_rate``."""
    decay_steps: int | None = Field(default=None, ge=1, le=MAX_STEPS)
    """Step at which the cosine decay ends, warm-up included; if absent, the last step that the run has when it begins,
    which more steps do not move."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of ``learning_rate``."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of their squares."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Share of a parameter that is taken off, times the learning rate, in a step."""
    clip: float = Field(default=1.0, gt=0)
    """Global norm to which gradients are cut."""
    mu_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the running mean of gradients; that of the parameters if absent, as the mean of their squares always is."""


def schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step for a run of ``steps`` steps."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup,
        decay_steps=max(config.decay_steps or steps, config.warmup + 1),
        end_value=config.learning_rate * config.final,
    )


def resumed(optimizer: OptimizerConfig, begun: object) -> OptimizerConfig:
    """``optimizer`` for a run whose learning rate decays until step ``begun``: more steps do not change what was.

    Raises:
      ConfigError: it asks for another decay.
    """
    asked = optimizer.decay_steps
    if type(begun) is not int or begun < 1 or asked == begun:
        return optimizer
    if asked is not None:
        raise ConfigError(
            f"decay_steps is {asked}, and the run was begun with {begun}, which is the last step that it had then "
            "where it gave no decay_steps; a run keeps that. Leave decay_steps out, choose another checkpoint.dir, or "
            "start over with --fresh"
        )
    return optimizer.model_copy(update={"decay_steps": begun})


def decay_note(optimizer: OptimizerConfig, last: int) -> str | None:
    """What the learning rate of a `resumed` run is at its last steps, in a line; None where it decays until the last
    one.
    """
    decay = optimizer.decay_steps
    if decay is None or decay == last:
        return None
    rate = float(np.asarray(schedule(optimizer, last)(last)))
    note = f"the learning rate decays until step {decay}, as it did when the run began"
    if decay > last:
        return f"{note}: at step {last}, the last one, it is {rate:.3g}"
    return (
        f"{note}: the steps after it, until step {last}, are taken at {rate:.3g}, which is {optimizer.final:g} "
        "(`final`) of the largest. A resumed run keeps that; one that is to decay over more steps begins with "
        f"`optimizer: {{decay_steps: {last}}}`, in another checkpoint.dir or with --fresh"
    )


def _decay_mask(params: Any) -> Any:
    """The parameters to which weight decay applies: all but the norms' scales."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1:] != (jax.tree_util.DictKey("scale"),), params)


def make_optimizer(optimizer: OptimizerConfig, steps: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer for a run of ``steps`` steps, and its learning rate by step."""
    rate = schedule(optimizer, steps)
    adamw = optax.adamw(
        rate,
        b1=optimizer.b1,
        b2=optimizer.b2,
        mu_dtype=optimizer.mu_dtype,
        weight_decay=optimizer.weight_decay,
        mask=_decay_mask,
    )
    return optax.chain(optax.clip_by_global_norm(optimizer.clip), adamw), rate
