"""Profiles of predicted latencies, and which of several compilations is kept."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from autoshard.backend.estimate import seconds_by_name
from autoshard.backend.hlo.text import parse_hlo
from autoshard.backend.latencies import SCALES, compile_with_latencies, latency_profile
from autoshard.machine.mesh_config import MeshConfig

MESH = MeshConfig(axes={"data": 16}, gpu="h100", nodes=2).mesh()
GROUPS = "replica_groups=[1,16]<=[16], dimensions={0}, use_global_device_ids=true, channel_id=1"


def step(before: str, between: str) -> str:
    """HLO that gathers, with a product before the gather or beside it."""
    product = "dot = f32[4096,4096] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    return f"""HloModule step, is_scheduled=true

ENTRY main {{
  w = f32[1024,4096] parameter(0)
  x = f32[4096,4096] parameter(1)
{f"  {product}" if before else ""}
  start = (f32[1024,4096], f32[16384,4096]) all-gather-start(w), {GROUPS}
{f"  {product}" if between else ""}
  done = f32[16384,4096] all-gather-done(start)
  ROOT out = (f32[16384,4096], f32[4096,4096]) tuple(done, dot)
}}
"""


BLOCKING, HIDING = step("before", ""), step("", "between")


class Compiled:
    def __init__(self, text: str) -> None:
        self.text = text

    def as_text(self) -> str:
        return self.text


def compiled(*texts: str | Exception) -> tuple[Any, list[Mapping[str, Any]]]:
    """What is kept of compilations that give these one after the other, then the last, and the options of each."""
    asked: list[Mapping[str, Any]] = []

    def run(more: Mapping[str, Any]) -> Compiled:
        text = texts[min(len(asked), len(texts) - 1)]
        asked.append(more)
        if isinstance(text, Exception):
            raise text
        return Compiled(text)

    return compile_with_latencies(run, MESH).text, asked


def costs(profile: bytes) -> dict[str, float]:
    """Microseconds by name, of a serialized `ProfiledInstructionsProto`."""
    found: dict[str, float] = {}

    def length(at: int) -> tuple[int, int]:
        number = shift = 0
        while True:
            byte, at = profile[at], at + 1
            number |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return number, at

    at = 0
    while at < len(profile):
        assert profile[at] == 1 << 3 | 2
        size, at = length(at + 1)
        end = at + size
        assert profile[at] == 1 << 3 | 2
        size, at = length(at + 1)
        name = profile[at : at + size].decode()
        assert profile[at + size] == 2 << 3 | 1
        (found[name],) = struct.unpack("<d", profile[at + size + 1 : end])
        at = end
    return found


def test_a_profile_has_the_seconds_of_products_and_of_collectives() -> None:
    module = parse_hlo(BLOCKING)
    read = costs(latency_profile(module, MESH))
    assert read == {name: pytest.approx(1e6 * seconds) for name, seconds, _ in seconds_by_name(module, MESH)}
    assert read["start"] > 100
    assert read["dot"] > 100
    assert read["done"] == 0


def test_only_collectives_over_the_slowest_links_are_scaled() -> None:
    whole, part = (costs(latency_profile(parse_hlo(BLOCKING), MESH, scale)) for scale in (1.0, 0.5))
    assert part["start"] == pytest.approx(0.5 * whole["start"])
    assert part["dot"] == whole["dot"]
    within = parse_hlo(BLOCKING.replace("[1,16]<=[16]", "[2,8]<=[16]"))
    mesh = MeshConfig(axes={"node": 2, "data": 8}, gpu="h100", nodes=2).mesh()
    whole, part = (costs(latency_profile(within, mesh, scale)) for scale in (1.0, 0.5))
    assert part["start"] == whole["start"] > 10


def test_names_of_any_length_are_written() -> None:
    name = "x" * 300
    assert costs(latency_profile(parse_hlo(BLOCKING.replace("dot =", f"{name} =")), MESH))[name] > 100


def test_the_fastest_is_kept() -> None:
    assert compiled(BLOCKING, HIDING)[0] == HIDING
    others = [BLOCKING.replace("step,", f"other_{n},") for n in range(3)]
    kept, asked = compiled(BLOCKING, *others)
    assert kept == BLOCKING
    profiles = [latency_profile(parse_hlo(BLOCKING), MESH, scale) for scale in SCALES]
    assert asked == [{}, *({"fdo_profile": p} for p in profiles)]
    assert len({*profiles}) == 3
    assert compiled(BLOCKING, others[0], HIDING, others[0])[0] == HIDING
    hidden = HIDING.replace("f32[1024,4096]", "f32[1,64]").replace("f32[16384,4096]", "f32[16,64]")
    kept, asked = compiled(BLOCKING, hidden)
    assert (kept, len(asked)) == (hidden, 2), "it waits for nothing"


def test_what_waits_for_nothing_is_compiled_once() -> None:
    small = BLOCKING.replace("f32[1024,4096]", "f32[1,8]").replace("f32[16384,4096]", "f32[16,8]")
    text = small.replace("f32[4096,4096]", "f32[32768,32768]")
    kept, asked = compiled(text)
    assert (kept, asked) == (text, [{}])


def test_what_does_not_fit_is_not_taken() -> None:
    too_large = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
    kept, asked = compiled(BLOCKING, too_large)
    assert kept == BLOCKING
    assert len(asked) == 4
    assert compiled(BLOCKING, too_large, HIDING)[0] == HIDING
