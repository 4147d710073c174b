"""In what plans of several processes differ; `test_process_local.py` has two processes whose plans do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.backend.same_plan import Summary, check_agreement, collective_order, differences, plan_summary

MESH = {"data": 2, "model": 2}


def summary(rows: int = 8, **options: object) -> Summary:
    given = {"mesh": MESH, "strategy": "dp", "passes": ["microbatch:1"], **options}
    step = autoshard.jit(lambda batch: (batch["inputs"] @ jnp.ones((64, 64))).mean(), **given)  # type: ignore[arg-type]
    return plan_summary(step.plan({"inputs": jnp.ones((rows, 64))}))


def test_the_first_differences_are_named_with_the_processes():
    own = summary()
    for other, named in (
        (summary(strategy="fsdp"), "strategy: dp in process 0, fsdp in process 2"),
        (summary(mesh={"data": 4}), "mesh: (data=2, model=2) of cpu in process 0, (data=4) of cpu in process 2"),
        (summary(rows=4), "batch['inputs']: float32[8, 64] in process 0, float32[4, 64] in process 2"),
        (summary(passes=["microbatch:2"]), "passes: microbatch:1 in process 0, microbatch:2 in process 2"),
        (
            summary(in_shardings=({"inputs": jax.sharding.PartitionSpec("model")},)),
            "the spec of batch['inputs']: [data+model, _] in process 0, [model, _] in process 2",
        ),
        ({**own, "x": "int32[2]"}, "x: absent in process 0, int32[2] in process 2"),
    ):
        assert differences({0: own, 1: own, 2: other}).startswith(named)


def test_no_more_than_a_few_are_spelled_out():
    wide, narrow = (dict.fromkeys("abcde", f"float32[{size}]") for size in (2, 4))
    said = differences({0: wide, 1: narrow})
    assert said.endswith("; c: float32[2] in process 0, float32[4] in process 1; 2 more")
    assert "d: " not in said


def test_where_plans_say_the_same_the_function_differs():
    assert "the function itself differs" in differences({0: summary(), 1: summary()})


def test_nothing_is_sent_where_digests_agree():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    check_agreement(mesh, "the same", "the plan", lambda: pytest.fail("asked for a summary"))


def test_collectives_are_named_in_the_order_in_which_they_start():
    def order(*lines: str) -> Summary:
        return collective_order("HloModule step\n\nENTRY main {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n")

    gather = "a = (f32[4], f32[8]) all-gather-start(w), dimensions={0}"
    reduce, done = "b = f32[2] all-reduce(x), to_apply=add", "c = f32[8] all-gather-done(a)"
    assert order(gather, reduce, done) == {
        "collective 1": "all-gather-start of (f32[4], f32[8])",
        "collective 2": "all-reduce of f32[2]",
    }
    assert differences({0: order(gather, reduce, done), 1: order(reduce, gather, done)}).startswith(
        "collective 1: all-gather-start of (f32[4], f32[8]) in process 0, all-reduce of f32[2] in process 1; "
    )
