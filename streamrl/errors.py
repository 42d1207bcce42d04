"""Exceptions of streamrl, and messages of any exception on one line.

Each exception takes a single message, so that pickling between processes works.
"""

from collections.abc import Iterator
from contextlib import contextmanager


def get_message(error: BaseException) -> str:
    """Return the message of an exception on one line, or its type without a message."""
    return " ".join(str(error).split()) or type(error).__name__


def format_error(error: BaseException) -> str:
    """Format an exception as `type: message` on one line; an empty message is omitted."""
    name, message = type(error).__name__, get_message(error)
    return name if message == name else f"{name}: {message}"


def get_first_line(error: object) -> str:
    """Return the first line of a message, below which a library explains or shows a trace."""
    return str(error).partition("\n")[0]


class StreamError(Exception):
    """Base class of the errors that streamrl raises while a run is in progress.

    `cause` names the counter (drops/<cause>) of groups dropped for this error. `is_final` means
    that retries are exhausted or useless: the group is dropped at once.
    """

    cause = "error"
    is_final = False


class ConfigError(ValueError):
    """Unusable setting, file or data row; the message names rule, value and place in one line."""


@contextmanager
def extend_errors(before: str = "", after: str = "") -> Iterator[None]:
    """Add the place of an error, or what to do, to the message of a ConfigError of the block."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{before}{error}{after}") from None


class DeadlineError(StreamError):
    """A wait passed its deadline; the message names the resource and its holder."""

    cause = "deadline"


class ContractError(StreamError, ValueError):
    """Unknown stage, or columns that differ from its declaration in name, shape or dtype."""


class StaleGroupError(StreamError):
    """A group older than max_staleness reached a step: a bug in admission, never a user error."""


class LedgerError(StreamError):
    """The invariant admitted = trained + filtered + dropped + in flight is violated."""


class WeightsError(StreamError):
    """A weight bucket is missing or fails its checksum, or the version goes backwards."""


class VersionSupersededError(StreamError):
    """The trainer of the same process overwrote shared weights before the follower loaded them.

    A newer version follows.
    """


class LogprobCheckError(StreamError):
    """Logprobs of trainer and follower differ, although every byte of the weights arrived."""


class GenerationError(StreamError):
    """The generation engine died or was closed; the message gives the reason."""


class EpisodeError(StreamError):
    """The infrastructure of an episode failed: never a fault of the policy, never reward 0.

    The environment raised, its process died, or it refused another session. Final, because the
    driver of episodes has tried again.
    """

    cause = "environment_error"
    is_final = True


class EpisodeTimeoutError(EpisodeError):
    """An environment did not answer in time."""

    cause = "environment_timeout"


class ServiceOutageError(StreamError):
    """Nobody answers at the address of a service outside the run; the message begins with it.

    Never a fault of the item in hand, which waits (user_code/service_gate.py).

    retry_after_s: pause that a busy server asks for, s; 0 without. is_answer: a server answered
    with an error of its own, which the item may have brought about.
    """

    cause = "outage"
    retry_after_s = 0.0
    is_answer = False


class EpisodeOutageError(ServiceOutageError, EpisodeError):
    """The server of an environment or of its tools is out: the episode begins anew afterwards."""


class RewardError(StreamError):
    """Computing a reward failed for a group (such a group never counts as score 0).

    The base class is final and means a wrong reward function: it raised or returned a non-finite
    number.
    """

    cause = "reward_error"
    is_final = True


class RewardInfraError(RewardError):
    """Infrastructure of a reward is unavailable: no worker, no sandbox, no reply from a server."""

    cause = "reward_infra"


class RewardRaisedError(RewardInfraError):
    """Reward code raised an error that may be transient, such as a failed server request."""

    cause = RewardError.cause


class RewardTimeoutError(RewardInfraError):
    """A reward exceeded its time limit; the process that computed it was killed."""

    cause = "reward_timeout"


class RewardCrashError(RewardInfraError):
    """The process that computed a reward exited."""

    cause = "reward_crash"


class RewardMemoryError(RewardInfraError):
    """The process that computed a reward exceeded its memory limit."""

    cause = "reward_memory"


class AlgorithmError(StreamError):
    """A function of an algorithm spec raised, or returned a wrong type or shape."""


class FilterLimitError(StreamError):
    """The group filter rejected so many groups in one step that the data set looks useless."""


class DropLimitError(StreamError):
    """So many groups were dropped in one step that the stage working on them looks broken."""


class DataError(StreamError):
    """Drawing a prompt failed for good: a data file has changed, or too many rows are bad."""


class VersionNotStoredError(WeightsError):
    """A version of the weights was sent to other readers only; it will be published again."""


class CheckpointError(StreamError):
    """Writing or reading a checkpoint failed."""


class NoSpaceError(CheckpointError):
    """The disk has no space for a checkpoint. Earlier files are intact; the run can continue."""


class JournalError(StreamError):
    """Writing or reading a journal failed; the message names the file."""


class DiskError(StreamError):
    """Writing a file of the run directory failed; the message names the file."""


class ActorError(StreamError):
    """An actor of the run failed; the message names the actor and its operation."""


class ActorLostError(ActorError):
    """The process of an actor died."""


class RankLostError(ActorError):
    """A collective failed because a peer rank is gone; the error of that rank has the cause."""
