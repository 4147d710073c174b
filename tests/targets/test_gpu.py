"""GPUs that are not here, compiled for. Needs the extra ``gpu``, as `make test-targets` installs it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.backend.compilation import compile_plan
from autoshard.errors import MeshError
from autoshard.machine.gpu_cluster import GPUS, GpuCluster, compile_requirements
from autoshard.machine.mesh_config import MeshConfig
from autoshard.machine.target import device_array
from benchmarks.target_cases import decoder

if not all(compile_requirements().values()):
    pytest.skip("the compiler for GPUs is not installed; `make test-targets` does it", allow_module_level=True)


@pytest.fixture(scope="module")
def made():
    """A small decoder's train step on two nodes, its arguments, and what the compiler made of it."""
    train, state, batch = decoder(32, layers=2, d_model=128, heads=2, vocab=256, seq=64)
    mesh = MeshConfig(axes={"data": -1, "model": 4}, gpu="h100", nodes=2, per_node=4)
    step = autoshard.jit(train, mesh=mesh, strategy="fsdp", donate_argnums=0)
    lowered = step.lower(state, batch)
    return step, (state, batch), lowered, compile_plan(step.plan(state, batch), lowered)


def test_it_fits_and_is_audited(made):
    _, _, _, c = made
    held = c.plan.memory.parameters + c.plan.memory.optimizer + c.plan.memory.inputs
    assert c.usage.arguments == pytest.approx(held, rel=0.1)
    assert c.fits
    assert c.usage.peak > c.usage.arguments
    assert c.audit.emitted
    assert all(x.axes is not None for x in c.audit.emitted)
    assert any("decoder.py" in x.source for x in c.audit.emitted)


def test_the_estimate_is_the_roofline(made):
    _, (_, batch), _, c = made
    weights = c.plan.mesh.size * c.plan.memory.parameters / 4  # float32
    floor = 6 * batch["inputs"].size * weights / c.plan.mesh.size / c.plan.mesh.hardware.peak_flops("bfloat16")
    assert c.estimate.cycles is None
    assert floor < c.estimate.compute
    assert c.estimate.overlapped <= c.estimate.seconds


def test_weights_are_gathered_a_layer_ahead_and_beside_products(monkeypatch):
    """Of layers whose gathers between nodes take as long as their products, a step waits for less."""
    train, state, batch = decoder(64, layers=6, d_model=2048, heads=16, vocab=512, seq=512)
    mesh = MeshConfig(axes={"data": 4, "model": 8}, gpu="h100", nodes=4)

    def waited():
        step = autoshard.jit(train, mesh=mesh, donate_argnums=0)
        plan = step.plan(state, batch)
        found = compile_plan(plan, step.lower(state, batch))
        assert found.audit.clean, str(found.audit)
        return any(c.ahead for c in plan.intermediates), found.estimate.blocking / found.estimate.scheduled

    (ahead, own), _ = waited(), monkeypatch.setattr("autoshard.plan.constraints.gathered_ahead", lambda graph: {})
    monkeypatch.setattr("autoshard.backend.latencies.MIN_WAIT", 1.0)
    other, plain = waited()
    assert (ahead, other) == (True, False)
    assert own < 0.8 * plain


def test_calling_it_says_that_the_devices_are_not_here(made):
    step, args, lowered, _ = made
    for call in (step, lowered.compile()):
        with pytest.raises(MeshError, match="does not have the devices of 2 x 4 H100"):
            call(*args)


@pytest.mark.parametrize("gpu", sorted(set(GPUS) - {"h100"}))
def test_other_gpus_compile_too(gpu):
    step = autoshard.jit(lambda w, x: jnp.tanh(x @ w), mesh=MeshConfig(axes={"data": -1}, gpu=gpu), strategy="dp")
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    assert compile_plan(step.plan(x, x), step.lower(x, x)).fits


def test_nodes_follow_one_another_along_the_first_axis():
    found = device_array(GpuCluster("h100", 2, 4), (2, 4))
    assert [d.id for d in found.flat] == list(range(8))


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_attention_is_the_librarys_and_no_scores_are_in_memory(scan):
    train, state, batch = decoder(32, layers=2, d_model=256, heads=4, kv_heads=2, vocab=256, seq=512, scan=scan)
    step = autoshard.jit(train, mesh=MeshConfig(axes={"data": 4, "model": 2}, gpu="h100"), strategy="tp")
    plan = step.plan(state, batch)
    assert any(p.written == "attention:large" and "all of them run by cuDNN" in p.change for p in plan.passes)
    c = compile_plan(plan, lowered := step.lower(state, batch))
    text = lowered.compile().as_text()
    kernels = re.findall(r'custom_call_target="__cudnn\$fmha(\w+)"', text)
    assert set(kernels) == {"Softmax", "SoftmaxBackward"}
    assert not re.findall(r"\w+\[(?:\d+,)*512,512\]", text)
    assert c.audit.clean, str(c.audit)


def test_attention_over_a_window_is_the_librarys():
    def attended(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(127, 0), implementation="xla")

    def trained(q, k, v):
        return jax.value_and_grad(lambda *x: attended(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    x = jax.ShapeDtypeStruct((8, 1024, 4, 64), jnp.bfloat16)
    step = autoshard.jit(trained, mesh=MeshConfig(axes={"data": -1}, gpu="h100"), strategy="dp")
    c = compile_plan(step.plan(x, x, x), lowered := step.lower(x, x, x))
    text = lowered.compile().as_text()
    windows = re.findall(r'__cudnn\$fmha\w*".*?"sliding_window_length": ?(\d+)', text)
    assert windows == ["128", "128"]
    assert not re.findall(r"\w+\[(?:\d+,)*1024,1024\]", text)
    assert c.audit.clean, str(c.audit)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_an_optimizer_on_the_host_is_in_neither_the_device_s_arguments_nor_its_results(scan):
    """Also where a loop reads and writes the host's memory."""
    train, state, batch = decoder(32, layers=3, d_model=256, heads=2, vocab=256, seq=64, scan=scan)
    mesh = MeshConfig(axes={"data": 2, "model": 4}, gpu="h100", nodes=2, per_node=4)
    step = autoshard.jit(train, mesh=mesh, strategy="fsdp+offload:optimizer", donate_argnums=0)
    c = compile_plan(plan := step.plan(state, batch), step.lower(state, batch))
    assert c.usage.host == plan.memory.host > plan.memory.parameters
    assert c.usage.arguments == pytest.approx(plan.memory.parameters + plan.memory.inputs, rel=0.01)
    assert c.usage.aliased > 0.99 * plan.memory.parameters
    assert c.audit.clean, str(c.audit)


def test_residuals_on_the_host():
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def block(h, w):
        return jax.checkpoint(lambda h: jnp.tanh(jnp.tanh(h @ w) @ w.T), policy=policy)(h), None

    def train(ws, x):
        grads = jax.grad(lambda ws: (jax.lax.scan(block, x, ws)[0] ** 2).mean())(ws)
        return ws - 0.1 * grads

    step = autoshard.jit(train, mesh=MeshConfig(axes={"data": 8}, gpu="h100"), strategy="fsdp", donate_argnums=0)
    ws, x = jax.ShapeDtypeStruct((4, 512, 1024), jnp.float32), jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    c = compile_plan(step.plan(ws, x), step.lower(ws, x))
    assert c.usage.host == 4 * (4096 // 8) * (1024 + 512) * 4


def convolutional(norm, stride, images=512):
    """A train step of three convolutions with a norm after each, and its arguments."""

    def train(params, x):
        def loss(params):
            h = x
            for kernel, scale in zip(params["kernels"], params["scales"], strict=True):
                h = jax.lax.conv_general_dilated(
                    h, kernel.astype(h.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
                )
                h = jax.nn.silu(norm(h.astype(jnp.float32), scale).astype(h.dtype))
            return (h.astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    kernels = [jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)] * 3
    params = {"kernels": kernels, "scales": [jax.ShapeDtypeStruct((64,), jnp.float32)] * 3}
    return train, params, jax.ShapeDtypeStruct((images, 64, 64, 64), jnp.bfloat16)


def group_norm(x, scale):
    wide = x.reshape(*x.shape[:-1], 16, -1)
    wide = wide - wide.mean((1, 2, 4), keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean((1, 2, 4), keepdims=True) + 1e-5)
    return wide.reshape(x.shape) * scale


def batch_norm(x, scale):
    away = x - x.mean((0, 1, 2))
    return away * jax.lax.rsqrt((away * away).mean((0, 1, 2)) + 1e-5) * scale


def test_the_gradient_of_a_strided_convolution_is_cudnn_s_own():
    """Also where the kernel is gathered for it."""
    train, params, x = convolutional(lambda h, scale: h * scale, 2)
    step = autoshard.jit(train, mesh=MeshConfig(axes={"data": 8}, gpu="h100"), strategy="fsdp", donate_argnums=0)
    text = step.lower(params, x).compile().as_text()
    assert text.count('custom_call_target="__cudnn$convBackwardInput"') == 2
    assert "lhs_dilate" not in text


@pytest.mark.parametrize(("norm", "images", "least"), [(batch_norm, 4096, 0.9), (group_norm, 512, 0.8)])
def test_norms_take_fewer_sweeps(norm, images, least):
    train, params, x = convolutional(norm, 1, images)
    took = []
    for passes in (["norms"], ["dead_code"]):
        step = autoshard.jit(
            train, mesh=MeshConfig(axes={"data": 8}, gpu="h100"), strategy="dp", passes=passes, donate_argnums=0
        )
        c = compile_plan(step.plan(params, x), step.lower(params, x))
        assert c.audit.clean, str(c.audit)
        took.append(c.estimate.compute)
    assert took[0] < least * took[1]
