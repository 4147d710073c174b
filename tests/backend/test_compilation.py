"""The compilation of a plan: whether it fits, the remedies, and the report."""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import autoshard
from autoshard.backend.compilation import OutOfMemory, compile_plan, memory_usage, parse_out_of_memory
from autoshard.backend.compile_report import print_compilation
from autoshard.machine.tpu_slice import TpuSlice

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def step(w, x):
    return w - 0.1 * (x.T @ jnp.tanh(x @ w))


@pytest.fixture(scope="module")
def made():
    jitted = autoshard.jit(step, mesh={"data": 4, "model": 2}, strategy="fsdp", donate_argnums=0)
    return compile_plan(jitted.plan(X, X), jitted.lower(X, X))


def shown(c, **settings):
    out = io.StringIO()
    print_compilation(c, Console(file=out, soft_wrap=True, **settings))
    return out.getvalue()


def over(c, memory):
    """``c`` on a chip with ``memory`` bytes."""
    mesh = replace(c.plan.mesh, hardware=replace(c.plan.mesh.hardware, memory=memory))
    return replace(c, plan=replace(c.plan, mesh=mesh))


@dataclass
class Refused:
    """A lowering that its compiler refuses."""

    message: str

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


def test_it_fits_and_is_audited(made):
    assert made.fits
    assert made.remedies == ()
    assert made.usage.arguments == 2 * 64 * 64 * 4 // 8
    assert made.usage.peak == made.usage.arguments + made.usage.results - made.usage.aliased + made.usage.temporaries
    assert made.audit.emitted
    assert made.estimate.transfers == pytest.approx(sum(map(made.collective_seconds, made.audit.emitted)))
    text = shown(made)
    assert text.startswith("Fits on (data=4, model=2) of cpu")
    assert "tests/backend/test_compilation.py:25" in text
    assert "\x1b" not in text


def test_the_audit_is_the_public_one(made):
    jitted = autoshard.jit(step, mesh={"data": 4, "model": 2}, strategy="fsdp", donate_argnums=0)
    assert autoshard.audit(jitted.lower(X, X).compile(), made.plan).rows == made.audit.rows


def test_json_has_the_documented_keys(made):
    found = json.loads(json.dumps(made.as_json()))
    assert found["fits"] is True
    assert found["needs"] == made.usage.peak
    assert found["memory"]["planned"]["parameters"] == made.plan.memory.parameters
    assert found["estimate"]["sum"] == pytest.approx(made.estimate.seconds)
    assert found["audit"]["clean"] is made.audit.clean
    first = found["collectives"][0]
    assert {"kind", "axes", "bytes", "count", "source", "operation", "seconds"} <= set(first)
    assert "reduce_scatter" in " ".join(c["operation"] for c in found["collectives"])


def test_unplanned_collectives_are_red_with_their_source(made):
    planned = replace(made.plan, cost=replace(made.plan.cost, collectives=()))
    c = replace(
        made, plan=planned, audit=autoshard.backend.audit.audit_collectives((), made.audit.emitted, planned.mesh)
    )
    assert not c.audit.clean
    coloured = shown(c, force_terminal=True, color_system="standard")
    red = [line for line in coloured.splitlines() if line.startswith("\x1b[31m")]
    assert any("unplanned" in line for line in red)
    assert any("from tests/backend/test_compilation.py:25: jit(step)" in line for line in red)
    assert "\x1b" not in shown(c)


def test_remedies_where_it_does_not_fit(made):
    c = over(made, 1024)
    assert not c.fits
    text = " ".join(shown(c).split())
    assert f"{made.usage.peak - 1024:,}".replace(",", "") in str(c.needed_bytes - c.available_bytes)
    assert text.startswith("DOES NOT FIT")
    assert "strategy: auto in place of fsdp" in text
    assert "a smaller batch" in c.remedies[-1]


@pytest.mark.parametrize(
    ("message", "needs", "has"),
    [
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (19.53G) exceeds available HBM (15.75G). HLO module: jit_g.", 19.53, 15.75),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity "
         "by 4.75G.", 20.5, 15.75),
    ],
)  # fmt: skip
def test_out_of_memory_messages_are_parsed(made, message, needs, has):
    assert parse_out_of_memory(message) == OutOfMemory(round(needs * 2**30), round(has * 2**30))
    c = compile_plan(made.plan, Refused(message))
    assert not c.fits
    assert c.as_json()["audit"] is None
    assert f"{needs - has:.2f} GiB too much" in " ".join(shown(c).split())


def test_the_host_s_memory_is_no_part_of_the_peak(made):
    """Figures of a step on v5e whose optimizer state is 64 MiB a chip, as libtpu 0.0.50 gives them."""
    sizes = {"argument": 64, "output": 64, "alias": 64, "temp": 128, "generated_code": 1}
    host = {"host_argument": 64, "host_output": 64, "host_alias": 64, "host_temp": 0}
    reported = SimpleNamespace(**{f"{k}_size_in_bytes": v for k, v in (sizes | host).items()}, peak_memory_in_bytes=256)
    chips = replace(made.plan.mesh, target=TpuSlice("v5e:4x2"))
    used = memory_usage(SimpleNamespace(memory_analysis=lambda: reported), chips)
    assert (used.peak, used.host) == (192, 64)
    there = SimpleNamespace(**vars(reported) | {"host_temp_size_in_bytes": 500, "total_allocation_bytes": 150})
    there.peak_memory_in_bytes = 564  # what is larger on the host, and the arguments
    used = memory_usage(SimpleNamespace(memory_analysis=lambda: there), chips)
    assert (used.peak, used.host) == (150, 564)
    text = shown(replace(made, usage=replace(made.usage, host=3 * 2**20)))
    assert re.search(r"host +0 B +3.0 MiB", text)


def test_any_other_compiler_error_is_raised(made):
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such flag"):
        compile_plan(made.plan, Refused("INVALID_ARGUMENT: no such flag"))
