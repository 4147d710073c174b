"""How a tensor of a file is laid out in a leaf: names of dimensions, as ``(h e) d -> l d h e``.

On the left are the tensor's dimensions, on the right the leaf's. Names in parentheses share a dimension, the last runs
fastest. What stands on the right alone counts tensors: the leaf is their stack, and their number is in their names.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.checkpoint.pieces import Piece


@dataclass(frozen=True)
class TensorLayout:
    """The dimensions of a tensor, each a group of names, and those of a leaf."""

    tensor: tuple[tuple[str, ...], ...]
    leaf: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TensorLayout:
        """The layout that ``text`` says; without an arrow the leaf is the tensor.

        Raises:
          ValueError: text of another form, or a name that stands twice on a side or on the left alone.
        """
        left, arrow, right = text.partition("->")
        if not re.fullmatch(r"\s*(?:(?:[a-z]|\([a-z](?:\s+[a-z])*\))\s*)*", left) or not re.fullmatch(
            r"[a-z\s]*", right
        ):
            raise ValueError(f"{text!r} is no layout; write one such as '(h e) d -> l d h e'")
        tensor = tuple(tuple(group.strip("()").split()) for group in re.findall(r"\([^)]*\)|[a-z]", left))
        names = list(itertools.chain(*tensor))
        leaf = tuple(right.split()) if arrow else tuple(names)
        if len(set(names)) < len(names) or len(set(leaf)) < len(leaf) or not set(names) <= set(leaf):
            raise ValueError(f"{text!r}: each name stands once on a side, and those of the left on the right as well")
        return cls(tensor, leaf)

    @property
    def counted(self) -> tuple[str, ...]:
        """The names that count tensors, in the leaf's order."""
        inside = set(itertools.chain(*self.tensor))
        return tuple(name for name in self.leaf if name not in inside)

    def sizes(self, shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
        """The size of each name in a tensor of ``shape``, where ``known`` has all names of a group but one.

        Raises:
          ValueError: the shape is of another rank, does not divide, or is not that of the known sizes.
        """
        if len(shape) != len(self.tensor):
            raise ValueError(f"has {len(shape)} dimensions, and {len(self.tensor)} are expected")
        found: dict[str, int] = {}
        for group, size in zip(self.tensor, shape, strict=True):
            open_names = [name for name in group if name not in known]
            part = math.prod(known[name] for name in group if name in known)
            if len(open_names) > 1:
                raise ValueError(f"the sizes of {' and '.join(open_names)} are not known")
            if (open_names and (not part or size % part)) or (not open_names and size != part):
                product = " x ".join(str(known.get(name, name)) for name in group)
                raise ValueError(f"has a dimension of {size}, which is not {product}")
            found |= {name: known[name] for name in group if name in known} | dict.fromkeys(open_names, size // part)
        return found

    def pieces(self, names: Mapping[tuple[int, ...], str], sizes: Mapping[str, int], dtype: Any) -> Iterator[Piece]:
        """The leaf as boxes of tensors: ``names`` by the numbers of `counted`."""
        shape = tuple(math.prod(sizes[name] for name in group) for group in self.tensor)
        fastest = {group[-1]: dim for dim, group in enumerate(self.tensor) if group}
        slow = [name for group in self.tensor for name in group[:-1]]
        dims = tuple(fastest.get(name) for name in self.leaf)
        for numbers, tensor in names.items():
            for slots in itertools.product(*(range(sizes[name]) for name in slow)):
                fixed = dict(zip(self.counted, numbers, strict=True)) | dict(zip(slow, slots, strict=True))
                at = tuple((fixed[n], fixed[n] + 1) if n in fixed else (0, sizes[n]) for n in self.leaf)
                box: list[tuple[int, int]] = []
                for group in self.tensor:
                    start = 0
                    for name in group[:-1]:
                        start = start * sizes[name] + fixed[name]
                    length = sizes[group[-1]]
                    box.append((start * length, (start + 1) * length))
                yield Piece(tensor, shape, jnp.dtype(dtype), tuple(box), at, dims)

    def tensor_of(self, leaf: Any, numbers: Sequence[int]) -> Any:
        """The tensor of some numbers of `counted`, of a leaf on devices or in numpy."""
        chosen = dict(zip(self.counted, numbers, strict=True))
        part = leaf[tuple(chosen.get(name, slice(None)) for name in self.leaf)]
        left = [name for name in self.leaf if name not in chosen]
        sizes = dict(zip(left, part.shape, strict=True))
        order = [left.index(name) for group in self.tensor for name in group]
        shape = [math.prod(sizes[name] for name in group) for group in self.tensor]
        arrays = jnp if isinstance(leaf, jax.Array) else np
        return arrays.reshape(arrays.transpose(part, order), shape)


def inside(outer: Piece, inner: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of tensors that ``outer`` is, a piece of an array that consists of ``inner``."""
    for piece in inner:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(outer.box, piece.at, strict=True)]
        if any(a >= b for a, b in common):
            continue
        box = list(piece.box)
        for (a, b), (start, _), dim in zip(common, piece.at, piece.dims, strict=True):
            if dim is not None:
                box[dim] = (piece.box[dim][0] + a - start, piece.box[dim][0] + b - start)
        at = [
            given if dim is None else (given[0] + common[dim][0] - outer.box[dim][0],
                                       given[0] + common[dim][1] - outer.box[dim][0])
            for given, dim in zip(outer.at, outer.dims, strict=True)
        ]  # fmt: skip
        dims = tuple(None if dim is None else piece.dims[dim] for dim in outer.dims)
        yield Piece(piece.name, piece.shape, piece.dtype, tuple(box), tuple(at), dims)
