"""Signatures: what our rules say of calls and overrides is what Python does."""

from __future__ import annotations

import ast
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from hypothesis import example, given
from hypothesis import strategies as st

from vllm_stack.contracts.signatures import Arguments, override_problems
from vllm_stack.contracts.summary import read_function

if TYPE_CHECKING:
    from vllm_stack.contracts.symbols import Function

NAMES = ("a", "b", "c", "d")


EVERY_CALL = [  # each argument is another value
    ", ".join([*map(str, range(positional)), *(f"{name}='{name}'" for name in keywords)])
    for positional in range(6)
    for count in range(5)
    for keywords in itertools.combinations((*NAMES, "e"), count)
]


@st.composite
def parameter_lists(draw: st.DrawFn) -> str:
    """Return a parameter list as Python writes it."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, len(NAMES)))]
    cut = draw(st.integers(0, len(names)))
    positional, keyword = names[:cut], names[cut:]
    defaults = draw(st.integers(0, len(positional)))
    parts = [f"{name}=1" if at >= len(positional) - defaults else name for at, name in enumerate(positional)]
    if draw(st.booleans()) and positional:
        parts.insert(draw(st.integers(1, len(positional))), "/")
    if draw(st.booleans()):
        parts.append("*more")
    elif keyword:
        parts.append("*")
    parts += [f"{name}=1" if draw(st.booleans()) else name for name in keyword]
    if draw(st.booleans()):
        parts.append("**words")
    return ", ".join(parts)


@st.composite
def calls(draw: st.DrawFn) -> str:
    """Return an argument list without anything spread."""
    keywords = draw(st.lists(st.sampled_from((*NAMES, "e")), unique=True, max_size=4))
    return ", ".join([*["0"] * draw(st.integers(0, 5)), *(f"{name}=0" for name in keywords)])


def function_of(parameters: str, *, method: bool = False) -> Function:
    """Return the function as it is read from its source."""
    text = f"def f({', '.join(filter(None, ['self' if method else '', parameters]))}): ..."
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    return read_function(node)


def real_function(parameters: str) -> Any:
    """Return a function of these parameters that Python itself made; it returns True."""
    scope: dict[str, Any] = {}
    exec(f"def f({parameters}): return True", scope)  # noqa: S102 - the text is our own
    return scope["f"]


def result_of(function: Any, arguments: str) -> Any:
    """Return what a call gives, None where Python does not take it."""
    try:
        return eval(f"f({arguments})", {"f": function})  # noqa: S307 - the text is our own
    except TypeError:
        return None


def runs(parameters: str, arguments: str) -> bool:
    """Say whether Python takes the call."""
    return result_of(real_function(parameters), arguments) is not None


def received(parameters: str, arguments: str) -> Any:
    """Return what each parameter gets of the call (`arguments`), None where Python does not take it."""
    return result_of(inspect.signature(real_function(parameters)).bind, arguments)


def arguments_of(text: str) -> Arguments:
    """Read a call."""
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return Arguments.of(call)


@given(parameter_lists())
def test_a_signature_is_read_as_python_reads_it(parameters: str) -> None:
    expected = inspect.signature(real_function(parameters))
    found = function_of(parameters).signature
    assert str(found) == str(expected)
    assert [item.kind for item in found.parameters.values()] == [
        item.kind for item in expected.parameters.values()
    ]


@given(parameter_lists(), calls())
def test_a_call_fits_where_python_takes_it(parameters: str, arguments: str) -> None:
    problem = arguments_of(arguments).problem(function_of(parameters).signature)
    assert (problem is None) == runs(parameters, arguments)


@given(parameter_lists(), parameter_lists(), calls())
def test_an_override_without_problems_takes_every_call_of_its_base(base: str, own: str, call: str) -> None:
    problems = override_problems(function_of(base, method=True), function_of(own, method=True))
    if not problems and runs(base, call):
        assert runs(own, call)


@given(parameter_lists(), parameter_lists())
@example("c", "a=1, c=1")  # both take f(0), which is another parameter's value
@example("a", "b=1, **words")
def test_a_problem_of_an_override_is_one(base: str, own: str) -> None:
    problems = override_problems(function_of(base, method=True), function_of(own, method=True))
    if problems:
        given_to = ((received(base, call), received(own, call)) for call in EVERY_CALL)
        assert any(theirs and (not ours or ours.arguments != theirs.arguments) for theirs, ours in given_to)


@given(parameter_lists())
def test_an_override_with_the_signature_of_its_base_has_no_problems(parameters: str) -> None:
    function = function_of(parameters, method=True)
    assert override_problems(function, function) == frozenset()


def test_what_is_spread_only_has_to_fit_so_far() -> None:
    two = function_of("a, b").signature
    assert arguments_of("*x").problem(two) is None
    assert arguments_of("**x").problem(two) is None
    assert arguments_of("0, 0, 0, *x").problem(two) is not None
    assert arguments_of("c=0, **x").problem(two) is not None
    assert str(arguments_of("0, *x, k=1, **w")) == "(_, *_, k=_, **_)"
