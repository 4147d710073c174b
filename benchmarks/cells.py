"""Which models the table has on which machines, each at a size that fills them.

Widths are the published ones; where compiling asks for it the depth is less, and the row says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.machine.mesh_config import MeshConfig
from benchmarks.convolutions import cnn, convnext, segmenter, unet, wide_resnet
from benchmarks.zoo import Model, decoder, translator, vision

RESERVE = 0.05
"""The share of a chip's memory that planning leaves to the runtime."""


@dataclass(frozen=True)
class Column:
    """A machine and the sizes of the axes ``data`` and ``model`` on it."""

    data: int
    model: int
    where: Mapping[str, Any]

    @property
    def platform(self) -> str:
        """Whose compiler it takes: ``tpu`` or ``gpu``."""
        return next(iter(self.where))

    def mesh(self) -> MeshConfig:
        """As autoshard takes it."""
        bare = MeshConfig(axes={"data": self.data, "model": self.model}, **self.where)
        budget = int(bare.mesh().hardware.memory * (1 - RESERVE))
        return bare.model_copy(update={"memory_budget": budget})


COLUMNS: Mapping[str, Column] = {
    "v5e:4x4": Column(4, 4, {"tpu": "v5e:4x4"}),
    "v5e:16x16": Column(32, 8, {"tpu": "v5e:16x16"}),
    "v5p:4x4x4": Column(16, 4, {"tpu": "v5p:4x4x4"}),
    "8xH100": Column(2, 4, {"gpu": "h100"}),
    "4x8xH100": Column(4, 8, {"gpu": "h100", "nodes": 4}),
}

GPT_7B = {"layers": 32, "width": 4096, "heads": 32, "mlp": 16384, "vocab": 50304}
GPT_13B = {"layers": 40, "width": 5120, "heads": 40, "mlp": 20480, "vocab": 50304}
GPT_66B = {"layers": 64, "width": 9216, "heads": 72, "mlp": 36864, "vocab": 50304}
LLAMA_8B = {"layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 128256, "gated": True}
LLAMA_70B = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "mlp": 28672, "vocab": 128256, "gated": True}
GPT_175B = {"layers": 96, "width": 12288, "heads": 96, "mlp": 49152, "vocab": 50304}
LLAMA_405B = {**LLAMA_70B, "layers": 126, "width": 16384, "heads": 128, "mlp": 53248}
MIXTRAL = {"width": 4096, "heads": 32, "kv_heads": 8, "mlp": 14336, "vocab": 32000, "gated": True, "experts": 8}
VIT_G = {"layers": 48, "width": 1664, "heads": 16, "mlp": 8192}
T5_XL = {"layers": 24, "width": 2048, "heads": 32, "mlp": 5120, "vocab": 32128, "gated": True}


@dataclass(frozen=True)
class Cell:
    """A row of the table on a column."""

    row: str
    column: str
    says: str
    """Sizes."""
    build: Callable[[], Model]

    def __str__(self) -> str:
        return f"{self.row} on {self.column}"


def _language(row: str, column: str, make: Callable[..., Model], batch: int, seq: int, **sizes: Any) -> Cell:
    says = f"{sizes['layers']} layers, batch {batch} x {seq}"
    return Cell(row, column, says, lambda: make(batch, seq, **sizes))


def _deep(row: str, small: Mapping[str, Any], large: Mapping[str, Any]) -> list[Cell]:
    """Scanned at full depth."""
    sizes = {
        "v5e:4x4": (32, small), "v5e:16x16": (256, large), "v5p:4x4x4": (256, large),
        "8xH100": (64, small), "4x8xH100": (128, large),
    }  # fmt: skip
    return [_language(f"{row}, scanned", c, decoder, b, 2048, **s) for c, (b, s) in sizes.items()]


def _shallow(row: str, small: Mapping[str, Any], large: Mapping[str, Any]) -> list[Cell]:
    """Unrolled, four layers."""
    sizes = {
        "v5e:4x4": (64, small), "v5e:16x16": (512, large), "v5p:4x4x4": (512, large),
        "8xH100": (128, small), "4x8xH100": (256, large),
    }  # fmt: skip
    return [
        _language(f"{row}, unrolled", c, decoder, b, 2048, **{**s, "layers": 4, "scan": False})
        for c, (b, s) in sizes.items()
    ]


def _pictures(row: str, column: str, batch: int, **sizes: Any) -> Cell:
    says = f"{sizes['layers']} layers, batch {batch} x 224x224"
    return Cell(row, column, says, lambda: vision(batch, 224, 14, 1000, **sizes))


def _convolutions(
    row: str,
    column: str,
    make: Callable[..., Model],
    batch: int,
    size: int,
    widths: int | tuple[int, ...],
    *blocks: Any,
) -> Cell:
    says = f"batch {batch} x {size}x{size}, widths {widths}"
    says += f", blocks {blocks[0]}" if blocks else ""
    return Cell(row, column, says, lambda: make(batch, size, widths, *blocks))


CELLS = (
    *_deep("GPT-3", GPT_7B, GPT_66B),
    *_deep("LLaMA-3", LLAMA_8B, LLAMA_70B),
    *_shallow("GPT-3", GPT_7B, GPT_66B),
    *_shallow("LLaMA-3", LLAMA_8B, LLAMA_70B),
    _language("Mixtral", "v5e:4x4", decoder, 32, 2048, layers=4, **MIXTRAL),
    _language("Mixtral", "8xH100", decoder, 64, 2048, layers=8, **MIXTRAL),
    _language("T5", "v5e:4x4", translator, 64, 1024, **T5_XL),
    _language("T5", "8xH100", translator, 128, 1024, **T5_XL),
    _pictures("ViT", "v5e:4x4", 512, **VIT_G),
    _pictures("ViT", "8xH100", 1024, **VIT_G),
    _convolutions("Wide-ResNet", "v5e:4x4", wide_resnet, 2048, 224, 256, (1, 1, 1, 1)),
    _convolutions("Wide-ResNet", "8xH100", wide_resnet, 4096, 224, 256, (1, 1, 1, 1)),
    _convolutions("U-Net", "v5e:4x4", unet, 4096, 64, (256, 512, 1024), 1),
    _convolutions("U-Net", "8xH100", unet, 8192, 64, (256, 512, 1024), 1),
    _convolutions("CNN, batch 256", "v5e:4x4", cnn, 256, 32, (64, 128, 256)),
    _convolutions("CNN, batch 1024", "v5e:4x4", cnn, 1024, 32, (64, 128, 256)),
    _convolutions("ResNet-50", "v5e:4x4", wide_resnet, 2048, 224, 64, (3, 4, 6, 3)),
    _convolutions("Segmenter", "v5e:4x4", segmenter, 256, 128, (64, 128)),
    _convolutions("ConvNeXt", "v5e:4x4", convnext, 1024, 224, (96, 192), (1, 1)),
)  # fmt: skip
