"""MFU: the products of a step as it is written, at the peak of the chips; also of modules, and in the line of `fit`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard
from autoshard.machine.hardware import load_hardware
from autoshard.train.peak import peak_seconds


def plain(w: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - grads, value


def modules(model: nnx.Linear, x: Any) -> Any:
    value, grads = nnx.value_and_grad(lambda model: jnp.sum(jnp.tanh(model(x)) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, nnx.state(model, nnx.Param), grads))
    return {"loss": value}


@pytest.mark.parametrize("kind", ["plain", "modules"])
def test_the_seconds_at_the_peak_are_those_of_the_products_alone(kind: str):
    step: Any = autoshard.jit(plain if kind == "plain" else modules, mesh={"data": 8}, strategy="dp")
    linear = nnx.Linear(4, 16, use_bias=False, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    state = jax.ShapeDtypeStruct((4, 16), jnp.bfloat16) if kind == "plain" else linear
    hardware = load_hardware("tpu-v5e")
    for platform, wanted in (("tpu", 2 * 2 * 8 * 4 * 16 / hardware.flops["bfloat16"] / 2), ("cpu", None)):
        devices = np.array([SimpleNamespace(platform=platform)])
        plan: Any = SimpleNamespace(
            mesh=SimpleNamespace(hardware=hardware, size=2), jax_mesh=SimpleNamespace(devices=devices)
        )
        found = peak_seconds(step, plan, state, jax.ShapeDtypeStruct((8, 4), jnp.bfloat16))
        assert found == (wanted if wanted is None else pytest.approx(wanted, rel=1e-12))


@pytest.mark.parametrize("kind", ["plain", "modules"])
def test_fit_shows_the_share_of_the_peak(kind: str, tmp_path: Path, monkeypatch: Any, capsys: Any):
    def on_a_chip(step: Any, plan: Any, *arguments: Any) -> float:
        assert step.written(*arguments).jaxpr.eqns
        return 0.5

    monkeypatch.setattr(sys.modules["autoshard.train.fit"], "peak_seconds", on_a_chip)
    state: Any = jnp.ones((4, 16)) if kind == "plain" else nnx.Linear(4, 16, use_bias=False, rngs=nnx.Rngs(0))
    step = autoshard.jit(plain if kind == "plain" else modules, mesh={"data": 8}, strategy="dp")
    autoshard.train.fit(step, state, [np.ones((8, 4), np.float32)], steps=20, log=tmp_path)
    assert " MFU " in capsys.readouterr().out
