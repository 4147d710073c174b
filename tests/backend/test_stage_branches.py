"""Collectives of all devices in what one stage of a pipeline runs: found in compiled HLO, and steps that would hang by
them, against one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import MeshConfig
from autoshard import jaxpr as jx
from autoshard.backend.stage_branches import stray_collectives
from autoshard.errors import PipelineError, PipelineWarning
from tests.models import cross_entropy, tokens
from tests.pipelined_steps import decoder_params, rms_norm

AXES = {"stage": 2, "data": 2, "model": 2}
SWAPPED = P("data", None, "model"), P("model", None, "data")


def exchanged(x: jax.Array, over: str) -> jax.Array:
    return lax.ppermute(x, over, [(0, 1), (1, 0)])


def in_a_branch(fun: Callable[[jax.Array], jax.Array], *, together: bool = False) -> str:
    """The HLO of a program that runs ``fun`` on the devices of one stage."""

    def run(x: jax.Array) -> jax.Array:
        with jx.branch_runs((1, 1), 2, together=together):
            return lax.cond(lax.axis_index("stage") == 0, fun, lambda x: x, x)

    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES), check_vma=False)
    shape = 4, 4, 8 if together else 4  # JAX's cache of what is compiled does not look at names
    return jax.jit(mapped).lower(jnp.ones(shape)).compile().as_text() or ""


@pytest.mark.parametrize(
    ("fun", "strays"),
    [
        (lambda x: lax.psum(x, "model"), []),
        (lambda x: lax.psum(x, ("data", "model")), []),
        (lambda x: lax.psum(x, ("stage", "model")), ["all-reduce"]),
        (lambda x: exchanged(x, "model"), ["collective-permute"]),
    ],
)
def test_who_takes_part(fun: Any, strays: list[str]) -> None:
    mesh = MeshConfig(axes=AXES).mesh()
    assert [s.kind for s in stray_collectives(in_a_branch(fun), mesh, "stage")] == strays
    assert not stray_collectives(in_a_branch(fun, together=True), mesh, "stage")


@pytest.mark.parametrize(("target", "strays"), [('_xla_megascale_target="{1}x{0:7}",', []), ("", ["send"])])
def test_a_transfer_between_slices_whose_devices_are_not_known_is_of_all(target: str, strays: list[str]) -> None:
    attributes = f'frontend_attributes={{{target}_xla_megascale_transfer_type="ALL_REDUCE"}}'
    text = in_a_branch(lambda x: lax.psum(x, "model")).replace(" all-reduce(", " send(")
    text = re.sub(r"(send\(.*)replica_groups=[^ ]*,", rf"\1{attributes},", text)
    assert attributes in text
    assert [s.kind for s in stray_collectives(text, MeshConfig(axes=AXES).mesh(), "stage")] == strays


def pinned(x: jax.Array) -> jax.Array:
    """``x``, of three dimensions, with axes that change places: each device needs what another has."""
    first, second = SWAPPED
    return autoshard.annotate(2 * autoshard.annotate(x, first), second)


def mlp(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def loss_of(params: Any, batch: Any, *, embed: Any = None, block: Any = mlp, head: Any = None) -> jax.Array:
    """Of a decoder without attention; ``embed`` and ``head`` change what is in their place."""
    x = params["embed"][batch["x"]]
    x, _ = lax.scan(block, embed(x) if embed else x, params["layers"])
    logits = rms_norm(x, params["scale"]) @ params["head"]
    return cross_entropy(head(logits) if head else logits, batch["y"])


def trained_once(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    def step(params: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    return step


def planned(loss: Callable[..., jax.Array], schedule: str = "1f1b") -> Any:
    mesh = MeshConfig(axes=AXES, pipeline="stage")
    return autoshard.jit(trained_once(loss), mesh=mesh, microbatches=4, schedule=schedule)


@pytest.mark.parametrize(("place", "schedule"), [("embed", "1f1b"), ("head", "zb-h1")])
def test_axes_that_change_places_in_what_one_stage_runs(place: str, schedule: str) -> None:
    """The embedding runs on the first stage alone, its gradient scattered there; the head on the last."""

    def loss(params: Any, batch: Any) -> jax.Array:
        return loss_of(params, batch, **{place: pinned})

    params, batch, step = decoder_params(2), tokens(0), planned(loss, schedule)
    with pytest.warns(PipelineWarning, match=r"collective-permute of all devices .*test_stage_branches\.py:\d+"):
        found = step(params, batch)
    expected = jax.jit(trained_once(loss))(params, batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6), expected, found)


def test_a_branch_that_values_decide_is_refused() -> None:
    """Its course may be another on each stage, whatever is run together around it."""

    def block(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = lax.cond(w["norm"].sum() > 0, pinned, lambda h: h, x @ w["up"])
        return x + jnp.tanh(h) @ w["down"], None

    step = planned(lambda params, batch: loss_of(params, batch, block=block))
    refused = pytest.raises(PipelineError, match=r"test_stage_branches\.py:\d+.* wait for each other for ever")
    with refused, pytest.warns(PipelineWarning):
        step.lower(decoder_params(2), tokens(0))
