"""`refine` against layouts that are compiled one by one: it chooses the one with the least estimated time that fits."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import autoshard
from autoshard.backend import compile_cache
from autoshard.backend.compilation import OutOfMemory, compile_plan
from autoshard.backend.compile_report import print_compilation
from autoshard.errors import ArgumentError, CacheWarning, CompileError, ConfigError, MeshError
from autoshard.plan.review_cost import compiled_layouts
from autoshard.runtime import refine
from autoshard.runtime.plan import Plan
from autoshard.search.strategies import PRESETS
from autoshard.train.config import TrainConfig

MESH = {"data": 4, "model": 2}
SQUARE = jax.ShapeDtypeStruct((256, 256), jnp.float32)
W = dict.fromkeys("abc", SQUARE)
X = jax.ShapeDtypeStruct((64, 256), jnp.float32)


def step(w, x):
    """Three residual blocks: the layout with the least predicted time is not the one with the least estimated time."""

    def loss(w):
        h = x
        for name in w:
            h = h + jnp.tanh(h @ w[name]) @ w[name].T
        return (h**2).mean()

    return jax.tree.map(lambda a, b: a - 0.1 * b, w, jax.grad(loss)(w))


def small(w, x):
    return w - 0.1 * (x.T @ jnp.tanh(x @ w))


S = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A cache folder that the tests of one step share."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def refined(kept):
    return autoshard.jit(step, mesh=MESH, refine=4, cache=kept, donate_argnums=0)


@pytest.fixture
def compiles(monkeypatch):
    """The plans compiled so far."""
    asked: list[Plan] = []

    def counted(plan, lowered):
        asked.append(plan)
        return compile_plan(plan, lowered)

    monkeypatch.setattr(refine, "compile_plan", counted)
    return asked


def chosen(plan):
    (best,) = [t for t in plan.refined if t.chosen]
    return best


def test_the_least_estimated_time_wins_over_the_least_predicted_time(refined):
    plan, first = refined.plan(W, X), autoshard.jit(step, mesh=MESH, donate_argnums=0)
    by_hand = compile_plan(first.plan(W, X), first.lower(W, X))
    best = compile_plan(plan, refined.lower(W, X))
    assert best.fits
    assert best.estimate.seconds < by_hand.estimate.seconds
    assert plan.cost.seconds > first.plan(W, X).cost.seconds
    assert len(plan.refined) == 4
    assert plan.refined[0].seconds == pytest.approx(by_hand.estimate.seconds)
    assert not plan.refined[0].chosen
    assert chosen(plan).seconds == pytest.approx(best.estimate.seconds)
    assert chosen(plan).seconds == min(t.seconds for t in plan.refined)


def test_a_preset_among_those_compiled_is_never_better(refined):
    plan = refined.plan(W, X)
    presets = {t.text.partition(":")[0] for t in plan.refined} - {"auto"}
    assert presets
    for name in presets:
        other = autoshard.jit(step, mesh=MESH, strategy=name, donate_argnums=0)
        c = compile_plan(other.plan(W, X), other.lower(W, X))
        assert chosen(plan).seconds <= c.estimate.seconds


def test_of_two_layouts_that_are_compiled_one_is_a_preset_of_another_kind(tmp_path):
    plan = autoshard.jit(step, mesh=MESH, donate_argnums=0, refine=2, cache=tmp_path).plan(W, X)
    first, second = (t.text.partition(":")[0] for t in plan.refined)
    assert second in PRESETS
    assert second not in (first, "auto")
    of_kind = {n: autoshard.jit(step, mesh=MESH, donate_argnums=0, strategy=n, passes=()).plan(W, X) for n in PRESETS}
    seconds = {n: p.cost.seconds for n, p in of_kind.items() if n != "auto" and p.cost != of_kind["auto"].cost}
    assert seconds[second] == min(seconds.values())


def test_equal_layouts_are_compiled_once(compiles, tmp_path):
    plan = autoshard.jit(small, mesh={"data": 8}, refine=50, cache=tmp_path).plan(S, S)
    assert len(compiles) == len(plan.refined) < 50
    layouts = {(p.fingerprint, *(q.spec for q in (*p.inputs, *p.outputs)), p.intermediates) for p in compiles}
    assert len(layouts) == len(compiles)


def test_what_runs_is_what_was_chosen_and_equals_one_device(refined):
    keys = jax.random.split(jax.random.key(0), 4)
    w = {name: 0.05 * jax.random.normal(key, (512, 512)) for name, key in zip("abc", keys, strict=False)}
    x = jax.random.normal(keys[3], (64, 512))
    want = refined.reference(w, x)
    got = refined(refined.plan(w, x).put(w), x)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6, strict=True)
    assert refined.executable(W, X).lowered is refined.executable(W, X).prelowered


def test_explain_and_json_say_what_was_compiled_and_why_one_won(refined):
    plan = refined.plan(W, X)
    text = " ".join(plan.explain().split())
    assert "the best of 4 compiled layouts by the compiler's estimate" in text
    assert "chosen: the fastest that fits" in text
    assert text.count("slower by") >= 3
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert autoshard.jit(step, mesh=MESH, strategy=plan, donate_argnums=0).plan(W, X).refined == plan.refined


def test_the_report_of_a_compilation_has_the_other_layouts(refined):
    plan = refined.plan(W, X)
    made, out = compile_plan(plan, refined.lower(W, X)), io.StringIO()
    assert [t["chosen"] for t in made.as_json()["refined"]] == [t.chosen for t in plan.refined]
    print_compilation(made, Console(file=out, soft_wrap=True))
    assert "Compiled to choose from" in out.getvalue()


def test_an_estimate_that_may_be_too_low_says_so(refined):
    first = refined.plan(W, X).refined[0]
    assert first.exact
    assert "or more" in compiled_layouts([replace(first, exact=False, chosen=True)]).table.rows[0][2]


def test_nothing_is_compiled_twice(refined, kept, compiles):
    plan = refined.plan(W, X)
    compiles.clear()
    again = autoshard.jit(step, mesh=MESH, refine=4, cache=kept, donate_argnums=0).plan(W, X)
    assert again == plan
    assert not compiles
    under = {"xla_cpu_enable_fast_math": True}
    other = autoshard.jit(step, mesh=MESH, refine=1, cache=kept, donate_argnums=0, compiler_options=under)
    assert len(other.plan(W, X).refined) == len(compiles) == 1


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"peak"', '"speak"'),
        lambda text: text.replace('"peak"', '"more": 1, "peak"'),
        lambda text: text.replace('"key": "', '"key": "0'),
        lambda text: "\ud800".encode("utf-8", "surrogatepass"),
    ],
    ids=["half", "a list", "missing", "unknown", "of another", "no text"],
)
def test_a_broken_cache_entry_is_a_warning_and_its_layout_is_compiled_again(spoilt, tmp_path, compiles):
    def planned():
        return autoshard.jit(small, mesh={"data": 8}, refine=1, cache=tmp_path).plan(S, S)

    want = planned()
    (file,) = tmp_path.iterdir()
    whole = file.read_text()
    broken = spoilt(whole)
    file.write_bytes(broken if isinstance(broken, bytes) else broken.encode())
    with pytest.warns(CacheWarning, match="compiled again") as said:
        assert planned() == want
    assert len(said) == 1
    assert len(compiles) == 2
    assert file.read_text() == whole
    assert planned() == want
    assert len(compiles) == 2


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="cannot be written|compiled again"):
        plan = autoshard.jit(small, mesh={"data": 8}, refine=1, cache=tmp_path / "file").plan(S, S)
    assert chosen(plan).fits


def test_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("AUTOSHARD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert compile_cache.cache_folder() == tmp_path / ".cache/autoshard"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert compile_cache.cache_folder() == tmp_path / ".cache/autoshard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert compile_cache.cache_folder() == tmp_path / "xdg/autoshard"
    monkeypatch.setenv("AUTOSHARD_CACHE", str(tmp_path / "own"))
    assert compile_cache.cache_folder() == tmp_path / "own"
    assert compile_cache.cache_folder(tmp_path / "given") == tmp_path / "given"


@pytest.mark.parametrize("bad", [-1, 1.5, "3", True])
def test_no_number_of_layouts(bad):
    with pytest.raises(ArgumentError, match="refine=.*: must be the number of layouts to compile"):
        autoshard.jit(small, mesh=MESH, refine=bad)


def test_a_plan_that_is_given_is_not_refined():
    plan = autoshard.jit(small, mesh=MESH).plan(S, S)
    with pytest.raises(ArgumentError, match="refine=2: a plan given as the strategy"):
        autoshard.jit(small, mesh=MESH, strategy=plan, refine=2)


def test_a_config_takes_it():
    fields = {"model": {"layers": 1, "d_model": 16, "heads": 2, "seq": 16}, "batch": 8, "mesh": "cpu-8", "steps": 1}
    made = TrainConfig.model_validate({**fields, "checkpoint": {"dir": "x"}, "refine": 2})
    assert made.refine == 2
    with pytest.raises(ConfigError, match="refine"):
        TrainConfig.model_validate({**fields, "checkpoint": {"dir": "x"}, "refine": -2})


@pytest.mark.parametrize("none", [None, 0])
def test_without_it_nothing_is_compiled(none, compiles, tmp_path):
    plan = autoshard.jit(small, mesh=MESH, refine=none, cache=tmp_path).plan(S, S)
    assert plan == autoshard.jit(small, mesh=MESH).plan(S, S)
    assert plan.refined == ()
    assert not compiles


def answering(monkeypatch, how):
    """Replaces the n-th compilation by ``how(n, plan, lowered)``."""
    asked: list[Plan] = []

    def answered(plan, lowered):
        asked.append(plan)
        return how(len(asked) - 1, plan, lowered)

    monkeypatch.setattr(refine, "compile_plan", answered)


def test_a_layout_out_of_memory_loses_and_is_cached(monkeypatch, tmp_path):
    def first_refused(n, plan, lowered):
        made = compile_plan(plan, lowered)
        return made if n else replace(made, usage=None, estimate=None, out_of_memory=OutOfMemory(3 * 2**30, 2**30))

    def planned():
        return autoshard.jit(small, mesh={"data": 8}, refine=3, cache=tmp_path).plan(S, S)

    answering(monkeypatch, first_refused)
    plan = planned()
    assert not plan.refined[0].fits
    assert plan.refined[0].seconds is None
    assert chosen(plan).fits
    assert "over by 2.00 GiB" in " ".join(plan.explain().split())
    assert planned() == plan


def test_where_nothing_fits_the_layout_that_needs_the_least_is_chosen(monkeypatch, tmp_path):
    def refused(n, plan, lowered):
        out_of_memory = OutOfMemory((9 - n) * 2**30, 2**30)
        return replace(compile_plan(plan, lowered), usage=None, estimate=None, out_of_memory=out_of_memory)

    answering(monkeypatch, refused)
    plan = autoshard.jit(small, mesh={"data": 8}, refine=3, cache=tmp_path).plan(S, S)
    assert [t.chosen for t in plan.refined] == [False, False, True]
    assert any("none of the layouts that were compiled fits" in d.text for d in plan.diagnostics)


def test_the_budget_applies_to_the_compiler_s_figure(monkeypatch, tmp_path):
    def first_above(n, plan, lowered):
        made = compile_plan(plan, lowered)
        return made if n else replace(made, usage=replace(made.usage, peak=2**20 + 1))

    answering(monkeypatch, first_above)
    jitted = autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path, memory_budget="1MiB")
    assert [(t.available_bytes, t.fits, t.chosen) for t in jitted.plan(S, S).refined] == [
        (2**20, False, False),
        (2**20, True, True),
    ]


def test_of_layouts_that_fit_the_fastest_wins(monkeypatch, tmp_path):
    def first_faster_and_larger(n, plan, lowered):
        made = compile_plan(plan, lowered)
        usage, estimate = replace(made.usage, peak=2 ** (20 - n)), replace(made.estimate, compute=1.0 + n)
        return replace(made, usage=usage, estimate=estimate)

    answering(monkeypatch, first_faster_and_larger)
    plan = autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path).plan(S, S)
    assert [(t.fits, t.chosen) for t in plan.refined] == [(True, True), (True, False)]


def test_a_layout_refused_for_another_reason_is_named_and_left_out(monkeypatch, tmp_path):
    def broken(n, plan, lowered):
        if n < 1:
            raise jax.errors.JaxRuntimeError("INTERNAL: no such luck\nat some length")
        return compile_plan(plan, lowered)

    answering(monkeypatch, broken)
    plan = autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path).plan(S, S)
    assert [t.refusal for t in plan.refined] == ["INTERNAL: no such luck", ""]
    assert [t.chosen for t in plan.refined] == [False, True]
    assert "refused: INTERNAL: no such luck" in " ".join(plan.explain().split())
    assert len(list(tmp_path.iterdir())) == 1


def test_if_every_layout_is_refused_the_error_has_the_reasons(monkeypatch, tmp_path):
    def broken(n, plan, lowered):
        raise jax.errors.JaxRuntimeError(f"INTERNAL: reason {n}")

    answering(monkeypatch, broken)
    said = "small: the compiler refuses all 2 layouts .*auto: .*INTERNAL: reason 0; .*: INTERNAL: reason 1"
    with pytest.raises(CompileError, match=said):
        autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path).plan(S, S)


def test_a_strategy_that_is_named_is_kept(tmp_path):
    plan = autoshard.jit(small, mesh=MESH, strategy="fsdp", refine=3, cache=tmp_path).plan(S, S)
    assert {t.text.partition(":")[0] for t in plan.refined} == {"fsdp"}


def test_meshes_that_planning_chooses_among_are_compiled_too(tmp_path):
    plan = autoshard.jit(small, mesh=autoshard.MeshConfig(axes="auto"), refine=4, cache=tmp_path).plan(S, S)
    assert any("the mesh (" in t.text for t in plan.refined)


def test_the_state_stays_where_the_first_plan_has_it(tmp_path):
    jitted = autoshard.jit(small, mesh=MESH, refine=2, cache=tmp_path, donate_argnums=0)
    first = jitted.plan(S, S)
    then = jitted.plan(S, jax.ShapeDtypeStruct((128, 64), jnp.float32))
    assert then.inputs[0].spec == first.inputs[0].spec
    assert then.inputs[0].reason == "first_plan"
    assert len(then.refined) == 2


def test_a_mesh_that_is_only_described_cannot_be_compiled_for(tmp_path):
    mesh = autoshard.MeshConfig(axes={"data": 16}, hardware="cpu")
    with pytest.raises(MeshError, match="needs 16 devices"):
        autoshard.jit(small, mesh=mesh, refine=2, cache=tmp_path).plan(S, S)


def test_inside_an_outer_trace(tmp_path):
    jitted = autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path)
    w = jnp.ones((64, 64))
    np.testing.assert_allclose(jax.jit(lambda a: jitted(a, w) * 2)(w), 2 * jitted.reference(w, w), rtol=1e-5)


def test_a_step_that_closes_over_tracers_is_not_refined(tmp_path):
    plans: list[Plan] = []

    def around(a, scale):
        jitted = autoshard.jit(lambda x: x @ x * scale, mesh={"data": 8}, refine=2, cache=tmp_path)
        plans.append(jitted.plan(S))
        return jitted(a)

    w = jnp.ones((64, 64))
    np.testing.assert_allclose(jax.jit(around)(w, 2.0), 2 * w @ w)
    assert any("not refined" in d.text for d in plans[0].diagnostics)


def test_no_warning_where_all_is_well(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        autoshard.jit(small, mesh={"data": 8}, refine=2, cache=tmp_path / "new" / "folder").plan(S, S)
