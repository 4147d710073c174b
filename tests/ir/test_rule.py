"""The text form of rules."""

from __future__ import annotations

import pytest

from autoshard.errors import RuleError
from autoshard.ir.rule import Rule, factor_names, parse, replicated_rule


@pytest.mark.parametrize(
    "text",
    [
        "mk, kn -> mn {k: sum} | sum: 0 1",
        "(ab)c -> abc",
        "a., -> {a: whole}",
        "ij, ij -> ij | max: 0 0+1 1, sum: 0+1",
        "a1b, b -> a1, b {b: halo}",
        "->",
    ],
)
def test_text_round_trip(text: str) -> None:
    assert str(parse(str(parse(text)))) == str(parse(text))
    assert str(parse(text)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab, b", "needs one '->'"),
        ("a -> b -> c", "needs one '->'"),
        ("(ab -> a", "does not close"),
        ("a) -> a", "do not nest"),
        ("a? -> a", r"'\?' is not a factor"),
        ("ab -> a {b: summ}", "'summ' is no kind of factor; did you mean 'sum'"),
        ("ab -> a {c: sum}", r"gives a kind to \['c'\]"),
        ("ab -> a {b: sum", "braces do not close"),
        ("a -> a | mean: 0", "'mean' is no kind of partial"),
    ],
)
def test_invalid_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text)


def test_factor_sizes() -> None:
    assert parse("(ab)c -> abc").factor_sizes([(6, 4), (2, 3, 4)]) == {"a": 2, "b": 3, "c": 4}
    assert parse("(ab) -> a", {"a": 2, "b": 3}).factor_sizes([(6,), (2,)]) == {"a": 2, "b": 3}


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("ab, bc -> ac", [(2, 3), (4, 5), (2, 5)], "factor 'b' has the sizes 3 and 4"),
        ("(ab) -> a", [(6,), (2,)], "the size of factor 'b' is unknown"),
        ("(ab) -> ab", [(6,), (2, 4)], "a dimension of size 6 has factors of product 8"),
    ],
)
def test_factor_sizes_that_do_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse(text).factor_sizes(shapes)


def test_kind_defaults_to_parallel() -> None:
    rule = parse("ab -> b {a: max}")
    assert (rule.kind("a"), rule.kind("b")) == ("max", "parallel")


def test_factor_names_do_not_run_out() -> None:
    assert len(set(factor_names(100))) == 100
    assert factor_names(2, 25) == ("z", "a1")


def test_a_replicated_rule_has_a_reason() -> None:
    class Aval:
        shape, dtype = (2, 3), "float32"

    rule = replicated_rule("because", [Aval()], [Aval()])
    assert rule == Rule((((), ()),), (((), ()),), reason="because")
