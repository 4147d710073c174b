"""pipelining: a loop over micro-batches whose iterations run a chain of layers, run as a pipeline over one mesh axis.

Input: a jaxpr with such a loop, a `Schedule`, the mesh axis of the stages. Output: the loop found and understood
(`find_chain`), its price (`price_pipeline`), and the jaxpr with it as one `jax.shard_map` that is manual over that axis
alone (`pipelined_jaxpr`).

May import: search, and what it may.
"""
