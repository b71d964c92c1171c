"""A transformers Kimi-Linear whose decoder layers decode with launch plans: patched in place, and restored.

A patched layer still is the same module with the same parameters; only its ``forward`` is ours. Rows that continue a
cache one by one go through the layer's plan, prompts and everything else through transformers. The weights are there
twice meanwhile: transformers' for prompts, the packed ones for decoding.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError
from ...compiler.model import model_from_config
from ...compiler.plan import LaunchPlan
from ...compiler.recipe import Recipe
from ...compiler.spec import Choices, Numerics, Parallel, Spec, Step
from ..load import TORCH_DTYPES, stored_tensors
from .layer import DecodeLayer

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
PAGE = 64
# of a decoder layer: its name in transformers 5.24, and before
CACHE = ("cache", "past_key_values")


class Patched:
    """Holds the patched layers of ``model``; ``restore()``, or the end of a ``with``, gives transformers' back."""

    def __init__(self, model: Any, layers: Mapping[int, DecodeLayer]) -> None:
        self.model, self.layers = model, dict(layers)
        forwards = []
        for index, layer in self.layers.items():
            original = model.model.layers[index]
            if "forward" in vars(original):
                raise BindError(f"layer {index} is patched already\n  fix: restore() the first patch")
            forwards.append((original, _decode_or_prefill(original.forward, layer, index)))
        for original, forward in forwards:
            original.forward = forward

    def reload(self) -> None:
        """Reads the model's weights again, in place; after they were trained, loaded or merged."""
        tensors = stored_state(self.model)
        for layer in self.layers.values():
            layer.reload(as_read(tensors, [w.recipe for w in layer.plans[0].weights.values()]))

    def restore(self) -> None:
        """Gives every layer its own forward again; a text that was begun can go on."""
        for index in self.layers:
            vars(self.model.model.layers[index]).pop("forward", None)
        self.layers = {}

    def __enter__(self) -> Patched:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.restore()


def patch_model(model: Any, compile_layer: Callable[[Spec], LaunchPlan], *, sequences: int, context: int,
                gpu: str) -> Patched:
    """Plans and patches every decoder layer of ``model``. Raises BindError: not a model that can be planned so."""
    if getattr(getattr(model, "config", None), "model_type", None) != "kimi_linear" or not hasattr(model, "lm_head"):
        raise BindError(f"{type(model).__name__} is not a KimiLinearForCausalLM of transformers\n"
                        "  fix: for Kimi K3 build a DecodeStep from a plan and its checkpoint")
    if (gpu == "cpu") != (model.device.type == "cpu"):
        raise BindError(f"the model is on {model.device}, the plans would be for {gpu}\n"
                        "  fix: pass gpu='cpu' for a model on the CPU, and the name of its GPU (gpu='h200') otherwise")
    if not (sequences >= 1 and context >= 1):
        raise BindError(f"{sequences} sequences of {context} tokens\n  fix: pass sequences and context of 1 or more")
    tensors = stored_state(model)
    layers = {}
    for index in range(model.config.num_hidden_layers):
        plan = compile_layer(layer_spec(model, index, sequences=sequences, context=context, gpu=gpu))
        source = as_read(tensors, [weight.recipe for weight in plan.weights.values()])
        layers[index] = DecodeLayer.from_plan(plan, source, device=model.device, parameters=False)
    return Patched(model, layers)


def layer_spec(model: Any, index: int, *, sequences: int, context: int, gpu: str) -> Spec:
    """The Spec of one decoder layer of a transformers model."""
    dtype = DTYPES.get(model.dtype)
    if dtype is None:
        raise BindError(f"the model is {model.dtype}\n  fix: load it with dtype torch.bfloat16 or torch.float32")
    config = model_from_config(model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")})
    step = Step(sequences, 1, -(-context // PAGE) * PAGE, PAGE, ("stream",), "hidden")
    numerics = Numerics(dtype, dtype, 1.0, "fp32", "bf16")
    return Spec(config, (index,), Parallel(1, "tp"), step, gpu, numerics, "auto", Choices("auto", "auto", "auto"),
                (sequences,))


def stored_state(model: Any) -> dict[str, Tensor]:
    """The model's tensors by their names in a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, model.state_dict())


def as_read(tensors: Mapping[str, Tensor], recipes: Iterable[Recipe]) -> dict[str, Tensor]:
    """What ``recipes`` read, in the dtype that they read: transformers widens some tensors that are stored narrow.

    Raises BindError when that would lose something.
    """
    found = {}
    for names, _, dtype in stored_tensors(recipes):
        name = next((n for n in names if n in tensors), names[0])
        if name in tensors:
            found[name] = tensors[name].detach().to(TORCH_DTYPES[dtype])
            if not torch.equal(found[name].to(tensors[name].dtype), tensors[name]):
                raise BindError(f"{name} is {tensors[name].dtype}, the plan reads {dtype} and would lose digits\n"
                                "  fix: round the weight to that dtype first, or load the model in float32")
    return found


def _decode_or_prefill(original: Callable[..., Tensor], layer: DecodeLayer, index: int) -> Callable[..., Tensor]:
    """``original`` for prompts; the plan for rows that continue a cache, whatever transformers calls it.

    Raises BindError: no layer whose cache could be found, which would never decode with its plan.
    """
    signature = inspect.signature(original)
    if not set(CACHE) & signature.parameters.keys():
        raise BindError(f"layer {index} of this transformers takes {', '.join(signature.parameters)}, no cache\n"
                        f"  fix: install a transformers whose Kimi-Linear layers take {' or '.join(CACHE)}")

    def forward(*given: Any, **named: Any) -> Tensor:
        taken = signature.bind(*given, **named).arguments
        taken |= taken.pop("kwargs", {})
        rows, cache = taken["hidden_states"], next((taken[n] for n in CACHE if taken.get(n) is not None), None)
        if rows.shape[1] == 1 and cache is not None and _continues(cache, index):
            return layer(rows, taken.get("attention_mask"), taken.get("position_ids"), cache, taken.get("use_cache"))
        return original(*given, **named)

    return forward


def _continues(cache: Any, index: int) -> bool:
    """Whether the cache has something of this layer already; a first row is a prompt."""
    if index >= len(cache.layers):
        return False
    layer = cache.layers[index]
    if hasattr(layer, "has_previous_state"):
        return bool(layer.has_previous_state[0])
    return int(layer.get_seq_length()) > 0
