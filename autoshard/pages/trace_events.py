"""The predicted step as trace events, which Perfetto and Chrome's tracing open.

The format: "Trace Event Format", Google, 2016 (complete events ``X``, counters ``C``, metadata ``M``; microseconds).
"""

from __future__ import annotations

from typing import Any

from autoshard.cost.profile import StepProfile
from autoshard.plan.document import short_source
from autoshard.plan.record import PlanRecord


def trace_events(plan: PlanRecord, profile: StepProfile) -> dict[str, Any]:
    """One predicted call on one device: a track for compute, one for each mesh axis, and a counter of memory.

    A collective over several axes is on the track of each.
    """
    tracks = ["compute", *plan.mesh.axis_names]
    process = f"{plan.name} on {plan.mesh}, predicted"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": process}}]
    for i, track in enumerate(tracks):
        events.append({"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": track}})
        events.append({"ph": "M", "pid": 1, "tid": i, "name": "thread_sort_index", "args": {"sort_index": i}})
    start = 0.0
    for s in profile.spans:
        args = {"operation": s.op, "source": short_source(s.source), "count": s.count, "axes": "+".join(s.axes)}
        name = s.op if s.kind == "compute" else s.kind
        for track in ["compute"] if s.kind == "compute" else s.axes:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": tracks.index(track),
                    "name": name,
                    "cat": s.kind,
                    "ts": start * 1e6,
                    "dur": s.seconds * 1e6,
                    "args": args,
                }
            )
        start += s.seconds
    m = plan.memory
    for moment in profile.moments:
        sizes = {
            "parameters": m.parameters,
            "optimizer": m.optimizer,
            "inputs": m.inputs,
            "residuals": moment.residuals,
            "temporaries": moment.temporaries,
        }
        counter = {"ph": "C", "pid": 1, "name": "bytes per device", "ts": moment.seconds * 1e6, "args": sizes}
        events.append(counter)
    return {"displayTimeUnit": "ms", "traceEvents": events, "otherData": {"fingerprint": plan.fingerprint}}
