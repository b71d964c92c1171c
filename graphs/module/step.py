"""``DecodeStep``: launch plans as a torch module that an engine can hold, load and call.

Its parameters have the checkpoint's names and shapes. Weights as the kernels read them, states, caches, arenas and
step inputs are non-persistent buffers. One plan serves one number of sequences; a module holds one or more plans,
which share weights, states and caches, and a step runs the smallest that fits, its spare rows being padding. On a GPU
each plan is one captured CUDA graph. Everything a step does was decided when its plan was compiled.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compiler.errors import BindError
from ...compiler.plan import LaunchPlan
from ..bind import Executable, require_plan
from ..buckets import Buckets, bind_buckets, capture_buckets
from ..capture import CapturedStep
from ..load import StateDictSource, TensorSource, source_of
from ..transport import Transport
from .addresses import Entry, Held, Table, users
from .inputs import run_step
from .parameters import Parameters, Tree, hang, lay_parameters, pull_back, write_packed

STORAGE = "storage"  # the submodule of the buffers


class DecodeStep(Tree):
    """A decode step of one model. Build it with ``from_plan``; call ``step``.

    Moving the module (``.to()``) or setting one of its tensors makes the next step raise AddressError.
    ``load_state_dict``, with ``assign=True`` too, writes in place and needs nothing more.
    """

    def __init__(self, buckets: Buckets, parameters: Parameters | None, prefix: str = "") -> None:
        """Called by ``from_plan``. ``prefix`` is left out of the names of parameters."""
        super().__init__(self._touch)
        self.prefix = prefix
        self._hold(buckets, parameters)
        self.register_load_state_dict_post_hook(_prepare_after_load)

    @classmethod
    def from_plan(cls, plan: LaunchPlan | Sequence[LaunchPlan], checkpoint: TensorSource | Mapping[str, Tensor], *,
                  device: str | torch.device = "cpu", transport: Transport | str = "emulated",
                  parameters: bool | None = None, capture: bool | None = None, prefix: str = "") -> Any:
        """Binds ``plan``, or one plan for each bucket, to the weights of ``checkpoint`` (a Checkpoint or a state dict).

        ``parameters`` False keeps only what the kernels read: then ``load_state_dict`` has nothing to load into, and
        ``reload`` reads another checkpoint. The default is True where this process has the whole model. ``capture``
        makes the CUDA graphs now; the default is True on a GPU. With a ``transport`` of ``graphs/distributed`` this
        process has its own rank, on its group's device, and every rank calls the same with the same plans.

        Raises BindError (plans that are not of one model, a device that cannot run them), CheckpointError.
        """
        plans = [require_plan(one) for one in (plan if isinstance(plan, (list, tuple)) else [plan])]
        _check_one_model(plans)
        source = source_of(checkpoint)
        group = getattr(transport, "group", None)
        if group is None:
            buckets = bind_buckets(plans, source, device=device, transport=transport)
        else:
            buckets = _bind_in_group(plans, source, group, transport)
        first = buckets.executables[0]
        whole = len(first.ranks) == plans[0].spec.parallel.tp
        if parameters and not whole:
            raise BindError(f"parameters of whole tensors on one of {plans[0].spec.parallel.tp} ranks\n"
                            "  fix: pass parameters=False; this rank's part is loaded from the checkpoint")
        parts = None
        if whole if parameters is None else parameters:
            parts = lay_parameters(first.plan.weights, [rank.tensors for rank in first.ranks], source)
        module = cls(buckets, parts, prefix)
        if module.device.type == "cuda" if capture is None else capture:
            module.capture()
        return module

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise BindError("a bound step holds addresses, and is neither copied nor pickled\n"
                        "  fix: save its state_dict(), and build another with from_plan")

    buckets: Buckets
    _parameters_kept: Parameters | None

    @property
    def executables(self) -> tuple[Executable, ...]:
        """The bound plan of each bucket, most sequences first."""
        return self.buckets.executables

    @property
    def plans(self) -> tuple[LaunchPlan, ...]:
        """One for each bucket, most sequences first."""
        return tuple(executable.plan for executable in self.executables)

    @property
    def device(self) -> torch.device:
        """Where the launches run."""
        return self.executables[0].ranks[0].arena.device

    @property
    def graphs(self) -> tuple[CapturedStep, ...]:
        """The captured step of each plan; empty where steps run launch by launch."""
        return self.buckets.steps

    @property
    def addresses(self) -> Table:
        """Where every tensor was when it was bound, for the debugger."""
        return self._table

    def capture(self) -> None:
        """One CUDA graph for each plan, largest first, over one memory pool. Leaves states and caches as they are."""
        self.verify_addresses()
        self.buckets = capture_buckets(self.buckets)

    def step(self, rows: Tensor, positions: Tensor, slots: Tensor, page_table: Tensor | None = None,
             accepted: Tensor | None = None, *, blocks: Sequence[Tensor] = ()) -> dict[str, Tensor]:
        """One step for B sequences of l rows; B at most that of the largest plan, l at most the plans' ``query``.

        ``rows``: tokens i32 [B, l] or, where the plan reads the residual stream, hidden [B, l, D], with the finished
        AttnRes ``blocks`` of the same shape. positions i32 [B, l]; slots i32 [B]; page_table i32 [B, pages] (where
        there is an MLA layer); accepted i32 [B] (verify steps: how many rows of the sequence's last step were kept,
        1 at first). -1 is padding everywhere. Values are range-checked when they come from the CPU: reading them
        back from a GPU would stop it.

        Returns the plan's outputs as [B, l, ...]: views that the next step writes over.
        Raises BindError (inputs that do not fit) and AddressError (see ``verify_addresses``).
        """
        if not self._verified:
            self.verify_addresses()
        source = self.executables[0].plan.spec.step.source
        return run_step(self.buckets, {
            "tokens" if source == "tokens" else "hidden": rows, "positions": positions, "slots": slots,
            "page_table": page_table, "accepted": accepted, **{f"block{i}": block for i, block in enumerate(blocks)}})

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """``step``."""
        return self.step(*inputs, **named)

    def reset(self, slot: int) -> None:
        """Empties the state of ``slot`` for a new sequence."""
        self.executables[0].reset(slot)

    def prepare(self) -> None:
        """Puts parameters back where the kernels read them and makes the packed weights again, in the same storage.

        ``load_state_dict`` calls it. Call it after any other change of parameters.
        """
        parts = self._kept_parameters("call reload(checkpoint)")
        with torch.no_grad():
            pull_back(self, parts.all, self.prefix)
        for executable, names in self._own_weights():
            packed = names & parts.packed if executable is self.executables[0] else names
            _write_weights(executable, packed, StateDictSource(parts.all))
        self._refresh()

    def reload(self, checkpoint: TensorSource | Mapping[str, Tensor]) -> None:
        """New weights from a checkpoint, into the storage that the kernels and the graphs read."""
        source = source_of(checkpoint)
        for executable, names in self._own_weights():
            _write_weights(executable, names, source)
        for name, tensor in (self._parameters_kept.apart if self._parameters_kept else {}).items():
            tensor.copy_(source.read(name, tuple((0, n) for n in tensor.shape)))
        self._refresh()

    def verify_addresses(self) -> None:
        """Raises AddressError when a tensor is no longer where the bound launches and graphs use it.

        A step does so by itself after a load, a move, or a tensor of the module that was set; memory that was
        released under a tensor (a storage that was resized) is seen by this call only.
        """
        self._verified = False
        self._table.check()
        self._verified = True

    def rebind(self) -> None:
        """Binds the plans again, and captures them, where the parameters are now; after a sleep or a move.

        States and caches start empty. Raises BindError when the module keeps no parameters.
        """
        self._kept_parameters("build it again with from_plan")
        plans, capturing = self.plans, bool(self.graphs)
        held = {name: look_up() for name, look_up in self._lookups.items()}
        state = {name: tensor.data for name, tensor in held.items() if tensor is not None}
        # what was bound before makes room first
        self._modules.pop(STORAGE)
        self.buckets, self._parameters_kept, self._table = Buckets(()), None, Table(())
        fresh = DecodeStep.from_plan(plans, state, device=next(iter(state.values())).device, capture=False)
        self._hold(fresh.buckets, fresh._parameters_kept)
        if capturing:
            self.capture()

    def _hold(self, buckets: Buckets, parameters: Parameters | None) -> None:
        """Registers every tensor of ``buckets`` and takes the table of their addresses."""
        self.buckets = buckets
        self._parameters_kept = parameters
        self._modules.clear()
        self._parameters.clear()
        entries = [entry for executable in self.executables for entry in self._register(executable)]
        self._lookups: dict[str, Held] = {}
        if parameters is not None:
            self._lookups = hang(self, parameters.all, self.prefix)
            launches = users(self.plans[0])
            entries += [Entry(name, tensor.data_ptr(), tensor.nbytes, self._lookups[name],
                              launches.get(parameters.parts_of[name], ()))
                        for name, tensor in parameters.views.items()]
        self._table = Table(tuple(entries))
        self._refresh()

    def _register(self, executable: Executable) -> Iterator[Entry]:
        """Every storage of ``executable`` as a buffer; what it shares is registered with the first that has it."""
        plan = executable.plan
        launches = users(plan)
        for rank in executable.ranks:
            tensors = {"arena": rank.arena}
            tensors |= {name: rank.tensors.get(name, rank.buffers[name])
                        for name, buffer in plan.buffers.items() if buffer.kind != "arena"}
            owner = self.at([STORAGE, f"sequences{plan.spec.step.sequences}", f"rank{rank.index}"])
            for name, tensor in tensors.items():
                if executable is not self.executables[0] and self._shares(rank.index, name, tensor):
                    continue
                leaf = name.replace(".", "__")  # a buffer's name may begin with another's
                owner.register_buffer(leaf, tensor, persistent=False)
                used = launches.get(name, tuple(launch.id for launch in plan.launches))
                yield Entry(name, tensor.data_ptr(), tensor.nbytes, partial(owner._buffers.get, leaf), used)

    def _shares(self, index: int, name: str, tensor: Tensor) -> bool:
        other = next(rank for rank in self.executables[0].ranks if rank.index == index).buffers.get(name)
        return other is not None and other.data_ptr() == tensor.data_ptr()

    def _own_weights(self) -> Iterator[tuple[Executable, set[str]]]:
        """Each executable with the weights that it does not share with the first."""
        for executable in self.executables:
            rank = executable.ranks[0]
            yield executable, {name for name in executable.plan.weights if executable is self.executables[0]
                               or not self._shares(rank.index, name, rank.buffers[name])}

    def _kept_parameters(self, fix: str) -> Parameters:
        if self._parameters_kept is None:
            raise BindError(f"this module keeps no parameters\n  fix: {fix}")
        return self._parameters_kept

    def _refresh(self) -> None:
        """Takes the versions that packed weights now correspond to."""
        parts = self._parameters_kept
        self._table = self._table.with_sources({name: self._lookups[name] for name in (parts.apart if parts else ())})
        self._touch()

    def _touch(self) -> None:
        self.__dict__["_verified"] = False


def _bind_in_group(plans: Sequence[LaunchPlan], source: TensorSource, group: Any, transport: Any) -> Buckets:
    """This process's rank of each plan, after all ranks have agreed."""
    from ..distributed.rank import bind_rank

    bound: list[Executable] = []
    for plan in sorted(plans, key=lambda p: -p.spec.step.sequences):
        bound.append(bind_rank(plan, source, group, transport, shared=bound[0] if bound else None))
    return Buckets(tuple(bound))


def _prepare_after_load(module: DecodeStep, keys: Any) -> None:
    if module._parameters_kept is not None:
        module.prepare()
    elif keys.unexpected_keys:
        module._kept_parameters("call reload(state_dict)")


def _write_weights(executable: Executable, names: set[str] | frozenset[str], source: TensorSource) -> None:
    write_packed(executable.plan.weights, names, {rank.index: rank.tensors for rank in executable.ranks}, source)


def _check_one_model(plans: Sequence[LaunchPlan]) -> None:
    """Raises BindError unless the plans differ in nothing but their number of sequences."""
    def shape(plan: LaunchPlan) -> tuple[Any, ...]:
        spec, step = plan.spec, plan.spec.step
        return (spec.model, spec.layers, spec.parallel, spec.gpu, spec.numerics, step.query, step.context,
                step.page_size, step.outputs, step.source)

    if not plans:
        raise BindError("no plan\n  fix: pass a launch plan, or one for each bucket")
    if len({shape(plan) for plan in plans}) > 1 or len({p.spec.step.sequences for p in plans}) < len(plans):
        raise BindError("the plans are not the buckets of one step\n"
                        "  fix: compile them from one plan file, with another step.sequences each")
