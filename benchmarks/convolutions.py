"""Convolutional models as people write them; the conventions are those of `benchmarks.zoo`."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from benchmarks.zoo import DTYPE, Marks, Model, Named, Tree, classified, image_batch

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def _kernel(size: int, inside: int, outside: int) -> Named:
    return Named((size, size, inside, outside), (None, None, "embed", "mlp"))


def _convolved(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1) -> jax.Array:
    kernel = kernel.astype(DTYPE)
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=_LAYOUT, feature_group_count=groups
    )


def _conv(x: jax.Array, kernel: jax.Array, at: Marks, stride: int = 1) -> jax.Array:
    x = _convolved(x, kernel, stride)
    return at(x, "batch", None, None, "mlp")


def _group_norm(x: jax.Array, scale: jax.Array, groups: int = 32) -> jax.Array:
    wide = x.astype(jnp.float32).reshape(*x.shape[:-1], groups, -1)
    wide = wide - wide.mean((1, 2, 4), keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean((1, 2, 4), keepdims=True) + 1e-5)
    return (wide.reshape(x.shape) * scale).astype(DTYPE)


def _batch_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean((0, 1, 2))
    return (wide * jax.lax.rsqrt((wide * wide).mean((0, 1, 2)) + 1e-5) * scale).astype(DTYPE)


def wide_resnet(batch: int, size: int, width: int, blocks: tuple[int, ...], classes: int = 1000) -> Model:
    """Bottleneck blocks with batch norm; widths double from stage to stage, each block gives four times its own."""
    params: dict[str, Any] = {"stem": _kernel(7, 3, width), "stages": []}
    inside, scale = width, lambda n: Named((n,), ("mlp",))
    for stage, count in enumerate(blocks):
        inner, outer, made = width * 2**stage, 4 * width * 2**stage, []
        for i in range(count):
            block = {
                "first": _kernel(1, inside, inner), "second": _kernel(3, inner, inner),
                "third": _kernel(1, inner, outer), "norms": [scale(inner), scale(inner), scale(outer)],
            }  # fmt: skip
            made.append(block | ({} if i else {"skip": _kernel(1, inside, outer)}))
            inside = outer
        params["stages"].append(made)
    params["head"] = Named((inside, classes), ("embed", "vocab"))

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        x = _conv(batch["images"], params["stem"], at, 2)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME").astype(DTYPE)
        for stage, made in enumerate(params["stages"]):
            for i, p in enumerate(made):
                stride = 2 if stage and not i else 1
                y = jax.nn.relu(_batch_norm(_conv(x, p["first"], at), p["norms"][0]))
                y = jax.nn.relu(_batch_norm(_conv(y, p["second"], at, stride), p["norms"][1]))
                y = _batch_norm(_conv(y, p["third"], at), p["norms"][2])
                x = jax.nn.relu(y + (_conv(x, p["skip"], at, stride) if "skip" in p else x))
        return classified(x.mean((1, 2)), params["head"], batch["labels"], at)

    return Model(params, image_batch(batch, size, 3) | {"labels": Named((batch,), ("batch",), jnp.int32)}, loss)


@dataclass(frozen=True)
class _Unet:
    """Residual blocks at halved sizes, down and up again, with skips across."""

    widths: tuple[int, ...]
    blocks: int
    channels: int
    norm: Named = field(default=Named((1,), ("mlp",)))

    def params(self) -> Tree:
        first, last = self.widths[0], self.channels
        down: list[Tree] = []
        up: list[Tree] = []
        inside = first
        for width in self.widths:
            down.append([self._block(inside if not i else width, width) for i in range(self.blocks)])
            inside = width
        for width in reversed(self.widths):
            up.append([self._block(inside + width if not i else width, width) for i in range(self.blocks)])
            inside = width
        return {"in": _kernel(3, self.channels, first), "down": down, "up": up, "out": _kernel(3, first, last)}

    def _block(self, inside: int, outside: int) -> Mapping[str, Any]:
        return {
            "norms": [self.norm._replace(shape=(inside,)), self.norm._replace(shape=(outside,))],
            "first": _kernel(3, inside, outside),
            "second": _kernel(3, outside, outside),
        } | ({} if inside == outside else {"skip": _kernel(1, inside, outside)})

    def run(self, params: Tree, x: jax.Array, at: Marks) -> jax.Array:
        def block(x: jax.Array, p: Tree) -> jax.Array:
            y = _conv(jax.nn.silu(_group_norm(x, p["norms"][0])), p["first"], at)
            y = _conv(jax.nn.silu(_group_norm(y, p["norms"][1])), p["second"], at)
            return y + (_conv(x, p["skip"], at) if "skip" in p else x)

        x, kept = _conv(x, params["in"], at), []
        for level, blocks in enumerate(params["down"]):
            if level:
                x = x.reshape(x.shape[0], x.shape[1] // 2, 2, x.shape[2] // 2, 2, x.shape[3]).mean((2, 4))
            for p in blocks:
                x = block(x, p)
            kept.append(x)
        for level, blocks in enumerate(params["up"]):
            if level:
                x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = jnp.concatenate([x, kept.pop()], axis=-1)
            for p in blocks:
                x = block(x, p)
        return _conv(x, params["out"], at)


def unet(batch: int, size: int, widths: tuple[int, ...], blocks: int, channels: int = 4) -> Model:
    """A U-Net that is trained to tell noise from image: [B, size, size, channels] -> the same."""
    net = _Unet(widths, blocks, channels)

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        predicted = net.run(params, batch["images"] + batch["noise"], at).astype(jnp.float32)
        return ((predicted - batch["noise"]) ** 2).mean()

    images = image_batch(batch, size, channels)["images"]
    return Model(net.params(), {"images": images, "noise": images}, loss)


def segmenter(batch: int, size: int, widths: tuple[int, ...], classes: int = 2) -> Model:
    """The U-Net of Ronneberger, Fischer and Brox (2015), padded and with batch norm: two convolutions a level, maximum
    pooling down, transposed convolutions up, a class for each pixel."""

    def double(inside: int, outside: int) -> Tree:
        norm = Named((outside,), ("mlp",))
        return {"first": _kernel(3, inside, outside), "second": _kernel(3, outside, outside), "norms": [norm, norm]}

    params: dict[str, Any] = {
        "down": [double(inside, width) for inside, width in zip((3, *widths), widths, strict=False)],
        "across": [_kernel(2, wide, width) for width, wide in itertools.pairwise(widths)],
        "up": [double(2 * width, width) for width in widths[:-1]],
        "out": _kernel(1, widths[0], classes),
    }

    def run(x: jax.Array, p: Tree, at: Marks) -> jax.Array:
        for kernel, norm in zip((p["first"], p["second"]), p["norms"], strict=True):
            x = jax.nn.relu(_batch_norm(_conv(x, kernel, at), norm))
        return x

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        x, kept = batch["images"], list[jax.Array]()
        for level, p in enumerate(params["down"]):
            if level:
                kept.append(x)
                x = nnx.max_pool(x, (2, 2), (2, 2))
            x = run(x, p, at)
        for p, kernel in zip(reversed(params["up"]), reversed(params["across"]), strict=True):
            x = jax.lax.conv_transpose(x, kernel.astype(DTYPE), (2, 2), "SAME", dimension_numbers=_LAYOUT)
            x = run(jnp.concatenate([kept.pop(), at(x, "batch", None, None, "mlp")], axis=-1), p, at)
        logits = _conv(x, params["out"], at).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    labels = Named((batch, size, size), ("batch", None, None), jnp.int32)
    return Model(params, image_batch(batch, size, 3) | {"labels": labels}, loss)


def convnext(batch: int, size: int, widths: tuple[int, ...], blocks: tuple[int, ...], classes: int = 1000) -> Model:
    """ConvNeXt (Liu et al., 2022): depthwise convolutions of 7x7 and MLPs over channels, with layer norm."""

    def norm(width: int) -> Named:
        return Named((width,), ("embed",))

    def block(width: int) -> Tree:
        return {
            "depthwise": Named((7, 7, 1, width), (None, None, None, "embed")), "norm": norm(width),
            "up": Named((width, 4 * width), ("embed", "mlp")), "down": Named((4 * width, width), ("mlp", "embed")),
            "scale": norm(width),
        }  # fmt: skip

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6) * scale).astype(DTYPE)

    params: dict[str, Any] = {
        "stem": _kernel(4, 3, widths[0]),
        "stages": [[block(width)] * count for width, count in zip(widths, blocks, strict=True)],
        "shrink": [
            {"norm": norm(inside), "kernel": _kernel(2, inside, outside)}
            for inside, outside in itertools.pairwise(widths)
        ],
        "norm": norm(widths[-1]),
        "head": Named((widths[-1], classes), ("embed", "vocab")),
    }

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        x = at(_convolved(batch["images"], params["stem"], 4), "batch", None, None, None)
        for stage, made in enumerate(params["stages"]):
            if stage:
                p = params["shrink"][stage - 1]
                x = at(_convolved(normed(x, p["norm"]), p["kernel"], 2), "batch", None, None, None)
            for p in made:
                y = _convolved(x, p["depthwise"], groups=x.shape[-1])
                y = jax.nn.gelu(at(normed(y, p["norm"]) @ p["up"].astype(DTYPE), "batch", None, None, "mlp"))
                y = at(y @ p["down"].astype(DTYPE), "batch", None, None, None)
                x = x + y * p["scale"].astype(DTYPE)
        return classified(normed(x.mean((1, 2)), params["norm"]), params["head"], batch["labels"], at)

    return Model(params, image_batch(batch, size, 3) | {"labels": Named((batch,), ("batch",), jnp.int32)}, loss)


class _Cnn(nnx.Module):
    def __init__(self, widths: tuple[int, ...], classes: int) -> None:
        rngs = nnx.Rngs(0)
        pairs = list(zip((3, *widths), widths, strict=False))
        strides = [2 if i else 1 for i in range(len(widths))]
        self.convs = nnx.List([nnx.Conv(*pair, (3, 3), n, rngs=rngs) for pair, n in zip(pairs, strides, strict=True)])
        self.norms = nnx.List([nnx.BatchNorm(width, rngs=rngs) for width in widths])
        self.head = nnx.Linear(widths[-1], classes, rngs=rngs)

    def __call__(self, x: jax.Array, at: Marks) -> jax.Array:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.relu(norm(at(conv(x), "batch", None, None, "mlp")))
        return at(self.head(x.mean((1, 2))), "batch", "vocab")


def cnn(batch: int, size: int, widths: tuple[int, ...], classes: int = 10) -> Model:
    """Convolutions with batch norm in Flax NNX, in float32, halving the image from the second on. The running averages
    are not kept."""
    graph, params, stats = nnx.split(nnx.eval_shape(lambda: _Cnn(widths, classes)), nnx.Param, ...)
    names = {4: (None, None, "embed", "mlp"), 2: ("embed", "vocab"), 1: ("mlp",)}
    named = jax.tree.map(lambda p: Named(p.shape, names[p.ndim]), nnx.to_pure_dict(params))

    def loss(params: Tree, batch: Tree, at: Marks) -> jax.Array:
        ran = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
        net = nnx.merge(graph, nnx.State(params), ran)
        logits = net(batch["images"], at)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    batched = {k: x._replace(dtype=jnp.float32) for k, x in image_batch(batch, size, 3).items()}
    return Model(named, batched | {"labels": Named((batch,), ("batch",), jnp.int32)}, loss)
