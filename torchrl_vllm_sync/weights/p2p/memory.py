"""Memory that two processes of a host can share, and ranges of addresses with memory behind them.

On the host it is a file in memory (``memfd_create``); on a GPU a handle of CUDA's virtual memory
management (CUDA Driver API, "Virtual Memory Management"), one for all of it: 57 GiB are replaced in
2.3 ms, in handles of 1 GiB in 6.3 (H200). Both travel as file descriptors, by a socket that other
users cannot reach. What is behind a range can be replaced in one call, and tensors and captured
graphs that hold its addresses see what is there now.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import mmap
import os
import select
import socket
import struct
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchrl_vllm_sync.errors import TransferError
from torchrl_vllm_sync.weights.module import storage_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Of each storage's first byte: what torch's allocator gives, and kernels may count on.
ALIGNMENT = 512


# ---- Host

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


class HostMemory:
    """A file in memory without a name; it lives until all that have it close it."""

    def __init__(self, num_bytes: int, descriptor: int | None = None) -> None:
        self.num_bytes = -(-num_bytes // _PAGE) * _PAGE
        if descriptor is None:
            self._fd = os.memfd_create("weights", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, self.num_bytes)
            try:
                os.posix_fallocate(self._fd, 0, self.num_bytes)  # else the first write may be fatal
            except OSError as error:
                os.close(self._fd)
                raise TransferError(f"no {num_bytes / 1e9:.2f} GB of memory: {error}") from error
        else:
            if os.fstat(descriptor).st_size != self.num_bytes:
                raise TransferError(f"the memory given is not of {self.num_bytes} bytes")
            self._fd = os.dup(descriptor)

    def export(self) -> int:
        """Returns a file descriptor that another process opens it by, the receiver's own."""
        return os.dup(self._fd)

    @property
    def path(self) -> str:
        """Where other processes of this user open it while this one has it."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class HostRange:
    """Pages of this process; ``data`` is all of them as bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = -(-num_bytes // _PAGE) * _PAGE
        self._address = self._mapped(None, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANON, -1)
        buffer = (ctypes.c_uint8 * self._num_bytes).from_address(self._address)
        self.data = torch.frombuffer(buffer, dtype=torch.uint8)

    def open_to(self, device: torch.device) -> None:
        """Does nothing: all of a host's processors reach its memory."""

    def show(self, memory: Any) -> None:
        """Puts a memory behind the addresses, in place of the one before."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        self._mapped(self._address, mmap.PROT_READ | mmap.PROT_WRITE, flags, memory._fd)

    def _mapped(self, address: int | None, protection: int, flags: int, fd: int) -> int:
        found = _libc().mmap(address, self._num_bytes, protection, flags, fd, 0)
        if found == ctypes.c_void_p(-1).value:
            error = os.strerror(ctypes.get_errno())
            raise TransferError(f"{self._num_bytes} bytes cannot be mapped: {error}")
        return found

    def close(self) -> None:
        """Gives the addresses back: nothing may hold ``data`` any more."""
        if self._num_bytes:
            _libc().munmap(self._address, self._num_bytes)
        self._num_bytes = 0


# ---- CUDA


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", _Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


_ulong = ctypes.c_ulonglong
# CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
# CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_PINNED, _POSIX, _DEVICE, _READ_WRITE = 1, 1, 1, 3


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _cuda(function: str, *args: Any) -> None:
    """Calls the driver; its failures are ours."""
    status = getattr(_driver(), function)(*args)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        name = (text.value or str(status).encode()).decode()
        raise TransferError(f"{function} failed: {name}")


def _properties(device: torch.device) -> Any:
    return ctypes.byref(_AllocationProperties(_PINNED, _POSIX, _Location(_DEVICE, device.index)))


def _granularity(device: torch.device) -> int:
    torch.cuda.synchronize(device)  # makes the device's context current
    found, minimum = ctypes.c_size_t(), 0
    _cuda("cuMemGetAllocationGranularity", ctypes.byref(found), _properties(device), minimum)
    return found.value


class CudaMemory:
    """Physical memory, of this process's making on ``device`` or imported."""

    def __init__(self, num_bytes: int, device: torch.device, descriptor: int | None = None) -> None:
        unit, handle = _granularity(device), _ulong()
        self.num_bytes = -(-num_bytes // unit) * unit
        if descriptor is None:
            wanted = ctypes.c_size_t(self.num_bytes), _properties(device), _ulong(0)
            _cuda("cuMemCreate", ctypes.byref(handle), *wanted)
        else:
            given = ctypes.c_void_p(descriptor), _POSIX
            _cuda("cuMemImportFromShareableHandle", ctypes.byref(handle), *given)
        self.handle = handle.value

    def export(self) -> int:
        fd, wanted = ctypes.c_int(), (_ulong(self.handle), _POSIX, _ulong(0))
        _cuda("cuMemExportToShareableHandle", ctypes.byref(fd), *wanted)
        return fd.value

    def close(self) -> None:
        if self.handle:
            _cuda("cuMemRelease", _ulong(self.handle))
        self.handle = 0


class CudaRange:
    """Addresses that ``device`` reads and writes; the memory may be another GPU's."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        unit = _granularity(device)
        self._num_bytes, self._device = -(-num_bytes // unit) * unit, device
        address, zero = _ulong(), _ulong(0)
        size = ctypes.c_size_t(self._num_bytes)
        _cuda("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), zero, zero)
        self._address, self._is_mapped = address.value, False
        self._open_to: set[torch.device] = set()
        self.data = torch.empty(0)

    def show(self, memory: Any) -> None:
        """No kernel may be running that uses the addresses."""
        self._unmap()
        where, whole = _ulong(self._address), ctypes.c_size_t(self._num_bytes)
        _cuda("cuMemMap", where, whole, ctypes.c_size_t(0), _ulong(memory.handle), _ulong(0))
        self._is_mapped = True
        self.open_to(self._device)
        if not self.data.numel():  # torch looks at the memory once
            piece = _Piece(self._address, self._num_bytes, None)
            self.data = torch.as_tensor(piece, device=self._device)

    def open_to(self, device: torch.device) -> None:
        """Lets a GPU of this process read and write what is shown now."""
        if device not in self._open_to:
            access = _Access(_Location(_DEVICE, device.index), _READ_WRITE)
            whole = _ulong(self._address), ctypes.c_size_t(self._num_bytes)
            _cuda("cuMemSetAccess", *whole, ctypes.byref(access), ctypes.c_size_t(1))
            self._open_to.add(device)

    def _unmap(self) -> None:
        if self._is_mapped:
            _cuda("cuMemUnmap", _ulong(self._address), ctypes.c_size_t(self._num_bytes))
        self._is_mapped = False
        self._open_to.clear()

    def close(self) -> None:
        """Gives the addresses back: nothing may hold ``data`` any more."""
        if self._num_bytes:
            self._unmap()
            _cuda("cuMemAddressFree", _ulong(self._address), ctypes.c_size_t(self._num_bytes))
        self._num_bytes = 0


class _Piece:
    """Some bytes of a GPU as torch takes them over; whoever has them keeps the owner."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        described = {"shape": (num_bytes,), "typestr": "|u1", "data": (address, False)}
        self.__cuda_array_interface__ = {**described, "version": 3, "strides": None}
        self.owner = owner


Memory = HostMemory | CudaMemory


class MappedMemory:
    """A memory behind addresses of its own, as long as anybody has this or a piece of it.

    ``owner`` is the device whose memory it is, if that may hand on what is written there.
    """

    def __init__(
        self,
        num_bytes: int,
        device: torch.device,
        descriptor: int,
        owner: torch.device | None = None,
    ) -> None:
        self.owner = owner
        with contextlib.ExitStack() as opened:
            memory = new_memory(num_bytes, device, descriptor)
            opened.callback(memory.close)
            within = new_range(num_bytes, device)
            opened.callback(within.close)
            within.show(memory)
            self._address, self._num_bytes, self._device = within.data.data_ptr(), num_bytes, device
            self._open_to = within.open_to
            # At exit there is nobody to give memory back to.
            weakref.finalize(self, opened.pop_all().close).atexit = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._address < self._num_bytes

    def piece(self, begin: int, num_bytes: int) -> torch.Tensor:
        """Bytes with a storage of their own, which alone is saved or sent with a tensor of it."""
        address = self._address + begin
        if self._device.type == "cuda":
            return torch.as_tensor(_Piece(address, num_bytes, self), device=self._device)
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.owner = self  # pyright: ignore[reportAttributeAccessIssue]  of a class of Python's
        return torch.frombuffer(buffer, dtype=torch.uint8)

    @property
    def data(self) -> torch.Tensor:
        return self.piece(0, self._num_bytes)

    def place_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same bytes as a contiguous tensor within, in a storage of its own."""
        span = self.span_of(tensor)
        return self.piece(span.start, len(span)).view(tensor.dtype).view(tensor.shape)

    def span_of(self, tensor: torch.Tensor) -> range:
        """Where a contiguous tensor is, in bytes."""
        begin = tensor.data_ptr() - self._address
        return range(begin, begin + tensor.nbytes)

    def can_hand_on_to(self, other: MappedMemory) -> bool:
        """Whether its device may write to the other memory, which thereby is open to it."""
        mine, theirs = self.owner, other.owner
        if mine is None or theirs is None or mine.type != theirs.type:
            return False
        if mine != theirs and not torch.cuda.can_device_access_peer(mine, theirs):
            return False
        self._open_to(mine)
        other._open_to(mine)
        return True

    def hand_on(self, other: MappedMemory, spans: Iterable[range]) -> None:
        """Copies bytes to the same places of another, on a GPU by the current stream."""
        for span in spans:
            source, target = self._address + span.start, other._address + span.start
            if self._device.type == "cuda":
                stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
                places = _ulong(target), _ulong(source), ctypes.c_size_t(len(span))
                _cuda("cuMemcpyDtoDAsync_v2", *places, stream)
            else:
                ctypes.memmove(target, source, len(span))


class HostFile:
    """Memory of the host that other processes of this user map by its path, while this has it."""

    def __init__(self, num_bytes: int, path: str = "") -> None:
        if not path:
            memory = HostMemory(num_bytes)
            weakref.finalize(self, memory.close)
            descriptor = memory.export()
            path = f"{memory.path}:{os.fstat(descriptor).st_ino}"
        else:
            within, _, inode = path.rpartition(":")
            try:
                descriptor = os.open(within, os.O_RDWR)
            except OSError as error:
                raise TransferError(f"memory cannot be mapped: {error}") from error
            if str(os.fstat(descriptor).st_ino) != inode:  # it has got that number since
                os.close(descriptor)
                raise TransferError("memory cannot be mapped: its process has let go of it")
        self.path, self.data = path, MappedMemory(num_bytes, torch.device("cpu"), descriptor).data


def page_lock(memory: MappedMemory) -> None:
    """Lets GPUs copy to and from memory of the host directly."""
    cuda: Any = torch.cuda.cudart()
    address, num_bytes = memory.data.data_ptr(), memory.data.nbytes
    try:
        torch.cuda.check_error(cuda.cudaHostRegister(address, num_bytes, 0))
    except RuntimeError as error:
        raise TransferError(f"memory cannot be page-locked: {error}") from error
    # Before it is unmapped, as what was registered last ends first.
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False


def new_memory(num_bytes: int, device: torch.device, descriptor: int | None = None) -> Memory:
    """Allocates memory on a device, or opens what another process exported, and closes that."""
    try:
        if device.type == "cuda":
            return CudaMemory(num_bytes, device, descriptor)
        return HostMemory(num_bytes, descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def new_range(num_bytes: int, device: torch.device) -> HostRange | CudaRange:
    return CudaRange(num_bytes, device) if device.type == "cuda" else HostRange(num_bytes)


# ---- Handed over

# Of one message: a memory's, and that of a plan or of counts that go with it.
MAX_HEADER_BYTES, MAX_DESCRIPTORS = 4096, 2
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
# Seconds between looks at whether a wait is in vain.
POLL_S = 0.01


def this_node() -> str:
    """Returns what identifies this machine, or container: its name and its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"


def device_uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, the same in every process; empty for a CPU."""
    return "" if device.type != "cuda" else str(torch.cuda.get_device_properties(device).uuid)


def device_of(uuid: object) -> torch.device | None:
    """The other way round; ``None`` for ``None``, and a GPU that is hidden from this process."""
    if not uuid:
        return None if uuid is None else torch.device("cpu")
    return _visible().get(str(uuid))


def _visible() -> dict[str, torch.device]:
    gpus = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return {device_uuid(one): one for one in gpus}


def unreachable(own: set[str], others: Iterable[str]) -> str:
    """The first of other GPUs that one of ours cannot write to; those that are hidden may be."""
    visible = _visible()
    for other in visible.keys() & others:
        for mine in visible.keys() & own - {other}:
            if not torch.cuda.can_device_access_peer(visible[mine], visible[other]):
                return other
    return ""


def _readable(one: Any, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(one, select.POLLIN)
    return bool(poll.poll(timeout_s * 1e3))


def _check_peer(connection: socket.socket) -> None:
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(told)
    if uid != os.getuid():
        raise TransferError(f"user {uid} is at the other end of a handover, not this process's")


class Handover:
    """The end that takes descriptors, by a socket that only processes of its user can reach."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Nothing is left of the folder, however this process ends.
        with tempfile.TemporaryDirectory(prefix="torchrl_vllm_sync-p2p-") as folder:
            within = os.open(folder, os.O_PATH | os.O_DIRECTORY)
            # A name of no more than 107 bytes, which a socket takes, wherever the folder is.
            at = f"/proc/self/fd/{within}/handover"
            self._listener.bind(at)
            opened = os.open(at, os.O_PATH)
            os.close(within)
        self._listener.listen()
        # Where it is, and a name that tells it from another that gets this number later.
        self.path = f"/proc/{os.getpid()}/fd/{opened}:{os.path.basename(folder)}"
        self._finalizer = weakref.finalize(self, _close, self._listener, opened)

    def take(
        self, deadline: float, watch: Callable[[], None] | None = None
    ) -> tuple[dict[str, object], list[int]]:
        """Returns what one says and sends; meanwhile calls ``watch``, which may raise."""
        said, descriptors = b"", list[int]()
        try:
            while not said:  # one that died before it sent has said nothing
                while watch is not None and time.monotonic() < deadline:
                    if _readable(self._listener, POLL_S):
                        break
                    watch()
                self._listener.settimeout(max(deadline - time.monotonic(), 1e-3))
                with contextlib.closing(self._listener.accept()[0]) as connection:
                    _check_peer(connection)
                    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
                    said, descriptors, *_ = socket.recv_fds(
                        connection, MAX_HEADER_BYTES, MAX_DESCRIPTORS
                    )
        except TimeoutError:
            raise TransferError("memory was not handed over in time") from None
        return json.loads(said), descriptors

    def take_all(
        self, expected: set[tuple[Any, ...]], deadline: float, mark: str
    ) -> Iterator[tuple[tuple[Any, ...], int]]:
        """Yields what each of these replicas' workers gives; closes what comes from others."""
        while expected:
            said, descriptors = self.take(deadline)
            one = tuple(said.get(key) for key in ("replica_id", "rank", mark))
            if one in expected and len(descriptors) == 1:
                expected.remove(one)
                yield one, descriptors[0]
            else:  # such as for a push that was given up
                for fd in descriptors:
                    os.close(fd)

    def close(self) -> None:
        self._finalizer()


def _close(listener: socket.socket, opened: int) -> None:
    listener.close()
    os.close(opened)


def hand_over(
    path: str,
    said: dict[str, object],
    descriptors: list[int],
    timeout_s: float,
    watch: Callable[[], None] | None = None,
) -> None:
    """Gives descriptors, closed here; with ``watch``, which may raise, waits until they arrive."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(timeout_s)
            address, _, name = path.rpartition(":")
            connection.connect(address)
            _check_peer(connection)
            if name not in os.readlink(address):
                raise TransferError("memory was not taken at the other end, which was closed")
            socket.send_fds(connection, [json.dumps(said).encode()], descriptors)
            while watch is not None and not _readable(connection, POLL_S):  # at the end it is
                watch()
    except OSError as error:
        why, is_hidden = str(error), isinstance(error, (FileNotFoundError, PermissionError))
        if is_hidden:  # or it was closed
            why = f"{why}: {path} is seen by processes of its user and PID namespace alone"
        raise TransferError(f"memory was not taken at the other end: {why}") from error
    finally:
        for one in descriptors:
            os.close(one)


# ---- Of a model


class WeightArena:
    """Two memories for the model's parameters: one is served, the other free to be written.

    If ``is_shared``, a single one, which a trainer writes while nothing is computed with it, and
    may keep its own parameters in.

    Nobody can keep a process that has begun to write from going on, such as one that was stopped.
    When another run begins, what the first one had is served no more: the arena takes new memory.
    """

    @torch.no_grad()
    def __init__(
        self, model: torch.nn.Module, device: torch.device, *, is_shared: bool = False
    ) -> None:
        self._device, self.num_bytes, self._writer = device, 0, ""
        self.is_shared = is_shared
        places: dict[int, int] = {}
        for parameter in model.parameters():
            num_bytes, key = parameter.untyped_storage().nbytes(), storage_key(parameter)
            if num_bytes and key not in places:
                places[key] = self.num_bytes
                self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if free < self.num_bytes:
                raise TransferError(
                    f"staged weights need {self.num_bytes / 1e9:.2f} GB on {device} beside the "
                    f"model, {free / 1e9:.2f} GB are free"
                )
        # What is served, and last what may be written to.
        self._memories: list[Memory] = [new_memory(self.num_bytes, device)]
        self._numbers = [0]
        self._live, self._spare = (new_range(self.num_bytes, device) for _ in range(2))
        self._live.show(self._memories[0])
        self._move(model, places)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the second memory
        if is_shared:
            return
        self._numbers.append(1)
        self._memories.append(new_memory(self.num_bytes, device))
        self._spare.show(self._memories[1])
        self._shown = 1  # number of the memory behind the range for the spare one
        # Buffers that pushes load have their own: by storage, served and not.
        self._beside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def _move(self, model: torch.nn.Module, places: dict[int, int]) -> None:
        moved: dict[int, torch.Tensor] = {}
        for parameter in model.parameters():
            storage, key = parameter.untyped_storage(), storage_key(parameter)
            if not storage.nbytes():
                continue
            if key not in moved:
                before = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                moved[key] = before  # and thereby kept: its address is not given to another
                self._live.data[places[key] :][: len(before)].copy_(before)
            flat = self._live.data[places[key] :][: storage.nbytes()].view(parameter.dtype)
            begin = flat.storage_offset() + parameter.storage_offset()
            parameter.data = flat.as_strided(parameter.shape, parameter.stride(), begin)

    def place(self, tensor: torch.Tensor) -> int | None:
        """Offset in bytes of a tensor of the model; ``None`` if it is not in the arena."""
        if storage_key(tensor) != storage_key(self._live.data):
            return None
        return int(tensor.storage_offset()) * tensor.element_size()

    def counterpart(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same place in the memory that may be written to."""
        if self.is_shared:
            return tensor
        flat, storage = self._spare.data, tensor.untyped_storage()
        if self.place(tensor) is None:
            if storage.data_ptr() not in self._beside:
                live = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
                self._beside[storage.data_ptr()] = live, live.clone()
            flat = self._beside[storage.data_ptr()][1]
        flat = flat[: flat.numel() // tensor.element_size() * tensor.element_size()]
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return flat.view(tensor.dtype).as_strided(*place)

    def open(self) -> None:
        """Puts the memory that is not served behind the addresses of :meth:`counterpart`."""
        if not self.is_shared and self._shown != self._numbers[1]:
            self._spare.show(self._memories[1])
            self._shown = self._numbers[1]

    @torch.no_grad()
    def mirror(self) -> None:
        """Copies what is served into the other memory."""
        self.open()
        self._spare.data.copy_(self._live.data)

    @torch.no_grad()
    def restore(self) -> None:
        """The other way round: what was mirrored is served again."""
        self._live.data.copy_(self._spare.data)

    def begin(self, run_id: str) -> int:
        """Lets a run write; returns the number of the memory that it may write to."""
        if self._writer not in ("", run_id) and self.is_shared:
            self.part()
        elif self._writer not in ("", run_id):  # whose trainer may be writing still, or again
            before, self._memories[1] = self._memories[1], new_memory(self.num_bytes, self._device)
            self._numbers[1] = max(self._numbers) + 1
            self.open()
            before.close()
        self._writer = run_id
        return self._numbers[-1]

    @torch.no_grad()
    def part(self) -> None:
        """Leaves a trainer the memory that it shares, and serves a copy; no step may run."""
        if not self.is_shared or not self._writer:
            return
        self._writer, before = "", self._memories[0]
        self._memories[0] = new_memory(self.num_bytes, self._device)
        self._spare.show(self._memories[0])
        self._spare.data.copy_(self._live.data)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._live.show(self._memories[0])
        self._numbers[0] += 1
        before.close()

    def export(self) -> int:
        """File descriptor of the memory that may be written to."""
        return self._memories[-1].export()

    def take(self, run_id: str, number: int) -> None:
        """Serves what a run has written; no step may run meanwhile."""
        if (self._writer, self._numbers[-1]) != (run_id, number):
            raise TransferError("another trainer has begun to write since, or nobody had")
        if not self.is_shared:
            self.swap()
            self._writer = ""

    @torch.no_grad()
    def swap(self) -> None:
        """Serves the other memory; no step may run meanwhile."""
        for live, spare in self._beside.values():
            live.copy_(spare, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._memories.reverse()
        self._numbers.reverse()
        self._live.show(self._memories[0])
