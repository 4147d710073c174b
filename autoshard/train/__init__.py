"""train: training runs, from Python with `fit` and from a configuration with ``autoshard train``.

Input: a step of one's own and batches, or a training configuration in YAML. Output: the trained state; a folder with
checkpoints, a log of events, a table of metrics and a report. It uses the library as any program would: a step under
`autoshard.jit`, `autoshard.checkpoint`, and the audit.

May import: api, batches, call_errors, checkpoint, runs, backend, and what they may; weights.models.cache.
"""

from autoshard.batches.padding import Padding as Padding
from autoshard.batches.padding import even_buckets as even_buckets
from autoshard.batches.sizes import BatchSizes as BatchSizes
from autoshard.batches.sizes import batch_sizes as batch_sizes
from autoshard.train.fit import fit as fit
from autoshard.train.loop import train as train
from autoshard.train.precision import Precision as Precision
from autoshard.train.sources import Rows as Rows
