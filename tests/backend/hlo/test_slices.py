"""Collectives of a program for several TPU slices, which is compiled as that of one."""

from __future__ import annotations

import pytest

from autoshard.backend.hlo.collectives import collectives, located_collectives
from autoshard.backend.hlo.slices import of_every_slice
from autoshard.backend.hlo.text import parse_hlo
from autoshard.backend.hlo.waits import Transfer, waiting_seconds
from autoshard.machine.mesh_config import MeshConfig, resolve_mesh

MESH = resolve_mesh(MeshConfig(axes={"slice": 2, "data": 4}, tpu="v5e:2x2", slices=2))


def transfer(name: str, kind: str, target: str, sent: str, received: str, between: str = "") -> str:
    """A ``send`` and a ``recv`` as libtpu 0.0.50 prints them, with what is computed while they are under way."""
    quoted = f'"{target}"' if "x" in target else target
    attributes = (
        'is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target={quoted},_xla_megascale_transfer_type="{kind}"}}'
    )
    return f"""
  %after-all.{name} = token[] after-all()
  %send.{name} = ({sent}, u32[]{{:S(2)}}, token[]) send(%x, %after-all.{name}), channel_id=2, {attributes}
  %recv.{name} = ({received}, u32[]{{:S(2)}}, token[]) recv(%after-all.{name}), channel_id=1, {attributes}
{between}
  %send-done.{name} = token[] send-done(%send.{name}), channel_id=2, is_host_transfer=true
  %recv-done.{name} = ({received}, token[]) recv-done(%recv.{name}), channel_id=1, is_host_transfer=true
"""


def module(body: str) -> str:
    return f"""HloModule jit_step, is_scheduled=true, num_partitions=4

ENTRY %main (x: f32[8,128]) -> f32[8,128] {{
  %x = f32[8,128]{{1,0}} parameter(0)
{body}
  ROOT %out = f32[8,128]{{1,0}} copy(%x)
}}
"""


PAIRS = ",".join(f"{{10000{d}->20000{d}}}" for d in range(4))


@pytest.mark.parametrize(
    ("kind", "target", "sent", "received", "expected"),
    [
        ("ALL_REDUCE", "{1,2}x{0:3}", "f32[8,128]{1,0}", "f32[8,128]{1,0}", ("all-reduce", ("slice",), 4096)),
        ("ALL_GATHER", "{1,2}x{0:3}", "f32[1,8,128]{2,1,0}", "f32[2,8,128]{2,1,0}", ("all-gather", ("slice",), 8192)),
        ("REDUCE_SCATTER", "{1,2}x{0:3}", "f32[8,128]", "f32[4,128]", ("reduce-scatter", ("slice",), 4096)),
        ("ALL_TO_ALL", "{{100000,100001,100002,100003,200000,200001,200002,200003}}", "bf16[8,128]", "bf16[8,128]",
         ("all-to-all", ("slice", "data"), 2048)),
        ("ONE_TO_ONE", f"{{{PAIRS}}}", "f32[8,128]", "f32[8,128]", ("collective-permute", ("slice",), 4096)),
    ],
)  # fmt: skip
def test_what_crosses_slices_is_a_collective(kind, target, sent, received, expected):
    (found,) = collectives(module(transfer("a", kind, target, sent, received)), MESH)
    assert (found.kind, found.axes, found.bytes) == expected
    assert found.share == (0.5 if kind == "ONE_TO_ONE" else 1.0)


def test_what_is_computed_before_it_is_waited_for_hides_it():
    def waited(between: str) -> float:
        text = module(transfer("a", "ALL_REDUCE", "{1,2}x{0:3}", "f32[8,128]", "f32[8,128]", between=between))
        found = parse_hlo(text)
        (where,) = located_collectives(found, MESH)
        return waiting_seconds(found, {where: Transfer(5, "dcn")}, lambda i, _: 2 * (i.opcode == "add"))

    assert waited("") == 5
    assert waited("  %y = f32[8,128]{1,0} add(%x, %x)") == 3


def test_groups_of_a_slice_are_the_same_in_each():
    gather = "  %g = f32[32,128]{1,0} all-gather(%x), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}"
    permute = "  %p = f32[8,128]{1,0} collective-permute(%x), channel_id=4, source_target_pairs={{0,1},{1,2},{2,3}}"
    found = collectives(module(f"{gather}\n{permute}"), MESH)
    assert [(c.kind, c.axes) for c in found] == [("all-gather", ("data",)), ("collective-permute", ("data",))]
    assert found[1].share == 6 / 8
    assert of_every_slice([(0, 3)], 4, 8) == ((0, 3), (4, 7))
    assert of_every_slice([(0, 3)], 0, 8) == of_every_slice([(0, 3)], 8, 8) == ((0, 3),)
