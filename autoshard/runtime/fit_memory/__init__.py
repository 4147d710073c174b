"""fit_memory: plans within the memory budget.

In: a traced step and its options. Out: the fastest plan that fits: as it is, with passes that save memory or other
values held (`within_budget`, `held_by_value`), in micro-batches (`in_parts`), with the optimizer's state on the host
(`on_host`); or, where nothing fits, the demand that a user could drop (`relaxation`).

May import: search, plan, and what they may; options and stages of runtime.
"""
