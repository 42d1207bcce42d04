"""The few named errors of streamrl. Each takes one message, so that each survives pickling."""


class StreamError(Exception):
    """Base of what streamrl raises on purpose while a run is under way.

    `cause` is the name under which a group dropped for this error is counted (drops/<cause>);
    `is_final` says that what raised it has tried often enough: the group is dropped at once.
    """

    cause = "error"
    is_final = False


class ConfigError(ValueError):
    """A setting, file or row the user gave cannot be used: rule, value and place in one line."""


class DeadlineError(StreamError):
    """A wait passed its deadline; the message names what was waited for and who holds it."""

    cause = "deadline"


class ContractError(StreamError, ValueError):
    """A stage that there is not, or columns other than a stage has declared, or badly shaped."""


class StaleGroupError(StreamError):
    """A group older than max_staleness reached a step. A bug in admission, never a user's fault."""


class LeaseError(StreamError):
    """A commit came with a lease that expired or was already settled."""


class LedgerError(StreamError):
    """The conservation law admitted = trained + filtered + dropped + in flight does not hold."""


class WeightsError(StreamError):
    """A weight bucket is missing, or does not match its checksum, or its version goes backwards."""


class VersionSupersededError(StreamError):
    """A version of the weights is gone before it was taken up: the next one is on its way."""


class LogprobCheckError(StreamError):
    """What serves a version does not compute what the trainer does, though every byte arrived."""


class GenerationError(StreamError):
    """The generation engine died or was closed, and serves nothing more; the message says why."""


class RewardError(StreamError):
    """A reward could not be computed for a group (never a score of 0).

    Itself it is final, and says that the reward is wrong: it raised, or gave no finite number.
    """

    cause = "reward_error"
    is_final = True


class RewardInfraError(RewardError):
    """What a reward needs could not be had: no worker, no sandbox, no answer from a server."""

    cause = "reward_infra"


class RewardRaisedError(RewardInfraError):
    """The code of a reward raised; that may pass, as where it asks a server."""

    cause = RewardError.cause


class RewardTimeoutError(RewardInfraError):
    """A reward was not computed in time; the process that was at it is gone."""

    cause = "reward_timeout"


class RewardCrashError(RewardInfraError):
    """The process that computed a reward ended."""

    cause = "reward_crash"


class RewardMemoryError(RewardInfraError):
    """The process that computed a reward took more memory than it may."""

    cause = "reward_memory"


class AlgorithmError(StreamError):
    """A function of an algorithm's row failed, or gave something else than it has to."""


class FilterLimitError(StreamError):
    """A step filtered so many groups that the data set seems to yield nothing."""


class DropLimitError(StreamError):
    """A step dropped so many groups that what works on them seems to be broken."""


class DataError(StreamError):
    """No prompt can be drawn any more: a data file has changed, or too many rows are bad."""


class CheckpointError(StreamError):
    """A checkpoint could not be written or read."""


class NoSpaceError(CheckpointError):
    """There is no space for a checkpoint: what was there before stays, and the run can go on."""


class JournalError(StreamError):
    """A journal cannot be written or read; the message names the file."""


class DiskError(StreamError):
    """A file of the run directory cannot be written; the message names it."""


class ActorError(StreamError):
    """An actor of the run failed; the message names the actor and what it was doing."""


class ActorLostError(ActorError):
    """The process of an actor died."""


class RankLostError(ActorError):
    """A collective failed, since another rank is gone; the call to that one says how."""
