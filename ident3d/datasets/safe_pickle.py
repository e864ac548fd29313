"""Pickles of plain data: numpy arrays in builtin containers, read without running what the file asks for.

A pickle is a program, and an ordinary load imports and calls whatever it names. Two things stand against that here.
The opcodes are first walked through without being run: those that plain data does not need are refused, and so is what
would take far more memory or stack than the file's size. Then a `pickle.Unpickler` loads the file, for which each name
stands for a part of this module: no name is ever imported, and neither `numpy.dtype` nor `numpy.ndarray` is handed out,
whose own `__setstate__` trust the file.
"""

from __future__ import annotations

import math
import mmap
import pickle
import pickletools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ident3d.datasets.serving import Array
from ident3d.errors import DatasetError

__all__ = ["load_plain_pickle"]

MAX_NESTING = 32
"""Containers within containers. Python's hash of a tuple recurses in C without a limit, and takes the process down."""

PUTS, GETS = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}, {"GET", "BINGET", "LONG_BINGET"}
MARK = -1

# What Python's picklers write for arrays, scalars and builtin containers, in protocols 0 to 5. Left out: persistent
# ids, codes of the extension registry (which pass by find_class where they are cached), out-of-band buffers, instances
# (INST, OBJ, NEWOBJ), and the opcodes that only containers within themselves need (POP, POP_MARK, DUP).
OPCODES = {
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1", "BININT2"),
    *("LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("EMPTY_SET", "ADDITEMS", "FROZENSET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
    *PUTS,
    *GETS,
}


class Refused(Exception):
    """What the file asks for and does not get."""


def load_plain_pickle(path: Path) -> Any:
    """What a pickle holds: numpy arrays and scalars, dicts, lists, tuples, sets, texts, bytes and numbers.

    Arrays are of booleans, integers or floats up to 64 bits, and read-only: they share the file's bytes.

    Args:
        path: the pickle, of protocol 0 to 5.

    Raises:
        DatasetError: no file there; one that is cut short, damaged or no pickle; one that names anything else (the
            error names it; nothing of it was imported or called), nests deeper than 32 containers or holds itself, or
            unpacks to more than its own size.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as stream:
            check_opcodes(stream)
            stream.seek(0)
            return _finish(_Reader(stream, len(stream)).load(), {}, 0)
    except Refused as error:
        raise DatasetError(
            f"{path}: {error}; only numpy arrays in builtin containers are read, since a pickle can run code. "
            "If this is not the published file, fetch it again"
        ) from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        what = ascii(f"{type(error).__name__}: {error}")[1:200].rstrip("'\"")
        raise DatasetError(f"{path}: damaged, cut short or no pickle ({what}); fetch it again") from None


def check_opcodes(stream: Any) -> None:
    """Walk through a pickle's opcodes with a stack of nesting depths in place of values; run nothing.

    Args:
        stream: the pickle, with `read` and `readline`.

    Raises:
        Refused: an opcode that plain data does not need; deep nesting; a memo with gaps (which would be allocated).
        ValueError, IndexError, KeyError: no pickle, or one that is cut short.
    """
    stack: list[int] = []
    memo: dict[int, int] = {}
    for opcode, argument, position in pickletools.genops(stream):
        name = opcode.name
        if name not in OPCODES:
            raise Refused(f"opcode {name} at byte {position} is refused")
        if name in PUTS:
            index = len(memo) if argument is None else int(argument)
            if index > len(memo):
                raise Refused(f"opcode {name} at byte {position} skips to memo {index}")
            if stack[-1] == MARK:
                raise ValueError(f"opcode {name} takes a mark for a value")
            memo[index] = stack[-1]
        elif name in GETS:
            stack.append(memo[int(argument or 0)])
        else:
            _apply(opcode, stack)
            if stack and stack[-1] > MAX_NESTING:
                raise Refused(f"more than {MAX_NESTING} containers lie within each other at byte {position}")


def _apply(opcode: pickletools.OpcodeInfo, stack: list[int]) -> None:
    """Take an opcode's operands off the stack and put its results there: one deeper than the deepest operand."""
    taken, fixed = [0], opcode.stack_before
    if pickletools.markobject in fixed:
        while (top := stack.pop()) != MARK:
            taken.append(top)
        fixed = fixed[: fixed.index(pickletools.markobject)]
    for _ in fixed:
        if (top := stack.pop()) == MARK:
            raise ValueError(f"opcode {opcode.name} takes a mark for a value")
        taken.append(top)
    # Lists, dicts and sets that are filled later count as empty: only what is complete when it is made has a hash.
    deeper = 1 if opcode.name.startswith(("TUPLE", "LIST", "DICT", "FROZENSET", "REDUCE")) else 0
    for result in opcode.stack_after:
        stack.append(MARK if result is pickletools.markobject else max(taken) + deeper)


class _Part:
    """What a name in the file stands for. It has no attributes that a file could set, and is no key of a dict.

    Args:
        name: as in the file.
        call: what a call of it gives; None where the name is only handed on.
    """

    __slots__ = ("_call", "name")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self.name, self._call = name, call

    def __call__(self, *given: Any) -> Any:
        if self._call is None:
            raise Refused(f"a call of {self.name} is refused")
        return self._call(*given)

    def __setstate__(self, state: object) -> None:
        raise Refused(f"a change of {self.name} is refused")


class _DType:
    """A dtype in the making: of plain numbers, whatever the file says."""

    __slots__ = ("order", "text")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, text: Any, align: Any = False, copy: Any = True) -> None:
        if isinstance(text, _Part) and text.name in BOOLEANS:
            text = "b1"
        if not isinstance(text, str) or not re.fullmatch("b1|[iu][1248]|f[248]", text) or align:
            given = ascii(text)[:40] if isinstance(text, str) else type(text).__name__
            raise Refused(f"an array of dtype {given} is refused: expected booleans, integers or floats")
        self.text, self.order = text, "="

    def __setstate__(self, state: Any) -> None:
        plain = (None, None, None, -1, -1, 0)
        if type(state) is not tuple or len(state) != 8 or state[0] != 3 or state[1] not in ("<", ">", "|", "="):
            raise Refused("a dtype with a state of its own is refused")
        if not all(type(a) is type(b) and a == b for a, b in zip(state[2:], plain, strict=True)):
            raise Refused("a dtype with fields, a shape or flags is refused")
        self.order = state[1]

    @property
    def plain(self) -> np.dtype[Any]:
        return np.dtype(self.order.strip("|=") + self.text)


class _Array:
    """An array in the making: a shape, a dtype and the bytes, which must agree."""

    __slots__ = ("array",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.array: Array | None = None

    def __setstate__(self, state: Any) -> None:
        if self.array is not None or type(state) is not tuple or len(state) != 5 or state[0] != 1:
            raise Refused("an array with a state of its own is refused")
        _, shape, dtype, fortran, raw = state
        self.array = _plain_array(shape, dtype, raw, "F" if fortran else "C")

    @classmethod
    def of(cls, raw: Any, dtype: Any, shape: Any, order: Any) -> _Array:
        """As numpy's `_frombuffer`, which protocol 5 writes."""
        made = cls()
        made.array = _plain_array(shape, dtype, raw, order)
        return made


def _plain_array(shape: Any, dtype: Any, raw: Any, order: Any) -> Array:
    if not isinstance(dtype, _DType) or type(raw) not in (bytes, bytearray) or order not in ("C", "F"):
        raise Refused("an array of something else than numbers is refused")
    if type(shape) is not tuple or len(shape) > 16 or not all(type(n) is int and n >= 0 for n in shape):
        raise Refused("an array whose shape is no tuple of lengths is refused")
    if math.prod(shape) * dtype.plain.itemsize != len(raw):
        raise Refused(f"an array {shape} of {dtype.plain} on {len(raw):,} bytes is refused")
    array: Array = np.ndarray(shape, dtype.plain, buffer=raw, order=order)
    array.flags.writeable = False
    return array


def _empty_array(kind: Any, shape: Any, dtype: Any) -> _Array:
    """As numpy's `_reconstruct`: what an array's state is then set on."""
    if not isinstance(kind, _Part) or kind.name != "numpy.ndarray" or shape != (0,) or dtype != b"b":
        raise Refused("numpy's _reconstruct of anything but an empty array is refused")
    return _Array()


def _scalar(dtype: Any, raw: Any) -> Any:
    return _plain_array((), dtype, raw, "C")[()]


BOOLEANS = ("numpy.bool", "numpy.bool_", "builtins.bool")
"""The published KITTI Masks refer to `numpy.bool`, an alias of the builtin that numpy 1.24 removed, or to that."""


class _Budget:
    """What may be made of texts and lists: as many bytes and items as the file has, so that none is unpacked often."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise Refused("it unpacks to more than its own size")

    def encode(self, text: Any, codec: Any) -> bytes:
        """As `_codecs.encode`, by which protocols 0 to 2 write bytes."""
        if type(text) is not str or codec not in ("latin1", "latin-1"):
            raise Refused("_codecs.encode to anything but latin1 is refused")
        self.take(len(text))
        return text.encode("latin1")

    def empty(self) -> bytes:
        """As `bytes()`, by which the same protocols write no bytes."""
        return b""

    def set(self, items: Any = ()) -> set[Any]:
        """As the builtin, but of lists and tuples alone."""
        if type(items) not in (list, tuple):
            raise Refused("a set of anything but a list is refused")
        self.take(len(items))
        return {*items}

    def frozenset(self, items: Any = ()) -> frozenset[Any]:
        """As the builtin, but of lists and tuples alone."""
        return frozenset(self.set(items))


MODULES = {
    "__builtin__": "builtins",  # as protocols 0 to 2 write it
    "numpy._core.multiarray": "numpy.core.multiarray",  # as numpy 2 writes it
    "numpy._core.numeric": "numpy.core.numeric",
}


class _Reader(pickle.Unpickler):
    """An Unpickler to which names are the parts of this module, and nothing else.

    Args:
        stream: the pickle.
        size: its bytes.
    """

    def __init__(self, stream: mmap.mmap, size: int) -> None:
        super().__init__(stream)
        budget = _Budget(size)
        parts = [
            _Part("numpy.core.multiarray._reconstruct", _empty_array),
            _Part("numpy.core.multiarray.scalar", _scalar),
            _Part("numpy.core.numeric._frombuffer", _Array.of),
            _Part("numpy.ndarray"),
            _Part("numpy.dtype", _DType),
            _Part("_codecs.encode", budget.encode),
            _Part("builtins.bytes", budget.empty),
            _Part("builtins.set", budget.set),
            _Part("builtins.frozenset", budget.frozenset),
            *map(_Part, BOOLEANS),
        ]
        self._parts = {tuple(part.name.rsplit(".", 1)): part for part in parts}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The part that a name stands for.

        Raises:
            Refused: any name but those above.
        """
        part = self._parts.get((MODULES.get(module_name, module_name), global_name))
        if part is None:
            raise Refused(f"it refers to {ascii(f'{module_name}.{global_name}')[:200]}")
        return part

    def persistent_load(self, pid: Any) -> Any:
        """Refuse.

        Raises:
            Refused: always.
        """
        raise Refused("it refers to an object outside of it")


LEAVES = (str, bytes, bytearray, int, float, set, frozenset, type(None), np.generic)


def _finish(value: Any, done: dict[int, Any], depth: int) -> Any:
    """A loaded value with its arrays in place of their makings; lists and dicts are changed in place.

    Args:
        value: what was loaded.
        done: the finished values of containers by identity, so that what is referred to twice is visited once.
        depth: of the containers around it.

    Raises:
        Refused: a part of no array, or containers nested too deeply, as those that hold themselves are.
    """
    if isinstance(value, LEAVES):
        return value
    if depth > MAX_NESTING:
        raise Refused(f"more than {MAX_NESTING} containers lie within each other")
    if id(value) in done:
        return done[id(value)][1]
    made: Any
    if isinstance(value, _Array) and value.array is not None:
        made = value.array
    elif isinstance(value, _Part) and value.name in BOOLEANS:
        made = np.bool_
    elif isinstance(value, dict):
        for key, item in value.items():
            value[key] = _finish(item, done, depth + 1)
        made = value
    elif isinstance(value, list):
        for i, item in enumerate(value):
            value[i] = _finish(item, done, depth + 1)
        made = value
    elif isinstance(value, tuple):
        made = tuple(_finish(item, done, depth + 1) for item in value)
    else:
        raise Refused(f"it holds {getattr(value, 'name', 'a part of an array')} on its own")
    done[id(value)] = value, made  # the value is kept, so that no other gets its identity
    return made
