"""Our models beside those of `transformers`, with the same weights at small sizes; `make test-interop` installs it."""

from __future__ import annotations

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard import weights
from autoshard.weights.models import decoder

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed; `make test-interop` does it", allow_module_level=True)

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
    model = random_model(auto, kind, **DECODERS[kind])
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
