"""autoshard: automatic sharding for JAX."""

from autoshard import checkpoint as checkpoint
from autoshard import errors as errors
from autoshard.annotate import annotate as annotate
from autoshard.api import jit as jit
from autoshard.api import register_rule as register_rule
from autoshard.api import unregister_rule as unregister_rule
from autoshard.auditing import audit as audit
from autoshard.config import MeshConfig as MeshConfig
from autoshard.plan import Plan as Plan
from autoshard.rule import Local as Local
from autoshard.rule import Rule as Rule
from autoshard.step import Step as Step
from autoshard.verify import Verification as Verification
from autoshard.verify import verify as verify

__version__ = "0.1.0"
