"""checkpoint: saves a state on one mesh and restores it on another.

Input: a pytree of arrays and a directory; at restore, a plan or an example of the state. Output: the state, each array
with the plan's sharding. A step's directory appears complete or not at all; nothing that is read is executed.

Beside its own folders, safetensors files. May import: errors, jaxpr, runtime.nnx, shared_folder, strict_config,
strict_files.
"""

from autoshard.checkpoint.restoring import LeafReport as LeafReport
from autoshard.checkpoint.restoring import RestoreReport as RestoreReport
from autoshard.checkpoint.safetensors_state import from_safetensors as from_safetensors
from autoshard.checkpoint.safetensors_state import to_safetensors as to_safetensors
from autoshard.checkpoint.save_restore import Saving as Saving
from autoshard.checkpoint.save_restore import finish as finish
from autoshard.checkpoint.save_restore import latest as latest
from autoshard.checkpoint.save_restore import restore as restore
from autoshard.checkpoint.save_restore import save as save
from autoshard.checkpoint.save_restore import steps as steps
