"""A model of any kind as two pure functions: Flax NNX and Linen modules, and plain functions over any pytree.

What a model is called with is the batch's ``inputs``, where the batch is a dictionary that has them, and by name what
else of it the module has parameters for, such as ``segment_ids``; the first of a tuple or list; else the batch itself.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT

from autoshard.call_errors import hinted, noted
from autoshard.errors import ConfigError, ModeWarning
from autoshard.runtime.nnx import has_modules
from autoshard.train.calls import Call
from autoshard.train.models.decoder import Decoder, Metrics, ModelConfig, Steps
from autoshard.train.models.modes import NAMES, SWITCHED, mode_options, silent_dropouts, unswitched
from autoshard.train.precision import Precision
from autoshard.train.sources import Tree
from autoshard.train.stepping import uniform


@dataclass(frozen=True)
class Model:
    """``init`` makes the trained parameters, and what else the model keeps, such as batch statistics; ``apply`` gives
    the outputs for a batch, and what it keeps afterwards. Its key is None in evaluation.
    """

    init: Callable[[jax.Array], tuple[Tree, Tree]]
    apply: Callable[[Tree, Tree, Tree, jax.Array | None], tuple[Any, Tree]]
    cached: tuple[Callable[..., Any], Callable[..., Any]] | None = None
    """What `autoshard.generate` takes, where the model decodes with a cache."""
    silent: tuple[str, ...] = ()
    """Its modules that have a rate of dropout, and drop nothing in training."""
    entry: str = ""
    """What errors of its gradients are noted with: where the configuration names it."""


def inputs_of(batch: Tree) -> Any:
    """What of ``batch`` a model is called with."""
    if isinstance(batch, Mapping):
        return batch.get("inputs", batch)
    return batch[0] if isinstance(batch, tuple | list) else batch


def _whole_batch(batch: Tree) -> str:
    """That a model is called with all of ``batch``, and how it is called with less; "" where it is not."""
    if not isinstance(batch, Mapping) or "inputs" in batch:
        return ""
    keys = ", ".join(map(repr, [*batch][:8])) + (", ..." if len(batch) > 8 else "")
    return (
        f"the model is called with the whole batch, a dictionary of {keys}, as it has no 'inputs'; name what a model "
        "takes 'inputs' in the batch"
    )


def _named(call: Callable[..., Any], batch: Tree) -> dict[str, Any]:
    """What of ``batch`` beside its inputs ``call`` has parameters for."""
    if not isinstance(batch, Mapping) or "inputs" not in batch:
        return {}
    names = list(inspect.signature(call).parameters)[2:]  # after self and the inputs
    return {name: x for name, x in batch.items() if name in names}


def targets_of(batch: Tree) -> Any:
    """The targets in ``batch``: ``targets``, ``labels`` or the second of a pair; None where there are none."""
    if isinstance(batch, Mapping):
        return batch.get("targets", batch.get("labels"))
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def own_model(call: Call, batch: Tree) -> Model:
    """The model that ``call`` makes, for batches of the abstract values ``batch``.

    Raises:
      ConfigError: it makes no model.
    """
    make = call.resolved()

    def made(key: jax.Array) -> Any:
        return make(rngs=nnx.Rngs(key), key=key)

    found: Any = None

    def look() -> Any:
        nonlocal found
        found = made(jax.random.key(0))
        return 0

    jax.eval_shape(look)
    whole = hinted(_whole_batch(batch))
    if isinstance(found, nnx.Module):
        model, takes, switched = _nnx_model(made), type(found).__call__, SWITCHED
    elif isinstance(found, linen.Module):
        model, takes, switched = call.named(whole(_linen_model))(found, batch), type(found).__call__, SWITCHED
    elif isinstance(found, tuple) and len(found) in (2, 4) and all(map(callable, found)):
        model, takes, switched = _plain_model(*found), found[1], ()
    else:
        raise ConfigError(
            f"{call.at}{call.call} gives a {type(found).__name__}; a model is a Flax NNX or Linen module, or a pair of "
            "functions: init(key) -> params, and apply(params, inputs) -> outputs; two more, where it decodes with a "
            "cache: step(params, cache, tokens, position) -> logits, cache, and new_cache(params, rows, length)"
        )
    entry, kept = f"{call.at}{call.call}", unswitched(takes, batch if isinstance(batch, Mapping) else (), switched)
    if kept or model.silent:
        found = f"keeps {', '.join(kept)}" if kept else f"drops nothing in {', '.join(model.silent[:5])}"
        warnings.warn(
            f"{entry} {found} while it trains. What says whether a Flax module trains is a parameter of its __call__ "
            f"with one of the names {NAMES}",
            ModeWarning,
            stacklevel=2,
        )
    return replace(model, init=call.named(model.init), apply=call.named(whole(model.apply)), entry=entry)


def _nnx_model(make: Callable[[jax.Array], Any]) -> Model:
    made = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, params_like, rest_like = nnx.split(made, nnx.Param, ...)
    takes = type(made).__call__
    modes = mode_options(takes)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        _, params, rest = nnx.split(make(key), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(params: Tree, rest: Tree, batch: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
        model = nnx.merge(graph, _filled(params_like, params), _filled(rest_like, rest))
        model.eval() if key is None else model.train()
        outputs = model(inputs_of(batch), **_named(takes, batch), **modes(key is not None))
        _, _, after = nnx.split(model, nnx.Param, ...)
        return outputs, nnx.to_pure_dict(after)

    return Model(init, apply)


def _filled(like: Any, values: Tree) -> Any:
    """The NNX state of the structure ``like`` with these values, of which a variable may hold a tree."""
    return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))


def decoder_model(config: ModelConfig) -> Model:
    """The decoder that ships, for an optimizer or a loss of one's own."""
    return _nnx_model(lambda key: Decoder(config, nnx.Rngs(params=key)))


def _linen_model(module: linen.Module, batch: Tree) -> Model:
    takes = type(module).__call__
    modes = mode_options(takes)

    def variables_of(key: jax.Array, training: bool) -> dict[str, Any]:
        example = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), inputs_of(batch))
        named = {name: jnp.zeros(x.shape, x.dtype) for name, x in _named(takes, batch).items()}
        keys: dict[str, Any] = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        return dict(module.init(keys, example, **named, **modes(training)))

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        variables = variables_of(key, training=False)
        return variables.pop("params", {}), variables

    def apply(params: Tree, rest: Tree, batch: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
        variables = {"params": params, **rest}
        if key is None:
            return module.apply(variables, inputs_of(batch), **_named(takes, batch), **modes(False)), rest
        given: dict[str, Any] = {"rngs": {"dropout": key}, "mutable": list(rest)}
        outputs, after = module.apply(variables, inputs_of(batch), **_named(takes, batch), **modes(True), **given)
        return outputs, dict(cast("Mapping[str, Any]", after))

    with silent_dropouts() as silent:
        jax.eval_shape(lambda key: variables_of(key, training=True), jax.random.key(0))
    return Model(init, apply, silent=tuple(dict.fromkeys(silent)))


def _plain_model(init: Callable[..., Tree], apply: Callable[..., Any], *cached: Callable[..., Any]) -> Model:
    def outputs(params: Tree, rest: Tree, batch: Tree, key: jax.Array | None) -> tuple[Any, Tree]:
        return apply(params, inputs_of(batch)), rest

    return Model(lambda key: (init(key), {}), outputs, (cached[0], cached[1]) if cached else None)


def cross_entropy(outputs: Any, batch: Tree, *, at: str = "") -> jax.Array:
    """The mean cross-entropy of logits [..., classes] and integer targets [...], in nats; the default loss. Where the
    batch has ``weights``, which broadcast to the targets, it is their weighted mean: of what is true, not of padding.

    Args:
      at: where the model's entry stands, before what is said of it.

    Raises:
      ConfigError: the outputs are no array, or the batch has no integer targets of that shape.
    """
    if not isinstance(outputs, jax.Array):
        raise ConfigError(
            f"{at}without a `loss` the model's outputs are logits, an array; they are a {type(outputs).__name__}. "
            "Name a loss: `loss: {call: module:name}`"
        )
    targets = targets_of(batch)
    found = "has none" if targets is None else f"has {targets.dtype}{list(targets.shape)}"
    if targets is None or not jnp.issubdtype(targets.dtype, jnp.integer) or targets.shape != outputs.shape[:-1]:
        raise ConfigError(
            f"{at}without a `loss` the model's outputs, {list(outputs.shape)}, are logits, and the batch has integer "
            f"`targets` of {list(outputs.shape[:-1])}; it {found}. Name a loss: `loss: {{call: module:name}}`"
        )
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
    weights = batch.get("weights") if isinstance(batch, Mapping) else None
    if weights is None:
        return jnp.mean(losses)
    weights = jnp.broadcast_to(
        jnp.reshape(weights, (*weights.shape, *(1,) * (losses.ndim - weights.ndim))), losses.shape
    )
    total = jnp.sum(weights)
    return jnp.sum(losses * weights) / jnp.where(total > 0, total, 1)


def own_loss(call: Call) -> Callable[[Any, Tree], tuple[jax.Array, Metrics]]:
    """The loss that ``call`` names, of outputs and batch, with its further metrics, none where it has none.

    Raises:
      ConfigError: when it is called, where it gives no scalar float, alone or with metrics by name.
    """
    compute = call.resolved()

    def loss(outputs: Any, batch: Tree) -> tuple[jax.Array, Metrics]:
        found: Any = compute(outputs, batch)
        pair: tuple[Any, Any] = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        value, metrics = pair
        if not _is_array(value) or jnp.shape(value) or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
            raise ConfigError(
                f"{call.at}{call.call} gives {_kind(value)}; a loss is one float, alone or as (loss, metrics by name): "
                "take the mean of an array"
            )
        if not isinstance(metrics, Mapping):
            raise ConfigError(
                f"{call.at}{call.call} gives a loss and {_kind(metrics)}; what follows a loss is a dictionary of "
                'metrics by name, as (loss, {"accuracy": accuracy})'
            )
        return jnp.asarray(value), metrics

    return loss


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | float | int)


def _kind(value: Any) -> str:
    """What ``value`` is, in words: an array by its dtype and shape."""
    if _is_array(value):
        return f"{jnp.result_type(value)}{[*jnp.shape(value)]}"
    return f"a {type(value).__name__}"


def make_own_steps(
    model: Model,
    optimizer: optax.GradientTransformation,
    loss: Callable[[Any, Tree], jax.Array | tuple[jax.Array, Metrics]],
    rate: optax.Schedule | None,
    precision: Precision | None = None,
) -> Steps:
    """The init, train and eval functions of a model, all pure, over ``{"params", "rest", "opt_state", "step", "key"}``
    and what ``precision`` adds to these.

    Args:
      loss: outputs, batch -> a scalar, or a scalar and further metrics by name.
      rate: the learning rate by step, for the log.
      precision: with one, floats among the inputs are computed with as it says, and the loss gets outputs in float32;
        None computes with parameters and inputs as they come.
    """
    kept = precision or Precision(params=None)

    def init(key: jax.Array) -> Tree:
        params, rest = model.init(key)
        start = {**kept.init(params, optimizer), "rest": rest, "step": jnp.zeros((), jnp.int32)}
        return {**start, "key": jax.random.key_data(jax.random.fold_in(key, 1))}

    def loss_of(
        params: Tree, rest: Tree, batch: Tree, key: jax.Array | None, overwritten: Tree | None = None
    ) -> tuple[Any, Any]:
        rest = rest if overwritten is None else {**rest, OVERWRITE_WITH_GRADIENT: overwritten}
        outputs, after = model.apply(params, rest, _with_inputs(batch, kept.cast(inputs_of(batch))), key)
        if precision is not None:
            outputs = jax.tree.map(lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32)), outputs)
        found = loss(outputs, batch)
        value, metrics = found if isinstance(found, tuple) else (found, {})
        return value, (dict(metrics), after)

    def train(state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state["key"]), state["step"])
        gradient = kept.value_and_grad(loss_of, has_aux=True)
        overwritten = state["rest"].get(OVERWRITE_WITH_GRADIENT) if isinstance(state["rest"], dict) else None
        with noted(model.entry):
            (value, (metrics, rest)), grads = gradient(state, state["rest"], batch, key, overwritten=overwritten)
        if overwritten is not None:
            grads, after_overwritten = grads
            rest = {**rest, OVERWRITE_WITH_GRADIENT: after_overwritten}
        after, scaling = kept.update(optimizer, state, grads)
        after |= {"rest": rest, "step": state["step"] + 1}
        norm = optax.tree.norm(grads)
        if "skipped" in scaling:  # then nothing moves but the scale
            same = scaling["skipped"] > 0
            olds = {name: state[name] for name in ("rest", "step")}
            after |= jax.tree.map(lambda old, new: jnp.where(same, old, new), olds, {n: after[n] for n in olds})
            norm = jnp.where(same, 0, norm)
        found = {"loss": value, "grad_norm": norm, **metrics, **scaling}
        found |= {} if rate is None else {"learning_rate": rate(state["step"])}
        return after, found

    def evaluate(variables: Tree, batch: Tree) -> Metrics:
        value, (metrics, _) = loss_of(kept.cast(variables["params"]), variables["rest"], batch, None)
        return {"loss": value, **metrics}

    return Steps(init, train, evaluate, lambda state: {"params": state["params"], "rest": state["rest"]})


def _with_inputs(batch: Tree, inputs: Any) -> Tree:
    """``batch`` with others in the place of what `inputs_of` takes."""
    if isinstance(batch, Mapping):
        return {**batch, "inputs": inputs} if "inputs" in batch else inputs
    return type(batch)([inputs, *batch[1:]]) if isinstance(batch, tuple | list) else inputs


def own_steps(call: Call) -> Steps:
    """The functions that ``call`` gives: ``init(key) -> state`` and ``step(state, batch) -> (state, metrics)``, and, if
    the state is to be evaluated, ``evaluate(state, batch) -> metrics``. NNX modules in the state are mutated in place,
    and the step returns its metrics alone.

    Raises:
      ConfigError: it gives something else.
    """
    given = call.resolved()()
    if not isinstance(given, tuple) or len(given) not in (2, 3) or not all(map(callable, given)):
        raise ConfigError(
            f"{call.at}{call.call} gives a {type(given).__name__}; it must give functions, (init, step) or "
            "(init, step, evaluate): init(key) -> state, step(state, batch) -> (state, metrics), "
            "evaluate(state, batch) -> metrics"
        )
    init, step = map(call.named, given[:2])
    evaluate = call.named(given[2]) if len(given) == 3 else None
    made = nnx.eval_shape(lambda: init(jax.random.key(0)))
    if not has_modules(made):
        return Steps(init, call.named(uniform(step, made)), evaluate, lambda state: state)
    graph, like = nnx.split(made)

    def pure_init(key: jax.Array) -> Tree:
        return nnx.to_pure_dict(nnx.split(init(key))[1])

    def pure_step(state: Tree, batch: Tree) -> tuple[Tree, Metrics]:
        modules = nnx.merge(graph, _filled(like, state))
        _, metrics = call.named(uniform(step, modules))(modules, batch)
        return nnx.to_pure_dict(nnx.split(modules)[1]), metrics

    def pure_evaluate(state: Tree, batch: Tree) -> Metrics:
        assert evaluate is not None
        return evaluate(nnx.merge(graph, _filled(like, state)), batch)

    return Steps(pure_init, pure_step, None if evaluate is None else pure_evaluate, lambda state: state)
