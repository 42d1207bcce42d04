"""Cluster hardware for the planner: devices, nodes and the links between them.

Devices are numbered from 0, node by node, in the order of the node list.
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
from streamrl.files.typed_settings import read_settings, suggest_nearest

GIB = 1 << 30
GB = 1e9
MAX_DEVICES = 1 << 14
CPU_DEVICE = "CPU"
PCIE_3, PCIE_4, PCIE_5 = 16 * GB, 32 * GB, 64 * GB
"""Bytes per second of a PCIe link with 16 lanes, in each direction."""
MIN_QUANTITY, MAX_QUANTITY = 1e-3, 1e6
"""Bounds of every number in a cluster file, in the unit of its key; they catch a wrong unit."""


@dataclass(frozen=True)
class DeviceSpec:
    """Accelerator with the figures that its maker states.

    `CostConstants` holds the fraction of each figure that a model reaches.
    flops_per_s: dense bfloat16 (float16 on devices without bfloat16, float32 on a CPU).
    memory_bytes, memory_bytes_per_s: device memory.
    link_bytes_per_s: to other devices of the node, each direction.
    network_bytes_per_s: usual network of a whole node, each direction.
    host_bytes_per_s: between device and host memory, each direction.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_node: int = 8
    host_bytes_per_s: float = PCIE_4


def _make_device(
    name: str,
    teraflops: float,
    memory: tuple[float, float],
    *,
    link: float,
    network: float,
    host: float = PCIE_4,
) -> DeviceSpec:
    """Make a device: `teraflops` in 1e12 FLOP/s, `memory` as (GB, GB/s), links in GB/s."""
    capacity_gb, bandwidth_gb = memory
    sizes = (teraflops * 1e12, capacity_gb * GB, bandwidth_gb * GB, link * GB, network * GB)
    return DeviceSpec(name, *sizes, host_bytes_per_s=host)


DEVICES = {
    device.name: device
    for device in (
        _make_device("V100", 125, (32, 900), link=150, network=12.5, host=PCIE_3),
        _make_device("A100-40GB", 312, (40, 1555), link=300, network=200),
        _make_device("A100", 312, (80, 2039), link=300, network=200),
        _make_device("A800", 312, (80, 2039), link=200, network=200),
        # A card in a PCIe slot, without NVLink.
        _make_device("RTX4090", 165, (24, 1008), link=32, network=12.5),
        _make_device("H20", 148, (96, 4000), link=450, network=400, host=PCIE_5),
        _make_device("H100", 989, (80, 3350), link=450, network=400, host=PCIE_5),
        _make_device("H800", 989, (80, 3350), link=200, network=400, host=PCIE_5),
        _make_device("H200", 989, (141, 4800), link=450, network=400, host=PCIE_5),
        _make_device("B200", 2250, (180, 8000), link=900, network=400, host=PCIE_5),
        # A tray holds 4 devices; the NVLink domain spans 72.
        replace(
            _make_device("GB200", 2500, (186, 8000), link=900, network=3600, host=450 * GB),
            devices_per_node=4,
        ),
        # A device is one core of a server.
        replace(
            _make_device(CPU_DEVICE, 0.1, (4, 10), link=5, network=1.25, host=10 * GB),
            devices_per_node=1 << 10,
        ),
    )
}
"""Devices by name, with the makers' figures for the SXM form."""


@dataclass(frozen=True)
class NodeGroup:
    """`num_nodes` identical nodes with `devices_per_node` devices each.

    network_bytes_per_s: network of a node, each direction, shared by its devices; 0 takes the
      device's usual network.
    """

    device: DeviceSpec
    devices_per_node: int
    num_nodes: int = 1
    network_bytes_per_s: float = 0.0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise ConfigError(
                f"{self.num_nodes} nodes of {self.devices_per_node} {self.device.name}:"
                " must be at least 1 of each"
            )
        if not 0 <= self.network_bytes_per_s < math.inf:
            raise ConfigError(
                f"network of {self.network_bytes_per_s:g} bytes/s: must be 0 or more, and finite"
            )

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    @property
    def node_bytes_per_s(self) -> float:
        return self.network_bytes_per_s or self.device.network_bytes_per_s

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        gigabits = f"@{self.network_bytes_per_s * 8 / GB:g}Gb" if self.network_bytes_per_s else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}{gigabits}"


@dataclass(frozen=True)
class Cluster:
    """Cluster as node groups in device order; `str` and `from_text` use 16x8xA100@200Gb,8xV100."""

    node_groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if not self.node_groups:
            raise ConfigError("the cluster has no nodes")
        if self.num_devices > MAX_DEVICES:
            raise ConfigError(f"{self.num_devices} devices: must be at most {MAX_DEVICES}")

    @classmethod
    def from_text(cls, text: str) -> "Cluster":
        """Parse a cluster: a comma-separated list of NxDEVICE or NODESxNxDEVICE, such as 2x8xA100.

        A suffix @GIGABITSGb sets the network of a node. Without NODES, N devices fill nodes of the
        device's usual size. Raise ConfigError for any other text.
        """
        groups = tuple(_parse_group(group_text.strip(), text) for group_text in text.split(","))
        with _prefix_errors(f"cluster {text}"):
            return cls(groups)

    @classmethod
    def from_dict(cls, loose: Mapping[str, Any], *, location: str) -> "Cluster":
        """Read a cluster: {nodes: [{device: NAME, devices: N, count: N, network_gbps: X}]}.

        A device outside `DEVICES` is, instead of a NAME, a mapping of name, tflops, memory_gb,
        memory_gbps, link_gbps and host_gbps; the last three in GB/s. `location` names the source in
        errors. Raise ConfigError for an invalid entry.
        """
        nodes = loose.get("nodes") if isinstance(loose, Mapping) else None
        if not isinstance(nodes, Sequence) or isinstance(nodes, str) or set(loose) != {"nodes"}:
            raise ConfigError(f"{location}: must be a mapping whose only key is `nodes`, a list")
        groups = tuple(
            _read_group(entry, f"{location}: nodes[{i}]") for i, entry in enumerate(nodes)
        )
        with _prefix_errors(location):
            return cls(groups)

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.node_groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.node_groups)

    @property
    def is_cpu(self) -> bool:
        return any(group.device.name == CPU_DEVICE for group in self.node_groups)

    @property
    def is_uniform(self) -> bool:
        """Whether all nodes have the same devices and network."""
        return len(set(self._node_kinds)) == 1

    @property
    def group_starts(self) -> list[int]:
        """Number of the first device of each node group."""
        return [0, *accumulate(group.num_devices for group in self.node_groups)][:-1]

    def find_node_group(self, device: int) -> NodeGroup:
        """Return the node group of a device. Raise IndexError for a device outside the cluster."""
        if not 0 <= device < self.num_devices:
            raise IndexError(f"device {device} of {self.num_devices}")
        return self.node_groups[bisect_right(self.group_starts, device) - 1]

    def find_node(self, device: int) -> int:
        """Return the number of the node that holds a device, over all groups."""
        at = bisect_right(self.group_starts, device) - 1
        before = sum(group.num_nodes for group in self.node_groups[:at])
        return before + (device - self.group_starts[at]) // self.node_groups[at].devices_per_node

    @property
    def _node_kinds(self) -> list[NodeGroup]:
        return [replace(group, num_nodes=1) for group in self.node_groups]

    def __str__(self) -> str:
        return ",".join(map(str, self.node_groups))


@contextlib.contextmanager
def _prefix_errors(location: str) -> Iterator[None]:
    """Prepend `location`, the source of the input, to a ConfigError raised in the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{location}: {error}") from None


_GROUP_PATTERN = re.compile(r"(?:(\d{1,18})x)?(\d{1,18})x([A-Za-z][\w-]*)(?:@(\d+(?:\.\d+)?)Gb)?")


def find_device(name: str, location: str) -> DeviceSpec:
    """Return a device of `DEVICES` by name, ignoring case.

    Raise ConfigError, which starts with `location` and suggests the nearest name, for an unknown
    device.
    """
    by_lowercase = {key.lower(): device for key, device in DEVICES.items()}
    if name.lower() in by_lowercase:
        return by_lowercase[name.lower()]
    raise ConfigError(
        f"{location}: device {name}: not in the table; {suggest_nearest(name, DEVICES, 'device')}"
    )


def _parse_group(group_text: str, text: str) -> NodeGroup:
    """Parse a node group such as 2x8xA100@200Gb; errors quote `text`, the whole cluster."""
    location = f"cluster {text}"
    match = _GROUP_PATTERN.fullmatch(group_text)
    if match is None:
        raise ConfigError(
            f"{location}: {group_text!r:.60} is not written like 8xH100 or 16x8xA100@200Gb"
        )
    nodes, devices, name, gigabits = match.groups()
    device, count = find_device(name, location), int(devices)
    network = float(gigabits or 0)
    if gigabits:
        _check_quantity(f"{location}: network_gbps", network)
    network *= GB / 8
    if nodes is not None or count <= device.devices_per_node:
        with _prefix_errors(location):
            return NodeGroup(device, count, 1 if nodes is None else int(nodes), network)
    if count > MAX_DEVICES:
        raise ConfigError(f"{location}: {count} devices: must be at most {MAX_DEVICES}")
    if count % device.devices_per_node:
        # Suggest the fewest equal nodes below the usual size.
        nodes = next(
            n
            for n in range(2, count + 1)
            if count % n == 0 and count // n < device.devices_per_node
        )
        raise ConfigError(
            f"{location}: {count} {name} do not fill nodes of {device.devices_per_node};"
            f" give the number of nodes,"
            f" as in {nodes}x{count // nodes}x{name}"
        )
    return NodeGroup(device, device.devices_per_node, count // device.devices_per_node, network)


@dataclass
class _DeviceEntry:
    """Device in a cluster file, in the units of the file: TFLOP/s, GB, GB/s."""

    name: str
    tflops: float
    memory_gb: float
    memory_gbps: float
    link_gbps: float
    host_gbps: float = PCIE_4 / GB

    def to_device(self, location: str) -> DeviceSpec:
        for key in ("tflops", "memory_gb", "memory_gbps", "link_gbps", "host_gbps"):
            _check_quantity(f"{location}.{key}", vars(self)[key])
        return _make_device(
            self.name,
            self.tflops,
            (self.memory_gb, self.memory_gbps),
            link=self.link_gbps,
            network=self.link_gbps,
            host=self.host_gbps * GB,
        )


@dataclass
class _GroupEntry:
    """Node group in a cluster file; `network_gbps` in gigabits per second."""

    devices: int
    count: int = 1
    network_gbps: float = 0.0


def _check_quantity(name: str, value: float) -> None:
    if not MIN_QUANTITY <= value <= MAX_QUANTITY:
        raise ConfigError(
            f"{name}={value:g}: must be at least {MIN_QUANTITY:g} and at most {MAX_QUANTITY:g}"
        )


def _read_group(entry: Any, location: str) -> NodeGroup:
    if not isinstance(entry, Mapping) or "device" not in entry:
        raise ConfigError(f"{location}: must be a mapping with device and devices")
    device_entry = entry["device"]
    if isinstance(device_entry, Mapping):
        device = read_settings(_DeviceEntry, device_entry, section=f"{location}.device").to_device(
            f"{location}.device"
        )
    else:
        device = find_device(str(device_entry), f"{location}.device")
    other_keys = {key: value for key, value in entry.items() if key != "device"}
    group = read_settings(_GroupEntry, other_keys, section=location)
    if group.network_gbps:
        _check_quantity(f"{location}.network_gbps", group.network_gbps)
    with _prefix_errors(location):
        return NodeGroup(device, group.devices, group.count, group.network_gbps * GB / 8)
