"""How long a device waits for its collectives, as the compiler ordered the program.

A collective that something starts and something else waits for runs beside what is between: it is hidden as far as
that lasts. What SparseCores run is started before its operands are there, and sends them from the update on that hands
them over. Collectives on the same kind of link run one after the other. One that is not split so is waited for whole,
and those that are under way stand still meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from autoshard.backend.hlo.collectives import chain_of, computations_below
from autoshard.backend.hlo.slices import transfer_name
from autoshard.backend.hlo.text import Computation, Instruction, Module, called
from autoshard.backend.hlo.trip_counts import times_called

Key = tuple[str, str]
"""A computation and an instruction in it."""


class Transfer(NamedTuple):
    """What one run of a collective takes."""

    seconds: float
    link: str


class _Run(NamedTuple):
    """One run of a computation: how long it takes, and what of that is waiting."""

    elapsed: float
    waited: float


@dataclass
class _Clock:
    """The time in a run of a computation, and what is under way."""

    now: float = 0.0
    waited: float = 0.0
    free: defaultdict[str, float] = field(default_factory=lambda: defaultdict[str, float](float))
    """When each kind of link is free."""
    under_way: dict[object, tuple[float, str]] = field(default_factory=dict[object, tuple[float, str]])
    """When each collective that has been started ends, and its link."""

    def start(self, key: object, transfer: Transfer) -> None:
        end = self.free[transfer.link] = max(self.now, self.free[transfer.link]) + transfer.seconds
        self.under_way[key] = end, transfer.link

    def rename(self, old: str, new: str) -> None:
        """What has been started under the one name is waited for under the other."""
        for key in [key for key in self.under_way if isinstance(key, tuple) and key[0] == old]:
            self.under_way[new, key[1]] = self.under_way.pop(key)

    def wait(self, key: object) -> None:
        end, _ = self.under_way.pop(key, (self.now, ""))
        self.waited += max(0.0, end - self.now)
        self.now = max(self.now, end)

    def send_and_wait(self, transfer: Transfer) -> None:
        self.now += transfer.seconds
        self.waited += transfer.seconds
        self.free[transfer.link] += transfer.seconds
        for key, (end, link) in self.under_way.items():
            if link == transfer.link:
                self.under_way[key] = end + transfer.seconds, link


def waiting_seconds(
    module: Module, transfers: Mapping[Key, Transfer], work: Callable[[Instruction, Computation], float]
) -> float:
    """Seconds of one call in which a device computes nothing and waits for a collective.

    Args:
      module: its computations' instructions are in the order in which they run.
      transfers: of each collective that `located_collectives` finds.
      work: seconds that an instruction computes, without what it calls.
    """
    runs: dict[str, _Run] = {}

    def run(name: str) -> _Run:
        if name not in runs:
            runs[name] = _run(module.computations[name])
        return runs[name]

    sent = defaultdict[str, list[tuple[Transfer, str]]](list)
    """By computation: its collectives, with the chain of each."""
    for (name, instruction), transfer in transfers.items():
        sent[name].append((transfer, chain_of(module.computations[name].instructions[instruction])))
    parts = {
        name: {chain for i in computation.instructions.values() if (chain := chain_of(i))}
        for name, computation in module.computations.items()
    }

    def below(instruction: Instruction) -> list[tuple[Transfer, str]]:
        """Collectives in what it calls, with the chain of each."""
        return [each for name in sorted(computations_below(module, instruction)) for each in sent[name]]

    def chains(instruction: Instruction) -> set[str]:
        names = computations_below(module, instruction) if instruction.opcode == "fusion" else ()
        return {chain_of(instruction)}.union(*(parts[name] for name in names)) - {""}

    def _run(computation: Computation) -> _Run:
        clock, last, waiting = _Clock(), dict[str, str](), defaultdict[str, list[Transfer]](list)
        for instruction in computation.instructions.values():
            last.update((chain, instruction.name) for chain in chains(instruction))
        ends = defaultdict[str, list[str]](list)
        for chain, name in last.items():
            ends[name].append(chain)
        handed_over = _handed_over(computation)
        for instruction in computation.instructions.values():
            own = transfers.get((computation.name, instruction.name))
            if instruction.opcode == "send":
                if own:
                    clock.start(transfer_name(instruction), own)
            elif instruction.opcode.endswith("-start"):
                begun = [t for t, _ in below(instruction)] + ([own] if own else [])
                begins = handed_over.get(instruction.name)
                for n, transfer in enumerate(begun):
                    if begins:
                        waiting[begins].append(transfer)
                    else:
                        clock.start((instruction.name, n), transfer)
            elif instruction.opcode.endswith("-update"):
                clock.rename(instruction.names[0], instruction.name)
                for n, transfer in enumerate(waiting[instruction.name]):
                    clock.start((instruction.name, n), transfer)
            elif instruction.opcode.endswith("-done"):
                for key in _waited_for(instruction, computation, clock):
                    clock.wait(key)
            elif instruction.opcode == "fusion":
                for transfer, chain in below(instruction):
                    if chain:
                        clock.start(chain, transfer)
                    else:
                        clock.send_and_wait(transfer)
            else:
                if own and (chain := chain_of(instruction)):
                    clock.start(chain, own)
                elif own:
                    clock.send_and_wait(own)
                for times, name in _calls(instruction, computation):
                    inner = run(name)
                    clock.now += float(times) * inner.elapsed
                    clock.waited += float(times) * inner.waited
            clock.now += work(instruction, computation)
            for chain in ends[instruction.name]:
                clock.wait(chain)
        for key in list(clock.under_way):
            clock.wait(key)
        return _Run(clock.now, clock.waited)

    def _calls(instruction: Instruction, computation: Computation) -> Iterator[tuple[Fraction, str]]:
        counts = times_called(instruction, computation, module)
        for (_, name), (times, _) in zip(called(instruction), counts, strict=True):
            if name in module.computations and times:
                yield times, name

    return run(module.entry).waited


def _handed_over(computation: Computation) -> dict[str, str]:
    """Of each start without operands, the update that has them."""
    every = computation.instructions
    updates = [i for i in every.values() if i.opcode.endswith("-update") and i.names[1:]]
    return {i.names[0]: i.name for i in updates if i.names[0] in every and not every[i.names[0]].names}


def _waited_for(done: Instruction, computation: Computation, clock: _Clock) -> list[object]:
    """What is under way that ``done`` waits for."""
    names = set(done.names)
    if done.opcode == "recv-done":
        received = (computation.instructions.get(name) for name in done.names)
        return [transfer_name(recv) for recv in received if recv is not None]
    return [key for key in clock.under_way if isinstance(key, tuple) and key[0] in names]
