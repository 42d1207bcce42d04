"""What the stages of a queue have declared, and whether callers keep to it."""

from collections.abc import Mapping, Sequence

from streamrl.buffer.config import Ports
from streamrl.buffer.wire_types import Commit
from streamrl.errors import ContractError
from streamrl.messages import GroupInfo, Per, check_sizes, column_spec


class Contract:
    """The columns that each stage needs and makes. All methods raise ContractError."""

    def __init__(self, stages: Mapping[str, Ports]) -> None:
        self._needs = {stage: frozenset(ports.needs) for stage, ports in stages.items()}
        self._makes = {stage: frozenset(ports.produces) for stage, ports in stages.items()}
        everything = frozenset[str]().union(*self._makes.values())
        self._of_others = {stage: everything - own for stage, own in self._makes.items()}

    def check_request(self, stage: str, columns: Sequence[str]) -> None:
        """A stage takes no columns but those it needs."""
        if alien := set(columns) - self._of(self._needs, stage):
            raise ContractError(f"stage {stage} takes {sorted(alien)}: not what it needs")

    def check_commit(self, commit: Commit, info: GroupInfo | None) -> None:
        """A stage puts the columns it declared, and none of another's, in the group's sizes."""
        stage, uid, names = commit.lease.stage, commit.lease.uid, commit.sizes.keys()
        if not names >= self._of(self._makes, stage):
            missing = sorted(self._makes[stage] - names)
            raise ContractError(f"stage {stage} put no {missing} for {uid}")
        if not names.isdisjoint(self._of_others[stage]):
            foreign = sorted(names & self._of_others[stage])
            raise ContractError(f"stage {stage} put {foreign} for {uid}: not its own")
        if info is None:
            if early := sorted(n for n in names if column_spec(n).per is not Per.GROUP):
                raise ContractError(f"stage {stage} put {early} for {uid} before its rollouts")
            return
        if not info.version_tokens:
            raise ContractError(f"group {uid}: no token of it was sampled (loss_mask)")
        if info.min_version < 0:
            raise ContractError(f"group {uid}: a sampled token has no policy_version")
        if min(info.lengths, default=0) < 1:
            shortest = min(info.lengths, default=0)
            raise ContractError(f"group {uid}: a rollout of {shortest} tokens (lengths)")
        check_sizes(commit.sizes, info)

    def _of(self, columns: Mapping[str, frozenset[str]], stage: str) -> frozenset[str]:
        if stage not in columns:
            raise ContractError(f"stage {stage}: this queue has {', '.join(columns)}")
        return columns[stage]
