"""pages: plans drawn, as SVG, as text, and as one HTML page that needs nothing else.

A `PlanRecord` comes in, and for some a compiled step; pictures, a page and a trace of the predicted step go out, as
text. All numbers are the record's. Whatever a plan names is escaped: names, paths and source lines are data of others.

May import: backend, and what it may.
"""
