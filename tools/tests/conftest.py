"""Fixtures: small stack repositories, under a plain or a hostile git configuration."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest
from releaseproject import add_five
from stackproject import GIT_CONFIGURATION, Project

import unhurried  # noqa: F401 - imported for what it sets

HERE = Path(__file__).parent


@pytest.fixture(scope="session", autouse=True)
def _git_configuration(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Give every test a home of its own, whose git configuration is empty or hostile."""
    home = tmp_path_factory.mktemp("home")
    hostile = (HERE / "hostile.gitconfig").read_text() if GIT_CONFIGURATION == "hostile" else ""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("GIT_")]:
            patch.delenv(name)
        (home / ".gitconfig").write_text(_place_hostile_files(home, hostile))
        patch.setenv("HOME", str(home))
        patch.delenv("XDG_CONFIG_HOME", raising=False)
        if hostile:
            for name, value in {
                "GIT_DIR": "/nonexistent/git-dir",
                "GIT_INDEX_FILE": "/nonexistent/index",
                "GIT_EXTERNAL_DIFF": "/bin/false",
                "GIT_AUTHOR_DATE": "2001-01-01T00:00:00",
                "GIT_COMMITTER_NAME": "Hostile",
                "GIT_DIFF_OPTS": "-u0",
                "LC_ALL": "tr_TR.UTF-8",
                "TZ": "Pacific/Kiritimati",
            }.items():
                patch.setenv(name, value)
        yield


def _place_hostile_files(home: Path, text: str) -> str:
    hooks = home / "hooks"
    hooks.mkdir()
    for name in ("pre-commit", "commit-msg", "post-checkout", "applypatch-msg", "post-rewrite"):
        hook = hooks / name
        hook.write_text("#!/bin/sh\nexit 1\n")
        hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    (home / "attributes").write_text("* text eol=crlf ident diff=nothing\n*.py binary\n")
    (home / "excludes").write_text("*.py\n")
    (home / "order").write_text("*.md\n*\n")
    (home / "template").write_text("hostile template\n")
    (home / "templates" / "info").mkdir(parents=True)
    (home / "templates" / "info" / "attributes").write_text("* text eol=crlf\n")
    for word in ("HOOKS", "ATTRIBUTES", "EXCLUDES", "ORDER", "TEMPLATES", "TEMPLATE"):
        text = text.replace(f" = {word}\n", f" = {home / word.lower()}\n")
    return text


class _Mute:
    """Stands in for ``capsys`` where a fixture outlives a test."""

    def readouterr(self) -> tuple[str, str]:
        return "", ""


@pytest.fixture(scope="session")
def five(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A stack repository with five patches; for tests to copy."""
    project = Project(tmp_path_factory.mktemp("five") / "a stack", cast("Any", _Mute()))
    add_five(project)
    return project


@pytest.fixture
def project(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Project:
    """A stack repository without patches."""
    return Project(tmp_path / "a stack", capsys)


@pytest.fixture
def stacked(project: Project) -> Project:
    """A stack repository with three patches and a checkout in step."""
    project.add_patches()
    return project
