"""What is logged is in the folder a second later, before a checkpoint, and at the end."""

from __future__ import annotations

from pathlib import Path

from etils import epath

from autoshard.runs.report import HeldOutEvent, StepEvent
from autoshard.runs.run_folder import RunFolder
from autoshard.runs.run_log import RunLog


def test_events_are_written_once_a_second_and_nothing_is_left_behind(tmp_path: Path):
    folder, now = RunFolder(epath.Path(tmp_path / "run")), 100.0
    folder.root.mkdir()

    def written() -> list[int]:
        return [event.step for event in folder.events()]

    with RunLog(folder, lambda: now) as log:
        for step in (1, 2):
            log.append(StepEvent.of(step, {"loss": 1.0}))
        assert written() == []
        now += 1.0
        log.append(StepEvent.of(3, {"loss": 1.0}))
        assert written() == [1, 2, 3]
        log.append(StepEvent.of(4, {"loss": 1.0}))
        log.append(HeldOutEvent.of(4, {"loss": 1.0}))
        assert written() == [1, 2, 3, 4, 4]
        log.append(StepEvent.of(5, {"loss": 1.0}))
        log.flush()
        assert written() == [1, 2, 3, 4, 4, 5]
        now -= 60.0  # a clock that is set back holds nothing up
        log.append(StepEvent.of(6, {"loss": 1.0}))
        assert written()[-1] == 6
        log.append(StepEvent.of(7, {"loss": 1.0}))
        assert written()[-1] == 6
    assert written()[-1] == 7
    assert len(folder.table.read_text().splitlines()) == 9
