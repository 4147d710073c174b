"""Which values of a layer to hold for the backward part, and where: least time within given bytes, an exact choice.

A value is made again, held on the device, or held in the host's memory meanwhile, where there is such. For every
*choice* S of these for the values of a layer that may be held, at most `MAX_VALUES` of them, is computed by one
reversed walk over the forward part, for all choices at once:

    seconds(S): of the values that the backward part must make again, each at its price; and of those on the host,
                what they take over its link longer than the layer computes, there and back, and to be copied for that;
                a share of the layer more where they are several
    bytes(S):   of the values held on the device that it reads, or needs to make others again

A value is made again if it is needed and not held; it is needed if the backward part reads it, or it is an operand of
what is made again. What enters a layer is held in any case. All layers of a loop have the same two choices, S_low in
the first k layers and S_high in the others, which makes nothing again that S_low holds, and has nothing on the host
that S_low has on the device:

    minimize    sum over loops of k seconds(S_low) + (L - k) seconds(S_high)
    subject to  sum over loops of k bytes(S_low) + (L - k) bytes(S_high) <= room

Of one loop this is solved by comparing all pairs of choices that no other beats in both. Of several, the room is first
divided as the relaxed problem has it: along the lower convex hulls of seconds over bytes, steepest first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autoshard import jaxpr as jx
from autoshard.machine.host_link import hides_copies, layer_seconds, seconds_waited_for_copies
from autoshard.machine.mesh import LogicalMesh
from autoshard.transforms import remat
from autoshard.transforms.held_values.names import LayerCounts, ResidualGroup

MAX_VALUES = 10
"""Most values of a loop that are decided, those that take longest to make again; of others none is held."""
MAX_SETS = 64
"""Most choices of a loop that are paired: of those that no other beats, evenly by bytes."""
AGAIN, HELD, ON_HOST = 0, 1, 2
"""What becomes of a value, as a digit of the number of a choice."""
IN_FLIGHT = 2
"""Values of a layer that are on the device while they are copied to the host or back, for one that is computed with."""
SMALLEST_SENT = 1 / 8
"""Of the largest value of a layer: what is smaller stays on the device unless asked for. It saves little memory, and is
one more copy that XLA has to begin in time: a decoder of 8B on v5e:4x4 that sent its few keys and values waited 0.29 of
1.73 s, one of 70B on v5e:16x16 that sent its keys 0.08 of 6.50 s more than with two larger values."""
SEVERAL_LATE = 0.002
"""Share of a layer's seconds that a second value on the host has to gain: XLA begins to fetch several too late in some
programs, which no price knows, and each is one more copy on the device. GPT-3 of the bench, scanned on v5e:4x4, has
four values on the host or one of as many bytes, predicted alike: 1,247 and 1,241 ms as read."""
HOST_SHARE = 0.6
"""Of the host's memory, what values of a loop may take unasked: loading and checkpoints need some too."""
_RANK = {AGAIN: 0, ON_HOST: 1, HELD: 2}
"""The order in which a value's layers have these."""

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int_]


class Price(NamedTuple):
    """Of one value in one layer, or of several."""

    bytes: float
    """Per device."""
    seconds: float
    """To make it again."""


@dataclass(frozen=True)
class HostLink:
    """The way of a layer's values to the host's memory and back, beside what the layer computes."""

    mesh: LogicalMesh

    def price(
        self, size: FloatArray, count: IntArray, layers: int, eqns: Sequence[jx.JaxprEqn], again: FloatArray
    ) -> FloatArray:
        """Seconds that a device spends on ``size`` bytes of its own in a layer, of ``count`` values: beside the
        products of ``eqns`` in the forward part; in the backward part beside twice those, and the seconds in which
        values are made ``again``. Without end where the host has too little for all ``layers``."""
        forward = layer_seconds(sum(self._product_seconds(x) for e in eqns for x in (e, *_inner(e))), self.mesh)
        there = seconds_waited_for_copies(size, forward, self.mesh)
        back = seconds_waited_for_copies(size, 2 * forward + again, self.mesh)
        late = SEVERAL_LATE * (count > 1) * (3 * forward + again)
        too_much = size * layers > HOST_SHARE * self.mesh.hardware.host_memory
        return np.where(too_much, np.inf, there + back + late)

    def _product_seconds(self, eqn: jx.JaxprEqn) -> float:
        """Least seconds of a product."""
        if not (flops := jx.contraction_flops(eqn)):
            return 0.0
        dtype = jx.dtype_name(jx.aval(eqn.invars[0]).dtype)
        rate = self.mesh.hardware.product_rate(dtype, convolution=jx.convolution(eqn) is not None)
        return flops / rate / self.mesh.size


def host_link(mesh: LogicalMesh) -> HostLink | None:
    """That of a mesh's devices; None where copies are not hidden beside a layer's products."""
    return HostLink(mesh) if hides_copies(mesh) else None


@dataclass(frozen=True)
class LayerLoop:
    """A loop over layers, or all layers that are unrolled, and the choices for its values."""

    layers: int
    names: tuple[str, ...]
    """In the number of a choice, to base ``base``, digit i says what becomes of names[i]."""
    needed: tuple[str, ...]
    """All values that are made again where none is held; the other ones are held for nothing."""
    seconds: FloatArray
    """[choices]: of one layer."""
    bytes: FloatArray
    """[choices]: of one layer, per device."""
    eqns: frozenset[jx.JaxprEqn] = frozenset()
    """That make the values."""
    base: int = 2
    """3 where values may be on the host, else 2."""

    def choices(self, counts: Mapping[str, LayerCounts]) -> list[int]:
        """The choice of each layer."""
        each = [counts.get(name, LayerCounts()).of(self.layers) for name in self.names]

        def digit(again: int, host: int, layer: int) -> int:
            return AGAIN if layer < again else ON_HOST if layer < again + host else HELD

        return [sum(digit(*n, layer) * self.base**i for i, n in enumerate(each)) for layer in range(self.layers)]

    def digits(self, choice: int) -> list[int]:
        """What becomes of each value."""
        return [choice // self.base**i % self.base for i in range(len(self.names))]


def layer_loops(
    jaxpr: jx.Jaxpr,
    groups: Sequence[ResidualGroup],
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
    link: HostLink | None = None,
) -> tuple[LayerLoop, ...]:
    """The loops over layers of ``jaxpr`` at any depth outside of differentiated code, and the unrolled layers.

    Args:
      link: the way to the host for the values of a loop; None: no value goes there.
    """
    found: list[LayerLoop] = []
    for body in remat.differentiated_bodies(jaxpr):
        for scan in body.eqns:
            inside = [(m.eqn, g) for g in groups for m in g.members if m.scan is scan]
            targets = remat.stacked_residuals(body, scan) if inside else set[jx.Var]()
            if targets:
                eqns, entering = jx.regions(scan)[0].body.eqns, set[jx.Var]()
                layers = jx.scan_groups(scan)
                assert layers is not None
                found.append(_loop(eqns, inside, targets, entering, layers.length, 1, prices, is_held_anyway, link))
        here = set(body.eqns)
        inside = [(m.eqn, g) for g in groups for m in g.members if m.scan is None and m.eqn in here]
        targets, entering = remat.unrolled_residuals(body, is_held_anyway) if inside else (set[jx.Var](), set[jx.Var]())
        if targets:
            layers = max(len([e for e, h in inside if h is g]) for _, g in inside)
            forward = [e for e in body.eqns if remat.is_forward(e)]
            found.append(_loop(forward, inside, targets, entering, layers, layers, prices, is_held_anyway, None))
    return tuple(loop for loop in found if loop.names)


def _loop(
    eqns: Sequence[jx.JaxprEqn],
    inside: Sequence[tuple[jx.JaxprEqn, ResidualGroup]],
    targets: set[jx.Var],
    entering: set[jx.Var],
    layers: int,
    share: int,
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
    link: HostLink | None,
) -> LayerLoop:
    """The choices of a loop.

    Args:
      eqns: of a layer, or of all ``share`` layers.
      targets: what the backward part reads.
      entering: what is held in any case, beside what ``eqns`` do not compute.
    """
    by_eqn = dict(inside)
    made_by = {e: {by_eqn[x].name for x in (e, *_inner(e)) if x in by_eqn} for e in eqns}
    everything = _walk(eqns, made_by, targets, entering, (), prices, is_held_anyway, 2)
    needed = tuple(dict.fromkeys(n for e in eqns if everything.again.get(e, _NONE).any() for n in sorted(made_by[e])))
    names = tuple(sorted(sorted(needed, key=lambda n: -prices[n].seconds)[:MAX_VALUES], key=needed.index))
    base = 2 if link is None else 3
    found = _walk(eqns, made_by, targets, entering, names, prices, is_held_anyway, base)
    seconds = found.seconds / share
    if link is not None:
        digits = _digits(names, base)
        count = sum((d == ON_HOST for d in digits.values()), np.zeros(len(seconds), int))
        seconds = seconds + link.price(found.on_host, count, layers, eqns, seconds)
        largest = max((prices[n].bytes for n in names), default=0.0)
        for name, d in digits.items():
            if prices[name].bytes < SMALLEST_SENT * largest:
                seconds[d == ON_HOST] = np.inf
    held = found.bytes / share + IN_FLIGHT * found.on_host / layers
    return LayerLoop(layers, names, needed, seconds, held, frozenset(by_eqn), base)


_NONE: BoolArray = np.zeros(1, bool)


class _Walked(NamedTuple):
    again: dict[jx.JaxprEqn, BoolArray]
    """[choices]: whether an equation runs again."""
    seconds: FloatArray
    bytes: FloatArray
    on_host: FloatArray
    """Bytes on the host."""


def _digits(names: Sequence[str], base: int) -> dict[str, IntArray]:
    """[choices]: what becomes of each value."""
    choices = np.arange(base ** len(names))
    return {name: choices // base**i % base for i, name in enumerate(names)}


def _walk(
    eqns: Sequence[jx.JaxprEqn],
    made_by: Mapping[jx.JaxprEqn, set[str]],
    targets: set[jx.Var],
    entering: set[jx.Var],
    names: tuple[str, ...],
    prices: Mapping[str, Price],
    is_held_anyway: Callable[[jx.JaxprEqn], bool],
    base: int,
) -> _Walked:
    choices = np.arange(base ** len(names))
    digits = _digits(names, base)
    wanted: dict[jx.Var, BoolArray] = {v: np.ones(len(choices), bool) for v in targets}
    again: dict[jx.JaxprEqn, BoolArray] = {}
    seconds, held_bytes, on_host = np.zeros(len(choices)), np.zeros(len(choices)), np.zeros(len(choices))
    for eqn in reversed(eqns):
        asked = [wanted[v] for v in eqn.outvars if v in wanted and v not in entering]
        if not asked or is_held_anyway(eqn):
            continue
        need = np.logical_or.reduce(asked)
        made = made_by[eqn]
        kept = np.logical_or.reduce([digits[n] != AGAIN for n in made if n in digits] or [np.zeros(len(choices), bool)])
        again[eqn] = runs = need & ~kept
        for n in made:
            seconds += runs * prices[n].seconds
            away = digits[n] == ON_HOST if n in digits else np.zeros(len(choices), bool)
            held_bytes += (need & kept & ~away) * prices[n].bytes
            on_host += (need & kept & away) * prices[n].bytes
        for v in eqn.invars:
            if isinstance(v, jx.Var):
                wanted[v] = wanted[v] | runs if v in wanted else runs
    return _Walked(again, seconds, held_bytes, on_host)


def _inner(eqn: jx.JaxprEqn) -> list[jx.JaxprEqn]:
    return [e for r in jx.regions(eqn) for e in jx.walk(r.body)]


def price_of_held(loops: Sequence[LayerLoop], counts: Sequence[Mapping[str, LayerCounts]]) -> Price:
    """Bytes per device of what is held on the device in these loops, and seconds that the rest takes; ``counts``: by
    name, for each loop."""
    size, seconds = 0.0, 0.0
    for loop, of_loop in zip(loops, counts, strict=True):
        choices = loop.choices(of_loop)
        size += float(loop.bytes[choices].sum())
        seconds += float(loop.seconds[choices].sum())
    return Price(size, seconds)


def choose_held(loops: Sequence[LayerLoop], room: float, *, may_differ: bool = True) -> list[dict[str, LayerCounts]]:
    """For each loop, what becomes of each of its values in how many layers: least time within ``room`` bytes per
    device.

    Args:
      may_differ: whether the layers of a loop may differ.
    """
    rooms = _divided(loops, room)
    return [_best_pair(loop, part, may_differ) for loop, part in zip(loops, rooms, strict=True)]


def _divided(loops: Sequence[LayerLoop], room: float) -> list[float]:
    """The room of each loop: for steps along the hulls, the most seconds for each byte first; of equals the last loop,
    as the first layers make values again."""
    steps: list[tuple[float, int, float]] = []
    for i, loop in enumerate(loops):
        hull = _hull(loop)
        for a, b in pairwise(hull):
            size = float(loop.bytes[b] - loop.bytes[a])
            steps.append((-float(loop.seconds[a] - loop.seconds[b]) / size, -i, size * loop.layers))
    rooms = [0.0 for _ in loops]
    for _, minus, size in sorted(steps):
        given = min(size, room)
        rooms[-minus] += given
        room -= given
    return rooms


def _front(loop: LayerLoop) -> list[int]:
    """The choices that no other beats in bytes and seconds, by bytes."""
    found: list[int] = []
    for s in np.lexsort((loop.seconds, loop.bytes)):
        if not found or loop.seconds[s] < loop.seconds[found[-1]] * (1 - 1e-12):
            found.append(int(s))
    return found


def _hull(loop: LayerLoop) -> list[int]:
    """The choices on the lower convex hull of seconds over bytes, by bytes."""
    hull: list[int] = []
    for s in _front(loop):
        while len(hull) > 1 and _slope(loop, hull[-2], hull[-1]) >= _slope(loop, hull[-2], s):
            hull.pop()
        hull.append(s)
    return hull


def _slope(loop: LayerLoop, a: int, b: int) -> float:
    return float((loop.seconds[b] - loop.seconds[a]) / max(loop.bytes[b] - loop.bytes[a], 1e-9))


def _best_pair(loop: LayerLoop, room: float, may_differ: bool) -> dict[str, LayerCounts]:
    front, n = _front(loop), loop.layers
    front = [front[i * (len(front) - 1) // (MAX_SETS - 1)] for i in range(MAX_SETS)] if len(front) > MAX_SETS else front
    ranks = {s: [_RANK[d] for d in loop.digits(s)] for s in front}
    best: tuple[float, float, int, int, int] | None = None
    for low in front:
        for high in front:
            if any(a > b for a, b in zip(ranks[low], ranks[high], strict=True)) or (low != high and not may_differ):
                continue
            each = float(loop.bytes[high] - loop.bytes[low])
            spare = room - n * float(loop.bytes[low])
            if spare < 0 and loop.bytes[low] > 0:
                continue
            more = n if each <= 0 else max(0, min(n, int(spare // each)))
            held = n * float(loop.bytes[low]) + more * each
            found = n * float(loop.seconds[low]) - more * float(loop.seconds[low] - loop.seconds[high])
            if best is None or (found, held) < best[:2]:
                best = found, held, low, high, more
    assert best is not None
    _, _, low, high, more = best
    first, last = loop.digits(low), loop.digits(high)
    both = [[a] * (n - more) + [b] * more for a, b in zip(first, last, strict=True)]
    return {
        name: LayerCounts(each.count(AGAIN), each.count(ON_HOST)) for name, each in zip(loop.names, both, strict=True)
    }
