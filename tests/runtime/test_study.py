"""What a plan can be asked: the plan under other pins, the cost of other specs, the difference of two plans."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ConfigError, PlanError, SpecError


def chain(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(x @ a) @ b


SHAPES = [jax.ShapeDtypeStruct(s, "float32") for s in ((8, 1024), (1024, 2048), (2048, 1024))]


def plan(axes: dict[str, int] | None = None) -> autoshard.Plan:
    return autoshard.jit(chain, mesh=axes or {"m": 8}, out_shardings=P()).plan(*SHAPES)


def test_what_if_is_the_plan_under_a_pin() -> None:
    first = plan()
    other = first.what_if({"a": P("m", None)})
    assert str(other.inputs[1].spec) == "[m, _]"
    assert other.cost.seconds > first.cost.seconds
    same = autoshard.jit(chain, mesh={"m": 8}, in_shardings=(None, P("m", None), None), out_shardings=P()).plan(*SHAPES)
    assert other == same
    assert other.what_if({"a": first.in_specs[1]}).cost.seconds == pytest.approx(first.cost.seconds)


def test_why_prices_every_other_spec_as_the_plan_with_it() -> None:
    first = plan()
    text = first.why("a")
    lines = [line.split() for line in text.splitlines() if line.strip().startswith("[")]
    assert lines[0][:2] == ["[_,", "m]"]
    assert text.startswith("a of chain\nfloat32[1024, 2048] has spec [_, m]: cheapest by the cost model.")
    others = {"[m, _]": P("m", None), "[_, _]": P()}
    for line in lines[1:]:
        spec, more = " ".join(line[:2]), float(line[-1].rstrip("%")) / 100
        slower = first.what_if({"a": others[spec]}).cost.seconds / first.cost.seconds - 1
        assert slower == pytest.approx(more, abs=1e-3)


@pytest.mark.parametrize("axes", [{"m": 8}, {"m": 2, "n": 4}], ids=str)
def test_the_planned_spec_costs_nothing_more_and_no_other_costs_less(axes: dict[str, int]) -> None:
    for path in ("x", "a", "b"):
        rows = [line for line in plan(axes).why(path).splitlines() if line.strip().startswith("[")]
        assert rows[0].endswith("+0.0%")
        assert all("+" in row.split("]")[1] for row in rows)


def test_the_difference_of_two_plans_names_arguments_and_lines() -> None:
    first = plan()
    text = first.diff(first.what_if({"a": P("m", None)}))
    assert re.search(r"1 of 3 arrays has another spec|[23] of 3 arrays have another spec", text)
    assert "compute" in text
    assert "All have the same specs." in first.diff(first)
    with pytest.raises(PlanError, match=r"of different steps: x is float32\[8, 1024\] in one"):
        first.diff(autoshard.jit(lambda x: x, mesh={"m": 8}).plan(SHAPES[1]))


def test_what_if_and_why_refuse_invalid_questions() -> None:
    with pytest.raises(SpecError, match="no argument of chain is called 'aa'; did you mean 'a'"):
        plan().why("aa")
    with pytest.raises(ConfigError, match=r"the pin 'w\*' matches no argument of chain"):
        plan().what_if({"w*": P("m")})
    with pytest.raises(SpecError, match="a: "):
        plan().what_if({"a": P("n")})


def test_a_loaded_plan_refuses_what_if_and_why(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    loaded = autoshard.Plan.load(tmp_path / "plan.json")
    assert "All have the same specs." in loaded.diff(plan())
    for ask in (lambda: loaded.why("a"), lambda: loaded.what_if({})):
        with pytest.raises(PlanError, match="a loaded plan has no step"):
            ask()
