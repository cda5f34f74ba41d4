"""One process for each chip and state of FlashInfer, which answers every test that asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest

from tests.selection.flashinfer_states import FlashInfer, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = Path(__file__).resolve().with_name("selection_driver.py")
CI = DRIVER.parents[2]

Ask = Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]]


class Machine:
    """A running ``selection_driver.py``."""

    def __init__(self, capability: int, state: FlashInfer, folder: Path) -> None:
        """Start vLLM on a chip of ``capability``, with FlashInfer in ``state``."""
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), str(capability)],
                env=environment(state, folder / "import", (CI,)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def ask(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return an answer for each request (``Request`` and ``Answer`` of the driver)."""
        questions, answers = _stream(self.process.stdin), _stream(self.process.stdout)
        print(json.dumps(requests), file=questions, flush=True)
        line = answers.readline()
        assert line, self.log.read_text()
        told: list[dict[str, Any]] = json.loads(line)
        return told

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _machine_of(item: pytest.Function) -> tuple[int, str]:
    params: dict[str, Any] = item.callspec.params
    return params.get("capability", 0), params.get("state", "")


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Bring tests of the same machine together, so that each is started once."""
    items.sort(key=_machine_of)


@pytest.fixture(scope="session")
def machines(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[int, FlashInfer], Machine]]:
    """Return a function that gives the machine asked for, and keeps the last one running."""
    running: dict[tuple[int, FlashInfer], Machine] = {}

    def get(capability: int, state: FlashInfer) -> Machine:
        if (capability, state) not in running:
            for machine in running.values():
                machine.stop()
            running.clear()
            folder = tmp_path_factory.mktemp(f"sm{capability}-{state.name.lower()}")
            running[capability, state] = Machine(capability, state, folder)
        return running[capability, state]

    yield get
    for machine in running.values():
        machine.stop()


@pytest.fixture
def ask(machines: Callable[[int, FlashInfer], Machine], capability: int, state: FlashInfer) -> Ask:
    """Return a function that has vLLM answer requests on the chip that the test names."""
    return machines(capability, state).ask
