"""A GPU without hardware: tensors of another device type that hold real values in CPU memory.

`use_simulated_gpu` makes a process compute on it. As on a GPU, an operation raises if its tensors
are on two devices (`MixedDevicesError`). Copies of tensors to the CPU are counted.
torch can register such a device once per process and cannot take it back.

A copy to the GPU on a side stream runs as late as it may on a GPU: once another stream or the host
waits for it. Until then its result is not a number.

Stricter than a GPU: indices and masks must be on the device, where CUDA would copy them.
"""

import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from streamrl.distributed import devices, process_group
from streamrl.engines.models.stored_weights import find_owners
from streamrl.resharding import executors

GPU = "simgpu"
GPU_0 = f"{GPU}:0"
CPU = torch.device("cpu")
COPIES = {"aten::_to_copy", "aten::copy_"}
NO_SCALARS_OF_CPU = {"aten::cat", "aten::stack", "aten::equal"}
"""Operations that take no tensor of the CPU, not even without dimensions."""
COLLECTIVES = re.compile(
    "c10d::(allreduce|broadcast|_?allgather|_?reduce|scatter|gather|alltoall|send|recv)"
)
"""Collectives that move tensors: not barriers."""
DISTRIBUTED = (DTensor, AsyncCollectiveTensor)
"""Tensors that run their operations on local ones."""
MATH_ATTENTION = 0
"""Kernel of attention that is made of other operations."""


class MixedDevicesError(RuntimeError):
    """An operation whose tensors are on different devices."""


class GpuTensor(Tensor):
    """Tensor on the simulated GPU. on_cpu: the same tensor on the CPU; views share its memory."""

    on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "GpuTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(GPU_0),
        )
        tensor.on_cpu = values
        return tensor  # type: ignore[no-any-return]

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.on_cpu = value.on_cpu

    def untyped_storage(self) -> Any:
        return GpuStorage(self.on_cpu.untyped_storage())

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def set_(self, source: Any, *more: Any) -> Any:
        return GpuTensor(self.on_cpu.set_(source.on_cpu, *more))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GpuTensor({self.on_cpu!r})"


class GpuStorage:
    """Storage of a tensor on the simulated GPU. on_cpu: the same memory as a storage of the CPU."""

    def __init__(self, on_cpu: torch.UntypedStorage) -> None:
        self.on_cpu = on_cpu
        self.device = torch.device(GPU_0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.on_cpu, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GpuStorage) and other._cdata == self._cdata

    def __hash__(self) -> int:
        return hash(self._cdata)


class SimulatedGpu(TorchDispatchMode):
    """Makes operations work on the simulated GPU.

    host_copies, host_bytes: copies of tensors to the CPU, and their bytes.
    """

    host_copies = 0
    host_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DISTRIBUTED) for kind in types):
            return NotImplemented
        return run_operation(func, args, kwargs or {})


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of its tensors; return tensors of the operation's device."""
    name = func._schema.name
    if (error := GpuModule.error) and "cpu" not in str(kwargs.get("device", "cpu")):
        GpuModule.error = ""
        raise RuntimeError(error)
    if func._can_decompose():  # in inference mode operations come as they were called
        with SimulatedGpu():
            return func.decompose(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    if name in COPIES:
        is_result_on_gpu = _is_gpu(kwargs.get("device") or args[0].device)
    else:
        written = args[0] if func._schema.is_mutable and args else None
        _check_devices(name, tensors, on_gpu, written)
        device = kwargs.get("device")
        is_result_on_gpu = bool(on_gpu) if device is None else _is_gpu(device)
    if COLLECTIVES.match(name) and tensors and not on_gpu and devices.has_local_gpu():
        raise MixedDevicesError(f"{name}: a collective of NCCL has a tensor on the CPU")
    if on_gpu and name in COPIES and not is_result_on_gpu:
        SimulatedGpu.host_copies += 1
        SimulatedGpu.host_bytes += on_gpu[0].nbytes
    if name == "aten::_fused_sdp_choice" and on_gpu:
        return MATH_ATTENTION
    if _is_gpu(kwargs.get("device") or CPU):
        kwargs = {**kwargs, "device": CPU}
    result = func(*_unwrap(args), **_unwrap(kwargs))
    if name in COPIES and is_result_on_gpu and not on_gpu:
        result = GpuModule.in_use.stream.run_copy(result)
    if func._schema.is_mutable and not name.startswith("c10d"):
        return _find_written(func, args, kwargs)
    return tree_map(_wrap, result) if is_result_on_gpu else result


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type == GPU


def _check_devices(name: str, tensors: list[Tensor], on_gpu: list[GpuTensor], written: Any) -> None:
    """Raise if tensors are on two devices: a CPU tensor without dimensions may only be read."""
    others = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, GpuTensor)
        and (tensor.dim() or tensor is written or name in NO_SCALARS_OF_CPU)
    ]
    if on_gpu and others:
        shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in (on_gpu[0], *others[:1]))
        raise MixedDevicesError(f"{name}: tensors on two devices: {shapes}")


def _unwrap(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.on_cpu if isinstance(leaf, GpuTensor) else leaf, tree)


def _wrap(leaf: Any) -> Any:
    return GpuTensor(leaf) if isinstance(leaf, Tensor) else leaf


def _find_written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the arguments that an operation has written and returns."""
    schema = func._schema
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)}
    values |= kwargs
    written = [
        values[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


class StreamCall(NamedTuple):
    """What a stream was told: "copy", "wait" for an event, "record" an event, or a test's word.

    subject: the event; of a copy, the array with the copied bytes.
    """

    stream: "SimulatedStream"
    action: str
    subject: Any


class SimulatedEvent:
    """Point in the work of a stream, behind its first copies."""

    stream: "SimulatedStream"

    def __init__(self) -> None:
        self.num_copies = 0

    def record(self, stream: "SimulatedStream | None" = None) -> None:
        self.stream = GpuModule.in_use.stream if stream is None else stream
        self.num_copies = self.stream.num_queued
        self.stream.note("record", self)

    def synchronize(self) -> None:
        self.stream.run_until(self.num_copies)


class SimulatedStream:
    """Stream of the simulated GPU. calls: those of all streams, in the order of the host."""

    calls: ClassVar[list[StreamCall]] = []
    device = GPU_0

    def __init__(
        self, device: object = None, *, is_default: bool = False, priority: int = 0
    ) -> None:
        self._is_default = is_default
        self._queued: list[Callable[[], object]] = []
        self._num_run = 0

    def run_copy(self, result: Tensor) -> Tensor:
        """Return the memory of a copy, which on the default stream is complete."""
        if self._is_default:
            return result
        source = result.reshape(-1).view(torch.uint8).numpy()
        memory = np.full(result.nbytes, 255, np.uint8)  # not a number in any dtype of weights
        self._queued.append(lambda: np.copyto(memory, source))
        self.note("copy", weakref.ref(memory))
        return torch.from_numpy(memory).view(result.dtype).view(result.shape)

    def run_until(self, num_copies: int) -> None:
        for _ in range(num_copies - self._num_run):
            self._queued.pop(0)()
            self._num_run += 1

    def note(self, action: str, subject: Any) -> None:
        self.calls.append(StreamCall(self, action, subject))

    @property
    def num_queued(self) -> int:
        """Copies that were queued until now."""
        return self._num_run + len(self._queued)

    def wait_event(self, event: SimulatedEvent) -> None:
        self.note("wait", event)
        event.synchronize()

    def wait_stream(self, stream: "SimulatedStream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.run_until(self.num_queued)


class StreamInUse(threading.local):
    stream = SimulatedStream(is_default=True)


class GpuModule:
    """Functions of `torch.cuda` for the simulated GPU.

    num_waits: waits for the work of all streams. in_use: the stream of each thread's work.
    error: of a call of the runtime, which the next operation that makes a tensor raises.
    """

    is_found = True
    can_pin = True
    error = ""
    num_waits = 0
    in_use = StreamInUse()
    Stream = SimulatedStream
    Event = SimulatedEvent

    def is_available(self) -> bool:
        return self.is_found

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: int) -> None:
        pass

    def synchronize(self) -> None:
        GpuModule.num_waits += 1

    def cudart(self) -> SimpleNamespace:
        """Return the functions of CUDA's runtime."""
        return SimpleNamespace(
            cudaHostRegister=self._register_host, cudaHostUnregister=lambda address: 0
        )

    def _register_host(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.can_pin:
            GpuModule.error = "the memory cannot be pinned"
        return 0 if self.can_pin else 1

    def current_stream(self, device: object = None) -> SimulatedStream:
        return self.in_use.stream

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        with mock.patch.object(self.in_use, "stream", stream):
            yield

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def memory_stats(self) -> dict[str, int]:
        return {}

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


@contextmanager
def use_simulated_gpu() -> Iterator[None]:
    """Context in which streamrl computes on the simulated GPU. Registers the device."""
    _setup_privateuseone_for_python_backend(GPU, GpuModule())
    with (
        mock.patch.object(devices, "GPU", GPU),
        mock.patch.object(torch, "from_dlpack", _share_memory),
        mock.patch.object(threading.Thread, "run", _run_thread),
        mock.patch.object(torch.nn.Module, "_apply", _apply_and_tie),
        torch.autograd.set_multithreading_enabled(False),
        _make_constants_on_cpu(),
        SimulatedGpu(),
    ):
        yield


@contextmanager
def use_gloo_as_nccl() -> Iterator[None]:
    """Context in which ranks with simulated GPUs have gloo's groups, which refuse CPU tensors."""
    with (
        mock.patch.object(process_group, "has_local_gpu", lambda: False),
        mock.patch.object(executors, "get_collective_device", devices.get_local_device),
        mock.patch.object(c10d, "_get_object_coll_device", _choose_object_device),
        mock.patch.object(dist, "batch_isend_irecv", _start_in_turn),
    ):
        yield


def _choose_object_device(group: object = None) -> str:
    return str(devices.get_local_device())


def _start_in_turn(operations: Sequence[dist.P2POp]) -> list[dist.Work | None]:
    return [operation.op(operation.tensor, operation.peer) for operation in operations]


def _apply_and_tie(
    module: torch.nn.Module, *arguments: Any, apply: Any = torch.nn.Module._apply
) -> torch.nn.Module:
    """Move a module; tied parameters stay tied, as with a GPU of torch's own."""
    owners = find_owners(module).values()
    apply(module, *arguments)
    for (first, first_name), *others in owners:
        for owner, name in others:
            setattr(owner, name, getattr(first, first_name))
    return module


def _run_thread(thread: threading.Thread, run: Any = threading.Thread.run) -> None:
    with SimulatedGpu():  # modes are those of a thread
        run(thread)


def _share_memory(source: Any, from_dlpack: Any = torch.from_dlpack) -> Tensor:
    """Return a tensor of its own for the same memory, as `torch.from_dlpack` does."""
    if isinstance(source, GpuTensor):
        return GpuTensor(from_dlpack(source.on_cpu))
    return from_dlpack(source)  # type: ignore[no-any-return]


@contextmanager
def _make_constants_on_cpu() -> Iterator[None]:
    """Make `torch.tensor` copy from the CPU, as dispatch modes need it."""
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)
