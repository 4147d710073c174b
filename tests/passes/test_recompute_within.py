"""What is chosen to be held within memory is what is done, and takes what was promised."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.machine.mesh_config import MeshConfig
from autoshard.passes import Recompute
from autoshard.transforms.held_values.names import residual_groups
from autoshard.transforms.pipeline import Pipeline
from tests.passes.test_recompute import traced

BYTES = 1000.0


def shapes(tree):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, "float32"), tree, is_leaf=lambda s: isinstance(s, tuple))


def gradients(loss, weights):
    return traced(jax.value_and_grad(loss), shapes(weights), shapes((8, 16)))


def one_name_twice():
    """A weight of all layers that the head multiplies by too: ``s`` in 4 layers and ``s#2`` in one."""

    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, o: (h + jnp.sin(jnp.sin(h @ w["s"]) @ o), None), x, w["layers"])
        return (jnp.sin(jnp.sin(h @ w["s"]) @ w["t"]) ** 2).mean()

    return gradients(loss, {"layers": (4, 32, 16), "s": (16, 32), "t": (32, 8)})


def one_name_in_another():
    """Unrolled layers: ``*.up`` is also a pattern that ``*.mlp.up`` matches."""

    def loss(weights, x):
        for w in weights:
            x = jnp.sin(jnp.tanh(jnp.tanh(x @ w["up"]) @ w["mlp"]["up"]) @ w["down"])
        return (x**2).mean()

    return gradients(loss, [{"up": (16, 32), "mlp": {"up": (32, 32)}, "down": (32, 16)}] * 3)


def several_scans(needed=(True, True), layers=(4, 4), effect=lambda h: None):
    """Two scans over layers whose values are the same ones; a scan that is linear needs none of them."""

    def loss(weights, x):
        for w, is_needed in zip(weights, needed, strict=True):

            def layer(h, up, is_needed=is_needed):
                effect(h)
                a = h @ up
                return (h + (jnp.sin(a) if is_needed else a)), None

            x, _ = jax.lax.scan(layer, x, w)
        return (x**2).mean()

    return gradients(loss, [(n, 16, 16) for n in layers])


def held_short_of(before, short, cheap=""):
    """The promise of what is chosen where so many layers' bytes are missing, in how many layers each value is then made
    again, and the seconds that this takes."""
    groups = residual_groups(before)
    prices = {g.name: (BYTES, 0.01 if g.name == cheap else 1.0) for g in groups}
    found = Recompute("full").within(before, prices, {}, [(0.0, -short * BYTES)])
    assert found is not None
    after, _ = Pipeline((found[0],)).run(before)
    again = {g.name: g.again for g in residual_groups(after)}
    return found[1], again, sum(n * prices[name][1] for name, n in again.items())


@pytest.mark.parametrize("short", [1, 3, 4, 6])
@pytest.mark.parametrize(("program", "cheap"), [(one_name_twice, "s"), (one_name_twice, "layers"), (several_scans, "")])
def test_what_is_chosen_is_what_is_done(program, cheap, short):
    promised, again, seconds = held_short_of(program(), short, cheap)
    assert sum(again.values()) == short
    assert promised == pytest.approx(seconds)


@pytest.mark.parametrize("short", [1, 2])
@pytest.mark.parametrize("cheap", ["*.up", "*.mlp.up"])
def test_a_name_that_another_matches_is_chosen_alone(cheap, short):
    _, again, _ = held_short_of(one_name_in_another(), short, cheap)
    assert {name for name, n in again.items() if n} == {cheap}


def test_layers_that_need_no_value_are_passed_over():
    """The first scan is linear: the value is made again in layers of the second one."""
    promised, again, seconds = held_short_of(several_scans(needed=(False, True)), 3)
    assert sum(again.values()) == 3
    assert promised == seconds == 3


def test_scans_that_cannot_be_cut_are_held_whole():
    """The last one, of six layers; the first one makes its four again."""
    printing = several_scans(layers=(4, 6), effect=lambda h: jax.debug.print("{}", h[0, 0]))
    promised, again, seconds = held_short_of(printing, 2)
    assert sum(again.values()) == promised == seconds == 4


def test_on_gpus_all_layers_of_a_scan_make_a_value_again_or_none():
    """Short of two layers' values the first scan makes its four again; elsewhere it is cut."""
    before = several_scans(layers=(4, 6))
    cluster = MeshConfig(axes={"x": 8}, gpu="h100").mesh()
    on_gpus = replace(before, mesh=replace(before.mesh, target=cluster.target))
    found = [sorted(held_short_of(program, 2)[1].values()) for program in (before, on_gpus)]
    assert found == [[2], [4]]


@pytest.mark.parametrize("now", [0, 3, 4, 6, 8])
def test_what_several_scans_hold_is_counted_once(now):
    """With no room beyond it, no more is held than now."""
    before = several_scans()
    (group,) = residual_groups(before)
    (chosen, seconds) = Recompute("full").within(
        before, {group.name: (BYTES, 1.0)}, {group.name: (8 - now, 0)}, [(10.0, 0.0)]
    )
    after, _ = Pipeline((chosen,)).run(before)
    assert [g.again for g in residual_groups(after)] == [8 - now]
    assert seconds == pytest.approx(10)
