"""Where things are: the repository, its folders per target, and the cache."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vllm_stack.errors import UsageError

#: The repository that this package is part of.
PROJECT_ROOT = Path(__file__).resolve().parents[2]


def default_cache_directory() -> Path:
    """Return the cache folder: ``$VLLM_STACK_CACHE``, else below the XDG cache folder."""
    explicit = os.environ.get("VLLM_STACK_CACHE")
    if explicit:
        return Path(explicit).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore a relative path.
    return (xdg if xdg.is_absolute() else _home() / ".cache") / "vllm-stack"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise UsageError(
            "there is no home folder for the cache",
            hint="set VLLM_STACK_CACHE or XDG_CACHE_HOME to an absolute path",
        ) from error


@dataclass(frozen=True)
class Workspace:
    """The folders that the commands work in."""

    root: Path
    cache: Path

    @classmethod
    def locate(cls, root: Path | None = None, cache: Path | None = None) -> Workspace:
        """Return the workspace at ``root`` (default: this repository) with the given cache."""
        located = (root or PROJECT_ROOT).absolute()
        if not (located / "upstream").is_dir():
            raise UsageError(
                f"{located} is not a stack repository: it has no upstream/ folder",
                hint="run tools/vllm-stack from its own repository, or name one with --root",
            )
        return cls(root=located, cache=(cache or default_cache_directory()).absolute())

    def targets(self) -> tuple[str, ...]:
        """Return the names of all targets that have a pin, sorted."""
        return tuple(sorted(path.stem for path in (self.root / "upstream").glob("*.toml")))

    def pin_file(self, target: str) -> Path:
        """Return the path of the target's pin."""
        return self.root / "upstream" / f"{target}.toml"

    def checkout(self, target: str) -> Path:
        """Return the folder of the target's working checkout."""
        return self.root / "upstream" / target

    def stack_directory(self, target: str) -> Path:
        """Return the folder that holds the target's series and patches."""
        return self.root / "patch-stack" / target

    def rebase(self, target: str) -> Path:
        """Return the folder of the target's open rebase."""
        return self.root / ".vllm-stack" / f"rebase-{target}"

    @property
    def downloads(self) -> Path:
        """The folder of verified downloads."""
        return self.cache / "downloads"

    @property
    def bases(self) -> Path:
        """The folder of imported bases, one bare repository each."""
        return self.cache / "bases"
