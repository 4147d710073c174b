"""Generation with a cache: the prompt in one step, then a token a step.

Parameters and cache have one layout for both. It is that of a third program, which does both one after the other, as
often as tokens are asked for: the planner so weighs what a layout costs the prompt against what it costs the tokens.

Letters in shapes: B rows, P tokens of the prompt, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.api import jit
from autoshard.decoding.sampling import Sampling
from autoshard.errors import ArgumentError
from autoshard.runtime.plan import Plan
from autoshard.runtime.step import Step

type Tree = Any
"""A pytree."""
type CachedStep = Callable[[Tree, Tree, jax.Array, int | jax.Array], tuple[jax.Array, Tree]]
"""params, cache, tokens int [B, S], position of the first -> logits of the token after the last [B, V], cache."""
type NewCache = Callable[[Tree, int, int], Tree]
"""params, rows, tokens of a row at most -> an empty cache."""

AS_GOOD = 1.02
"""How much longer generation may take with parameters where they are than where they were best, and they stay: less
than what predicted times are right to."""


@dataclass(frozen=True)
class Prepared:
    """What generates, planned for parameters, rows, tokens of a prompt, and tokens to make."""

    together: Plan
    """Of both one after the other, which says where parameters and cache are. Its cost is that of all tokens."""
    prefill: Step
    """params, cache (donated), tokens int32 [B, P], key uint32 [2] -> cache, the first token int32 [B, 1], its
    position."""
    decode: Step
    """params, cache (donated), token int32 [B, 1], position int32 [], key uint32 [2] -> cache, the next token, its
    position."""
    prefill_plan: Plan
    decode_plan: Plan
    kept: bool
    """Whether parameters are as in the plan of ``like=``; False also where there is none."""
    params: Tree
    """Of parameters: each a `jax.ShapeDtypeStruct` with its sharding."""

    @property
    def prefill_arguments(self) -> tuple[Any, ...]:
        """What ``prefill`` takes, each a `jax.ShapeDtypeStruct`, as to `Step.export`."""
        return self.prefill_plan.in_avals

    @property
    def decode_arguments(self) -> tuple[Any, ...]:
        """The same of ``decode``."""
        return self.decode_plan.in_avals


class Generator:
    """Generates tokens with a step that has a cache; planned once for each shape of a prompt. Made by `generate`.

    Example:
      >>> def step(params, cache, tokens, position):
      ...     new = params["embed"][tokens].sum(1)
      ...     return (cache + new) @ params["embed"].T, cache + new
      >>> def new_cache(params, rows, length):
      ...     return jnp.zeros((rows, params["embed"].shape[1]))
      >>> generator = autoshard.generate(step, new_cache, mesh={"data": 8})
      >>> params, prompt = {"embed": jnp.eye(32)}, jnp.arange(16).reshape(8, 2)
      >>> generator(params, prompt, 3).shape
      (8, 3)
      >>> [int(token[0, 0]) for token in generator.stream(params, prompt, 3)]
      [0, 0, 0]
      >>> generator.prepare(params, prompt, 3).decode_plan.in_specs[1]
      P('data',)
    """

    def __init__(self, step: CachedStep, new_cache: NewCache, sampling: Sampling, options: dict[str, Any]) -> None:
        self._step, self._new_cache, self._sampling, self._options = step, new_cache, sampling, options
        self._prepared: dict[Any, Prepared] = {}

    def __call__(self, params: Tree, prompt: Any, count: int, *, seed: int = 0, stop: int | None = None) -> jax.Array:
        """The ``count`` tokens after each row of ``prompt``. prompt: int [B, P] -> int32 [B, count].

        Args:
          params: of the step; placed as planned, if they are not.
          seed: of what is drawn: the same seed draws the same tokens, on any mesh.
          stop: a token after which a row has no other; generation ends once every row has it.

        Raises:
          ArgumentError: no tokens are asked for, or the prompt is no int [B, P] of at least one token.
        """
        tokens = list(self.stream(params, prompt, count, seed=seed, stop=stop))
        made = jnp.concatenate(tokens, axis=1)
        if stop is None:
            return made
        over = jnp.cumsum(made == stop, axis=1) > 0
        return jnp.pad(jnp.where(over, stop, made), ((0, 0), (0, count - len(tokens))), constant_values=stop)

    def stream(
        self, params: Tree, prompt: Any, count: int, *, seed: int = 0, stop: int | None = None
    ) -> Iterator[jax.Array]:
        """The same tokens one after the other, each int32 [B, 1]; what follows a row's ``stop`` has no meaning."""
        prompt = _prompt(prompt)
        prepared = self.prepare(params, prompt, count)
        rows, length = prompt.shape[0], prompt.shape[1] + count
        cache = prepared.prefill_plan.init(lambda: self._new_cache(prepared.params, rows, length), argnum=1)
        key = jax.random.key_data(jax.random.key(seed))
        params, cache, prompt, key = prepared.prefill_plan.put(params, cache, prompt, key)
        cache, token, position = prepared.prefill(params, cache, prompt, key)
        yield token
        over = jnp.zeros(token.shape, bool)
        for _ in range(count - 1):
            if stop is not None:
                over = over | (token == stop)
                if bool(over.all()):
                    return
            cache, token, position = prepared.decode(params, cache, token, position, key)
            yield token

    def prepare(self, params: Tree, prompt: Any, count: int) -> Prepared:
        """What is planned for such parameters and such a prompt, arrays or their shapes, and ``count`` tokens.

        Raises:
          ArgumentError: no token is asked for, or a prompt of another type or rank.
        """
        prompt = _prompt(prompt)
        if count < 1:
            raise ArgumentError(f"{count} tokens are asked for: ask for 1 or more")
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
        leaves, tree = jax.tree.flatten(abstract)
        key = (tree, *((x.shape, x.dtype) for x in leaves), prompt.shape, count)
        if key not in self._prepared:
            self._prepared[key] = self._prepare(abstract, prompt.shape[0], prompt.shape[1], count)
        return self._prepared[key]

    def _prepare(self, params: Tree, rows: int, size: int, count: int) -> Prepared:
        prefill, decode = self._programs()
        cache = jax.eval_shape(lambda params: self._new_cache(params, rows, size + count), params)
        tokens, key = jax.ShapeDtypeStruct((rows, size), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.uint32)

        def together(params: Tree, cache: Tree, tokens: jax.Array, key: jax.Array) -> Any:
            state = prefill(params, cache, tokens, key)
            if count == 1:
                return state[:2]
            (cache, *_), more = jax.lax.scan(
                lambda state, _: (after := decode(params, *state, key), after[1]), state, length=count - 1
            )
            return cache, more

        def planned(**options: Any) -> Plan:
            return jit(together, donate_argnums=1, **options).plan(params, cache, tokens, key)

        joint, kept = planned(**self._options), self._options.get("like") is not None
        if kept:
            free = planned(**{**self._options, "like": None, "mesh": joint.mesh})
            if joint.cost.seconds > AS_GOOD * free.cost.seconds:
                joint, kept = free, False
        cached = joint.in_specs[1]
        of_decode = jit(
            decode,
            like=joint,
            donate_argnums=1,
            in_shardings=(None, cached, None, None, None),
            out_shardings=(cached, None, None),
        )
        token, position = jax.ShapeDtypeStruct((rows, 1), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
        decode_plan = of_decode.plan(params, cache, token, position, key)
        of_prefill = jit(
            prefill,
            like=joint,
            donate_argnums=1,
            in_shardings=(None, cached, None, None),
            out_shardings=decode_plan.in_specs[1:4],
        )
        prefill_plan = of_prefill.plan(params, cache, tokens, key)
        placed = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            params,
            decode_plan.in_shardings[0],
        )
        return Prepared(joint, of_prefill, of_decode, prefill_plan, decode_plan, kept, placed)

    def _programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """What reads the prompt, and what makes one token of the last."""

        def decode(params: Tree, cache: Tree, token: jax.Array, position: Any, key: jax.Array) -> Any:
            logits, cache = self._step(params, cache, token, position)
            after = jnp.asarray(position + token.shape[1], jnp.int32)
            drawn = jax.random.fold_in(jax.random.wrap_key_data(key), after)
            return cache, self._sampling(logits, drawn)[:, None], after

        def prefill(params: Tree, cache: Tree, tokens: jax.Array, key: jax.Array) -> Any:
            return decode(params, cache, tokens, 0, key)

        return prefill, decode


def generate(
    step: CachedStep,
    new_cache: NewCache,
    *,
    mesh: Any = None,
    strategy: str = "auto",
    like: Plan | Step | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    memory_budget: int | str | None = None,
) -> Generator:
    """Generation with a step that has a cache: `autoshard.jit` for the loop around it.

    The step is called with the whole prompt and position 0, and then with one token at a time. Parameters and cache are
    laid out once for both, as makes the prompt and the tokens together fastest; the cache is donated.

    Args:
      step: ``step(params, cache, tokens, position) -> logits, cache``: a pure function. tokens: int32 [B, S], S
        tokens from ``position`` on, which is the integer 0 for the prompt and else an int32 [] array; logits [B, V] of
        the token after the last. The cache is any tree: keys and values, or a state of a fixed size.
      new_cache: ``new_cache(params, rows, length) -> cache``, empty, for so many rows of up to ``length`` tokens. It
        sees the shapes and dtypes of parameters alone.
      mesh, strategy, memory_budget: as in `autoshard.jit`.
      like: a plan or step that has the parameters, such as that of training. Where generation is as fast so, they
        stay as they are there, and nothing is copied; else they are copied once for each call, to where it is faster.
      temperature: 0 takes the best token; above, tokens are drawn with logits divided by it.
      top_k: of how many of the best tokens one is drawn.
      top_p: of how many, as the probability that they have together.

    Raises:
      ArgumentError: an option out of its range.

    Example:
      >>> def step(params, seen, tokens, position):
      ...     return jax.nn.one_hot(tokens[:, -1] + 1, 256) * params, seen + tokens.shape[1]
      >>> generator = autoshard.generate(
      ...     step, lambda params, rows, length: jnp.zeros(rows, jnp.int32), mesh={"data": 8}, temperature=0.1, top_k=2
      ... )
      >>> tokens = generator(jnp.float32(9), np.frombuffer(b"abc", np.uint8)[None], 5, seed=1)
      >>> bytes(np.uint8(tokens[0]))
      b'defgh'
    """
    options = {"mesh": mesh, "strategy": strategy, "like": like, "memory_budget": memory_budget}
    return Generator(step, new_cache, Sampling(temperature, top_k, top_p), options)


def _prompt(prompt: Any) -> Any:
    """The prompt as int32, or its shape."""
    shape, dtype = jnp.shape(prompt), jnp.result_type(prompt)
    if len(shape) != 2 or not shape[0] or not shape[1] or not jnp.issubdtype(dtype, jnp.integer):
        raise ArgumentError(
            f"the prompt is {dtype}{list(shape)}, and integers [rows, tokens] of at least one row and token are needed"
        )
    return prompt if isinstance(prompt, jax.ShapeDtypeStruct) else jnp.asarray(prompt, jnp.int32)
