"""A phase of a run, planned: the part on one mesh."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax

from autoshard.api import jit
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import Step
from autoshard.train.config import TrainConfig
from autoshard.train.config_parts import Phase
from autoshard.train.models.decoder import Tree
from autoshard.train.non_finite import checked
from autoshard.train.processes.placing import SizedPlacer
from autoshard.train.work import Work, work_of


@dataclass(frozen=True)
class PlannedPhase:
    """The planned step and eval function of a phase, and the abstract values of their arguments."""

    work: Work
    phase: Phase
    step: Step
    evaluate: Step | None
    """Of what ``work.steps.evaluated`` gives, and a batch; None where nothing is evaluated."""
    plan: Plan
    state: Tree
    """`jax.ShapeDtypeStruct`s."""
    batch: Tree
    """`jax.ShapeDtypeStruct`s."""

    padded: bool = False
    """Whether there are batches of several sizes, of which ``batch`` is one."""

    def placer(self) -> SizedPlacer:
        """Puts training batches on the mesh."""
        return SizedPlacer(
            self.plan, (lambda batch: self.step.plan(self.plan.in_avals[0], batch)) if self.padded else None
        )

    @functools.cached_property
    def place_held_out(self) -> SizedPlacer:
        """Puts held-out batches on the mesh."""
        evaluate, part = self.evaluate, self.work.steps.evaluated(self.plan.in_avals[0])
        assert evaluate is not None
        return SizedPlacer(self.plan, (lambda batch: evaluate.plan(part, batch)) if self.padded else None)


def plan_phase(config: TrainConfig, phase: Phase, work: Work | None = None) -> PlannedPhase:
    """Plans one phase; needs no devices, and creates no array, but of a batch of data of one's own."""
    work = work or work_of(config)
    steps, batch = work.steps, work.batches.like
    step = jit(
        steps.train if config.nan is None else checked(steps.train, keeps=config.nan == "skip"),
        mesh=phase.mesh,
        strategy=config.strategy,
        microbatches=config.microbatches_on(phase.mesh),
        refine=config.refine,
        recompute=config.recompute,
        passes=config.passes,
        donate_argnums=0,
    )
    state = jax.eval_shape(steps.init, jax.eval_shape(lambda: jax.random.key(0)))
    plan = step.plan(state, batch)
    evaluate = None
    if work.is_evaluated:
        state_and_batch = (steps.evaluated(plan.in_specs[0]), plan.in_specs[1])
        evaluate = jit(steps.evaluate, mesh=phase.mesh, strategy=config.strategy, in_shardings=state_and_batch)
    return PlannedPhase(work, phase, step, evaluate, plan, state, batch, padded=config.pad is not None)
