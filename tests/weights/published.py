"""Folders as others publish models: names and shapes of tensors written down by hand, with random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

V, D, H, K, E, F, L, X = 24, 16, 4, 2, 8, 32, 3, 2

Shapes = dict[str, tuple[int, ...]]

_COMMON = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H,
           "num_key_value_heads": K, "head_dim": E, "intermediate_size": F, "rms_norm_eps": 1e-6,
           "rope_theta": 10000.0}  # fmt: skip


def _attention(layer: str) -> Shapes:
    return {
        f"{layer}.input_layernorm.weight": (D,),
        f"{layer}.self_attn.q_proj.weight": (H * E, D),
        f"{layer}.self_attn.k_proj.weight": (K * E, D),
        f"{layer}.self_attn.v_proj.weight": (K * E, D),
        f"{layer}.self_attn.o_proj.weight": (D, H * E),
        f"{layer}.post_attention_layernorm.weight": (D,),
    }


def _gated(mlp: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Shapes:
    gate, up, down = (f"{mlp}.{name}.weight" for name in names)
    return {gate: (F, D), up: (F, D), down: (D, F)}


def _decoder(kind: str) -> Shapes:
    found: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for n in range(L):
        layer = f"model.layers.{n}"
        found |= _attention(layer)
        if kind == "mixtral":
            found[f"{layer}.block_sparse_moe.gate.weight"] = (X, D)
            for x in range(X):
                found |= _gated(f"{layer}.block_sparse_moe.experts.{x}", ("w1", "w3", "w2"))
        else:
            found |= _gated(f"{layer}.mlp")
        if kind == "qwen3":
            found |= {f"{layer}.self_attn.{name}_norm.weight": (E,) for name in "qk"}
    return found if kind == "gemma" else found | {"lm_head.weight": (V, D)}


def _gpt2() -> Shapes:
    found: Shapes = {"wte.weight": (V, D), "wpe.weight": (12, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for n in range(L):
        for name, shape in (
            ("ln_1", (D,)), ("attn.c_attn", (D, 3 * D)), ("attn.c_proj", (D, D)),
            ("ln_2", (D,)), ("mlp.c_fc", (D, 4 * D)), ("mlp.c_proj", (4 * D, D)),
        ):  # fmt: skip
            found |= {f"h.{n}.{name}.weight": shape, f"h.{n}.{name}.bias": shape[-1:]}
    return {f"transformer.{name}": shape for name, shape in found.items()}


CONFIGS: Mapping[str, dict[str, Any]] = {
    "gemma": _COMMON | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gpt2": {"vocab_size": V, "n_positions": 12, "n_embd": D, "n_head": H, "n_layer": L, "layer_norm_epsilon": 1e-5},
    "llama": _COMMON | {"hidden_act": "silu"},
    "mixtral": _COMMON | {"num_local_experts": X, "num_experts_per_tok": 2},
    "qwen3": _COMMON | {"use_sliding_window": False},
}


def tensors_of(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a model."""
    rng = np.random.default_rng(seed)
    shapes = _gpt2() if kind == "gpt2" else _decoder(kind)
    return {name: (0.2 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def publish(folder: Path, kind: str, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A folder with a model's files."""
    folder.mkdir(parents=True)
    save_file(dict(tensors_of(kind) if tensors is None else tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **config}))
    return folder
