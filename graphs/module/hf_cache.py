"""A transformers cache and the states of one bound layer, held equal: read at the first step, kept current after each.

KDA: the cache's recurrent state becomes a view of ours (the values' dims swapped), so neither is copied again; its
short window of raw inputs is copied both ways. MLA: the cache's latent entries are copied into our pages once, those
that the mask shows packed together, and each new entry is appended to the cache as transformers does. A cache that
somebody else wrote to, reordered or replaced in between is read anew. Sequence i has slot i and its own pages.
"""
from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError
from ..bind import Executable


class CacheMirror:
    """The states of the only layer of ``executable`` and the cache layer that they were last equal to."""

    def __init__(self, executable: Executable) -> None:
        spec, self.tensors = executable.plan.spec, executable.ranks[0].tensors
        self.spec, self.layer = spec, spec.layers[0]
        self.kind = spec.model.attention[self.layer]
        self._owner: Any = lambda: None  # weak reference to the cache layer that holds a view of our state
        self._keys: Tensor | None = None
        self._version = -1
        self._positions: Tensor | None = None

    def pull(self, cache: Any, mask: Tensor | None, batch: int) -> Tensor:
        """Brings the cache's content into our storage; returns the position [B, 1] of the row to come.

        Raises BindError: more sequences or tokens than the plan has, or rows that the plan does not take one by one.
        """
        step = self.spec.step
        if batch > step.sequences or step.query != 1:
            raise BindError(f"layer {self.layer}: {batch} sequences, the plan has {step.sequences} with {step.query} "
                            f"rows each\n  fix: plan with step.query 1, or patch with sequences={batch}")
        layer = cache.layers[self.layer]
        if self.kind == "kda":
            if layer.record_past:
                raise BindError(f"layer {self.layer}: the cache records its past, for assisted decoding\n"
                                "  fix: restore() the model for that, or use a plan with step.query above 1")
            self._pull_states(layer, batch)
            # only padding is told from the rest by its position
            return torch.zeros(batch, 1, dtype=torch.int32, device=self.tensors["slots"].device)
        return self._pull_entries(cache, layer, mask, batch)

    def push(self, cache: Any) -> None:
        """Makes the cache hold what the step just run has added."""
        layer = cache.layers[self.layer]
        if self.kind == "kda":
            conv = layer.conv_states[0]
            newest = self._tensor("window")[: conv.shape[0], -1:].transpose(1, 2)
            conv.copy_(torch.cat([conv[..., 1:], newest.to(conv.dtype)], -1))
            return
        assert self._positions is not None, "push without pull"
        latent, batch = self.spec.model.kv_lora_rank, self._positions.shape[0]
        entries = self._entries(batch)
        at = self._positions.long()[:, :, None].expand(-1, -1, entries.shape[-1])
        new = (entries.float().gather(1, at) * self.spec.numerics.kv_scale).to(layer.keys.dtype)[:, None]
        cache.update(new[..., :latent], new[..., latent:], self.layer)
        self._keys = layer.keys
        self._version = 0 if layer.keys.is_inference() else layer.keys._version
        self._positions = self._positions + 1

    def _tensor(self, name: str) -> Tensor:
        return self.tensors[f"L{self.layer}.attn.{name}"]

    def _entries(self, batch: int) -> Tensor:
        """Our cache of the first sequences, [B, context, R + r]; scratch is behind them."""
        cache, step = self._tensor("cache"), self.spec.step
        pages = step.context // step.page_size
        return cache[: batch * pages].view(batch, pages * step.page_size, cache.shape[-1])

    def _pull_states(self, layer: Any, batch: int) -> None:
        state, window = self._tensor("state")[:batch], self._tensor("window")[:batch]
        conv, recurrent = layer.conv_states[0], layer.recurrent_states[0]
        window.copy_(conv[..., -window.shape[1] :].transpose(1, 2))
        ours = state.transpose(-1, -2)
        if recurrent.data_ptr() == ours.data_ptr() and recurrent.shape == ours.shape:
            return
        previous = self._owner()
        if previous is not None and previous is not layer and previous.recurrent_states[0] is not None:
            # it loses the storage, not its content
            previous.recurrent_states[0] = previous.recurrent_states[0].clone()
        state.copy_(recurrent.transpose(-1, -2))
        layer.recurrent_states[0], self._owner = ours, weakref.ref(layer)

    def _same(self, keys: Tensor, length: int) -> bool:
        """Whether ``keys`` is what ``push`` left. In inference mode writes are not counted: there a growing cache is
        another tensor after each change, and a static one is read anew each time."""
        if keys.is_inference():
            return keys is self._keys and keys.shape[2] == length
        return keys is self._keys and keys._version == self._version

    def _pull_entries(self, cache: Any, layer: Any, mask: Tensor | None, batch: int) -> Tensor:
        length = int(layer.get_seq_length())
        if length >= self.spec.step.context:
            raise BindError(f"layer {self.layer}: {length} tokens and one more, the plan serves "
                            f"{self.spec.step.context}\n  fix: plan, or patch, with a longer context")
        seen = visible(mask, batch, length)
        positions = torch.full((batch, 1), length) if seen is None else seen.sum(1, keepdim=True)
        positions = positions.to(device=layer.keys.device, dtype=torch.int32)
        if not (self._same(layer.keys, length) and self._positions is not None
                and torch.equal(self._positions, positions)):
            entries = torch.cat([layer.keys[:, 0, :length], layer.values[:, 0, :length]], -1)
            if seen is not None:
                # visible entries first, in order; what comes after them is past the position
                order = (~seen).to(torch.int8).argsort(dim=1, stable=True)
                entries = entries.gather(1, order[:, :, None].expand_as(entries))
            ours = self._entries(batch)
            ours[:, :length].copy_(entries / self.spec.numerics.kv_scale)
        self._positions = positions
        return positions


def visible(mask: Tensor | None, batch: int, length: int) -> Tensor | None:
    """Which of the first ``length`` entries the newest row may see, [B, length]; None for all.

    ``mask`` is what transformers makes: bool, or numbers of which 0 means seen, [B or 1, heads or 1, rows, entries].
    """
    if mask is None:
        return None
    if mask.dim() != 4:
        raise BindError(f"attention_mask: {mask.dim()} dims, a decoder layer gets [B, 1, rows, entries]\n"
                        "  fix: use attn_implementation 'eager' or 'sdpa'")
    last = mask[:, 0, -1, :length]
    seen = last if mask.dtype == torch.bool else last >= 0
    return seen.expand(batch, -1)
