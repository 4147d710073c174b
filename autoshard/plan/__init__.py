"""plan: what was decided, as frozen data.

From a `Candidate` and its `Search` comes a `PlanRecord`: a spec for every argument and result, the constraints and
islands that lowering needs, predicted cost and memory, reasons, and a fingerprint of the program. It is stored as JSON,
read back strictly, compared with another, checked against a step, and reported as text.

May import: search, transforms, and what they may.
"""
