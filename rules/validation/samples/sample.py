"""What a sample is, and the random arrays that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.jaxpr import find_primitive


@dataclass(frozen=True)
class Sample:
    """A program ``fn(*args)`` with an equation of the primitive ``name``; the last such equation is audited."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]


class RandomArrays:
    """Draws arrays from a generator with a fixed seed."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def real(self, *shape: int, dtype: Any = np.float64) -> np.ndarray:
        """Floats of both signs, with magnitudes between 0.1 and 2."""
        sign = self.rng.choice([-1.0, 1.0], shape)
        return np.asarray(sign * self.rng.uniform(0.1, 2, shape), dtype)

    def positive(self, *shape: int) -> np.ndarray:
        """Floats between 1.1 and 3."""
        return np.asarray(self.rng.uniform(1.1, 3, shape))

    def unit(self, *shape: int) -> np.ndarray:
        """Floats of both signs, with magnitudes between 0.045 and 0.9."""
        return self.real(*shape) * 0.45

    def complex_numbers(self, *shape: int) -> np.ndarray:
        """Complex numbers."""
        return self.real(*shape) + 1j * self.real(*shape)

    def integer(self, *shape: int, low: int = -4, high: int = 5, dtype: Any = np.int32) -> np.ndarray:
        """Integers in ``low <= x < high``, with zeros replaced by ``high - 1``."""
        x = self.rng.integers(low, high, shape)
        return np.asarray(np.where(x == 0, high - 1, x), dtype)

    def index(self, high: int, *shape: int) -> np.ndarray:
        """Indices in ``0 <= x < high``, some of them repeated."""
        return np.asarray(self.rng.integers(0, high, shape), np.int32)

    def bits(self, *shape: int) -> np.ndarray:
        """Unsigned 32-bit integers."""
        return np.asarray(self.rng.integers(1, 2**32, shape), np.uint32)

    def booleans(self, *shape: int) -> np.ndarray:
        """Booleans."""
        return self.rng.integers(0, 2, shape) == 1

    def positive_definite(self, *batch: int, n: int) -> np.ndarray:
        """Symmetric positive definite matrices."""
        a = self.real(*batch, n, n)
        return a @ np.swapaxes(a, -1, -2) + n * np.eye(n)


def bind(name: str, **params: Any) -> Callable[..., Any]:
    """The function of one equation of this primitive."""

    def fn(*args: Any) -> Any:
        p = find_primitive(name)
        if p is None:
            raise LookupError(f"this version of JAX has no primitive {name!r}")
        return p.bind(*args, **params)

    return fn
