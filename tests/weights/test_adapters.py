"""Adapters of low rank alone, in and out; what they make of the leaves that they adapt."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from autoshard import weights
from autoshard.errors import CheckpointError, ConfigError
from tests.weights.published import D, E, F, H, L, publish

RANK = 3
SHAPES = {
    "llama": {"self_attn.q_proj": (D, H * E), "mlp.down_proj": (F, D)},
    "gpt2": {"attn.c_attn": (D, 3 * D), "mlp.c_proj": (4 * D, D)},
}


@pytest.fixture
def model(tmp_path):
    return weights.open_pretrained(publish(tmp_path / "model", "llama"))


def adapter_files(folder, kind="llama", seed=0, change=lambda t: None, **config):
    """A folder as PEFT writes it."""
    rng = np.random.default_rng(seed)
    layers = {"llama": "model.layers", "gpt2": "transformer.h"}[kind]
    tensors = {}
    for n in range(L):
        for name, (inputs, outputs) in SHAPES[kind].items():
            for letter, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                tensor = rng.normal(size=shape).astype(np.float32)
                tensors[f"base_model.model.{layers}.{n}.{name}.lora_{letter}.weight"] = tensor
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "fan_in_fan_out": kind == "gpt2", "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(given | config))
    return folder, tensors


@pytest.mark.parametrize("kind", SHAPES)
def test_an_adapter_comes_back_bit_for_bit_and_adds_its_product(kind, tmp_path):
    model = weights.open_pretrained(publish(tmp_path / "model", kind))
    folder, given = adapter_files(tmp_path / "in", kind)
    adapter = weights.read_adapter(folder, model)
    assert adapter.scale == 2.0
    weights.write_adapter(tmp_path / "out", adapter, model)
    after = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: x.tobytes() for name, x in after.items()} == {name: x.tobytes() for name, x in given.items()}
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, 6.0, sorted(SHAPES[kind]))

    params = model.read()
    merged = jax.jit(lambda p, a: weights.adapted(p, model.family, a))(params, adapter)
    weights.write_pretrained(tmp_path / "merged", merged, model.family, model.settings)
    before, now = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "merged"))
    products = {}
    for name in given:
        if name.endswith("lora_A.weight"):
            product = given[name.replace("lora_A", "lora_B")] @ given[name]
            stem = name.removeprefix("base_model.model.").removesuffix("lora_A.weight")
            products[f"{stem}weight"] = product.T if kind == "gpt2" else product
    assert products.keys() <= now.keys()
    for name, tensor in now.items():
        np.testing.assert_allclose(tensor, before[name] + 2.0 * products.get(name, 0.0), rtol=1e-5, atol=1e-5)


def test_several_adapters_add_up_and_the_base_stays_as_it_is(model, tmp_path):
    params = model.read()
    before = jax.tree.map(np.array, params)
    adapters = [weights.read_adapter(adapter_files(tmp_path / str(n), seed=n)[0], model) for n in range(2)]
    both = weights.adapted(params, model.family, *adapters)
    leaf = both["layers"]["mlp"]["down"]
    own = [weights.adapted(params, model.family, a)["layers"]["mlp"]["down"] for a in adapters]
    np.testing.assert_allclose(leaf, own[0] + own[1] - params["layers"]["mlp"]["down"], rtol=1e-5, atol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, params, before)


def test_an_adapter_is_trained_and_its_model_is_not(model, tmp_path):
    params, adapter = model.read(), weights.read_adapter(adapter_files(tmp_path / "in")[0], model)

    def loss(adapter):
        return jnp.sum(weights.adapted(params, model.family, adapter)["layers"]["attention"]["wq"] ** 2)

    grads = jax.grad(loss)(adapter)
    assert jax.tree.structure(grads) == jax.tree.structure(adapter)
    assert np.abs(grads.weights["layers"]["attention"]["wq"]["a"]).min() > 0
    assert not np.any(grads.weights["layers"]["mlp"]["down"]["b"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and adapters are read with 'LORA' alone"),
        ({"use_dora": True}, "use_dora is True"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern is"),
        ({"r": "3"}, "r is '3' and lora_alpha 6"),
    ],
)
def test_adapters_of_another_kind_are_refused(config, says, model, tmp_path):
    with pytest.raises(ConfigError, match=says):
        weights.read_adapter(adapter_files(tmp_path / "in", **config)[0], model)


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (lambda t: None, {"r": 4}, r"layers/.* has ranks \(3, 3\), and adapter_config.json says 4"),
        (lambda t: t.popitem(), {}, "2 tensors .*lora_B.weight are there, and 3 are expected of l"),
        (lambda t: t.update({"base_model.model.x": np.ones(2, np.float32)}), {}, r"base_model.model.x .*ignore="),
        (
            lambda t: [t.pop(name) for name in list(t) if "down_proj.lora_A" in name],
            {},
            "layers/mlp/down is no dict of a and b",
        ),
    ],
)
def test_files_of_another_model_are_refused_by_name(change, config, says, model, tmp_path):
    folder, _ = adapter_files(tmp_path / "in", change=change, **config)
    with pytest.raises(CheckpointError, match=says):
        weights.read_adapter(folder, model)


def test_what_is_no_matrix_has_no_adapter(model, tmp_path):
    pair = {"a": np.ones((RANK, 2)), "b": np.ones((2, RANK))}
    wrong = weights.Adapter({"norm": {"scale": pair}}, 1.0)
    with pytest.raises(CheckpointError, match="norm/scale, which is no matrix of llama"):
        weights.adapted(model.read(), model.family, wrong)
    with pytest.raises(CheckpointError, match="is for head, which is no leaf of the tree"):
        weights.adapted({}, model.family, weights.Adapter({"head": pair}, 1.0))
