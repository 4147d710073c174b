"""pages: plans drawn, as SVG, as text, and as one HTML page that needs nothing else.

A `PlanRecord` comes in; pictures, a page and a trace of the predicted step go out, as text. All numbers are the
record's. Whatever a plan names is escaped: names, paths and source lines are data of others.

May import: plan, and what it may.
"""
