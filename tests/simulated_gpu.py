"""A GPU without hardware: tensors of another device type that hold real values in CPU memory.

`use_simulated_gpu` makes a process compute on it. As on a GPU, an operation raises if its tensors
are on two devices (`MixedDevicesError`). Copies of tensors to the CPU are counted.
torch can register such a device once per process and cannot take it back.

A copy to the GPU on a side stream runs as late as it may on a GPU: once another stream or the host
waits for it. Until then its result is not a number.

Stricter than a GPU: indices and masks must be on the device, where CUDA would copy them.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from streamrl.distributed import devices

GPU = "simgpu"
GPU_0 = f"{GPU}:0"
CPU = torch.device("cpu")
COPIES = {"aten::_to_copy", "aten::copy_"}
NO_SCALARS_OF_CPU = {"aten::cat", "aten::stack"}
"""Operations that take no tensor of the CPU, not even without dimensions."""
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

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self: Any = args[0] if args else None
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return self.detach()
        if func in (Tensor.untyped_storage, Tensor.data_ptr):
            return func(self.on_cpu)
        if func is Tensor.tolist:
            return self.cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            self.on_cpu = args[1].on_cpu
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GpuTensor({self.on_cpu!r})"


class SimulatedGpu(TorchDispatchMode):
    """Makes operations work on the simulated GPU.

    host_copies, host_bytes: copies of tensors to the CPU, and their bytes.
    """

    host_copies = 0
    host_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run_operation(func, args, kwargs or {})


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the values of its tensors; return tensors of the operation's device."""
    name = func._schema.name
    if func._can_decompose():  # in inference mode operations come as they were called
        with SimulatedGpu():
            return func.decompose(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, GpuTensor)]
    if name in COPIES:
        is_result_on_gpu = _is_gpu(kwargs.get("device") or args[0].device)
    else:
        _check_devices(name, tensors, on_gpu)
        device = kwargs.get("device")
        is_result_on_gpu = bool(on_gpu) if device is None else _is_gpu(device)
    if on_gpu and name in COPIES and not is_result_on_gpu:
        SimulatedGpu.host_copies += 1
        SimulatedGpu.host_bytes += on_gpu[0].nbytes
    if name == "aten::_fused_sdp_choice" and on_gpu:
        return MATH_ATTENTION
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": CPU}
    result = func(*_unwrap(args), **_unwrap(kwargs))
    if name in COPIES and is_result_on_gpu and not on_gpu:
        result = GpuModule.stream_in_use.run_copy(result)
    if func._schema.is_mutable and not name.startswith("c10d"):
        return _find_written(func, args, kwargs)
    return tree_map(_wrap, result) if is_result_on_gpu else result


def _is_gpu(device: Any) -> bool:
    return torch.device(device).type == GPU


def _check_devices(name: str, tensors: list[Tensor], on_gpu: list[GpuTensor]) -> None:
    others = [
        tensor
        for tensor in tensors
        if not isinstance(tensor, GpuTensor) and (tensor.dim() or name in NO_SCALARS_OF_CPU)
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


class SimulatedEvent(NamedTuple):
    """Point in the work of a stream, behind its first `num_copies`."""

    stream: "SimulatedStream"
    num_copies: int


class SimulatedStream:
    """Stream of the simulated GPU. calls: those of all streams, in the order of the host."""

    calls: ClassVar[list[StreamCall]] = []

    def __init__(self, *, is_default: bool = False) -> None:
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

    def _run_until(self, num_copies: int) -> None:
        for _ in range(num_copies - self._num_run):
            self._queued.pop(0)()
            self._num_run += 1

    def note(self, action: str, subject: Any) -> None:
        self.calls.append(StreamCall(self, action, subject))

    def wait_event(self, event: SimulatedEvent) -> None:
        self.note("wait", event)
        event.stream._run_until(event.num_copies)

    def record_event(self) -> SimulatedEvent:
        event = SimulatedEvent(self, self._num_run + len(self._queued))
        self.note("record", event)
        return event

    def synchronize(self) -> None:
        self._run_until(self._num_run + len(self._queued))


class GpuModule:
    """Functions of `torch.cuda` for the simulated GPU.

    num_waits: waits for the work of all streams. stream_in_use: the stream of this process's work.
    """

    is_found = True
    num_waits = 0
    stream_in_use = SimulatedStream(is_default=True)
    Stream = SimulatedStream

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
        """Return the functions of CUDA's runtime; any memory can be pinned."""
        return SimpleNamespace(
            cudaHostRegister=lambda address, num_bytes, flags: 0,
            cudaHostUnregister=lambda address: 0,
        )

    def current_stream(self) -> SimulatedStream:
        return self.stream_in_use

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        with mock.patch.object(GpuModule, "stream_in_use", stream):
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
        torch.autograd.set_multithreading_enabled(False),
        _make_constants_on_cpu(),
        SimulatedGpu(),
    ):
        yield


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
