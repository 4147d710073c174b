"""The JAX platform of a command, and the CPU devices and threads that it has."""

from __future__ import annotations

import os

import jax

from autoshard.errors import ConfigError
from autoshard.train.config import TrainConfig

MAX_VIRTUAL_DEVICES = 1024
"""CPU devices that a process is divided into at most."""
COUNT_FLAG = "xla_force_host_platform_device_count"
"""Among XLA's flags in the environment: another way to say into how many, beside JAX's own."""
THREADS_VARIABLE = "NPROC"
"""Environment variable with the number of threads in which XLA for CPUs runs programs."""
THREADS = 8
"""Of them for each device."""


def use_platform(config: TrainConfig, *, runs: bool = True, processes: int = 1) -> None:
    """Sets the JAX platform, and the number of virtual CPU devices that the run's meshes need.

    Must be called before JAX initializes its backends. A number of CPU devices set by the environment is kept.

    Args:
      runs: False if the steps are only planned or compiled. If every mesh then has a target, accelerators of this
        machine are not initialized.
      processes: among which the devices are divided.

    Raises:
      ConfigError: this machine does not have the platform that the steps are to run on.
    """
    if not runs and all(phase.mesh.target for phase in config.all_phases):
        jax.config.update("jax_platforms", "cpu")
    elif config.platform is not None:
        jax.config.update("jax_platforms", config.platform)
    use_cpu_devices(-(-config.min_devices // processes))
    if runs:
        try:
            jax.devices()
        except RuntimeError as error:
            reason = (str(error).splitlines() or [""])[0]
            at = f"{config.at('platform')}it" if config.platform else "JAX's platform"
            raise ConfigError(f"{at} is not available in this process: {reason}") from None


def use_cpu_devices(count: int) -> None:
    """Divides the processor into so many devices, unless the environment says how many; of no effect elsewhere.

    Each gets `THREADS` threads, unless the environment says how many there are: XLA for CPUs runs the collectives of a
    program that it read from JAX's persistent cache in any order, and a thread waits in each. With one for each device
    all may wait for ever, or for the 40 seconds after which XLA ends the process.
    """
    if count > 1:
        os.environ.setdefault(THREADS_VARIABLE, str(max(os.cpu_count() or 1, THREADS * count)))
    if jax.config.jax_num_cpu_devices < 1 and COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", min(count, MAX_VIRTUAL_DEVICES))
