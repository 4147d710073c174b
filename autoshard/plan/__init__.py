"""plan: what was decided, as frozen data.

In come a `Candidate` and its `Search`. Out goes a `PlanRecord`: a spec for every argument and result, the constraints and
islands that lowering needs, costs, memory, reasons, and a fingerprint of the program. It is stored as JSON, read back
strictly, compared with another, checked against a step, and set as a report in text or HTML.

May import: search, and what it may.
"""
