"""Layouts of tensors in leaves: what the text says, as boxes, and back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autoshard.checkpoint.pieces import Piece, as_index
from autoshard.weights.layout import TensorLayout, inside

SIZES = {"h": 3, "e": 4, "d": 5, "z": 2, "l": 2, "x": 3}


def moved(layout: TensorLayout, tensors: dict[tuple[int, ...], np.ndarray], pieces: list[Piece]) -> np.ndarray:
    """The leaf that ``pieces`` make of the tensors."""
    leaf = np.full([SIZES[n] for n in layout.leaf], -1)
    whole = tuple((0, n) for n in leaf.shape)
    named = {str(numbers): tensor for numbers, tensor in tensors.items()}
    for piece in pieces:
        box, view = piece.part(leaf, whole, piece.at)
        view[...] = named[piece.name][as_index(box)]
    return leaf


@pytest.mark.parametrize(
    ("text", "of"),
    [
        ("d", lambda t: t[()]),
        ("d e -> e d", lambda t: t[()].T),
        ("(h e) d -> d h e", lambda t: t[()].reshape(3, 4, 5).transpose(2, 0, 1)),
        ("d (z h e) -> z d h e", lambda t: t[()].reshape(5, 2, 3, 4).transpose(1, 0, 2, 3)),
        ("(h e) -> l h e", lambda t: np.stack([t[i,].reshape(3, 4) for i in range(2)])),
        ("e d -> l x d e", lambda t: np.stack([[t[i, j].T for j in range(3)] for i in range(2)])),
    ],
)
def test_boxes_make_the_leaf_and_the_leaf_gives_the_tensors_back(text, of):
    layout = TensorLayout.parse(text)
    shape = [int(np.prod([SIZES[n] for n in group])) for group in layout.tensor]
    numbers = list(itertools.product(*(range(SIZES[n]) for n in layout.counted)))
    tensors = {at: 1000 * i + np.arange(np.prod(shape)).reshape(shape) for i, at in enumerate(numbers)}
    pieces = list(layout.pieces({at: str(at) for at in numbers}, SIZES, np.int64))
    leaf = moved(layout, tensors, pieces)
    np.testing.assert_array_equal(leaf, of(tensors))
    for at, tensor in tensors.items():
        np.testing.assert_array_equal(layout.tensor_of(leaf, at), tensor)
    # A layer of the leaf, in turn, is boxes of tensors.
    row = Piece("leaf", leaf.shape, leaf.dtype, ((1, 2), *((0, n) for n in leaf.shape[1:])),
                tuple((0, n) for n in leaf.shape[1:]), tuple(range(1, leaf.ndim)))  # fmt: skip
    part, whole = np.full(leaf.shape[1:], -1), tuple((0, n) for n in leaf.shape[1:])
    for piece in inside(row, pieces):
        box, view = piece.part(part, whole, piece.at)
        view[...] = {str(at): t for at, t in tensors.items()}[piece.name][as_index(box)]
    np.testing.assert_array_equal(part, leaf[1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("D -> d", "is no layout"),
        ("(h e d -> h e d", "is no layout"),
        ("d d -> d", "each name stands once"),
        ("d e -> d", "those of the left on the right as well"),
    ],
)
def test_a_layout_that_is_none_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        TensorLayout.parse(text)


def test_sizes_come_from_the_shape_or_say_what_is_wrong():
    layout = TensorLayout.parse("(h e) d -> d h e")
    assert layout.sizes((12, 5), {"h": 3}) == {"h": 3, "e": 4, "d": 5}
    for shape, known, says in [
        ((12,), {"h": 3}, "has 1 dimensions, and 2 are expected"),
        ((12, 5), {}, "the sizes of h and e are not known"),
        ((12, 5), {"h": 5}, "a dimension of 12, which is not 5 x e"),
        ((12, 5), {"h": 3, "d": 6}, "a dimension of 5, which is not 6"),
    ]:
        with pytest.raises(ValueError, match=says):
            layout.sizes(shape, known)
