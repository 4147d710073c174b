"""Specs: printing, conversion, and what `checked_spec` refuses."""

from __future__ import annotations

import pytest
from jax.sharding import PartitionSpec as P

from autoshard.errors import SpecError
from autoshard.ir.spec import Spec, checked_spec, replicated

SIZES = {"data": 4, "model": 2, "one": 1}


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec((("data",), (), ("data", "model"))), "[data, _, data+model]"),
        (Spec(((),), (("model", "sum"),)), "[_] sum(model)"),
        (Spec((), (("data", "max"), ("model", "sum"))), "[] max(data) sum(model)"),
    ],
)
def test_text_form(spec: Spec, text: str) -> None:
    assert str(spec) == text


@pytest.mark.parametrize("entries", [P(), P("data"), P(None, "model"), P(("data", "model"), None), P("data", "model")])
def test_partition_spec_round_trip(entries: P) -> None:
    spec = checked_spec(entries, (8, 8), SIZES, "x")
    assert checked_spec(spec.partition_spec(), (8, 8), SIZES, "x") == spec


def test_num_shards() -> None:
    assert Spec((("data",), ("model",))).num_shards(SIZES) == 8
    assert replicated(3).num_shards(SIZES) == 1


def test_reduced_has_no_partial_axes() -> None:
    assert Spec(((),), (("data", "sum"),)).reduced() == replicated(1)


def test_axes_of_size_one_and_dimensions_of_size_one_split_nothing() -> None:
    assert checked_spec(P("one", "data"), (4, 8), SIZES, "x") == Spec(((), ("data",)))
    assert checked_spec(P(("one", "model")), (4,), SIZES, "x") == Spec((("model",),))


@pytest.mark.parametrize(
    ("entries", "shape", "message"),
    [
        (P("dta"), (8,), r"state\['w'\]: .* names mesh axis 'dta'.*did you mean 'data'"),
        (P("data", None), (8,), r"state\['w'\] has 1 dimensions .* longest spec that fits is P\('data'\)"),
        (P("data", "data"), (8, 8), r"uses mesh axis 'data' on dimensions 0 and 1"),
        (P("data"), (10,), r"dimension 0 .* has size 10, .* 4 parts over data; it divides into 1, 2, or pad it to 12"),
        (P(("data", "model")), (4,), r"size 4, .* 8 parts over data\+model; it divides into 1, 2, 4, or pad it to 8"),
    ],
)
def test_invalid_specs_are_refused(entries: P, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        checked_spec(entries, shape, SIZES, "state['w']")
