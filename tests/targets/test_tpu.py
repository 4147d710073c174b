"""A TPU that is not here, compiled for. Needs the extra ``tpu``, as `make test-targets` installs it."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.backend.compilation import compile_plan, memory_usage
from autoshard.backend.estimate import estimate
from autoshard.backend.hlo.collectives import collectives
from autoshard.backend.hlo.host_copies import host_copies
from autoshard.backend.hlo.text import parse_hlo
from autoshard.errors import MeshError
from autoshard.machine.mesh_config import MeshConfig
from autoshard.machine.target import device_array
from autoshard.machine.torus import places
from autoshard.machine.tpu_slice import TpuSlice
from benchmarks.target_cases import decoder
from tests.experts import added_up, arrays, gradient
from tests.test_cli import call

CONFIG = """
model: {layers: 1, d_model: 128, heads: 1, seq: 128, dtype: bfloat16}
batch: 16
mesh: {axes: {data: 4, model: 4}, tpu: "v5e:4x4", memory_budget: 64TiB}
steps: 1
checkpoint: {dir: run}
"""

if importlib.util.find_spec("libtpu") is None:
    pytest.skip("the compiler for TPUs is not installed; `make test-targets` does it", allow_module_level=True)


@pytest.fixture(scope="module")
def compiled():
    """A small decoder's train step, its arguments, plan and executable."""
    train, state, batch = decoder(32, layers=2, d_model=256, heads=2, vocab=512, seq=256)
    mesh = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4")
    step = autoshard.jit(train, mesh=mesh, strategy="fsdp", donate_argnums=0)
    return step, (state, batch), step.plan(state, batch), step.lower(state, batch).compile()


def test_the_executable_is_the_compiler_s(compiled):
    _, _, plan, executable = compiled
    assert "estimated_cycles" in executable.as_text()
    memory = executable.memory_analysis()
    state = plan.memory.parameters + plan.memory.optimizer + plan.memory.inputs
    assert memory.argument_size_in_bytes == pytest.approx(state, rel=0.1)
    assert memory.peak_memory_in_bytes > memory.argument_size_in_bytes


def test_the_estimate_counts_every_layer(compiled):
    _, (state, batch), plan, executable = compiled
    found = estimate(executable, plan.mesh)
    assert found.exact
    tokens = int(np.prod(batch["inputs"].shape))
    weights = sum(x.size for p, x in jax.tree_util.tree_leaves_with_path(state["params"]) if "embed" not in str(p))
    floor = 6 * tokens * weights / plan.mesh.size / plan.mesh.hardware.peak_flops("bfloat16")
    assert floor < found.compute < 100 * floor
    assert found.overlapped <= found.seconds
    assert found.transfers > 0


def test_calling_it_says_that_the_devices_are_not_here(compiled):
    step, args, _, executable = compiled
    for run in (step, executable):
        with pytest.raises(MeshError, match="does not have the devices of TPU v5e:4x4"):
            run(*args)


@pytest.mark.parametrize("topology", ["v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"])
def test_other_chips_compile_too(topology):
    step = autoshard.jit(lambda w, x: jnp.tanh(x @ w), mesh=MeshConfig(axes={"data": -1}, tpu=topology), strategy="dp")
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    executable = step.lower(x, x).compile()
    assert estimate(executable, step.plan(x, x).mesh).compute > 0


@pytest.mark.parametrize("topology", ["v5p:2x2x2", "v6e:2x4"])
def test_sparse_cores_gather_and_scatter_beside_what_is_computed(topology):
    train, state, batch = decoder(16, layers=4, d_model=512, heads=4, d_ff=2048, vocab=1024, seq=256)
    mesh = MeshConfig(axes={"data": 8}, tpu=topology)
    step = autoshard.jit(train, mesh=mesh, strategy="fsdp", donate_argnums=0)
    plan = step.plan(state, batch)
    executable = step.lower(state, batch).compile()
    assert {c.kind for c in collectives(executable.as_text(), plan.mesh)} >= {"all-gather", "reduce-scatter"}
    found = estimate(executable, plan.mesh)
    assert found.blocking < 0.5 * found.transfers  # all of them where the TensorCore runs them
    assert audit(executable, plan).clean


def test_experts_exchange_rows_on_a_slice_that_has_no_all_to_all_beside_compute():
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays(512, 128, 256, 32))
    experts = {name: P("data") if len(w.shape) == 3 else P() for name, w in args[0].items()}
    specs, mesh = (experts, P("data")), MeshConfig(axes={"data": 32}, tpu="v5e:4x8")
    step = autoshard.jit(
        gradient(added_up, 2),
        mesh=mesh,
        strategy="replicated",
        passes=("dead_code", "experts"),
        in_shardings=specs,
        out_shardings=(specs, P("data")),
    )
    plan, executable = step.plan(*args), step.lower(*args).compile()
    assert "all-to-all" in {c.kind for c in collectives(executable.as_text(), plan.mesh)}
    assert audit(executable, plan).clean


@pytest.mark.parametrize("kept", [P(None, "data"), P(None, "data", "model"), P(None, None, "model")])
def test_a_gathered_result_is_put_together_beside_its_donated_buffer(kept):
    def update(master, weights):
        master = master * 0.99
        return master, master.astype(weights.dtype)

    state = jax.ShapeDtypeStruct((20, 4096, 2048), jnp.float32), jax.ShapeDtypeStruct((20, 4096, 2048), jnp.bfloat16)
    mesh, specs = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4"), (kept, P())
    step = autoshard.jit(update, mesh=mesh, in_shardings=specs, out_shardings=specs, donate_argnums=(0, 1))
    plan, found = step.plan(*state), step.lower(*state).compile().memory_analysis()
    whole = 20 * 4096 * 2048 * 2
    assert found.temp_size_in_bytes == pytest.approx(whole, rel=0.3)
    assert plan.memory.peak == pytest.approx(found.peak_memory_in_bytes, rel=0.1)


def test_slices_follow_one_another_along_the_first_axis():
    found = device_array(TpuSlice("v5e:2x2", 2), (4, 2))
    assert [{d.slice_index for d in row} for row in found] == [{0}, {0}, {1}, {1}]


def test_collectives_between_slices_are_those_planned():
    train, state, batch = decoder(16, layers=2, d_model=256, heads=2, vocab=512, seq=128)
    mesh = MeshConfig(axes={"slice": 2, "data": 4}, tpu="v5e:2x2", slices=2)
    step = autoshard.jit(train, mesh=mesh, strategy="zero1", donate_argnums=0)
    executable, plan = step.lower(state, batch).compile(), step.plan(state, batch)
    crossing = [c for c in collectives(executable.as_text(), plan.mesh) if c.axes and "slice" in c.axes]
    planned = sum(c.total_bytes for c in plan.cost.collectives if c.axes and "slice" in c.axes)
    assert 0.2 * planned < sum(c.total_bytes for c in crossing) <= planned
    assert audit(executable, plan).clean


def test_a_slice_that_the_compiler_does_not_know():
    with pytest.raises(MeshError, match="TPU v5e:3x5: libtpu refuses this topology"):
        device_array(TpuSlice("v5e:3x5"), (15,))


def compiled_by_command(folder: Path, text: str, *options: str):
    """What ``autoshard compile`` says of a configuration, and its exit status."""
    path = folder / "train.yaml"
    path.write_text(text)
    done = call("compile", path, *options)
    assert done.returncode in {0, 1, 3}, done.stderr
    return done.stdout, done.returncode


def test_the_command_says_that_it_fits(tmp_path):
    out, status = compiled_by_command(tmp_path, CONFIG, "--json")
    (phase,) = json.loads(out)["phases"]
    assert status == 0, phase["audit"]
    assert phase["mesh"].endswith("of TPU v5e:4x4")
    assert phase["fits"]
    assert phase["memory"]["compiled"]["peak"] == phase["needs"] < phase["has"]
    assert phase["estimate"]["cycles"] > 0
    assert phase["audit"]["clean"]


def test_the_command_says_what_does_not_fit(tmp_path):
    out, status = compiled_by_command(tmp_path, CONFIG.replace("batch: 16", "strategy: dp\nbatch: 4194304"))
    assert status == 1
    assert "DOES NOT FIT on (data=4, model=4) of TPU v5e:4x4" in out
    assert "strategy: auto in place of dp" in " ".join(out.split())


def test_the_compiler_chooses(tmp_path):
    step = autoshard.jit(
        lambda w, x: w - x.T @ jnp.tanh(x @ w),
        mesh=MeshConfig(axes={"data": 2, "model": 2}, tpu="v5e:2x2"),
        refine=3,
        cache=tmp_path,
    )
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    plan = step.plan(x, x)
    (best,) = [t for t in plan.refined if t.chosen]
    assert len(plan.refined) == len(list(tmp_path.iterdir())) == 3
    assert all(t.fits for t in plan.refined)
    found = step.lower(x, x).compile()
    assert best.seconds == pytest.approx(estimate(found, plan.mesh).seconds)
    assert best.seconds == min(t.seconds for t in plan.refined)


def test_a_gather_over_a_whole_torus_stays_one():
    mesh = MeshConfig(axes={"data": 16, "model": 4}, tpu="v5p:4x4x4")
    step = autoshard.jit(jnp.matmul, mesh=mesh, in_shardings=(P("data"), P(("data", "model"))), out_shardings=P("data"))
    args = (jax.ShapeDtypeStruct((16384, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    found = autoshard.audit(step.lower(*args).compile(), step.plan(*args))
    assert found.clean
    assert "all-gather" in (kinds := {c.kind for c in found.emitted})
    assert "all-reduce" not in kinds


@pytest.mark.parametrize("tpu", ["v5e:8x8", "v5e:16x16", "v5p:4x4x4"])
def test_several_dimensions_are_gathered_as_planned(tpu):
    mesh, both = MeshConfig(axes={"data": -1, "model": 4}, tpu=tpu), P(("data", "model"))
    step = autoshard.jit(jnp.matmul, mesh=mesh, in_shardings=(both, P("data", "model")), out_shardings=both)
    args = (jax.ShapeDtypeStruct((65536, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    found = autoshard.audit(step.lower(*args).compile(), step.plan(*args))
    assert len(found.emitted) > 1
    assert {row.verdict for row in found.rows} == {"same"}


@pytest.mark.parametrize("sizes", [{"data": 16, "model": 4}, {"data": 8, "model": 8}])
def test_a_sum_is_scattered_over_two_axes_of_different_links_without_an_all_reduce(sizes):
    mesh, split = MeshConfig(axes=sizes, tpu="v5e:8x8"), P(("data", "model"))
    product = functools.partial(jnp.einsum, "rsa,rsb->ab")
    step = autoshard.jit(product, mesh=mesh, in_shardings=(split, split), out_shardings=split)
    args = [jax.ShapeDtypeStruct((64, 2048, n), jnp.bfloat16) for n in (5120, 15360)]
    emitted = collectives(step.lower(*args).compile().as_text(), step.plan(*args).mesh)
    assert "all-reduce" not in {c.kind for c in emitted}


def test_what_is_stretched_twice_is_not_exchanged():
    """Rotary angles, where queries are split by heads on their way forward and by rows on their way back."""
    rows, heads = P("data"), P(None, None, "data")

    def step(x, y, angle):
        turned = jnp.sin(angle)[None, :, None, :]
        return x * turned, y * turned

    mesh = MeshConfig(axes={"data": 4}, tpu="v5e:2x2")
    step = autoshard.jit(step, mesh=mesh, in_shardings=(rows, heads, None), out_shardings=(rows, heads))
    args = [jax.ShapeDtypeStruct(n, jnp.float32) for n in ((64, 256, 64, 128), (64, 256, 64, 128), (256, 128))]
    found = autoshard.audit(step.lower(*args).compile(), step.plan(*args))
    assert found.clean
    assert "all-to-all" not in {c.kind for c in found.emitted}


def test_momentum_in_the_host_s_memory():
    axes = jax.sharding.AbstractMesh((4, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    pin = jax.sharding.NamedSharding(axes, P("data", "model"), memory_kind="pinned_host")

    def train(weights, momentum, x):
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(weights)
        momentum = 0.9 * jax.device_put(momentum, jax.memory.Space.Device) + grads
        return weights - 0.1 * momentum, jax.device_put(momentum, jax.memory.Space.Host)

    mesh = MeshConfig(axes={"data": 4, "model": 4}, tpu="v5e:4x4")
    step = autoshard.jit(train, mesh=mesh, donate_argnums=(0, 1), in_shardings=(None, pin, None))
    w, x = jax.ShapeDtypeStruct((2048, 2048), "float32"), jax.ShapeDtypeStruct((4096, 2048), "float32")
    plan, memory = step.plan(w, w, x), step.lower(w, w, x).compile().memory_analysis()
    assert memory.host_argument_size_in_bytes == memory.host_output_size_in_bytes == plan.memory.host == 2**20
    assert memory.argument_size_in_bytes == plan.memory.parameters + plan.memory.inputs


def test_what_fits_with_its_optimizer_on_the_host_alone():
    """Unasked; memory of device and host is as the compiler has it, and loops read and write the host's.

    Of so many layers that no stack of weights' gradients fits into on-chip memory, where the compiler may put it.
    """
    adamw = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def train(state, x):
        def loss(layers):
            h, _ = jax.lax.scan(layer, x, layers)
            return (h**2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt = adamw.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {
        k: jax.ShapeDtypeStruct((32, *s), "float32") for k, s in {"up": (1024, 4096), "down": (4096, 1024)}.items()
    }
    state = jax.eval_shape(lambda p: {"params": p, "opt": adamw.init(p)}, params)
    mesh = MeshConfig(axes={"data": 4}, tpu="v5e:2x2", memory_budget="900MiB")
    step = autoshard.jit(train, mesh=mesh, donate_argnums=0)
    x = jax.ShapeDtypeStruct((4096, 1024), "float32")
    plan = step.plan(state, x)
    assert plan.passes[-1].written == "offload:optimizer"
    executable = step.lower(state, x).compile()
    used = memory_usage(executable, plan.mesh)
    assert plan.memory.peak <= 900 * 2**20
    assert used.peak == pytest.approx(plan.memory.peak, rel=0.1)
    assert used.host == plan.memory.host == 4 * 128 * 2**20
    text = executable.as_text()
    assert len(re.findall(r"%dynamic-update-slice-start[\w.]* = \S*\(\(f32\[32,\S*S\(5\)\}", text)) >= 4
    assert "host-call" not in text, "nothing is copied within the host's memory"


def test_residuals_go_to_the_host_s_memory_and_back_beside_products():
    """In each direction the link takes nine tenths of what a layer computes in the forward part."""

    def layer(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    def train(params, x):
        def loss(params):
            h, _ = jax.lax.scan(layer, x, params)
            return (h.astype("float32") ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    width, tokens, layers = 5120, 8192, 12
    shapes = {"up": (width, 8192), "down": (8192, width)}
    params = {k: jax.ShapeDtypeStruct((layers, *s), "bfloat16") for k, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4 * tokens, width), "bfloat16")
    mesh = MeshConfig(axes={"data": 4}, tpu="v5e:2x2")
    step = autoshard.jit(train, mesh=mesh, donate_argnums=0, strategy="dp", recompute={"up": "host"})
    plan, executable = step.plan(params, x), step.lower(params, x).compile()
    moved = layers * tokens * 8192 * 2
    assert {(r.name, r.on_host) for r in plan.residuals if r.on_host} == {("up", layers)}
    used = memory_usage(executable, plan.mesh)
    assert used.host == plan.memory.host == moved
    assert used.peak == pytest.approx(plan.memory.peak, rel=0.1)
    found, link = estimate(executable, plan.mesh), moved / plan.mesh.hardware.host_bandwidth
    assert found.host < 0.3 * link  # there and back it takes twice ``link``
    assert plan.cost.host < 0.3 * link
    within = {name for name, _ in host_copies(parse_hlo(executable.as_text()))}
    assert len(within) == 3  # both loops, and the last layer's between them


def test_what_goes_to_the_host_and_what_stays_beside_it_have_one_layout():
    """What a layer begins with, and one of its heads' two products."""

    def layer(h, w):
        sent, kept = (jnp.einsum("bsd,dhe->bshe", h, w[name]) for name in ("sent", "kept"))
        return h + jnp.einsum("bshe,hed->bsd", jnp.tanh(sent) * jnp.sin(kept), w["out"]), None

    def train(params, x):
        gradient = jax.grad(lambda params: (jax.lax.scan(layer, x, params)[0].astype("float32") ** 2).mean())
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient(params))

    params = dict.fromkeys(("sent", "kept"), jax.ShapeDtypeStruct((4, 256, 4, 128), "bfloat16"))
    params["out"] = jax.ShapeDtypeStruct((4, 4, 128, 256), "bfloat16")
    x = jax.ShapeDtypeStruct((8, 512, 256), "bfloat16")
    mesh = MeshConfig(axes={"data": 4}, tpu="v5e:2x2")

    def orders(**options):
        step = autoshard.jit(train, mesh=mesh, donate_argnums=0, strategy="dp", **options)
        text = step.lower(params, x).as_text()
        return re.findall(r"LayoutConstraint.*result_layouts = \[dense<\[([\d, ]+)\]>", text)

    kept = "3, 1, 2, 0"  # heads before positions, minor first
    # What is kept is made and read; what is sent is sent, and fetched before the loop and in it.
    assert sorted(orders(recompute={"sent": "host"})) == ["2, 1, 0"] * 2 + [kept] * 5
    assert not orders()


def test_large_attention_is_splash_and_no_scores_are_in_memory():
    train, state, batch = decoder(32, layers=2, d_model=256, heads=4, kv_heads=2, vocab=256, seq=2048)
    step = autoshard.jit(train, mesh=MeshConfig(axes={"data": 4, "model": 2}, tpu="v5e:2x4"), strategy="tp")
    plan = step.plan(state, batch)
    assert any(
        p.written == "attention:large" and "all of them run by splash attention" in p.change for p in plan.passes
    )
    c = compile_plan(plan, lowered := step.lower(state, batch))
    text = lowered.compile().as_text()
    kernels = set(re.findall(r"%splash_mha_(\w+?)_\w*residuals[\w.]* = ", text))
    assert kernels == {"fwd", "dkv"}
    assert not re.findall(r"\w+\[(?:\d+,)*2048,2048\]", text)
    assert c.audit.clean, str(c.audit)
    calls = len(re.findall(r"%splash_mha_fwd[\w.]* = ", text))
    assert calls == 4, "one for each round of the ring over data; none runs again for the gradient"


def test_packed_sequences_are_splash_and_no_mask_is_in_memory():
    length, heads = 1024, 4

    def train(params, x, ids):
        def layer(x, p):
            q, k, v = (jnp.einsum("btm,mhd->bthd", x, p[n]) for n in "qkv")
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type="float32") * 64**-0.5
            at = jnp.arange(length)
            seen = (ids[:, :, None] == ids[:, None, :]) & (at[:, None] >= at)
            weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e30), -1).astype(v.dtype)
            return x + jnp.einsum("bhqk,bkhd,hdm->bqm", weights, v, p["o"]), None

        def loss(params):
            return (jax.lax.scan(layer, x, params)[0].astype("float32") ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    params = dict.fromkeys("qkv", jax.ShapeDtypeStruct((2, 256, heads, 64), "bfloat16"))
    params["o"] = jax.ShapeDtypeStruct((2, heads, 64, 256), "bfloat16")
    x, ids = jax.ShapeDtypeStruct((32, length, 256), "bfloat16"), jax.ShapeDtypeStruct((32, length), "int32")
    step = autoshard.jit(train, mesh=MeshConfig(axes={"data": 4}, tpu="v5e:2x2"), strategy="dp", donate_argnums=0)
    plan = step.plan(params, x, ids)
    assert any("all of them run by splash attention" in p.change for p in plan.passes), plan.passes
    c = compile_plan(plan, lowered := step.lower(params, x, ids))
    text = lowered.compile().as_text()
    named = re.findall(r'splash_blocks_1_of_1/(?:[^"]*/)?splash_mha_(\w+?)_segmented', text)
    assert set(named) == {"fwd", "dkv"}, "and estimates know them by their names"
    assert not re.findall(r"\w+\[(?:\d+,)*1024,1024\]", text)
    assert c.audit.clean, str(c.audit)


def test_a_group_norm_of_what_is_concatenated_takes_fewer_sweeps():
    def train(params, batch):
        def loss(params):
            x = jnp.concatenate([_convolved(batch["x"], params["in"]), batch["y"]], -1)
            wide = x.astype(jnp.float32).reshape(*x.shape[:-1], 32, -1)
            wide = wide - wide.mean((1, 2, 4), keepdims=True)
            wide = wide * jax.lax.rsqrt((wide * wide).mean((1, 2, 4), keepdims=True) + 1e-5)
            h = jax.nn.silu((wide.reshape(x.shape) * params["scale"]).astype(x.dtype))
            return (_convolved(h, params["out"]).astype(jnp.float32) ** 2).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))

    sizes = {"in": (3, 3, 64, 64), "scale": (128,), "out": (3, 3, 128, 64)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in sizes.items()}
    batch = dict.fromkeys("xy", jax.ShapeDtypeStruct((128, 16, 16, 64), jnp.bfloat16))
    took = []
    for passes in (["norms"], ["dead_code"]):
        mesh = MeshConfig(axes={"data": 4}, tpu="v5e:2x2")
        step = autoshard.jit(train, mesh=mesh, strategy="dp", passes=passes, donate_argnums=0)
        c = compile_plan(step.plan(params, batch), step.lower(params, batch))
        assert c.audit.clean, str(c.audit)
        took.append(c.estimate.compute)
    assert took[0] < 0.85 * took[1]


def _convolved(x, kernel):
    kernel = kernel.astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_targets_are_looked_up_in_split_logits_of_a_pipeline():
    """XLA (JAX 0.12) aborts where it splits a gather, or a scatter, over some of the axes beside that of the stages."""

    def loss(params, x, y):
        h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(h @ params["head"], y).mean()

    def train(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    mesh = MeshConfig(axes={"stage": 2, "data": 4, "model": 2}, tpu="v5e:4x4", pipeline="stage")
    pins = {"layers": P("stage"), "head": P(None, "model")}, P("data"), P("data")
    step = autoshard.jit(train, mesh=mesh, in_shardings=pins, microbatches=4, schedule="1f1b", donate_argnums=0)
    shapes = {"layers": (4, 256, 256), "head": (256, 4096)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    x, y = jax.ShapeDtypeStruct((64, 32, 256), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.int32)
    assert {"gather", "scatter-add"} <= {i.op for i in step.plan(params, x, y).islands}
    text = step.lower(params, x, y).compile().as_text()
    assert "f32[4,32,2048]" in text, "logits of a micro-batch, split over model"
    assert not re.findall(r"f32\[\d+,32,4096\]", text)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_slots_of_a_pipeline_are_copied_whole(schedule):
    """XLA would copy them where a loop in a conditional reads them, or would rather have them in another layout."""
    train, state, batch = decoder(32, layers=8, d_model=256, heads=2, vocab=512, seq=256)
    mesh = MeshConfig(axes={"stage": 4, "data": 4}, tpu="v5e:4x4", pipeline="stage")
    step = autoshard.jit(train, mesh=mesh, microbatches=8, schedule=schedule, donate_argnums=0)
    plan = step.plan(state, batch)
    module = parse_hlo(step.lower(state, batch).compile().as_text())
    ticks = [c for c in module.computations.values() if c.name != module.entry]
    slots = f"[{max(plan.pipeline.schedule.live)},2,"  # of residuals of a stage's two layers
    held = [i for c in ticks for i in c.instructions.values() if slots in i.shape]
    assert {i.opcode for i in held} >= {"parameter", "get-tuple-element"}
    assert not [i.name for i in held if i.opcode == "copy"]


def test_a_pipeline_emits_the_collectives_that_are_planned():
    """Slots are kept whole, activations are sent split as their gradients are, the head's norm is computed whole."""
    train, state, batch = decoder(32, layers=8, d_model=256, heads=8, vocab=2048, seq=128)
    mesh = MeshConfig(axes={"stage": 4, "model": 4}, tpu="v5e:4x4", pipeline="stage")
    step = autoshard.jit(train, mesh=mesh, strategy="tp", microbatches=8, schedule="zb-h1", donate_argnums=0)
    plan = step.plan(state, batch)
    audit = autoshard.audit(step.lower(state, batch).compile(), plan)
    assert audit.clean, str(audit)


@pytest.mark.parametrize(
    ("topology", "sizes"),
    [
        ("v5e:4x4", (4, 4)),
        ("v5e:2x4", (2, 4)),
        ("v5e:4x8", (2, 16)),
        ("v5e:16x16", (32, 8)),
        ("v6e:8x8", (16, 4)),
        ("v5p:2x2x2", (4, 2)),
        ("v5p:4x4x4", (16, 4)),
        ("v5p:4x4x8", (8, 4, 4)),
        ("v4:2x2x4", (4, 4)),
        ("tpu7x:2x2x2", (8, 2)),
    ],
)
def test_a_mesh_lies_where_planning_without_a_compiler_has_it(topology, sizes):
    target = TpuSlice(topology)
    devices = device_array(target, sizes)
    at = np.array([(*d.coords, d.core_on_chip) for d in devices.ravel()]).reshape(*sizes, -1)
    np.testing.assert_array_equal(at, places(target, sizes))
