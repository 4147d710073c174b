"""How the learning rate of a resumed run decays, and what is said of it."""

from __future__ import annotations

import pytest

from autoshard.errors import ConfigError
from autoshard.train.optimizer import OptimizerConfig, decay_note, resumed

GIVEN = OptimizerConfig(learning_rate=1e-2, final=0.2)


def test_more_steps_say_how_they_are_taken_and_what_to_do():
    kept = resumed(GIVEN, 80)
    assert kept.decay_steps == 80
    assert decay_note(kept, 80) is None
    note = decay_note(kept, 240)
    assert note is not None
    assert note.startswith(
        "the learning rate decays until step 80, as it did when the run began: the steps after it, until step 240, are "
        "taken at 0.002, which is 0.2 (`final`) of the largest"
    )
    assert "`optimizer: {decay_steps: 240}`, in another checkpoint.dir or with --fresh" in note
    assert decay_note(kept, 40) == (
        "the learning rate decays until step 80, as it did when the run began: at step 40, the last one, it is 0.006"
    )


def test_another_decay_is_refused_with_where_the_first_one_came_from():
    asks = GIVEN.model_copy(update={"decay_steps": 240})
    assert resumed(asks, 240) is asks
    assert resumed(asks, None) is asks  # the run has no checkpoint yet
    with pytest.raises(ConfigError, match=r"decay_steps is 240, and the run was begun with 80, .*last step .*--fresh"):
        resumed(asks, 80)
