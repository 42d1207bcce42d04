"""The state of a trainer on disk, for any backend and any number of ranks to go on from.

<trainer>/trainer.json                    updates made, and what it was written with
          state_00000_000.safetensors     rank 0's parts of parameters and of their moments
          rng_00000.safetensors           the random numbers of rank 0

Every part says which of its tensor's elements it has, as a Shard: a rank reads those that meet its
own, whoever wrote them. Parameters are those that the optimizer updates, its float32 ones where it
has some. To the same layout everything comes back to the last bit. Nothing is pickled.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_safetensors
from torch import Tensor

from streamrl.errors import CheckpointError
from streamrl.files.bounded_read import parse_json, read_small_json
from streamrl.resharding import Box, Shard
from streamrl.resharding.boxes import remainder
from streamrl.resharding.layouts import Piece

FORMAT = 2
PROGRESS_FILE = "trainer.json"
VALUE, MOMENTS = "value", ("exp_avg", "exp_avg_sq")
FILE_BYTES = 256 << 20
"""Size at which another file is begun: so much of a state is in memory twice while it is saved."""
_SHARDS = "shards"


@dataclass(frozen=True)
class Fragment:
    """A part of a parameter as a rank's optimizer has it.

    It is `shard.numel` elements of the optimizer's own tensor `owner`, from `start` on. `is_copy`:
    another rank saves the same.
    """

    shard: Shard
    owner: Tensor
    start: int = 0
    is_copy: bool = False

    def of(self, block: Tensor) -> Tensor:
        """Its elements [n] of a tensor that lies as the owner does."""
        return block.detach().view(-1).narrow(0, self.start, self.shard.numel)


@dataclass(frozen=True)
class Progress:
    """How far a trainer has come. `step` is its optimizer's, 0 before the first.

    `layout` is what it was written with, in words; `adapters` what another run has to have alike.
    """

    num_updates: int
    step: int
    layout: str
    adapters: str


def save_state(
    directory: Path, rank: int, fragments: Iterable[Fragment], optimizer: torch.optim.Optimizer
) -> int:
    """Write what a rank has of the state; returns the optimizer's step."""
    steps = {0}
    with _Files(directory, f"state_{rank:05d}") as files:
        for fragment in fragments:
            state = optimizer.state.get(fragment.owner, {})
            steps.add(int(state.get("step", 0)))
            if fragment.is_copy:
                continue
            blocks = {VALUE: fragment.owner, **{m: state[m] for m in MOMENTS if m in state}}
            for kind, block in blocks.items():
                files.add(kind, fragment.shard, fragment.of(block))
    return max(steps)


def load_state(
    directory: Path,
    step: int,
    fragments: Iterable[Fragment],
    optimizer: torch.optim.Optimizer,
    placed: Iterable[tuple[str, Tensor, Shard]],
) -> None:
    """Fill a rank's optimizer from what any ranks saved, and the parameters computed with.

    Raises CheckpointError if a part of them was not saved.
    """
    with StateFiles(directory) as files:
        for fragment in fragments:
            files.fill(VALUE, fragment.shard, fragment.of(fragment.owner))
            if not step:
                continue
            state = optimizer.state[fragment.owner]
            if not state:
                own = fragment.owner.detach()
                state |= {kind: torch.zeros_like(own) for kind in MOMENTS}
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
            for kind in MOMENTS:
                files.fill(kind, fragment.shard, fragment.of(state[kind]))
        for _, tensor, shard in placed:
            files.fill(VALUE, shard, tensor.detach().view(-1)[: shard.numel])


def write_progress(directory: Path, progress: Progress) -> None:
    """Write what one rank knows for all."""
    text = json.dumps({"format": FORMAT, **vars(progress)}, indent=1)
    (directory / PROGRESS_FILE).write_text(text + "\n")


def read_progress(directory: Path) -> Progress:
    """Read what `write_progress` wrote. Raises CheckpointError for anything else."""
    path = directory / PROGRESS_FILE
    try:
        found = read_small_json(path)
        if found.pop("format") != FORMAT:
            raise CheckpointError(f"{path}: not a trainer's state of format {FORMAT}")
        progress = Progress(**found)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: {error!r}: cannot be read") from error
    if not all(isinstance(n, int) and n >= 0 for n in (progress.num_updates, progress.step)):
        raise CheckpointError(f"{path}: num_updates and step must be whole numbers")
    return progress


def save_rng(directory: Path, rank: int) -> None:
    """Write where this rank's random numbers are."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    _rng_file(directory, rank).write_bytes(to_safetensors(found))


def load_rng(directory: Path, rank: int) -> None:
    """Go on with them; a rank that was not there when they were saved keeps its own."""
    path = _rng_file(directory, rank)
    if not path.is_file():
        return
    found = _read_rng(path)
    torch.set_rng_state(found["cpu"])
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state(found["cuda"])


def _read_rng(path: Path) -> dict[str, Tensor]:
    """Read where a rank's random numbers are. Raises CheckpointError for what is no such state."""
    with _opened(path) as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    now, then = torch.get_rng_state(), found.get("cpu")
    if then is None or (then.dtype, then.shape) != (now.dtype, now.shape):
        raise CheckpointError(f"{path}: not a state of random numbers")
    return found


def check_state(directory: Path) -> Progress:
    """Check, of large files by their headers, that a state is whole, or raise CheckpointError."""
    progress = read_progress(directory)
    with StateFiles(directory) as files:
        files.check(MOMENTS if progress.step else ())
    for path in sorted(directory.glob("rng_*.safetensors")):
        _read_rng(path)
    return progress


class StateFiles:
    """The parts that all ranks saved, by kind and tensor. A context: its files are mapped."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: dict[tuple[str, str], list[tuple[Shard, Any]]] = {}
        self._opened = ExitStack()

    def __enter__(self) -> "StateFiles":
        with ExitStack() as unless_done:
            unless_done.push(self._opened)
            paths = sorted(self._directory.glob("state_*.safetensors"))
            if not paths:
                raise CheckpointError(f"{self._directory} holds no state of a trainer")
            for path in paths:
                self._list_parts(path, unless_done.enter_context(_opened(path)))
            self._opened = unless_done.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _list_parts(self, path: Path, file: Any) -> None:
        try:
            shards = parse_json((file.metadata() or {})[_SHARDS])
            for key in file.keys():  # noqa: SIM118
                kind, _, name = key.partition("/")
                shard = _read_shard(name, shards[name])
                if file.get_slice(key).get_shape() != [shard.numel]:
                    raise ValueError(f"{key}: not as many elements as its shard")
                entry = (shard, partial(file.get_tensor, key))
                self._parts.setdefault((kind, name), []).append(entry)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a trainer's state: {error!r}") from error

    def fill(self, kind: str, shard: Shard, target: Tensor) -> None:
        """Fill what a rank stores of a tensor, [n], from all parts that have some of it."""
        missing = shard.boxes
        for part, read in self._parts.get((kind, shard.tensor), ()):
            common = [
                (piece.within(box), own.within(box))
                for piece in part.pieces
                for own in shard.pieces
                if (box := piece.box.meet(own.box))
            ]
            if not common or not missing:
                continue
            source = read()
            for piece, own in common:
                _view(target, own).copy_(_view(source, piece))
            missing = remainder(missing, [piece.box for piece, _ in common])
        if missing:
            raise CheckpointError(
                f"{self._directory} lacks {kind} of {shard.tensor}{missing[0]}: it was written for"
                " another model, or is not whole"
            )

    def check(self, kinds: Iterable[str]) -> None:
        """Raise CheckpointError unless the parts of each tensor make up all of it."""
        names = [name for kind, name in self._parts if kind == VALUE]
        for kind in (VALUE, *kinds):
            for name in names:
                found = [
                    box for shard, _ in self._parts.get((kind, name), ()) for box in shard.boxes
                ]
                # A tensor ends where the farthest part of it does.
                stops = zip(*(box.stop for box in self._parts_of(name)), strict=True)
                whole = Box.whole(tuple(map(max, stops)))
                if missing := remainder([whole], found):
                    raise CheckpointError(f"{self._directory} lacks {kind} of {name}{missing[0]}")

    def _parts_of(self, name: str) -> Iterator[Box]:
        for shard, _ in self._parts.get((VALUE, name), ()):
            yield from (box for box, _ in shard.parts)


@dataclass
class _Files:
    """The files that one rank writes, each of bounded size."""

    directory: Path
    stem: str
    _count: int = 0
    _bytes: int = 0
    _tensors: dict[str, Tensor] = field(default_factory=dict)
    _shards: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> "_Files":
        return self

    def add(self, kind: str, shard: Shard, elements: Tensor) -> None:
        """Take a part; it is copied."""
        self._tensors[f"{kind}/{shard.tensor}"] = elements.to("cpu", copy=True)
        self._shards[shard.tensor] = _written_shard(shard)
        self._bytes += elements.nbytes
        if self._bytes >= FILE_BYTES:
            self._write()

    def _write(self) -> None:
        path = self.directory / f"{self.stem}_{self._count:03d}.safetensors"
        path.write_bytes(to_safetensors(self._tensors, {_SHARDS: json.dumps(self._shards)}))
        self._tensors, self._shards = {}, {}
        self._count, self._bytes = self._count + 1, 0

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None and self._tensors:
            self._write()


def _view(stored: Tensor, piece: Piece) -> Tensor:
    offset = int(stored.storage_offset()) + piece.offset
    return stored.as_strided(piece.box.shape, piece.strides, offset)


def _written_shard(shard: Shard) -> list[Any]:
    parts = [[box.start, box.stop, at] for box, at in shard.parts]
    return [shard.shape, parts, shard.run]


def _read_shard(name: str, written: Any) -> Shard:
    shape, parts, run = written
    found = tuple((Box(tuple(start), tuple(stop)), tuple(at)) for start, stop, at in parts)
    shard = Shard(name, tuple(shape), found, None if run is None else (run[0], run[1]))
    if shard.numel != sum(box.numel for box in shard.boxes):
        raise ValueError(f"{name}: its parts are not what it stores")
    return shard


def _rng_file(directory: Path, rank: int) -> Path:
    return directory / f"rng_{rank:05d}.safetensors"


def _opened(path: Path) -> Any:
    """A safetensors file; raises CheckpointError unless it is a whole one."""
    try:
        if not path.is_file():
            raise OSError("not a regular file")
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write whole tensors, on the CPU, into one file."""
    path.write_bytes(to_safetensors({n: t.contiguous() for n, t in tensors.items()}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read what `save_tensors` wrote, as tensors of their own. Raises CheckpointError."""
    with _opened(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
