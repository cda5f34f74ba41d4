"""The user's pip configuration: where to look for files, and how to reach it.

pip itself merges its configuration files and the ``PIP_*`` variables; this module asks it for the result
(``pip config list``) and reads from that what ``pip download`` would: the section ``global``, then
``download``, then the environment, the last one that names an option wins.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vllm_stack.errors import StackError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SECTIONS = ("global", "download", ":env:")
#: pip's other spellings of the options below.
_ALIASES = {"pypi-url": "index-url", "default-timeout": "timeout"}
_TRUE = ("1", "true", "yes", "y", "on", "t")
_FALSE = ("0", "false", "no", "n", "off", "f")


@dataclass(frozen=True)
class PipConfig:
    """What of pip's configuration decides where a file comes from. Defaults are pip's."""

    #: None stands for the public index.
    index_url: str | None = None
    extra_index_urls: tuple[str, ...] = ()
    find_links: tuple[str, ...] = ()
    no_index: bool = False
    cert: str | None = None
    client_cert: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    proxy: str | None = None
    timeout: float = 15.0
    retries: int = 5

    @classmethod
    def load(cls) -> Self:
        """Return the configuration of the pip that lies beside this interpreter.

        Raises UsageError when pip cannot read it or an option has no valid value, StackError when there
        is no pip.
        """
        return cls.from_options(_merge(_parse_listing(_list_configuration())))

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Return the configuration with these options, named as in pip's files."""
        return cls(
            index_url=options.get("index-url"),
            extra_index_urls=tuple(options.get("extra-index-url", "").split()),
            find_links=tuple(options.get("find-links", "").split()),
            no_index=_boolean("no-index", options.get("no-index", "0")),
            cert=_file(options.get("cert")),
            client_cert=_file(options.get("client-cert")),
            trusted_hosts=tuple(options.get("trusted-host", "").split()),
            proxy=options.get("proxy"),
            timeout=_number("timeout", options.get("timeout", "15")),
            retries=int(_number("retries", options.get("retries", "5"))),
        )


def _list_configuration() -> str:
    # -I: the user's PYTHON* variables and working folder must not decide which pip answers.
    # The counts are set because quiet= in a file would silence the listing; PIP_PYTHON and PIP_LOG would
    # send pip elsewhere.
    environment = {key: value for key, value in os.environ.items() if key not in ("PIP_PYTHON", "PIP_LOG")}
    completed = subprocess.run(
        [sys.executable, "-I", "-m", "pip", "config", "list"],
        env={**environment, "PIP_QUIET": "0", "PIP_VERBOSE": "0"},
        capture_output=True,
        encoding="utf-8",
        errors="surrogateescape",
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if completed.returncode == 0:
        return completed.stdout
    if "No module named pip" in completed.stderr:
        raise StackError(
            f"{sys.executable} has no pip, whose configuration says where to download from",
            hint="remove .venv and run tools/vllm-stack, which makes it anew",
        )
    raise UsageError(
        "pip cannot read its configuration",
        details=completed.stderr.strip().splitlines(),
        hint="`python -m pip config debug` shows where it comes from",
    )


def _parse_listing(listing: str) -> list[tuple[str, str, str]]:
    """Return (section, option, value) of each line ``section.option='value'``."""
    found = []
    for line in listing.splitlines():
        name, separator, literal = line.partition("=")
        section, dot, option = name.partition(".")
        if separator and dot and literal[:1] in "'\"":
            found.append((section, option, str(ast.literal_eval(literal))))
    return found


def _merge(entries: Iterable[tuple[str, str, str]]) -> dict[str, str]:
    """Return one value per option. An empty value counts as not set, as it does for pip."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for section, option, value in entries:
        if section in by_section and value.strip():
            by_section[section][_ALIASES.get(option, option)] = value.strip()
    return {option: value for section in _SECTIONS for option, value in by_section[section].items()}


def _file(value: str | None) -> str | None:
    return None if value is None else str(Path(value).expanduser())


def _boolean(option: str, value: str) -> bool:
    if value.lower() in _TRUE:
        return True
    if value.lower() in _FALSE:
        return False
    raise UsageError(f"pip's option {option} must be true or false, not {value!r}")


def _number(option: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError as error:
        raise UsageError(f"pip's option {option} must be a number, not {value!r}") from error
    if not 0 <= number < float("inf"):
        raise UsageError(f"pip's option {option} must not be negative or endless, but is {value!r}")
    return number
