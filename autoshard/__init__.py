"""autoshard: automatic sharding for JAX."""

from autoshard import checkpoint, errors, train
from autoshard.api import jit, register_rule, unregister_rule
from autoshard.backend.audit import audit
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
    "jit",
    "register_rule",
    "train",
    "unregister_rule",
    "verify",
]
__version__ = "0.1.0"
