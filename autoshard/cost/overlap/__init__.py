"""overlap: which transfers run beside products, and what of their seconds a device waits for.

XLA starts a collective as early as its operand is there, waits for it as late as its result is read, and computes
meanwhile. Between two products of a chain there is nothing to compute, so that activations are waited for.

In: a `Graph`. Out: how long products run beside each reshard and each copy to the host (`with_hidden_transfers`), what
of a reshard's seconds is waited for (`seconds_waited`), and the values that products wait for (`exposed_values`).

May import: ir, and what it may; of cost nothing but this package.
"""
