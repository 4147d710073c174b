"""The published schedules, as the order of each stage's operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoshard.errors import ScheduleError, nearest
from autoshard.schedule.list_orders import list_orders
from autoshard.schedule.slots import Operation, Placement, Slot, looped, v_shaped

Orders = tuple[Sequence[Sequence[Slot]], Placement]
"""Of each stage its operations, in order; and where the model's parts are."""
F, B, I, W = Operation.FORWARD, Operation.BACKWARD, Operation.INPUT_GRADIENT, Operation.WEIGHT_GRADIENT


def orders_of(name: str, stages: int, microbatches: int) -> Orders:
    """Orders of the schedule ``name``; see `Schedule.named`."""
    if stages < 1 or microbatches < 1:
        raise ScheduleError(f"{stages} stages and {microbatches} micro-batches: both have to be at least 1")
    kind, _, number = name.partition(":")
    if kind == "interleaved" and number.isdecimal() and int(number) > 0:
        return _interleaved(stages, microbatches, int(number))
    if kind == "zb" and number.isdecimal() and int(number) > 0:
        return _zero_bubble(stages, microbatches, int(number))
    if name not in _BY_NAME:
        raise ScheduleError(
            f"no schedule is called {name!r}{nearest(name, (*_BY_NAME, 'interleaved:2', f'zb:{2 * stages - 1}'))}"
        )
    return _BY_NAME[name](stages, microbatches)


def _gpipe(stages: int, microbatches: int) -> Orders:
    return [_numbered([F] * microbatches + [B] * microbatches)] * stages, looped(stages, 1)


def _one_forward_one_backward(stages: int, microbatches: int) -> Orders:
    return _interleaved(stages, microbatches, 1)


def _interleaved(stages: int, microbatches: int, chunks: int) -> Orders:
    """Narayanan et al. 2021: groups of as many micro-batches as stages go through one chunk after the other.

    A last group that is not full is filled up and its surplus left out again: no other micro-batch waits for it.
    """
    groups = [range(start, start + stages) for start in range(0, microbatches, stages)]
    forwards = [Slot(F, c, m) for group in groups for c in range(chunks) for m in group]
    backwards = [Slot(B, c, m) for group in groups for c in reversed(range(chunks)) for m in group]
    orders: list[list[Slot]] = []
    for stage in range(stages):
        ahead = (stages - stage - 1) * (1 if chunks == 1 else 2) + (chunks - 1) * stages
        ahead = min(ahead, len(forwards))
        pairs = zip(forwards[ahead:], backwards, strict=False)
        order = [*forwards[:ahead], *(slot for pair in pairs for slot in pair), *backwards[len(forwards) - ahead :]]
        orders.append([slot for slot in order if slot.microbatch < microbatches])
    return orders, looped(stages, chunks)


def _zero_bubble_h1(stages: int, microbatches: int) -> Orders:
    """Qi et al. 2023: the weights' gradients of as many micro-batches as there are stages before this one wait until
    the end, where the stage would be idle; no stage holds residuals of more micro-batches than there are stages."""
    steady = max(microbatches - stages, 0)
    orders: list[list[Slot]] = []
    for stage in range(stages):
        after = stages - stage
        kinds = [F] * after + [I, F] * stage + [I, W, F] * steady + [I, W] * after + [W] * stage
        orders.append([slot for slot in _numbered(kinds) if slot.microbatch < microbatches])
    return orders, looped(stages, 1)


def _zero_bubble(stages: int, microbatches: int, limit: int) -> Orders:
    """Backwards split, and residuals of ``limit`` micro-batches at most; the order is found by `list_orders`. With
    2 * stages - 1 it is near the ``zb-h2`` of Qi et al. 2023."""
    placement = looped(stages, 1)
    return list_orders(placement, microbatches, dict.fromkeys((F, I, W), 1.0), limit), placement


def _zero_bubble_v(stages: int, microbatches: int) -> Orders:
    """Qi et al. 2024: two chunks as a V, at the memory of ``1f1b``; the order is found by `list_orders`."""
    placement = v_shaped(stages)
    return list_orders(placement, microbatches, dict.fromkeys((F, I, W), 1.0), 2 * stages), placement


_BY_NAME: Mapping[str, Callable[[int, int], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zb-h1": _zero_bubble_h1,
    "zb-v": _zero_bubble_v,
}


def _numbered(kinds: Sequence[Operation]) -> list[Slot]:
    """Operations of one chunk, each kind's micro-batches counted from 0."""
    count = dict.fromkeys(kinds, 0)
    order: list[Slot] = []
    for kind in kinds:
        order.append(Slot(kind, 0, count[kind]))
        count[kind] += 1
    return order
