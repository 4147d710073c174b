"""The auditor: what it says of the rules, and that it would say if one were wrong."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax import lax

from autoshard import jaxpr as jx
from autoshard.ir.rule import parse, replicated_rule
from autoshard.rules import TABLE
from autoshard.rules.validation.audit import audit_factors, audit_passthrough, audit_samples, main, samples_of
from autoshard.rules.validation.case import load
from autoshard.rules.validation.missing_splits import audit_missing_splits
from autoshard.rules.validation.samples import Sample, samples

ALL = samples()
NAMES = sorted({s.name for s in ALL})
NOT_SAMPLED = {"from_edtype", "to_edtype", "with_memory_space_constraint"}
"""They occur only while JAX differentiates, or only on an accelerator."""


@pytest.mark.parametrize("name", NAMES)
def test_no_rule_is_wrong_and_what_is_missing_has_its_reason(name):
    _, findings = audit_samples(s for s in ALL if s.name == name)
    assert [str(f) for f in findings if not f.reason] == []


def test_every_rule_has_a_sample():
    assert {p.name for p in TABLE} - set(NAMES) == NOT_SAMPLED


@pytest.mark.parametrize(
    ("name", "fn", "shapes", "text", "expected"),
    [
        ("cumsum", lax.cumsum, [(4, 6)], "ab -> ab", "wrong: a over 2 devices gives other numbers"),
        (
            "cumsum",
            lax.cumsum,
            [(4, 6)],
            "ab -> ab {a: whole} | max: 0",
            "wrong: partial max of operand 0 does not pass through",
        ),
        ("cumsum", lax.cumsum, [(4, 6)], "ab -> ab {a: whole}", "missing: partial sum of operand 0 passes through"),
        (
            "mul",
            lax.mul,
            [(4,), (4,)],
            "a, a -> a | sum: 0+1",
            "wrong: partial sum of operand 0+1 does not pass through",
        ),
        (
            "dot_general",
            lax.dot,
            [(4, 6), (6, 2)],
            "ab, bc -> ac {b: max}",
            "wrong: b over 2 devices gives other numbers",
        ),
        (
            "dot_general",
            lax.dot,
            [(4, 6), (6, 2)],
            "ab, bc -> ac {b: whole}",
            "missing: operands split along (1, 0) -> sum",
        ),
        ("add", lax.add, [(4,), (4,)], ".,. -> .", "missing: operands split along (0, 0) -> 0"),
        ("exp", lax.exp, [(4,)], "a -> a | sum: 0", "wrong: partial sum of operand 0 does not pass through"),
        (
            "reduce_sum",
            lambda x: lax.reduce_sum(x, (0,)),
            [(4, 6)],
            "ab -> b",
            "wrong: a over 2 devices gives other numbers",
        ),
    ],
)
def test_a_wrong_rule_is_found(name, fn, shapes, text, expected):
    rng = np.random.default_rng(0)
    sample = Sample(name, fn, tuple(rng.normal(size=s) for s in shapes))
    with jax.enable_x64(True):
        case = load(sample, {jx.find_primitive(name): lambda *_, **__: parse(text)})
        found = [f for check in (audit_factors, audit_passthrough, audit_missing_splits) for f in check(case)]
    assert expected in [f"{f.kind}: {f.text}" for f in found]


def test_a_halo_that_reaches_too_far_is_found():
    def fn(x):
        return lax.reduce_window(x, 0.0, lax.add, (12,), (1,), ((11, 0),))

    sample = Sample("reduce_window_sum", fn, (np.random.default_rng(0).normal(size=12),))
    with jax.enable_x64(True):
        case = load(sample, {jx.find_primitive(sample.name): lambda *_, **__: parse("a -> a {a: halo}")})
        assert [f.text for f in audit_factors(case)] == ["a over 3 devices gives other numbers"]


def test_a_constant_result_is_no_evidence():
    sample = Sample("mul", lambda x: lax.mul(x, x), (np.ones((4, 6)),))
    with jax.enable_x64(True):
        case = load(sample)
        assert [f.kind for f in audit_factors(case)] == ["no evidence"]


def test_what_a_rule_that_keeps_its_operation_whole_misses_has_the_rules_own_reason():
    sample = Sample("neg", lax.neg, (np.random.default_rng(0).normal(size=4),))
    for reason in ("", "it was asked to"):
        with jax.enable_x64(True):
            case = load(sample, {jx.find_primitive("neg"): lambda x, r=reason, **_: replicated_rule(r, [x], [x])})
            found = [*audit_passthrough(case), *audit_missing_splits(case)]
        assert [f.text for f in found] == ["partial sum of operand 0 passes through", "operands split along (0) -> 0"]
        assert {f.reason for f in found} == {reason}


def test_the_samples_of_the_primitives_that_are_named(capsys):
    assert {s.name for s in samples_of(["neg", "reshard"])} == {"neg", "reshard"}
    assert {s.name for s in samples_of([])} == {n for n in NAMES if jx.find_primitive(n) is not None}
    assert main(["neg", "sin"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [" sin", " sin"]
    assert last == "3 samples: 0 wrong, 0 without evidence, 2 missing, 0 of them without a reason"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cumsun", "there is no sample of 'cumsun'; did you mean 'cumsum'?"),
        ("scan", "'scan' has no rule to audit: its body is partitioned"),
        ("io_callback", "'io_callback' has no rule to audit: a callback on the host, which gets whole values"),
    ],
)
def test_a_name_without_samples_is_an_error(capsys, name, message):
    with pytest.raises(SystemExit, match="2"):
        main(["neg", name])
    assert message in capsys.readouterr().err


def test_it_says_how_it_is_called(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "[NAME ...]" in capsys.readouterr().out
