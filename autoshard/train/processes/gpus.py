"""The GPUs of this machine, shared among the processes that `launch` starts on it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

from autoshard.errors import ConfigError

SHARE = "JAX_LOCAL_DEVICE_IDS"
"""Environment variable from which `jax.distributed.initialize` takes which of the visible GPUs are the process's."""
_COUNT = "import jax; found = jax.local_devices(); print(len(found) if found[0].platform == 'gpu' else 0)"


def gpus_here() -> int:
    """The number of GPUs that JAX finds: asked in a process of its own, which leaves their memory again."""
    if not any(kind in plugin.name for plugin in entry_points(group="jax_plugins") for kind in ("cuda", "rocm")):
        return 0
    asked = subprocess.run([sys.executable, "-c", _COUNT], check=False, capture_output=True, text=True)
    return int(asked.stdout) if asked.returncode == 0 else 0


def gpu_shares(gpus: int, processes: int) -> list[dict[str, str]]:
    """The environment variables by which each of the processes gets its own GPUs, neighbours; none without GPUs.

    Raises:
      ConfigError: they cannot all get as many.
    """
    if gpus % processes:
        fitting = [str(n) for n in range(1, gpus + 1) if gpus % n == 0]
        raise ConfigError(
            f"--processes {processes}: {gpus} GPUs cannot be divided evenly among them; start {' or '.join(fitting)}, "
            "or name fewer GPUs in CUDA_VISIBLE_DEVICES"
        )
    each = gpus // processes
    return [{SHARE: ",".join(map(str, range(n * each, (n + 1) * each)))} if each else {} for n in range(processes)]
