"""From a CuTe DSL kernel to a launch: compile once for a target, keep the cubin, launch it through the driver.

Contract of a kernel file. A kernel is ``kernel(arguments, names, p)``, decorated by ``@cute.kernel``: ``arguments``
holds one pointer to global memory for each tensor of ``KernelLaunch.arguments`` and one ``Int64`` for each integer
(an address in a peer's memory, for one), in that order; ``names`` are their names (``at = named(names, arguments)``);
``p`` is a frozen dataclass of everything static: sizes, strides, switches. Dynamic shared memory is
``cute.arch.get_dyn_smem`` and what lies where is the kernel's own business, ``KernelLaunch.shared`` bytes in all.

What is compiled depends on the source text of the kernel's module and of the ``ops_cute`` modules that it uses, on
``p``, on the dtypes and alignments of the arguments, on the threads and the cluster, on the target and on the DSL's
version. These make the content key; what cannot be told by its text (a tensor, a function, an open file in ``p``) is
refused. Nothing of it is an address or a size of the data, so that equal launches share one compiled kernel.

The DSL compiles, and no more: the cubin is loaded and launched by the CUDA driver. So the same code serves a GPU that
is here and the cross-compile of one that is not, a launch has no host code of the DSL in it, and it is captured in a
CUDA graph like any other: it launches on torch's current stream, allocates nothing and decides nothing.
"""
from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import inspect
import math
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from types import ModuleType, SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.base_dsl.compiler import DumpDir
from cutlass.cute.runtime import make_ptr

from ..compiler.errors import BindError
from ..compiler.knobs import carveout
from . import compile_pool, cubin_cache

DTYPES: dict[torch.dtype, Any] = {
    torch.bfloat16: cutlass.BFloat16, torch.float32: cutlass.Float32, torch.float16: cutlass.Float16,
    torch.int32: cutlass.Int32, torch.int64: cutlass.Int64, torch.uint8: cutlass.Uint8, torch.int16: cutlass.Int16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
}
# widest load of one thread; a pointer is never taken to be aligned to more
ALIGNMENT = 16
PORTABLE_CLUSTER = 8  # CTAs; more needs the function's consent
PORTABLE_SHARED = 48 * 1024


def start_dependents(dependent: bool) -> None:
    """Lets the next kernel start while this one runs. Called first thing, or by a kernel that its menu calls ``late``
    behind its wait: it gains nothing itself, but settles what ran before it for the kernels behind."""
    if dependent:
        cute.arch.griddepcontrol_launch_dependents()


def await_producers(dependent: bool) -> None:
    """Blocks until every earlier kernel has finished. Only weights, what no kernel of a step writes and what is settled
    (``Call.settled``) may be read before it, and nothing that an earlier kernel may still read may be written."""
    if dependent:
        cute.arch.griddepcontrol_wait()


def named(names: Sequence[str], arguments: Sequence[Any]) -> SimpleNamespace:
    """The arguments of a kernel by name, while it is traced."""
    return SimpleNamespace(**dict(zip(names, arguments, strict=True)))


@dataclass(frozen=True)
class KernelLaunch:
    """One bound launch: call it to enqueue it on the current stream. ``parameters`` is the kernel's ``p``."""

    kernel: Any
    grid: tuple[int, int, int]
    threads: int
    arguments: Mapping[str, torch.Tensor | int]
    parameters: Any
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0  # bytes of dynamic shared memory
    dependent: bool = False  # programmatic dependent launch edges before and after
    blocks_per_sm: int = 1  # that the registers must allow for; the assembler spills less when it knows
    # not an argument: a launch made from another by ``replace`` is prepared for itself
    _ready: list[Any] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        assert all(n >= 1 for n in (*self.grid, *self.cluster)), f"grid {self.grid}, cluster {self.cluster}"
        whole = all(n % c == 0 for n, c in zip(self.grid, self.cluster, strict=True))
        assert whole, f"grid {self.grid} is not whole clusters of {self.cluster}"

    def __call__(self) -> None:
        if not self._ready:
            self._ready.append(_Prepared(self))
        self._ready[0].launch()

    def signature(self) -> str:
        """Equal for two launches that share one compiled kernel on this machine's GPU."""
        return content_key(self, target_of(torch.device("cuda")))

    def compile(self) -> None:
        """Compiles the kernel for this machine's GPU, where that is still to be done."""
        compile_kernel(self, target_of(torch.device("cuda")))

    @staticmethod
    def compile_many(launches: Sequence[KernelLaunch], workers: int) -> None:
        """The same for all of ``launches``, side by side in up to ``workers`` processes."""
        compile_kernels(launches, target_of(torch.device("cuda")), workers)


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the name of its function and the binary that holds it."""

    name: str
    cubin: bytes


# what is compiled and what is identified


def fingerprint(value: Any) -> str:
    """``value`` as text that says all of it. Raises TypeError for what text cannot say."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(fingerprint, value))})"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{k!r}:{fingerprint(v)}" for k, v in sorted(value.items())) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return type(value).__qualname__ + fingerprint(own)
    if isinstance(value, type) and value in DTYPES.values():
        return value.__name__
    raise TypeError(f"a static parameter of a kernel is a number, a text, a dtype or a dataclass of them, "
                    f"not {type(value).__name__}: it would not show in the key of the compiled kernel")


def _sources(module: ModuleType, package: str, seen: set[str]) -> Iterator[str]:
    """Texts of ``module`` and of the modules of ``package`` whose things it uses."""
    if module.__name__ in seen:
        return
    seen.add(module.__name__)
    yield inspect.getsource(module)
    for value in list(vars(module).values()):
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(home, str) and home.startswith(package + ".") and home in sys.modules:
            yield from _sources(sys.modules[home], package, seen)


@cache
def _source_key(module: str) -> str:
    package = __name__.rpartition(".")[0]
    texts = sorted(_sources(sys.modules[module], package, set()))
    return hashlib.sha256("\0".join((version("nvidia-cutlass-dsl"), *texts)).encode()).hexdigest()


def content_key(launch: KernelLaunch, target: str) -> str:
    """Equal for two launches that compile to the same binary for ``target`` ("sm_90a"). Raises TypeError for a
    parameter that has no text."""
    body = inspect.unwrap(launch.kernel)
    assert body.__closure__ is None, f"{body.__qualname__} reads names of the function around it"
    parts = (_source_key(body.__module__), body.__qualname__, target, launch.threads, launch.cluster,
             launch.blocks_per_sm, [(name, *_shape_of(value)) for name, value in launch.arguments.items()],
             launch.parameters)
    return hashlib.sha256("\0".join(map(fingerprint, parts)).encode()).hexdigest()


def _shape_of(value: torch.Tensor | int) -> tuple[Any, int]:
    """dtype and alignment of a pointer; of a tensor without storage, the alignment that an allocation would have."""
    if isinstance(value, int):
        return cutlass.Int64, 8
    at = int(value.storage_offset()) * value.element_size() if value.is_meta else value.data_ptr()
    return DTYPES[value.dtype], ALIGNMENT if at % ALIGNMENT == 0 else at & -at


_COMPILED: dict[str, Compiled] = {}
_COMPILING = threading.Lock()  # the DSL traces in one thread at a time


def compile_kernel(launch: KernelLaunch, target: str) -> Compiled:
    """The kernel of ``launch`` for ``target``, compiled once and kept on disk. Needs no GPU.

    Raises what the DSL raises.
    """
    key = content_key(launch, target)
    with _COMPILING:
        if not _known(key):
            _keep(key, _compile(launch, target))
        return _COMPILED[key]


def compile_kernels(launches: Sequence[KernelLaunch], target: str, workers: int) -> None:
    """Compiles what is still to be done of ``launches``, side by side where that pays. Needs no GPU.

    Raises what the DSL raises.
    """
    todo = {content_key(launch, target): launch for launch in launches}
    todo = {key: launch for key, launch in todo.items() if not _known(key)}
    wanted = [found for key, launch in todo.items() if (found := _as_data(key, launch, target))]
    for key, name, cubin in compile_pool.compile_apart(wanted, compile_pool.workers_for(len(wanted), workers)):
        _keep(key, Compiled(name, cubin))
    for launch in todo.values():  # what is left: a handful, or a worker's that failed, whose error is raised here
        compile_kernel(launch, target)


def _known(key: str) -> bool:
    """Whether a kernel is compiled, here or by another process."""
    if key not in _COMPILED and (kept := cubin_cache.load(key)):
        _COMPILED[key] = Compiled(*kept)
    return key in _COMPILED


def _keep(key: str, compiled: Compiled) -> None:
    _COMPILED[key] = compiled
    cubin_cache.store(key, compiled.name, compiled.cubin)


def _as_data(key: str, launch: KernelLaunch, target: str) -> compile_pool.Wanted | None:
    """``launch`` for another process. None where that cannot have it: a kernel that no module has by its name."""
    body = inspect.unwrap(launch.kernel)
    pointers = {name: None if isinstance(value, int) else (value.dtype, _shape_of(value)[1])
                for name, value in launch.arguments.items()}
    if getattr(sys.modules[body.__module__], body.__name__, None) is not launch.kernel or any(
            kind and kind[1] < kind[0].itemsize for kind in pointers.values()):
        return None
    rest = {name: getattr(launch, name) for name in ("grid", "threads", "parameters", "cluster", "shared", "dependent",
                                                     "blocks_per_sm")}
    return compile_pool.Wanted(key, body.__module__, body.__name__, rest, pointers, target)


@cute.jit
def _trace(arguments: Any, stream: cuda.CUstream, kernel: cutlass.Constexpr, names: cutlass.Constexpr,
           parameters: cutlass.Constexpr, threads: cutlass.Constexpr, cluster: cutlass.Constexpr,
           blocks_per_sm: cutlass.Constexpr):
    kernel(arguments, names, parameters).launch(
        grid=cluster, block=(threads, 1, 1), cluster=cluster, stream=stream, min_blocks_per_mp=blocks_per_sm)


def _compile(launch: KernelLaunch, target: str) -> Compiled:
    arguments: list[Any] = []
    for value in launch.arguments.values():
        dtype, alignment = _shape_of(value)
        arguments.append(cutlass.Int64(0) if isinstance(value, int) else make_ptr(
            dtype, 0, cute.AddressSpace.gmem, assumed_align=alignment))
    cluster = launch.cluster if max(launch.cluster) > 1 else None
    launch.kernel.set_name_prefix(function_name(launch.kernel), remove_cutlass_symbol=True, keep_mangled_name=False)
    with tempfile.TemporaryDirectory() as folder:
        done = cute.compile[cute.GPUArch(target), cute.KeepCUBIN, DumpDir(folder)](
            _trace, tuple(arguments), cuda.CUstream(0), launch.kernel, tuple(launch.arguments), launch.parameters,
            launch.threads, cluster or (1, 1, 1), launch.blocks_per_sm)
        (name,) = done.kernel_info
        return Compiled(name, done.__cubin__)


def function_name(kernel: Any) -> str:
    """Name of the kernel's function in the binary, less the number that the DSL appends: "cute_attn_res"."""
    return "cute_" + inspect.unwrap(kernel).__name__.strip("_")


# launching


def target_of(device: torch.device) -> str:
    """The target that a binary for ``device`` is compiled for, with the instructions of that very chip."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}a"


def _check(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call, or BindError."""
    if result[0] != cuda.CUresult.CUDA_SUCCESS:
        raise BindError(f"{what}: {result[0].name}\n"
                        "  fix: check the driver with `k3plan doctor`; a launch that asks for too much of the GPU is "
                        "the kernel's mistake")
    return result[1] if len(result) == 2 else None


_FUNCTIONS: dict[tuple[str, int], Any] = {}


def _function(launch: KernelLaunch, device: torch.device) -> Any:
    """The loaded function, once per device and content key, with the attributes that its launches need."""
    target = target_of(device)
    at = content_key(launch, target), device.index or 0
    if at not in _FUNCTIONS:
        compiled = compile_kernel(launch, target)
        module = _check(cuda.cuModuleLoadData(compiled.cubin), f"loading {compiled.name}")
        _FUNCTIONS[at] = _check(cuda.cuModuleGetFunction(module, compiled.name.encode()), compiled.name)
    function, wanted = _FUNCTIONS[at], cuda.CUfunction_attribute
    if launch.shared > PORTABLE_SHARED:
        held = _check(cuda.cuFuncGetAttribute(wanted.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function), "")
        _check(cuda.cuFuncSetAttribute(function, wanted.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                       max(held, launch.shared)), f"{launch.shared} bytes of shared memory")
    if launch.cluster[0] * launch.cluster[1] * launch.cluster[2] > PORTABLE_CLUSTER:
        _check(cuda.cuFuncSetAttribute(function, wanted.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
               f"cluster of {launch.cluster}")
    if (percent := carveout()) is not None:
        _check(cuda.cuFuncSetAttribute(function, wanted.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent),
               f"{percent} % of shared memory")
    return function


class _Prepared:
    """The driver's view of a launch: function, configuration and argument block, made once."""

    def __init__(self, launch: KernelLaunch) -> None:
        self.device = next(v.device for v in launch.arguments.values() if isinstance(v, torch.Tensor))
        torch.cuda.current_stream(self.device)  # makes torch's context the current one
        self.name = function_name(launch.kernel)
        self.function = _function(launch, self.device)
        values = [v if isinstance(v, int) else v.data_ptr() for v in launch.arguments.values()]
        self.values = (ctypes.c_uint64 * len(values))(*values)
        start = ctypes.addressof(self.values)
        self.places = (ctypes.c_void_p * len(values))(*(start + 8 * i for i in range(len(values))))
        self.config = _configuration(launch)

    def launch(self) -> None:
        self.config.hStream = cuda.CUstream(torch.cuda.current_stream(self.device).cuda_stream)
        _check(cuda.cuLaunchKernelEx(self.config, self.function, ctypes.addressof(self.places), 0), self.name)


def _configuration(launch: KernelLaunch) -> Any:
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
    config.sharedMemBytes = launch.shared
    attributes = []
    if max(launch.cluster) > 1:
        cluster = cuda.CUlaunchAttribute()
        cluster.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = launch.cluster
        attributes.append(cluster)
    if launch.dependent:
        edge = cuda.CUlaunchAttribute()
        edge.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        edge.value.programmaticStreamSerializationAllowed = 1
        attributes.append(edge)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def row_alignment(tensor: torch.Tensor) -> int:
    """Bytes, 16 at most, that divide the address of every row of a matrix."""
    at = int(tensor.storage_offset()) * tensor.element_size() if tensor.is_meta else tensor.data_ptr()
    step = row_stride(tensor) * tensor.element_size() if tensor.shape[0] > 1 else 0
    return math.gcd(ALIGNMENT, at, step)


def row_stride(tensor: torch.Tensor) -> int:
    """Elements between rows of a matrix whose last dim is contiguous."""
    assert tensor.stride(-1) == 1 or tensor.shape[-1] == 1, f"strided last dim: {tensor.shape} {tensor.stride()}"
    return tensor.stride(0)
