"""Published models in and out: every tensor at its place, bit for bit, on one device and on eight."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

import autoshard
from autoshard import weights
from autoshard.errors import CheckpointError, ConfigError
from autoshard.weights.family import families
from autoshard.weights.models import decoder
from tests.weights.published import CONFIGS, D, E, H, L, V, publish, tensors_of


def flat(tree) -> dict[str, jax.Array]:
    return {"/".join(k.key for k in path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def test_every_family_is_tried_here():
    assert set(families()) == set(CONFIGS)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_comes_back_bit_for_bit(kind, tmp_path):
    given = tensors_of(kind)
    found = weights.open_pretrained(publish(tmp_path / "in", kind))
    params = found.read()
    assert {name: x.shape for name, x in flat(params).items()} == {
        name: x.shape for name, x in flat(found.abstract).items()
    }
    weights.write_pretrained(tmp_path / "out", params, found.family, found.settings)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert after.keys() == given.keys()
    for name, tensor in given.items():
        assert after[name].tobytes() == tensor.tobytes(), name
        assert after[name].shape == tensor.shape
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = {"model_type": kind, **CONFIGS[kind]}
    assert {key: config[key] for key in before if key != "head_dim" or key in config} == before
    again = weights.open_pretrained(tmp_path / "out")
    assert (again.settings, again.abstract) == (found.settings, found.abstract)


def test_leaves_are_what_their_layouts_say(tmp_path):
    given = tensors_of("mixtral")
    params = weights.open_pretrained(publish(tmp_path / "in", "mixtral")).read()
    query = given["model.layers.2.self_attn.q_proj.weight"].reshape(H, E, D).transpose(2, 0, 1)
    np.testing.assert_array_equal(params["layers"]["attention"]["wq"][2], query)
    up = given["model.layers.1.block_sparse_moe.experts.1.w3.weight"]
    np.testing.assert_array_equal(params["layers"]["mlp"]["up"][1, 1], up.T)
    np.testing.assert_array_equal(params["head"], given["lm_head.weight"].T)


def test_each_device_gets_its_part_and_the_planned_step_the_same_logits(tmp_path):
    found = weights.open_pretrained(publish(tmp_path / "in", "llama"))
    settings = decoder.DecoderSettings(**found.settings)

    def forward(params, tokens):
        return decoder.logits(settings, params, tokens)

    tokens = jnp.arange(32, dtype=jnp.int32).reshape(8, 4) % V
    step = autoshard.jit(forward, mesh={"data": 2, "model": 4}, strategy="auto")
    plan = step.plan(found.abstract, tokens)
    params, report = found.read(plan=plan, report=True)
    assert {leaf.origin for leaf in report.leaves} == {"saved"}
    whole = found.read()
    jax.tree.map(np.testing.assert_array_equal, params, whole)
    np.testing.assert_allclose(step(params, tokens), forward(whole, tokens), rtol=1e-5, atol=1e-6)


def test_a_tree_of_layers_that_are_not_stacked_a_cast_and_a_longer_vocabulary(tmp_path):
    found = weights.open_pretrained(publish(tmp_path / "in", "llama"))
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = NamedSharding(mesh, P("a", "b"))
    like = {
        "embed": jax.ShapeDtypeStruct((V + 8, D), jnp.bfloat16, sharding=spec),
        "layers": [
            {"attention": {"wq": jax.ShapeDtypeStruct((D, H, E), jnp.float32, sharding=spec)}} for _ in range(L)
        ],
    }
    state, report = found.read(like=like, cast=True, missing="init", extra="ignore", report=True)
    given = tensors_of("llama")
    embed = given["model.embed_tokens.weight"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(state["embed"][:V], embed)
    np.testing.assert_array_equal(state["embed"][V:], jnp.zeros((8, D)))
    query = given["model.layers.1.self_attn.q_proj.weight"].reshape(H, E, D).transpose(2, 0, 1)
    np.testing.assert_array_equal(state["layers"][1]["attention"]["wq"], query)
    assert [leaf.origin for leaf in report.leaves] == ["grown", "unstacked", "unstacked", "unstacked"]


def test_a_prefix_that_is_not_there_and_tensors_without_weights(tmp_path):
    given = tensors_of("gpt2")
    bare = {name.removeprefix("transformer."): x for name, x in given.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 12, 12), np.float32)
    params = weights.open_pretrained(publish(tmp_path / "bare", "gpt2", bare)).read()
    whole = weights.open_pretrained(publish(tmp_path / "in", "gpt2")).read()
    jax.tree.map(np.testing.assert_array_equal, params, whole)


@pytest.mark.parametrize(
    ("change", "config", "says"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), {}, "has no model.layers.1.mlp.up_proj.weight"),
        (lambda t: t.update(other=np.ones(3, np.float32)), {}, r"other \(float32\[3\]\) is in the checkpoint and not"),
        (lambda t: None, {"num_attention_heads": 5}, r"q_proj.weight is float32\[32,16\], not laid out as .* 5 x 8"),
        (lambda t: None, {"num_hidden_layers": 4}, "3 tensors .* are there, and 4 are expected of l"),
        (
            lambda t: t.update({"model.layers.2.input_layernorm.weight": np.ones(17, np.float32)}),
            {},
            r"input_layernorm.weight is float32\[17\] and .* is float32\[16\], and both are layers",
        ),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_by_name(change, config, says, tmp_path):
    given = tensors_of("llama")
    change(given)
    like = weights.open_pretrained(publish(tmp_path / "whole", "llama")).abstract
    with pytest.raises(CheckpointError, match=says):
        weights.open_pretrained(publish(tmp_path / "in", "llama", given, **config)).read(like=like)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model_type": "lama"}, "model_type 'lama' is none of .*did you mean 'llama'"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu', and models of type llama are read with 'silu' alone"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*yarn"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window is True, .* qwen3 .* False alone"),
        ({"num_attention_heads": "four"}, "num_attention_heads is 'four', and must be a size"),
    ],
)
def test_a_config_that_asks_for_more_is_refused(config, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        weights.open_pretrained(publish(tmp_path / "in", "llama", None, **config)).settings  # noqa: B018


def test_a_tree_of_another_family_is_not_written(tmp_path):
    known = families()
    for params, says in [
        ({"embedding": np.ones((V, D))}, "embedding is no leaf of llama"),
        ({"embed": np.ones(V)}, "embed is float64.24., and a leaf of v d is expected"),
        ({"embed": np.ones((V, D)), "head": np.ones((D, V + 1))}, "v of llama would be 25 and 24"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            weights.write_pretrained(tmp_path / "out", params, known["llama"], {})
