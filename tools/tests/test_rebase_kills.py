"""SIGKILL and a full disk at every moment of a rebase: --continue or --abort always works, nothing is lost.

Each run is a forked process on a small project. It ends itself and its git before the n-th thing that it does
to the project's folder, for every n, or is ended after a random time.
"""

from __future__ import annotations

import random
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import pytest
from killing import Fork, count_steps, end_at, full_at, watch
from releaseproject import Rebased, copy_of
from stackproject import CORE, FILES, Project, message

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stackproject import Completed

FIRST, SECOND = "0100-demo-topic-return-five-hundred.patch", "0200-second-make-it-two.patch"
NEW_CORE = "# Upstream's new head.\n\n" + CORE.replace("return 5\n", "return 55\n")
RESOLVED = NEW_CORE.replace("return 55\n", "return 500 + 55\n")
FOLDERS = ("upstream", "patch-stack", ".vllm-stack")
COMMANDS = {"start": ("2.0.0",), "continue": ("--continue",), "abort": ("--abort",)}
#: Kills at random times for each stage, and at least so many at its steps: together 200.
RANDOM_RUNS = 30
LEAST_STEPS = {"start": 28, "continue": 60, "abort": 22}
SEED = 20260


class Mute:
    """Stands in for ``capsys``, which lasts only as long as one test."""

    def readouterr(self) -> tuple[str, str]:
        """Return nothing."""
        return "", ""


@dataclass(frozen=True)
class Stage:
    """A project at one point of a rebase, which can be put back there."""

    name: str
    rebased: Rebased
    template: Path

    @classmethod
    def of(cls, name: str, seed: Project, folder: Path) -> Stage:
        """Copy the project; it is where every rebase begins."""
        project = copy_of(seed, folder / "a stack", seed.capsys)
        rebased = Rebased.make(project)
        rebased.upstream.release("2.0.0", {**FILES, "demo/core.py": NEW_CORE})
        return cls(name, rebased, folder / "template")

    @property
    def root(self) -> Path:
        """The project's folder."""
        return self.rebased.project.root

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders in which steps count."""
        return tuple(self.root / name for name in FOLDERS)

    def save(self) -> None:
        """Let :meth:`reset` come back to here."""
        self.template.mkdir()
        self._copy(self.root, self.template)

    def reset(self) -> None:
        """Put the project back to where it was saved."""
        self._copy(self.template, self.root)

    @staticmethod
    def _copy(source: Path, to: Path) -> None:
        for name in FOLDERS:
            shutil.rmtree(to / name, ignore_errors=True)
            if (source / name).exists():
                shutil.copytree(source / name, to / name, symlinks=True)

    def resolve(self) -> None:
        """Resolve the conflict as a person would."""
        self.rebased.write("demo/core.py", RESOLVED)

    def command(self) -> int:
        """Run the command of the stage and return its exit status."""
        return self.rebased.run(*COMMANDS[self.name]).code

    def state(self) -> dict[str, bytes]:
        """Return all that a rebase may change."""
        return self.rebased.everything()


def no_rebase(done: Completed) -> bool:
    """Say whether a command found none: it had not begun, or was complete."""
    return done.code == 2 and done.error["message"] == "no rebase of demo is open"


@dataclass(frozen=True)
class Ends:
    """The two states that are allowed when a rebase is over."""

    before: dict[str, bytes]
    after: dict[str, bytes]

    def take_back(self, stage: Stage) -> None:
        """See that --abort puts back every byte, unless all was over already."""
        done = stage.rebased.run("--abort")
        assert done.code == 0 or no_rebase(done), done
        assert stage.state() in ([self.before] if done.code == 0 else [self.before, self.after])
        self._nothing_is_left(stage)

    def finish(self, stage: Stage) -> None:
        """See that --continue gets the rebase to its end."""
        done = stage.rebased.run("--continue")
        if no_rebase(done):
            assert stage.state() in (self.before, self.after)
        elif done.code == 9:
            assert (stage.name, done.error["hint"]) == ("abort", "run --abort again")
            self.take_back(stage)
        else:
            self._to_the_end(stage, done)
        self._nothing_is_left(stage)

    def _to_the_end(self, stage: Stage, done: Completed) -> None:
        if done.code == 5:
            # It waits at the conflict: as it was shown, or as somebody resolved it.
            assert stage.name != "abort"
            assert done.report.get("waits_at") == FIRST or "markers" in done.error["message"]
            stage.resolve()
            done = stage.rebased.run("--continue")
        assert done.code == 0, done
        assert stage.state() == self.after

    @staticmethod
    def _nothing_is_left(stage: Stage) -> None:
        assert not (stage.root / ".vllm-stack" / "rebase-demo").exists()
        parts = [path for path in (stage.root / "patch-stack").rglob(".*") if path.name.endswith(".part")]
        assert parts == []


def interrupt_acceptance(stage: Stage) -> None:
    """Go to where the pin is the new release's and the checkout is not yet."""

    def work() -> int:
        pin = stage.root / "upstream" / "demo.toml"
        moved = end_at(1)
        watch(stage.folders, lambda _step: moved(1) if b'"2.0.0"' in pin.read_bytes() else None)
        return stage.rebased.run("--continue").code

    assert Fork.of(work).wait() < 0
    assert b'"2.0.0"' in (stage.root / "upstream" / "demo.toml").read_bytes()


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with two patches and a checkout in step, for the stages to copy."""
    project = Project(tmp_path_factory.mktemp("seed") / "a stack", cast("Any", Mute()))
    project.ok("apply")
    project.edit("demo/core.py", "return 5\n", "return 500\n")
    project.commit(message("[Core] Return five hundred"))
    project.edit("demo/other.py", "VALUE = 1", "VALUE = 2")
    project.commit(message("[Second] Make it two", topic="second"))
    project.ok("refresh")
    return project


@pytest.fixture(scope="module", params=list(COMMANDS))
def stage(
    request: pytest.FixtureRequest, seed: Project, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """Before a rebase; about to be accepted; in the middle of that and about to be taken back."""
    folder = tmp_path_factory.mktemp(str(request.param))
    stage = Stage.of(str(request.param), seed, folder)
    if stage.name != "start":
        assert stage.rebased.run("2.0.0").report["waits_at"] == FIRST
        stage.resolve()
    if stage.name == "abort":
        interrupt_acceptance(stage)
    stage.save()
    yield stage
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def ends(seed: Project, tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """What there is before a rebase, and what one that nothing disturbs gives."""
    stage = Stage.of("start", seed, tmp_path_factory.mktemp("ends"))
    before = stage.state()
    assert stage.rebased.run("2.0.0").report["waits_at"] == FIRST
    stage.resolve()
    assert stage.rebased.run("--continue").code == 0
    assert stage.state() != before
    return Ends(before, stage.state())


def test_killed_before_each_step(stage: Stage, ends: Ends) -> None:
    stage.reset()
    steps = count_steps(stage.folders, stage.command)
    assert steps >= LEAST_STEPS[stage.name]
    for number in range(1, steps + 1):
        stage.reset()

        def work(wanted: int = number) -> int:
            watch(stage.folders, end_at(wanted))
            return stage.command()

        assert Fork.of(work).wait() < 0, number
        (ends.take_back if number % 2 else ends.finish)(stage)


def test_killed_at_random_moments(stage: Stage, ends: Ends) -> None:
    chosen = random.Random(f"{SEED} {stage.name}")  # noqa: S311 - moments, not secrets
    stage.reset()
    began = time.monotonic()
    Fork.of(stage.command).wait()
    takes = time.monotonic() - began
    for number in range(RANDOM_RUNS):
        stage.reset()
        Fork.of(stage.command).kill_after(chosen.uniform(0, takes))
        (ends.take_back if number % 2 else ends.finish)(stage)


def test_no_space_left_at_any_step(stage: Stage, ends: Ends) -> None:
    stage.reset()
    steps = count_steps(stage.folders, stage.command)
    for number in range(1, steps + 1, 3):
        stage.reset()

        def work(wanted: int = number) -> int:
            watch(stage.folders, full_at(wanted))
            done = stage.rebased.run(*COMMANDS[stage.name])
            said = done.error["message"] if done.code else ""
            # The last step only takes the empty folder of a rebase away that is over already.
            over = done.code == 0 and wanted == steps and stage.name != "start"
            return 0 if over or (done.code == 2 and "No space left on device" in said) else 1

        assert Fork.of(work).wait() == 0, number
        (ends.take_back if number % 2 else ends.finish)(stage)
