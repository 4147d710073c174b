"""What a device waits for, by the seconds of each instruction and collective and by the order of the program."""

from __future__ import annotations

import pytest

from autoshard.backend.hlo.text import parse_hlo
from autoshard.backend.hlo.waits import Transfer, waiting_seconds

HEAD = "HloModule jit_step, is_scheduled=true\n"
ENTRY = "\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8] parameter(0)\n{}\n}}\n"
LAST = "ROOT %last = f32[8] add(%p, %p)"
BODY = """
%part (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  ROOT %sent = f32[32] all-gather(%q), channel_id=1, frontend_attributes={chain_id="4"}
}
%product (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  %c = f32[8] convolution(%q, %q)
  ROOT %more = f32[32] all-gather(%q), channel_id=1, frontend_attributes={chain_id="4"}
}
%finish (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  ROOT %end = f32[32] all-gather(%q), channel_id=1, frontend_attributes={chain_id="4"}
}
%scatter (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  ROOT %summed = f32[8] all-reduce(%q), channel_id=2
}
"""


def waits(lines: list[str], transfers: dict[str, tuple[float, str]], work: dict[str, float], more: str = "") -> float:
    """``transfers`` and ``work`` by the names of instructions, which are in one computation each."""
    module = parse_hlo(HEAD + more + ENTRY.format("\n".join(f"  {line}" for line in lines)))
    where = {i: name for name, c in module.computations.items() for i in c.instructions}
    found = {(where[name], name): Transfer(*transfer) for name, transfer in transfers.items()}
    return waiting_seconds(module, found, lambda i, _: work.get(i.name, 0.0))


def started(name: str) -> str:
    return f"%{name} = f32[8] all-gather-start(%p)"


def ended(name: str) -> str:
    return f"%{name}-done = f32[32] all-gather-done(%{name})"


def test_work_hides_no_more_than_it_lasts():
    lines = [started("a"), "%f = f32[8] fusion(%p), kind=kLoop, calls=%x", ended("a"), LAST]
    assert waits(lines, {"a": (5, "ici")}, {"f": 3, "last": 100}) == 2
    assert waits(lines, {"a": (5, "ici")}, {"f": 7, "last": 100}) == 0


def test_a_start_may_be_waited_for_through_an_update():
    update = "%u = f32[8] async-update(%a), calls=%part"
    lines = ["%a = f32[8] async-start(%p), calls=%part", update, "%d = f32[8] async-done(%u)", LAST]
    assert waits(lines, {"sent": (5, "ici")}, {"last": 100}, BODY) == 5


def test_what_is_started_without_operands_sends_from_the_update_that_has_them():
    """As SparseCores do: what is between start and update hides nothing."""
    start, update = "%a = f32[8] call-start(), to_apply=%part", "%u = f32[8] call-update(%a, %f)"
    product, done = "%f = f32[8] fusion(%p), kind=kLoop, calls=%x", "%d = f32[8] call-done(%u)"
    takes = {"sent": (5, "ici")}, {"f": 100, "g": 3}, BODY
    assert waits([start, product, update, done, LAST], *takes) == 5
    beside = product.replace("%f", "%g")
    assert waits([start, product, update, beside, done, LAST], *takes) == 2
    known = "%u = f32[8] call-update(%a)"
    assert waits([start.replace("()", "(%p)"), product, known, done, LAST], *takes) == 0


def test_links_of_one_kind_run_one_after_the_other_and_others_at_the_same_time():
    lines = [started("a"), started("b"), ended("a"), ended("b"), LAST]
    assert waits(lines, {"a": (5, "ici"), "b": (4, "ici")}, {}) == 9
    assert waits(lines, {"a": (5, "ici"), "b": (4, "dcn")}, {}) == 5


def test_what_is_waited_for_whole_holds_up_what_is_under_way_on_its_link():
    lines = [started("a"), "%s = f32[8] all-reduce(%p)", "%f = f32[8] add(%p, %p)", ended("a"), LAST]
    assert waits(lines, {"a": (5, "ici"), "s": (2, "ici")}, {"f": 4}) == 2 + 1
    assert waits(lines, {"a": (5, "dcn"), "s": (2, "ici")}, {"f": 4}) == 2


def test_a_collective_that_fusions_share_ends_with_the_last_of_them():
    lines = [
        "%start = f32[8] fusion(%p), kind=kCustom, calls=%part",
        "%beside = f32[8] fusion(%p), kind=kOutput, calls=%product",
        "%between = f32[8] add(%p, %p)",
        "%done = f32[8] fusion(%p), kind=kCustom, calls=%finish",
        "%scattered = f32[8] fusion(%p), kind=kCustom, calls=%scatter",
        LAST,
    ]
    work = {"beside": 3.0, "between": 1.0, "last": 50.0}
    assert waits(lines, {"sent": (5, "ici")}, work, BODY) == 1
    assert waits(lines, {"sent": (5, "ici"), "summed": (2, "ici")}, work, BODY) == 1 + 2


def test_a_loop_waits_each_time_and_is_itself_work_beside_a_collective():
    loop = """
%body (q: f32[8]) -> f32[8] {
  %q = f32[8] parameter(0)
  %w = f32[8] add(%q, %q)
  ROOT %each = f32[8] all-reduce(%w)
}
%condition (q: f32[8]) -> pred[] {
  %q = f32[8] parameter(0)
  ROOT %less = pred[] constant(true)
}
"""
    trips = 'backend_config={"known_trip_count":{"n":"4"}}'
    lines = [started("a"), f"%loop = f32[8] while(%p), condition=%condition, body=%body, {trips}", ended("a"), LAST]
    assert waits(lines, {"each": (2, "ici")}, {"w": 1.0}, loop) == pytest.approx(8)
    assert waits(lines, {"a": (13, "dcn"), "each": (2, "ici")}, {"w": 1.0}, loop) == pytest.approx(8 + 1)
