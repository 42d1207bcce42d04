"""A publisher of weights in this process, and readers in processes of their own, one per GPU."""

import os
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from streamrl.distributed.devices import get_local_device
from streamrl.weights import WeightManifest
from streamrl.weights.buckets import unpack_slices
from streamrl.weights.rank_slices import SliceLayout
from streamrl.weights.transports.collective import CollectiveReader, CollectiveWriter
from streamrl.weights.transports.shared_memory import SharedMemoryReader, SharedMemoryWriter
from tests import forked
from tests.weights.local_transport import LocalReader, LocalWriter, Versions, act_in_broadcast

TIMEOUT_S = 12.0
VERSIONS = Versions(*[300_000] * 4, bucket_bytes=1_200_000)
LAYOUTS: Sequence[SliceLayout] = (
    {"t0": [(slice(0, 60_000),)], "t1": [(slice(0, 300_000),)]},
    {"t0": [(slice(60_000, 80_000),), (slice(80_000, 300_000),)], "t3": [(slice(0, 300_000),)]},
)


def fetch_slices(reader: CollectiveReader, manifest: WeightManifest) -> bool:
    """Return whether the reader receives exactly the slices of LAYOUTS."""
    tensors = VERSIONS.make_tensors(manifest.version)
    expected = {
        **{"0/t0[0:60000]": tensors["t0"][:60_000], "0/t1[0:300000]": tensors["t1"]},
        **{"1/t0[60000:80000]": tensors["t0"][60_000:80_000]},
        **{"1/t0[80000:300000]": tensors["t0"][80_000:], "1/t3[0:300000]": tensors["t3"]},
    }
    slices = unpack_slices(manifest, reader.fetch_slices(manifest))
    return slices.keys() == expected.keys() and all(
        torch.equal(slices[name], expected[name]) for name in expected
    )


def follow_manifests(pipe: Connection, name: str) -> None:
    """Fetch each received manifest; reply with (tensors are right, fallback reason).

    A number beside a manifest makes the process die before that broadcast.
    """
    collective_reader = CollectiveReader(
        name,
        SharedMemoryReader("policy", LocalReader()),
        timeout_s=TIMEOUT_S,
        device=get_local_device(),
    )
    pipe.send("ready")
    while True:
        manifest, dies_at = pipe.recv()
        with act_in_broadcast(dies_at, lambda: os._exit(1)):
            fetch = fetch_slices if manifest.rank_manifests else VERSIONS.fetch
            is_right = fetch(collective_reader, manifest)
        pipe.send((is_right, collective_reader.fallback_reason))


class Reader:
    """A reader in its own process, whose start takes longer than a broadcast may.

    gpu: index of its GPU, if there are several; the publisher has the first.
    layouts: of its ranks, which have a GPU each.
    """

    def __init__(self, name: str, *, gpu: int = 0, layouts: Sequence[SliceLayout] = ()) -> None:
        self.name, self.layouts = name, layouts
        gpus = {"gpu": gpu, "num_gpus": max(1, len(layouts))}
        self.process, self._pipe = forked.start(follow_manifests, name, **gpus)
        assert self._pipe.recv() == "ready"

    def pull(self, manifest: WeightManifest, *, dies_at: int = 0) -> None:
        self._pipe.send((manifest, dies_at))

    def outcome(self) -> tuple[bool, str | None]:
        """Return (the last version is right, fallback reason)."""
        if not self._pipe.poll(60):
            raise TimeoutError(self.name)
        return self._pipe.recv()

    def end(self) -> None:
        self.process.kill()
        self.process.join()


class Broadcasting:
    """A publisher in this process and readers in others."""

    def __init__(self) -> None:
        self.writer = CollectiveWriter(
            SharedMemoryWriter("broadcast", LocalWriter(), keep_versions=2),
            host="127.0.0.1",
            timeout_s=TIMEOUT_S,
            device=get_local_device(),
        )
        self.readers: list[Reader] = []
        self.version = -1

    def add(self, *names: str) -> None:
        first = len(self.readers) + 1
        self.readers += [Reader(name, gpu=first + i) for i, name in enumerate(names)]

    def put(self) -> WeightManifest:
        self.version += 1
        self.writer.set_readers({reader.name: reader.layouts for reader in self.readers})
        return VERSIONS.publish(self.writer, self.version)

    def round(self, readers: Sequence[Reader] | None = None) -> list[tuple[bool, str | None]]:
        """Publish a version and return the outcomes of these readers."""
        manifest = self.put()
        members = self.readers if readers is None else readers
        for reader in members:
            reader.pull(manifest)
        return [reader.outcome() for reader in members]

    def end(self) -> None:
        for reader in self.readers:
            reader.end()
        self.writer.close()
