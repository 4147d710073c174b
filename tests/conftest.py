"""Eight virtual CPU devices for every test, and properties that draw the same examples each time.

What is compiled runs once or a few times: LLVM's optimizations, of which sharding knows nothing, are left out, for they
take longer than they save. Not where there is another compiler than that for CPUs: it does as it does for users.
"""

import importlib.util
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUM_CPU_DEVICES"] = "8"
if not any(map(importlib.util.find_spec, ("libtpu", "jax_cuda13_plugin"))):
    os.environ["XLA_FLAGS"] = " ".join(
        (
            "--xla_backend_optimization_level=0",
            "--xla_llvm_disable_expensive_passes=true",
            *os.environ.get("XLA_FLAGS", "").split(),
        )
    )

from hypothesis import settings

settings.register_profile("autoshard", derandomize=True, deadline=None)
settings.load_profile("autoshard")
