"""What follows pretraining, un-annotated, of a published decoder: LoRA, DPO, PPO's update, a contrastive embedding.

Each gives ``init(key)`` -> state, ``step(state, batch)`` -> state and metrics. ``dtype`` is that of the weights; the
optimizer updates a copy in float32. Weights are new ones here: `autoshard.train.fit` takes a state with those that
`autoshard.weights.open_pretrained` reads.
"""

import jax
import jax.numpy as jnp
import optax
from published import make, settings_of

from autoshard.train import Precision, batch_sizes
from autoshard.weights.adapters import Adapter, adapted, adapter_family
from autoshard.weights.family import family_of
from autoshard.weights.models.decoder import features, projected


def log_odds(logits, tokens):
    """Of each token but the first, after those before it. -> float32 [..., position - 1]."""
    return -optax.softmax_cross_entropy_with_integer_labels(logits[..., :-1, :], tokens[..., 1:])


def trained(dtype, rate, eps):
    """The precision and the optimizer of a recipe."""
    return Precision(params=dtype, master=None if dtype == "float32" else "float32"), optax.adamw(rate, eps=eps)


def lora(*, config, targets, rank=8, scale=2.0, rate=1e-3, eps=1e-8, dtype="float32"):
    """Low-rank adapters of a frozen base (arXiv:2106.09685). Evaluation, and whoever uses the result, merges them.

    Args:
      targets: the weights that are adapted, by their names in ``configs/weights/``.
    """
    new, logits, *_ = make(config=config)
    family, letters = family_of(config), family_of(config).known_sizes(config)
    adapters, own = Precision(), {row.leaf: row.layout.leaf for row in family.rows}
    optimizer = optax.adam(rate, eps=eps)

    def init(key):
        pairs = {}
        for number, row in enumerate(adapter_family(family).rows):
            *parents, name, part = row.leaf.split("/")
            whole = "/".join([*parents, name])
            if whole in targets:
                at = pairs
                for parent in (*parents, name):
                    at = at.setdefault(parent, {})
                shape = [letters[c] if c in own[whole] else rank for c in row.layout.leaf]
                noise = jax.random.normal(jax.random.fold_in(key, number), shape) * config["hidden_size"] ** -0.5
                at[part] = noise if part == "a" else jnp.zeros(shape)
        base = jax.tree.map(lambda x: x.astype(dtype), new(key))
        return {**adapters.init(pairs, optimizer), "base": base}

    def merged(pairs, base):
        return adapted(base, family, Adapter(pairs, scale))

    def loss(pairs, base, batch):
        return optax.softmax_cross_entropy_with_integer_labels(
            logits(merged(pairs, base), batch["inputs"]), batch["targets"]
        ).mean()

    def step(state, batch):
        value, gradients = adapters.value_and_grad(loss)(state, state["base"], batch)
        state, _ = adapters.update(optimizer, state, gradients)
        return state, {"loss": value}

    return init, step, lambda state, batch: {"loss": loss(state["params"], state["base"], batch)}


def dpo(*, config, beta=0.1, rate=1e-3, eps=1e-8, dtype="float32"):
    """Preferences by the odds of two answers against those of a frozen reference (arXiv:2305.18290)."""
    new, logits, *_ = make(config=config)
    precision, optimizer = trained(dtype, rate, eps)

    def init(key):
        weights = new(key)
        return {**precision.init(weights, optimizer), "reference": precision.cast(weights)}

    def odds(weights, batch):
        tokens = batch["tokens"]
        flat = tokens.reshape(-1, tokens.shape[-1])
        found = log_odds(logits(weights, flat), flat).reshape(*tokens.shape[:-1], -1)
        return jnp.sum(found * batch["answer"][..., 1:], -1)  # [row, 2]

    def loss(weights, reference, batch):
        gain = odds(weights, batch) - jax.lax.stop_gradient(odds(reference, batch))
        margin = beta * (gain[:, 0] - gain[:, 1])
        return -jnp.mean(jax.nn.log_sigmoid(margin)), {"margin": jnp.mean(margin)}

    def step(state, batch):
        gradient = precision.value_and_grad(loss, has_aux=True)
        (value, metrics), gradients = gradient(state, state["reference"], batch)
        state, _ = precision.update(optimizer, state, gradients)
        return state, {"loss": value, **metrics}

    return init, step


def ppo(*, config, clip=0.2, discount=1.0, smooth=0.95, spread=0.01, rate=1e-3, eps=1e-8, dtype="float32"):
    """The update of a policy and of its values, of one body, by answers it gave (arXiv:1707.06347)."""
    new, settings = make(config=config)[0], settings_of(config)
    precision, optimizer = trained(dtype, rate, eps)

    def init(key):
        values = jax.random.normal(jax.random.fold_in(key, 1), (config["hidden_size"],)) * config["hidden_size"] ** -1.0
        return precision.init({"policy": new(key), "values": values}, optimizer)

    def advantages(batch):
        """Generalized advantages (arXiv:1506.02438). -> [row, position]."""
        after = jnp.pad(batch["value"][:, 1:], ((0, 0), (0, 1)))
        change = batch["reward"] + discount * after - batch["value"]

        def back(later, now):
            later = now + discount * smooth * later
            return later, later

        return jax.lax.scan(back, jnp.zeros(len(change)), change.T, reverse=True)[1].T

    def loss(weights, batch):
        mask, gain = batch["answer"], advantages(batch)
        returns = gain + batch["value"]

        def mean(x):
            return jnp.sum(x * mask) / jnp.sum(mask)

        gain = (gain - mean(gain)) * jax.lax.rsqrt(mean((gain - mean(gain)) ** 2) + 1e-6)
        x = features(settings, weights["policy"], batch["tokens"])
        logits = projected(settings, weights["policy"], x)
        ratio = jnp.exp(log_odds(logits, batch["tokens"]) - batch["log_odds"])
        policy = -mean(jnp.minimum(ratio * gain, jnp.clip(ratio, 1 - clip, 1 + clip) * gain))
        found = jnp.einsum("bsd,d->bs", x[:, :-1], weights["values"], preferred_element_type=jnp.float32)
        near = batch["value"] + jnp.clip(found - batch["value"], -clip, clip)
        value = mean(jnp.maximum((found - returns) ** 2, (near - returns) ** 2)) / 2
        shares = jax.nn.log_softmax(logits[:, :-1])
        entropy = -mean(jnp.sum(jnp.exp(shares) * shares, -1))
        return policy + value / 10 - spread * entropy, {"policy": policy, "value": value, "entropy": entropy}

    def step(state, batch):
        (value, metrics), gradients = precision.value_and_grad(loss, has_aux=True)(state, batch)
        state, _ = precision.update(optimizer, state, gradients)
        return state, {"loss": value, **metrics}

    return init, step


def embedding(*, config, chunks, temperature=0.05, rate=1e-3, eps=1e-8, dtype="float32"):
    """Questions near their passages and far from all others of the batch, which is embedded in chunks: gradients for
    the embeddings are kept, and each chunk is computed again with those (arXiv:2101.06983).
    """
    new, settings = make(config=config)[0], settings_of(config)
    precision, optimizer = trained(dtype, rate, eps)

    def embed(weights, tokens):
        """tokens: [row, 2, position] -> float32 [row, 2, width], of length one."""
        x = features(settings, precision.cast(weights), tokens.reshape(-1, tokens.shape[-1])).astype(jnp.float32)
        x = x.mean(1)
        return (x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)).reshape(*tokens.shape[:2], -1)

    def loss(found):
        """found: [chunk, row, 2, width]."""
        rows = found.reshape(-1, *found.shape[2:])
        scores = rows[:, 0] @ rows[:, 1].T / temperature
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores))).mean()

    def step(state, batch):
        tokens, weights = batch["tokens"], state["params"]
        rows = batch_sizes(len(tokens), accumulation=chunks, shards=1).micro
        parts = tokens.reshape(rows, chunks, *tokens.shape[1:]).swapaxes(0, 1)  # rows of every device in each
        value, wanted = jax.value_and_grad(loss)(jax.lax.map(lambda part: embed(weights, part), parts))

        def again(total, part_and_wanted):
            part, gradient = part_and_wanted
            (more,) = jax.vjp(lambda w: embed(w, part), weights)[1](gradient)
            return jax.tree.map(lambda t, m: t + m.astype(t.dtype), total, more), None

        zeros = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), weights)
        gradients, _ = jax.lax.scan(again, zeros, (parts, wanted))
        state, _ = precision.update(optimizer, state, gradients)
        return state, {"loss": value}

    return lambda key: precision.init(new(key), optimizer), step
