"""How slots and what stages send are split."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.pipelining.rings import planned_specs, sent_specs

MESH = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))


def constrained(x: Any, spec: P) -> Any:
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, spec))


def test_constraints_casts_local_forms_and_scans_say_how_values_are_split() -> None:
    def step(x: Any, w: Any) -> Any:
        local = jax.shard_map(jnp.dot, mesh=MESH, in_specs=(P(), P(None, "model")), out_specs=P(None, "model"))
        y = local(x, w)
        wide = constrained(y, P("model")).astype(jnp.float64)
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(constrained(h, P(None, "model"))), None), x, None, length=2)
        return y, wide, h, jnp.tanh(y)

    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(step)(jnp.ones((8, 8), jnp.float32), jnp.ones((8, 8), jnp.float32)).jaxpr
    specs = planned_specs(jaxpr)
    (x, w), (y, wide, h, other) = jaxpr.invars, jaxpr.outvars
    assert [specs.get(v) for v in (x, w)] == [P(), P(None, "model")]
    assert [specs.get(v) for v in (y, wide, h, other)] == [P(None, "model"), P("model"), P(None, "model"), None]


def test_what_stages_send_is_split_as_finely_as_another_of_its_shape() -> None:
    jaxpr = jax.make_jaxpr(lambda *xs: xs)(*(jnp.ones(s) for s in ((8, 4), (8, 4), (4, 8), (8, 4)))).jaxpr
    whole, fine, turned, unknown = jaxpr.invars
    specs = {whole: P(), fine: P(None, "model"), turned: P("model")}
    assert sent_specs(jaxpr.invars, specs) == {whole: P(None, "model"), fine: P(None, "model"), turned: P("model")}
    assert sent_specs([whole, unknown], specs) == {whole: P()}
