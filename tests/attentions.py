"""Attentions in the forms in which models write them, and what the tests of their pass and rule have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

from autoshard.cost.node_strategy import NodeStrategy, local_algorithm, node_strategy
from autoshard.ir.graph import OpKind
from autoshard.ir.rule import LocalAlgorithm
from autoshard.machine.mesh import Link, LogicalMesh
from autoshard.passes import PASSES
from autoshard.transforms.attention_kernels import kernel_flops_at_peak
from autoshard.transforms.attention_op import AttentionConfig, ScoreOp, attention_backward_p, attention_p
from autoshard.transforms.pipeline import Pipeline, parse_passes
from tests.programs import CHIP, graph, program

HASTY = replace(CHIP, links={"link": Link("link", 1e3, 0.0)}, overhead=0.0, flops={"float32": 1e6, "bfloat16": 1e6})
"""Bytes and operations are dear, so that the ring pays at any size."""
B, S, H, K, W = 4, 16, 4, 2, 8


def mesh(**axes: int) -> LogicalMesh:
    return LogicalMesh(tuple(axes), tuple(axes.values()), HASTY)


LAYOUTS = {
    "sequence": (mesh(s=8), P(None, "s")),
    "sequence and batch": (mesh(b=2, s=4), P("b", "s")),
    "sequence and heads": (mesh(h=2, s=4), P(None, "s", "h")),
    "two axes": (mesh(x=2, y=4), P(None, ("x", "y"))),
    "two axes in another order": (mesh(x=2, y=4), P(None, ("y", "x"))),
    "batch and two axes": (mesh(x=2, b=2, y=2), P("b", ("y", "x"))),
    "nothing": (mesh(s=8), P()),
}


def normal(seed: int, *shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operands(dtype: Any = "float32", heads: int = H, seq: int = S, batch: int = B) -> tuple[Any, ...]:
    """Query, key and value, of as many heads as each has."""
    return tuple(normal(i, batch, seq, n, W, dtype=dtype) for i, n in enumerate((H, heads, heads)))


def scores(q, k):
    return jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(W)


def mix(p, v):
    return jnp.einsum("bhqk,bkhe->bqhe", p, v)


def causal(s):
    return jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e9)


PADDED = np.arange(S) < np.array([S, S - 3, 5, 0])[:, None]
"""Which keys there are, by sequence; of the last none, which makes its softmax even."""
BIAS = normal(9, H, S, S)


def padding(q):
    """The mask of keys for the batch of ``q``, from the last sequence on."""
    return PADDED[-q.shape[0] :, None, None]


def by_hand(q, k, v):
    e = jnp.exp((s := causal(scores(q, k))) - lax.stop_gradient(s.max(-1, keepdims=True)))
    return mix(e / e.sum(-1, keepdims=True), v)


def grouped(q, k, v):
    q = q.reshape(*q.shape[:2], K, H // K, W)
    at = jnp.arange(q.shape[1])
    s = jnp.einsum("bqkge,btke->bkgqt", q, k, preferred_element_type=jnp.float32) * W**-0.5
    p = jax.nn.softmax(jnp.where(at[:, None] >= at, s, jnp.finfo(s.dtype).min), -1).astype(v.dtype)
    return jnp.einsum("bkgqt,btke->bqkge", p, v).reshape(*q.shape[:2], H, W)


def windowed(q, k, v):
    n = q.shape[1]
    i, j = (lax.broadcasted_iota("int32", (n, n), d) for d in (0, 1))
    return mix(jax.nn.softmax(jnp.where((j <= i) & (i - j < 5), scores(q, k), -jnp.inf), -1), v)


FORMS: dict[str, tuple[Callable[..., Any], int, str]] = {
    "full": (lambda q, k, v: mix(jax.nn.softmax(scores(q, k), -1), v), H, "scale"),
    "causal": (lambda q, k, v: mix(jax.nn.softmax(causal(scores(q, k)), -1), v), H, "scale band"),
    "by hand": (by_hand, H, "scale band"),
    "upside down": (
        lambda q, k, v: jnp.swapaxes(
            jnp.einsum("bkhe,bhkq->bhqe", v, jax.nn.softmax(jnp.einsum("bkhe,bqhe->bhkq", k, q), 2)), 1, 2
        ),
        H,
        "",
    ),
    "padded": (
        lambda q, k, v: mix(jax.nn.softmax(jnp.where(padding(q), scores(q, k), -1e9), -1), v),
        H,
        "scale mask",
    ),
    "padded and causal": (
        lambda q, k, v: mix(jax.nn.softmax(jnp.where(padding(q), causal(scores(q, k)), -1e9), -1), v),
        H,
        "scale band mask",
    ),
    "masked out": (
        lambda q, k, v: mix(jax.nn.softmax(jnp.where(~padding(q), -1e30, scores(q, k)), -1), v),
        H,
        "scale mask",
    ),
    "biased": (lambda q, k, v: mix(jax.nn.softmax(scores(q, k) + BIAS, -1), v), H, "scale bias"),
    "window": (windowed, H, "scale band"),
    "groups": (grouped, K, "scale band"),
    "soft cap": (
        lambda q, k, v: mix(jax.nn.softmax(causal(jnp.tanh(scores(q, k) / 2) * 2), -1), v),
        H,
        "scale scale tanh scale band",
    ),
    "jax.nn": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), H, "scale band"),
    "jax.nn window": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0)),
        H,
        "scale band",
    ),
    "jax.nn groups": (lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True), K, "scale band"),
    "jax.nn mask and bias": (
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, BIAS[None], padding(q)),
        H,
        "scale bias mask",
    ),
    "one key head": (
        lambda q, k, v: jnp.einsum(
            "bhqk,bke->bqhe", jax.nn.softmax(jnp.einsum("bqhe,bke->bhqk", q, k[:, :, 0]), -1), v[:, :, 0]
        ),
        H,
        "",
    ),
    "one sequence": (lambda q, k, v: jax.nn.softmax(q[0, :, 0] @ k[0, :, 0].T, -1) @ v[0, :, 0], H, ""),
}
every_form = pytest.mark.parametrize("name", FORMS)


def trained(fun):
    """The value and gradients, with a cotangent that is no constant."""

    def loss(*args):
        out = fun(*args)
        return (jnp.sin(out.astype(jnp.promote_types(out.dtype, "float32"))) * 3).sum(), out

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def rewritten(fun, args, passes=("attention",)):
    """The program after the passes, and the attention's report."""
    done, reports = Pipeline(parse_passes(passes, PASSES)).run(program(fun, args, mesh(s=8)))
    return done, next(r.change for r in reports if r.name == "attention")


def causal_kind(on: LogicalMesh, length: int, heads: int = 32, key_heads: int = 8, backward: bool = False) -> OpKind:
    """A causal attention of one sequence in bfloat16, heads 128 wide, by the kernel that the chips of ``on`` have."""
    rates, sizes = on.hardware.attention, {"b": 1, "q": length, "k": length, "h": key_heads, "g": heads // key_heads}
    sizes |= {"d": 128, "e": 128}
    dims = ("bqhgd", "bkhd", "bkhe")
    masks = (ScoreOp("scale", 128**-0.5), ScoreOp("band", -1e30, high=0))
    config = AttentionConfig(
        *dims, "bqhge", "bhgq", "q", "k", masks, (), "float32", "float32", "bfloat16", "bfloat16",
        cotangent_dims="bqhge", grad_dims=dims, grad_dtypes=("bfloat16",) * 3, kernel=rates.kernel if rates else "",
    )  # fmt: skip
    rows = (*dims, "bqhge", "bhgq", "bhgq", "bqhge") if backward else dims
    args = [jax.ShapeDtypeStruct([sizes[c] for c in x], "float32" if x == "bhgq" else "bfloat16") for x in rows]
    flops = config.flops(*args[:3], backward=backward)
    if rates:
        share = rates.backward if backward else rates.forward
        flops = kernel_flops_at_peak(config, *args[:3], share, backward=backward) * on.hardware.product_efficiency
    op = attention_backward_p if backward else attention_p
    built = graph(lambda *xs: op.bind(*xs, config=config, flops=flops), args, on)
    return next(n.kind for n in built.nodes if n.kind.flops)


def over_sequence(kind: OpKind, on: LogicalMesh) -> tuple[NodeStrategy, list[LocalAlgorithm], LocalAlgorithm]:
    """How an attention runs where all axes of ``on`` split its sequence: all ways that there are, and the one taken."""
    (factor,) = (f for f, k in kind.rule.kinds if k == "local")
    found = node_strategy(kind, {factor: on.axis_names}, on)
    specs = (*found.in_specs, *found.out_specs)
    sizes = [int(n / s.num_shards(on.shape)) for n, s in zip(kind.bytes, specs, strict=True)]
    taken = local_algorithm(kind, found.in_specs, found.out_specs, on)
    assert kind.rule.local is not None
    assert kind.rule.local.algorithms is not None
    assert taken is not None
    return found, list(kind.rule.local.algorithms(on.size, sizes)), taken


def way(algorithm: LocalAlgorithm) -> str:
    """The name of the function that an algorithm runs."""
    return algorithm.fun.func.__name__


def seconds_by(kind: OpKind, on: LogicalMesh, algorithm: LocalAlgorithm) -> float:
    """Predicted seconds where ``algorithm`` is the only one there is."""
    assert kind.rule.local is not None
    only = replace(kind.rule.local, algorithms=lambda *_: (algorithm,))
    return over_sequence(replace(kind, rule=replace(kind.rule, local=only)), on)[0].seconds(on)


def close(got, want, rtol=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = (np.asarray(a, np.promote_types(a.dtype, "float32")) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * max(1.0, np.abs(y).max()))
