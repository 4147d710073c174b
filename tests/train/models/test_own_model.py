"""Own models in a configuration's run: of every kind, equal to plain JAX, resumed on another mesh."""

from __future__ import annotations

import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import linen, nnx
from rich.console import Console

from autoshard import checkpoint
from autoshard.errors import AutoshardError, ConfigError
from autoshard.train.config import named_config
from autoshard.train.loop import train
from autoshard.train.models.decoder import Decoder, ModelConfig
from autoshard.train.models.own_model import cross_entropy, own_model
from autoshard.train.phase import plan_phase
from autoshard.train.sources import Rows

chosen = np.random.default_rng(0)
IMAGES = {
    "inputs": chosen.normal(size=(64, 8, 8, 1)).astype(np.float32),
    "labels": chosen.integers(0, 3, 64).astype(np.int32),
}
ME = "tests.train.models.test_own_model"


class Cnn(nnx.Module):
    """A convolution with a norm that keeps statistics, dropout, and a product; one variable holds a tree."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, width, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.out = nnx.Linear(width, 3, rngs=rngs)
        self.seen = nnx.BatchStat({"batches": jnp.zeros(()), "mean": jnp.zeros(())})

    def __call__(self, x: Any) -> Any:
        if not self.drop.deterministic:
            seen = self.seen.get_value()
            self.seen.set_value({"batches": seen["batches"] + 1, "mean": 0.9 * seen["mean"] + 0.1 * x.mean()})
        return self.out(self.drop(nnx.relu(self.norm(self.conv(x)))).mean((1, 2)) + self.seen.get_value()["mean"])


class Transformer(linen.Module):
    """One layer of attention over bytes, with a norm that keeps statistics and dropout."""

    width: int

    @linen.compact
    def __call__(self, tokens: Any, train: bool) -> Any:
        x = linen.Embed(256, self.width)(tokens)
        x = x + linen.MultiHeadDotProductAttention(2)(linen.LayerNorm()(x), mask=linen.make_causal_mask(tokens))
        x = linen.Dropout(0.1)(linen.BatchNorm(use_running_average=not train)(x), deterministic=not train)
        return linen.Dense(256)(x)


def plain(width: int) -> Any:
    def init(key: Any) -> Any:
        return [jax.random.normal(key, (64, width)) * 0.1, jnp.zeros((width, 3))]

    def apply(params: Any, x: Any) -> Any:
        return jnp.tanh(x.reshape(len(x), -1) @ params[0]) @ params[1]

    return init, apply


def squared(outputs: Any, batch: Mapping[str, Any], scale: float = 1.0) -> Any:
    error = jnp.square(outputs - jax.nn.one_hot(batch["labels"], 3)).mean()
    return scale * error, {"accuracy": (outputs.argmax(-1) == batch["labels"]).mean()}


def images() -> Any:
    return IMAGES


def whole_step(rate: float) -> Any:
    """A step of its own over NNX modules."""

    def init(key: Any) -> Any:
        model = Cnn(4, nnx.Rngs(key))
        return {"model": model, "optimizer": nnx.Optimizer(model, optax.sgd(rate), wrt=nnx.Param)}

    def loss_of(model: Any, batch: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"]).mean()

    def step(state: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(loss_of)(state["model"], batch)
        state["optimizer"].update(state["model"], grads)
        return {"loss": loss}

    def evaluate(state: Any, batch: Any) -> Any:
        return {"loss": loss_of(state["model"], batch)}

    return init, step, evaluate


SENTENCES = [chosen.integers(1, 16, n).astype(np.int32) for n in chosen.choice([3, 4, 9], 40)]


def ragged() -> Any:
    """Batches of four sentences of different lengths; the last has two."""
    for n in range(0, 14, 4):
        rows = SENTENCES[n : min(n + 4, 14)]
        yield {"inputs": [row[:-1] for row in rows], "targets": [row[1:] for row in rows], "origin": "a book"}


def packed() -> Any:
    """The same sentences, several to a row of 12, by grain."""
    texts = grain.MapDataset.source(SENTENCES).map(lambda row: {"inputs": row[:-1], "targets": row[1:]})
    rows = grain.experimental.FirstFitPackIterDataset(
        texts.to_iter_dataset(), length_struct={"inputs": 12, "targets": 12}, num_packing_bins=4
    )
    names = {"inputs": "inputs", "targets": "targets", "inputs_segment_ids": "segment_ids"}
    rows = rows.map(lambda row: {new: np.asarray(row[old], np.int32) for old, new in names.items()})
    return rows.map(lambda row: row | {"weights": (row["segment_ids"] > 0).astype(np.float32)}).batch(2)


def bigram() -> Any:
    """A table of logits."""
    return lambda key: jax.random.normal(key, (16, 16)), lambda table, tokens: table[tokens]


def byte_table() -> Any:
    """The same of bytes."""
    return lambda key: jax.random.normal(key, (256, 256)), lambda table, tokens: table[tokens]


def tenth(outputs: Any, batch: Any) -> Any:
    """A tenth of the default loss."""
    return cross_entropy(outputs, batch) / 10


def names() -> Any:
    """Batches of text alone."""
    return [{"name": "a"}]


def nothing() -> None:
    """No model, no optimizer, no step, no data."""


def config(folder: Path, run: str = "run", **entries: Any) -> Path:
    """A configuration of a run of six steps that changes its mesh after the third."""
    phases = [{"mesh": {"axes": {"data": n}, "hardware": "cpu"}, "until": u} for n, u in ((4, 3), (2, 6))]
    made = {
        "data": {"call": f"{ME}:images"},
        "batch": 16,
        "phases": phases,
        "eval": {"every": 3, "batches": 2, "data": {"call": f"{ME}:images"}},
        "checkpoint": {"dir": str(folder / run), "every": 2},
    } | entries
    path = folder / f"{run}.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in made.items() if value is not None}))
    return path


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"call": f"{ME}:{name}", "with": arguments}


def trained(path: Path) -> tuple[Any, list[dict[str, Any]], str]:
    """The report, the events of the log, and what was printed."""
    shown, read = io.StringIO(), named_config(path)
    report = train(read, console=Console(file=shown, soft_wrap=True))
    log = Path(read.checkpoint.dir) / "log.jsonl"
    return report, [json.loads(line) for line in log.read_text().splitlines()], shown.getvalue()


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_plain_functions_train_as_by_hand(tmp_path: Path):
    own = {"model": call("plain", width=8), "loss": call("squared", scale=2.0)}
    optimizer = {"call": "optax:adam", "with": {"learning_rate": 0.01}}
    report, events, _ = trained(config(tmp_path, optimizer=optimizer, **own))

    init, apply = plain(8)
    params, adam = init(jax.random.key(0)), optax.adam(0.01)
    state, rows, losses = adam.init(params), Rows(IMAGES, 16, seed=0), []
    for _ in range(6):
        batch = jax.tree.map(np.asarray, next(rows), is_leaf=lambda x: hasattr(x, "shape"))
        loss, grads = jax.value_and_grad(lambda p, b=batch: squared(apply(p, b["inputs"]), b, 2.0)[0])(params)
        updates, state = adam.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    steps = [e for e in events if e["event"] == "step"]
    np.testing.assert_allclose([e["loss"] for e in steps], losses, rtol=1e-5)
    held_out = [e for e in events if e["event"] == "held_out"]
    assert [e["step"] for e in held_out] == [3, 3, 6]  # before and after the change of mesh, and at the end
    first = {key: value[:32] for key, value in IMAGES.items()}
    loss, metrics = squared(apply(params, first["inputs"]), first, 2.0)
    np.testing.assert_allclose(held_out[-1]["loss"], float(loss), rtol=1e-5)
    over_all, _ = squared(apply(params, IMAGES["inputs"]), IMAGES, 2.0)  # at the end every row is scored once
    np.testing.assert_allclose(report.held_out, float(over_all), rtol=1e-5)
    assert (report.scored, report.unit) == (64, "examples")
    np.testing.assert_allclose(held_out[-1]["accuracy"], float(metrics["accuracy"]), rtol=1e-6)
    assert (report.parameters, report.bigram_bits) == (64 * 8 + 8 * 3, None)


def by_sentence(batch: Mapping[str, Any]) -> list[np.ndarray]:
    """The inputs and the targets of the sentences that a packed batch has, each by itself."""
    rows = zip(batch["inputs"], batch["targets"], batch["segment_ids"], strict=True)
    return [np.stack([x[s == n], y[s == n]]) for x, y, s in rows for n in range(1, s.max() + 1)]


def mean_by_token(of_row: Any, params: Any, rows: list[np.ndarray]) -> Any:
    """The loss and the gradient of sentences, each computed by itself."""
    tokens = sum(row.shape[1] for row in rows)
    each = [jax.device_get(of_row(params, row)) for row in rows]
    shares = [row.shape[1] / tokens for row in rows]
    return jax.tree.map(lambda *of: sum(share * x for share, x in zip(shares, of, strict=True)), *each)


def test_sentences_padded_to_two_lengths_train_as_each_by_itself(tmp_path: Path):
    dims = {name: ["rows", "length"] for name in ("inputs", "targets", "weights")}
    entries: dict[str, Any] = {
        "data": call("ragged"),
        "batch": 4,
        "pad": {"buckets": [{"rows": 4, "length": n} for n in (4, 8)], "dims": dims},
        "model": call("bigram"),
        "optimizer": {"call": "optax:sgd", "with": {"learning_rate": 0.5}},
        "phases": [{"mesh": {"axes": {"data": 2}, "hardware": "cpu"}, "until": 4}],
        "eval": {"data": call("ragged"), "batches": 4},
    }
    _, events, _ = trained(config(tmp_path, **entries))

    batches = [[np.stack(pair) for pair in zip(each["inputs"], each["targets"], strict=True)] for each in ragged()]
    params, losses = bigram()[0](jax.random.key(0)), []

    of_row = jax.jit(jax.value_and_grad(lambda p, row: cross_entropy(p[row[0]], {"targets": row[1]})))
    for rows in batches:
        loss, gradient = mean_by_token(of_row, params, rows)
        params = params - 0.5 * gradient
        losses.append(float(loss))
    np.testing.assert_allclose([e["loss"] for e in events if e["event"] == "step"], losses, rtol=1e-5)
    loss, _ = mean_by_token(of_row, params, [row for rows in batches for row in rows])  # by token, not by batch
    np.testing.assert_allclose([e["loss"] for e in events if e["event"] == "held_out"], float(loss), rtol=1e-5)


def test_packed_sentences_train_as_each_by_itself(tmp_path: Path):
    sizes: dict[str, Any] = {"layers": 1, "d_model": 16, "heads": 2, "seq": 12, "vocab": 256}
    phases = [{"mesh": {"axes": {"data": 2}, "hardware": "cpu"}, "until": 2}]
    optimizer = {"call": "optax:sgd", "with": {"learning_rate": 0.5}}
    given = {"data": call("packed"), "batch": 2, "model": sizes, "optimizer": optimizer, "phases": phases, "eval": {}}
    _, events, _ = trained(config(tmp_path, **given))

    graph, state = nnx.split(Decoder(ModelConfig.model_validate(sizes), nnx.Rngs(params=jax.random.key(0))))
    of_row = jax.jit(
        jax.value_and_grad(lambda s, row: cross_entropy(nnx.merge(graph, s)(row[:1]), {"targets": row[1:]}))
    )
    losses = []
    for batch in itertools.islice(packed(), 2):
        rows = by_sentence(batch)
        assert len(rows) > 2  # several to a row
        loss, gradient = mean_by_token(of_row, state, rows)
        state = jax.tree.map(lambda x, g: x - 0.5 * g, state, gradient)
        losses.append(float(loss))
    np.testing.assert_allclose([e["loss"] for e in events if e["event"] == "step"], losses, rtol=1e-5)


def test_precision_is_that_of_the_configuration(tmp_path: Path):
    """The decoder with bfloat16 parameters, a master copy, a scale that follows, and a momentum in bfloat16."""
    given: dict[str, Any] = {
        "model": {"layers": 1, "d_model": 16, "heads": 2, "seq": 12, "vocab": 256},
        "data": call("packed"),
        "batch": 2,
        "optimizer": {"learning_rate": 0.01, "mu_dtype": "bfloat16"},
        "precision": {"params": "bfloat16", "master": "float32", "loss_scale": "dynamic"},
        "phases": [{"mesh": {"axes": {"data": 2}, "hardware": "cpu"}, "until": 2}],
        "eval": {},
    }
    path = config(tmp_path, **given)
    _, events, _ = trained(path)
    metrics = [e for e in events if e["event"] == "step"]
    assert [(e["loss_scale"], e["skipped"]) for e in metrics] == [(2.0**15, 0)] * 2
    assert metrics[1]["loss"] < metrics[0]["loss"]
    saved = checkpoint.restore(tmp_path / "run/checkpoints")
    params = {name.removeprefix("params"): x for name, x in saved.items() if name.startswith("params/")}
    assert {x.dtype for x in params.values()} == {jnp.bfloat16.dtype}
    for name, x in params.items():
        np.testing.assert_array_equal(x, saved[f"master{name}"].astype(jnp.bfloat16))
    assert {x.dtype.name for name, x in saved.items() if "mu" in name.split("/")} == {"bfloat16"}
    assert {x.dtype.name for name, x in saved.items() if "nu" in name.split("/")} == {"float32"}
    planned = plan_phase(named_config(path), named_config(path).all_phases[0])
    assert "bf16" in str(jax.make_jaxpr(planned.work.steps.train)(planned.state, planned.batch))
    with pytest.raises(ConfigError, match="the model has a `dtype`"):
        named_config(config(tmp_path, **given | {"model": {**given["model"], "dtype": "bfloat16"}}))
    with pytest.raises(ConfigError, match="has all bits of the parameters"):
        named_config(config(tmp_path, **given | {"precision": {"master": "float16"}}))


@pytest.mark.parametrize(
    "own",
    [
        {"model": call("Cnn", width=8), "optimizer": {"learning_rate": 0.01}},
        {"step": call("whole_step", rate=0.1)},
    ],
    ids=["module", "step"],
)
def test_modules_keep_statistics_and_resume_on_another_mesh(tmp_path: Path, own: Any):
    report, events, shown = trained(config(tmp_path, **own))
    one = [{"mesh": {"axes": {"data": 1}, "hardware": "cpu"}, "until": 6}]
    alone, same, _ = trained(config(tmp_path, "one", **own, phases=one))
    losses, wanted = ([e["loss"] for e in each if e["event"] == "step"] for each in (events, same))
    np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    np.testing.assert_allclose(report.held_out, alone.held_out, rtol=1e-4)
    assert "held-out loss" in shown
    assert "examples/s" in shown


@pytest.mark.parametrize("own", [call("Cnn", width=4), call("Transformer", width=8)], ids=["nnx", "linen"])
def test_training_keeps_statistics_and_evaluation_does_not(tmp_path: Path, own: Any):
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8) if "Transformer" in own["call"] else IMAGES["inputs"][:8]
    read = named_config(config(tmp_path, model=own))
    model = own_model(read.model, {"inputs": tokens})
    params, rest = model.init(jax.random.key(0))
    outputs, kept = model.apply(params, rest, {"inputs": tokens}, None)
    again, _ = model.apply(params, rest, {"inputs": tokens}, None)
    trained_outputs, changed = model.apply(params, rest, {"inputs": tokens}, jax.random.key(1))
    np.testing.assert_array_equal(outputs, again)
    assert np.abs(np.asarray(outputs - trained_outputs)).max() > 1e-3
    for path, before in jax.tree.leaves_with_path(rest):
        if "mean" in str(path):
            same, moved = (functools.reduce(lambda x, key: x[key.key], path, tree) for tree in (kept, changed))
            np.testing.assert_array_equal(before, same)
            assert np.abs(np.asarray(before - moved)).max() > 1e-6


def test_a_linen_transformer_trains_on_text(tmp_path: Path):
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / f"text/{number}.txt").write_text("the mesh has eight devices and every axis has a name " * 4)
    entries: dict[str, Any] = {"model": call("Transformer", width=16), "eval": {"batches": 1, "final_batches": 1}}
    entries |= {"phases": [{"mesh": {"axes": {"data": 2}, "hardware": "cpu"}, "until": 6}], "strategy": "dp"}
    text = {"source": str(tmp_path / "text"), "holdout": 4, "seq": 16}
    report, events, _ = trained(config(tmp_path, data=text, optimizer={"learning_rate": 0.03}, batch=8, **entries))
    losses = [e["loss"] for e in events if e["event"] == "step"]
    assert losses[-1] < losses[0]
    assert report.scored == 8 * 16
    assert report.held_out_bits == pytest.approx(report.held_out / np.log(2))


def test_a_loss_of_ones_own_makes_no_bits_per_byte(tmp_path: Path):
    (tmp_path / "book.txt").write_text("the mesh has eight devices and every axis has a name " * 40)
    entries = {"model": call("byte_table"), "loss": call("tenth"), "eval": {"batches": 1, "final_batches": 1}}
    entries |= {"phases": [{"mesh": {"axes": {"data": 2}, "hardware": "cpu"}, "until": 1}], "batch": 2}
    text = {"source": str(tmp_path / "book.txt"), "seq": 16}
    report, _, shown = trained(config(tmp_path, data=text, **entries))
    assert (report.held_out_bits, report.bigram_bits) == (None, None)
    assert "bits per byte" not in shown
    assert f"held-out loss {report.held_out:.4f}, over 32 tokens" in shown


def test_a_decoder_takes_an_own_optimizer(tmp_path: Path):
    decoder = {"layers": 1, "d_model": 16, "heads": 2, "seq": 16}
    optimizer = {"call": "optax:sgd", "with": {"learning_rate": 0.1}}
    read = named_config(config(tmp_path, model=decoder, optimizer=optimizer, data=None, eval=None))
    planned = plan_phase(read, read.all_phases[0])
    assert planned.batch["inputs"].shape == (16, 16)
    assert not any("'mu'" in place.path for place in planned.plan.inputs)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"model": call("nothing")},
            r"yaml:\d+: model: .*nothing gives a NoneType; a model is a Flax NNX or Linen module",
        ),
        (
            {"model": call("plain", width=4), "optimizer": call("nothing")},
            r"yaml:\d+: optimizer: .* and not an optax.GradientTransformation",
        ),
        ({"step": call("nothing")}, r"yaml:\d+: step: .* it must give functions, \(init, step\)"),
        ({"step": call("plain", width=4)}, r"yaml:\d+: eval.data: the `step` gives \(init, step\) alone"),
        (
            {"model": call("plain", width=4), "data": call("nothing")},
            r"yaml:\d+: data: .* NoneType is neither arrays, nor an iterable",
        ),
        (
            {"model": call("plain", width=4), "data": call("names")},
            r"yaml:\d+: data: nothing in a batch of .*:names is",
        ),
        (
            {"model": call("bigram"), "data": call("packed")},
            r"yaml:\d+: batch: it is 16, and .*:packed are \[2\]: give",
        ),
        (
            {
                "model": call("bigram"),
                "data": call("ragged"),
                "pad": {"buckets": [{"rows": 16, "length": 3}], "dims": {"inputs": ["rows", "length"]}},
            },
            r"yaml:\d+: data: .*:ragged: a batch has length 8, and no bucket is as large",
        ),
    ],
)
def test_what_gives_something_else_is_refused(tmp_path: Path, entries: Any, message: str):
    read = named_config(config(tmp_path, **entries))
    with pytest.raises(AutoshardError, match=message):
        plan_phase(read, read.all_phases[0])


@pytest.mark.parametrize(
    ("key", "own"), [("model", call("plain", width="abc")), ("step", call("whole_step", rate="a"))]
)
def test_what_fails_within_an_entry_is_told_beside_its_traceback(tmp_path: Path, key: str, own: Any):
    read = named_config(config(tmp_path, **{key: own}))
    with pytest.raises(TypeError) as caught:
        plan_phase(read, read.all_phases[0])
    named = rf"run.yaml:\d+: {key}: {re.escape(own['call'])} raised this, or what it gave"
    assert len([note for note in caught.value.__notes__ if re.search(named, note)]) == 1  # beside JAX's own


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            {"model": call("plain", width=4), "data": call("inputs_alone")},
            r"yaml:\d+: model: .* integer `targets` of \[16\]; it has none. Name a loss",
        ),
        (
            {"model": call("two_outputs")},
            r"yaml:\d+: model: .* are logits, an array; they are a tuple. Name a loss",
        ),
        (
            {"model": call("plain", width=4), "eval": {"data": call("no_batch")}},
            r"yaml:\d+: eval.data: .*:no_batch gives no batch",
        ),
        (
            {"model": call("Transformer", width=16), "data": {"source": __file__, "seq": 256}, "eval": None},
            r"yaml:\d+: data: the held-out part: \d+ bytes of text are too few for batch=16, seq=256.*; use seq="
            r"\d+ at most, a smaller batch or more text, or a smaller holdout than 10$",
        ),
    ],
)
def test_what_lacks_targets_or_held_out_data_is_told_before_a_step(tmp_path: Path, entries: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        trained(config(tmp_path, **entries))
    assert not checkpoint.steps(tmp_path / "run/checkpoints")


def inputs_alone() -> Any:
    return {"inputs": IMAGES["inputs"]}


def two_outputs() -> Any:
    return lambda key: {}, lambda params, x: (x, x)


def no_batch() -> Any:
    """No held-out data."""
    return []


def test_the_files_of_the_guide_train_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/own_model.md").read_text().partition("## From a configuration")[2]
    models, config = (page.partition(f"```{kind}\n")[2].partition("```")[0] for kind in ("python", "yaml"))
    (tmp_path / "models.py").write_text(models)
    shorter = {"steps: 10000": "steps: 4", "every: 500": "every: 2", "data: -1": "data: 8"}
    for long, short in shorter.items():
        assert long in config
        config = config.replace(long, short)
    (tmp_path / "cnn.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = train(named_config(tmp_path / "cnn.yaml"), console=Console(quiet=True))
    assert report is not None
    assert report.held_out is not None
    assert checkpoint.steps(tmp_path / "runs/cnn/checkpoints")[-1] == 4
