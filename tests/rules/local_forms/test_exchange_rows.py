"""Rows that are exchanged: whatever the load, none is dropped, and what fits goes in one round."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from autoshard.rules.local_forms.exchange_rows import exchange_rows
from autoshard.transforms import row_rounds
from autoshard.transforms.row_rounds import capacity, exchanges, group_capacity, in_rounds

ROWS = 256
RNG = np.random.default_rng(0)
LOADS = {
    "even": lambda groups: np.arange(ROWS) % groups,
    "uneven": lambda groups: np.minimum(RNG.geometric(0.3, ROWS), groups) - 1,
    "one group has all": lambda groups: np.full(ROWS, groups - 1),
    "out of bounds": lambda groups: RNG.integers(-3, groups + 3, ROWS),
}


def computed(groups: int, group_of: Any, rows: Any) -> tuple[Any, Any]:
    """Of each row its product with its group's number, and of each group the sum; zeros of rows without a group."""
    group = jnp.maximum(group_of, 0)
    valid = (group < groups)[:, None]
    return jnp.where(valid, rows * 3, 0), jax.ops.segment_sum(jnp.where(valid, rows, 0), group, groups)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("parts", "groups", "least"), [(2, 8, 128), (4, 64, 128), (8, 16, 128), (4, 64, 8)])
def test_every_row_comes_back_and_is_counted_once(
    parts: int, groups: int, least: int, load: str, monkeypatch: pytest.MonkeyPatch
):
    """Blocks of half the rows twice, where they have at least ``least`` places."""
    monkeypatch.setattr(row_rounds, "LEAST_PLACES", least)
    assert exchanges(capacity(ROWS // parts, parts))[0] == (2 if least == 8 else 1)
    group_of, rows = LOADS[load](groups).astype("int32"), RNG.normal(size=(ROWS, 4)).astype("float32")
    mesh = Mesh(np.asarray(jax.devices()[:parts]), ("x",))
    own = groups // parts

    def on_shard(group_of: Any, rows: Any) -> Any:
        return exchange_rows(("x",), partial(computed, own), group_of, [rows], own, [True, False])

    sharded = jax.jit(jax.shard_map(on_shard, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False))
    for got, want in zip(sharded(group_of, rows), computed(groups, group_of, rows), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_one_round_sends_is_in_no_loop_so_that_a_shared_expert_can_hide_it():
    """Schedulers move what a collective waits for beside others, but not into a loop or out of it."""
    mesh, shape = Mesh(np.asarray(jax.devices()), ("x",)), jax.ShapeDtypeStruct

    def on_shard(group_of: Any, rows: Any, shared: Any) -> Any:
        out, _ = exchange_rows(("x",), partial(computed, 2), group_of, [rows], 2, [True, False])
        return out + rows @ shared

    specs: Any = (P("x"), P("x"), P())
    sharded = jax.shard_map(on_shard, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False)
    traced = jax.make_jaxpr(sharded)(shape((64,), "int32"), shape((64, 4), "float32"), shape((4, 4), "float32"))
    (body,) = (e.params["jaxpr"] for e in traced.jaxpr.eqns if e.primitive.name == "shard_map")
    assert [e.primitive.name for e in body.eqns].count("all_to_all") == 3
    assert "while" not in {e.primitive.name for e in body.eqns}


def test_a_block_has_room_for_a_quarter_more_than_an_even_load_and_never_for_more_than_all():
    assert [capacity(n, 8) for n in (1024, 8, 7, 1)] == [160, 2, 1, 1]
    assert capacity(6, 1) == 6
    assert [group_capacity(1024, groups) for groups in (1, 8, 1000)] == [1024, 160, 8]


def test_sums_of_many_rounds_are_not_rounded_between_them() -> None:
    """In bfloat16 2,048 and eight are 2,048 again."""
    ones = jnp.ones((4096,), "bfloat16")

    def once(source: Any, filled: Any) -> list[Any]:
        return [jnp.take(ones, source, mode="fill", fill_value=0).sum()]

    for at_once in (1, 4):
        (total,) = in_rounds(once, jnp.zeros(4096, "int32"), (1, 8), [False], at_once=at_once)
        assert (total.dtype, float(total)) == (jnp.bfloat16, 4096.0)


def test_large_blocks_are_exchanged_in_two_halves():
    assert [exchanges(n) for n in (1, 255, 256, 1000)] == [(1, 1), (1, 255), (2, 128), (2, 504)]
