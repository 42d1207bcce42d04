"""What a cluster is made of: devices, nodes that hold them, and the links between them.

Devices are numbered from 0, node by node, in the order in which the nodes are listed.
"""

import contextlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from streamrl.errors import ConfigError
from streamrl.files.typed_settings import nearest, read_settings

GIB = 1 << 30
GB = 1e9
MOST_DEVICES = 1 << 14
CPU_DEVICE = "CPU"
PCIE_3, PCIE_4, PCIE_5 = 16 * GB, 32 * GB, 64 * GB
"""Of sixteen lanes, each way."""
LEAST_FIGURE, MOST_FIGURE = 1e-3, 1e6
"""Of a device or a network in a file, in the file's unit: a slip, as of the unit, beyond them."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as its maker states it; what a model gets of it is a matter of constants.

    flops_per_s: dense, of bfloat16 (float16 where there is none; float32 on a CPU). memory_bytes
    and memory_bytes_per_s: its own memory. link_bytes_per_s: to others of its node, each way.
    network_bytes_per_s: of a whole node of them, each way, as such nodes usually come.
    host_bytes_per_s: between it and its host's memory, each way.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    per_node: int = 8
    host_bytes_per_s: float = PCIE_4


def _device(
    name: str,
    teraflops: float,
    memory: tuple[float, float],
    *,
    link: float,
    network: float,
    host: float = PCIE_4,
) -> Device:
    """Of FLOP/s in 1e12, and bytes and bytes/s in 1e9, of its memory both; a node has eight."""
    held, reads = memory
    sizes = (teraflops * 1e12, held * GB, reads * GB, link * GB, network * GB)
    return Device(name, *sizes, host_bytes_per_s=host)


DEVICES = {
    device.name: device
    for device in (
        _device("V100", 125, (32, 900), link=150, network=12.5, host=PCIE_3),
        _device("A100-40GB", 312, (40, 1555), link=300, network=200),
        _device("A100", 312, (80, 2039), link=300, network=200),
        _device("A800", 312, (80, 2039), link=200, network=200),
        _device("H20", 148, (96, 4000), link=450, network=400, host=PCIE_5),
        _device("H100", 989, (80, 3350), link=450, network=400, host=PCIE_5),
        _device("H800", 989, (80, 3350), link=200, network=400, host=PCIE_5),
        _device("H200", 989, (141, 4800), link=450, network=400, host=PCIE_5),
        _device("B200", 2250, (180, 8000), link=900, network=400, host=PCIE_5),
        # Four of them share a tray; seventy-two are one NVLink domain.
        replace(
            _device("GB200", 2500, (186, 8000), link=900, network=3600, host=450 * GB),
            per_node=4,
        ),
        # One core of a server.
        replace(
            _device(CPU_DEVICE, 0.1, (4, 10), link=5, network=1.25, host=10 * GB), per_node=1 << 10
        ),
    )
}
"""The makers' figures, of the SXM form of each."""


@dataclass(frozen=True)
class NodeGroup:
    """`count` nodes that are alike, each with `devices` of one kind.

    network_bytes_per_s: of a node, each way; its devices share it.
    """

    device: Device
    devices: int
    count: int = 1
    network_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.devices < 1 or self.count < 1:
            raise ConfigError(
                f"{self.count} nodes of {self.devices} {self.device.name}:"
                " must be at least 1 of each"
            )
        if not 0 <= self.network_bytes_per_s < math.inf:
            raise ConfigError(
                f"network of {self.network_bytes_per_s:g} bytes/s: must be 0 or more, and finite"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.devices * self.count

    @property
    def network(self) -> float:
        """Bytes/s of a node, each way; as such nodes usually come if nothing is said."""
        return self.network_bytes_per_s or self.device.network_bytes_per_s

    def __str__(self) -> str:
        nodes = f"{self.count}x" if self.count > 1 else ""
        gigabits = f"@{self.network_bytes_per_s * 8 / GB:g}Gb" if self.network_bytes_per_s else ""
        return f"{nodes}{self.devices}x{self.device.name}{gigabits}"


@dataclass(frozen=True)
class Cluster:
    """Nodes, group by group. `str` and `parse` write it as 16x8xA100@200Gb,8xV100."""

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.groups:
            raise ConfigError("it has no nodes")
        if self.size > MOST_DEVICES:
            raise ConfigError(f"{self.size} devices: must be at most {MOST_DEVICES}")

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Of NxDEVICE or NODESxNxDEVICE, with @GIGABITSGb of a node, separated by commas.

        Without NODES, N devices fill nodes of the usual size. Raises ConfigError.
        """
        groups = tuple(_parse_group(part.strip(), text) for part in text.split(","))
        with _placed(f"cluster {text}"):
            return cls(groups)

    @classmethod
    def of_dict(cls, loose: Mapping[str, Any], *, place: str) -> "Cluster":
        """Of {nodes: [{device: NAME or a mapping, devices: N, count: N, network_gbps: X}]}.

        A device that is not in the table is a mapping of name, tflops, memory_gb, memory_gbps (GB
        a second), link_gbps and, to its host, host_gbps (likewise). `place` is where it was read.
        Raises ConfigError.
        """
        nodes = loose.get("nodes") if isinstance(loose, Mapping) else None
        if not isinstance(nodes, Sequence) or isinstance(nodes, str) or set(loose) != {"nodes"}:
            raise ConfigError(f"{place}: must be a mapping with `nodes`, a list, and nothing else")
        groups = tuple(_group_of(entry, f"{place}: nodes[{i}]") for i, entry in enumerate(nodes))
        with _placed(place):
            return cls(groups)

    @property
    def size(self) -> int:
        """Number of devices."""
        return sum(group.size for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return sum(group.count for group in self.groups)

    @property
    def is_cpu(self) -> bool:
        """Whether any of its devices are cores."""
        return any(group.device.name == CPU_DEVICE for group in self.groups)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes are alike."""
        return len(set(self._kinds)) == 1

    @property
    def starts(self) -> list[int]:
        """The first device of each group."""
        return [0, *accumulate(group.size for group in self.groups)][:-1]

    def group_of(self, device: int) -> NodeGroup:
        """The group a device is in. Raises IndexError if there is no such device."""
        if not 0 <= device < self.size:
            raise IndexError(f"device {device} of {self.size}")
        return self.groups[bisect_right(self.starts, device) - 1]

    def node_of(self, device: int) -> int:
        """The number of the node a device is on, counted over all groups."""
        at = bisect_right(self.starts, device) - 1
        before = sum(group.count for group in self.groups[:at])
        return before + (device - self.starts[at]) // self.groups[at].devices

    def first(self, size: int) -> "Cluster":
        """The first `size` devices: whole nodes, or a part of one node.

        Raises ConfigError if there are not so many, or they end within a later node.
        """
        groups: list[NodeGroup] = []
        left = size
        for group in self.groups:
            if left <= 0:
                break
            whole, rest = divmod(min(left, group.size), group.devices)
            if rest and (whole or groups):
                raise ConfigError(
                    f"--gpus {size}: must be whole nodes of {group.devices}, or a part of one"
                )
            groups.append(
                replace(group, devices=rest, count=1) if rest else replace(group, count=whole)
            )
            left -= min(left, group.size)
        if left or size < 1:
            raise ConfigError(f"--gpus {size}: must be from 1 to the cluster's {self.size}")
        return Cluster(tuple(groups))

    @property
    def _kinds(self) -> list[NodeGroup]:
        return [replace(group, count=1) for group in self.groups]

    def __str__(self) -> str:
        return ",".join(map(str, self.groups))


@contextlib.contextmanager
def _placed(place: str) -> Iterator[None]:
    """Says where it was read what is no cluster."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None


_GROUP = re.compile(r"(?:(\d{1,18})x)?(\d{1,18})x([A-Za-z][\w-]*)(?:@(\d+(?:\.\d+)?)Gb)?")


def device_named(name: str, place: str) -> Device:
    """A device of the table. Raises ConfigError with the nearest one."""
    known = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() in known:
        return known[name.lower()]
    raise ConfigError(f"{place}: device {name}: not in the table; {nearest(name, DEVICES)}")


def _parse_group(part: str, text: str) -> NodeGroup:
    place = f"cluster {text}"
    found = _GROUP.fullmatch(part)
    if found is None:
        raise ConfigError(f"{place}: {part!r:.60} is not written like 8xH100 or 16x8xA100@200Gb")
    nodes, devices, name, gigabits = found.groups()
    device, count = device_named(name, place), int(devices)
    network = float(gigabits or 0)
    if gigabits:
        _check_figure(f"{place}: network_gbps", network)
    network *= GB / 8
    if nodes is not None or count <= device.per_node:
        with _placed(place):
            return NodeGroup(device, count, 1 if nodes is None else int(nodes), network)
    if count > MOST_DEVICES:
        raise ConfigError(f"{place}: {count} devices: must be at most {MOST_DEVICES}")
    if count % device.per_node:
        nodes = next(
            n for n in range(2, count + 1) if count % n == 0 and count // n < device.per_node
        )
        raise ConfigError(
            f"{place}: {count} {name} do not fill nodes of {device.per_node}; say how many nodes,"
            f" as in {nodes}x{count // nodes}x{name}"
        )
    return NodeGroup(device, device.per_node, count // device.per_node, network)


@dataclass
class _DeviceEntry:
    """A device as a file has it."""

    name: str
    tflops: float
    memory_gb: float
    memory_gbps: float
    link_gbps: float
    host_gbps: float = PCIE_4 / GB

    def device(self, place: str) -> Device:
        """The device. Raises ConfigError for what no device has."""
        for key in ("tflops", "memory_gb", "memory_gbps", "link_gbps", "host_gbps"):
            _check_figure(f"{place}.{key}", vars(self)[key])
        return _device(
            self.name,
            self.tflops,
            (self.memory_gb, self.memory_gbps),
            link=self.link_gbps,
            network=self.link_gbps,
            host=self.host_gbps * GB,
        )


@dataclass
class _GroupEntry:
    """Nodes as a file has them; network_gbps are gigabits."""

    devices: int
    count: int = 1
    network_gbps: float = 0.0


def _check_figure(name: str, value: float) -> None:
    if not LEAST_FIGURE <= value <= MOST_FIGURE:
        raise ConfigError(
            f"{name}={value:g}: must be at least {LEAST_FIGURE:g} and at most {MOST_FIGURE:g}"
        )


def _group_of(entry: Any, place: str) -> NodeGroup:
    if not isinstance(entry, Mapping) or "device" not in entry:
        raise ConfigError(f"{place}: must be a mapping with device and devices")
    named = entry["device"]
    if isinstance(named, Mapping):
        device = read_settings(_DeviceEntry, named, section=f"{place}.device").device(
            f"{place}.device"
        )
    else:
        device = device_named(str(named), f"{place}.device")
    rest = {key: value for key, value in entry.items() if key != "device"}
    group = read_settings(_GroupEntry, rest, section=place)
    if group.network_gbps:
        _check_figure(f"{place}.network_gbps", group.network_gbps)
    with _placed(place):
        return NodeGroup(device, group.devices, group.count, group.network_gbps * GB / 8)
