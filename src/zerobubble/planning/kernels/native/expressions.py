"""Translates expressions to LLVM: operators, conditionals, elements and calls."""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from zerobubble.planning.kernels.native import random_numbers
from zerobubble.planning.kernels.native.lines import BOOL, FLOAT, INT, Lines
from zerobubble.planning.kernels.native.values import (
    Array,
    Known,
    Record,
    Scalar,
    Several,
    Type,
    Value,
    joined,
    part_of,
    unified,
    words_of,
)

_KNOWN: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_OF_INTS = {ast.Add: "add nsw", ast.Sub: "sub nsw", ast.Mult: "mul nsw", ast.LShift: "shl", ast.RShift: "ashr"}
_OF_BITS = {ast.BitAnd: "and", ast.BitOr: "or", ast.BitXor: "xor"}
_OF_FLOATS = {ast.Add: "fadd", ast.Sub: "fsub", ast.Mult: "fmul", ast.Div: "fdiv"}
_COMPARED: dict[type, tuple[str, str]] = {
    ast.Eq: ("eq", "oeq"),
    ast.NotEq: ("ne", "une"),
    ast.Lt: ("slt", "olt"),
    ast.LtE: ("sle", "ole"),
    ast.Gt: ("sgt", "ogt"),
    ast.GtE: ("sge", "oge"),
}

_MATH: dict[Any, str] = {np.log: "log", np.sqrt: "sqrt", math.log: "log", math.sqrt: "sqrt"}

_RANDOM: dict[tuple[Any, int], Callable[..., Any]] = {
    (np.random.seed, 1): random_numbers.seed,
    (np.random.random, 0): random_numbers.random,
    (np.random.randint, 1): random_numbers.randint,
    (np.random.randint, 2): random_numbers.between,
    (np.random.normal, 2): random_numbers.normal,
    (np.random.uniform, 2): random_numbers.uniform,
}


class Expressions(Lines):
    """The lines of a walk and its handling of expressions. `_Walk` in `emit` adds names and statements."""

    random: Value

    # Values

    def name(self, name: str) -> Value | Known:
        """The value of a name."""
        raise NotImplementedError

    def evaluate(self, node: ast.expr) -> Value | Known:
        """The value of an expression."""
        method = getattr(self, f"_of_{type(node).__name__}", None)
        if method is None:
            raise self.fault(f"{type(node).__name__} is not compiled")
        found: Value | Known = method(node)
        return found

    def value(self, node: ast.expr) -> Value:
        """The value of an expression at run time."""
        return self.as_value(self.evaluate(node))

    def truth(self, node: ast.expr) -> Value | Known:
        """Whether an expression is true."""
        return self._truth_of(self.evaluate(node))

    def _truth_of(self, given: Value | Known) -> Value | Known:
        if isinstance(given, Known) or given.type is BOOL:
            return given
        if given.type is INT:
            return Value(BOOL, (self.put(f"icmp ne i64 {given.words[0]}, 0"),))
        if given.type is FLOAT:
            return Value(BOOL, (self.put(f"fcmp une double {given.words[0]}, 0.0"),))
        if isinstance(given.type, Several):
            return Known(bool(given.type.parts))
        raise self.fault("this is neither true nor false")

    # Names, numbers, tuples

    def _of_Name(self, node: ast.Name) -> Value | Known:
        return self.name(node.id)

    def _of_Constant(self, node: ast.Constant) -> Known:
        return Known(node.value)

    def _of_Tuple(self, node: ast.Tuple) -> Value | Known:
        parts = [self.evaluate(each) for each in node.elts]
        if all(isinstance(part, Known) for part in parts):
            return Known(tuple(part.value for part in parts if isinstance(part, Known)))
        return joined([self.as_value(part) for part in parts])

    def _of_Attribute(self, node: ast.Attribute) -> Value | Known:
        owner = self.evaluate(node.value)
        if isinstance(owner, Known):
            return Known(getattr(owner.value, node.attr))
        if isinstance(owner.type, Several) and node.attr in owner.type.names:
            return part_of(owner, owner.type.names.index(node.attr))
        if isinstance(owner.type, Record):
            return self.read(*self.field(owner, node.attr))
        if isinstance(owner.type, Array) and node.attr == "ndim":
            return Known(owner.type.ndim)
        if isinstance(owner.type, Array) and node.attr == "shape":
            return Value(Several((INT,) * owner.type.ndim), owner.words[1:])
        raise self.fault(f"there is no {node.attr}")

    # Elements of arrays and tuples

    def indices(self, node: ast.expr, array: Value) -> list[Value]:
        """Returns the indices along each axis. Constants below 0 count from the end."""
        found = []
        for axis, each in enumerate(node.elts if isinstance(node, ast.Tuple) else [node]):
            at = self.evaluate(each)
            if isinstance(at, Known) and at.value < 0:
                at = Value(INT, (self.put(f"add nsw i64 {array.words[1 + axis]}, {at.value}"),))
            found.append(self.fitted(self.as_value(at), INT))
        return found

    def _of_Subscript(self, node: ast.Subscript) -> Value | Known:
        given = self.evaluate(node.value)
        many = self.as_value(given)
        if isinstance(many.type, Several):
            at = self.evaluate(node.slice)
            return Known(given.value[at.value]) if isinstance(given, Known) and isinstance(at, Known) else self._part(many, at)
        if not isinstance(many.type, Array):
            raise self.fault("only arrays and tuples have elements")
        if isinstance(node.slice, ast.Slice):
            return self._slice(many, node.slice)
        return self.element(many, *self.indices(node.slice, many))

    def _part(self, many: Value, at: Value | Known) -> Value:
        assert isinstance(many.type, Several)
        if isinstance(at, Known):
            return part_of(many, at.value)
        chosen = part_of(many, 0)
        for other in range(1, len(many.type.parts)):
            is_it = self.put(f"icmp eq i64 {at.words[0]}, {other}")
            word = next(words_of(chosen.type))
            name = self.put(f"select i1 {is_it}, {word} {part_of(many, other).words[0]}, {word} {chosen.words[0]}")
            chosen = Value(chosen.type, (name,))
        return chosen

    def _slice(self, many: Value, asked: ast.Slice) -> Value:
        assert isinstance(many.type, Array)
        start = self.value(asked.lower).words[0] if asked.lower is not None else "0"
        stop = self.value(asked.upper).words[0] if asked.upper is not None else many.words[1]
        place = self.place_in(Value(many.type, many.words), [Value(INT, (start,))])[0]
        return Value(many.type, (place, self.put(f"sub nsw i64 {stop}, {start}"), *many.words[2:]))

    # Arithmetic

    def _of_BinOp(self, node: ast.BinOp) -> Value | Known:
        return self.operate(node.op, self.evaluate(node.left), self.evaluate(node.right))

    def operate(self, op: ast.operator, one: Value | Known, other: Value | Known) -> Value | Known:
        """Returns the result of an operator."""
        if isinstance(one, Known) and isinstance(other, Known):
            return Known(_KNOWN[type(op)](one.value, other.value))
        left, right = self.as_value(one), self.as_value(other)
        if type(op) in _OF_BITS and left.type is right.type is BOOL:
            return Value(BOOL, (self.put(f"{_OF_BITS[type(op)]} i1 {left.words[0]}, {right.words[0]}"),))
        if not (isinstance(left.type, Scalar) and isinstance(right.type, Scalar)):
            raise self.fault("operators are for numbers")
        if FLOAT in (left.type, right.type) or isinstance(op, (ast.Div, ast.Pow)):
            a, b = (self.fitted(each, FLOAT).words[0] for each in (left, right))
            if isinstance(op, ast.Pow):
                return self._call_math("pow", [a, b])
            if type(op) not in _OF_FLOATS:
                raise self.fault(f"{type(op).__name__} is for whole numbers")
            return Value(FLOAT, (self.put(f"{_OF_FLOATS[type(op)]} double {a}, {b}"),))
        a, b = (self.fitted(each, INT).words[0] for each in (left, right))
        if isinstance(op, (ast.FloorDiv, ast.Mod)):
            return self._divide(op, a, b)
        return Value(INT, (self.put(f"{(_OF_INTS | _OF_BITS)[type(op)]} i64 {a}, {b}"),))

    def _divide(self, op: ast.operator, a: str, b: str) -> Value:
        """Floor division, as in Python."""
        rest = self.put(f"srem i64 {a}, {b}")
        differs = self.put(f"icmp slt i64 {self.put(f'xor i64 {rest}, {b}')}, 0")
        is_off = self.put(f"and i1 {differs}, {self.put(f'icmp ne i64 {rest}, 0')}")
        if isinstance(op, ast.Mod):
            return Value(INT, (self.put(f"select i1 {is_off}, i64 {self.put(f'add i64 {rest}, {b}')}, i64 {rest}"),))
        whole = self.put(f"sdiv i64 {a}, {b}")
        return Value(INT, (self.put(f"select i1 {is_off}, i64 {self.put(f'sub i64 {whole}, 1')}, i64 {whole}"),))

    def _call_math(self, name: str, words: Sequence[str]) -> Value:
        self.module.intrinsics.add(name)
        return Value(FLOAT, (self.put(f"call double @llvm.{name}.f64({', '.join(f'double {word}' for word in words)})"),))

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Value | Known:
        if isinstance(node.op, ast.Not):
            test = self.truth(node.operand)
            if isinstance(test, Known):
                return Known(not test.value)
            return Value(BOOL, (self.put(f"xor i1 {test.words[0]}, true"),))
        given = self.evaluate(node.operand)
        if not isinstance(node.op, ast.USub):
            raise self.fault(f"{type(node.op).__name__} is not compiled")
        if isinstance(given, Known):
            return Known(-given.value)
        if given.type is FLOAT:
            return Value(FLOAT, (self.put(f"fneg double {given.words[0]}"),))
        return Value(INT, (self.put(f"sub nsw i64 0, {self.fitted(given, INT).words[0]}"),))

    def _of_Compare(self, node: ast.Compare) -> Value | Known:
        parts = [self.evaluate(each) for each in (node.left, *node.comparators)]
        tests = [self._compare(op, *parts[at : at + 2]) for at, op in enumerate(node.ops)]
        found = tests[0]
        for test in tests[1:]:
            found = self.operate(ast.BitAnd(), found, test)
        return found

    def _compare(self, op: ast.cmpop, one: Value | Known, other: Value | Known) -> Value | Known:
        if isinstance(one, Known) and isinstance(other, Known):
            return Known(_KNOWN[type(op)](one.value, other.value))
        left, right = self.as_value(one), self.as_value(other)
        of_ints, of_floats = _COMPARED[type(op)]
        if FLOAT in (left.type, right.type):
            a, b = (self.fitted(each, FLOAT).words[0] for each in (left, right))
            return Value(BOOL, (self.put(f"fcmp {of_floats} double {a}, {b}"),))
        a, b = (self.fitted(each, INT).words[0] for each in (left, right))
        return Value(BOOL, (self.put(f"icmp {of_ints} i64 {a}, {b}"),))

    # What is computed only if it is needed

    def _of_BoolOp(self, node: ast.BoolOp) -> Value | Known:
        """Translates `and` and `or` to truth values; the operands themselves are not returned."""
        stops = "false" if isinstance(node.op, ast.And) else "true"
        after, reached = self.new_label(), list[str]()
        last: Value | Known = Known(stops == "true")
        for at, each in enumerate(node.values):
            last = self.truth(each)
            if isinstance(last, Known):
                if last.value == (stops == "true"):
                    break
                continue
            if at + 1 < len(node.values):
                onward = self.new_label()
                reached.append(f"[ {stops}, %{self.label} ]")
                labels = (onward, after) if stops == "false" else (after, onward)
                self.end(f"br i1 {last.words[0]}, label %{labels[0]}, label %{labels[1]}")
                self.begin(onward)
        if not reached:
            return last
        reached.append(f"[ {self.as_value(last).words[0]}, %{self.label} ]")
        self.end(f"br label %{after}")
        self.begin(after)
        return Value(BOOL, (self.put(f"phi i1 {', '.join(reached)}"),))

    def _of_IfExp(self, node: ast.IfExp) -> Value | Known:
        test = self.truth(node.test)
        if isinstance(test, Known):
            return self.evaluate(node.body if test.value else node.orelse)
        then, otherwise, after = self.new_label(), self.new_label(), self.new_label()
        self.end(f"br i1 {test.words[0]}, label %{then}, label %{otherwise}")
        found = []
        for label, each in ((then, node.body), (otherwise, node.orelse)):
            self.begin(label)
            value = self.value(each)
            found.append((value, self.label, len(self.lines)))
        kind = unified(found[0][0].type, found[1][0].type)
        if kind is None:
            raise self.fault(f"one of {found[0][0].type} and {found[1][0].type} is chosen")
        (one, its_label, its_end), (other, label, _) = found
        second = self.lines[its_end:]
        del self.lines[its_end:]
        one = self.fitted(one, kind)
        self.lines.append(f"  br label %{after}")
        self.lines += second
        other = self.fitted(other, kind)
        self.end(f"br label %{after}")
        self.begin(after)
        words = zip(one.words, other.words, words_of(kind), strict=True)
        return Value(kind, tuple(self.put(f"phi {word} [ {a}, %{its_label} ], [ {b}, %{label} ]") for a, b, word in words))

    # Calls

    def _of_Call(self, node: ast.Call) -> Value | Known:
        called = self.evaluate(node.func)
        if not isinstance(called, Known) or node.keywords:
            raise self.fault("functions are called by their names, without keywords")
        function, given = called.value, [self.evaluate(each) for each in node.args]
        if function is len:
            return self._length(given[0])
        if function in (min, max):
            return self._extreme("slt" if function is min else "sgt", "olt" if function is min else "ogt", given)
        if function is bool:
            return self._truth_of(given[0])
        if function in (int, float, np.int64, np.float64):
            return self._number(int if function in (int, np.int64) else float, self.as_value(given[0]))
        values = [self.as_value(each) for each in given]
        if function in _MATH:
            return self._call_math(_MATH[function], [self.fitted(values[0], FLOAT).words[0]])
        if function is np.isnan:
            return Value(BOOL, (self.put(f"fcmp uno double {values[0].words[0]}, 0.0"),))
        for (random, count), own in _RANDOM.items():
            if function == random and count == len(values):
                return self.call(own, [self.random, *values])
        return self.call(function, values)

    def _length(self, given: Value | Known) -> Value | Known:
        if isinstance(given, Known):
            return Known(len(given.value))
        if isinstance(given.type, Several):
            return Known(len(given.type.parts))
        return Value(INT, (given.words[1],))

    def _extreme(self, of_ints: str, of_floats: str, given: Sequence[Value | Known]) -> Value:
        best, *others = [self.as_value(each) for each in given]
        for value in others:
            kind = unified(best.type, value.type)
            assert kind is not None
            a, b = self.fitted(value, kind).words[0], self.fitted(best, kind).words[0]
            word = next(words_of(kind))
            test = self.put(f"{'fcmp ' + of_floats if kind is FLOAT else 'icmp ' + of_ints} {word} {a}, {b}")
            best = Value(kind, (self.put(f"select i1 {test}, {word} {a}, {word} {b}"),))
        return best

    def _number(self, wanted: type, value: Value) -> Value:
        if wanted is int and value.type is FLOAT:
            return Value(INT, (self.put(f"fptosi double {value.words[0]} to i64"),))
        return self.fitted(value, INT if wanted is int else FLOAT)

    def call(self, function: Any, given: Sequence[Value]) -> Value:
        """Returns the result of a call of another kernel."""
        source = self.module.source_of(function)
        if source is None:
            raise self.fault(f"{function!r} is no kernel")
        kinds = takes(source.function, [value.type for value in given])
        emitted = self.module.emitted(source, kinds)
        arguments = [self.random, *(self.fitted(*pair) for pair in zip(given, kinds, strict=True))]
        words = ", ".join(f"{type_} {word}" for value in arguments for word, type_ in zip(value.words, words_of(value.type), strict=True))
        kind, parts = self.llvm_result(emitted.result), list(words_of(emitted.result))
        if not parts:
            self.lines.append(f"  call void @{emitted.name}({words})")
            return Value(emitted.result, ())
        whole = self.put(f"call {kind} @{emitted.name}({words})")
        if len(parts) == 1:
            return Value(emitted.result, (whole,))
        return Value(emitted.result, tuple(self.put(f"extractvalue {kind} {whole}, {at}") for at in range(len(parts))))


def takes(function: Callable[..., Any], given: Sequence[Type]) -> tuple[Type, ...]:
    """Returns the types of a function's arguments, with numbers as wide as its annotations say."""
    widest = {"int": Scalar.INT, "float": Scalar.FLOAT}
    named = inspect.signature(function).parameters.values()
    wanted = [widest.get(str(each.annotation)) for each in named]
    return tuple(
        (unified(kind, want) or kind) if want and isinstance(kind, Scalar) else kind for kind, want in zip(given, wanted, strict=True)
    )
