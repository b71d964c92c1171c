"""Random checkpoint tensors of sensible scale, for benches and tests without a file.

The scales keep a model numerically alive: activations near 1 after each norm, KDA decays between about 0.5
and 1, MXFP4 products like those of a trained matrix. Nothing here is a trained weight.
"""
from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..compiler.recipe import Recipe, differs_by_rank, leaves, shape_of
from .boxes import Box
from .load import TORCH_DTYPES, Loadable, TensorInfo, stored_tensors

# name ending -> (mean, standard deviation); every other float tensor is a matrix: 0, 1/sqrt(columns)
NORMAL: tuple[tuple[str, float, float], ...] = (
    # random routers have no margin: with a small routed share, an expert swapped by rounding is a small error
    (r"routed_expert_norm\.weight$", 0.1, 0.01),
    (r"norm\.weight$", 1.0, 0.1),
    (r"A_log$", 0.0, 0.5),
    # the gate's sigmoid then lies near 0.02, so that a state remembers some tens of tokens
    (r"dt_bias$", -4.0, 0.5),
    (r"conv1d\.weight$", 0.0, 0.3),
    (r"e_score_correction_bias$", 0.0, 0.02),
    (r"embed_tokens\.weight$", 0.0, 1.0),
)
# rms of uniform e2m1 codes, sqrt(68.5 / 8), times that of the scales 1/2, 1, 2, sqrt(5.25 / 3)
_MXFP4_RMS = 2.926 * 1.323


class RandomSource:
    """A ``TensorSource`` of tensors that depend on ``seed`` and their name only, made on ``device``.

    ``tensors`` maps names to (dtype, shape). A read makes the whole tensor and returns a part of it, so the
    ranks of one model agree. CPU and CUDA generators differ: compare only tensors of one kind of device.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.tensors = tensors
        self.seed = seed
        self.device = torch.device(device)

    @classmethod
    def of(cls, recipes: Iterable[Recipe], seed: int = 0, device: str | torch.device = "cpu") -> RandomSource:
        """The source of every tensor that ``recipes`` read, under the first of its names."""
        tensors = {names[0]: (dtype, shape) for names, shape, dtype in stored_tensors(recipes)}
        return cls(tensors, seed, device)

    def find(self, name: str) -> TensorInfo | None:
        """Shape and dtype of a tensor."""
        entry = self.tensors.get(name)
        return TensorInfo(entry[1], entry[0]) if entry else None

    def read(self, name: str, box: Box) -> Tensor:
        """The part ``box`` of tensor ``name``."""
        return self.whole(name)[tuple(slice(*r) for r in box)]

    def whole(self, name: str) -> Tensor:
        """Tensor ``name``, on the source's device."""
        dtype, shape = self.tensors[name]
        out = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
        return fill(out, name, self.seed)


class RankRandom:
    """Random weights of one rank, made at their local shapes in one pass: for timing at full size.

    Fast, and no model's: what every rank holds is equal on all, so that they choose the same experts, but their parts
    of a tensor are not parts of one. ``RandomSource`` makes weights of one model.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def load(self, weights: Mapping[str, Loadable], rank: int = 0, *, device: str | torch.device = "cpu",
             progress: bool = False) -> dict[str, Tensor]:
        """Every weight by its name, on ``device``."""
        made = {}
        for name, weight in weights.items():
            out = torch.empty(shape_of(weight.recipe), dtype=TORCH_DTYPES[weight.dtype], device=device)
            seed = self.seed + (rank if differs_by_rank(weight.recipe) else 0)
            made[name] = fill(out, next(leaves(weight.recipe)).names[0], seed)
        return made


def fill(out: Tensor, name: str, seed: int) -> Tensor:
    """Fills ``out`` as befits the checkpoint tensor ``name``; depends on name, seed and shape only."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    if out.dtype == torch.uint8 and name.endswith("_scale"):
        # one scale per 32 columns; about 2^-7 for 3,584 columns, one octave either way
        octaves = round(math.log2(_MXFP4_RMS * (out.shape[-1] * 32) ** 0.5))
        return out.random_(126 - octaves, 129 - octaves, generator=generator)
    if out.dtype == torch.uint8:
        return out.random_(0, 256, generator=generator)
    plain = (0.0, out.shape[-1] ** -0.5)
    mean, deviation = next(((m, d) for pattern, m, d in NORMAL if re.search(pattern, name)), plain)
    return out.normal_(mean, deviation, generator=generator)
