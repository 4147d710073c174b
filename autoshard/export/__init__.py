"""export: a planned step as bytes that run elsewhere, with its shardings and its plan, and back.

Input: a lowered step and its plan; at loading, bytes. Output: one artifact, which JAX alone can read too; at loading, a
function that places its arguments and runs the step. Nothing that is read is executed but by XLA.

May import: plan.
"""

from autoshard.export.artifact import export_step as export_step
from autoshard.export.exported_step import ExportedStep as ExportedStep
from autoshard.export.exported_step import load_exported as load_exported
