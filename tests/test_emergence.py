"""What experts write by hand comes out of the hardware and its memory alone: `benchmarks.emergence` line by line."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from autoshard.runtime.plan import Plan
from benchmarks.emergence import CASES, EIGHT, LARGE, WORDY, Case, planned, sent, shown_specs


@cache
def case_of(name: str) -> Case:
    return next(c for c in CASES if c.name == name)


@cache
def plan_of(name: str) -> Plan:
    return planned(case_of(name))


def specs(name: str) -> Mapping[str, str]:
    return shown_specs(case_of(name), plan_of(name))


def share(name: str) -> Mapping[str, float]:
    """What part of the bytes sent each kind of collective has."""
    found: dict[str, float] = {}
    for (kind, _), n in sent(plan_of(name)).items():
        found[kind] = found.get(kind, 0.0) + n
    total = sum(found.values())
    return {k: n / total for k, n in found.items()}


def of_size(plan: Plan, kind: str, size: int) -> int:
    """How many collectives of a kind have this many bytes."""
    return sum(c.count for c in plan.cost.collectives if (c.kind, c.bytes) == (kind, size))


def test_a_small_model_is_data_parallel() -> None:
    """Of a few small arrays alone the state lies in parts."""
    plan = plan_of("data parallel")
    assert {str(p.spec) for p in plan.inputs if p.path.startswith("batch")} == {"[data, _]"}
    assert {str(p.spec) for p in plan.inputs if "mlp" in p.path} <= {"[_, _]", "[_]"}
    assert share("data parallel")["all-reduce"] > 0.9


def test_optimizer_state_lies_in_parts_where_the_update_takes_longer_than_its_parts() -> None:
    """ZeRO-1 and 2: gradients are scattered, updated in parts, and parameters gathered after the update."""
    found, kinds = specs("ZeRO-1/2"), share("ZeRO-1/2")
    assert "data" not in found["params mlp up"] + found["params mlp down"]
    assert "data" in found["mu mlp up"]
    assert kinds["reduce-scatter"] > 0.3
    assert kinds["all-gather"] > 0.3
    assert kinds.get("all-reduce", 0.0) < 0.02  # the embedding's gradient


def test_parameters_are_gathered_beside_products_and_as_memory_tightens_values_are_made_again() -> None:
    names = [c.name for c in CASES if c.program[1].get("dtype") == "float32"]
    plans = [plan_of(n) for n in names]
    passes = [" ".join(q.written for q in p.passes) for p in plans]
    assert ["recompute" in p for p in passes] == [False, True, True]
    assert ["recompute:full" in p for p in passes] == [False, False, True]
    assert all("data" in specs(n)["params mlp up"] for n in names)
    assert all(p.memory_budget is None or p.memory.peak <= p.memory_budget for p in plans)
    seconds, peaks = [p.cost.seconds for p in plans], [p.memory.peak for p in plans]
    assert seconds[1:] == sorted(seconds[1:])  # the first writes what the second computes again where it is read
    assert peaks == sorted(peaks, reverse=True)
    assert all(p.cost.hidden > p.cost.transfers for p in plans)


def test_a_small_batch_of_a_large_model_is_megatron_with_the_sequence_in_parts() -> None:
    """Columns, then rows; no more reductions than Megatron has, scattered and gathered rather than whole: four a layer.

    The backward pass gathers anew what a layer's products read, as Megatron does to keep a part of it only: two more.
    """
    name, batch = "Megatron with sequence parallelism, batch 2", 2
    found, plan = specs(name), plan_of(name)
    assert found["params mlp up"] == "[_, _, data]"
    assert found["params mlp down"] == "[_, data, _]"
    assert found["params head"] == "[_, data]"
    activation = batch * LARGE["seq"] * LARGE["d_model"] * 2
    layers = LARGE["layers"]
    assert 4 * layers <= of_size(plan, "reduce-scatter", activation) <= 4 * layers + 2
    assert 4 * layers <= of_size(plan, "all-gather", activation) <= 6 * layers + 2
    assert share(name).get("all-reduce", 0.0) < 0.01


def test_of_a_larger_batch_some_weights_are_gathered_and_others_stay_in_parts() -> None:
    """Those whose gathers run beside products."""
    name, batch = "Megatron for some weights, batch 4", 4
    found, plan = specs(name), plan_of(name)
    assert (found["params mlp up"], found["params mlp down"]) == ("[_, _, data]", "[_, data, _]")
    activation = batch * LARGE["seq"] * LARGE["d_model"] * 2
    assert 0 < of_size(plan, "reduce-scatter", activation) < 4 * LARGE["layers"]
    assert of_size(plan, "all-gather", LARGE["d_model"] ** 2 * 2) >= LARGE["layers"]
    assert plan.cost.hidden > 0


def test_a_large_batch_of_it_gathers_its_parameters() -> None:
    """FSDP, or ZeRO-3: no layer's activation is sent."""
    name = "FSDP (ZeRO-3), large batch"
    found, plan = specs(name), plan_of(name)
    assert found["params mlp up"] == found["params mlp down"] == found["mu mlp up"] == "[_, data, _]"
    weight = LARGE["d_model"] * LARGE["d_ff"] * 2
    assert of_size(plan, "all-gather", weight) >= 3 * LARGE["layers"]
    assert of_size(plan, "reduce-scatter", weight) >= 3 * LARGE["layers"]
    activation = 64 * LARGE["seq"] * LARGE["d_model"] * 2
    assert of_size(plan, "all-gather", activation) == of_size(plan, "reduce-scatter", activation) == 0


def test_on_two_axes_one_carries_the_batch_and_the_other_the_layers() -> None:
    name = "batch on one axis, Megatron on the other"
    plan, mesh = plan_of(name), case_of(name).mesh
    assert {"data", "model"} <= set(specs(name)["params mlp up"].strip("[]").split(", "))
    activation = 16 // mesh["model"] * LARGE["seq"] * LARGE["d_model"] * 2
    weight = LARGE["d_model"] * LARGE["d_ff"] * 2 // mesh["data"]
    sizes = {(c.kind, c.axes, c.bytes) for c in plan.cost.collectives}
    assert ("all-gather", ("data",), activation) in sizes
    assert ("reduce-scatter", ("data",), activation) in sizes
    assert ("all-gather", ("model",), weight) in sizes


def test_a_large_vocabulary_is_not_gathered() -> None:
    head = {v: WORDY["d_model"] * v * 2 for v in (1024, 131072)}
    assert of_size(plan_of("vocabulary not sharded"), "all-gather", head[1024]) >= 1
    parts = plan_of("vocabulary sharded")
    assert specs("vocabulary sharded")["params head"] == "[_, data]"
    assert all(c.bytes < head[131072] for c in parts.cost.collectives)


def test_tokens_go_to_their_experts_and_back() -> None:
    name = "expert parallelism"
    assert specs(name) == {"params up": "[_, data, _, _]", "batch x": "[data, _, _]"}
    assert share(name)["all-to-all"] > 0.99


def test_many_images_are_split_by_batch() -> None:
    name = "images by batch"
    assert specs(name) == {"params 1": "[_, _, _, _]", "batch x": "[data, _, _, _]"}
    assert set(share(name)) == {"all-reduce"}


def test_wide_convolutions_of_small_images_are_split_by_channel() -> None:
    assert "data" in specs("images by channel")["params 1"].split(", ", 2)[2]


def test_one_large_image_is_split_by_rows() -> None:
    """Neighbours send edges, one row of the image wide; windows' gradients are small."""
    name = "images by row"
    assert specs(name)["batch x"] == "[_, data, _, _]"
    sizes = {c.kind: c.bytes for c in plan_of(name).cost.collectives}
    assert sizes.pop("collective-permute") == 2048 * 16 * 4
    assert set(sizes.values()) == {3 * 3 * 16 * 16 * 4}


def test_every_line_has_its_own_name_and_a_mesh_of_eight_or_four_times_eight() -> None:
    assert all(dict(c.mesh) in (EIGHT, {"data": 4, "model": 8}) for c in CASES)
    assert len({c.name for c in CASES}) == len(CASES)
