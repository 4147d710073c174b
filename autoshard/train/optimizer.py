"""The optimizer that a training configuration describes, from Optax."""

from __future__ import annotations

from typing import Any, Literal

import jax
import optax
from pydantic import Field

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
    """Step at which the cosine decay ends, warm-up included; the last step of the run if absent."""
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
