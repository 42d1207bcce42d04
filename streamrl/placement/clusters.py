"""Cluster hardware: devices, nodes and the links between them.

Devices are numbered from 0, node by node, in the order of the node list.
"""

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from streamrl.errors import ConfigError, extend_errors
from streamrl.files.typed_settings import suggest_nearest

GIB = 1 << 30
GB = 1e9
MAX_DEVICES = 1 << 14
CPU_DEVICE = "CPU"
PCIE_3, PCIE_4, PCIE_5 = 16 * GB, 32 * GB, 64 * GB
"""Bytes per second of a PCIe link with 16 lanes, in each direction."""


@dataclass(frozen=True)
class DeviceSpec:
    """Accelerator with the figures that its maker states.

    `CostConstants` holds the fraction of each figure that a model reaches.
    flops_per_s: dense bfloat16 (float16 on devices without bfloat16, float32 on a CPU).
    memory_bytes, memory_bytes_per_s: device memory.
    link_bytes_per_s: to other devices of the node, each direction.
    network_bytes_per_s: usual network of a whole node, each direction.
    host_bytes_per_s: between device and host memory, each direction.
    host_memory_bytes: main memory of a usual node, per device.
    """

    name: str
    flops_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_node: int = 8
    host_bytes_per_s: float = PCIE_4
    host_memory_bytes: float = 128 * GB


def _make_device(  # noqa: PLR0913
    name: str,
    teraflops: float,
    memory: tuple[float, float],
    *,
    link: float,
    network: float,
    host: float = PCIE_4,
    host_gb: float = 128,
) -> DeviceSpec:
    """Make a device: `teraflops` in 1e12 FLOP/s, `memory` as (GB, GB/s), links in GB/s.

    host_gb: main memory of a usual node per device, as clouds and makers offer it.
    """
    capacity_gb, bandwidth_gb = memory
    sizes = (teraflops * 1e12, capacity_gb * GB, bandwidth_gb * GB, link * GB, network * GB)
    return DeviceSpec(name, *sizes, host_bytes_per_s=host, host_memory_bytes=host_gb * GB)


DEVICES = {
    device.name: device
    for device in (
        _make_device("V100", 125, (32, 900), link=150, network=12.5, host=PCIE_3, host_gb=64),
        _make_device("A100-40GB", 312, (40, 1555), link=300, network=200),
        _make_device("A100", 312, (80, 2039), link=300, network=200),
        _make_device("A800", 312, (80, 2039), link=200, network=200),
        # A card in a PCIe slot, without NVLink.
        _make_device("RTX4090", 165, (24, 1008), link=32, network=12.5, host_gb=64),
        _make_device("H20", 148, (96, 4000), link=450, network=400, host=PCIE_5, host_gb=256),
        _make_device("H100", 989, (80, 3350), link=450, network=400, host=PCIE_5, host_gb=256),
        _make_device("H800", 989, (80, 3350), link=200, network=400, host=PCIE_5, host_gb=256),
        _make_device("H200", 989, (141, 4800), link=450, network=400, host=PCIE_5, host_gb=256),
        _make_device("B200", 2250, (180, 8000), link=900, network=400, host=PCIE_5, host_gb=256),
        # A tray holds 4 devices; the NVLink domain spans 72.
        replace(
            _make_device(
                "GB200", 2500, (186, 8000), link=900, network=3600, host=450 * GB, host_gb=240
            ),
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
    host_bytes: main memory of a node; 0 takes the usual one of its devices.
    """

    device: DeviceSpec
    devices_per_node: int
    num_nodes: int = 1
    network_bytes_per_s: float = 0.0
    host_bytes: float = 0.0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.num_nodes < 1:
            raise ConfigError(
                f"nodes={self.num_nodes}, devices of a node={self.devices_per_node}: must be at"
                " least 1"
            )

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    @property
    def node_bytes_per_s(self) -> float:
        return self.network_bytes_per_s or self.device.network_bytes_per_s

    @property
    def node_host_bytes(self) -> float:
        return self.host_bytes or self.device.host_memory_bytes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        gigabits = self.network_bytes_per_s * 8 / GB
        network = f"@{gigabits:.12g}Gb" if gigabits else ""
        host = f"+{self.host_bytes / GB:.12g}GB" if self.host_bytes else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}{network}{host}"


@dataclass(frozen=True)
class Cluster:
    """Cluster as node groups in device order; `str` and `from_text` use 16x8xA100@200Gb,8xV100."""

    node_groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        if self.num_devices > MAX_DEVICES:
            raise ConfigError(f"{self.num_devices} devices: must be at most {MAX_DEVICES}")

    @classmethod
    def from_text(cls, text: str) -> "Cluster":
        """Parse a cluster: a comma-separated list of NxDEVICE or NODESxNxDEVICE, such as 2x8xA100.

        A suffix @GIGABITSGb sets the network of a node, a suffix +GIGABYTESGB its main memory.
        Without NODES, N devices fill nodes of the device's usual size. Raise ConfigError for any
        other text.
        """
        with extend_errors(f"cluster {text}: "):
            return cls(tuple(_parse_group(group_text.strip()) for group_text in text.split(",")))

    @property
    def num_devices(self) -> int:
        return sum(group.num_devices for group in self.node_groups)

    @property
    def num_nodes(self) -> int:
        return sum(group.num_nodes for group in self.node_groups)

    @property
    def is_cpu(self) -> bool:
        return any(group.device.name == CPU_DEVICE for group in self.node_groups)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all nodes have the same devices and network."""
        return len({replace(group, num_nodes=1) for group in self.node_groups}) == 1

    @cached_property
    def group_starts(self) -> list[int]:
        """Number of the first device of each node group."""
        return [0, *accumulate(group.num_devices for group in self.node_groups)][:-1]

    def find_node_group(self, device: int) -> NodeGroup:
        return self.node_groups[bisect_right(self.group_starts, device) - 1]

    def find_node(self, device: int) -> int:
        """Return the number of the node that holds a device, over all groups."""
        at = bisect_right(self.group_starts, device) - 1
        before = sum(group.num_nodes for group in self.node_groups[:at])
        return before + (device - self.group_starts[at]) // self.node_groups[at].devices_per_node

    def __str__(self) -> str:
        return ",".join(map(str, self.node_groups))


MIN_GIGABITS, MAX_GIGABITS = 1e-3, 1e6
MAX_HOST_GB = 1e6
_GROUP_PATTERN = re.compile(
    r"(?:(\d{1,18})x)?(\d{1,18})x([A-Za-z][\w-]*)(?:@(\d+(?:\.\d+)?)Gb)?(?:\+(\d{1,18})GB)?"
)


def _parse_group(text: str) -> NodeGroup:
    """Parse a node group such as 2x8xA100@200Gb."""
    match = _GROUP_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r:.60} is not written like 8xH100, 8xH100+512GB or 16x8xA100@200Gb"
        )
    nodes, devices, name, gigabits, gigabytes = match.groups()
    device = {key.lower(): device for key, device in DEVICES.items()}.get(name.lower())
    if device is None:
        nearest = suggest_nearest(name, DEVICES, "device")
        raise ConfigError(f"device {name}: not in the table; {nearest}")
    if gigabits and not MIN_GIGABITS <= float(gigabits) <= MAX_GIGABITS:
        bounds = f"from {MIN_GIGABITS:g} to {MAX_GIGABITS:.0f}"
        raise ConfigError(f"network of {float(gigabits):g} Gb: must be {bounds}")
    if gigabytes and not 1 <= int(gigabytes) <= MAX_HOST_GB:
        raise ConfigError(f"main memory of {gigabytes} GB: must be from 1 to {MAX_HOST_GB:.0f}")
    count, network, host = int(devices), float(gigabits or 0) * GB / 8, int(gigabytes or 0) * GB
    if nodes is not None or count <= device.devices_per_node:
        return NodeGroup(device, count, int(nodes or 1), network, host)
    num_nodes, rest = divmod(count, device.devices_per_node)
    if rest:
        raise ConfigError(
            f"{count} {name} do not fill nodes of {device.devices_per_node};"
            f" give the number of nodes, as in 2x6x{name}"
        )
    return NodeGroup(device, device.devices_per_node, num_nodes, network, host)
