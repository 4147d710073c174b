"""Traits: every operation has its row, and what the rows say of numbers is so."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import fields

import jax
import numpy as np
import pytest

from autoshard import jaxpr as jx
from autoshard.ir.annotate import annotate_p
from autoshard.ir.rule import Dims
from autoshard.ir.spec import REDUCTION_KINDS
from autoshard.ir.traits import UNKNOWN, Traits
from autoshard.passes.pad_uneven.window import neutral_element
from autoshard.rules import FAMILIES, KEPT_WHOLE, OWN, SHIPPED, STRUCTURAL, TABLE
from autoshard.rules.traits import KNOWN, NOTHING_KNOWN, ROWS, TRAITS
from autoshard.rules.validation.case import Case, load
from autoshard.rules.validation.samples import Sample, samples
from autoshard.transforms.sum_of_products import Step
from tests.test_walls import SOURCES, under

SAMPLES = [s for s in samples() if KNOWN.get(s.name, UNKNOWN) != UNKNOWN and jx.find_primitive(s.name)]
"""Those of every operation of which something is known."""


def having(trait: str) -> Callable[[Callable[[Case], None]], Callable[[Sample], None]]:
    """One test for each sample of an operation that has ``trait``."""
    found = [s for s in SAMPLES if getattr(KNOWN[s.name], trait) != getattr(UNKNOWN, trait)]

    def tests(check: Callable[[Case], None]) -> Callable[[Sample], None]:
        @pytest.mark.parametrize("sample", found, ids=[f"{i}-{s.name}" for i, s in enumerate(found)])
        def test(sample: Sample) -> None:
            with jax.enable_x64(True):
                case = load(sample)
                assert case is not None
                check(case)

        return test

    return tests


def same(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)


def test_every_operation_has_a_row():
    ruled = {name for family in FAMILIES for name in family.RULES}
    assert set(ROWS) == {*ruled, *STRUCTURAL, *KEPT_WHOLE}
    assert {*TABLE, *OWN, annotate_p} - TRAITS.keys() == set()


def test_no_operation_has_two_rows():
    plain = NOTHING_KNOWN.split()
    assert sorted(n for n in plain if plain.count(n) > 1) == []
    assert {*plain} & {*KNOWN} == set() == {*plain} & {*KEPT_WHOLE}
    assert [name for name, traits in KNOWN.items() if traits == UNKNOWN] == []


def test_of_what_does_not_ship_nothing_is_known():
    assert SHIPPED.traits(jx.Primitive("concatenate")) == UNKNOWN
    assert SHIPPED.traits(next(iter(TABLE))) == TRAITS[next(iter(TABLE))]


@having("linear")
def test_linear(case: Case) -> None:
    if any(x.dtype.kind not in "fc" for x in (*case.operands, *case.results)):
        return  # of integers, what wraps or is truncated is not compared
    for operands in KNOWN[case.name].linear:
        parts = [[x * 3 if i in operands else x for i, x in enumerate(case.operands)], list(case.operands)]
        total = [x * 4 if i in operands else x for i, x in enumerate(case.operands)]
        for whole, a, b in zip(*(case.run(xs) for xs in (total, *parts)), strict=True):
            same(whole, a + b)


@having("adds")
def test_a_sum_of_operands(case: Case) -> None:
    same(case.results[0], case.operands[0] + case.operands[1])


@having("casts")
def test_another_dtype(case: Case) -> None:
    same(case.results[0], case.operands[0].astype(case.results[0].dtype))


@having("keeps_constant")
def test_one_number_everywhere_stays_that_number(case: Case) -> None:
    (result,) = case.run([np.full_like(x, 3) for x in case.operands])
    assert (result == 3).all()


@having("moves_data")
def test_elements_come_from_operands(case: Case) -> None:
    given = np.concatenate([x.ravel() for x in case.operands])
    for result in case.results:
        assert np.isin(result, given).all()


@having("view")
def test_a_view_has_the_elements_of_its_first_operand(case: Case) -> None:
    if KNOWN[case.name].casts or case.name == "bitcast_convert_type":
        return
    for x, result in zip(case.operands, case.results, strict=False):
        assert set(result.ravel().tolist()) == set(x.ravel().tolist())


@having("in_place_operand")
def test_written_in_place_is_what_has_that_shape(case: Case) -> None:
    x, result = case.eqn.invars[KNOWN[case.name].in_place_operand or 0], case.eqn.outvars[0]
    assert (jx.aval(x).shape, jx.aval(x).dtype) == (jx.aval(result).shape, jx.aval(result).dtype)


@having("shape_param")
def test_the_parameter_that_states_the_shape(case: Case) -> None:
    assert case.eqn.params[KNOWN[case.name].shape_param or ""] == case.results[0].shape


@having("stretches")
def test_dimensions_of_size_1_are_stretched_and_rows_computed_alone(case: Case) -> None:
    x, y = case.operands
    if x.ndim and x.shape == y.shape:
        same(case.run([x, y[:1]])[0], case.run([x, np.broadcast_to(y[:1], y.shape)])[0])
        same(case.run([x[1:], y[1:]])[0], case.results[0][1:])


@having("any_size")
def test_runs_on_twice_the_size(case: Case) -> None:
    tried = 0
    for factor in (f for f, kind in case.rule.kinds if kind == "parallel"):
        dims = (*case.rule.operands, *case.rule.results)
        if any(factor in d and len(d) > 1 for of in dims for d in of):
            continue
        (made,), sizes = case.rule.results, case.sizes | {factor: 2 * case.sizes[factor]}
        for i, dim in enumerate(made):
            sizes |= {f"whole {i}": case.results[0].shape[i]} if not dim else {}
        step = Step(
            case.eqn.primitive,
            tuple(case.eqn.params.items()),
            tuple(range(len(case.operands))),
            tuple(d or (f"whole {i}",) for i, d in enumerate(made)),
            str(case.results[0].dtype),
            case.traits.shape_param,
        )
        twice = [doubled(x, of, factor) for x, of in zip(case.operands, case.rule.operands, strict=True)]
        same(np.asarray(step.run(twice, sizes)), doubled(case.results[0], made, factor))
        tried += 1
    assert tried or not any(kind == "parallel" for _, kind in case.rule.kinds)


def doubled(x: np.ndarray, dims: Dims, factor: str) -> np.ndarray:
    return np.concatenate([x, x], dims.index((factor,))) if (factor,) in dims else x


@having("scatter_adds")
def test_scattered_updates_are_added(case: Case) -> None:
    x, _, updates = case.operands
    added = case.run([np.zeros_like(x), *case.operands[1:]])[0]
    same(case.results[0], x + added)
    assert (case.run([x, case.operands[1], np.zeros_like(updates)])[0] == x).all()


@having("ignores_neutral")
def test_neutral_elements_change_no_reduction(case: Case) -> None:
    for factor, kind in [(f, k) for f, k in case.rule.kinds if k in REDUCTION_KINDS]:
        longer = list(case.operands)
        for i, dims in enumerate(case.rule.operands):
            for d, dim in enumerate(dims):
                if dim == (factor,):
                    edges = [(0, int(e == d)) for e in range(len(dims))]
                    neutral = neutral_element(kind, longer[i].dtype)
                    longer[i] = np.pad(longer[i], edges, constant_values=neutral)
        assert any(x.shape != y.shape for x, y in zip(longer, case.operands, strict=True))
        for got, expected in zip(case.run(longer), case.results, strict=True):
            same(got, expected)


COLLECTIONS = ast.Tuple | ast.List | ast.Set
"""Of primitives, as literals; a dictionary from primitives to functions dispatches, and is none."""


def compared_names(source: str) -> list[str]:
    """Where a module asks for the name of an equation's or a node's operation, or for its place in a set of its own."""
    asked: list[str] = []
    tree = ast.parse(source)
    collections = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and any(isinstance(n, COLLECTIONS) for n in ast.walk(node.value))
    }
    for node in ast.walk(tree):
        method = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
        if isinstance(node, ast.Compare) or method in {"endswith", "get", "startswith"}:
            text = ast.unparse(node)
            asked += [f"{node.lineno}: {text}"] if ".primitive.name" in text or ".kind.op" in text else []
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            among = node.comparators[0]
            listed = isinstance(among, ast.Name) and among.id in collections
            if ast.unparse(node.left).endswith(".primitive") and (listed or isinstance(among, COLLECTIONS)):
                asked.append(f"{node.lineno}: {ast.unparse(node)}")
    return asked


def test_outside_of_the_tables_no_operation_is_known_by_its_name():
    free = ("jaxpr", "rules")
    assert {n: found for n, s in SOURCES.items() if not under(n, *free) and (found := compared_names(s))} == {}
    assert compared_names("if eqn.primitive.name in SLICES or node.kind.op == 'pad': pass")
    assert compared_names("READERS.get(eqn.primitive.name)")
    assert compared_names("while eqn.primitive in (_prims.copy_p, _prims.transpose_p): pass")
    assert compared_names("VIEWS = frozenset({_prims.copy_p})\nif eqn.primitive not in VIEWS: pass")
    assert not compared_names("INTERPRETERS = {_prims.copy_p: copy}\nif eqn.primitive in INTERPRETERS: pass")


def test_who_is_said_to_ask_does() -> None:
    text = SOURCES["ir.traits"]
    for field in fields(Traits):
        words = " ".join(text.partition(f"    {field.name}: ")[2].split('"""')[1].split())
        said = words.partition("Asked by")[2]
        modules = re.findall(r"`([a-z_.]+)`", said)
        asking = {n for n, s in SOURCES.items() if re.search(rf"traits(\([^)]*\))?\.{field.name}\b", s)}
        assert modules
        assert {n for n in asking if not under(n, *modules)} == set(), field.name
        assert [m for m in modules if not any(under(n, m) for n in asking)] == [], field.name


def test_traits_are_hashable_and_of_nothing_by_default():
    assert hash(Traits()) == hash(UNKNOWN)
    assert Traits() == UNKNOWN
