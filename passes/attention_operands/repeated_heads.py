"""Attention by a kernel, whose keys and values repeat each head for a group of the queries' heads, reads them once.

``jnp.repeat(key, 4, axis=heads)`` writes keys and values four times, and the gradient is summed over the copies
afterwards. Kernels take as many key heads as there are, and sum the gradient themselves. Shapes stay as they are, and
with them the layouts that a plan may choose from, among them more parts of the heads than there are key heads: that
heads are repeated is noted in the attention's parameters, and the kernel's call takes each head once. Of the gradient
of keys and values the first of the copies then has the sum, and the others zeros: a backward part is noted only where
nothing but that sum is read of it. And of attentions that are alike all are noted or none, so that forward and backward
parts round what they scale alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from jax import numpy as jnp
from jax.extend.core import primitives as _prims

from autoshard import jaxpr as jx
from autoshard.transforms.attention_kernels import KERNELS
from autoshard.transforms.attention_op import AttentionConfig, attention_backward_p, attention_p

Repeats = tuple[str, int]
"""The letter of the dimension that has each head several times in a row, and how often."""


class RepeatedHeads:
    """The attentions of a program whose keys and values are to be read once."""

    def __init__(self, jaxpr: jx.Jaxpr) -> None:
        self._found: dict[jx.JaxprEqn, Repeats] = {}
        kept = {_kind(e) for e in self._visit(jaxpr)}
        self._found = {e: repeats for e, repeats in self._found.items() if _kind(e) not in kept}

    def _visit(self, jaxpr: jx.Jaxpr) -> Iterator[jx.JaxprEqn]:
        """Adds what can be noted at every depth. Returns the attentions that cannot be."""
        made, readers = {v: e for e in jaxpr.eqns for v in e.outvars}, _readers(jaxpr)
        for eqn in jaxpr.eqns:
            for region in jx.regions(eqn):
                yield from self._visit(region.body)
            backward = eqn.primitive is attention_backward_p
            if eqn.primitive is not attention_p and not backward:
                continue
            config: AttentionConfig = eqn.params["config"]
            repeats = _same_repeats(eqn, config, made)
            if repeats is not None and (not backward or _gradients_are_summed(eqn, config, repeats, readers)):
                self._found[eqn] = repeats
            else:
                yield eqn

    def noted(self, eqn: jx.JaxprEqn) -> jx.JaxprEqn:
        """``eqn`` with the repeats among its parameters, if it is such an attention; else itself."""
        if eqn not in self._found:
            return eqn
        head, count = self._found[eqn]
        config = replace(eqn.params["config"], repeated_head=head, head_repeats=count)
        return eqn.replace(params=eqn.params | {"config": config})


def _kind(eqn: jx.JaxprEqn) -> AttentionConfig:
    """What the forward and the backward part of an attention have in common."""
    return replace(eqn.params["config"], cotangent_dims="", grad_dims=("",) * 3, grad_dtypes=("",) * 3)


def _readers(jaxpr: jx.Jaxpr) -> Mapping[jx.Var, Sequence[jx.JaxprEqn | None]]:
    """The equations that read each variable; None where it is a result."""
    found: dict[jx.Var, list[jx.JaxprEqn | None]] = defaultdict(list)
    for reader, atoms in (*((e, e.invars) for e in jaxpr.eqns), (None, jaxpr.outvars)):
        for a in atoms:
            if isinstance(a, jx.Var):
                found[a].append(reader)
    return found


def _same_repeats(eqn: jx.JaxprEqn, config: AttentionConfig, made: Mapping[jx.Var, jx.JaxprEqn]) -> Repeats | None:
    """How keys and values both repeat the heads of an attention by a kernel that can share them; else None."""
    if not config.kernel or not KERNELS[config.kernel].shared_keys:
        return None
    _, key, value = eqn.invars[:3]
    repeats = _repeats(key, config.key_dims, made)
    if repeats is None or repeats != _repeats(value, config.value_dims, made) or repeats[0] not in config.query_dims:
        return None
    if any(repeats[0] in letters for letters in config.extra_dims):  # segment ids of each head
        return None
    return repeats


def _gradients_are_summed(
    eqn: jx.JaxprEqn,
    config: AttentionConfig,
    repeats: Repeats,
    readers: Mapping[jx.Var, Sequence[jx.JaxprEqn | None]],
) -> bool:
    """Whether all that is read of the gradients of keys and values is their sum over the copies of a head."""
    _, *gradients = zip(eqn.outvars, config.grad_dims, strict=True)
    return all(_is_summed(v, letters, repeats, readers) for v, letters in gradients)


def _is_summed(
    var: jx.Var, letters: str, repeats: Repeats, readers: Mapping[jx.Var, Sequence[jx.JaxprEqn | None]]
) -> bool:
    head, count = repeats
    at, shape = letters.index(head), jx.aval(var).shape
    split = (*shape[:at], shape[at] // count, count, *shape[at + 1 :])
    for eqn in readers.get(var, ()):
        if eqn is None:
            return False
        (result,) = eqn.outvars[:1]
        if eqn.primitive is _prims.transpose_p or eqn.primitive is _prims.convert_element_type_p:
            moved = "".join(letters[d] for d in eqn.params.get("permutation", range(len(letters))))
            is_float = jnp.issubdtype(jx.aval(result).dtype, jnp.floating)  # a cast only rounds
            if not is_float or not _is_summed(result, moved, repeats, readers):
                return False
        elif eqn.primitive is _prims.reshape_p and jx.aval(result).shape == split:
            sums = readers.get(result, ())
            if not all(e and e.primitive is _prims.reduce_sum_p and at + 1 in e.params["axes"] for e in sums):
                return False
        else:
            return False
    return True


def _repeats(atom: jx.Atom, letters: str, made: Mapping[jx.Var, jx.JaxprEqn]) -> Repeats | None:
    eqn = made.get(atom) if isinstance(atom, jx.Var) else None
    if eqn is not None and eqn.primitive is _prims.transpose_p:
        by_source = sorted(zip(eqn.params["permutation"], letters, strict=True))
        return _repeats(eqn.invars[0], "".join(letter for _, letter in by_source), made)
    if eqn is None or eqn.primitive is not _prims.reshape_p or not isinstance(eqn.invars[0], jx.Var):
        return None
    spread = made.get(eqn.invars[0])
    if spread is None or spread.primitive is not _prims.broadcast_in_dim_p:
        return None
    dims, kept = spread.params["broadcast_dimensions"], jx.aval(spread.invars[0]).shape
    whole = jx.aval(spread.outvars[0]).shape
    added = [d for d in range(len(whole)) if d not in dims or kept[dims.index(d)] < whole[d]]
    if len(added) != 1 or not added[0]:
        return None
    (new,) = added
    merged = (*whole[: new - 1], whole[new - 1] * whole[new], *whole[new + 1 :])
    return (letters[new - 1], whole[new]) if jx.aval(atom).shape == merged and whole[new] > 1 else None
