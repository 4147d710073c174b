"""The review of a plan: golden text of one made by hand, and what must be said of real ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import autoshard
from autoshard.cost.cost import Cost
from autoshard.cost.memory import Memory
from autoshard.ir.graph import Diagnostic
from autoshard.ir.spec import Spec, replicated
from autoshard.machine.collective import Collective, collective_seconds
from autoshard.machine.mesh import Hardware, Link, LogicalMesh
from autoshard.pages.html import sections_html
from autoshard.plan.decisions import Alternative, BatchDim, Constraint, DimSplit, Place
from autoshard.plan.document import short_source
from autoshard.plan.grouping import MatchingSubtree, bytes_per_device, group_arrays, report_rows
from autoshard.plan.render import WIDTH, explain
from autoshard.plan.review import review
from autoshard.plan.review_cost import MAX_COLLECTIVES
from autoshard.runtime.plan import Plan
from autoshard.transforms.pipeline import PassReport
from autoshard.units import size_text, time_text

CHIP = Hardware("toy", {"float32": 1e12}, 2.0**30, 1e11, {"wire": Link("wire", 1e9, 1e-6)}, 1e-6)
MESH = LogicalMesh(("data", "model"), (4, 2), CHIP)


def spec(*dims):
    return Spec(tuple(tuple(d.split("+")) if d else () for d in dims))


def place(path, shape, spec, dtype="float32", reason="solved", donated=False):
    return Place(path, shape, dtype, spec, reason, donated=donated)


def plan_by_hand():
    here = str(Path.cwd() / "train.py")
    weights = [(f"['layers'][{i}]['{k}']", (64, 64)) for i in range(3) for k in ("wk", "wv")] + [
        ("['embed']", (256, 64))
    ]
    kept, parts = {2: spec("", "model")}, {2: spec("data", "model")}
    inputs = [place(f"state['opt'].{m}{p}", s, parts[2], donated=True) for m in ("mu", "nu") for p, s in weights]
    inputs += [place(f"state['params']{p}", s, kept[2], donated=True) for p, s in weights]
    outputs = [replace(p, path=f"result[0]{p.path[5:]}", reason="replaces", replaces=p.path) for p in inputs]
    inputs.append(place("tokens", (32, 16), spec("data", ""), "int32", "pinned"))
    outputs.append(place("result[1]", (), replicated(0)))
    gather = Collective("all-gather", ("data",), 2**13, 14, f"{here}:20")
    reduce = Collective("all-reduce", ("data", "model"), 4, 1, "/usr/lib/python3/site-packages/optax/_src/loss.py:7")
    sent = sum(collective_seconds(c.kind, c.axes, c.bytes, MESH) * c.count for c in (gather, reduce))
    pins = (
        Constraint(9, spec("data", "", "model"), "dot_general", f"{here}:12", (32, 16, 64), "product"),
        Constraint(
            9,
            spec("data", "", ""),
            "dot_general",
            f"{here}:12",
            (32, 16, 64),
            "operand",
            4,
            spec("data", "", "model"),
        ),
        Constraint(5, spec("data", ""), "annotate", f"{here}:10", (32, 64), "pinned"),
    )
    return Plan(
        name="train_step",
        mesh=MESH,
        strategy="auto",
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        intermediates=pins,
        cost=Cost(1e-3 + sent, 1e-3, (gather, reduce)),
        memory=Memory(81920, 40960, 512, 20480, 300000, 5000, 428392),
        fingerprint="0123456789abcdef",
        dim_splits=(
            DimSplit("batch", 32, ("data",)),
            DimSplit("embed.1", 64, ("model",)),
            DimSplit("embed.0", 256, ()),
        ),
        batch=(BatchDim("tokens", 0),),
        storage_axes=("data",),
        zero_stage=2,
        alternatives=(
            Alternative("batch over data+model", 2e-3 + sent, 400000),
            Alternative("batch over data", 1e-3 + sent, 500000),
            Alternative("nothing split", 5e-4, 2**31),
        ),
        diagnostics=(Diagnostic("sort is kept whole: its order depends on every element", f"{here}:31"),),
        passes=(PassReport("dead_code", "dead_code", 120, 90, "30 equations removed"),),
        memory_budget=2.0**29,
        considered=42,
    )


GOLDEN = """\
Plan of train_step on the mesh (data=4, model=2) of toy: strategy auto, the best of 42 layouts
One call is predicted to take 1.15 ms, and 418.4 KiB on each of 8 devices.
Passes run before planning: dead_code: 30 equations removed (120 -> 90 equations).
Fingerprint 0123456789abcdef.

Dimensions
  Dimensions that are always split the same way form a class, whose size is their greatest common divisor.
  Axes are those that the search chose; the arguments' specs also show pins and how state is stored.
  A class is named batch, or after its largest argument and a dimension of that, counted from 0.
  Taken for the batch: dimension 0 of tokens.
  class    size  axes   per device
  batch      32  data            8
  embed.1    64  model          32
  embed.0   256  none          256

State
  Carried from call to call: 21 arrays, 480.0 KiB in total, 120.0 KiB per device.
  split over  parts  arrays      total  per device
  data+model      8      14  320.0 KiB    40.0 KiB
  model           2       7  160.0 KiB    80.0 KiB
  - Along these axes a call runs 14 all-gathers, 112.0 KiB per device, to reshard operands and results; Cost lists each.

Arguments
  22 arrays, 120.5 KiB per device. A spec names the mesh axes that split each dimension, _ where none does.
  Donated, so that results reuse their memory: state.
  array                                          type                 spec           per device
  state['opt'].mu|nu['layers'][0..2]['wk'|'wv']  12 x float32[64,64]  [data, model]    24.0 KiB
  state['opt'].mu|nu['embed']                    2 x float32[256,64]  [data, model]    16.0 KiB
  state['params']['layers'][0..2]['wk'|'wv']     6 x float32[64,64]   [_, model]       48.0 KiB
  state['params']['embed']                       float32[256,64]      [_, model]       32.0 KiB
  tokens                                         int32[32,16]         [data, _]           512 B  pinned

Results
  21 arrays replace arguments and have their specs.
  array      type       spec  per device
  result[1]  float32[]  []           4 B

Memory
  418.4 KiB per device at the peak; the budget of 512.0 MiB leaves 511.6 MiB. The classes need not add up to it: they
  are not all live at once.
  class        per device  of the peak
  parameters     80.0 KiB          19%
  optimizer      40.0 KiB          10%
  inputs            512 B           0%
  gradients      20.0 KiB           5%
  residuals     293.0 KiB          70%
  temporaries     4.9 KiB           1%
  peak          418.4 KiB         100%

Cost
  1.15 ms a call: 1.00 ms of compute and 151.0 µs (13%) of communication: 15 collectives, 112.0 KiB per device.
     total  collective  axes          bytes  runs  for
  142.0 µs  all-gather  data        8.0 KiB    14  train.py:20
   9.01 µs  all-reduce  data+model      4 B     1  optax/_src/loss.py:7

Alternatives
  layout                  seconds       peak  why not
  batch over data+model   2.15 ms  390.6 KiB  slower by 1.00 ms (86.9%)
  batch over data         1.15 ms  488.3 KiB  as fast, 69.9 KiB more
  nothing split          500.0 µs    2.0 GiB  over the budget by 1.5 GiB

Sharding constraints inside the step
  3 constraints: 1 on results of products, 1 on resharded operands, 1 pinned in the step.
  operation    shape         spec          reason                                    for
  annotate     [32, 64]      [data, _]     pinned in the step                        train.py:10
  dot_general  [32, 16, 64]  [data, _, _]  operand, resharded from [data, _, model]  train.py:12

Diagnostics
  - train.py:31: sort is kept whole: its order depends on every element
"""


def test_golden():
    assert explain(plan_by_hand()) == GOLDEN.rstrip("\n")


def loss(w, x):
    h = jnp.tanh(x @ w["up"])
    return jnp.mean((jnp.sort(h @ w["down"], axis=1) - x) ** 2)


def train_step(w, x):
    value, grads = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


W = {"up": jax.ShapeDtypeStruct((16, 64), jnp.float32), "down": jax.ShapeDtypeStruct((64, 16), jnp.float32)}
X = jax.ShapeDtypeStruct((32, 16), jnp.float32)


@pytest.fixture(scope="module", params=["auto", "dp", "fsdp", "tp", "replicated"])
def real(request):
    return autoshard.jit(train_step, mesh={"data": 4, "model": 2}, strategy=request.param).plan(W, X)


def flat(text):
    """Without the line breaks that setting it put in."""
    return " ".join(text.split())


def test_says_all_that_a_plan_holds(real):
    text = real.explain()
    for d in real.dim_splits:
        axes = re.escape("+".join(d.axes) or "none")
        assert re.search(rf"^  {re.escape(d.name)} +{d.size} +{axes} ", text, re.MULTILINE)
    for entry in (real.name, real.strategy, str(real.mesh), real.fingerprint, *map(str, real.passes)):
        assert entry in flat(text)
    for what, size in real.memory.items():
        assert re.search(rf"^  {what} +{re.escape(size_text(size))} ", text, re.MULTILINE)
    for c in real.cost.collectives:
        assert re.search(
            rf" {c.kind} +{re.escape('+'.join(c.axes))} .*{re.escape(short_source(c.source) or 'unknown')}$",
            text,
            re.MULTILINE,
        )
    for other in real.alternatives:
        assert time_text(other.seconds) in text
    for diagnostic in real.diagnostics:
        assert flat(f"- {short_source(diagnostic.source)}: {diagnostic.text}") in flat(text)
    assert len(real.diagnostics) or "None: every operation has a rule" in text


def test_the_transfers_add_up(real):
    each = [collective_seconds(c.kind, c.axes, c.bytes, real.mesh) * c.count for c in real.cost.collectives]
    assert math.isclose(sum(each), real.cost.sent, rel_tol=1e-9, abs_tol=1e-12)


def test_the_state_is_reported_by_its_specs(real):
    section = next(s for s in review(real) if s.title == "State")
    state = [p for p in real.inputs if p.path.startswith("w[")]
    told_parts = Counter()
    for _, parts, arrays, *_ in section.table.rows:
        told_parts[int(parts)] += int(arrays)
    assert told_parts == Counter(p.spec.num_shards(real.mesh.shape) for p in state)
    axes = {a for p in state for a in p.spec.axes}
    moved = [c for c in real.cost.collectives if c.kind != "all-reduce" and axes & set(c.axes)]
    assert section.remarks == () if not axes else ("Nothing is gathered" in section.remarks[0]) == (not moved)
    for c in moved:
        assert c.kind in section.remarks[0]


def test_what_is_split_and_never_gathered_is_not_said_to_be():
    def step(w, x):
        return {k: v - 0.1 for k, v in w.items()}, jnp.tanh(x @ w["up"]) @ w["down"]

    pins = {"up": PartitionSpec(None, ("data", "model")), "down": PartitionSpec(("data", "model"))}
    options = {"strategy": "replicated", "in_shardings": (pins, PartitionSpec())}
    text = autoshard.jit(step, mesh={"data": 4, "model": 2}, **options).plan(W, X).explain()
    assert re.search(r"^  data\+model +8 +2 +8\.0 KiB +1\.0 KiB$", text, re.MULTILINE)
    assert "Nothing is gathered along these axes" in text
    assert "ZeRO" not in text


def test_lines_are_narrow_and_plain(real):
    for text in (real.explain(), plan_by_hand().explain()):
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "\x1b" not in text
        assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_names_what_a_device_does_twice():
    text = autoshard.jit(train_step, mesh={"data": 4, "model": 2}, strategy="replicated").plan(W, X).explain()
    assert "Nothing is split over data: all 4 devices along it do the same work." in text
    assert "there is no communication" in text
    assert "Replaced by a result and not donated, so that 8.0 KiB are in memory twice: w." in text


def test_an_unknown_operation_is_named():
    def step(x):
        return jax.pure_callback(lambda a: a, X, x) * 2

    plan = autoshard.jit(step, mesh={"data": 8}, strategy="replicated").plan(X)
    assert plan.diagnostics
    assert all(flat(f"- {short_source(d.source)}: {d.text}") in flat(plan.explain()) for d in plan.diagnostics)
    assert "pure_callback is kept whole" in plan.explain()


def test_a_pin_is_marked():
    step = autoshard.jit(train_step, mesh={"data": 4, "model": 2}, in_shardings=(None, PartitionSpec("model")))
    lines = step.plan(W, X).explain().splitlines()
    assert [line for line in lines if re.match(r"  x +float32\[32,16\] +\[model, _\] +1\.0 KiB +pinned$", line)]


def pinned_state(before, after):
    specs = [{"up": PartitionSpec(None, axis), "down": PartitionSpec(axis, None)} for axis in (before, after)]
    options = {"in_shardings": (specs[0], None), "out_shardings": (specs[1], None)}
    return autoshard.jit(train_step, mesh={"data": 4, "model": 2}, **options).plan(W, X)


def test_state_that_is_pinned_on_both_sides_is_carried():
    plan = pinned_state("model", "model")
    assert [(p.path, p.reason, p.replaces) for p in plan.outputs] == [
        ("result[0]['down']", "pinned", "w['down']"),
        ("result[0]['up']", "pinned", "w['up']"),
        ("result[1]", "replicated", None),
    ]
    text = plan.explain()
    assert "Carried from call to call: 2 arrays, 8.0 KiB in total, 4.0 KiB per device." in text
    assert re.search(r"^  model +2 +2 +8\.0 KiB +4\.0 KiB$", text, re.MULTILINE)
    assert "2 arrays replace arguments and have their specs." in text
    assert "are in memory twice: w." in text
    assert Plan.from_json(plan.to_json()) == plan


def test_state_that_leaves_with_another_spec_is_reported():
    text = pinned_state("model", "data").explain()
    assert "Carried from call to call: 2 arrays" in text
    assert "2 arrays replace arguments of other specs: the next call has to reshard." in text
    assert re.search(r"^  result\[0\]\['up'\] +float32\[16,64\] +\[_, data\] +1\.0 KiB +pinned$", text, re.MULTILINE)


def test_an_intermediate_is_resharded_from_a_recorded_spec():
    plan = pinned_state("model", "data")
    resharded = [c for c in plan.intermediates if c.reason in ("operand", "resharded")]
    assert resharded
    assert all(c.resharded_from is not None and c.resharded_from != c.spec for c in resharded)
    assert all(c.resharded_from is None for c in plan.intermediates if c.reason in ("product", "before_operand"))


def test_a_step_of_nothing():
    text = autoshard.jit(lambda: (), mesh={"data": 8}).plan().explain()
    assert "The step returns nothing." in text
    assert "No argument has a dimension that could be split." in text


def test_one_device():
    plan = autoshard.jit(train_step, mesh={"data": 1}).plan(W, X)
    assert "on one device." in plan.explain()


def test_many_transfers_are_summed_up():
    plan = plan_by_hand()
    many = tuple(
        Collective("all-gather", ("data",), 1024 * (i + 1), 1, f"a.py:{i}") for i in range(MAX_COLLECTIVES + 3)
    )
    text = explain(replace(plan, cost=Cost(1.0, 0.5, many)))
    least = sum(collective_seconds(c.kind, c.axes, c.bytes, MESH) for c in many[:3])
    assert f"3 smaller rows left out, {time_text(least)} in total" in flat(text)
    assert len(re.findall(r"a\.py:\d+$", text, re.MULTILINE)) == MAX_COLLECTIVES


def test_diagnostics_are_never_left_out():
    many = tuple(Diagnostic(f"request number {i} was dropped") for i in range(200))
    text = explain(replace(plan_by_hand(), diagnostics=many))
    assert all(f"- {d}" in text for d in many)


def test_only_the_source_of_a_diagnostic_is_shortened(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    diagnostic = Diagnostic(f"kernel '{here}/k:3' is kept whole", f"{here}/my model/block.py:12")
    text = explain(replace(plan_by_hand(), diagnostics=(diagnostic,)))
    assert flat(f"- my model/block.py:12: kernel '{here}/k:3' is kept whole") in flat(text)


class Reader(HTMLParser):
    """Collects tags and text, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"class", "scope", "tabindex"}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def test_html_says_the_same(real):
    page = read(sections_html(review(real)))
    assert page.tags <= {"div", "h3", "h4", "p", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
    sections = list(review(real))
    assert len(sections) == 11
    for section in sections:
        cells = [cell for row in (section.table.head, *section.table.rows) for cell in row] if section.table else []
        for said in (section.title, *section.sentences, *cells, *section.remarks):
            assert not said or said in page.text
        for said in (section.title, *section.sentences, *section.remarks):
            assert flat(said) in flat(real.explain())


def test_html_escapes_everything():
    nasty = "<script>alert('x')</script>&\""
    plan = plan_by_hand()
    inputs = (replace(plan.inputs[0], path=f"state['{nasty}']"), *plan.inputs[1:])
    constraints = (replace(plan.intermediates[1], op=nasty, source=nasty),)
    plan = replace(
        plan,
        name=nasty,
        strategy=nasty,
        inputs=inputs,
        intermediates=constraints,
        diagnostics=(Diagnostic(nasty, nasty),),
        passes=(PassReport(nasty, nasty, 1, 1, nasty),),
        dim_splits=(DimSplit(nasty, 8, ("data",)),),
        alternatives=(Alternative(nasty, 1.0, 1),),
        fingerprint=nasty,
        cost=replace(plan.cost, collectives=(Collective("all-gather", ("data",), 1, 1, nasty),)),
    )
    page = read(sections_html(review(plan)))
    assert "script" not in page.tags
    assert "".join(page.text).count(nasty) >= 10


def test_layers_and_moments_are_grouped():
    plan = plan_by_hand()
    found = group_arrays(plan.inputs)
    assert [f.path for f in found] == [
        "state['opt'].mu|nu['layers'][0..2]['wk'|'wv']",
        "state['opt'].mu|nu['embed']",
        "state['params']['layers'][0..2]['wk'|'wv']",
        "state['params']['embed']",
        "tokens",
    ]
    assert [len(f.places) for f in found] == [12, 2, 6, 1, 1]
    assert sorted(p.path for f in found for p in f.places) == sorted(p.path for p in plan.inputs)


def test_a_subtree_with_the_specs_of_another_is_one_row():
    plan = plan_by_hand()
    same = [replace(p, spec=spec("data", "model")) for p in plan.inputs[:-1]]
    moments, *rest = report_rows([*same, plan.inputs[-1]])
    assert isinstance(moments, MatchingSubtree)
    assert (moments.path, moments.reference, len(moments.places)) == ("state['opt'].mu|nu", "state['params']", 14)
    assert [f.path for f in rest] == [
        "state['params']['layers'][0..2]['wk'|'wv']",
        "state['params']['embed']",
        "tokens",
    ]


@pytest.mark.parametrize(
    ("paths", "told_as"),
    [
        (["x"], ["x"]),
        (["a['k']", "b['k']"], ["a|b['k']"]),
        (["p[0]", "p[1]"], ["p[0|1]"]),
        ([f"p[{i}].w" for i in (3, 4, 5, 6)], ["p[3..6].w"]),
        ([f"p[{i}].w" for i in (3, 5, 7)], ["p[3|5|7].w"]),
        ([f"p['h_{i}'].w" for i in range(12)], ["p['h_0..11'].w"]),
        ([f"p['{c}']" for c in "abcdef"], ["p['a'|'b'|'c'|3 more]"]),
        (["p['a']['b']", "p['c']"], ["p['a']['b']", "p['c']"]),
        (["p['odd]key']", "p['a']"], ["p['odd]key'|'a']"]),
        (["p[odd", "p['a']"], ["p[odd", "p['a']"]),
    ],
)
def test_paths_in_one(paths, told_as):
    assert [f.path for f in group_arrays([place(p, (8,), replicated(1)) for p in paths])] == told_as


def test_groups_keep_apart_what_differs():
    base = place("p[0]", (8, 8), replicated(2))
    for other in (
        place("p[1]", (8, 16), replicated(2)),
        place("p[1]", (8, 8), spec("data", "")),
        place("p[1]", (8, 8), replicated(2), "bfloat16"),
        place("p[1]", (8, 8), replicated(2), reason="pinned"),
    ):
        assert [f.path for f in group_arrays([base, other])] == ["p[0]", "p[1]"]


def test_bytes_count_bits_and_keys():
    sizes = MESH.shape
    assert bytes_per_device([place("a", (8, 8), spec("data", "model"), "bfloat16")], sizes) == 16
    assert bytes_per_device([place("a", (8, 8), spec("data", ""), "int4")], sizes) == 8
    assert bytes_per_device([place("a", (), replicated(0), "key<threefry2x32>")], sizes) == 8
    assert bytes_per_device([place("a", (3,), replicated(1), "bool")], sizes) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-10, "0.2 ns"),
        (4e-7, "400.0 ns"),
        (1.234e-6, "1.23 µs"),
        (9.994e-4, "999.4 µs"),
        (9.996e-4, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (1, "1.00 s"),
        (75, "75.0 s"),
    ],
)
def test_time_text(seconds, text):
    assert time_text(seconds) == text


def test_short_sources(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    here = Path.cwd()
    assert short_source(f"{here}/model/block.py:12") == "model/block.py:12"
    assert short_source(f"{here}/my model (2), old/block.py:12") == "my model (2), old/block.py:12"
    assert short_source("/opt/venv/lib/python3.12/site-packages/optax/_src/update.py:42") == "optax/_src/update.py:42"
    assert short_source("/var/ipykernel_4242/123456.py:7") == "cell:7"
    assert short_source("/elsewhere/a.py:3") == "/elsewhere/a.py:3"
    assert short_source(f"{here}/a.py") == f"{here}/a.py"  # of HLO, where it has no line
    assert short_source("") == ""
