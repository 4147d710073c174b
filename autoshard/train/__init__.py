"""train: the training application behind ``autoshard train``.

Input: a training configuration in YAML. Output: a folder with checkpoints, a log of events and a report. It uses the
library as any program would: a step under `autoshard.jit`, `autoshard.checkpoint`, and the audit.

May import: api, checkpoint, backend, and what they may.
"""

from autoshard.train.loop import train as train
