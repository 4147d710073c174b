"""Collectives of compiled programs and of HLO texts, and the audit against those planned."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.backend.audit import audit, audit_collectives, size_text
from autoshard.backend.hlo.collectives import collectives, replica_groups, shape_bytes
from autoshard.machine.collective import Collective
from autoshard.machine.mesh import Hardware, Link, LogicalMesh

CHIP = Hardware("chip", {"float32": 1e12}, 1e9, 1e12, {"near": Link("near", 4.5e10, 1e-6)})
MESH = LogicalMesh(("x", "y"), (2, 4), CHIP)


def emitted(fun: Any, args: tuple[Any, ...], ins: Any = None, outs: Any = None) -> tuple[Collective, ...]:
    """The collectives of ``fun`` compiled for the (2, 4) mesh of eight CPU devices."""
    named = jax.tree.map(MESH.sharding, (ins, outs))
    compiled = jax.jit(fun, in_shardings=named[0], out_shardings=named[1]).lower(*args).compile()
    return collectives(compiled.as_text() or "", MESH)


def line_of(text: str) -> str:
    """``file:line`` of the one line of this file that ends with the comment ``# text``."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}"))
    return f"{__file__}:{number}"


def sds(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_contraction_over_a_sharded_dimension_is_one_all_reduce() -> None:
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return a @ b  # contraction

    (found,) = emitted(product, (sds(16, 32), sds(32, 64)), (P(None, "y"), P("y", None)), P())
    assert (found.kind, found.axes, found.bytes, found.count) == ("all-reduce", ("y",), 16 * 64 * 4, 1)
    assert found.source == line_of("contraction")
    (found,) = emitted(product, (sds(16, 32), sds(32, 64)), (P(None, ("x", "y")), P(("x", "y"), None)), P())
    assert found.axes == ("x", "y")


def test_a_collective_in_a_scan_counts_once_a_trip() -> None:
    def scan(a: jax.Array, weights: jax.Array) -> jax.Array:
        def body(carry: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.with_sharding_constraint(carry @ w, MESH.sharding(P()))), None

        return jax.lax.scan(body, a, weights)[0]

    found = emitted(scan, (sds(16, 32), sds(5, 32, 32)), (P(None, "y"), P(None, "y", None)), P())
    (reduced,) = (c for c in found if c.kind == "all-reduce")
    assert (reduced.axes, reduced.bytes, reduced.count, reduced.exact) == (("y",), 16 * 32 * 4, 5, True)
    assert all(c.count == 1 for c in found if c.kind != "all-reduce")


def test_nested_scans_multiply() -> None:
    def twice(a: jax.Array) -> jax.Array:
        def inner(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.psum(jnp.sin(c), "y"), None

        def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.cos(jax.lax.scan(inner, c, None, length=7)[0]), None

        return jax.lax.scan(outer, a, None, length=11)[0]

    fun = jax.shard_map(twice, mesh=MESH.concrete(), in_specs=P("x"), out_specs=P("x"), check_vma=False)
    assert sum(c.count for c in emitted(fun, (sds(16, 32),)) if c.kind == "all-reduce") == 77


def test_out_shardings_gather() -> None:
    (found,) = emitted(lambda a: a * 2, (sds(16, 32),), (P("x", "y"),), P(None, "y"))
    assert (found.kind, found.axes, found.bytes) == ("all-gather", ("x",), 16 * 8 * 4)


@pytest.mark.parametrize(
    ("fun", "ins", "outs", "expected"),
    [
        (lambda a: jax.lax.ppermute(a, "y", [(i, (i + 1) % 4) for i in range(4)]), P("x", "y"), P("x", "y"),
         ("collective-permute", ("y",), 8 * 8 * 4)),
        (lambda a: jax.lax.psum_scatter(a, "y", scatter_dimension=0, tiled=True), P("x"), P(("x", "y")),
         ("reduce-scatter", ("y",), 8 * 32 * 4)),
        (lambda a: jax.lax.all_to_all(a, "y", 1, 0, tiled=True), P(("x", "y")), P("x", "y"),
         ("all-to-all", ("y",), 2 * 32 * 4)),
        (lambda a: jax.lax.psum(a, ("x", "y")), P(("x", "y")), P(), ("all-reduce", ("x", "y"), 2 * 32 * 4)),
    ],
    ids=["ppermute", "psum_scatter", "all_to_all", "psum"],
)  # fmt: skip
def test_explicit_collectives(fun: Any, ins: P, outs: P, expected: tuple[str, tuple[str, ...], int]) -> None:
    mapped = jax.shard_map(fun, mesh=MESH.concrete(), in_specs=ins, out_specs=outs, check_vma=False)
    (found,) = emitted(mapped, (sds(16, 32),))
    assert (found.kind, found.axes, found.bytes) == expected


def test_an_unpartitioned_program_has_none() -> None:
    assert emitted(lambda a: a + 1, (sds(16, 32),), (P("x", "y"),), P("x", "y")) == ()


def text_of(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule test, num_partitions=8\n\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("y",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("x",)),
        ("{{3,7},{2,6},{5,1},{0,4}}", ("x",)),
        ("{}", ("x", "y")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("{{0,1},{2,3},{4,5},{6,7}}", None),
        ("[2,4]<=[8]", ("y",)),
        ("[4,2]<=[2,4]T(1,0)", ("x",)),
        ("[1,8]<=[8]", ("x", "y")),
        ("[4,2]<=[8]", None),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("y",)),
        ("mesh['axis_0'=8] {'axis_0'}", ("x", "y")),
        ("mesh['axis_0'=8] {'axis_0':(1)2}", ("x",)),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", None),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("x",)),
        ("mesh['a'=2,'b'=4], device_ids=(4,5,6,7,0,1,2,3) {'b'}", ("y",)),
    ],
)
def test_device_groups_in_every_form(groups: str, axes: tuple[str, ...] | None) -> None:
    line = f"ROOT %r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true"
    (found,) = collectives(text_of(line + ", to_apply=%add"), MESH)
    assert found.axes == axes


def test_groups_in_an_unknown_form_have_no_axes() -> None:
    assert replica_groups("replica_groups=<<0-7>>", 8) is None
    (found,) = collectives(text_of("ROOT %r = f32[8]{0} all-reduce(%p), replica_groups=<<0-7>>"), MESH)
    assert found.axes is None
    assert "unknown groups" in str(found)


ASYNC = text_of(
    "%p = f32[8]{0} parameter(0)",
    "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%p), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}",
    "%d = f32[64]{0} all-gather-done(%s)",
    "%cs = ((f32[8]{0}, bf16[4]{0}), (f32[64]{0}, bf16[32]{0})) all-gather-start(%p, %q), channel_id=2, "
    "replica_groups=[1,8]<=[8], dimensions={0}",
    "%cd = (f32[64]{0}, bf16[32]{0}) all-gather-done(%cs)",
    "%rs = (f32[8]{0}, f32[4]{0}) all-reduce-start(%p, %q), channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}, "
    "to_apply=%add",
    "%rd = (f32[8]{0}, f32[4]{0}) all-reduce-done(%rs)",
    "%gs = ((f32[16]{0}), f32[16]{0}) all-reduce-start(%o), channel_id=7, replica_groups=[1,8]<=[8], to_apply=%add",
    "%gd = f32[16]{0} all-reduce-done(%gs)",
    "%ps = (f32[8]{0}, f32[8]{0}, u32[]{:S(2)}, u32[]) collective-permute-start(%p), channel_id=4, "
    "source_target_pairs={{0,4},{4,0}}",
    "%pd = f32[8]{0} collective-permute-done(%ps)",
    "%ss = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}",
    "%sd = f32[2]{0} reduce-scatter-done(%ss)",
    "%as = ((f32[8]{0}), f32[8]{0}) async-start(%p), calls=%wrapped",
    "%au = ((f32[8]{0}), f32[8]{0}) async-update(%as)",
    "ROOT %ad = f32[8]{0} async-done(%au)",
    before="%wrapped (q: f32[8]) -> f32[8] {\n  %q = f32[8]{0} parameter(0)\n"
    "  ROOT %a = f32[8]{0} all-to-all(%q), channel_id=6, replica_groups=[2,4]<=[8], dimensions={0}\n}\n",
)


def test_asynchronous_pairs_count_once() -> None:
    found = {(c.kind, c.bytes, c.axes) for c in collectives(ASYNC, MESH)}
    assert found == {
        ("all-gather", 256, ("x", "y")),
        ("all-gather", 256 + 64, ("x", "y")),
        ("all-reduce", 48, ("y",)),
        ("all-reduce", 64, ("x", "y")),
        ("collective-permute", 32, ("x",)),
        ("reduce-scatter", 32, ("y",)),
        ("all-to-all", 32, ("y",)),
    }
    assert len(collectives(ASYNC, MESH)) == len(found)


ADDED_UP = "all-reduces of values that are added up before, done once for the sum"


def test_redundant_collectives_are_marked() -> None:
    text = text_of(
        "%a = f32[64]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}",
        "%b = f32[64]{0} all-gather(%p), channel_id=9, replica_groups=[1,8]<=[8], dimensions={0}",
        "%d.remat2 = f32[64]{0} all-gather(%r), replica_groups=[1,8]<=[8], dimensions={0}",
        "ROOT %c = f32[64]{0} all-gather(%q), replica_groups=[1,8]<=[8], dimensions={0}",
    )
    assert [c.redundant for c in collectives(text, MESH)] == [False, True, True, False]


def test_what_is_added_up_before_it_is_reduced_is_counted() -> None:
    text = text_of(
        "%p = f32[] parameter(0)",
        "%q = f32[] parameter(1)",
        "%two = f32[] add(%p, %q)",
        "%three = f32[] add(%two, %q)",
        "%other = f32[] multiply(%two, %q)",
        "%a = f32[] all-reduce(%three), replica_groups=[1,8]<=[8], to_apply=%sum",
        "%b = f32[] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%sum",
        "ROOT %c = f32[] all-reduce(%other), replica_groups=[1,8]<=[8], to_apply=%sum",
    )
    assert [c.addends for c in collectives(text, MESH)] == [3, 1, 1]


# As the TPU compiler writes them: one all-gather spread over three fusions, and a padded reduce-scatter.
TPU = """HloModule test, num_partitions=8

FileNames
1 "/home/me/step.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=41 end_line=41 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%start (a: bf16[4,8]) -> (bf16[4,8], bf16[8,8]) {
  %a = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(0)
  %g = bf16[8,8]{1,0:T(8,128)(2,1)} all-gather(%a), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="0"}, metadata={op_name="g" stack_frame_id=1}
  ROOT %c = (bf16[4,8]{1,0}, bf16[8,8]{1,0:T(8,128)(2,1)S(1)}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%done (a: bf16[4,8]) -> bf16[8,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  ROOT %g = bf16[8,8]{1,0} all-gather(%a), channel_id=3, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter (input: bf16[1024,8]) -> bf16[280,8] {
  %input = bf16[1024,8]{1,0} parameter(0)
  %pad = bf16[1120,8]{1,0} pad(%input, %zero), padding=0_96x0_0
  %all-reduce.1 = bf16[1120,8]{1,0} all-reduce(%pad), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  ROOT %slice = bf16[280,8]{1,0} dynamic-slice(%all-reduce.1, %i, %zero), dynamic_slice_sizes={280,8}
}

ENTRY %main (p: bf16[1024,8]) -> bf16[280,8] {
  %p = bf16[1024,8]{1,0} parameter(0)
  %s = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) fusion(%p), kind=kCustom, calls=%start
  %d = bf16[8,8]{1,0} fusion(%s), kind=kCustom, calls=%done
  %f = bf16[280,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter, metadata={op_name="dot (a)" stack_frame_id=1}
  %edge = bf16[24,8]{1,0} slice(%f), slice={[256:280], [0:8]}
  %moved = bf16[24,8]{1,0} collective-permute(%edge), channel_id=2, source_target_pairs={{0,1},{1,2},{2,3},{4,5},{5,6},{6,7}}
  ROOT %whole = bf16[304,8]{1,0} concatenate(%moved, %f), dimensions={0}
}
"""  # noqa: E501


def test_tpu_fusions() -> None:
    gather, scatter, edges = collectives(TPU, MESH)
    assert (gather.kind, gather.axes, gather.bytes, gather.count) == ("all-gather", ("x",), 128, 1)
    assert (scatter.kind, scatter.axes, scatter.bytes) == ("reduce-scatter", ("y",), 1024 * 8 * 2)
    assert gather.source == scatter.source == "/home/me/step.py:41"
    assert (edges.kind, edges.axes, edges.bytes, edges.share) == ("reduce-scatter", ("y",), 24 * 8 * 2, 6 / 8)


def loop_text(condition: str, step: str = "1", first: str = "0", config: str = "") -> str:
    return f"""HloModule test

%plus (l: s32[], r: s32[]) -> s32[] {{
  %l = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %sum = s32[] add(%l, %r)
}}

%less (l: s32[], r: s32[]) -> pred[] {{
  %l = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %lt = pred[] compare(%l, %r), direction=LT
}}

%body (state: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %state = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] get-tuple-element(%state), index=2
  %copy = s32[] copy(%i)
  %step = s32[] constant({step})
  %next = s32[] fusion(%copy, %step), kind=kLoop, calls=%plus
  %v = f32[8]{{0}} get-tuple-element(%state), index=1
  %w = f32[8]{{0}} all-reduce(%v), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8]{{0}}, s32[]) tuple(%next, %w, %n)
}}

%condition (state: (s32[], f32[8], s32[])) -> pred[] {{
  %state = (s32[], f32[8]{{0}}, s32[]) parameter(0)
  %ten = s32[] constant(10)
  %i = s32[] get-tuple-element(%state), index=0
  %n = s32[] get-tuple-element(%state), index=2
  ROOT %test = pred[] {condition}
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %first = s32[] constant({first})
  %bound = s32[] constant(12)
  %start = (s32[], f32[8]{{0}}, /*index=2*/s32[]) tuple(%first, %p, %bound)
  %loop = (s32[], f32[8]{{0}}, s32[]) while(%start), condition=%condition, body=%body{config}
  ROOT %result = f32[8]{{0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (loop_text("compare(%i, %ten), direction=LT"), 10),
        (loop_text("compare(%i, %ten), direction=LE"), 11),
        (loop_text("compare(%ten, %i), direction=GT"), 10),
        (loop_text("compare(%i, %ten), direction=NE"), 10),
        (loop_text("compare(%i, %n), direction=LT"), 12),
        (loop_text("compare(%n, %i), direction=GT"), 12),
        (loop_text("fusion(%i, %ten), kind=kLoop, calls=%less"), 10),
        (loop_text("compare(%i, %ten), direction=LT", step="3"), 4),
        (loop_text("compare(%i, %ten), direction=LT", first="4"), 6),
        (loop_text("compare(%i, %ten), direction=GT", step="-2", first="19"), 5),
        (loop_text("compare(%i, %ten), direction=LT", first="30"), 0),
        (loop_text("compare(%i, %ten), direction=LT", config=', backend_config={"known_trip_count":{"n":"3"}}'), 3),
    ],
)
def test_trip_counts(text: str, count: int) -> None:
    assert [(c.count, c.exact) for c in collectives(text, MESH)] == ([(count, True)] if count else [])


@pytest.mark.parametrize(
    ("branches", "scope", "counts"),
    [
        ("branch_computations={%a, %b}", "runs_1_4_of_5/", [2, 8]),
        ("true_computation=%a, false_computation=%b", "runs_3_2_of_5/", [4, 6]),
        ("branch_computations={%a, %b}", "runs_5_0_of_5/", [10]),
        ("branch_computations={%a, %b}", "", [10, 10]),
    ],
)
def test_branches_run_as_often_as_the_name_of_their_conditional_says(
    branches: str, scope: str, counts: list[int]
) -> None:
    reduced = "all-reduce(%v), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add"
    branch = f"%{{}} (v: f32[8]) -> f32[8] {{{{\n  %v = f32[8] parameter(0)\n  ROOT %r = f32[8] {reduced}\n}}}}\n\n"
    both = f'conditional(%i, %v, %v), {branches}, metadata={{op_name="jit(f)/while/body/{scope}cond"}}'
    text = loop_text("compare(%i, %ten), direction=LT").replace(reduced, both)
    text = text.replace("%body (", branch.format("a") + branch.format("b") + "%body (", 1)
    assert [c.count for c in collectives(text, MESH)] == counts


@pytest.mark.parametrize(
    "text",
    [
        loop_text("custom-call(%i)"),
        loop_text("compare(%i, %ten), direction=LT", step="0"),
        loop_text("compare(%i, %ten), direction=EQ"),
        loop_text("compare(%ten, %ten), direction=LT"),
    ],
)
def test_a_loop_of_unknown_trip_count_is_not_exact(text: str) -> None:
    (found,) = collectives(text, MESH)
    assert (found.count, found.exact) == (1, False)
    assert "or more" in str(found)
    assert "trip count is unknown" in str(audit_collectives([], [found], MESH))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[16,64]{1,0}", 4096),
        ("bf16[8,4]{1,0:T(8,128)(2,1)S(1)}", 64),
        ("(f32[2]{0}, /*index=1*/s4[3]{0:E(4)}, pred[5])", 8 + 2 + 5),
        ("f8e4m3fn[7]", 7),
        ("f4e2m1fn[8]", 4),
        ("c64[2]", 16),
        ("f32[]", 4),
        ("f32[0,3]", 0),
        ("f32[<=16]", 64),
        ("token[]", 0),
    ],
)
def test_shape_bytes(shape: str, size: int) -> None:
    assert shape_bytes(shape) == size


def op(kind: str, axes: str | None, size: int, count: int = 1, source: str = "") -> Collective:
    return Collective(kind, None if axes is None else tuple(axes), size, count, source)


AR, AG, RS, CP = "all-reduce", "all-gather", "reduce-scatter", "collective-permute"


@pytest.mark.parametrize(("kind", "sent"), [(AG, 700), (AR, 1400), (RS, 700), ("all-to-all", 700), (CP, 800)])
def test_wire_bytes(kind: str, sent: float) -> None:
    assert op(kind, "xy", 400, 2).wire_bytes(MESH) == sent
    assert op(kind, None, 400, 2).wire_bytes(MESH) == sent


@pytest.mark.parametrize(
    ("pairs", "share"), [([(i, i + 1) for i in range(3)], 3 / 4), ([(0, 0), (1, 3)], 1 / 4), ([(3, 0)], 1 / 4)]
)
def test_the_share_of_a_permute_is_that_of_its_sources(pairs: list[tuple[int, int]], share: float) -> None:
    def fun(a: Any) -> Any:
        return jax.lax.ppermute(a, "y", pairs)

    mapped = jax.shard_map(fun, mesh=MESH.concrete(), in_specs=P("x", "y"), out_specs=P("x", "y"))
    text = jax.jit(mapped).lower(jnp.ones((2, 8), "float32")).compile().as_text()
    (found,) = collectives(text, MESH)
    assert (found.kind, found.axes, found.bytes, found.share) == (CP, ("y",), 8, share)
    assert found.wire_bytes(MESH) == 8 * share


@pytest.mark.parametrize(
    ("planned", "found", "names"),
    [
        ([op(AR, "y", 1000)], [op(AR, "y", 1050)], []),
        ([op(AR, "yx", 1000)], [op(AR, "xy", 1000)], []),
        ([op(AR, "y", 100, 6)], [op(AR, "y", 600)], ["6 all-reduces combined into 1"]),
        ([op(AR, "x", 800), op(AR, "y", 800)], [op(AR, "xy", 800)],
         ["all-reduce over all axes in place of one per axis"]),
        ([op(AR, "xy", 800)], [op(AR, "x", 800), op(AR, "y", 800)], ["all-reduce split into one per axis"]),
        ([op(AG, "xy", 800)], [op(AG, "x", 200), op(AG, "y", 800)], ["all-gather split into one per axis"]),
        ([op(RS, "y", 800), op(RS, "x", 200)], [op(RS, "xy", 800)],
         ["reduce-scatter over all axes in place of one per axis"]),
        ([op(RS, "y", 800)], [op(AR, "y", 800)], ["all-reduce + slice in place of reduce-scatter"]),
        ([op(AR, "y", 800), op(AR, "y", 600), op(AR, "y", 300, 3)],
         [replace(op(AR, "y", 1600), parts=(400, 300, 300, 300, 300))], ["all-reduce of a narrower dtype"]),
        ([op(RS, "y", 800), op(AR, "x", 200)], [op(AR, "xy", 800)],
         ["all-reduce + slice in place of reduce-scatter + all-reduce"]),
        ([op(RS, "y", 800), op(RS, "x", 200)], [op(AR, "xy", 800)],
         ["all-reduce + slice in place of reduce-scatter + reduce-scatter"]),
        ([op(AR, "y", 800)], [op(RS, "y", 800), op(AG, "y", 800)],
         ["reduce-scatter + all-gather in place of all-reduce"]),
        ([op(RS, "y", 800), op(AG, "y", 800)], [op(AR, "y", 800)],
         ["all-reduce in place of reduce-scatter + all-gather"]),
        # Those over both axes are split, and of what was planned over one a part is not scattered.
        ([op(RS, "xy", 800), op(RS, "y", 4000), op(RS, "x", 600)],
         [op(RS, "y", 1800), op(AR, "y", 3000), op(RS, "x", 800)],
         ["reduce-scatter split into one per axis", "all-reduce + slice in place of reduce-scatter"]),
        # What comes of a split is rewritten again.
        ([op(RS, "xy", 800)], [op(RS, "y", 800), op(AR, "x", 200)],
         ["reduce-scatter split into one per axis", "all-reduce + slice in place of reduce-scatter"]),
        ([op(AR, "y", 2**30), op(RS, "x", 4)], [op(AR, "y", 2**30), op(AR, "x", 4)],
         ["all-reduce + slice in place of reduce-scatter"]),
        ([op(AG, "y", 800)], [op(CP, "y", 200, 3)], ["all-gather as a ring of collective-permutes"]),
        ([op(CP, "xy", 100, 7)], [op(CP, "xy", 100, 4), op(CP, "y", 100, 3)],
         ["collective-permute over fewer axes than planned"]),
        ([op("all-to-all", "y", 800), op("all-to-all", "y", 400)], [op("all-to-all", "y", 400, 2)],
         ["all-to-all of a narrower dtype"]),
        ([op(AG, "y", 800)], [op(AG, "y", 800), replace(op(AG, "y", 800), redundant=True)],
         ["all-gather repeated for the same operand"]),
        ([op(AG, "y", 800), replace(op(AG, "y", 800), redundant=True)], [op(AG, "y", 800)],
         ["all-gather repeated for the same operand, done once"]),
        ([op(AR, "y", 4, 3)], [replace(op(AR, "y", 4), addends=3)], [ADDED_UP]),
        ([op(AR, "xy", 4, 2)], [replace(op(AR, "y", 4), addends=2), op(AR, "x", 4)],
         [ADDED_UP, "all-reduce split into one per axis"]),
        ([op(AG, "x", 200), op(AG, "y", 800)], [op(AG, "y", 400), op(AG, "x", 800)],
         ["all-gather over the axes in the other order"]),
        ([op(RS, "y", 800), op(RS, "x", 200)], [op(RS, "x", 800), op(RS, "y", 400), op(CP, "xy", 100)],
         ["reduce-scatter over the axes in the other order, and shards put in place"]),
        ([op(AG, "xy", 800)], [op(AR, "xy", 800)], ["all-gather as an all-reduce of zero-padded shards"]),
        # Gathers are put together, in either order, while scatters are split.
        ([op(AG, "x", 600), op(AG, "y", 500), op(RS, "xy", 400)],
         [op(AG, "xy", 800), op(RS, "y", 400), op(RS, "x", 100)],
         ["all-gather over all axes in place of one per axis", "reduce-scatter split into one per axis"]),
        # Of what is gathered again in place of held, part is gathered over both axes at once.
        ([op(AG, "x", 200), op(AG, "y", 800)], [op(AG, "xy", 800), replace(op(AG, "xy", 400), redundant=True)],
         ["all-gather repeated for the same operand", "all-gather over all axes in place of one per axis"]),
    ],
)  # fmt: skip
def test_known_rewrites_are_explained(planned: list[Collective], found: list[Collective], names: list[str]) -> None:
    result = audit_collectives(planned, found, MESH)
    assert [e.name for e in result.explained] == names
    assert result.clean
    assert str(result).endswith("\nclean")


@pytest.mark.parametrize(
    ("planned", "found", "verdicts"),
    [
        ([op(AR, "y", 1000)], [op(AR, "y", 1060)], ["differs"]),
        ([op(AR, "y", 1000)], [], ["missing"]),
        ([op(AR, "y", 4, 3)], [replace(op(AR, "y", 4), addends=2)], ["differs"]),
        (
            [op(AR, "x", 4), op(AR, "y", 4, 3)],
            [replace(op(AR, "x", 4), addends=3), op(AR, "y", 4)],
            ["same", "differs"],
        ),
        ([], [op(AG, "x", 1000)], ["unplanned"]),
        ([], [op(AG, None, 1000)], ["unplanned"]),
        ([op(AR, "x", 1000)], [op(AR, "y", 1000)], ["missing", "unplanned"]),
        ([op(RS, "y", 800)], [op(AR, "y", 1600)], ["differs by", "explained"]),
        ([op("all-to-all", "y", 800)], [op(AG, "y", 3200)], ["unplanned", "missing"]),
        ([op(AG, "y", 800)], [op(CP, "y", 200, 2)], ["missing", "explained"]),
        ([op(CP, "x", 800)], [op(CP, "xy", 800)], ["missing", "unplanned"]),
        (
            [op(AR, "y", 800), op(RS, "y", 800)],
            [op(AR, "y", 800), op(RS, "y", 800), op(AG, "y", 800)],
            ["unplanned", "same", "same"],
        ),
        ([op(AG, "y", 800)], [op(AG, "y", 800, 2)], ["differs"]),
        ([op(AG, "y", 800, 2)], [op(AG, "y", 400)], ["differs"]),
        ([op(AR, "y", 800), op(AR, "y", 300, 3)], [op(AR, "y", 1150)], ["differs"]),
    ],
)
def test_other_differences_are_not_explained(
    planned: list[Collective], found: list[Collective], verdicts: list[str]
) -> None:
    result = audit_collectives(planned, found, MESH)
    assert not result.clean
    if "differs by" in verdicts:  # half of the all-reduce is the reduce-scatter, the other half nobody planned
        assert [(r.kind, r.unexplained) for r in result.differences] == [(AR, 800)]
    else:
        assert [r.verdict for r in result.rows] == verdicts
    assert "not clean" in str(result)


@dataclass(frozen=True)
class Cost:
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Plan:
    mesh: LogicalMesh
    cost: Cost
    pipeline: None = None


def test_audit_of_a_compiled_program() -> None:
    named = [MESH.sharding(s) for s in (P(None, "y"), P("y", None), P("y", None))]
    compiled = (
        jax.jit(lambda a, b: a @ b, in_shardings=(named[0], named[1]), out_shardings=named[2])
        .lower(sds(16, 32), sds(32, 64))
        .compile()
    )
    result = audit(compiled, Plan(MESH, Cost((op(RS, "y", 16 * 64 * 4, source="step.py:7"),))))
    assert result.clean
    assert [str(e) for e in result.explained] == ["all-reduce + slice in place of reduce-scatter over y: 4.0 KiB"]
    assert str(result).splitlines()[0].split() == ["kind", "axes", "planned", "emitted", "verdict", "source"]
    assert "step.py:7" in str(result)
    report = json.loads(json.dumps(result.as_json()))
    assert report["clean"] is True
    assert [(r["kind"], r["verdict"]) for r in report["rows"]] == [(AR, "explained"), (RS, "explained")]
    assert not audit(compiled, Plan(MESH, Cost(()))).clean


def test_size_text() -> None:
    assert [size_text(n) for n in (0, 12, 1024, 1536, 3 * 2**30)] == ["0 B", "12 B", "1.0 KiB", "1.5 KiB", "3.0 GiB"]


def test_a_small_split_reduction_is_explained_beside_a_large_equal_one():
    """A scalar is reduced over one axis together with a large value, and then over the other axis."""
    large = Collective("all-reduce", ("x",), 768)
    planned = [large, Collective("all-reduce", ("x", "y"), 4)]
    emitted = [large, Collective("all-reduce", ("x",), 4), Collective("all-reduce", ("y",), 4)]
    found = audit_collectives(planned, emitted, MESH)
    assert found.clean, str(found)
    assert [e.name for e in found.explained] == ["all-reduce split into one per axis"]
    assert not audit_collectives(planned, emitted[:1], MESH).clean
    assert not audit_collectives(planned, emitted[2:], MESH).clean
