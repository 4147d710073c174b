"""weights: models that others publish, and their weights, as files of Hugging Face's names and layouts.

Input: a folder with ``config.json`` and safetensors files. Output: the weights as a tree, read straight into shards,
and the settings of the model in `autoshard.weights.models` that computes with them; and both back again. Adapters of
low rank likewise, in the files of PEFT. Names and layouts are data, ``configs/weights/``, a file for each family.
May import: checkpoint, strict_config, strict_files.
"""

from autoshard.weights.adapters import Adapter as Adapter
from autoshard.weights.adapters import adapted as adapted
from autoshard.weights.adapters import read_adapter as read_adapter
from autoshard.weights.adapters import write_adapter as write_adapter
from autoshard.weights.pretrained import Pretrained as Pretrained
from autoshard.weights.pretrained import open_pretrained as open_pretrained
from autoshard.weights.pretrained import write_pretrained as write_pretrained
