"""The cases of `benchmarks.on_gpu`: what a GPU gives, attention by its kernel, and training steps as planned."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen
from flax.linen.fp8_ops import Fp8DirectDotGeneralOp

import autoshard
from autoshard.backend.compilation import memory_usage
from autoshard.backend.estimate import estimate
from autoshard.machine.hardware import hardware_of, load_hardware
from autoshard.machine.mesh import Hardware
from autoshard.runtime.plan import Plan
from autoshard.train.models.decoder import ModelConfig, make_steps
from autoshard.train.optimizer import OptimizerConfig
from benchmarks.baselines import abstract
from benchmarks.convolutions import convnext, unet, wide_resnet
from benchmarks.losses import CONTENDERS
from benchmarks.zoo import Model, decoder, translator, vision

GIB = 2**30
REPEATS, SECONDS = 5, 0.25
"""Medians of so many times, each over calls that take about so long."""
Row = tuple[str, str, list[str]]
"""The table that it belongs to, which part of the case it is, and its cells."""


def on_gpu() -> bool:
    """Whether the first device is a GPU."""
    return jax.devices()[0].platform == "gpu"


def device_text() -> str:
    """The device and the versions, as a page states them."""
    return f"{jax.devices()[0].device_kind}, JAX {jax.__version__}"


def hardware() -> Hardware:
    """The table of this device; without a GPU, that of an H100."""
    return hardware_of(jax.devices()[0].device_kind) if on_gpu() else load_hardware("h100")


def mesh() -> autoshard.MeshConfig:
    """The first device alone."""
    return autoshard.MeshConfig(axes={"data": 1}, hardware=hardware().name)


def small(size: int, tiny: int) -> int:
    """``size``, or ``tiny`` where there is no GPU."""
    return size if on_gpu() else tiny


def seconds_of(call: Callable[[], Any]) -> float:
    """The median of the seconds that a call takes on the device; of its results only the last is held."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    calls = max(1, round((SECONDS if on_gpu() else 0.0) / (time.perf_counter() - start)))
    found: list[float] = []
    for _ in range(REPEATS):
        last = None
        start = time.perf_counter()
        for _ in range(calls):
            last = call()
        jax.block_until_ready(last)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """Random values."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def rates() -> Iterator[Row]:
    """The peaks of the hardware table against what the device gives: products, memory, the host's link, a launch."""
    table, n = hardware(), small(8192, 128)
    product = jax.jit(lambda x, y: jax.lax.dot(x, y, preferred_element_type=max(x.dtype, jnp.bfloat16, key=_bits)))
    for dtype in (jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn):
        x, y = normal(0, n, n, dtype=dtype), normal(1, n, n, dtype=dtype)
        found = 2 * n**3 / seconds_of(lambda x=x, y=y: product(x, y))
        name = jnp.dtype(dtype).name
        yield _rate(f"{name} product of {n}^3 (TFLOP/s)", table.flops[name] / 1e12, found / 1e12)
    x = normal(0, small(2**30, 2**20))
    copied = seconds_of(lambda: _negated(x))
    yield _rate("memory, read and written (GB/s)", table.bandwidth / 1e9, 2 * x.nbytes / copied / 1e9)
    wide = normal(0, small(2**16, 2**6), 4096)
    summed = seconds_of(lambda: _normed(wide))
    yield _rate("a norm of rows of 4,096 (GB/s)", table.bandwidth / 1e9, 2 * wide.nbytes / summed / 1e9)
    device = jax.devices()[0]
    if on_gpu():
        host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        there = jax.device_put(x, host)
        for name, value, to in (("to", x, host), ("from", there, jax.sharding.SingleDeviceSharding(device))):
            moved = seconds_of(lambda value=value, to=to: jax.device_put(value, to))
            yield _rate(f"{name} the host (GB/s)", table.host_bandwidth / 1e9, x.nbytes / moved / 1e9)
    launched = jax.jit(lambda x: functools.reduce(lambda x, _: jnp.flip(jnp.sin(x)), range(100), x))
    each = seconds_of(lambda: launched(normal(0, 128))) / 100
    yield _rate("a small kernel (us)", table.overhead * 1e6, each * 1e6)


def _bits(dtype: Any) -> int:
    return jnp.dtype(dtype).itemsize


@jax.jit
def _negated(x: jax.Array) -> jax.Array:
    return -x


@jax.jit
def _normed(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _rate(what: str, stated: float, found: float) -> Row:
    return "rates", what, [what, f"{stated:,.1f}", f"{found:,.1f}", f"{found / stated:.2f}"]


Mask = Callable[[Any, Any], Any]
MASKS: Mapping[str, Mask | None] = {
    "full": None,
    "causal": lambda i, j: j <= i,
    "window 1024": lambda i, j: (j <= i) & (j > i - 1024),
}
ATTENTIONS = (
    (8, 1024, 16, 16, 64, "causal"),
    (4, 2048, 32, 32, 128, "causal"),
    (2, 4096, 32, 8, 128, "causal"),
    (2, 4096, 32, 8, 128, "full"),
    (1, 8192, 32, 8, 128, "causal"),
    (1, 16384, 32, 8, 128, "causal"),
    (4, 4096, 16, 16, 64, "causal"),
    (32, 256, 16, 16, 64, "full"),
    (32, 512, 16, 16, 64, "full"),
    (1, 8192, 32, 8, 128, "window 1024"),
)
"""Batch, length, query heads, key heads, width of a head, mask."""


def attended(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Mask | None) -> jax.Array:
    """Attention as it is written by hand. query: [B, S, H, E], key, value: [B, S, K, E] -> [B, S, H, E]."""
    shared = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, shared, axis=2), jnp.repeat(value, shared, axis=2)
    scores = jnp.einsum("bshe,bthe->bhst", query, key, preferred_element_type=jnp.float32) * key.shape[-1] ** -0.5
    if mask is not None:
        at = jnp.arange(query.shape[1])
        scores = jnp.where(mask(at[:, None], at[None, :]), scores, -1e9)
    return jnp.einsum("bhst,bthe->bshe", jax.nn.softmax(scores, axis=-1).astype(value.dtype), value)


def attention(shapes: Sequence[tuple[int, int, int, int, int, str]]) -> Iterator[Row]:
    """Output and gradients of one attention, planned and by plain XLA; errors against float32 arithmetic on its first
    rows, which needs a batch of one and two heads."""
    table = hardware()
    for batch, length, heads, keys, width, masked in shapes:
        both, args, plan, ours, plain = _attention(batch, length, heads, keys, width, masked)
        placed = plan.put(*args)
        found = seconds_of(lambda ours=ours, placed=placed: ours(*placed))
        try:
            theirs = plain(*args)
            others = f"{1e3 * seconds_of(lambda plain=plain, args=args: plain(*args)):.3f}"
        except jax.errors.JaxRuntimeError as e:
            others, theirs = "out of memory" if "RESOURCE_EXHAUSTED" in str(e) else "failed", None
        group = heads // keys
        part = [x[:1, :, : group if x.shape[2] == heads else 1].astype(jnp.float32) for x in args]
        with jax.default_matmul_precision("highest"):
            exact = jax.device_get(jax.jit(both)(*part))

        def error(got: Any, exact: Any = exact) -> str:
            cut = [x[: e.shape[0], :, : e.shape[2]] for x, e in zip(got, exact, strict=True)]
            return f"{max(_differs(a, b) for a, b in zip(cut, exact, strict=True)):.1e}"

        scores = (
            small(batch, 1) * heads * small(length, 64) ** 2 * {"full": 1.0, "causal": 0.5}.get(masked, 1024 / length)
        )
        peak = 14 * scores * width / table.flops["bfloat16"]
        kernel = "cuDNN" if "cudnn$fmha" in (ours.as_text() or "") else "-"
        shape = f"{batch}, {length}, {heads}/{keys}, {width}, {masked}"
        yield (
            "attention",
            shape,
            [
                shape,
                kernel,
                f"{1e3 * found:.3f}",
                f"{1e3 * plan.cost.seconds:.3f}",
                f"{plan.cost.seconds / found:.2f}",
                f"{peak / found:.2f}",
                others,
                error(ours(*placed)),
                "-" if theirs is None else error(theirs),
            ],
        )


def _attention(
    batch: int, length: int, heads: int, keys: int, width: int, masked: str
) -> tuple[Callable[..., Any], tuple[jax.Array, ...], Plan, jax.stages.Compiled, jax.stages.Compiled]:
    """Output and gradients of one attention by hand, arguments, and the same planned and by plain XLA, compiled."""
    batch, length = small(batch, 1), small(length, 64)
    query, cotangent = (normal(s, batch, length, heads, width) for s in (0, 3))
    key, value = (normal(s, batch, length, keys, width) for s in (1, 2))
    args = (query, key, value, cotangent)

    def both(q: Any, k: Any, v: Any, ct: Any) -> Any:
        out, pullback = jax.vjp(functools.partial(attended, mask=MASKS[masked]), q, k, v)
        return out, *pullback(ct)

    planned = autoshard.jit(both, mesh=mesh())
    return both, args, planned.plan(*args), planned.lower(*args).compile(), jax.jit(both).lower(*args).compile()


def _differs(a: Any, b: Any) -> float:
    """The norm of the difference over that of ``b``."""
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@jax.jit
def _norms(a: Any, b: Any) -> tuple[jax.Array, jax.Array]:
    """The norm of the difference of two trees, and that of the second."""
    wide = [(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True)]
    return jnp.sqrt(sum(jnp.sum((x - y) ** 2) for x, y in wide)), jnp.sqrt(sum(jnp.sum(y**2) for _, y in wide))


StateMaker = Callable[[], Any]
Trained = tuple[Callable[..., Any], StateMaker, Any, str]
"""A step (state, batch) -> (state, loss), what makes the state on the device, a batch, and which entry of the
optimizer's state holds the gradients, times a factor, after one step."""


def of_zoo(model: Model) -> Trained:
    """A model of the zoo with random parameters and a random batch."""
    shapes, batch = abstract(model)

    @jax.jit
    def init() -> Any:
        def leaf(path: Any, x: Any) -> Any:
            if any("norm" in str(k) for k in path) or path[-1].key == "scale":
                return jnp.ones(x.shape, x.dtype)
            fan = x.shape[-2] if len(x.shape) > 1 else x.shape[-1]
            seed = sum(map(ord, jax.tree_util.keystr(path)))
            return jax.random.normal(jax.random.key(seed), x.shape, x.dtype) * min(0.02, fan**-0.5)

        state = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return {**state, "params": jax.tree_util.tree_map_with_path(leaf, shapes["params"])}

    return model.step(), init, _drawn(batch, 500), "mu"


def _drawn(batch: Any, most: int) -> Any:
    """Random values of these shapes; integers below ``most``."""
    rng = np.random.default_rng(0)

    def leaf(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return rng.integers(0, most, x.shape, np.int32)
        return rng.normal(size=x.shape).astype(np.float32).astype(x.dtype)

    return jax.tree.map(leaf, batch)


class Products(linen.Module):
    """Blocks of two products and a residual, in bfloat16 or in float8 with delayed scaling."""

    layers: int
    hidden: int
    float8: bool

    @linen.compact
    def __call__(self, x: Any) -> Any:
        kind = {"dot_general_cls": Fp8DirectDotGeneralOp} if self.float8 else {}
        dense = functools.partial(linen.Dense, dtype=jnp.bfloat16, use_bias=False, **kind)
        for _ in range(self.layers):
            x = x + dense(x.shape[-1])(linen.relu(dense(self.hidden)(x)))
        return x


def of_products(rows: int, width: int, hidden: int, layers: int, *, float8: bool) -> Trained:
    """`Products` under momentum; scales and histories are replaced by what Flax gives as their gradients."""
    net, rate = Products(layers, hidden, float8), optax.sgd(1e-3, momentum=0.9)
    shape = (rows, width)

    @jax.jit
    def init() -> Any:
        made = net.init(jax.random.key(0), jnp.zeros((1, width), jnp.bfloat16))
        rest = {k: v for k, v in made.items() if k != "params"}
        return {"params": made["params"], "rest": rest, "opt": rate.init(made["params"])}

    def step(state: Any, batch: Any) -> Any:
        def loss(params: Any, rest: Any) -> Any:
            apart = net.apply({"params": params, **rest}, batch["x"]) - batch["y"]
            return jnp.sum(apart.astype(jnp.float32) ** 2) / rows  # gradients of a mean are too small for float8

        value, (grads, rest) = jax.value_and_grad(loss, (0, 1))(state["params"], state["rest"])
        updates, opt = rate.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "rest": rest, "opt": opt}, value

    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    return step, init, _drawn({"x": x, "y": x}, 1), "trace"


def of_decoder(batch: int, sizes: Mapping[str, Any]) -> Trained:
    """The decoder that training configurations name, with AdamW."""
    model = ModelConfig.model_validate({"dtype": "bfloat16", **sizes})
    made = make_steps(model, OptimizerConfig(), 1000)
    tokens = jax.ShapeDtypeStruct((batch, model.seq), jnp.int32)
    init = jax.jit(lambda: made.init(jax.random.key(0)))
    return made.train, init, _drawn({"inputs": tokens, "targets": tokens}, 500), "mu"


def fresh(init: StateMaker, plan: Plan, batch: Any) -> tuple[Any, Any]:
    """The state and the batch, where the plan wants them."""
    return plan.put(init(), batch)


def stepped(run: Callable[..., Any], state: Any, batch: Any) -> tuple[float, float, Any]:
    """Seconds of a step, the peak of memory until then, and the last state."""

    def step() -> Any:
        nonlocal state
        state, _ = run(state, batch)
        return state

    return seconds_of(step), allocated(), state


def allocated() -> float:
    """Bytes of the device that were in use at most."""
    return float((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", np.nan))


def steps(name: str, make: Callable[[], Trained], options: Mapping[str, Any], beside: bool = True) -> Iterator[Row]:
    """A training step as planned, and ``beside`` it by plain `jax.jit`, from one state: seconds, bytes and numbers."""
    step, init, batch, entry = make()
    shapes = jax.eval_shape(init)
    jitted = autoshard.jit(step, mesh=mesh(), donate_argnums=0, **options)
    plan = jitted.plan(shapes, batch)
    compiled = jitted.lower(shapes, batch).compile()
    usage, read = memory_usage(compiled, plan.mesh), estimate(compiled, plan.mesh)
    assert usage is not None
    found, peak, last = stepped(compiled, *fresh(init, plan, batch))
    del last
    plain = jax.jit(step, donate_argnums=0).lower(shapes, batch).compile() if beside else None
    plain_usage = memory_usage(plain, plan.mesh) if plain else None
    plain_seconds, differ, theirs = (float("nan"),) * 3
    on_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if plain is not None:
        state, said = compiled(*fresh(init, plan, batch))
        ours, seen = _loss(said), jax.device_put(optax.tree.get(state, entry), on_device)
        del state
        try:
            state, said = plain(init(), jax.device_put(batch))
            difference, norm = _norms(seen, optax.tree.get(state, entry))
            differ = float(difference / norm)
            theirs = abs(_loss(said) - ours) / abs(ours)
            del seen
            plain_seconds, _, state = stepped(plain, state, jax.device_put(batch))
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e):
                raise
    cells = [
        name,
        f"{1e3 * found:.1f}",
        f"{1e3 * plan.cost.seconds:.1f}",
        f"{plan.cost.seconds / found:.2f}",
        f"{1e3 * read.scheduled:.1f}",
        f"{read.scheduled / found:.2f}",
        _or_dash(1e3 * plain_seconds, ".1f"),
        _or_dash(found / plain_seconds, ".2f"),
        f"{peak / GIB:.2f}",
        f"{plan.memory.peak / GIB:.2f}",
        f"{plan.memory.peak / peak:.2f}",
        f"{usage.peak / GIB:.2f}",
        "-" if plain_usage is None else f"{plain_usage.peak / GIB:.2f}",
        _or_dash(theirs, ".1e"),
        _or_dash(differ, ".1e"),
        ", ".join(p.written for p in plan.passes if p.equations_before != p.equations_after),
    ]
    yield "steps", name, cells


def _or_dash(number: float, how: str) -> str:
    return "-" if np.isnan(number) else format(number, how)


def _loss(said: Any) -> float:
    return float(said["loss"] if isinstance(said, Mapping) else said)


def _decoder(batch: int, seq: int, **sizes: Any) -> Callable[[], Trained]:
    return lambda: of_zoo(decoder(small(batch, 1), small(seq, 64), **({**sizes, **SMALL} if not on_gpu() else sizes)))


SMALL = {"layers": 2, "width": 64, "heads": 2, "kv_heads": 0, "mlp": 128, "vocab": 512}
"""What takes the place of sizes where there is no GPU."""
LLAMA_1B = {"layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "mlp": 8192, "vocab": 128256, "gated": True}
TINY = {"layers": 1, "width": 64, "mlp": 64}
MIXTRAL = LLAMA_1B | {"layers": 4, "heads": 16, "mlp": 4096, "vocab": 32000, "experts": 8}
GPT_MEDIUM = {"layers": 24, "width": 1024, "heads": 16, "mlp": 4096, "vocab": 50304}
PASSES = ("dead_code", "one_hot", "transposed_products", "attention:large", "sum_products", "pad_uneven")
HOST = (*PASSES[:-2], "offload:optimizer", *PASSES[-2:])


def _losses(vocab: int) -> dict[str, tuple[Callable[[], Trained], Mapping[str, Any]]]:
    """A decoder's step with whole logits and with its loss in chunks, layers recomputed in both."""
    sizes = {"layers": 4, "d_model": 2048, "heads": 16, "vocab": vocab, "seq": 2048}
    tiny = {"layers": 2, "d_model": 64, "heads": 2, "vocab": 512, "seq": 64}
    return {
        f"vocabulary {vocab:,}, {name}": (
            lambda: of_decoder(small(8, 1), sizes if on_gpu() else tiny),
            {"passes": passes, "memory_budget": "75GiB"},
        )
        for name, passes in CONTENDERS.items()
    }


def _products(*, float8: bool) -> Callable[[], Trained]:
    return lambda: of_products(small(8192, 32), small(8192, 64), small(32768, 64), 2, float8=float8)


def _pictures(batch: int, layers: int, width: int, mlp: int) -> Callable[[], Trained]:
    def make() -> Trained:
        sizes = {"layers": layers, "width": width, "mlp": mlp} if on_gpu() else TINY
        return of_zoo(vision(small(batch, 2), 224, 16, 1000, heads=16, **sizes))

    return make


def _translator(batch: int, seq: int, layers: int, width: int, mlp: int) -> Callable[[], Trained]:
    def make() -> Trained:
        sizes = {"layers": layers, "width": width, "mlp": mlp} if on_gpu() else TINY
        return of_zoo(translator(small(batch, 1), small(seq, 64), heads=16, vocab=32128, gated=True, **sizes))

    return make


STEPS: Mapping[str, tuple[Callable[[], Trained], Mapping[str, Any]]] = {
    "GPT-3 350M, 8 x 1024": (_decoder(8, 1024, **GPT_MEDIUM), {}),
    **_losses(131072),
    "products of 8192 x 8192 x 32768 in float8": (_products(float8=True), {}),
    "products of 8192 x 8192 x 32768 in bfloat16": (_products(float8=False), {}),
    "Mixtral, 4 layers, rows sorted": (_decoder(4, 4096, **MIXTRAL, drops=False), {}),
    "GPT-3 350M, 8 x 1024, optimizer on the host": (_decoder(8, 1024, **GPT_MEDIUM), {"passes": HOST}),
    "LLaMA-3.2 1B, 4 x 4096, in 30 GiB, alone": (_decoder(4, 4096, **LLAMA_1B), {"memory_budget": "30GiB"}),
    "ViT-L/16, 128": (_pictures(128, 24, 1024, 4096), {}),
    **_losses(262144),
    **_losses(32768),
    "LLaMA-3.2 1B, 4 x 4096, alone": (_decoder(4, 4096, **LLAMA_1B), {}),
    "U-Net, 64": (lambda: of_zoo(unet(small(64, 1), small(64, 16), (128, 256, 512), small(2, 1))), {}),
    "T5-large, 16 x 512": (_translator(16, 512, 24, 1024, 2816), {}),
    "Mixtral, 4 layers, with a capacity": (_decoder(4, 4096, **MIXTRAL), {}),
    "Wide-ResNet-50-2, 128": (
        lambda: of_zoo(wide_resnet(small(128, 1), small(224, 32), small(128, 16), (3, 4, 6, 3))),
        {},
    ),
    "ConvNeXt-T, 128": (lambda: of_zoo(convnext(small(128, 1), small(224, 32), (96, 192, 384, 768), (3, 3, 9, 3))), {}),
}
ALONE = ("whole", "alone")
"""End the names of steps that no plain step stands beside: another case has it, or it needs more memory than there
is."""
Case = Callable[[], Iterator[Row]]
CASES: Mapping[str, Case] = {
    "rates": rates,
    "attention, first": functools.partial(attention, ATTENTIONS[:5]),
    "attention, others": functools.partial(attention, ATTENTIONS[5:]),
    **{
        name: functools.partial(steps, name=name, make=make, options=options, beside=not name.endswith(ALONE))
        for name, (make, options) in STEPS.items()
    },
}
"""By name: each yields rows."""
