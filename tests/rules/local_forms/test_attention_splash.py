"""Splash attention in random shapes, masks and meshes: in float32 the numbers of the unsharded step, to 1e-5.

The kernels are interpreted, which only a hardware table can ask for. ``AUTOSHARD_EXAMPLES`` is the number of
attentions, 9 unless it is set, and ``AUTOSHARD_SEED`` draws others: `make kernels` runs 300.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.backend.audit import audit
from autoshard.backend.hlo.collectives import collectives
from autoshard.machine.mesh import AttentionRates, Link, LogicalMesh
from tests.attentions import HASTY, trained

EXAMPLES = int(os.environ.get("AUTOSHARD_EXAMPLES", "9"))
SEED = int(os.environ.get("AUTOSHARD_SEED", "0"))
KERNEL = replace(HASTY, attention=AttentionRates("splash_interpreted", 0.5, 0.4), attention_layouts=True)
SPLITS = {
    "nothing": ({"x": 2}, P()),
    "batch": ({"b": 2}, P("b")),
    "heads": ({"h": 2}, P(None, None, "h")),
    "batch and heads": ({"b": 2, "h": 2}, P("b", None, "h")),
    "sequence": ({"s": 2}, P(None, "s")),
    "sequence in four": ({"s": 4}, P(None, "s")),
    "sequence and batch": ({"b": 2, "s": 2}, P("b", "s")),
    "sequence and heads": ({"h": 2, "s": 4}, P(None, "s", "h")),
    "two axes in another order": ({"x": 2, "y": 2}, P(None, ("y", "x"))),
}


@dataclass(frozen=True)
class Attention:
    """A random attention."""

    split: str
    batch: int
    length: int
    key_heads: int
    groups: int
    width: int
    value_width: int
    low: int | None
    high: int | None
    cap: float | None = None
    fast_links: bool = False
    """Whether bytes cost next to nothing, so that causal rings are balanced wherever they can be."""
    keys: str = "grouped"
    """How queries find theirs: by a dimension of their own, or keys and values are repeated, before or after the
    sequence."""
    segments: str = ""
    """Of what shape segment ids are: ``batch`` (of each sequence), ``all`` (of all alike), or none."""
    mask: str = "both"
    """How they are a mask with the positions: ``both``, ``after`` these, or what is in ``another`` segment."""

    @classmethod
    def drawn(cls, seed: int) -> Attention:
        rng = np.random.default_rng(seed)
        split = str(rng.choice(list(SPLITS)))
        parts = {"nothing": 1, "batch": 1, "heads": 1, "batch and heads": 1, "sequence": 2, "sequence and batch": 2}
        length = 128 * parts.get(split, 4) * int(rng.integers(1, 3 if parts.get(split, 4) < 4 else 2))
        low, high = [(None, None), (None, 0), (None, 0), (-int(rng.integers(1, length)), 0), (-90, 40)][rng.integers(5)]
        drawn = cls(
            split,
            int(rng.choice([2, 4] if "batch" in split else [1, 3, 4])),
            length,
            int(rng.choice([2, 4] if "heads" in split else [1, 2])),
            int(rng.integers(1, 3)),
            *(int(rng.choice([8, 16])) for _ in range(2)),
            low,
            high,
            cap=2.0 if rng.random() < 0.25 else None,
            keys=str(rng.choice(["grouped", "repeated", "repeated, heads first"])),
            segments=str(rng.choice(["batch", "batch", "all", "", ""])),
            mask=str(rng.choice(["both", "after", "another"])),
        )
        if ("sequence" not in split and "axes" not in split) or rng.random() < 0.5:
            return drawn
        halves = 2 if (low, high) == (None, 0) else 1  # of half a block of keys the kernel takes 128 at least
        return replace(drawn, length=halves * length, fast_links=True)

    @property
    def operands(self) -> list[jax.Array]:
        sides = ((self.groups * self.key_heads, self.width), (self.key_heads, self.width))
        sides = (*sides, (self.key_heads, self.value_width))
        rng = np.random.default_rng(0)
        found = [jnp.asarray(rng.normal(size=(self.batch, self.length, n, w)), "float32") for n, w in sides]
        if self.segments:  # packed sequences, some of them continued later, and padding at the end
            ids = np.sort(rng.integers(1, 7, (self.batch, self.length)), 1) % 5
            ids[:, self.length - rng.integers(1, 50) :] = 0
            found.append(jnp.asarray(ids if self.segments == "batch" else ids[0], "int32"))
        return found

    def seen(self, ids: Sequence[jax.Array]) -> list[jax.Array]:
        """Which scores are kept, as masks that are applied one after the other."""
        at = jnp.arange(self.length)
        distance = at[None, :] - at[:, None]
        masks = [] if self.high is None else [distance <= self.high]
        masks = masks if self.low is None else [masks[0] & (distance >= self.low)]
        for x in ids:
            same = (
                ~(x[..., :, None] != x[..., None, :]) if self.mask == "another" else x[..., :, None] == x[..., None, :]
            )
            same = same[:, None] if self.segments == "batch" else same
            masks = [*masks, same] if self.mask == "after" or not masks else [masks[0] & same]
        return masks

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        """As a model writes it."""
        if self.keys != "grouped":
            k, v = (jnp.repeat(x, self.groups, axis=2) for x in (k, v))
        if self.keys == "grouped":
            q = q.reshape(*q.shape[:2], self.key_heads, self.groups, self.width)
            scores, outputs = "bqhgd,bkhd->bhgqk", "bhgqk,bkhe->bqhge"
        elif self.keys == "repeated":
            scores, outputs = "bqhd,bkhd->bhqk", "bhqk,bkhe->bqhe"
        else:
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
            scores, outputs = "bhqd,bhkd->bhqk", "bhqk,bhke->bqhe"
        s = jnp.einsum(scores, q, k) * self.width**-0.5
        s = s if self.cap is None else self.cap * jnp.tanh(s / self.cap)
        for mask in self.seen(ids):
            s = jnp.where(mask[:, :, None] if mask.ndim == 4 and s.ndim == 5 else mask, s, -1e30)
        out = jnp.einsum(outputs, jax.nn.softmax(s, -1), v)
        return out.reshape(*out.shape[:2], -1, self.value_width)


@pytest.mark.parametrize("seed", range(SEED * 10_000, SEED * 10_000 + EXAMPLES))
def test_numbers_are_those_of_one_device(seed):
    check(Attention.drawn(seed))


PACKED = Attention("nothing", 3, 512, 1, 2, 8, 8, None, None, segments="batch")


@pytest.mark.parametrize(
    ("split", "form"),
    [
        ("batch and heads", {"batch": 2, "key_heads": 2, "high": 0, "keys": "repeated, heads first"}),
        ("sequence in four", {}),
        ("sequence in four", {"low": -200, "high": 0, "mask": "another"}),
        ("sequence in four", {"batch": 4, "high": 0}),
        ("sequence and batch", {"batch": 2, "segments": "all"}),
    ],
)
def test_packed_sequences_in_rings_and_exchanges(split, form):
    """Three sequences of one head cannot be exchanged for parts of the sequence, four can."""
    compiled, axes = check(replace(PACKED, split=split, **form)), SPLITS[split][0]
    mesh = LogicalMesh(tuple(axes), tuple(axes.values()), KERNEL)
    kinds = {c.kind for c in collectives(compiled.as_text(), mesh)}
    if split == "sequence in four":
        assert ("all-to-all" if form.get("batch") == 4 else "collective-permute") in kinds


@pytest.mark.parametrize("split", ["nothing", "sequence and batch", "sequence in four"])
@pytest.mark.parametrize("batch", [2, 3, 4])
def test_packed_sequences_that_no_kernel_takes(split, batch):
    """Of 72 positions: in chunks, in rings of keys or of queries, and by exchange."""
    if split == "sequence and batch" and batch == 3:
        pytest.skip("is not split in two")
    check(replace(PACKED, split=split, batch=batch, length=72, high=0), kernel=False)


def check(case: Attention, *, kernel: bool = True) -> Any:
    """The compiled step of ``case``, which has the numbers of one device; run by the ``kernel``, or by none."""
    axes, spec = SPLITS[case.split]
    chip = replace(KERNEL, links={"link": Link("link", 1e9, 0.0)}) if case.fast_links else KERNEL
    mesh = LogicalMesh(tuple(axes), tuple(axes.values()), chip)
    args = case.operands
    of_ids = [P(*spec[:2]) if case.segments == "batch" else P(*spec[1:2])] * bool(case.segments)
    shardings = {"in_shardings": (spec, spec, spec, *of_ids), "out_shardings": ((P(), spec), spec)}
    shardings |= {} if kernel else {"passes": ["attention"]}
    step = autoshard.jit(trained(case), mesh=mesh, strategy="replicated", **shardings)
    plan, compiled = step.plan(*args), step.lower(*args).compile()
    said = next(p.change for p in plan.passes if p.name == "attention")
    assert "1 forward and 1 backward attentions" in said, case
    assert ("all of them run by splash attention" in said) == kernel, case
    if kernel:
        said = next(p.change for p in plan.passes if p.name == "attention_operands")
        repeats = 2 * (case.keys != "grouped" and case.groups > 1)
        assert said.startswith(f"{repeats} attentions read repeated keys"), case
    expected = jax.jit(trained(case))(*args)
    # The value adds up terms of both signs, of which float32 keeps the sum no nearer than to the sizes' last bit.
    terms = 2.0**-23 * float(jnp.sum(jnp.abs(jnp.sin(expected[0][1]) * 3)))
    for have, want in zip(jax.tree.leaves(compiled(*args)), jax.tree.leaves(expected), strict=True):
        near = max(1e-5 * max(1.0, float(jnp.max(jnp.abs(want)))), 0.0 if want.ndim else terms)
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=near, err_msg=str(case))
    assert audit(compiled, plan).clean, case
    return compiled
