"""Memory kinds written into lowered modules."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp

from autoshard import jaxpr as jx

X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def swap(state, unused, x, y):
    return x + 1.0, state * 0.5, y.sum()


def ends(lowered):
    """Of each argument its memory kind and the result that it is donated to, and the memory kinds of the results."""
    given, made = re.search(r"@main\((.*?)\) -> \((.*?)\) \{\n", lowered.as_text()).groups()
    found = []
    for argument in given.split("%arg")[1:]:
        alias = re.search(r"tf.aliasing_output = (\d)", argument)
        found.append((re.search(r'memory_kind = "(\w+)"', argument)[1], alias and int(alias[1])))
    return found, re.findall(r'memory_kind = "(\w+)"', made)


def test_arguments_and_results_are_where_they_are_said_to_be_and_no_donation_is_between_memories():
    kinds = ["pinned_host", "pinned_host", None, None]
    lowered = jax.jit(swap, donate_argnums=(0, 2)).lower(X, X, X, X)
    assert "memory_kind" not in lowered.as_text()
    assert re.findall(r"aliasing_output = (\d)", lowered.as_text()) == ["0", "1"], "matched by shape alone"
    jx.set_memory_kinds(lowered, kinds, [None, "pinned_host", None])
    host, device = "pinned_host", "device"
    assert ends(lowered) == ([(host, 1), (device, 0), (device, None)], [device, host, device])


def test_what_matches_no_result_in_its_memory_is_not_donated():
    lowered = jax.jit(lambda state, x: state + x, donate_argnums=0).lower(X, X)
    jx.set_memory_kinds(lowered, ["pinned_host", None], [None])
    assert ends(lowered) == ([("pinned_host", None), ("device", None)], ["device"])
