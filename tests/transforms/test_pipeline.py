"""What a pass must leave as it was, and how a user names passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from autoshard import jaxpr as jx
from autoshard.errors import PassError
from autoshard.ir.program import Program
from autoshard.ir.trace import trace
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.passes import PASSES, DeadCode, Recompute
from autoshard.rules import SHIPPED
from autoshard.transforms import pipeline
from autoshard.transforms.pipeline import KeptPrograms, Pass, Pipeline, parse_passes

HARDWARE = Hardware("cpu", {"float32": 1e11}, 8e9, 1e10, {"host": Link("host", 1e10, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data",), (8,), HARDWARE)


def step(x, y):
    jax.debug.callback(lambda v: None, x.sum())
    return jnp.sin(x) * y, x + y


def program(fun=step) -> Program:
    x = jax.ShapeDtypeStruct((8, 4), "float32")
    return trace(jax.jit(fun), (x, x), {}, MESH, rules=SHIPPED)


@dataclass(frozen=True)
class Same(Pass):
    name: ClassVar[str] = "same"

    def __call__(self, program: Program) -> Program:
        return program


@dataclass(frozen=True)
class Swap(Pass):
    """Breaks what its option names."""

    name: ClassVar[str] = "swap"
    what: str = "results"

    def __call__(self, program: Program) -> Program:
        jaxpr = program.jaxpr
        a, b = jaxpr.outvars
        eqns = jaxpr.eqns
        match self.what:
            case "results":
                return program.with_jaxpr(jx.with_eqns(jaxpr, eqns, outvars=[a]))
            case "input":
                x, y = jaxpr.invars
                return program.with_jaxpr(jx.with_eqns(jaxpr, [], invars=[x, y, x], outvars=[x, y]))
            case "shape":
                lost = jx.stacked_var(jaxpr.invars[0], 2)
                return program.with_jaxpr(jx.with_eqns(jaxpr, [], invars=[lost, jaxpr.invars[1]], outvars=[a, b]))
            case "order":
                return program.with_jaxpr(jx.with_eqns(jaxpr, eqns[::-1]))
            case "effect":
                return program.with_jaxpr(jx.with_eqns(jaxpr, [e for e in eqns if not e.effects]))
            case "effect twice":
                return program.with_jaxpr(jx.with_eqns(jaxpr, [e for e in eqns for _ in range(1 + bool(e.effects))]))
            case _:
                raise AssertionError(self.what)


@dataclass(frozen=True)
class Shared(Pass):
    """Runs one body under two equations."""

    name: ClassVar[str] = "shared"

    def __call__(self, program: Program) -> Program:
        (eqn,) = (e for e in program.jaxpr.eqns if jx.regions(e))
        twin = eqn.replace(outvars=[jx.new_var(v) for v in eqn.outvars])
        return program.with_jaxpr(jx.with_eqns(program.jaxpr, [twin, *program.jaxpr.eqns]))


def test_reports_what_each_pass_did():
    before = program(lambda x, y: (step(x, y)[0], x)[0] + 0 * jnp.cos(y)[0, 0])
    after, reports = Pipeline((Same(), DeadCode())).run(before)
    assert [r.name for r in reports] == ["same", "dead_code"]
    assert reports[0].change == "nothing to change"
    assert reports[0].equations_before == reports[0].equations_after == reports[1].equations_before
    assert reports[1].equations_after < reports[1].equations_before  # the sum x + y
    assert str(reports[0]).startswith("same: nothing to change (")
    assert after.inputs == before.inputs


def test_no_passes_change_nothing():
    before = program()
    assert Pipeline().run(before) == (before, ())


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("results", r"the pass swap:results changed the number of outputs from 2 to 1"),
        ("input", r"the pass swap:input changed the number of inputs from 2 to 3"),
        ("shape", r"the pass swap:shape changed x from float32\[8,4\] to float32\[2,8,4\]"),
        ("order", r"the pass swap:order returned a program that is not well formed"),
        ("effect", r"the pass swap:effect removed or duplicated equations with effects: debug_callback 1 -> 0"),
        ("effect twice", r"the pass swap:effect twice removed or duplicated .*: debug_callback 1 -> 2"),
    ],
)
def test_a_pass_that_breaks_the_program_is_named(what, message):
    with pytest.raises(PassError, match=message):
        Pipeline((Swap(what),)).run(program())


def test_sequences_that_begin_alike_share_their_beginning(monkeypatch):
    ran = list[int]()

    @dataclass(frozen=True)
    class Counted(Pass):
        name: ClassVar[str] = "counted"
        number: int = 0

        def __call__(self, program: Program) -> Program:
            ran.append(self.number)
            return program

    one, other, kept = program(), program(), KeptPrograms()
    for p, numbers in ((one, (1, 2)), (one, (1, 3)), (other, (1,)), (one, (1, 2))):
        found, reports = Pipeline(tuple(map(Counted, numbers)), kept).run(p)
        assert found is p
        assert [r.written for r in reports] == [f"counted:{n}" for n in numbers]
    assert ran == [1, 2, 3, 1]
    monkeypatch.setattr(pipeline, "MIN_KEPT", 1)
    monkeypatch.setattr(pipeline, "MAX_KEPT_EQUATIONS", 0)
    for _ in range(2):
        Pipeline((Counted(4), Counted(5)), kept).run(one)
    assert ran[4:] == [4, 5, 4, 5]


def test_variables_are_defined_once_again_after_a_pass_that_shares_a_body():
    def loop(x, y):
        return jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) * y, x)

    after, _ = Pipeline((Shared(),)).run(program(loop))
    first, second = (jx.regions(e)[0].body for e in after.jaxpr.eqns if jx.regions(e))
    assert not {v for e in first.eqns for v in e.outvars} & {v for e in second.eqns for v in e.outvars}


def test_parse_takes_names_options_and_passes():
    specs = ["dead_code", "recompute", "recompute:full", "recompute : dots_saveable", Same()]
    expected = (DeadCode(), Recompute(), Recompute("full"), Recompute("dots_saveable"), Same())
    assert parse_passes(specs, PASSES) == expected
    assert [str(p) for p in expected] == [
        "dead_code",
        "recompute:full",
        "recompute:full",
        "recompute:dots_saveable",
        "same",
    ]
    assert parse_passes("dead_code", PASSES) == (DeadCode(),)
    assert parse_passes(Same(), PASSES) == (Same(),)
    assert parse_passes(None, PASSES) == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("recomputee:full", r"unknown pass 'recomputee' in passes='recomputee:full'; did you mean 'recompute'\?"),
        (
            "zzz",
            r"unknown pass 'zzz' .*known: 'accumulate', 'attention', 'attention_operands', 'dead_code', 'experts', "
            "'losses', 'microbatch', 'norms', 'offload', 'one_hot', 'pad_uneven', 'recompute', 'rotary', "
            "'sum_products', 'transposed_products'",
        ),
        ("dead_code:all", r"'dead_code' takes no option, but dead_code:all gives it 'all'"),
        ("recompute:dot_saveable", r"no policy 'dot_saveable'; did you mean 'dots_saveable'\?"),
        ("recompute:save_only_these_names", r"no policy 'save_only_these_names'"),
        (DeadCode, r"not a Pass or the name of one, such as 'accumulate'"),
        (3, r"passes contains 3"),
    ],
)
def test_parse_refuses(spec, message):
    with pytest.raises(PassError, match=message):
        parse_passes([spec], PASSES)


def test_a_pass_without_a_call_says_so():
    @dataclass(frozen=True)
    class Empty(Pass):
        name: ClassVar[str] = "empty"

    with pytest.raises(PassError, match="the pass Empty has no __call__"):
        Pipeline((Empty(),)).run(program())
