"""Our models beside those of `transformers`, with the same weights at small sizes; `make test-interop` installs it."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import weights
from autoshard.weights.models import decoder, encoder_decoder, mla, vision, vision_language

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed; `make test-interop` does it", allow_module_level=True)

import peft
import torch
import transformers

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 4, "num_key_value_heads": 2, **SPECIAL}  # fmt: skip
DECODERS = {
    "gemma": SIZES,
    "gpt2": {"vocab_size": 96, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **SPECIAL},
    "llama": SIZES | {"head_dim": 8},
    "mixtral": SIZES | {"num_local_experts": 4},
    "mixtral, a window": SIZES | {"num_local_experts": 4, "sliding_window": 5},
    "qwen3": SIZES,
}


def random_model(auto, kind: str, **sizes):
    """A model of `transformers` with weights that all count, such as biases and scales that are not 0 and 1."""
    torch.manual_seed(0)
    model = auto.from_config(transformers.AutoConfig.for_model(kind, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def theirs(model, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def close(ours, wanted) -> None:
    np.testing.assert_allclose(np.asarray(ours), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", DECODERS)
def test_logits_of_a_decoder_are_theirs_after_import_and_theirs_are_the_same_after_export(kind, tmp_path):
    auto = transformers.AutoModelForCausalLM
    model = random_model(auto, kind.partition(",")[0], **DECODERS[kind])
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12))
    wanted = theirs(model, tokens)
    model.save_pretrained(tmp_path / "in")
    found = weights.open_pretrained(tmp_path / "in")
    params = found.read()
    settings = decoder.DecoderSettings(**found.settings)
    close(decoder.logits(settings, params, jnp.asarray(tokens)), wanted)
    jax.block_until_ready(params)
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings)
    np.testing.assert_array_equal(theirs(auto.from_pretrained(tmp_path / "out").eval(), tokens), wanted)


@pytest.mark.parametrize(("dense", "groups"), [(1, 1), (2, 2)])
def test_deepseek_v3(dense, groups, tmp_path):
    auto = transformers.AutoModelForCausalLM
    sizes = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4,
        "n_shared_experts": 2, "n_group": groups, "topk_group": 1, "num_experts_per_tok": 2, "kv_lora_rank": 8,
        "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6, "qk_nope_head_dim": 8,
        "first_k_dense_replace": dense, **SPECIAL,
    }  # fmt: skip
    model = random_model(auto, "deepseek_v3", **sizes)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12))
    wanted = theirs(model, tokens)
    model.save_pretrained(tmp_path / "in")
    found = weights.open_pretrained(tmp_path / "in")
    params = found.read()
    close(mla.logits(mla.MLASettings(**found.settings), params, jnp.asarray(tokens)), wanted)
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings)
    np.testing.assert_array_equal(theirs(auto.from_pretrained(tmp_path / "out").eval(), tokens), wanted)


@pytest.mark.parametrize("projection", ["relu", "gated-gelu"])
def test_t5(projection, tmp_path):
    auto = transformers.AutoModelForSeq2SeqLM
    model = random_model(
        auto, "t5", vocab_size=96, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4,
        relative_attention_num_buckets=8, relative_attention_max_distance=12, feed_forward_proj=projection,
        tie_word_embeddings=projection == "relu", decoder_start_token_id=0,
    )  # fmt: skip
    source, target = (np.random.default_rng(n).integers(0, 96, (2, 20)) for n in range(2))

    def logits(model):
        with torch.no_grad():
            return model(input_ids=torch.tensor(source), decoder_input_ids=torch.tensor(target)).logits.numpy()

    wanted = logits(model)
    model.save_pretrained(tmp_path / "in")
    found = weights.open_pretrained(tmp_path / "in")
    params = found.read()
    settings = encoder_decoder.EncoderDecoderSettings(**found.settings)
    close(encoder_decoder.logits(settings, params, jnp.asarray(source), jnp.asarray(target)), wanted)
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings)
    np.testing.assert_array_equal(logits(auto.from_pretrained(tmp_path / "out").eval()), wanted)


def test_vit(tmp_path):
    auto = transformers.AutoModelForImageClassification
    model = random_model(
        auto, "vit", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16,
        patch_size=8, num_labels=5,
    )  # fmt: skip
    images = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    pixels = images.transpose(0, 3, 1, 2).copy()
    wanted = theirs(model, pixels)
    model.save_pretrained(tmp_path / "in")
    found = weights.open_pretrained(tmp_path / "in")
    params = found.read()
    close(vision.logits(vision.VisionSettings(**found.settings), params, jnp.asarray(images)), wanted)
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings, config={"num_labels": 5})
    np.testing.assert_array_equal(theirs(auto.from_pretrained(tmp_path / "out").eval(), pixels), wanted)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ["q_proj", "v_proj", "o_proj", "down_proj"]), ("gpt2", ["c_attn", "attn.c_proj", "c_fc"])],
)
def test_adapters_of_peft_in_and_out_merged_and_not(kind, targets, tmp_path):
    auto = transformers.AutoModelForCausalLM
    base = random_model(auto, kind, **DECODERS[kind])
    base.save_pretrained(tmp_path / "base")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 12))
    plain = theirs(base, tokens)
    found = weights.open_pretrained(tmp_path / "base")
    params, settings = found.read(), decoder.DecoderSettings(**found.settings)
    wanted, adapters = [], []
    for seed in range(2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=3, lora_alpha=6, target_modules=targets, task_type="CAUSAL_LM", fan_in_fan_out=kind == "gpt2",
            use_rslora=seed == 1,
        )  # fmt: skip
        model = peft.get_peft_model(auto.from_pretrained(tmp_path / "base"), config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(tmp_path / f"adapter-{seed}")
        wanted.append(theirs(model, tokens))
        adapters.append(weights.read_adapter(tmp_path / f"adapter-{seed}", found))

    @jax.jit
    def logits(params, *adapters):
        return decoder.logits(settings, weights.adapted(params, found.family, *adapters), jnp.asarray(tokens))

    for seed, adapter in enumerate(adapters):
        assert np.abs(wanted[seed] - plain).max() > 0.01
        close(logits(params, adapter), wanted[seed])
        weights.write_adapter(tmp_path / f"out-{seed}", adapter, found)
        model = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / f"out-{seed}").eval()
        np.testing.assert_allclose(theirs(model, tokens), wanted[seed], rtol=1e-6, atol=1e-6)
    close(logits(params), plain)
    # Both at once, merged: what PEFT makes of them one after another.
    first = peft.PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter-0")
    both = peft.PeftModel.from_pretrained(first.merge_and_unload(), tmp_path / "adapter-1").merge_and_unload().eval()
    merged = weights.adapted(params, found.family, *adapters)
    close(decoder.logits(settings, merged, jnp.asarray(tokens)), theirs(both, tokens))
    weights.write_pretrained(tmp_path / "merged", merged, found.family, found.settings)
    again = auto.from_pretrained(tmp_path / "merged").eval()
    np.testing.assert_allclose(theirs(again, tokens), theirs(both, tokens), rtol=1e-4, atol=1e-4)


def test_qwen2_vl(tmp_path):
    auto = transformers.AutoModelForImageTextToText
    model = random_model(
        auto, "qwen2_vl",
        text_config={
            "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, **SPECIAL,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        },
        vision_config={
            "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
        },
        image_token_id=90, vision_start_token_id=91, vision_end_token_id=92, video_token_id=93,
    )  # fmt: skip
    grid = [(1, 4, 6), (1, 2, 4)]
    tokens = np.array([[5, 91, *[90] * 6, 92, 7, 8, 9], [91, *[90] * 2, 92, *range(20, 28)]])
    rng = np.random.default_rng(0)
    patches = rng.normal(size=(24 + 8, 2, 4, 4, 3)).astype(np.float32)
    pixels = torch.tensor(patches.transpose(0, 4, 1, 2, 3).reshape(32, -1).copy())

    def logits(model):
        types = torch.tensor(tokens == 90).int()
        with torch.no_grad():
            return model(
                input_ids=torch.tensor(tokens), pixel_values=pixels, image_grid_thw=torch.tensor(grid),
                attention_mask=torch.ones(tokens.shape, dtype=torch.int64), mm_token_type_ids=types,
            ).logits.numpy()  # fmt: skip

    wanted = logits(model)
    model.save_pretrained(tmp_path / "in")
    found = weights.open_pretrained(tmp_path / "in")
    params, settings = found.read(), vision_language.VisionLanguageSettings(**found.settings)
    positions = vision_language.token_positions(settings, tokens, grid)
    ours = vision_language.logits(
        settings, params, jnp.asarray(tokens), jnp.asarray(positions), jnp.asarray(patches), grid
    )
    close(ours, wanted)
    special = {"vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings, config=special)
    np.testing.assert_array_equal(logits(auto.from_pretrained(tmp_path / "out").eval()), wanted)
