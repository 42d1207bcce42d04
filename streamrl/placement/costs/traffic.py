"""What weights cost on their way from a trained model to who follows it: bytes of the actual plan.

The plan is the one that the executors carry out (`streamrl.resharding`), on the cluster's device
numbers. Two things make it fast at any size, and neither changes what any rank receives: layers
that the same ranks hold and want are one tensor, and of replicas that do the same some stand for
all.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import gcd, lcm

from streamrl.placement.clusters import Cluster
from streamrl.placement.costs.constants import Constants
from streamrl.placement.costs.param_shards import fullest_stage, spec_of
from streamrl.placement.meshes import Mesh
from streamrl.placement.model_shapes import ModelShape
from streamrl.placement.placements import Assignment
from streamrl.resharding import (
    BytesReport,
    CopyPlan,
    GenerationSizes,
    Grid,
    Layout,
    ModelSpec,
    Nodes,
    Seating,
    plan_copies,
    seat,
    seated_layout,
    zero_partitioned,
)
from streamrl.resharding.tensor_specs import even_stages

SHARDS_PARAMETERS = 3
"""The stage of ZeRO from which on replicas share out the weights."""


@dataclass(frozen=True)
class ClusterNodes(Nodes):
    """The nodes of a cluster, which need not be alike. node_of: by device."""

    node_of: tuple[int, ...] = ()

    @classmethod
    def of(cls, cluster: Cluster) -> "ClusterNodes":
        """Of a cluster."""
        nodes: list[int] = []
        first = 0
        for group in cluster.groups:
            nodes += [first + at // group.devices for at in range(group.size)]
            first += group.count
        return cls(max(group.devices for group in cluster.groups), tuple(nodes))

    def node(self, rank: int) -> int:
        """The node a device is on."""
        return self.node_of[rank]


@dataclass(frozen=True)
class Moved:
    """One version's way. seconds: of its bytes alone. received_bytes: of the rank with most.

    network_bytes: what most passes one node's network, in or out. beside_bytes: what the fullest
    device holds for the follower on top of the weights that are trained.
    """

    seconds: float
    received_bytes: int
    network_bytes: int
    beside_bytes: int


class Traffic:
    """Of one cluster; keeps what it found."""

    def __init__(self, cluster: Cluster, constants: Constants) -> None:
        self._cluster = cluster
        self._constants = constants
        self._nodes = ClusterNodes.of(cluster)
        self._link_s: list[float] = []
        self._network_s: dict[int, float] = {}
        for group in cluster.groups:
            link = group.device.link_bytes_per_s * constants.link_fraction
            self._link_s += [1 / link] * group.size
            network = 1 / (group.network * constants.network_fraction)
            self._network_s |= dict.fromkeys(
                range(len(self._network_s), len(self._network_s) + group.count), network
            )
        self._found: dict[Hashable, Moved] = {}

    def moved(self, shape: ModelShape, source: Assignment, target: Assignment) -> Moved:
        """What a version costs that `target` gets from `source`, which trains it."""
        where = self._where(source.mesh, target.mesh)
        shards = source.zero_stage >= SHARDS_PARAMETERS
        key = (shape, source.grid, source.expert, shards, target.grid, target.expert, where)
        if key not in self._found:
            self._found[key] = self._move(shape, source, target)
        return self._found[key]

    def plan(
        self, shape: ModelShape, source: Assignment, target: Assignment, *, full: bool = False
    ) -> CopyPlan:
        """What moves; with `full`, of every layer and every replica by itself."""
        return _Plan(shape, source, target, self._nodes, self._constants.served_bytes).copies(
            full=full
        )

    def seconds(self, report: BytesReport) -> float:
        """The longest of what any device has to send or receive in its node, and any node beyond.

        Both at full speed in both directions at once.
        """
        longest = 0.0
        for device, counts in report.ranks.items():
            near = max(counts.received["node"], counts.sent["node"])
            longest = max(longest, near * self._link_s[device])
        for node, num_bytes in _through_network(report, self._nodes).items():
            longest = max(longest, num_bytes * self._network_s[node])
        return longest

    def _move(self, shape: ModelShape, source: Assignment, target: Assignment) -> Moved:
        plan = self.plan(shape, source, target)
        report = plan.bytes_report()
        through = _through_network(report, self._nodes)
        shares = source.mesh == target.mesh and self._one_type
        itemsize = self._constants.served_bytes
        alone = fullest_stage(shape, target.grid.stages, target.grid.tensor) * itemsize
        return Moved(
            self.seconds(report),
            max(counts.received_bytes for counts in report.ranks.values()),
            max(through.values(), default=0),
            _beside(plan, report) if shares else alone,
        )

    @property
    def _one_type(self) -> bool:
        return self._constants.weight_bytes == self._constants.served_bytes

    def _where(self, source: Mesh, target: Mesh) -> Hashable:
        """All that a plan's seconds depend on of where the meshes are."""
        kinds = (tuple(source.groups(self._cluster)), tuple(target.groups(self._cluster)))
        if not self._cluster.is_uniform:
            return source, target
        per_node = self._nodes.ranks_per_node
        if source == target:
            return kinds, source.size
        if not source.overlaps(target) and not (source.size % per_node or target.size % per_node):
            return kinds, source.size, target.size
        first = min(source.first, target.first) // per_node * per_node
        return kinds, source.first - first, target.first - first, source.size, target.size


@dataclass(frozen=True)
class _Plan:
    """How weights of a shape get from the one to the other."""

    shape: ModelShape
    source: Assignment
    target: Assignment
    nodes: ClusterNodes
    itemsize: int

    @property
    def shards(self) -> bool:
        """Whether the replicas of the source share the weights out."""
        return self.source.zero_stage >= SHARDS_PARAMETERS and self.source.grid.replicas > 1

    @property
    def nests(self) -> bool:
        """Whether on the same devices every replica that is trained becomes some that follow."""
        train, follow = self.source.grid, self.target.grid
        return (
            self.source.mesh == self.target.mesh
            and not train.stages % follow.stages
            and not train.tensor % follow.tensor
            and not follow.replicas % train.replicas
        )

    def copies(self, *, full: bool) -> CopyPlan:
        """What moves."""
        parts = 1 if full or self.shards else self._alike()
        train = replace(self.source.grid, replicas=self.source.grid.replicas // parts)
        follow = replace(self.target.grid, replicas=self.target.grid.replicas // parts)
        spec = spec_of(self.shape, self.itemsize)
        if not full:
            pieces = 1 if self.shards else _pieces(train, follow)
            spec = _merged(spec, (train, follow), pieces, in_runs=self.shards)
        wanted = seated_layout(spec, self._seating(spec, train, follow))
        return plan_copies(self._held(spec, train, self.source.mesh.first), wanted, self.nodes)

    def _held(self, spec: ModelSpec, train: Grid, first: int) -> Layout:
        seating = replace(train.seating(), first_rank=first)
        layout = seated_layout(spec, seating)
        return zero_partitioned(layout, seating.data_groups()) if self.shards else layout

    def _seating(self, spec: ModelSpec, train: Grid, follow: Grid) -> Seating:
        """On the same devices who serves what follows from what they hold; elsewhere in order."""
        first = self.target.mesh.first
        if self.source.mesh != self.target.mesh:
            return replace(follow.seating(), first_rank=first)
        grouping = "zero" if self.nests else "overlap"
        replicas = train.replicas if self.nests else 1
        micro = follow.replicas // replicas
        sizes = GenerationSizes(follow.stages, follow.tensor, micro, replicas)
        served = seat(grouping, train, sizes, self._held(spec, train, 0))
        return replace(served, first_rank=first)

    def _alike(self) -> int:
        """Into how many parts source and target fall that do the same beside each other.

        On the same devices as few ranks as are replicas of both. On others, parts of whole nodes
        are served from parts of whole nodes.
        """
        train, follow = self.source.grid, self.target.grid
        if train.order != "hf" or follow.order != "hf" or len(set(self.nodes.node_of)) == 1:
            return 1
        per_node = self.nodes.ranks_per_node
        if self.source.mesh == self.target.mesh:
            # Blocks of whole replicas of both; all blocks hold and want the same.
            size = lcm(train.model_ranks, follow.model_ranks)
            whole = size % per_node == 0 or per_node % size == 0
            return train.size // size if whole and train.size % size == 0 else 1
        if self.source.mesh.overlaps(self.target.mesh):
            return 1
        most = gcd(train.replicas, follow.replicas)
        for parts in range(most, 0, -1):
            sizes = (self.source.mesh.size // parts, self.target.mesh.size // parts)
            if most % parts == 0 and not any(size % per_node for size in sizes):
                return parts
        return 1


def _pieces(train: Grid, follow: Grid) -> int:
    """How many tensors layers are merged into, so that those who hold them can share them out."""
    return train.replicas // gcd(train.replicas, follow.replicas)


def _merged(spec: ModelSpec, grids: tuple[Grid, Grid], pieces: int, *, in_runs: bool) -> ModelSpec:
    """The same bytes in fewer tensors: those that are cut alike and lie in the same stages.

    in_runs: for those who hold a run of a tensor's elements, each element of the one beside the
    same of the others, so that a run is of all of them what it was of each.
    """
    stages = [_stage_of(spec.num_places, grid.stages) for grid in grids]
    alike: dict[Hashable, list[int]] = {}
    for index, each in enumerate(spec.tensors):
        at = tuple(tuple(sorted({of[place] for place in each.places})) for of in stages)
        cut = (each.shape, each.split_dim, each.components, each.itemsize)
        alike.setdefault((at, cut), []).append(index)
    found = []
    for indices in alike.values():
        parts = min(pieces, len(indices))
        for part in range(parts):
            some = indices[part::parts]
            first = spec.tensors[some[0]]
            if in_runs:
                found.append(replace(first, shape=(*first.shape, len(some))))
                continue
            dim = None if first.split_dim is None else first.split_dim + 1
            found.append(replace(first, shape=(len(some), *first.shape), split_dim=dim))
    return ModelSpec(tuple(found), spec.num_places)


def _stage_of(num_places: int, stages: int) -> list[int]:
    counts = even_stages(num_places, stages)
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _beside(plan: CopyPlan, report: BytesReport) -> int:
    """What the fullest device holds of what follows, but for what lies in what is trained."""
    held: dict[int, int] = {}
    for rank, shards in plan.source.shards.items():
        if id(shards) not in held:
            held[id(shards)] = plan.source.num_bytes(rank)
    return max(
        counts.memory - held[id(plan.source.shards[rank])] for rank, counts in report.ranks.items()
    )


def _through_network(report: BytesReport, nodes: Nodes) -> Counter[int]:
    """Bytes that pass each node's network, in or out, whichever is more."""
    received: Counter[int] = Counter()
    sent: Counter[int] = Counter()
    for device, counts in report.ranks.items():
        received[nodes.node(device)] += counts.received["network"]
        sent[nodes.node(device)] += counts.sent["network"]
    return received | sent
