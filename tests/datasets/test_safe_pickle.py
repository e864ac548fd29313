"""The restricted unpickler: plain data as written, and nothing run whatever the file says."""

from __future__ import annotations

import copyreg
import io
import math
import os
import pickle
import random
import struct
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ident3d.datasets.safe_pickle import load_plain_pickle
from ident3d.errors import DatasetError

PROTOCOLS = range(6)


def load(path: Path, stored: bytes) -> Any:
    path.write_bytes(stored)
    return load_plain_pickle(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.pickle"


def same(a: Any, b: Any) -> bool:
    """Equal in type, structure, dtype, shape and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype) and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


ARRAYS = {
    "bool": np.arange(24).reshape(2, 3, 4) % 3 == 0,
    "float": np.linspace(-1, 1, 7, dtype=np.float32),
    "double, nan": np.array([[np.nan, np.inf], [0.0, -0.0]]),
    "half": np.array([1.5], np.float16),
    "big-endian": np.arange(5, dtype=">i4"),
    "bytes": np.arange(256, dtype=np.uint8),
    "no dimensions": np.array(7, np.int64),
    "no elements": np.zeros((0, 64, 64), bool),
    "no columns": np.zeros((3, 0), np.uint16),
    "Fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
    "strides": np.arange(20)[::3],
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_is_as_written_and_read_only(name: str, protocol: int, file: Path) -> None:
    got = load(file, pickle.dumps(ARRAYS[name], protocol))
    assert same(got, ARRAYS[name])
    assert not got.flags.writeable


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_in_containers_keep_their_identity(protocol: int, file: Path) -> None:
    array = np.arange(3)
    shared = [array, array]
    value = {"a": shared, "b": (shared, {"c": array}), "d": [np.float32(2.5), np.bool_(True), np.int8(-3)]}
    got = load(file, pickle.dumps(value, protocol))
    assert same(got, value)
    assert got["a"] is got["b"][0]
    assert got["a"][0] is got["a"][1] is got["b"][1]["c"]


def test_what_numpy_2_writes_is_read(file: Path) -> None:
    # numpy 2 renamed the module: in protocols below 4 its name ends in a line feed, and no length is written.
    stored = pickle.dumps([np.arange(4), np.float32(1)], 3)
    assert stored.count(b"numpy.core.multiarray") == 2
    got = load(file, stored.replace(b"numpy.core.multiarray", b"numpy._core.multiarray"))
    assert same(got, [np.arange(4), np.float32(1)])
    longer = pickle.dumps(np.arange(4), 5).replace(b"\x8c\x12numpy.core.numeric", b"\x8c\x13numpy._core.numeric")
    # The frame is one byte longer than it was.
    assert longer[2:3] == b"\x95"
    frame = struct.pack("<Q", struct.unpack("<Q", longer[3:11])[0] + 1)
    assert same(load(file, longer[:3] + frame + longer[11:]), np.arange(4))


@pytest.mark.parametrize(
    "alias", [b"cnumpy\nbool\n", b"cnumpy\nbool_\n", b"cbuiltins\nbool\n", b"c__builtin__\nbool\n"]
)
def test_the_aliases_of_bool_are_a_dtype_and_a_value(alias: bytes, file: Path) -> None:
    stored = pickle.dumps(np.array([True, False]), 2)
    assert stored.count(b"X\x02\x00\x00\x00b1") == 1
    assert same(load(file, stored.replace(b"X\x02\x00\x00\x00b1", alias)), np.array([True, False]))
    assert load(file, b"](" + alias + b"K\x01e.") == [np.bool_, 1]


LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8")), st.binary()),
    *(st.sampled_from(list(ARRAYS.values())), st.sets(st.integers()), st.frozensets(st.text(max_size=3))),
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        *(st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.text(st.characters(codec="utf-8")), inner)),
        st.dictionaries(st.tuples(st.integers(), st.binary()), inner),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=PLAIN, protocol=st.sampled_from(PROTOCOLS))
def test_plain_data_is_as_written(value: Any, protocol: int, file: Path) -> None:
    assert same(load(file, pickle.dumps(value, protocol)), value)


class Run:
    """Its pickle calls something."""

    def __init__(self, function: Any, *given: Any) -> None:
        self.call = (function, given)

    def __reduce__(self) -> Any:
        return self.call


FOREIGN: list[tuple[Any, str]] = [
    (Run(os.system, "touch {}"), "posix.system"),
    (Run(eval, "open('{}', 'w')"), "eval"),
    (Run(exec, "open('{}', 'w')"), "exec"),
    (Run(getattr, "x", "upper"), "getattr"),
    (Run(io.open, "{}", "w"), "open"),
    (Run(bytearray, 10**12), "bytearray"),
    (Run(np.fromfile, "{}"), "numpy.fromfile"),
    (Run(np.load, "{}"), "numpy.load"),
    (Run(np.zeros, 3), "numpy.zeros"),
    (Run(np.testing.assert_equal, 1, 1), "numpy.testing._private.utils.assert_equal"),
    (Run(np.memmap, "{}", "u1", "w+", 0, (4,)), "numpy.memmap"),
    (OrderedDict(a=1), "collections.OrderedDict"),
    (Fraction(1, 2), "fractions.Fraction"),
    (complex(1, 2), "complex"),
    (range(3), "range"),
    (np.datetime64, "numpy.datetime64"),
    (np.random.RandomState, "numpy.random.mtrand.RandomState"),
    (Path("x"), "pathlib"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("value", "name"), FOREIGN)
def test_what_is_foreign_is_named_and_not_run(value: Any, name: str, protocol: int, tmp_path: Path, file: Path) -> None:
    made = tmp_path / "made"
    if isinstance(value, Run):
        value = Run(value.call[0], *(x.format(made) if isinstance(x, str) else x for x in value.call[1]))
    stored = pickle.dumps({"pedestrians": [np.zeros(3), value]}, protocol)
    with pytest.raises(DatasetError, match=rf"some\.pickle: it refers to '\S*{name}\S*'; only numpy arrays"):
        load(file, stored)
    assert not made.exists()


class Plain:
    """An instance, as NEWOBJ and BUILD make it."""

    def __init__(self) -> None:
        self.x = 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_instances_and_odd_arrays_are_refused(protocol: int, file: Path) -> None:
    bad = [
        *(
            Plain(),
            np.array([1, "a", None], object),
            np.array([[1], [2, 3]], object),
            np.array(["a"]),
            np.array([b"a"]),
        ),
        *(np.zeros(2, "i4,f4"), np.zeros(2, "V8"), np.array(["2021-01-01"], "M8[D]"), np.zeros(2, complex)),
        *(np.dtype("f4"), np.ndarray, np.dtype, np.zeros(2).view(np.ma.MaskedArray), np.zeros(2).view(np.matrix)),
        np.dtype("f4", metadata={"a": 1}),
    ]
    for value in bad:
        with pytest.raises(DatasetError, match="only numpy arrays in builtin containers are read"):
            load(file, pickle.dumps([value], protocol))


# Pickles that no pickler writes. c: a name; ( ... t: a tuple; R: call; b: set the state.
RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
EMPTY = RECONSTRUCT + b"(cnumpy\nndarray\n(K\x00tC\x01btR"
BYTES = b"cnumpy\ndtype\n(X\x02\x00\x00\x00u1\x89\x88tR"
REFUSED: list[tuple[bytes, str]] = [
    (b"cnumpy\nndarray\n(K\x05tR.", "a call of numpy.ndarray"),
    (b"cnumpy\nndarray\n(\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x10tR.", "a call of numpy.ndarray"),
    (b"cnumpy\nbool\n(K\x05tR.", "a call of numpy.bool"),
    (RECONSTRUCT + b"(cnumpy\nndarray\n(J\x00\xca\x9a\x3btC\x01btR.", "_reconstruct of anything but"),
    (RECONSTRUCT + b"(cnumpy\ndtype\n(K\x00tC\x01btR.", "_reconstruct of anything but"),
    (RECONSTRUCT + b"(cnumpy\nndarray\n(K\x00tC\x01OtR.", "_reconstruct of anything but"),
    (RECONSTRUCT + b"}X\x08\x00\x00\x00__code__Nsb.", "a change of numpy.core.multiarray._reconstruct"),
    (RECONSTRUCT + b"(N}X\x0c\x00\x00\x00__defaults__)stb.", "a change of numpy.core.multiarray._reconstruct"),
    (b"cnumpy\nndarray\n}b.", "a change of numpy.ndarray"),
    (b"c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", "anything but latin1"),
    (b"c_codecs\nencode\n(X\x01\x00\x00\x00atR.", "damaged, cut short or no pickle .TypeError"),
    (b"cbuiltins\nset\n(X\x01\x00\x00\x00atR.", "a set of anything but a list"),
    (b"cbuiltins\nbytes\n(J\x00\xca\x9a\x3btR.", "damaged, cut short or no pickle .TypeError"),
    (EMPTY + b".", "part of an array"),
    (b"]" + EMPTY + b"a.", "part of an array"),
    (BYTES + b".", "part of an array"),
    (RECONSTRUCT + b".", "holds numpy.core.multiarray._reconstruct"),
    # State: version, shape, dtype, order, bytes.
    (EMPTY + b"(K\x01(K\x03t" + BYTES + b"\x89C\x02abtb.", "on 2 bytes"),
    (EMPTY + b"(K\x01(J\xff\xff\xff\xfft" + BYTES + b"\x89C\x02abtb.", "no tuple of lengths"),
    (EMPTY + b"(K\x01(J\xff\xff\xff\xffJ\xfe\xff\xff\xfft" + BYTES + b"\x89C\x02abtb.", "no tuple of lengths"),
    (EMPTY + b"(K\x01(\x88t" + BYTES + b"\x89C\x01atb.", "no tuple of lengths"),
    (EMPTY + b"(K\x01K\x02" + BYTES + b"\x89C\x02abtb.", "no tuple of lengths"),
    (EMPTY + b"(K\x01(K\x01t" + BYTES + b"\x89]K\x01atb.", "something else than numbers"),
    (EMPTY + b"(K\x01(K\x01tX\x01\x00\x00\x00O\x89C\x08aaaaaaaatb.", "something else than numbers"),
    (
        EMPTY + b"(K\x01(K\x02t" + BYTES + b"\x89C\x02abtb" + b"(K\x01(K\x02t" + BYTES + b"\x89C\x02abtb.",
        "state of its",
    ),
    (EMPTY + b"}b.", "state of its own"),
    (EMPTY + b"(K\x02(K\x02t" + BYTES + b"\x89C\x02abtb.", "state of its own"),
    # A dtype's state: version, order, subdtype, names, fields, size, alignment, flags. numpy's own believes all of it.
    (BYTES + b"(K\x03X\x01\x00\x00\x00|NNNJ\x08\x00\x00\x00J\xff\xff\xff\xffK\x3ftb.", "fields, a shape or flags"),
    (BYTES + b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3ftb.", "fields, a shape or flags"),
    (BYTES + b"(K\x04X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00}tb.", "a state of its own"),
    (b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8\x89\x88tR.", "dtype 'O8'"),
    (b"cnumpy\ndtype\n(X\x05\x00\x00\x00i4,i4\x89\x88tR.", "dtype 'i4,i4'"),
    (b"cnumpy\ndtype\n(X\x02\x00\x00\x00i4\x88\x88tR.", "dtype 'i4'"),
    (b"cnumpy\ndtype\n(]tR.", "dtype list"),
    (b"cnumpy.core.multiarray\nscalar\n(" + BYTES + b"C\x02abtR.", "on 2 bytes"),
    (b"cnumpy.core.multiarray\nscalar\n(X\x01\x00\x00\x00OK\x01tR.", "something else than numbers"),
    # Other opcodes.
    (b"Psomething\n.", "opcode PERSID at byte 0"),
    (b"K\x01Q.", "opcode BINPERSID at byte 2"),
    (b"\x82\xf0.", "opcode EXT1 at byte 0"),
    (b"\x83\xf0\x00.", "opcode EXT2 at byte 0"),
    (b"(S'touch x'\niposix\nsystem\n.", "opcode .* is refused"),
    (b"(X\x01\x00\x00\x00xiposix\nsystem\n.", "opcode INST"),
    (b"(cposix\nsystem\nX\x01\x00\x00\x00xo.", "opcode OBJ"),
    (b"cnumpy\ndtype\n)\x81.", "opcode NEWOBJ"),
    (b"\x80\x05\x97.", "opcode NEXT_BUFFER"),
    # Containers that hold themselves, or lie too deep.
    (b"]q\x00h\x00a.", "more than 32 containers"),
    (b"}q\x00K\x01h\x00s.", "more than 32 containers"),
    (b"]" * 100 + b"a" * 99 + b".", "more than 32 containers"),
    (b")" + b"\x85" * 100 + b".", "more than 32 containers"),
    # More memory than there is.
    (b"]r\x00\x00\x00\x7fK\x01a.", "LONG_BINPUT at byte 1 skips to memo 2130706432"),
    (b"]p999999999999\n.", "PUT at byte 1 skips to memo 999999999999"),
]


@pytest.mark.parametrize(("stored", "message"), REFUSED)
def test_what_no_pickler_writes_is_refused(stored: bytes, message: str, file: Path) -> None:
    with pytest.raises(DatasetError, match=message):
        load(file, stored)


def test_a_change_of_a_dtype_does_not_reach_numpys_own(file: Path) -> None:
    # Without a copy (the third argument), numpy.dtype hands out the one `<f4` of the process.
    singleton = b"cnumpy\ndtype\n(X\x02\x00\x00\x00f4\x89\x89tR"
    state = b"(K\x03X\x01\x00\x00\x00>NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    got = load(file, b"cnumpy.core.multiarray\nscalar\n(" + singleton + state + b"C\x04\x3f\x80\x00\x00tR.")
    assert got == 1.0
    assert np.dtype("f4").isnative
    assert np.dtype("f4") == np.float32


def test_a_cached_extension_code_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a code is cached, the unpickler takes its object without asking find_class.
    monkeypatch.setitem(copyreg._extension_cache, 240, os.getpid)  # type: ignore[attr-defined]
    assert pickle.loads(b"\x82\xf0)R.") == os.getpid()
    with pytest.raises(DatasetError, match="opcode EXT1"):
        load(file, b"\x82\xf0)R.")


def test_an_array_may_not_be_a_key(file: Path) -> None:
    with pytest.raises(DatasetError, match="unhashable"):
        load(file, b"}" + EMPTY + b"K\x01s.")


STRUCTURE = {"pedestrians": [np.eye(3, dtype=bool)], "pedestrians_latents": [np.ones((3, 3), np.float32)]}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_file_cut_short_anywhere_is_refused(protocol: int, file: Path) -> None:
    stored = pickle.dumps(STRUCTURE, protocol)
    for end in range(len(stored)):
        with pytest.raises(DatasetError, match=r"some\.pickle: .*fetch it again"):
            load(file, stored[:end])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_damage_gives_plain_data_or_an_error(protocol: int, file: Path) -> None:
    stored, rng = pickle.dumps(STRUCTURE, protocol), random.Random(protocol)
    refused = 0
    for _ in range(500):
        damaged = bytearray(stored)
        for _ in range(rng.choice([1, 1, 2, 5])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            value = load(file, bytes(damaged))
        except DatasetError:
            refused += 1
        else:
            assert isinstance(
                value, dict | list | tuple | set | frozenset | str | bytes | int | float | np.ndarray | None
            )
    assert refused > 50


@pytest.mark.parametrize(
    "stored", [b"", b"\n", b"hello, world", b"\x89PNG\r\n\x1a\n", b"PK\x03\x04" + bytes(99), b"\x80\x63."]
)
def test_what_is_no_pickle_is_refused(stored: bytes, file: Path) -> None:
    with pytest.raises(DatasetError, match=r"some\.pickle: .*fetch it again"):
        load(file, stored)


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="absent: cannot be read: No such file"):
        load_plain_pickle(tmp_path / "absent")
    with pytest.raises(DatasetError, match="cannot be read: Is a directory"):
        load_plain_pickle(tmp_path)


def test_errors_show_no_more_of_a_file_than_a_line(file: Path) -> None:
    for stored in (
        b"c" + b"x" * 100_000 + b"\n\x1b[2Jy\n.",
        b"I" + b"x" * 100_000 + b"\n.",
        b"cnumpy\ndtype\n(X\xff\x00\x00\x00" + b"\n" * 255 + b"tR.",
    ):
        with pytest.raises(DatasetError) as caught:
            load(file, stored)
        text = str(caught.value).replace(str(file), "")
        assert len(text) < 500
        assert text.isprintable()
