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


def _deepseek_v3() -> Shapes:
    """One layer of an MLP, two of experts."""
    rank, key_rank, nope, rope, value, inner = 6, 8, 8, 4, 6, 4
    found: Shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for n in range(L):
        layer = f"model.layers.{n}"
        found |= {name: shape for name, shape in _attention(layer).items() if "self_attn" not in name}
        found |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in {
            "q_a_proj": (rank, D), "q_a_layernorm": (rank,), "q_b_proj": (H * (nope + rope), rank),
            "kv_a_proj_with_mqa": (key_rank + rope, D), "kv_a_layernorm": (key_rank,),
            "kv_b_proj": (H * (nope + value), key_rank), "o_proj": (D, H * value),
        }.items()}  # fmt: skip
        if n == 0:
            found |= _gated(f"{layer}.mlp")
            continue
        found |= {f"{layer}.mlp.gate.weight": (X, D), f"{layer}.mlp.gate.e_score_correction_bias": (X,)}
        for part in ("shared_experts", *(f"experts.{x}" for x in range(X))):
            found |= {name: tuple(inner if size == F else size for size in shape)
                      for name, shape in _gated(f"{layer}.mlp.{part}").items()}  # fmt: skip
    return found


def _t5() -> Shapes:
    found: Shapes = {"shared.weight": (V, D)}
    for side, parts in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        found[f"{side}.final_layer_norm.weight"] = (D,)
        found[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (8, H)
        for n in range(L):
            for at, part in enumerate((*parts, "DenseReluDense")):
                layer = f"{side}.block.{n}.layer.{at}"
                found[f"{layer}.layer_norm.weight"] = (D,)
                if part == "DenseReluDense":
                    found |= {f"{layer}.{part}.wi.weight": (F, D), f"{layer}.{part}.wo.weight": (D, F)}
                else:
                    found |= {f"{layer}.{part}.{name}.weight": (H * E, D) for name in "qkv"}
                    found[f"{layer}.{part}.o.weight"] = (D, H * E)
    return found


def _vit() -> Shapes:
    found: Shapes = {
        "vit.embeddings.cls_token": (1, 1, D), "vit.embeddings.position_embeddings": (1, 5, D),
        "vit.embeddings.patch_embeddings.projection.weight": (D, 3, 2, 2),
        "vit.embeddings.patch_embeddings.projection.bias": (D,),
        "vit.layernorm.weight": (D,), "vit.layernorm.bias": (D,), "classifier.weight": (7, D), "classifier.bias": (7,),
    }  # fmt: skip
    for n in range(L):
        for name, shape in {
            "layernorm_before": (D,), "layernorm_after": (D,), "attention.output.dense": (D, D),
            **{f"attention.attention.{part}": (D, D) for part in ("query", "key", "value")},
            "intermediate.dense": (F, D), "output.dense": (D, F),
        }.items():  # fmt: skip
            layer = f"vit.encoder.layer.{n}.{name}"
            found |= {f"{layer}.weight": shape, f"{layer}.bias": shape[:1]}
    return found


def _qwen2_vl() -> Shapes:
    """A tower of blocks of width 8, 2 heads; four patches become one place."""
    tower, patches = 8, 32
    found: Shapes = {
        "model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D),
        "visual.patch_embed.proj.weight": (tower, 3, 2, 2, 2),
        "visual.merger.ln_q.weight": (tower,), "visual.merger.ln_q.bias": (tower,),
        "visual.merger.mlp.0.weight": (patches, patches), "visual.merger.mlp.0.bias": (patches,),
        "visual.merger.mlp.2.weight": (D, patches), "visual.merger.mlp.2.bias": (D,),
    }  # fmt: skip
    for n in range(L):
        layer = f"model.layers.{n}"
        found |= _attention(layer) | _gated(f"{layer}.mlp")
        found |= {
            f"{layer}.self_attn.{part}_proj.bias": (heads * E,) for part, heads in zip("qkv", (H, K, K), strict=True)
        }
    for n in range(2):
        for name, shape in {
            "norm1": (tower,), "norm2": (tower,), "attn.qkv": (3 * tower, tower), "attn.proj": (tower, tower),
            "mlp.fc1": (16, tower), "mlp.fc2": (tower, 16),
        }.items():  # fmt: skip
            found |= {f"visual.blocks.{n}.{name}.weight": shape, f"visual.blocks.{n}.{name}.bias": shape[:1]}
    return found


CONFIGS: Mapping[str, dict[str, Any]] = {
    "deepseek_v3": {
        "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": H,
        "intermediate_size": F, "moe_intermediate_size": 4, "n_routed_experts": X, "q_lora_rank": 6, "kv_lora_rank": 8,
        "v_head_dim": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1,
    },
    "gemma": _COMMON | {"hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gpt2": {"vocab_size": V, "n_positions": 12, "n_embd": D, "n_head": H, "n_layer": L, "layer_norm_epsilon": 1e-5},
    "llama": _COMMON | {"hidden_act": "silu"},
    "mixtral": _COMMON | {"num_local_experts": X, "num_experts_per_tok": 2},
    "qwen2_vl": {
        "vocab_size": V, "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "num_key_value_heads": K,
        "intermediate_size": F, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "image_token_id": V - 1,
        "rope_scaling": {"mrope_section": [2, 1, 1]},
        "vision_config": {
            "hidden_size": D, "embed_dim": 8, "num_heads": 2, "depth": 2, "patch_size": 2, "in_channels": 3,
            "temporal_patch_size": 2, "spatial_merge_size": 2, "mlp_ratio": 2, "hidden_act": "quick_gelu",
        },
    },
    "t5": {
        "vocab_size": V, "d_model": D, "d_kv": E, "d_ff": F, "num_layers": L, "num_decoder_layers": L, "num_heads": H,
        "relative_attention_num_buckets": 8, "feed_forward_proj": "relu", "layer_norm_epsilon": 1e-6,
    },
    "vit": {
        "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": H, "intermediate_size": F, "image_size": 4,
        "patch_size": 2, "num_channels": 3, "layer_norm_eps": 1e-12,
    },
    "qwen3": _COMMON | {"use_sliding_window": False},
}  # fmt: skip


def tensors_of(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors of a model."""
    rng = np.random.default_rng(seed)
    others = {"deepseek_v3": _deepseek_v3, "gpt2": _gpt2, "qwen2_vl": _qwen2_vl, "t5": _t5, "vit": _vit}
    shapes = others[kind]() if kind in others else _decoder(kind)
    return {name: (0.2 * rng.normal(size=shape)).astype(np.float32) for name, shape in shapes.items()}


def publish(folder: Path, kind: str, tensors: Mapping[str, np.ndarray] | None = None, **config: Any) -> Path:
    """A folder with a model's files."""
    folder.mkdir(parents=True)
    save_file(dict(tensors_of(kind) if tensors is None else tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind], **config}))
    return folder
