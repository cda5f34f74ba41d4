"""Reading CMake files: their commands, and what their variables may hold.

Only the language's syntax is read (cmake-language(7)); nothing is run. Of a variable that is set in several
places, in the branches of an ``if`` above all, every value counts.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_stack.errors import StackError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_TOKEN = re.compile(
    r"""
      (?P<space>   [ \t\r\n]+ )
    | (?P<comment> \#\[(?P<hashes>=*)\[ .*? \](?P=hashes)\] | \#[^\n]* )
    | (?P<bracket> \[(?P<equals>=*)\[ .*? \](?P=equals)\] )
    | (?P<quoted>  " (?: [^"\\] | \\. )* " )
    | (?P<paren>   [()] )
    | (?P<plain>   (?: [^\s()#"\\] | \\. | (?<=[^\s()]) " (?: [^"\\] | \\. )* " )+ )
    """,
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r"}
_REFERENCE = re.compile(r"\$\{([A-Za-z0-9_./+-]+)\}")
#: No text holds this many nested variables; a cycle does.
_DEEPEST = 8


@dataclass(frozen=True)
class Command:
    """One command of a CMake file."""

    name: str
    """In lower case: CMake does not tell cases apart."""
    arguments: tuple[str, ...]
    line: int


class CMakeSyntaxError(StackError):
    """A file is not valid CMake."""


def parse_cmake(text: str, *, source: str) -> tuple[Command, ...]:
    """Return the commands of a file, in order. CMakeSyntaxError, with the line, for what is none."""
    tokens = list(_tokens(text, source))
    commands: list[Command] = []
    position = 0
    while position < len(tokens):
        command, position = _command(tokens, position, source)
        commands.append(command)
    return tuple(commands)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(text: str, source: str) -> Iterator[_Token]:
    position, line = 0, 1
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CMakeSyntaxError(
                f"{source}:{line}: cannot be read from {text[position : position + 20]!r} on"
            )
        kind = str(match.lastgroup) if match.lastgroup not in ("hashes", "equals") else _outer(match)
        if kind not in ("space", "comment"):
            yield _Token(kind, match[0], line)
        line += match[0].count("\n")
        position = match.end()


def _outer(match: re.Match[str]) -> str:
    return "comment" if match["comment"] is not None else "bracket"


def _command(tokens: Sequence[_Token], start: int, source: str) -> tuple[Command, int]:
    name = tokens[start]
    opened = start + 1 < len(tokens) and tokens[start + 1].text == "("
    if name.kind != "plain" or not opened:
        raise CMakeSyntaxError(f"{source}:{name.line}: expected a command, found {name.text[:20]!r}")
    arguments: list[str] = []
    depth = 1
    for position in range(start + 2, len(tokens)):
        token = tokens[position]
        if token.kind == "paren":
            depth += 1 if token.text == "(" else -1
            if depth == 0:
                return Command(name.text.lower(), tuple(arguments), name.line), position + 1
        arguments.append(_value(token))
    raise CMakeSyntaxError(f"{source}:{name.line}: {name.text}( is not closed")


def _value(token: _Token) -> str:
    if token.kind == "bracket":
        content = token.text.split("[", 2)[2].rpartition("]")[0].rpartition("]")[0]
        return content.removeprefix("\n")
    text = token.text[1:-1].replace("\\\n", "") if token.kind == "quoted" else token.text
    return _ESCAPE.sub(lambda match: _LETTERS.get(match[1], match[1]), text)


def assignments(commands: Iterable[Command]) -> dict[str, tuple[str, ...]]:
    """Return every value that ``set`` gives a variable, lists joined by ``;`` as CMake does."""
    values: dict[str, dict[str, None]] = {}
    for command in commands:
        if command.name == "set" and len(command.arguments) > 1:
            name, *rest = command.arguments
            own = itertools.takewhile(lambda word: word not in ("CACHE", "PARENT_SCOPE"), rest)
            values.setdefault(name, {})[";".join(own)] = None
    return {name: tuple(found) for name, found in values.items()}


def expand(text: str, values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return everything that ``text`` may stand for; what depends on the environment is left out."""
    return tuple(dict.fromkeys(_expanded(text, values, 0)))


def _expanded(text: str, values: Mapping[str, tuple[str, ...]], depth: int) -> Iterator[str]:
    match = _REFERENCE.search(text)
    if match is None:
        if "$ENV{" not in text and "${" not in text:
            yield text
        return
    for value in values.get(match[1], ()) if depth < _DEEPEST else ():
        yield from _expanded(text[: match.start()] + value + text[match.end() :], values, depth + 1)
