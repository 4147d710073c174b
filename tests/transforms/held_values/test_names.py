"""What is asked of residual groups by name and by pattern."""

from __future__ import annotations

import itertools

import pytest

from autoshard.errors import PassError
from autoshard.transforms.held_values.names import LayerCounts, Member, ResidualGroup, asked_for, layer_counts

LAYERS = {"attention": 4, "attention#2": 1, "*.up": 3, "*.mlp.up": 3, "t": 2}
GROUPS = [ResidualGroup(name, ("", "", (), ""), (Member(None, n, None),)) for name, n in LAYERS.items()]


def asked(**again):
    counts = {name: LayerCounts(n) for name, n in again.items()}
    return {name: n.again for name, n in layer_counts(GROUPS, counts).items() if n.again}


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


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("12", (12, 0)),
        ("all", (None, 0)),
        ("host", (0, None)),
        ("host:12", (0, 12)),
        ("4+host", (4, None)),
        ("4+host:12", (4, 12)),
    ],
)
def test_counts_are_written_as_they_are_read(text, counts):
    assert LayerCounts.parse(text) == counts
    assert str(LayerCounts(*counts)) == text


@pytest.mark.parametrize("text", ["", "-1", "none", "+host", "all+host", "host:", "4+", "host+4", "4 + host"])
def test_other_text_is_no_count(text):
    assert LayerCounts.parse(text) is None


def test_more_layers_than_there_are_on_the_host():
    assert layer_counts(GROUPS, {"*.up": LayerCounts(1, None)})["*.up"] == (1, 2)
    with pytest.raises(PassError, match=r"'t' cannot be made again or on the host in 3 layers \(1\+host:2\): it has 2"):
        layer_counts(GROUPS, {"t": LayerCounts(1, 2)})
    with pytest.raises(PassError, match="'t' cannot be .* in 3 layers: it has 2"):
        layer_counts(GROUPS, {"t": LayerCounts(3, None)})


def test_every_choice_can_be_asked_for():
    """Of each group none, one or all of the layers, made again or on the host."""
    for each in itertools.product(*([(0, 0), (1, 0), (n, 0), (0, n), (1, n - 1)] for n in LAYERS.values())):
        counts = {name: LayerCounts(*n) for name, n in zip(LAYERS, each, strict=True)}
        wanted = asked_for(GROUPS, counts)
        assert layer_counts(GROUPS, {name: LayerCounts.parse(text) for name, text in wanted.items()}) == counts
