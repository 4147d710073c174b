"""checkpoint: a state saved on one mesh and restored on another.

In come a pytree of arrays and a directory; at restore, a plan or an example of the state. Out comes the state with every
array placed as the plan has it. A step's directory is whole or it is not there; nothing that is read is executed.

May import: runtime.nnx, errors, and what `runtime.nnx` may.
"""

from autoshard.checkpoint.save_restore import Restored as Restored
from autoshard.checkpoint.save_restore import Saving as Saving
from autoshard.checkpoint.save_restore import finish as finish
from autoshard.checkpoint.save_restore import latest as latest
from autoshard.checkpoint.save_restore import restore as restore
from autoshard.checkpoint.save_restore import save as save
from autoshard.checkpoint.save_restore import steps as steps
