"""The place of a run: its identity, its directory, and the right to write there, chosen by the main process for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from danling.config import RunnerConfig
from danling.config.imposed import check_identity
from danling.distributed import Domain
from danling.utils.secrets import secret_values, without_secrets

from .claim import Claim, claim
from .identity import CodeIdentity, make_timestamp, run_id
from .litter import remove_litter
from .placing import wish_of
from .series import number_of
from .workspace import Workspace


class RunPlace:
    """Names a run, chooses its directory, and holds the right to write into it.

    Every method but `workspace`, `confirm` and `release` is called on all ranks: the main process acts, the others are told.
    """

    def __init__(
        self,
        settings: Callable[[], RunnerConfig],
        *,
        world: Domain,
        replicas: int,
        part: Callable[[], str | None],
        elsewhere: Callable[[str, str], Iterable[str]] = lambda family, id: (),
    ) -> None:
        self._settings, self._world, self._replicas, self._part = settings, world, replicas, part
        self._elsewhere = elsewhere
        self._claim: Claim | None = None
        self.code = CodeIdentity.of_directory() if world.rank == 0 else None
        named = (self.code.code_id if self.code else None, make_timestamp(), settings().config_id(replicas=replicas))
        self.code_id, self.timestamp, self.config_id = world.broadcast_object(named)
        self.choose()

    def choose(self) -> None:
        """Choose the run directory, and give an earlier choice up."""
        self.release()
        self.id = run_id(self.code_id, self.config_id)
        self._chosen_for = self._places()
        self.dir, self.id, self.notice = self._world.on_first(self._claimed)

    def enter(self) -> None:
        """Become the writer of the run directory; choose anew where a place in the configuration has changed since."""
        if self._places() != self._chosen_for:
            self.choose()
        self.id = self._world.on_first(self._entered)

    def open(self, *, code_id: str | None, config_id: str, timestamp: str) -> Workspace:
        """Become the writer of the run directory, create it, and remove what an attempt that was killed has left in it."""
        self.code_id, self.config_id = code_id, config_id
        self.enter()
        workspace = self.workspace(id=self.id, code_id=code_id, timestamp=timestamp)
        workspace.create()
        if workspace.is_main and not self._settings().checkpoint.load_only:
            remove_litter(workspace.dir)
        return workspace

    def write_metadata(self, workspace: Workspace, *, foreign: Callable[[], bool]) -> None:
        """Write what the run was made of, unless this process only looks at the run."""
        config = self._settings()
        check_identity(config, replicas=self._replicas)
        looks = config.checkpoint.load_only
        if looks and (foreign() or self._world.on_first(workspace.has_metadata)):
            return
        if workspace.is_main:
            listed = config.secret_keys or ()
            workspace.write_metadata(
                config.public(),
                config.canonical(replicas=self._replicas),
                without_secrets(config.changed(), listed),
                self.code,
                keep_diff=config.git_diff,
                secrets=secret_values(config.plain(), listed),
            )

    def workspace(self, *, id: str, code_id: str | None, timestamp: str) -> Workspace:
        """Return the paths of the run; no file is touched."""
        config = self._settings()
        return Workspace(
            workspace_root=config.workspace_root,
            lineage=config.lineage,
            code_id=code_id,
            id=id,
            timestamp=timestamp,
            is_main=self._world.rank == 0,
            dir=self.dir,
            checkpoint_dir=config.get("checkpoint_dir", None),
            checkpoint_dir_name=config.checkpoint.dir_name,
            log_file=config.get("log_file", None),
            part=self._part(),
        )

    @property
    def instance(self) -> str:
        """Name of this run among those of one id that lie side by side: the id, or the id with `-2`, `-3`, ..."""
        name = self.dir.name
        return name if number_of(name, self.id) is not None else self.id

    @property
    def family(self) -> str:
        """Name of the directory in which the runs of this line of work lie: the lineage, with the name of the code where there is git."""
        lineage = self._settings().lineage
        return f"{lineage}-{self.code_id}" if self.code_id else lineage

    def write_figures(self, *, resumed: bool) -> None:
        """Become the writer of a directory that was entered to look only, since training begins."""
        self._world.on_first(lambda: self._claim.write_figures(resumed=resumed) if self._claim is not None else None)

    def confirm(self) -> None:
        """See to it that this process is the writer of the directory still; on the main process."""
        if self._claim is not None:
            self._claim.confirm()

    def release(self) -> None:
        """Give the right to write up; a second call does nothing."""
        if self._claim is not None:
            self._claim.release()

    def _claimed(self) -> tuple[Path, str, str | None]:
        wish = wish_of(self._settings(), id=self.id, code_id=self.code_id, part=self._part(), replicas=self._replicas)
        self._claim = claim(replace(wish, elsewhere=self._numbers_elsewhere))
        return self._claim.dir, self._claim.id, self._claim.notice

    def _numbers_elsewhere(self) -> list[int]:
        found = (number_of(name, self.id) for name in self._elsewhere(self.family, self.id))
        return sorted(number for number in found if number is not None)

    def _entered(self) -> str:
        assert self._claim is not None
        self._claim.enter()
        return self._claim.id

    def _places(self) -> tuple[Any, ...]:
        config = self._settings()
        named = (config.get("dir", None), config.get("checkpoint_dir", None), config.workspace_root, config.lineage)
        return (*named, config.resume, config.auto_resume, config.checkpoint.dir_name, self._part())
