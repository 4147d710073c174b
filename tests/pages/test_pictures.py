"""Pictures hold the plan's numbers; the page draws any plan safely, small, and without a network."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.backend.compilation import memory_usage
from autoshard.errors import ArgumentError, PlanError
from autoshard.pages import browser
from autoshard.pages.emitted import figures_beside
from autoshard.pages.findings import savings, why_moved
from autoshard.pages.gallery import PICTURES
from autoshard.pages.page import page
from autoshard.pages.picture import shown, tick_values
from autoshard.pages.shards import part_numbers, shards
from autoshard.pages.source_lines import line_text, source_files
from autoshard.plan.grouping import bytes_per_device, group_arrays
from autoshard.runtime.plan import Plan
from autoshard.train.models.decoder import ModelConfig, OptimizerConfig, make_steps
from autoshard.units import size_text, time_text

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '"><script>alert(1)</script>&amp;\u202e]]>--><!--\x00\ud800' + "y" * 500


def make_step(name="w"):
    def step(state, x):
        def loss(w):
            h = jnp.tanh(x @ w[name])
            return jnp.mean((h @ w[name].T - x) ** 2)

        grads = jax.grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(lambda w, m: w - m, state["w"], m), "m": m}

    w = {name: jax.ShapeDtypeStruct((64, 128), jnp.float32)}
    return step, ({"w": w, "m": w}, jax.ShapeDtypeStruct((32, 64), jnp.float32))


@pytest.fixture(scope="module")
def plan():
    step, args = make_step()
    return autoshard.jit(step, mesh={"data": 4, "model": 2}, strategy="fsdp", donate_argnums=0).plan(*args)


@pytest.fixture(scope="module")
def pipelined():
    def step(state, x):
        def loss(w):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)
            return jnp.mean(h * h)

        return state - jax.grad(loss)(state)

    mesh = autoshard.MeshConfig(axes={"stage": 4, "data": 2}, pipeline="stage")
    step = autoshard.jit(step, mesh=mesh, microbatches=8, schedule="1f1b", strategy="fsdp", donate_argnums=0)
    return step.plan(jax.ShapeDtypeStruct((8, 64, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32))


class Tags(HTMLParser):
    """All tags of a page with their attributes, and what text is in scripts."""

    def __init__(self, text):
        super().__init__()
        self.found, self.scripts, self.inside, self.text = [], [], "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self.inside = tag

    def handle_data(self, data):
        self.text += data
        if self.inside == "script" and data.strip():
            self.scripts.append(data)


def drawn(plan, name):
    return ET.fromstring(plan.plot(name).svg)


def test_areas_of_memory_are_the_plan_s(plan):
    areas = {e.get("data-area"): e for e in drawn(plan, "memory").iter(f"{SVG}path") if e.get("data-area")}
    sizes = {name: np.array([int(n) for n in e.get("data-bytes").split()]) for name, e in areas.items()}
    assert {n: set(sizes[n]) for n in ("parameters", "optimizer", "inputs")} == {
        "parameters": {plan.memory.parameters},
        "optimizer": {plan.memory.optimizer},
        "inputs": {plan.memory.inputs},
    }
    assert plan.memory.parameters > 0 < plan.memory.optimizer
    assert sum(sizes.values()).max() == plan.memory.peak
    assert list(sizes["residuals"]) == [m.residuals for m in plan.profile.moments]


def test_an_area_is_as_high_as_its_bytes(plan):
    """Of what is drawn the height of one area to that of another is as their bytes."""
    areas = {e.get("data-area"): e.get("d") for e in drawn(plan, "memory").iter(f"{SVG}path") if e.get("data-area")}

    def height(name):
        there = [float(y) for y in re.findall(r"V([\d.]+)", areas[name])]
        return there[-1] - there[0]  # of the last moment's lower edge and the first one's upper edge: constant areas

    ratio = plan.memory.parameters / plan.memory.optimizer
    assert height("parameters") / height("optimizer") == pytest.approx(ratio, rel=0.05)


def test_blocks_of_the_timeline_are_the_plan_s(plan):
    blocks = [e for e in drawn(plan, "timeline").iter(f"{SVG}rect") if e.get("data-kind")]
    compute = [e for e in blocks if e.get("data-kind") == "compute"]
    assert sum(float(e.get("data-seconds")) for e in compute) == pytest.approx(plan.cost.compute)
    sent = [s for s in plan.profile.spans if s.kind != "compute"]
    assert sum(s.seconds for s in sent) == pytest.approx(plan.cost.transfers)
    assert len(blocks) - len(compute) == sum(len(s.axes) for s in sent)  # in the lane of each of its axes
    widths = {float(e.get("width")) / float(e.get("data-seconds")) for e in blocks if float(e.get("width")) > 1}
    assert max(widths) < 1.05 * min(widths)


def test_points_are_the_layouts(plan):
    found = [(float(e.get("data-seconds")), int(e.get("data-peak"))) for e in drawn(plan, "layouts").iter(f"{SVG}g")]
    want = [(plan.cost.seconds, plan.memory.peak), *[(a.seconds, a.peak) for a in plan.alternatives]]
    assert sorted(found) == sorted(want)
    assert "chosen" in plan.plot("layouts").text


def test_devices_that_look_alike_hold_the_same_part(plan):
    for group in group_arrays(plan.inputs):
        picture = ET.fromstring(shards(group, plan.mesh).svg)
        marks = {}
        for e in picture.iter(f"{SVG}path"):
            axis, part = e.get("data-axis"), e.get("data-part")
            if axis is not None:
                marks[axis, int(part)] = e.get("d").count("M")
        split = [a for a in plan.mesh.axis_names if a in group.first.spec.axes]
        assert marks == {(a, i): plan.mesh.size // plan.mesh.shape[a] for a in split for i in range(plan.mesh.shape[a])}


def test_parts_are_those_of_jax(plan):
    """The number of each part is that of the slice that JAX gives the device."""
    place = max(plan.inputs, key=lambda p: len(p.spec.axes))
    sharding = plan.flat_in_shardings[plan.inputs.index(place)]
    shard = sharding.shard_shape(place.shape)
    for at, device in np.ndenumerate(plan.jax_mesh.devices):
        where = sharding.devices_indices_map(place.shape)[device]
        position = dict(zip(plan.mesh.axis_names, at, strict=True))
        numbers = part_numbers(place.spec, plan.mesh, position)
        assert [(s.start or 0) // n for s, n in zip(where, shard, strict=True)] == list(numbers)


@pytest.mark.parametrize("name", PICTURES)
def test_every_picture_has_text_and_a_file(plan, pipelined, name, tmp_path):
    plan = pipelined if name == "schedule" else plan
    picture = plan.plot(name, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text() == picture.svg == picture._repr_svg_()
    assert max(map(len, str(picture).splitlines())) < 260
    assert picture.text == str(picture)
    assert "Picture of" in repr(picture)


@pytest.mark.parametrize("name", PICTURES)
def test_an_image_has_the_colours_and_sizes_of_the_drawing(plan, pipelined, name, tmp_path):
    plan = pipelined if name == "schedule" else plan
    image = pytest.importorskip("matplotlib.image", reason="of the extra plots")
    picture = plan.plot(name, tmp_path / "picture.png")
    pixels = np.rint(image.imread(tmp_path / "picture.png")[..., :3] * 255).astype(int)
    assert pixels.shape == (2 * picture.height, 2 * picture.width, 3)
    found = {f"#{rgb:06x}" for rgb in np.unique(pixels @ [1 << 16, 1 << 8, 1])}
    solid = [e for e in drawn(plan, name).iter() if "c1" in e.get("class", "").split() and not e.get("fill-opacity")]
    assert "#ffffff" in found
    assert found & {"#1f2328", "#59636e"}, "text"
    assert not solid or "#2a78d6" in found
    for e in [e for e in solid if e.tag == f"{SVG}rect" and float(e.get("width")) > 4]:
        x, y = (2 * float(e.get(k)) + float(e.get(n)) for k, n in (("x", "width"), ("y", "height")))
        assert list(pixels[int(y), int(x)]) == [0x2A, 0x78, 0xD6]


def test_an_image_of_hostile_names(plan, tmp_path):
    pytest.importorskip("matplotlib", reason="of the extra plots")
    replace(plan, name="$\\frac{<b>" + HOSTILE).plot("layouts", tmp_path / "picture.png")


def test_what_a_picture_is_not_written_as(plan, tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=r"as \.svg or \.png, and not as \.pdf"):
        plan.plot("memory", tmp_path / "picture.pdf")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ArgumentError, match=r"pip install 'autoshard\[plots\]', or name a file \.svg"):
        plan.plot("memory", tmp_path / "picture.png")


def test_what_there_is_no_picture_of(plan):
    with pytest.raises(ArgumentError, match="no picture is called 'memori'; did you mean 'memory'"):
        plan.plot("memori")
    with pytest.raises(PlanError, match="is of no pipeline"):
        plan.plot("schedule")
    with pytest.raises(PlanError, match="holds no profile"):
        replace(plan, profile=None).plot("memory")
    assert "holds no profile" in page(replace(plan, profile=None))


def test_the_page_is_one_file_that_loads_nothing(plan, tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(browser, "has_screen", lambda: False)
    monkeypatch.setattr(browser.webbrowser, "open", opened.append)
    path = plan.show(tmp_path / "new" / "plan.html")
    assert path == tmp_path / "new" / "plan.html"
    assert opened == []
    monkeypatch.setattr(browser, "has_screen", lambda: True)
    assert plan.show(path).as_uri() == opened[0]
    tags = Tags(path.read_text())
    loads = [a for _, a in tags.found if "src" in a or a.get("href", "#")[0] != "#"]
    assert [a["href"] for a in loads] == ["data:,"]
    anchors = {a["id"] for _, a in tags.found if "id" in a}
    assert {a["href"][1:] for t, a in tags.found if t == "a"} <= anchors
    assert len(tags.scripts) == 1


def test_the_page_answers_what_is_asked(plan):
    text = re.sub(r"<[^>]+>", " ", page(plan))
    costliest = plan.profile.lines[0]
    assert "Which line costs most?" in text
    assert costliest.source.rpartition("/")[2] in text.split("Which line costs most?")[1][:400]
    gather = next(m for m in plan.profile.moves if m.kind == "all-gather")
    why = why_moved(gather, plan)
    assert all(n in why for n in gather.names)
    assert {f"as {s}" for s in (gather.before, gather.after)} <= set(re.findall(r"as \[[^\]]*\]", why))
    place = next(p for p in plan.inputs if p.path == gather.names[0])
    more = bytes_per_device([replace(place, spec=gather.after)], plan.mesh.shape)
    held = bytes_per_device([place], plan.mesh.shape)
    assert f"{size_text((more - held) * len(gather.names))} more on each device" in why
    assert savings(plan)


def test_arrays_beyond_those_named_count_too():
    def step(state, x):
        def loss(state):
            h = x
            for w in state:
                h = jnp.tanh(h @ w)
            return jnp.mean(h * h)

        return jax.tree.map(lambda w, g: w - g, state, jax.grad(loss)(state))

    state = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6
    x = jax.ShapeDtypeStruct((512, 64), jnp.float32)
    plan = autoshard.jit(step, mesh={"data": 8}, strategy="fsdp", donate_argnums=0).plan(state, x)
    move = next(m for m in plan.profile.moves if m.kind == "all-gather" and m.arrays == 6)
    why = why_moved(move, plan)
    assert f"{move.names[0]}, {move.names[1]} and 4 others" in why
    assert f"these 6 arrays would take {size_text(6 * 64 * 64 * 4 * 7 // 8)} more on each device" in why


def test_savings_are_the_sizes_of_what_they_name():
    step, args = make_step()
    plan = autoshard.jit(step, mesh={"data": 8}, strategy="replicated").plan(*args)
    size = 64 * 128 * 4
    found = {s.what: s.bytes for s in savings(plan)}
    # each of eight devices keeps an eighth
    assert found["split state['m'|'w']['w'] over data too: [_, data]"] == 2 * size * 7 // 8
    assert found["donate 2 arrays that a result replaces"] == 2 * size


def test_lines_have_the_text_of_the_code(plan):
    files = source_files(plan.profile)
    assert files[0].path.endswith("test_pictures.py")
    costed = [x for x in files[0].lines if x.cost]
    assert any(x.text.strip() == "h = jnp.tanh(x @ w[name])" for x in costed)
    assert [x.number for x in files[0].lines] == sorted({x.number for x in files[0].lines})


@pytest.mark.parametrize(
    "source", ["/etc/passwd:1", "no/such/file.py:3", "/:1", "", "x.py:zz", "\0.py:1", "/dev/zero:1"]
)
def test_no_other_file_is_read(source):
    assert line_text(source) == ""


def test_hostile_names_draw_safely(plan, tmp_path):
    step, args = make_step(HOSTILE)
    bad = autoshard.jit(step, mesh={"data": 4, HOSTILE[:40]: 2}, donate_argnums=0).plan(*args)
    lines = tuple(replace(x, source=f"{HOSTILE}:3") for x in bad.profile.lines)
    moves = tuple(replace(m, op=HOSTILE, source=HOSTILE) for m in bad.profile.moves)
    bad = replace(bad, name=HOSTILE, profile=replace(bad.profile, lines=lines, moves=moves))
    text = page(bad)
    text.encode()
    tags = Tags(text)
    assert len(tags.scripts) == 1
    assert {t for t, _ in tags.found} == {t for t, _ in Tags(page(plan)).found} | {t for t, _ in tags.found if t == "p"}
    assert not {"\u202e", "\x00"} & set(text)
    for name in PICTURES:
        if name != "schedule":
            ET.fromstring(bad.plot(name).svg)
    assert "alert(1)" in text


def test_a_large_plan_s_page_is_small_and_quick(plan):
    """As many rows as a profile ever has, and thousands of arrays."""
    f = plan.profile
    big = dataclasses.replace(
        f,
        spans=f.spans * (1024 // len(f.spans)),
        moves=f.moves * (200 // len(f.moves)),
        live=f.live * (64 // len(f.live)),
        values=f.values * (1000 // len(f.values)),
    )
    layers = [
        replace(plan.inputs[0], path=f"state['layers'][{i}]['{k}{i * i}']") for i in range(126) for k in "abcdefghi"
    ]
    large = replace(plan, profile=big, inputs=tuple(layers))
    start = time.process_time()
    text = page(large)
    assert len(text.encode()) < 3_000_000
    assert time.process_time() - start < 5


def test_a_notebook_shows_the_short_form(plan):
    text = plan._repr_html_()
    assert text.count("<svg") == 2
    assert "<script" not in text
    assert len(text) < 200_000
    styled = {name for name in re.findall(r'class="?([\w-]+)', text) if f".{name}" in text}
    assert {"tiles", "tile", "soft"} <= styled, "its figures have their style with them"


def test_colours_are_those_of_the_page_around(plan):
    """Which need not be the machine's: a notebook, or a site, in light where all else is dark."""
    inside, file = plan._repr_html_(), plan.plot("memory").svg
    assert "prefers-color-scheme" not in inside + file
    assert "color-scheme: light dark" in file
    assert "color-scheme: light dark" not in inside
    assert re.findall(r"--ink: ([\w-]+)", file) == ["light-dark"]


def test_the_trace_is_the_step(plan, tmp_path):
    plan.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert list(names.values()) == ["compute", *plan.mesh.axis_names]
    spans = [e for e in events if e["ph"] == "X"]
    compute = sum(e["dur"] for e in spans if names[e["tid"]] == "compute")
    assert compute == pytest.approx(plan.cost.compute * 1e6)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(plan.cost.seconds * 1e6)
    assert max(sum(e["args"].values()) for e in events if e["ph"] == "C") == plan.memory.peak


def test_a_loaded_plan_shows_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert page(Plan.load(tmp_path / "plan.json")) == page(plan)


def test_a_compiled_step_is_laid_beside_its_plan(tmp_path):
    step, args = make_step()
    planned = autoshard.jit(step, mesh={"data": 4, "model": 2}, strategy="fsdp", donate_argnums=0)
    plan, compiled = planned.plan(*args), planned.lower(*args).compile()
    found = {x.what: x for x in figures_beside(plan, compiled)}
    assert (found["compute"].planned, found["memory"].planned) == (plan.cost.compute, plan.memory.peak)
    assert found["memory"].emitted == memory_usage(compiled, plan.mesh).peak
    audited = autoshard.audit(compiled, plan)
    kinds = {f"{r.kind} over {'+'.join(r.axes)}": r for r in audited.rows}
    assert kinds.keys() == found.keys() - {"compute", "communication", "memory"}
    assert all(found[k].emitted == sum(c.total_bytes for c in r.emitted) for k, r in kinds.items())
    assert all(found[k].verdict == r.verdict for k, r in kinds.items())
    text = plan.show(tmp_path / "plan.html", compiled).read_text()
    assert size_text(found["memory"].emitted) in text
    assert "Planned and emitted" in text
    assert "Planned and emitted" not in page(plan)


def test_a_pipeline_s_schedule_is_drawn(pipelined):
    blocks = list(drawn(pipelined, "schedule").iter(f"{SVG}rect"))
    stages, table = pipelined.pipeline, pipelined.pipeline.schedule.table
    for stage in range(4):
        assert sum(e.get("data-stage") == str(stage) for e in blocks) == sum(row[stage] is not None for row in table)
    text = page(pipelined)
    assert text.count("of micro-batch") == len(blocks)
    assert f"idle for {stages.bubble:.0%}" in text
    most = max(range(4), key=lambda s: stages.seconds[s])
    assert f"Stage {most}, busy for {time_text(stages.seconds[most])} of a call" in text
    assert all(f">{size_text(n)}<" in text for n in (pipelined.memory.parameters, pipelined.memory.residuals))
    assert "What would take less" in text
    assert "of micro-batch" in pipelined._repr_html_()


def test_a_pipeline_s_page_has_its_lines_and_moves(pipelined, tmp_path):
    """Of the work that its stages share; as the same step has them on the devices of one stage."""
    work = pipelined.pipeline.profile
    costliest = work.lines[0]
    assert line_text(costliest.source) == "h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)"
    text = re.sub(r"<[^>]+>", " ", page(pipelined))
    share = (costliest.compute + costliest.transfers) / work.seconds
    assert f"{share:.0%} of what all stages compute and send" in text
    assert "h, _ = jax.lax.scan" in text
    gather = next(m for m in work.moves if m.kind == "all-gather")
    assert gather.names == ("state",)
    assert f"The costliest gather takes {time_text(gather.seconds)} a call" in text
    sent = sum(c.count for c in pipelined.cost.collectives if c.kind == "collective-permute")
    assert f"collective-permute over stage, {sent} x " in text
    pipelined.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline.profile == work
    assert page(loaded) == page(pipelined)


def test_a_comparison_is_text_and_a_page(plan, tmp_path):
    step, args = make_step()
    other = autoshard.jit(step, mesh={"data": 4, "model": 2}, strategy="dp", donate_argnums=0).plan(*args)
    compared = plan.diff(other)
    assert compared.startswith("From fsdp on ")
    assert "print it" in repr(compared)
    text = compared.show(tmp_path / "both.html").read_text()
    assert text.count('data-area="residuals"') == 2
    blocks = [float(a["data-seconds"]) for _, a in Tags(text).found if a.get("data-kind") == "compute"]
    assert sum(blocks) == pytest.approx(plan.cost.compute + other.cost.compute)
    assert "Each twice" in text
    assert "state['m'|'w']['w']" in Tags(text).text
    same = plan.diff(plan)._repr_html_()
    assert "All have the same specs." in same


def test_lines_of_the_decoder_that_ships_are_its_own():
    """Also where its layers are one function, called for each: not the line that calls them."""
    model = ModelConfig(layers=2, scan=False, d_model=32, heads=2, vocab=64, seq=16)
    steps = make_steps(model, OptimizerConfig(), 10)
    state = jax.eval_shape(steps.init, jax.random.key(0))
    batch = {k: jax.ShapeDtypeStruct((8, 16), jnp.int32) for k in ("inputs", "targets")}
    profile = autoshard.jit(steps.train, mesh={"data": 8}, strategy="dp").plan(state, batch).profile
    texts = {line_text(line.source) for line in profile.lines if line.compute}
    assert "weights = jax.nn.softmax(scores, axis=-1).astype(dtype)" in texts
    assert not any("_apply_layer" in text for text in texts)


def test_ticks_are_round():
    assert tick_values(9.3) == [0, 2, 4, 6, 8]
    assert tick_values(6 * 2**30, binary=True) == [i * 2.0**31 for i in range(4)]
    assert shown("a\nb\u202e") == "a\\nb\\u202e"
    assert shown("x" * 200, 11) == "xxxxx…xxxxx"
