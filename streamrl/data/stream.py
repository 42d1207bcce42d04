"""The endless stream of prompts, resumable to the row.

The prompts are rendered and in memory: all that is to be known of a place in the stream is how many
of each file have been given out.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from streamrl.data.order import Part, UidIterator, UidSampler
from streamrl.errors import ConfigError
from streamrl.messages import Prompt, make_uid, parse_uid


class PromptStream(Iterator[Prompt]):
    """Every prompt of a file once per epoch of that file, for ever.

    `prompts` are those that `load_prompts` returned. `mix` has the number of prompts and the share
    of the stream of each file they are of, in their order; empty: one file. Each file has epochs of
    its own, shuffled by (seed, file, epoch). A prompt goes out with uid (epoch, index, 0), index
    being that of the uid it was loaded with.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        seed: int,
        shuffle: bool = True,
        mix: Sequence[tuple[int, float]] = (),
    ) -> None:
        indices = [parse_uid(prompt.uid)[1] for prompt in prompts]
        self._prompts = _ByUid(dict(zip(indices, prompts, strict=True)))
        if not prompts or len(self._prompts) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts with {len(self._prompts)} different indices")
        files = [(size, float(share)) for size, share in mix] or [(len(prompts), 1.0)]
        if sum(size for size, _ in files) != len(prompts) or min(min(file) for file in files) <= 0:
            raise ValueError(f"{len(prompts)} prompts of files with {files} prompts and shares")
        rest = iter(indices)
        parts = [Part([next(rest) for _ in range(size)], share) for size, share in files]
        self._uids = UidIterator(UidSampler(parts, seed=seed, shuffle=shuffle))
        self._identity = {
            "num_prompts": len(prompts),
            "fingerprint": _fingerprint(prompts),
            "files": [list(file) for file in files],
            "shuffle": shuffle,
            "seed": seed,
        }

    def __len__(self) -> int:
        """Prompts per epoch, of all files."""
        return len(self._prompts)

    def __next__(self) -> Prompt:
        """The next prompt; there always is one."""
        return self._prompts[next(self._uids)]

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [next(self) for _ in range(count)]

    def prompt(self, uid: str) -> Prompt:
        """The prompt of a uid this stream gave out, now or before a resume; the place is kept.

        Any attempt will do. Raises ValueError for a uid whose index is not in the data.
        """
        return self._prompts[uid]

    def retry(self, uid: str) -> Prompt:
        """The prompt of a dropped uid under the uid of its next attempt."""
        epoch, index, attempt = parse_uid(uid)
        return self.prompt(make_uid(epoch, index, attempt + 1))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON: how much of each file has been given out."""
        return {**self._uids.state_dict(), **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where the stream that wrote `state` stood.

        Raises ConfigError if that stream had other prompts or another order: some rows of the
        epoch would be lost and others trained twice.
        """
        for name, now in self._identity.items():
            if state[name] != now:
                raise ConfigError(
                    f"cannot resume the data stream: {_IDENTITY[name]} was {state[name]} when the "
                    f"checkpoint was written and is {now} now; use the same, or start a new run"
                )
        # Checkpoints used to have it as torchdata's loader wrote it.
        self._uids.load_state_dict(
            state["loader"]["_sampler_iter_state"] if "loader" in state else state
        )


#: What must be the same on resume, in words for the user.
_IDENTITY = {
    "num_prompts": "the number of prompts in data.train",
    "fingerprint": "the content of data.train as tokens (fingerprint)",
    "files": "what each file of data.train has of prompts and of the stream",
    "shuffle": "data.shuffle",
    "seed": "the seed of the data order",
}


class _ByUid:
    """Prompts by uid, of any epoch and attempt."""

    def __init__(self, prompts: Mapping[int, Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, uid: str) -> Prompt:
        _, index, _ = parse_uid(uid)
        if index not in self._prompts:
            raise ValueError(f"uid {uid}: no prompt with index {index} among the {len(self)}")
        return replace(self._prompts[index], uid=uid)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Hash of what a run learns from: index, tokens, source and ground truth of every prompt."""
    digest = hashlib.blake2b(digest_size=8)
    for prompt in prompts:
        facts = (parse_uid(prompt.uid)[1], prompt.data_source, prompt.ground_truth)
        digest.update(repr((facts, len(prompt.token_ids))).encode("utf-8", "backslashreplace"))
        digest.update(prompt.token_ids.astype(np.int32).tobytes())
    return digest.hexdigest()
