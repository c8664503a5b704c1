"""Translates functions to LLVM in one walk over the statements of a kernel, with the types of its arguments.

A variable has one type in a function. If a later statement widens a variable or the result, the walk is repeated with the wider type.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from zerobubble.planning.kernels.native.expressions import Expressions
from zerobubble.planning.kernels.native.lines import Emitted, Source
from zerobubble.planning.kernels.native.values import (
    ELEMENTS,
    Array,
    Known,
    Record,
    Scalar,
    Several,
    Type,
    Value,
    constant,
    part_of,
    unified,
    words_of,
)


class Module:
    """Returns the LLVM text of an entry and of all functions that it calls. `source_of` says which Python objects are kernels."""

    def __init__(self, random_type: Type, source_of: Callable[[Any], Source | None]) -> None:
        self.random_type, self.source_of = random_type, source_of
        self.texts: list[str] = []
        self.arrays: dict[int, str] = {}
        self.intrinsics: set[str] = set()
        self._emitted: dict[tuple[Callable[..., Any], tuple[Type, ...]], Emitted] = {}

    def emitted(self, source: Source, given: Sequence[Type]) -> Emitted:
        """The function for arguments of these types."""
        key = (source.function, tuple(given))
        if key not in self._emitted:
            name = f"{source.function.__name__}.{len(self._emitted)}"
            names, result = dict[str, Type](), None
            while True:
                walk = _Walk(self, source, tree_of(source.function), key[1], names, result)
                text = walk.text(name)
                if walk.is_settled:
                    break
                names, result = walk.types, walk.result
            self.texts.append(text)
            self._emitted[key] = Emitted(name, walk.result or Several(()))
        return self._emitted[key]

    def text(self) -> str:
        """All of it."""
        declared = [f"declare double @llvm.{name}.f64({', '.join(['double'] * (2 if name == 'pow' else 1))})" for name in self.intrinsics]
        return "\n".join([*self.arrays.values(), *sorted(declared), *self.texts])


def tree_of(function: Callable[..., Any]) -> ast.FunctionDef:
    """The syntax tree of a function."""
    return _functions_of(function.__code__.co_filename)[function.__code__.co_firstlineno]


@cache
def _functions_of(file: str) -> dict[int, ast.FunctionDef]:
    """The functions of a file by the line on which they or their decorators begin."""
    with open(file, encoding="utf-8") as opened:
        tree = ast.parse(opened.read())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {min([node.lineno, *(each.lineno for each in node.decorator_list)]): node for node in functions}


class _Walk(Expressions):
    """One walk over a function."""

    def __init__(
        self, module: Module, source: Source, tree: ast.FunctionDef, given: tuple[Type, ...], types: dict[str, Type], result: Type | None
    ) -> None:
        super().__init__(module, source.function)
        self.tree, self.types, self.result, self.is_inlined = tree, types, result, source.is_inlined
        self.is_settled = True
        self._slots: dict[str, Value] = {}
        self._fixed: dict[str, Value] = {}
        self._loops: list[tuple[str, str]] = []
        self._left: set[str] = set()
        self._arguments: list[str] = []
        self.random = self._argument(module.random_type)
        assigned = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        for argument, kind in zip(tree.args.args, given, strict=True):
            value = self._argument(kind)
            if argument.arg in assigned:
                self.assign_name(argument.arg, value)
            else:
                self._fixed[argument.arg] = value

    def _argument(self, kind: Type) -> Value:
        words = []
        for word in words_of(kind):
            words.append(self.new_name())
            self._arguments.append(f"{word} {words[-1]}")
        return Value(kind, tuple(words))

    def text(self, name: str) -> str:
        """The function in LLVM."""
        self.run(self.tree.body)
        if not self.is_ended:
            self._return(Value(Several(()), ()))
        kind = self.llvm_result(self.result or Several(()))
        start = f"define internal {kind} @{name}({', '.join(self._arguments)}) {'alwaysinline ' if self.is_inlined else ''}nounwind {{"
        return "\n".join([start, "entry:", *self.allocas, "  br label %begin", "begin:", *self.lines, "}\n"])

    # Statements

    def run(self, body: Sequence[ast.stmt]) -> None:
        """Translates statements in turn, up to one that leaves the block."""
        for statement in body:
            if self.is_ended:
                return
            self.line = statement.lineno
            getattr(self, f"_do_{type(statement).__name__}", self._cannot)(statement)

    def _cannot(self, node: ast.AST) -> None:
        raise self.fault(f"{type(node).__name__} is not compiled")

    def _do_Pass(self, node: ast.Pass) -> None:
        return

    def _do_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self.evaluate(node.value)

    def _do_Return(self, node: ast.Return) -> None:
        self._return(self.value(node.value) if node.value is not None else Value(Several(()), ()))

    def _return(self, value: Value) -> None:
        wanted = value.type if self.result is None else unified(self.result, value.type)
        if wanted is None:
            raise self.fault(f"what is returned has type {value.type} and {self.result}")
        self.is_settled = self.is_settled and (wanted == self.result or not self.has_returned)
        self.has_returned, self.result = True, wanted
        value = self.fitted(value, wanted)
        kinds = list(words_of(wanted))
        if len(kinds) < 2:
            self.end(f"ret {kinds[0]} {value.words[0]}" if kinds else "ret void")
            return
        whole, kind = "undef", self.llvm_result(wanted)
        for at, (word, part) in enumerate(zip(value.words, kinds, strict=True)):
            whole = self.put(f"insertvalue {kind} {whole}, {part} {word}, {at}")
        self.end(f"ret {kind} {whole}")

    def _do_Assign(self, node: ast.Assign) -> None:
        if len(node.targets) != 1:
            raise self.fault("one target is assigned at a time")
        self.assign(node.targets[0], self.value(node.value))

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        assert node.value is not None
        self.assign(node.target, self.value(node.value))

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            old = self.evaluate(ast.copy_location(ast.Name(node.target.id, ast.Load()), node))
            self.assign(node.target, self.as_value(self.operate(node.op, old, self.evaluate(node.value))))
            return
        place, kind = self.place_of(node.target)
        self.write(place, kind, self.as_value(self.operate(node.op, self.read(place, kind), self.evaluate(node.value))))

    def assign(self, target: ast.expr, value: Value) -> None:
        """Assigns a value to a name, to an array element, or to several of these."""
        if isinstance(target, ast.Name):
            self.assign_name(target.id, value)
        elif isinstance(target, ast.Tuple):
            for one, part in zip(target.elts, self.parts_of(value, len(target.elts)), strict=True):
                self.assign(one, part)
        else:
            place, kind = self.place_of(target)
            self.write(place, kind, value)

    def parts_of(self, value: Value, count: int) -> list[Value]:
        """Returns the parts of a tuple, or the first `count` elements of an array."""
        if isinstance(value.type, Several):
            return [part_of(value, at) for at in range(len(value.type.parts))]
        return [self.element(value, Value(Scalar.INT, (str(at),))) for at in range(count)]

    def assign_name(self, name: str, value: Value) -> None:
        """Assigns a value to a variable."""
        known = self.types.get(name)
        kind = value.type if known is None else unified(known, value.type)
        if kind is None:
            raise self.fault(f"{name} has type {value.type} and {known}")
        if known is not None and kind != known:
            self.is_settled = False
        self.types[name] = kind
        if name not in self._slots or self._slots[name].type != kind:
            self._slots[name] = Value(kind, tuple(self.alloca(word) for word in words_of(kind)))
        fitted = self.fitted(value, kind)
        for slot, word, type_ in zip(self._slots[name].words, fitted.words, words_of(kind), strict=True):
            self.lines.append(f"  store {type_} {word}, ptr {slot}")

    def name(self, name: str) -> Value | Known:
        """Returns a variable, an argument, or the global of the function's module with this name."""
        if name in self._fixed:
            return self._fixed[name]
        if name in self._slots:
            slot = self._slots[name]
            return Value(
                slot.type, tuple(self.put(f"load {type_}, ptr {word}") for word, type_ in zip(slot.words, words_of(slot.type), strict=True))
            )
        if name in self.types:
            raise self.fault(f"{name} may not have a value yet")
        return Known(self.function.__globals__[name] if name in self.function.__globals__ else getattr(builtins, name))

    # Branches and loops

    def _do_If(self, node: ast.If) -> None:
        test = self.truth(node.test)
        if isinstance(test, Known):
            self.run(node.body if test.value else node.orelse)
            return
        then, otherwise, after = self.new_label(), self.new_label(), self.new_label()
        self.end(f"br i1 {test.words[0]}, label %{then}, label %{otherwise}")
        is_reached = False
        for label, body in ((then, node.body), (otherwise, node.orelse)):
            self.begin(label)
            self.run(body)
            is_reached = is_reached or not self.is_ended
            self.end_if_open(f"br label %{after}")
        if is_reached:
            self.begin(after)

    def _do_While(self, node: ast.While) -> None:
        head, body, after = self.new_label(), self.new_label(), self.new_label()
        self.end(f"br label %{head}")
        self.begin(head)
        test = self.truth(node.test)
        if isinstance(test, Known):
            if not test.value:
                return
        else:
            self.end(f"br i1 {test.words[0]}, label %{body}, label %{after}")
            self._left.add(after)
            self.begin(body)
        self._loop(node.body, head, after)
        self.end_if_open(f"br label %{head}")
        if after in self._left:
            self.begin(after)

    def _loop(self, body: Sequence[ast.stmt], head: str, after: str) -> None:
        self._loops.append((head, after))
        self.run(body)
        self._loops.pop()

    def _do_Break(self, node: ast.Break) -> None:
        self._left.add(self._loops[-1][1])
        self.end(f"br label %{self._loops[-1][1]}")

    def _do_Continue(self, node: ast.Continue) -> None:
        self.end(f"br label %{self._loops[-1][0]}")

    def _do_For(self, node: ast.For) -> None:
        over = node.iter
        if isinstance(over, ast.Call) and self.evaluate(over.func) == Known(range):
            bounds = [self.value(each) for each in over.args]
            step = ast.literal_eval(over.args[2]) if len(bounds) == 3 else 1
            first = bounds[0] if len(bounds) > 1 else Value(Scalar.INT, ("0",))
            self._count(node, first, bounds[min(1, len(bounds) - 1)], step, lambda at: at)
            return
        many = self.evaluate(over)
        if isinstance(many, Known) and isinstance(many.value, tuple):
            for each in many.value:
                value = constant(each)
                assert value is not None
                self.assign(node.target, value)
                self.run(node.body)
            return
        if not isinstance(many, Value) or not isinstance(many.type, Array):
            raise self.fault("loops run over ranges and arrays")
        self._count(node, Value(Scalar.INT, ("0",)), Value(Scalar.INT, (many.words[1],)), 1, lambda at: self.element(many, at))

    def _count(self, node: ast.For, first: Value, stop: Value, step: int, element: Callable[[Value], Value]) -> None:
        """Translates a loop over the integers from `first` to before `stop`."""
        head, body, onward, after = (self.new_label() for _ in range(4))
        counter = self.alloca("i64")
        self.lines.append(f"  store i64 {first.words[0]}, ptr {counter}")
        self.end(f"br label %{head}")
        self.begin(head)
        at = self.put(f"load i64, ptr {counter}")
        goes_on = self.put(f"icmp {'slt' if step > 0 else 'sgt'} i64 {at}, {stop.words[0]}")
        self.end(f"br i1 {goes_on}, label %{body}, label %{after}")
        self.begin(body)
        self.assign(node.target, element(Value(Scalar.INT, (at,))))
        self._loop(node.body, onward, after)
        self.end_if_open(f"br label %{onward}")
        self.begin(onward)
        self.lines.append(f"  store i64 {self.put(f'add nsw i64 {at}, {step}')}, ptr {counter}")
        self.end(f"br label %{head}")
        self.begin(after)

    # Places in arrays

    def place_of(self, target: ast.expr) -> tuple[str, str | Record]:
        """Returns the address that an assignment writes to, and its LLVM type or its record."""
        if isinstance(target, ast.Attribute):
            record = self.value(target.value)
            if not isinstance(record.type, Record):
                raise self.fault("only the fields of records are assigned")
            return self.field(record, target.attr)
        if isinstance(target, ast.Subscript):
            array = self.value(target.value)
            if isinstance(array.type, Array):
                place, kind = self.place_in(array, self.indices(target.slice, array))
                return place, Record(kind) if kind.names else ELEMENTS[kind]
        raise self.fault("this is no place to write to")
