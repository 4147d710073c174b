"""A slice of `tests.fuzz`: every kind of file with some mutants, and the odd files once for each format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest

from tests import fuzz

FORGIVEN = ("cache", "log", "report")
"""What is damaged there is made again, or dropped."""
EXACT = ("inventory", "safetensors", "safetensors-index")
"""Of which almost any change is an error."""
KINDS = (*FORGIVEN, *EXACT, "hardware", "manifest", "mesh", "model", "orbax", "plan", "run", "train")
LARGE = 10**7
"""Bytes of an odd file that takes longer to write than to refuse: for `make fuzz`."""


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, fuzz.Kind]:
    return fuzz.kinds(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("name", KINDS)
def test_mutants_are_read_or_refused(name: str, kinds: Mapping[str, fuzz.Kind]):
    kind = dataclasses.replace(kinds[name], odd=())
    outcome = fuzz.run(kind, 40, seed=0)
    assert not outcome.failures
    assert outcome.counts.total() == 40
    assert len(outcome.counts) > 1 or name in (*FORGIVEN, *EXACT)


@pytest.mark.parametrize("name", ["manifest", "mesh", "plan"])
def test_odd_files_are_read_or_refused(name: str, kinds: Mapping[str, fuzz.Kind]):
    odd = [content for content in kinds[name].odd if len(content) < LARGE]
    outcome = fuzz.run(dataclasses.replace(kinds[name], odd=odd), len(odd), seed=0)
    assert not outcome.failures
    assert outcome.counts["read"] < 3


def test_every_kind_is_tested(kinds: Mapping[str, fuzz.Kind]):
    assert sorted(kinds) == sorted(KINDS)
