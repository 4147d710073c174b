"""Arguments that two steps share, by the names of their keys."""

from __future__ import annotations

import pytest

from autoshard.ir.spec import replicated
from autoshard.plan.decisions import Place
from autoshard.plan.shared_arguments import shared_arguments


def places(**shapes: tuple[int, ...]) -> list[Place]:
    return [Place(path, shape, "float32", replicated(len(shape))) for path, shape in shapes.items()]


TRAIN = places(
    **{
        "state['opt'].mu['w']": (4, 4),
        "state['params']['w']": (4, 4),
        "state['params']['b']": (4,),
        "ema['w']": (4, 4),
        "ema['b']": (4,),
        "layers[0]": (4, 4),
        "layers[1]": (4, 4),
        "x": (4, 4),
        "rows[0]": (4, 4),
    }
)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"params['w']": (4, 4), "params['b']": (4,)}, ["state['params']['w']", "state['params']['b']"]),
        ({"ema['w']": (4, 4), "ema['b']": (4,)}, ["ema['w']", "ema['b']"]),
        ({"variables['params']['w']": (4, 4)}, ["state['params']['w']"]),
        ({"p['w']": (4, 4), "p['b']": (4,)}, ["ema['w']", "ema['b']"]),
        ({"p['w']": (4, 8), "p['b']": (4,)}, [None, "ema['b']"]),
        ({"weights[0]": (4, 4), "weights[1]": (4, 4)}, ["layers[0]", "layers[1]"]),
        ({"weights[0]": (4, 4)}, [None]),
        ({"x": (4, 4), "y": (4, 4)}, ["x", None]),
        ({"x": (2, 4)}, [None]),
        ({"mu['w']": (4, 4)}, ["state['opt'].mu['w']"]),
    ],
)
def test_arguments_are_found_by_the_names_of_their_keys(arguments, expected):
    found = shared_arguments([(path, shape, "float32") for path, shape in arguments.items()], TRAIN)
    assert [found[i].path if i in found else None for i in range(len(arguments))] == expected
