"""What is asked of residual groups by name and by pattern."""

from __future__ import annotations

import itertools

import pytest

from autoshard.errors import PassError
from autoshard.transforms.held_values.names import ALL, Member, ResidualGroup, asked_for, layers_again

LAYERS = {"attention": 4, "attention#2": 1, "*.up": 3, "*.mlp.up": 3, "t": 2}
GROUPS = [ResidualGroup(name, ("", "", (), ""), (Member(None, n, None),)) for name, n in LAYERS.items()]


def asked(**again):
    return {name: n for name, n in layers_again(GROUPS, again).items() if n}


def test_a_groups_own_name_counts_before_all_patterns():
    both = {"attention": 4, "attention#2": 1}
    assert asked(**{"attention": None}) == asked(**{"att*": None}) == both
    for order in itertools.permutations([("*", 0), ("attention", 3), ("attention#2", 0)]):
        assert asked(**dict(order)) == {"attention": 3}
    assert asked(**{"*.up": 2}) == {"*.up": 2, "*.mlp.up": 2}
    assert asked(**{"*.mlp.up": 0, "*.up": 2}) == {"*.up": 2}
    assert asked(**{"*": 1, "*p": 0}) == {"attention": 1, "attention#2": 1, "t": 1}
    with pytest.raises(PassError, match="'attention#2' cannot be made again in 3 layers: it has 1"):
        asked(attention=3)


def test_every_choice_can_be_asked_for():
    """Of each group none, one or all of the layers."""
    for counts in itertools.product(*({0, 1, n} for n in LAYERS.values())):
        again = dict(zip(LAYERS, counts, strict=True))
        wanted = asked_for(GROUPS, again)
        assert layers_again(GROUPS, {name: None if n == ALL else n for name, n in wanted.items()}) == again
