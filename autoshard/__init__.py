"""autoshard: automatic sharding for JAX.

    step = autoshard.jit(train_step, mesh={"data": 4, "model": 2}, donate_argnums=0)
    plan = step.plan(state, batch)  # a Plan: explain(), show(), why(), what_if(), diff(), save()
    state = plan.init(make_state, key)
    state, metrics = step(state, batch)

`jit` makes a `Step`, whose `plan` is a `Plan`. `MeshConfig` says which machine it is for, a `Schedule` how the stages
of a pipeline take turns. `annotate` pins a value inside a step. State that the mesh does not divide may come back as a
`PaddedArray`. `register_rule` teaches a `Rule` for a primitive or a kernel of one's own, perhaps with a `Local` form,
and `unregister_rule` takes it back; a `Pass` rewrites a step before it is planned. `audit` compares planned collectives
with those of a compiled step; `verify` the results with one device's, which gives a `Verification`. `Step.export` makes
bytes of a step and `load_exported` an `ExportedStep` of them. `generate` makes a `Generator` of a step that has a
cache. `checkpoint` saves and restores on any mesh, `train` runs a step to its end, `weights` reads and writes published
models, `errors` has what is raised on purpose.
"""

from autoshard import interrupts as interrupts  # isort: split

from autoshard import checkpoint, errors, train, weights
from autoshard.api import jit, register_rule, unregister_rule
from autoshard.backend.audit import audit
from autoshard.decoding.generator import Generator, generate
from autoshard.export.exported_step import ExportedStep, load_exported
from autoshard.ir.annotate import annotate
from autoshard.ir.rule import Local, Rule
from autoshard.jaxpr.padded_array import PaddedArray
from autoshard.machine.mesh_config import MeshConfig
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import Step
from autoshard.runtime.verify import Verification, verify
from autoshard.schedule.schedule import Schedule
from autoshard.transforms.pipeline import Pass

__all__ = [
    "ExportedStep",
    "Generator",
    "Local",
    "MeshConfig",
    "PaddedArray",
    "Pass",
    "Plan",
    "Rule",
    "Schedule",
    "Step",
    "Verification",
    "annotate",
    "audit",
    "checkpoint",
    "errors",
    "generate",
    "jit",
    "load_exported",
    "register_rule",
    "train",
    "unregister_rule",
    "verify",
    "weights",
]
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """The public names, for completion: no package that they come from."""
    return sorted([*__all__, "__version__"])
