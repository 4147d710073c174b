"""autoshard: automatic sharding for JAX."""

from autoshard import checkpoint as checkpoint
from autoshard import errors as errors
from autoshard.api import jit as jit
from autoshard.api import register_rule as register_rule
from autoshard.api import unregister_rule as unregister_rule
from autoshard.backend.audit import audit as audit
from autoshard.ir.annotate import annotate as annotate
from autoshard.ir.rule import Local as Local
from autoshard.ir.rule import Rule as Rule
from autoshard.machine.mesh_config import MeshConfig as MeshConfig
from autoshard.runtime.plan import Plan as Plan
from autoshard.runtime.step import Step as Step
from autoshard.runtime.verify import Verification as Verification
from autoshard.runtime.verify import verify as verify

__version__ = "0.1.0"
