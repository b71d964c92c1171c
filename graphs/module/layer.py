"""``DecodeLayer``: one decoder layer as a module with the call signature of a Hugging Face decoder layer in decode.

Rows of the residual stream in, rows of the residual stream out. States live in the layer; a transformers ``cache``
that is passed is read at its first step and kept current after each (``hf_cache.py``). For Kimi K3 the finished
AttnRes blocks are an argument: the input of each layer that begins a block is one.

Called by ``torch.export`` the layer runs as operators, one for each launch of its plan (``launch_ops.py``).
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError
from ...compiler.plan import LaunchPlan
from ..bind import require_plan
from ..buckets import Buckets
from ..load import TensorSource
from .hf_cache import CacheMirror
from .launch_ops import Program, register
from .parameters import Parameters
from .step import STORAGE, DecodeStep


class DecodeLayer(DecodeStep):
    """A decoder layer in decode. Build it with ``from_plan`` from a plan of one layer with ``step.source: hidden`` and
    ``step.outputs: [stream]``; parameter names are those of the checkpoint without the layer's prefix.

    ``plain`` spells arithmetic that any runtime has out when the layer is exported; set it before.
    """

    plain: bool = False
    program: Program | None = None
    mirror: CacheMirror

    @classmethod
    def from_plan(cls, plan: LaunchPlan | Sequence[LaunchPlan], checkpoint: TensorSource | Mapping[str, Tensor], *,
                  prefix: str | None = None, **how: Any) -> Any:
        """As ``DecodeStep.from_plan``. Raises BindError: the plan is not of one layer."""
        first = plan[0] if isinstance(plan, (list, tuple)) and plan else plan
        spec = require_plan(first).spec
        if len(spec.layers) != 1 or spec.step.source != "hidden" or spec.step.outputs != ("stream",):
            raise BindError(f"a plan of layers {list(spec.layers)} from {spec.step.source} to "
                            f"{', '.join(spec.step.outputs)} is not one layer\n"
                            "  fix: compile with model.layers=[i], step.source=hidden and step.outputs=[stream]")
        own = f"{spec.model.tensor_prefix}layers.{spec.layers[0]}."
        return super().from_plan(plan, checkpoint, prefix=own if prefix is None else prefix, **how)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
                cache: Any = None, use_cache: bool | None = False, *, slots: Tensor | None = None,
                page_table: Tensor | None = None, accepted: Tensor | None = None, blocks: Sequence[Tensor] = (),
                past_key_values: Any = None, **_: Any) -> Tensor:
        """``hidden_states`` [B, l, D] to the stream behind the layer [B, l, D].

        With a transformers ``cache``: one row of each sequence, whose positions the cache and ``attention_mask``
        tell; sequence i has slot i. Without: ``position_ids`` [B, l], -1 for padding, and where not given ``slots``
        are 0 to B - 1 and the pages those of the slot, in order. ``blocks`` as in ``DecodeStep.step``.
        ``past_key_values`` is the cache's older name; other arguments of a Hugging Face layer do nothing here.

        The result is a tensor of its own. Raises BindError and AddressError as ``DecodeStep.step`` does.
        """
        batch, device = hidden_states.shape[0], self.device
        cache = past_key_values if cache is None else cache
        if cache is not None:
            position_ids = self.mirror.pull(cache, attention_mask, batch)
        elif position_ids is None:
            raise BindError("a layer without a cache does not know its positions\n  fix: pass position_ids")
        positions = position_ids.to(torch.int32).expand(hidden_states.shape[:2])
        if slots is None:
            slots = torch.arange(batch, dtype=torch.int32, device=device)
        spec = self.plans[0].spec.step
        if page_table is None and "page_table" in self.plans[0].inputs:
            pages = -(-spec.context // spec.page_size)
            page_table = slots[:, None] * pages + torch.arange(pages, dtype=torch.int32, device=device)
        if torch.compiler.is_compiling():
            return self._run_operators(hidden_states, positions, slots, page_table, accepted, blocks)
        out = self.step(hidden_states, positions, slots, page_table, accepted, blocks=blocks)["stream"].clone()
        if cache is not None:
            self.mirror.push(cache)
        return out

    def _hold(self, buckets: Buckets, parameters: Parameters | None) -> None:
        super()._hold(buckets, parameters)
        self.mirror = CacheMirror(self.executables[0])

    def register_operators(self) -> Program:
        """Defines the operators of the largest plan; an export needs them. Raises BindError for several ranks."""
        if self.program is None:
            self.program = register(self.plans[0])
        return self.program

    def _run_operators(self, hidden: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor | None,
                       accepted: Tensor | None, blocks: Sequence[Tensor]) -> Tensor:
        """The plan's launches as operators over the module's buffers; shapes are the plan's own."""
        plan, step = self.plans[0], self.plans[0].spec.step
        if self.program is None:
            raise BindError("the layer has no operators yet\n  fix: call register_operators() before exporting it")
        if hidden.shape[:2] != (step.sequences, step.query):
            raise BindError(f"hidden: {tuple(hidden.shape[:2])} rows, an exported layer has "
                            f"{(step.sequences, step.query)}\n  fix: export with tensors of that size, padded with -1")
        owner = self.get_submodule(f"{STORAGE}.sequences{step.sequences}.rank0")
        named = {name: getattr(owner, name.replace(".", "__")) for name, buffer in plan.buffers.items()
                 if buffer.kind in ("weight", "state", "cache") or name == "rank"}
        given = {"hidden": hidden, "positions": positions, **{f"block{i}": block for i, block in enumerate(blocks)}}
        named |= {name: tensor.flatten(0, 1) for name, tensor in given.items()}
        kept = {"slots": slots, "page_table": page_table, "accepted": accepted}
        named |= {name: tensor for name, tensor in kept.items() if tensor is not None}
        stream = self.program.run(named, plain=self.plain)["stream"]
        return stream.unflatten(0, (step.sequences, step.query))
