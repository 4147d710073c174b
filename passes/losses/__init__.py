"""Computes losses over many classes in chunks of the tokens, so that no array of tokens x classes is made.

The logits of a language model, [tokens, vocabulary], are often the largest array of a step; the loss and its gradient
read them several times. Here one loop over chunks of the tokens computes a chunk's logits, its losses, and, in the same
iteration, what it adds to the gradients. `region` says what can be computed so: no spelling of the loss is looked for.

A chunk has a part of each device's tokens, so that a plan shards tokens and classes as without the loop. The gradient
of the weight is accumulated in float32, one sum per device part (`autoshard.transforms.per_part_sums`), and reduced
after the loop. Results are the same up to the order in which sums are added; where the logits' operands are bfloat16,
so are those of the gradients' products (`rounding`).
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard import jaxpr as jx
from autoshard.errors import ChunkError, PassError, nearest
from autoshard.ir.program import Program
from autoshard.machine.mesh import LogicalMesh
from autoshard.passes.losses.inline import with_loss_calls_inlined
from autoshard.passes.losses.loop import with_loop
from autoshard.passes.losses.region import RegionFinder, logits_products
from autoshard.passes.losses.rounding import with_rounded_cotangents
from autoshard.transforms.batch_parts.batched_indices import with_batched_indices
from autoshard.transforms.batch_parts.cut import Cut
from autoshard.transforms.pipeline import Pass

MEMORY_SHARE = 1 / 64
"""Most of a device's memory that a chunk's logits should take, where they are sharded over all devices."""
CHUNK_TOKENS = 2048
"""Fewest tokens per device in a chunk, unless that leaves one chunk: with fewer, reading the weight and adding to its
gradient takes longer than the products."""
LOGITS_BITS = 32
"""Of an element, as softmax reads it."""
BFLOAT16_BITS = 16


@dataclass(frozen=True)
class Losses(Pass):
    """Replaces each loss over many classes, with its gradient, by a loop over chunks of the tokens."""

    name: ClassVar[str] = "losses"
    saves_memory: ClassVar[bool] = True

    axes: str = ""
    """Mesh axes joined by ``+`` whose devices accumulate the gradient of the weight each for itself: those that the
    tokens are sharded over. Without any, it is reduced in every iteration."""
    chunks: int = 0
    """The number of chunks, or the next larger one that divides the tokens; 0 leaves it to the pass."""
    min_bytes: float = 0
    """Logits of fewer bytes per device, sharded over all devices, are left as they are."""

    def __call__(self, program: Program) -> Program:
        before = jx.eliminate_dead_code(program.jaxpr)
        after = self._rewritten(before, program, self._parts(program))
        return program if after is before else program.with_jaxpr(jx.eliminate_dead_code(after))

    def _parts(self, program: Program) -> int:
        """The number of devices along ``axes``."""
        sizes, names = program.mesh.shape, self.axes.split("+") if self.axes else []
        for axis in names:
            if axis not in sizes:
                raise PassError(f"{self}: the mesh {program.mesh} has no axis {axis!r}{nearest(axis, sizes)}")
        return math.prod(sizes[a] for a in names)

    def change(self, before: Program, after: Program) -> str:
        found: list[tuple[jx.JaxprEqn, ChunkError | None]] = []
        self._rewritten(jx.eliminate_dead_code(before.jaxpr), before, self._parts(before), found)
        count = sum(why is None for _, why in found)
        left = Counter(
            f"{jx.source(seed) or 'unknown line'}: {why}, at {why.source or 'an unknown line'}"
            for seed, why in found
            if why is not None
        )
        lines = [f"{line}" + (f" ({n} times)" if n > 1 else "") for line, n in sorted(left.items())]
        text = f"{count} losses computed in chunks of the tokens" if count else "no loss to compute in chunks"
        return text + "".join(f"; not in chunks: {line}" for line in lines)

    def variants(self, program: Program, batch_axes: Sequence[str] | None = None) -> tuple[Pass, ...]:
        """Of large logits alone, with the axes that split the batch; without a plan, one for each number of devices
        that some of the mesh's axes have together."""
        large = replace(self, min_bytes=max(self.min_bytes, program.mesh.hardware.memory * MEMORY_SHARE))
        if large(program) is program:
            return ()
        if batch_axes is not None:
            return (replace(large, axes="+".join(batch_axes)),)
        axes = program.mesh.nontrivial_axes
        subsets = [a for n in range(len(axes), 0, -1) for a in itertools.combinations(axes, n)]
        by_size = {program.mesh.axes_size(a): "+".join(a) for a in subsets}
        return tuple(replace(large, axes=a) for a in by_size.values()) or (large,)

    def _rewritten(
        self,
        jaxpr: jx.Jaxpr,
        program: Program,
        parts: int,
        found: list[tuple[jx.JaxprEqn, ChunkError | None]] | None = None,
    ) -> jx.Jaxpr:
        """``jaxpr`` with its losses computed in chunks, at every depth; itself where there are none.

        Args:
          found: takes the product that makes the logits of each loss, and why it cannot be computed in chunks.
        """
        given, least = jaxpr, self.min_bytes * program.mesh.size
        jaxpr = with_loss_calls_inlined(jaxpr, program.rules, least)
        nests = jx.eqns_with_regions(jaxpr)
        changed = {e: jx.map_bodies(e, lambda b: self._rewritten(b, program, parts, found)) for e in nests}
        nested = any(now is not e for e, now in changed.items())
        if nested:
            jaxpr = jx.with_eqns(jaxpr, [changed.get(e, e) for e in jaxpr.eqns])
        before = after = with_batched_indices(jaxpr) if logits_products(jaxpr, least) else jaxpr
        rounds = program.mesh.hardware.operand_bits > BFLOAT16_BITS
        tried: set[jx.JaxprEqn] = set()
        while seed := next((e for e in logits_products(after, least) if e not in tried), None):
            tried.add(seed)
            rounded = with_rounded_cotangents(after, seed) if rounds else after
            finder = RegionFinder(rounded, program.rules, program.mesh)
            text = "no dimension of its tokens divides into chunks with a part for each device"
            cuts = cuts_of(seed, program.mesh, self.chunks, parts)
            why = None if cuts else ChunkError(text, jx.source(seed))
            for cut in cuts:
                try:
                    after, why = with_loop(rounded, finder.region(seed, cut), program.rules, parts), None
                except ChunkError as e:
                    why = why or e
                else:
                    break
            if found is not None:
                found.append((seed, why))
        return after if after is not before else jaxpr if nested else given


def cuts_of(seed: jx.JaxprEqn, mesh: LogicalMesh, wanted: int = 0, parts: int = 1) -> list[Cut]:
    """The ways to cut the logits that ``seed`` makes into chunks, best first: enough of them, and a major dimension.

    Args:
      wanted: the number of chunks; 0 chooses one.
      parts: how many devices split the tokens; 1 if unknown.
    """
    shape, (contracted, _) = jx.aval(seed.outvars[0]).shape, seed.params["dimension_numbers"]
    rows = len(jx.aval(seed.invars[0]).shape) - len(contracted[0])
    found: list[tuple[tuple[int, ...], Cut]] = []
    for side in (range(rows), range(rows, len(shape))):
        tokens = math.prod(shape[d] for d in side)
        many = wanted or _chunks(tokens // (parts if parts > 1 else mesh.size), math.prod(shape), mesh)
        for d in side:
            outer = math.gcd(shape[d], mesh.size)
            counts = [n for n in range(2, shape[d] // outer + 1) if shape[d] // outer % n == 0]
            if counts:
                chunks = next((n for n in counts if n >= many), counts[-1])
                found.append(((side.start, chunks < many, d), Cut(d, outer, chunks)))
    return [cut for _, cut in sorted(found, key=lambda x: x[0])]


def _chunks(tokens: int, elements: int, mesh: LogicalMesh) -> int:
    """How many chunks: as many as memory asks for, but no fewer ``tokens``, which a device has, than `CHUNK_TOKENS`."""
    share = elements * LOGITS_BITS / 8 / mesh.size / max(1.0, mesh.hardware.memory * MEMORY_SHARE)
    return max(2, min(math.ceil(share), tokens // CHUNK_TOKENS))
