"""Small programs, one or more for each primitive, on which the auditor checks the rules.

There is a module for each table of rules, except that `shape` has the samples of `rules.move`, too.

Arrays are chosen so that a wrong rule shows: no zeros, both signs, dimensions of different sizes that 2 and 3 divide,
integers in a narrow range, so that comparisons come out both ways.
"""

from __future__ import annotations

from autoshard.rules.validation.samples import (
    contract,
    index,
    linalg,
    pointwise,
    random,
    reduce,
    shape,
    sort,
    window,
)
from autoshard.rules.validation.samples.sample import RandomArrays as RandomArrays
from autoshard.rules.validation.samples.sample import Sample as Sample

FAMILIES = (pointwise, shape, reduce, window, contract, index, random, sort, linalg)


def samples() -> tuple[Sample, ...]:
    """All samples. Each family draws its own arrays, so that a sample more changes none of another family."""
    return tuple(sample for family in FAMILIES for sample in family.samples(RandomArrays()))
