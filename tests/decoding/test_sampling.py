"""The choice of the next token: the best, or drawn as often as its probability among those that are left says."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.decoding.sampling import Sampling
from autoshard.errors import ArgumentError

CHANCES = np.array([0.05, 0.4, 0.1, 0.3, 0.15])


def shares(sampling: Sampling, draws: int = 20_000) -> np.ndarray:
    """How often each token is drawn."""
    logits = jnp.broadcast_to(jnp.log(CHANCES), (draws, 5))
    return np.bincount(np.asarray(sampling(logits, jax.random.key(0))), minlength=5) / draws


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.71}, [1, 3, 4]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.01}, [1]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.45}, [1]),  # of the three, 1 has 0.47
        ({"top_k": 3, "top_p": 0.5}, [1, 3]),
    ],
)
def test_tokens_are_drawn_among_those_left(options, left):
    want = np.zeros(5)
    want[left] = CHANCES[left] / CHANCES[left].sum()
    np.testing.assert_allclose(shares(Sampling(temperature=1.0, **options)), want, atol=0.02)


def test_a_temperature_sharpens():
    np.testing.assert_allclose(shares(Sampling(temperature=0.5)), CHANCES**2 / (CHANCES**2).sum(), atol=0.02)
    assert shares(Sampling()).tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"temperature": -1.0}, r"temperature=-1\.0: must be 0, which takes the best token, or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k=0: must be 1 or more"),
        ({"temperature": 1.0, "top_p": 1.5}, r"top_p=1\.5: must be above 0 and at most 1"),
        ({"top_k": 3}, "give a temperature above 0"),
    ],
)
def test_options_out_of_range(options, why):
    with pytest.raises(ArgumentError, match=why):
        Sampling(**options)
