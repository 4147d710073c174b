"""A denoising step of a U-Net on latents, with a running mean of its weights: Stable Diffusion's form, without text.

arXiv:2006.11239 and arXiv:2112.10752: noise is added to latents, and the network says which.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn


class Residual(nn.Module):
    """Two convolutions, given the time between them. x: [row, y, x, channel], time: [row, feature]."""

    width: int
    groups: int
    dtype: str

    @nn.compact
    def __call__(self, x, time):
        h = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(x))
        h = nn.Conv(self.width, (3, 3), dtype=self.dtype)(h)
        h = h + nn.Dense(self.width, dtype=self.dtype)(nn.silu(time))[:, None, None]
        h = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(h))
        h = nn.Conv(self.width, (3, 3), dtype=self.dtype)(h)
        return h + (x if x.shape[-1] == self.width else nn.Conv(self.width, (1, 1), dtype=self.dtype)(x))


class Attention(nn.Module):
    """Every place attends to all of its image."""

    heads: int
    groups: int
    dtype: str

    @nn.compact
    def __call__(self, x):
        rows, high, wide, width = x.shape
        h = nn.GroupNorm(self.groups, dtype=self.dtype)(x).reshape(rows, high * wide, width)
        split = (self.heads, width // self.heads)
        query, key, value = (nn.DenseGeneral(split, use_bias=False, dtype=self.dtype)(h) for _ in range(3))
        h = jax.nn.dot_product_attention(query, key, value)
        return x + nn.DenseGeneral(width, axis=(-2, -1), dtype=self.dtype)(h).reshape(x.shape)


class UNet(nn.Module):
    """The noise in latents at a time. x: [row, y, x, channel], time: float [row] -> as x."""

    widths: tuple[int, ...]
    blocks: int
    attends: tuple[bool, ...]
    heads: int
    groups: int
    dtype: str

    @nn.compact
    def __call__(self, x, time):
        angle = time[:, None] * 10000.0 ** (-jnp.arange(self.widths[0] // 2) / (self.widths[0] // 2))
        time = jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], -1).astype(self.dtype)
        time = nn.Dense(4 * self.widths[0], dtype=self.dtype)(
            nn.silu(nn.Dense(4 * self.widths[0], dtype=self.dtype)(time))
        )

        def block(h, level):
            h = Residual(self.widths[level], self.groups, self.dtype)(h, time)
            return Attention(self.heads, self.groups, self.dtype)(h) if self.attends[level] else h

        h = nn.Conv(self.widths[0], (3, 3), dtype=self.dtype)(x.astype(self.dtype))
        passed, last = [h], len(self.widths) - 1
        for level, width in enumerate(self.widths):
            for _ in range(self.blocks):
                passed.append(h := block(h, level))
            if level < last:
                passed.append(h := nn.Conv(width, (3, 3), strides=(2, 2), dtype=self.dtype)(h))
        h = block(h, last)
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.blocks + 1):
                h = block(jnp.concatenate([h, passed.pop()], -1), level)
            if level:
                h = nn.Conv(width, (3, 3), dtype=self.dtype)(jnp.repeat(jnp.repeat(h, 2, axis=1), 2, axis=2))
        h = nn.silu(nn.GroupNorm(self.groups, dtype=self.dtype)(h))
        return nn.Conv(x.shape[-1], (3, 3))(h.astype(jnp.float32))


def make(
    *,
    widths,
    attends,
    channels=4,
    size=8,
    blocks=2,
    heads=4,
    groups=8,
    rate=1e-4,
    decay=0.999,
    eps=1e-8,
    dtype="float32",
):
    """``init(key)`` -> state, ``step(state, batch)`` -> state and metrics.

    Args:
      widths: channels at each size, which halves from one to the next; ``attends``: at which there is attention.
      decay: by which the running mean of the weights keeps what it was.
    """
    model = UNet(tuple(widths), blocks, tuple(attends), heads, groups, dtype)
    optimizer, times = optax.adamw(rate, eps=eps), 1000
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, times))

    def init(key):
        weights = model.init(key, jnp.zeros((1, size, size, channels)), jnp.zeros(1))["params"]
        start = {"params": weights, "ema": weights, "opt_state": optimizer.init(weights)}
        return {**start, "step": jnp.zeros((), jnp.int32), "key": jax.random.key_data(key)}

    def step(state, batch):
        x = batch["latents"]
        keys = jax.random.split(jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"]))
        time = jax.random.randint(keys[0], x.shape[:1], 0, times)
        noise, share = jax.random.normal(keys[1], x.shape), kept[time][:, None, None, None]
        noisy = jnp.sqrt(share) * x + jnp.sqrt(1 - share) * noise

        def loss(weights):
            return jnp.mean((model.apply({"params": weights}, noisy, time.astype(jnp.float32)) - noise) ** 2)

        value, gradients = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        weights = optax.apply_updates(state["params"], updates)
        ema = optax.incremental_update(weights, state["ema"], 1 - decay)
        after = {**state, "params": weights, "ema": ema, "opt_state": opt_state, "step": state["step"] + 1}
        return after, {"loss": value}

    return init, step
