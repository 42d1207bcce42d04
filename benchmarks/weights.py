"""What a new version of the weights costs: `python -m benchmarks.weights` prints one JSON object.

Per size (millions of float32 parameters), transport and number of generators, medians over some
versions, in seconds: publish_s in the publisher; transfer_s to fetch and verify in a generator and
load_s to put into its vLLM engine (the slowest generator's); end_to_end_s from the call to publish
until all generators serve the version, against memcpy_s, which the publisher takes to copy the same
bytes into warm memory. All that with engines at rest. Then once more with rollouts running:
pause_s in which an engine decodes nothing, and decode_step_s of a step beside. One element in 20
changes from version to version, which only delta takes advantage of.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from benchmarks.random_model import SHAPES, write_model
from benchmarks.weights_actors import Generator, Publisher
from streamrl.actors.cluster import cluster, nothing
from streamrl.engines.generator_config import generation_env
from streamrl.placement import PlacementConfig
from streamrl.weights.config import AUTO, TRANSPORTS

WARM_UP_VERSIONS = 3
"""So many until memory is used for the second time."""

STORE_VERSIONS = 5
OTHERS_MB = 512


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    known = [name for name in TRANSPORTS if name != AUTO]
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--transports", nargs="+", default=known, choices=known)
    parser.add_argument("--generators", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--versions", type=int, default=3, help="measured, of each combination")
    arguments = parser.parse_args(argv)
    # Standard output is the JSON object alone, whatever the cluster has to say meanwhile.
    with contextlib.redirect_stdout(sys.stderr):
        found = {f"{size}M": measure_size(size, arguments) for size in arguments.sizes}
    print(json.dumps(found, indent=1))


def measure_size(millions: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All transports and numbers of generators for one size of model."""
    store_mb = OTHERS_MB + STORE_VERSIONS * 4 * millions
    placement = PlacementConfig(cpus=8, object_store_mb=store_mb)
    with tempfile.TemporaryDirectory() as folder, cluster(placement, nothing):
        model = write_model(millions, Path(folder) / "model")
        publisher = Publisher.remote(millions)
        env = {"env_vars": generation_env("cpu")}
        names = [f"generator-{i}" for i in range(max(arguments.generators))]
        readers = {name: Generator.options(runtime_env=env).remote() for name in names}
        ray.get([reader.start.remote(name, model) for name, reader in readers.items()])
        versions = itertools.count()
        found: dict[str, Any] = {"bytes": ray.get(publisher.num_bytes.remote())}
        for transport in arguments.transports:
            found[transport] = {}
            for number in arguments.generators:
                some = dict(list(readers.items())[:number])
                disk = f"{folder}/{transport}-{number}"
                ray.get(publisher.use.remote(transport, list(some), disk))
                ray.get([reader.use.remote(transport) for reader in some.values()])
                figures = measure(publisher, list(some.values()), versions, arguments.versions)
                found[transport][f"generators_{number}"] = figures
                print(f"{millions}M {transport} to {number}: {figures}", file=sys.stderr)
        ray.get(publisher.end.remote())
    return found


def measure(
    publisher: Any, readers: Sequence[Any], versions: Iterator[int], number: int
) -> dict[str, float]:
    """Medians over `number` versions at rest, and as many with rollouts running."""
    for _ in range(WARM_UP_VERSIONS):
        one_version(publisher, readers, next(versions))
    rows = [one_version(publisher, readers, next(versions)) for _ in range(number)]
    found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    found["end_to_end_over_memcpy"] = found["end_to_end_s"] / found["memcpy_s"]
    ray.get([reader.decode.remote() for reader in readers])
    busy = [one_version(publisher, readers, next(versions)) for _ in range(number)]
    found["pause_s"] = statistics.median(row["pause_s"] for row in busy)
    steps = ray.get([reader.rest.remote() for reader in readers])
    found["decode_step_s"] = statistics.median(steps)
    found["end_to_end_decoding_s"] = statistics.median(row["end_to_end_s"] for row in busy)
    return found


def one_version(publisher: Any, readers: Sequence[Any], version: int) -> dict[str, float]:
    """Publish a version and have all readers load it; of them the slowest counts."""
    manifest, publish_s, memcpy_s = ray.get(publisher.publish.remote(version))
    published = time.perf_counter()
    rows = ray.get([reader.pull.remote(manifest) for reader in readers])
    # What the publisher does for the measurement itself is not part of it.
    end_to_end_s = publish_s + time.perf_counter() - published
    slowest = {name: max(row[name] for row in rows) for name in rows[0]}
    return {
        "memcpy_s": memcpy_s,
        "publish_s": publish_s,
        **slowest,
        "end_to_end_s": end_to_end_s,
    }


if __name__ == "__main__":
    main()
