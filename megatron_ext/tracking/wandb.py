"""wandb: online when the user is logged in, offline otherwise; the run folder keeps the run's id and its files.

Invariants (``tests/tracking/test_wandb.py`` asserts each):

1. ``mode='auto'`` is decided by wandb's own login state (an API key in its environment, netrc or settings) alone.
2. A server that cannot be reached costs one line of warning, and the run goes on offline.
3. ``<run_dir>/wandb_id`` holds the id, and whether anything was logged under it: a resumed run continues under it.
   Undone steps leave its curve: online by rewinding the run (to step 0 when there was no checkpoint), offline by
   recording the surviving steps of ``metrics.jsonl`` again; the older offline files are kept under
   ``wandb/superseded``, where a sync of the folder does not find them.
4. Nothing is printed on the console but that warning.
"""

from __future__ import annotations

import secrets
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import CommError, UsageError

from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

ID_FILE = "wandb_id"
MODES = ("auto", "online", "offline")


class WandbTracker:
    """Logs to one wandb run.

    Args:
        project: wandb project.
        entity: user or team; None = the login's default.
        mode: ``auto``, ``online`` (an unreachable server still falls back) or ``offline``.
        base_url: a server other than wandb's default; None = the login's.
        init_timeout_s: how long to wait for the server before going on offline.
        finish_timeout_s: how long the end of the run waits for uploads; what is left stays in the run folder.
        group: groups runs in the interface, e.g. the arms of a comparison.
    """

    def __init__(
        self,
        project: str,
        entity: str | None = None,
        mode: str = "auto",
        base_url: str | None = None,
        init_timeout_s: float = 30.0,
        finish_timeout_s: float = 60.0,
        group: str | None = None,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"tracking.wandb.mode {mode!r}: must be one of {', '.join(MODES)}")
        self._project, self._entity, self._group, self._mode = project, entity, group, mode
        self._shared: dict[str, Any] = {
            "silent": True,
            "console": "off",
            "init_timeout": init_timeout_s,
            "finish_timeout": finish_timeout_s,
        }
        if base_url is not None:
            self._shared["base_url"] = base_url
        self._run: wandb.Run | None = None
        self._id_file = Path()
        self._logged = False

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        wandb.setup(settings=wandb.Settings(**self._shared))
        self._id_file = run_dir / ID_FILE
        said = self._id_file.read_text().split() if self._id_file.exists() else []
        run_id = said[0] if said else secrets.token_hex(4)
        self._logged = len(said) > 1
        self._write_id(run_id)  # before the run exists: a kill in between must not leave it without its id
        try:
            if self._mode == "online" or (self._mode == "auto" and wandb.login(prompt=False, verify=False)):
                rewind_to = (resumed_from or 0) if self._logged else None
                self._run = self._open(run_dir, config, run_id, online=True, rewind_to=rewind_to)
        except (CommError, UsageError) as error:  # not reachable, no key, or it was refused: nothing of the run is lost
            reason = " ".join(str(error).split())
            print(f"warning: wandb goes on offline, upload later with `wandb sync` ({reason})", file=sys.stderr)
            wandb.teardown()  # the failed attempt still holds the run id in wandb's service process
            wandb.setup(settings=wandb.Settings(**self._shared))
        if self._run is None:
            self._run = self._open(run_dir, config, run_id, online=False, rewind_to=None)
            _supersede(run_dir / "wandb", run_id, keep=Path(self._run.dir).parent)
            if resumed_from is not None:
                self._replay(run_dir / FILE_NAME, resumed_from)

    def phase(self, name: str, total: int | None = None) -> None:
        """Phases are not sent; their durations are metrics (``time/<phase>``)."""

    def advance(self, done: int, note: str = "") -> None:
        """Progress is not sent."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        run = self._opened()
        if not self._logged:
            self._logged = True
            self._write_id(run.id)
        run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        run = self._opened()
        run.summary.update(dict(summary))
        run.finish()
        self._run = None

    def _open(
        self, run_dir: Path, config: Mapping[str, Any], run_id: str, *, online: bool, rewind_to: int | None
    ) -> wandb.Run:
        rewinds = rewind_to is not None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wandb.init(
                project=self._project,
                entity=self._entity,
                group=self._group,
                name=run_dir.name,
                dir=run_dir,
                config=dict(config),
                id=None if rewinds else run_id,
                resume="allow" if online and not rewinds else None,
                resume_from=f"{run_id}?_step={rewind_to}" if rewinds else None,
                settings=wandb.Settings(**self._shared, mode="online" if online else "offline"),
            )

    def _replay(self, path: Path, last: int) -> None:
        for row in read_metrics(path) if path.exists() else []:
            if row["step"] <= last:
                self.log(
                    row["step"], {name: value for name, value in row.items() if name != "step" and value is not None}
                )

    def _write_id(self, run_id: str) -> None:
        temporary = self._id_file.with_suffix(".tmp")
        temporary.write_text(f"{run_id} logged\n" if self._logged else f"{run_id}\n")
        temporary.replace(self._id_file)

    def _opened(self) -> wandb.Run:
        if self._run is None:
            raise RuntimeError("the wandb run is not open: call start() first")
        return self._run


def _supersede(folder: Path, run_id: str, *, keep: Path) -> None:
    """Moves older offline files of the run aside, so that a sync of the folder uploads the surviving history alone."""
    for old in sorted(folder.glob(f"offline-run-*-{run_id}")):
        if old.resolve() != keep.resolve():
            target = folder / "superseded" / old.name
            target.parent.mkdir(exist_ok=True)
            old.rename(target)
