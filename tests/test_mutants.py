"""The table of faults fits the sources as they are; `make mutants` plants them."""

from __future__ import annotations

import ast

import pytest

from tests.mutants import ROOT, Mutant, mutants, planted

TABLE = mutants()


@pytest.mark.parametrize("mutant", TABLE, ids=lambda m: m.what)
def test_a_fault_can_be_planted_and_its_tests_are_there(mutant: Mutant) -> None:
    ast.parse(planted(mutant, (ROOT / mutant.file).read_text()))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text()


def test_text_that_is_not_there_once_is_refused() -> None:
    mutant = Mutant("nothing", "some/file.py", "x", "y", ())
    assert planted(mutant, "1 + x") == "1 + y"
    for source in ("1", "x + x"):
        with pytest.raises(ValueError, match=r"some/file.py has 'x' [02] times, not once \(nothing\)"):
            planted(mutant, source)


def test_there_are_enough_and_none_twice() -> None:
    assert len({(m.file, m.old, m.new) for m in TABLE}) == len({m.what for m in TABLE}) == len(TABLE) >= 44
