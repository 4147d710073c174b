"""ir: the program as data, and its sharding semantics.

Input: a traced step with its arguments, and tables of rules (`autoshard.rules`, which this package does not import).
Output: a `Program`; its flat `Graph`, with a `Rule` on every node; the `Layout` (a `Spec` for every value) that
propagation derives from a few decided specs; and the dimension classes that the search chooses mesh axes for.

May import: jaxpr, machine, and what they may.
"""
