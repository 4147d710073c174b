"""Whether the other processes of a run are there: each says so again and again in JAX's key-value store.

That store is in process 0. Where it cannot be reached, JAX ends a process with SIGABRT and a stack trace, so each runs
under one that says it in a line (`autoshard.train.processes.launch`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import jax

from autoshard.jaxpr import process_store
from autoshard.train.processes.peer_errors import HeldLog

SUPERVISED = "AUTOSHARD_SUPERVISED"
"""Environment variable of a process that another one waits for, to say how it ended."""
LOST_CODE = os.EX_TEMPFAIL
"""Exit code of a process that lost another, or to which not all came: start again."""
BEAT_SECONDS = 1.0
STAYS = 8
"""Beats for which process 0 stays at most when one is lost: the others read in its store which one it is."""
_FOLDER = "autoshard/alive/"
_ENDED, _LEFT, _LOST = "ended", "left", "lost "
"""What a process says last: that it has ended, or left for one that is lost; and process 0 which these are."""


class PeerWatch:
    """Says that this process is there, in a thread of its own, and sees whether the others do. Until it ends, what is
    logged of errors that a lost process may explain is held back as long as one may be lost.

    Args:
      heartbeat: seconds after which a process that is not heard of counts as lost.
      say: says why this process is left, as `lost_text` has it.
    """

    def __init__(self, heartbeat: float, say: Callable[[str], None]) -> None:
        self._store, self._own, count = process_store()
        self._heartbeat, self._say_why = heartbeat, say
        self._heard: dict[int, tuple[str, float]] = dict.fromkeys(range(count), ("", time.monotonic()))
        self._parent = os.getppid() if SUPERVISED in os.environ else None
        self._stop, self._leaving = threading.Event(), threading.Lock()
        self._log = HeldLog()
        self._thread = threading.Thread(target=self._run, daemon=True, name="peers")
        self._thread.start()

    def lost(self) -> int | None:
        """The first other process that is not heard of for some beats; waits for one up to the heartbeat."""
        until = time.monotonic() + self._heartbeat
        while time.monotonic() < until:
            if late := self._lost(self._soon):
                return late[0]
            time.sleep(BEAT_SECONDS / 4)
        self._log.show()
        return None

    def end(self, *, finished: bool) -> None:
        """Stops. Where this process has ``finished`` the others expect no more of it but that it waits for them at its
        end."""
        self._stop.set()
        self._thread.join()
        self._log.end()
        if finished and self._say(_ENDED):
            atexit.register(self._depart)

    def _depart(self) -> None:
        """Waits for the others, which end too, and leaves the store, process 0 last: it has the store, without which
        JAX would abort them."""
        if process_store().client is not self._store:
            return
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._store.wait_at_barrier(f"{_FOLDER}{_ENDED}", round(1000 * self._heartbeat))
        if self._own == 0:
            time.sleep(BEAT_SECONDS)
        jax.distributed.shutdown()

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(BEAT_SECONDS if beat else 0):
            beat += 1
            if self._parent is not None and os.getppid() != self._parent:
                self._log.show()
                self.leave("the process that started this one is gone")
            if self._say(str(beat)):
                if late := self._lost(self._heartbeat):
                    self.leave(self.lost_text(late))
                self._log.show(self._all_heard() - self._heartbeat)

    def _say(self, word: str) -> bool:
        """Writes it, and reads what the others wrote; whether that could be done."""
        try:
            self._store.key_value_set(f"{_FOLDER}{self._own}", word, allow_overwrite=True)
            found: Mapping[str, str] = dict(self._store.key_value_dir_get(_FOLDER))
        except jax.errors.JaxRuntimeError:  # process 0 cannot be reached: JAX ends this process
            return False
        now = time.monotonic()
        for name, heard in found.items():
            process = int(name.rpartition("/")[2])
            if heard != self._heard[process][0]:
                self._heard[process] = heard, now
        return True

    def leave(self, why: str) -> NoReturn:
        """Ends this process at once: in its orderly end JAX would wait for processes that are lost.

        Two threads may find that one is lost: the first says it, and the other waits for the end.
        """
        with self._leaving:
            self._say_why(why)
            if self._own == 0:
                self._see_others_leave()
            elif 0 not in self._late(self._soon):
                self._say(_LEFT)
            os._exit(LOST_CODE)

    def _see_others_leave(self) -> None:
        """Process 0 says which are lost, and waits for the others to leave, while they can reach the store; where it
        knows of none it stays for two beats, in which they may find the same."""
        lost, until = self._late(self._soon), time.monotonic() + STAYS * BEAT_SECONDS
        if not lost:
            time.sleep(2 * BEAT_SECONDS)
        while lost and self._say(f"{_LOST}{','.join(map(str, lost))}") and time.monotonic() < until:
            if {p for p, _ in self._others()} <= {*lost}:
                return
            time.sleep(BEAT_SECONDS / 4)

    def lost_text(self, processes: Sequence[int]) -> str:
        """That ``processes`` are lost, in words."""
        names = ", ".join(map(str, processes))
        which = f"process {names} of {len(self._heard)} is" if len(processes) == 1 else f"processes {names} are"
        return f"{which} lost"

    @property
    def _soon(self) -> float:
        """Seconds after which a process is not heard of that may be lost."""
        return min(3 * BEAT_SECONDS, self._heartbeat)

    def _lost(self, seconds: float) -> list[int]:
        """The processes that are lost: as process 0 says, or those that are not heard of for so long."""
        said = self._heard[0][0]
        named = [int(n) for n in said.removeprefix(_LOST).split(",") if n] if said.startswith(_LOST) else []
        return named or self._late(seconds)

    def _late(self, seconds: float) -> list[int]:
        now = time.monotonic()
        return [p for p, at in self._others() if now - at > seconds]

    def _all_heard(self) -> float:
        """Until when all others were heard of."""
        return min((at for _, at in self._others()), default=time.monotonic())

    def _others(self) -> list[tuple[int, float]]:
        """The other processes that have neither ended nor left, and when each was heard of."""
        return [(p, at) for p, (word, at) in self._heard.items() if p != self._own and word not in (_ENDED, _LEFT)]
