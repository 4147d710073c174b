"""Adapters of low rank (LoRA, arXiv:2106.09685) for published models, in the files of Hugging Face's PEFT.

An adapted leaf W is W + scale * (B A). Its adapter is a dict of ``a``, laid out as W's inputs after the rank, and of
``b``, as W's outputs before it; layers are stacked as those of W are.
"""

from __future__ import annotations

import functools
import json
import math
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.checkpoint.safetensors_state import open_safetensors, write_tensors
from autoshard.checkpoint.tensor_files.headers import SINGLE
from autoshard.errors import CheckpointError, ConfigError
from autoshard.strict_files import shortened
from autoshard.weights.family import Family, TensorRow, read_config
from autoshard.weights.pretrained import Pretrained, in_our_layout, tensors_of

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_REQUIRES: Mapping[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "bias": "none",
    "layer_replication": None, "lora_bias": False, "megatron_config": None, "modules_to_save": None,
    "peft_type": "LORA", "rank_pattern": {}, "target_parameters": None, "trainable_token_indices": None,
    "use_bdlora": None, "use_dora": False, "use_qalora": False,
}  # fmt: skip
"""What an adapter's config has to say, where it says anything: other kinds of adapters compute otherwise."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights"], meta_fields=["scale"])
@dataclass(frozen=True)
class Adapter:
    """An adapter; a pytree of its weights.

    Example:
      >>> pair = {"a": jnp.ones((2, 4, 32)), "b": jnp.ones((2, 16, 4))}  # two layers, rank 4
      >>> adapter = autoshard.weights.Adapter({"layers": {"mlp": {"down": pair}}}, scale=0.5)
      >>> adapter
      <Adapter, scale 0.5, 1,536 bytes>
    """

    weights: Any
    """A part of the model's tree, with a dict of ``a`` and ``b`` in the place of each leaf that it adapts."""
    scale: float
    """What the product of ``b`` and ``a`` is multiplied by."""

    def __repr__(self) -> str:
        size = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(self.weights))
        return f"<Adapter, scale {self.scale:g}, {size:,} bytes>"


def read_adapter(dir: str | Path, model: Pretrained, *, like: Any = None) -> Adapter:
    """The adapter in the folder ``dir``, with ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
      model: what it is an adapter of.
      like: a tree as `Adapter.weights`, with shardings to read it to; None reads it to the default device.

    Raises:
      CheckpointError: no such file, a damaged one, or tensors of another model.
      ConfigError: no config, or one of another kind of adapter.

    Example:
      >>> folder, llama = tempfile.mkdtemp(), autoshard.weights.family.family_of({"model_type": "llama"})
      >>> part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
      >>> autoshard.weights.write_pretrained(folder, part, llama, {})
      >>> model = autoshard.weights.open_pretrained(folder)
      >>> pair = {"a": jnp.ones((2, 4, 32)), "b": jnp.ones((2, 16, 4))}  # two layers, rank 4
      >>> adapter = autoshard.weights.Adapter({"layers": {"mlp": {"down": pair}}}, scale=0.5)
      >>> autoshard.weights.write_adapter(folder + "/adapter", adapter, model)
      >>> autoshard.weights.read_adapter(folder + "/adapter", model)
      <Adapter, scale 0.5, 1,536 bytes>
    """
    config = read_config(Path(dir) / CONFIG)
    for key, wanted in _REQUIRES.items():
        if (value := config.get(key)) not in (None, wanted):
            raise ConfigError(f"{key} is {shortened(value)}, and adapters are read with {wanted!r} alone")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1 or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise ConfigError(f"r is {shortened(rank)} and lora_alpha {shortened(alpha)}, and must be a rank and a number")
    tensors, _ = open_safetensors(Path(dir) / TENSORS)
    family = adapter_family(model.family)
    found = Pretrained(family, model.config, in_our_layout(tensors, family, model.config))
    for name, pair in _pairs(found.abstract):
        ranks = pair["a"].shape[len(_row(model.family, name).layout.counted)], pair["b"].shape[-1]
        if set(ranks) != {rank}:
            raise CheckpointError(f"{dir}: {name} has ranks {ranks}, and {CONFIG} says {rank}")
    weights = found.read(like=like)
    return Adapter(weights, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def write_adapter(dir: str | Path, adapter: Adapter, model: Pretrained) -> None:
    """Writes an adapter of ``model`` alone to the folder ``dir``, as PEFT reads it.

    Raises:
      CheckpointError: adapters of different ranks, or of what is no matrix; files that are there already.

    Example:
      >>> folder, llama = tempfile.mkdtemp(), autoshard.weights.family.family_of({"model_type": "llama"})
      >>> part = {"layers": {"mlp": {"down": jnp.ones((2, 32, 16))}}}
      >>> autoshard.weights.write_pretrained(folder, part, llama, {})
      >>> model = autoshard.weights.open_pretrained(folder)
      >>> pair = {"a": jnp.ones((2, 4, 32)), "b": jnp.ones((2, 16, 4))}  # two layers, rank 4
      >>> adapter = autoshard.weights.Adapter({"layers": {"mlp": {"down": pair}}}, scale=0.5)
      >>> autoshard.weights.write_adapter(folder + "/adapter", adapter, model)
      >>> sorted(os.listdir(folder + "/adapter"))
      ['adapter_config.json', 'adapter_model.safetensors']
    """
    family = adapter_family(model.family)
    pairs = dict(_pairs(adapter.weights))
    ranks = {pair["b"].shape[-1] for pair in pairs.values()}
    if len(ranks) != 1:
        raise CheckpointError(f"the adapter has ranks {sorted(ranks)}, and {CONFIG} has one")
    _, tensors = tensors_of(adapter.weights, family, model.config, {})
    rank = ranks.pop()
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": adapter.scale * rank,
        "target_modules": sorted({_module(_row(model.family, name)) for name in pairs}),
        "fan_in_fan_out": model.family.inputs_first,
        "bias": "none",
    }
    size = sum(tensor.nbytes for tensor, _ in tensors.tensors.values())
    write_tensors(dir, tensors, max(size, 1))
    if jax.process_index() == 0:
        (Path(dir) / SINGLE).rename(Path(dir) / TENSORS)
        (Path(dir) / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def adapted(params: Any, family: Family, *adapters: Adapter) -> Any:
    """``params`` of a ``family`` with ``adapters`` merged into them, in float32 each, then in the leaf's dtype.

    ``params`` stay as they are, so that nothing has to be taken out again. Within a step that differentiates for an
    adapter this is training it, with ``params`` frozen.

    Raises:
      CheckpointError: an adapter of a leaf that the tree does not have.

    Example:
      >>> llama = autoshard.weights.family.family_of({"model_type": "llama"})
      >>> pair = {"a": jnp.ones((2, 4, 32)), "b": jnp.ones((2, 16, 4))}  # two layers, rank 4
      >>> adapter = autoshard.weights.Adapter({"layers": {"mlp": {"down": pair}}}, scale=0.5)
      >>> params = {"layers": {"mlp": {"down": jnp.zeros((2, 32, 16))}}}
      >>> float(autoshard.weights.adapted(params, llama, adapter)["layers"]["mlp"]["down"][0, 0, 0])
      2.0
    """
    for adapter in adapters:
        for name, pair in _pairs(adapter.weights):
            params = _with_leaf(params, name.split("/"), name, family, pair, adapter.scale)
    return params


def _with_leaf(tree: Any, keys: list[str], name: str, family: Family, pair: Any, scale: float) -> Any:
    """A copy of nested dicts in which one leaf is adapted."""
    if not isinstance(tree, Mapping) or keys[0] not in tree:
        raise CheckpointError(f"the adapter is for {name}, which is no leaf of the tree")
    value = tree[keys[0]]
    if len(keys) > 1:
        return {**tree, keys[0]: _with_leaf(value, keys[1:], name, family, pair, scale)}
    row = _row(family, name)
    letter, inputs, outputs = _letters(row, family)
    counted, inputs, outputs = "".join(row.layout.counted), "".join(inputs), "".join(outputs)
    product = jnp.einsum(
        f"{counted}{letter}{inputs},{counted}{outputs}{letter}->{''.join(row.layout.leaf)}",
        *(pair[key].astype(jnp.float32) for key in "ab"),
        precision="highest",
    )
    return {**tree, keys[0]: (value.astype(jnp.float32) + scale * product).astype(value.dtype)}


def adapter_family(family: Family) -> Family:
    """The names and layouts of adapters of a family's matrices."""
    leaves: dict[str, tuple[str, str]] = {}
    for row in family.rows:
        product = row.layout.counted or row.leaf == "head"  # an embedding is none, and PEFT has it otherwise
        if len(row.layout.tensor) != 2 or not product or not row.template.endswith(".weight"):
            continue
        letter, inputs, outputs = _letters(row, family)
        stem, counted = row.template.removesuffix(".weight"), " ".join(row.layout.counted)
        grouped_in, grouped_out = f"({' '.join(inputs)})", f"({' '.join(outputs)})"
        leaves[f"{row.leaf}/a"] = (
            f"{stem}.lora_A.weight", f"{letter} {grouped_in} -> {counted} {letter} {' '.join(inputs)}")  # fmt: skip
        leaves[f"{row.leaf}/b"] = (
            f"{stem}.lora_B.weight", f"{grouped_out} {letter} -> {counted} {' '.join(outputs)} {letter}")  # fmt: skip
    prefix = tuple(f"base_model.model.{text}" for text in family.prefix)
    return family.model_copy(update={"leaves": leaves, "prefix": prefix, "drops": ()})


def _letters(row: TensorRow, family: Family) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A letter for the rank, and those of inputs and outputs, in the order of the tensor's dimensions."""
    letter = next(c for c in string.ascii_lowercase if c not in row.layout.leaf)
    first, second = row.layout.tensor
    return (letter, first, second) if family.inputs_first else (letter, second, first)


def _row(family: Family, name: str) -> TensorRow:
    found = next((row for row in family.rows if row.leaf == name), None)
    if found is None or f"{name}/a" not in adapter_family(family).leaves:
        raise CheckpointError(f"the adapter is for {name}, which is no matrix of {family.model_type}")
    return found


def _module(row: TensorRow) -> str:
    """What PEFT finds the module by: its name after the number of its layer."""
    return re.sub(r".*\}\.", "", row.template).removesuffix(".weight")


def _pairs(weights: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves that an adapter is for, each with its ``a`` and ``b``."""
    keys: set[str] = {*weights} if isinstance(weights, Mapping) else set()
    if not keys or (keys & {"a", "b"} and keys != {"a", "b"}):
        raise CheckpointError(f"{name or 'the adapter'} is no dict of a and b, nor one of such dicts")
    if keys == {"a", "b"}:
        yield name, weights
        return
    for key in weights:
        yield from _pairs(weights[key], f"{name}/{key}" if name else key)
