"""Plans of small convolutional networks: by images, as the TPU compiler's times say, not by channels or rows."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard

V5E, V6E = (autoshard.MeshConfig(axes={"data": 4, "model": 4}, tpu=f"{chip}:4x4") for chip in ("v5e", "v6e"))
BARE = replace(V6E.mesh(), hardware=replace(V6E.mesh().hardware, hidden_collectives=0.0))


class Tutorial(nnx.Module):
    """Two convolutions with batch norm and pooling, and two linear layers, as in Flax's tutorial."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv1, self.norm1 = nnx.Conv(1, 32, (3, 3), rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.conv2, self.norm2 = nnx.Conv(32, 64, (3, 3), rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.linear1, self.linear2 = nnx.Linear(3136, 256, rngs=rngs), nnx.Linear(256, 10, rngs=rngs)

    def __call__(self, x):
        pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        x = pool(nnx.relu(self.norm1(self.conv1(x))))
        x = pool(nnx.relu(self.norm2(self.conv2(x))))
        return self.linear2(nnx.relu(self.linear1(x.reshape(x.shape[0], -1))))


def train(model, optimizer, images, labels):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


@pytest.mark.parametrize("batch", [256, 1024])
def test_convolutions_are_split_by_images(batch):
    """Two channels a chip fill a tile of 128 lanes no more than 32 do, and all statistics of a batch norm cost one
    latency: splitting channels saves nothing. The compiler takes 413 us for the plan by images at a batch of 1,024."""
    model = Tutorial()
    images, labels = jax.ShapeDtypeStruct((batch, 28, 28, 1), jnp.float32), jax.ShapeDtypeStruct((batch,), jnp.int32)
    step = autoshard.jit(train, mesh=V5E)
    plan = step.plan(model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param), images, labels)
    found = {str(p.spec) for p in (*plan.inputs, *plan.intermediates) if len(p.spec.dims) == 4 and p.spec.axes}
    assert found == {"[data+model, _, _, _]"}


def test_cast_weights_are_gathered_once_where_convolutions_read_them_twice():
    """Forward reads the cast, backward its reversal: two values. A layout that is pinned is no faster than the best. On
    a chip of which nothing is known to be hidden: else to gather a second time may cost less than to reverse all."""

    def step(state, images, labels):
        def loss(weights):
            x = images
            for w in weights:
                kernel = w.astype(jnp.bfloat16)
                x = jax.nn.relu(
                    jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
                )
            return jnp.square(x.mean((1, 2)).astype(jnp.float32) - labels).mean()

        weights, momentum = state
        grads = jax.grad(loss)(weights)
        momentum = [0.9 * m + g for m, g in zip(momentum, grads, strict=True)]
        return [w - 0.1 * m for w, m in zip(weights, momentum, strict=True)], momentum

    layers = 6
    weights = [jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.float32)] * layers
    arguments = (weights, weights), jax.ShapeDtypeStruct((64, 28, 28, 2048), jnp.bfloat16)
    arguments += (jax.ShapeDtypeStruct((64, 2048), jnp.float32),)
    free = autoshard.jit(step, mesh=BARE, donate_argnums=0).plan(*arguments)
    stored = [P(None, None, ("data", "model"))] * layers
    pins = ((stored, stored), None, None)
    pinned = autoshard.jit(step, mesh=BARE, donate_argnums=0, in_shardings=pins).plan(*arguments)
    assert free.cost.seconds <= pinned.cost.seconds * (1 + 1e-6)
    gathered = [c for c in pinned.cost.collectives if c.kind == "all-gather" and c.bytes == 2048 * 2048 * 2]
    assert sum(c.count for c in gathered) == layers
