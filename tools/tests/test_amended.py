"""Which statement a contract was derived from."""

from __future__ import annotations

import pytest

from vllm_stack.amended import statement_at

SOURCE = """\
import os
from demo.core import (
    one,
    two,
)


class Backend(
    Base,
):
    flag = True

    @staticmethod
    def run(self, value):
        if value:
            call(
                value,
                other=1,
            )
        return value
"""


@pytest.mark.parametrize(
    ("line", "statement"),
    [
        (1, "import os"),
        (3, "from demo.core import (\none,\ntwo,\n)"),
        (9, "class Backend(\nBase,\n):"),
        (11, "flag = True"),
        (14, "def run(self, value):"),
        (15, "if value:"),
        (17, "call(\nvalue,\nother=1,\n)"),
        (20, "return value"),
        (6, ""),
    ],
)
def test_statement(line: int, statement: str) -> None:
    assert statement_at(SOURCE, line) == statement


def test_a_file_that_python_cannot_read() -> None:
    assert statement_at("a b\n  c d\n", 2) == "c d"
