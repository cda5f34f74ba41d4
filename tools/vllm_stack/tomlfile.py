"""TOML files that people write: read as UTF-8, unknown keys are errors, every fault is named."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_stack.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Strict(BaseModel):
    """Base of the models of files that people write: unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


Model = TypeVar("Model", bound=Strict)


def parse_toml(model: type[Model], text: str, *, source: str) -> Model:
    """Parse the text of a file; ``source`` names it in errors.

    Raises UsageError with one line per problem, each with the key's path in front.
    """
    try:
        return model.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not valid TOML: {error}") from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in item['loc']) or '(file)'}: {item['msg']}"
            for item in error.errors(include_url=False)
        ]
        raise UsageError(f"{source}: not a valid {model.__name__.lower()}", details=problems) from error


def read_toml_text(path: Path) -> str:
    """Read a file's text. UsageError when it is absent or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"there is no file {path}", hint="`vllm-stack status` lists the targets") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8: {error}") from error
