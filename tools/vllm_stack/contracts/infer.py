"""What expressions evaluate to, as far as annotations and plain assignments tell."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Protocol

from vllm_stack.contracts.resolve import (
    ClassRef,
    FunctionRef,
    InstanceRef,
    Member,
    Missing,
    ModuleRef,
    Value,
    VariableRef,
)
from vllm_stack.contracts.symbols import Class, Function, Module, Variable, dotted

if TYPE_CHECKING:
    from vllm_stack.contracts.resolve import Resolver

#: Deepest chain of expressions that is followed.
_DEPTH = 40
#: Forms that an annotation may put around the type that counts.
_TRANSPARENT = frozenset(
    {"Annotated", "ClassVar", "Final", "InitVar", "NotRequired", "Optional", "ReadOnly", "Required"}
)


class Scope(Protocol):
    """Where an expression stands: what plain names mean there."""

    def name(self, name: str) -> Value | Missing | None:
        """Return what a plain name means."""

    def is_local(self, name: str) -> bool:
        """Say whether a name is one of a function, not of the module."""

    def above(self) -> InstanceRef | None:
        """Return what ``super()`` gives."""


class UpstreamScope:
    """A module of the tree, or a method in it, of which only the annotations of parameters are known."""

    def __init__(
        self,
        inference: Inference,
        module: Module,
        method: Function | None = None,
        owner: ClassRef | None = None,
    ) -> None:
        self._inference = inference
        self._module = module
        self._method = method
        self._owner = owner

    def name(self, name: str) -> Value | Missing | None:
        """Return what a plain name means."""
        if self._method is not None and name in self._method.signature.parameters:
            return self._inference.parameter(self._method, name, self._module, self._owner)
        return self._inference.resolver.alias(self._inference.resolver.bound(self._module, name))

    def is_local(self, name: str) -> bool:
        """Say whether a name is one of a function, not of the module."""
        return self._method is not None and name in self._method.signature.parameters

    def above(self) -> InstanceRef | None:
        """Return what ``super()`` gives."""
        return None if self._owner is None else InstanceRef(self._owner, above=True)


class Inference:
    """Evaluates expressions on the definitions of one tree."""

    def __init__(self, resolver: Resolver) -> None:
        self.resolver = resolver
        self._depth = 0
        self._variables: dict[Variable, Value | Missing | None] = {}

    def value(self, expression: ast.expr, scope: Scope) -> Value | Missing | None:
        """Return what an expression evaluates to: what it refers to, or an instance of its class."""
        if self._depth > _DEPTH:
            return None
        self._depth += 1
        try:
            return self._value(expression, scope)
        finally:
            self._depth -= 1

    def _value(self, expression: ast.expr, scope: Scope) -> Value | Missing | None:
        if isinstance(expression, ast.Name):
            return self.concrete(scope.name(expression.id))
        if isinstance(expression, ast.Attribute):
            return self.attribute(self.value(expression.value, scope), expression.attr)
        if isinstance(expression, ast.Call):
            return self._called(expression, scope)
        if isinstance(expression, ast.Subscript):
            # Foo[int](...) makes a Foo.
            value = self.value(expression.value, scope)
            return value if isinstance(value, (ClassRef, Missing)) else None
        if isinstance(expression, ast.NamedExpr):
            return self.value(expression.value, scope)
        return None

    def _called(self, call: ast.Call, scope: Scope) -> Value | Missing | None:
        if isinstance(call.func, ast.Name) and call.func.id == "super" and not call.args:
            return scope.above()
        if dotted(call.func) in ("cast", "typing.cast") and call.args:
            return self.annotation(call.args[0], scope)
        return self.result(self.value(call.func, scope))

    def result(self, value: Value | Missing | None) -> Value | Missing | None:
        """Return what calling a value gives."""
        if isinstance(value, ClassRef):
            return InstanceRef(value)
        if isinstance(value, FunctionRef):
            returns = value.functions[-1].returns
            if returns is None or not value.functions[-1].plain:
                return None
            if isinstance(returns, ast.Name) and returns.id == "Self":
                return None
            return self.annotation(returns, UpstreamScope(self, value.module))
        return value if isinstance(value, Missing) else None

    def concrete(self, value: Value | Missing | None) -> Value | Missing | None:
        """Turn a variable of a module into what it holds, where that can be told."""
        if not isinstance(value, VariableRef) or value.definition is None:
            return value
        held = self._held(value.definition, value.module, None)
        return value if held is None or isinstance(held, Missing) else held

    def _held(self, variable: Variable, module: Module, owner: ClassRef | None) -> Value | Missing | None:
        """Return what a variable of a module, a class or an instance holds; found out once for each."""
        if variable not in self._variables:
            self._variables[variable] = None  # what is defined by itself means nothing known
            self._variables[variable] = self._evaluated(variable, module, owner)
        return self._variables[variable]

    def _evaluated(
        self, variable: Variable, module: Module, owner: ClassRef | None
    ) -> Value | Missing | None:
        if variable.annotation is not None:
            return self.annotation(variable.annotation, UpstreamScope(self, module))
        scope = UpstreamScope(self, module, variable.method, owner)
        return None if variable.value is None else self.value(variable.value, scope)

    def parameter(
        self, function: Function, name: str, module: Module, owner: ClassRef | None
    ) -> Value | Missing | None:
        """Return what a parameter of a function holds."""
        first = next(iter(function.signature.parameters), None)
        if owner is not None and name == first and function.binding != "static":
            return owner if function.binding == "class" else InstanceRef(owner)
        annotation = function.annotations.get(name)
        return None if annotation is None else self.annotation(annotation, UpstreamScope(self, module))

    # -- attributes ------------------------------------------------------------------------------------

    def attribute(self, value: Value | Missing | None, name: str) -> Value | Missing | None:
        """Return what an attribute of a value holds."""
        if isinstance(value, ModuleRef):
            return self.concrete(self.resolver.alias(self.resolver.exported(value.name, name)))
        if isinstance(value, (ClassRef, InstanceRef)):
            member = self.member(value, name)
            return None if member is None else self._member_value(value, member)
        return value if isinstance(value, Missing) else None

    def member(self, value: ClassRef | InstanceRef, name: str) -> Member | None:
        """Return the attribute ``name`` of a class or of an instance."""
        if isinstance(value, InstanceRef):
            return self.resolver.member(value.cls, name, above=value.above)
        return self.resolver.member(value, name)

    def _member_value(self, value: ClassRef | InstanceRef, member: Member) -> Value | Missing | None:
        function = member.function
        module = member.owner.module
        if function is not None:
            return self._method_value(value, member, function)
        last = member.definitions[-1]
        if isinstance(last, Class):
            return ClassRef(module, last)
        if isinstance(value, ClassRef) and self.resolver.linearize(value).enum:
            return InstanceRef(value)
        variables = [found for found in member.definitions if isinstance(found, Variable)]
        annotated = [found for found in variables if found.annotation is not None] or variables
        values = [self._held(found, module, member.owner) for found in annotated]
        return next((found for found in values if found is not None), None)

    def _method_value(
        self, value: ClassRef | InstanceRef, member: Member, function: Function
    ) -> Value | Missing | None:
        module = member.owner.module
        if function.binding == "property":
            if isinstance(value, ClassRef) or function.returns is None:
                return None
            return self.annotation(function.returns, UpstreamScope(self, module))
        functions = tuple(found for found in member.definitions if isinstance(found, Function))
        instance = isinstance(value, InstanceRef) and function.binding == "function"
        return FunctionRef(module, functions, member.owner, instance or function.binding == "class")

    # -- annotations -----------------------------------------------------------------------------------

    def annotation(self, expression: ast.expr, scope: Scope) -> Value | Missing | None:
        """Return an instance of the class that an annotation names; ``X | None`` counts as X."""
        if self._depth > _DEPTH:
            return None
        self._depth += 1
        try:
            return self._annotation(expression, scope)
        finally:
            self._depth -= 1

    def _annotation(self, expression: ast.expr, scope: Scope) -> Value | Missing | None:
        if isinstance(expression, ast.Constant):
            return self._quoted(expression.value, scope)
        if isinstance(expression, ast.BinOp) and isinstance(expression.op, ast.BitOr):
            sides = [side for side in (expression.left, expression.right) if not _is_none(side)]
            return self.annotation(sides[0], scope) if len(sides) == 1 else None
        if isinstance(expression, ast.Subscript):
            return self._subscripted(expression, scope)
        return self._instance(self._type(expression, scope))

    def _instance(self, value: Value | Missing | None) -> Value | Missing | None:
        if isinstance(value, ClassRef):
            return InstanceRef(value)
        if isinstance(value, VariableRef) and value.definition is not None:
            return self._type_variable(value, value.definition)
        return value if isinstance(value, Missing) else None

    def _type(self, expression: ast.expr, scope: Scope) -> Value | Missing | None:
        """Return the class that a name stands for, without evaluating variables."""
        if isinstance(expression, ast.Name):
            return self.resolver.alias(scope.name(expression.id))
        if isinstance(expression, ast.Attribute):
            value = self._type(expression.value, scope)
            return self.resolver.alias(self.resolver.attribute(value, expression.attr))
        return None

    def _quoted(self, text: object, scope: Scope) -> Value | Missing | None:
        if not isinstance(text, str):
            return None
        try:
            return self.annotation(ast.parse(text.strip(), mode="eval").body, scope)
        except SyntaxError:
            return None

    def _subscripted(self, expression: ast.Subscript, scope: Scope) -> Value | Missing | None:
        outer = (dotted(expression.value) or "").rpartition(".")[2]
        inner = expression.slice
        if outer in _TRANSPARENT:
            return self.annotation(inner.elts[0] if isinstance(inner, ast.Tuple) else inner, scope)
        if outer in ("type", "Type"):
            value = self.annotation(inner, scope)
            return value.cls if isinstance(value, InstanceRef) else None
        return self.annotation(expression.value, scope)

    def _type_variable(self, ref: VariableRef, variable: Variable) -> Value | Missing | None:
        """Take a type variable for its bound, and an alias such as ``A | None`` for what it says."""
        value = variable.value
        scope = UpstreamScope(self, ref.module)
        if isinstance(value, ast.Call) and (dotted(value.func) or "").endswith("TypeVar"):
            bound = next((word.value for word in value.keywords if word.arg == "bound"), None)
            return None if bound is None else self.annotation(bound, scope)
        return self.annotation(value, scope) if isinstance(value, (ast.BinOp, ast.Subscript)) else None


def _is_none(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is None
