"""The picture of a plan in the README: memory over one step of eight billion parameters on 256 TPU v5e chips.

    python -m docs.plan_picture

plans `configs/train/decoder-8b.yaml`, which needs no TPU, and writes `docs/plan-memory.svg`.
"""

from __future__ import annotations

from pathlib import Path

from autoshard.train.config import TrainConfig
from autoshard.train.phase import plan_phase

ROOT = Path(__file__).parent.parent


def main() -> None:
    recipe = TrainConfig.load(ROOT / "configs/train/decoder-8b.yaml")
    plan_phase(recipe, recipe.all_phases[0]).plan.plot("memory", ROOT / "docs/plan-memory.svg")


if __name__ == "__main__":
    main()
