"""ir: the program as data, and what sharding means for it.

In comes a jaxpr with its arguments, and a table of rules (the rules themselves are `autoshard.rules`, which this
package does not know). Out go a `Program`, its flat `Graph` with a `Rule` for every equation, the `Layout` that
propagation makes of a choice of specs, and the dimension classes that the search chooses over.

May import: jaxpr, machine, and what they may.
"""
