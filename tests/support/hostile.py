"""Pickles that would create a file, places of a checkpoint to plant them in, and everything that reads checkpoints."""

import io
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError


def call(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls something, without header and end."""
    return b"c" + f"{module}\n{name}\n".encode() + pickle.dumps(arguments, 2)[2:-1] + b"R"


def whole(*parts: bytes) -> bytes:
    """A pickle of protocol 4, from its operations."""
    return b"\x80\x04" + b"".join(parts) + b"."


def payloads(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Hostile pickles by what they use: the pickle, and what the refusal has to name."""
    code = f"open({str(marker)!r}, 'w').close()"
    text = pickle.dumps(code, 2)[2:-1]
    run = pickle.dumps((code,), 2)[2:-1]
    named = {
        "eval": (call("builtins", "eval", code), "builtins.eval"),
        "old eval": (call("__builtin__", "eval", code), "__builtin__.eval"),
        "exec": (call("builtins", "exec", code), "builtins.exec"),
        "open": (call("builtins", "open", str(marker), "w"), "builtins.open"),
        "import": (call("builtins", "__import__", "os"), "builtins.__import__"),
        "system": (call("posix", "system", f"touch {marker}"), "posix.system"),
        "popen": (call("subprocess", "Popen", ["touch", str(marker)]), "subprocess.Popen"),
        "getattr": (call("builtins", "getattr", "", "format"), "builtins.getattr"),
        "partial": (call("functools", "partial", 0), "functools.partial"),
        "attrgetter": (call("operator", "attrgetter", "a"), "operator.attrgetter"),
        "methodcaller": (call("operator", "methodcaller", "a"), "operator.methodcaller"),
        "copyreg": (call("copyreg", "_reconstructor", 0), "copyreg._reconstructor"),
        "nested pickle": (call("pickle", "loads", whole(call("builtins", "eval", code))), "pickle.loads"),
        "torch.load": (call("torch.serialization", "load", str(marker)), "torch.serialization.load"),
        "torch.storage": (call("torch.storage", "_load_from_bytes", b""), "torch.storage._load_from_bytes"),
        "torch._utils": (call("torch._utils", "_rebuild_wrapper_subclass", 0), "_rebuild_wrapper_subclass"),
        "torch.jit": (call("torch.jit", "load", str(marker)), "torch.jit.load"),
        "torch.hub": (call("torch.hub", "load", str(marker)), "torch.hub.load"),
        "numpy.load": (call("numpy", "load", str(marker), None, True), "numpy.load"),
        "numpy f2py": (call("numpy.f2py.crackfortran", "getlincoef", code, {}), "getlincoef"),
        "numpy testing": (call("numpy.testing._private.utils", "runstring", code, {}), "runstring"),
        "dotted name": (b"\x8c\x08argparse\x8c\x17Namespace.__init__.name\x93" + run + b"R", "Namespace.__init__"),
        "our own reader": (call("megatron_fsdp.checkpoint.archive", "load_object", ""), "load_object"),
    }
    ops = {
        "extension code": (b"\x82\xf1" + run + b"R", "0x82"),
        "instance": (b"(" + text + b"ibuiltins\neval\n", "0x69"),
        "object": (b"(cbuiltins\neval\n" + text + b"o", "builtins.eval"),
        "text reference": (b"Pstorage\n", "0x50"),
        "buffer": (b"\x97", "0x97"),
        "duplicate": (b")2", "0x32"),
    }
    return {name: (whole(body), told) for name, (body, told) in {**named, **ops}.items()}


def tampering() -> dict[str, bytes]:
    """Pickles that call nothing and set attributes of classes, functions and shared objects, or build wrong ones."""
    setting = pickle.dumps((None, {"is_absolute": 1, "__code__": 2, "parts": ("x",)}), 2)[2:-1]
    plain = pickle.dumps({"_value_": 9}, 2)[2:-1]
    metadata = "torch.distributed.checkpoint.metadata"
    return {
        "attributes of a class": whole(f"c{metadata}\nMetadata\n".encode() + setting + b"b"),
        "attributes of a path class": whole(b"cpathlib\nPosixPath\n" + setting + b"b"),
        "attributes of a function": whole(b"ccollections\nOrderedDict\n" + setting + b"b"),
        "dict of a function": whole(b"ctorch\nSize\n" + plain + b"b"),
        "an enumeration": whole(call(metadata, "_MEM_FORMAT_ENCODING", 0) + plain + b"b"),
        "a call of a class's object": whole(b"cargparse\nNamespace\n)\x81)R"),
        "a new function": whole(b"ctorch\nSize\n)\x81"),
    }


def bombs() -> dict[str, bytes]:
    """Short pickles that take gigabytes, hours or the process, where they are believed."""
    doubled = b")" + b"".join(b"q" + bytes([i]) + b"h" + bytes([i]) + b"\x86" for i in range(60))
    return {
        "a large memo": whole(b"Kr" + b"r" + struct.pack("<I", (1 << 31) - 1)),
        "hash of shared tuples": whole(b"}" + doubled + b"Ks"),
        "hash of deep tuples": whole(b"}" + b")" + b"\x85" * 100_000 + b"K\1s"),
        "set of a range": whole(b"cbuiltins\nset\n" + call("builtins", "range", 10**12) + b"\x85R"),
        "zeros": whole(call("builtins", "bytearray", 10**11)),
        "size of a range": whole(b"ctorch\nSize\n" + call("builtins", "range", 10**12) + b"\x85R"),
        "a long bytearray": whole(b"\x96" + struct.pack("<Q", 10**11)),
        "long bytes": whole(b"\x8e" + struct.pack("<Q", 10**11)),
        "a long frame": whole(b"\x95" + struct.pack("<Q", 10**11)),
        "deep lists": whole(b"]" * 50_000 + b"a" * 49_999),
        "a huge number": whole(b"\x8b" + struct.pack("<i", 100_000) + b"\x7f" * 100_000),
        "copies by codec": whole(call("_codecs", "encode", "x", "rot13")),
    }


def multipliers() -> dict[str, bytes]:
    """Pickles of some thousand bytes that stand for hundreds of megabytes, for hours, or for something without end."""
    numbers = b"(" + b"".join(b"J" + struct.pack("<i", number) for number in range(2000))
    pairs = b"](" + b"".join(b"J" + struct.pack("<i", number) + b"N\x86" for number in range(2000)) + b"e"
    names = b"}(" + b"".join(b"X\5\0\0\0%05dN" % number for number in range(2000)) + b"u"
    long = struct.pack("<I", 100_000) + b"x" * 100_000
    array = b"cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + _plain((0,)) + b"C\1btR"
    state = b"(K\1" + _plain((100_000,)) + call("numpy", "dtype", "u1", False, True) + b"\x89B" + long + b"t"
    index = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    lists = [b"](" + _get(place - 1) * 2 + b"e" + _put(place) for place in range(1, 60)]
    indices = [
        index + b")\x81}(" + _plain("fqn") + _get(place - 1) + _plain("offset") + _get(place - 1) + b"ub" + _put(place)
        for place in range(1, 60)
    ]
    return {
        "bytearrays": _results(b"cbuiltins\nbytearray\n", b"B" + long),
        "ordered dicts": _results(b"ccollections\nOrderedDict\n", pairs),
        "sets": _results(b"cbuiltins\nset\n", b"]" + numbers + b"e"),
        "frozensets": _results(b"cbuiltins\nfrozenset\n", numbers + b"t"),
        "sizes": _results(b"ctorch\nSize\n", numbers + b"t"),
        "counters": _results(b"ccollections\nCounter\n", names),
        "bytes as text": _results(b"c_codecs\nencode\n", b"X" + long),
        "arguments of foreign classes": _results(b"cnemo\nThing\n", numbers + b"t", _get(0) + _get(1) + b"\x81"),
        "namespaces": _results(b"cargparse\nNamespace\n", names, _get(0) + b")\x81" + _get(1) + b"b"),
        "arrays": _results(b"N", state, array + _get(1) + b"b"),
        "a long text": _results(b"N", b"X" + long, _get(1)),
        "lists that hold each other": whole(b"]" + _put(0), *lists, _get(59)),
        "a list that holds itself": whole(b"]" + _put(0) + _get(0) + _get(0) + b"a"),
        "a huge number": whole(b"\x8b" + struct.pack("<i", 2000) + b"\x7f" * 2000),
        "an array of another size": whole(call("numpy", "ndarray", (1 << 30,))),
        "a new array": whole(b"cnumpy\nndarray\n" + _plain(((1 << 30,),)) + b"\x81"),
        "an index of a range": whole(index + b"(" + _plain("w") + call("builtins", "range", 10**8) + b"tR"),
        "hash of nested indices": whole(index + b")\x81" + _put(0), *indices, b"}" + _get(59) + b"Ns"),
        "large keys of one hash": whole(_plain(dict.fromkeys(n * ((1 << 61) - 1) for n in range(16, 3000)))),
        "complex keys of one hash": whole(_plain(dict.fromkeys(complex(-1000003.0 * n, n) for n in range(3000)))),
    }


def _put(place: int) -> bytes:
    """Remember what was made last, and take it off the stack."""
    return b"r" + struct.pack("<I", place) + b"0"


def _get(place: int) -> bytes:
    return b"j" + struct.pack("<I", place)


def _results(function: bytes, argument: bytes, use: bytes = b"j\0\0\0\0j\1\0\0\0\x85R") -> bytes:
    """A list of two thousand results of one function (place 0) and one argument (place 1)."""
    return whole(function + _put(0) + argument + _put(1) + b"](" + use * 2000 + b"e")


def tuples_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Different ones; by the arithmetic of Python's hash of tuples (xxHash), backwards."""
    first, second, fifth, word = 11400714785074694791, 14029467366897019727, 2870177450012600261, (1 << 64) - 1
    backwards, found, number = pow(second, -1, 1 << 64), list[tuple[int, int]](), 0
    while len(found) < count:
        number += 1
        mixed = (fifth + number * second) & word
        mixed = ((mixed << 31 | mixed >> 33) & word) * first & word
        other = (12345 - mixed) * backwards & word
        if other < (1 << 61) - 1:
            found.append((number, other))
    return found


def archive_of(pickled: bytes, **records: bytes) -> bytes:
    """What torch.save would have written around a pickle; records by name, with `_` for `/`."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", b"3\n")
        for name, raw in records.items():
            archive.writestr(f"archive/{name.replace('_', '/')}", raw)
    return stream.getvalue()


def tensor_pickle(
    numel: int, size: tuple[int, ...], stride: tuple[int, ...], *, start: int = 0, key: str = "0"
) -> bytes:
    """The pickle of a float32 tensor that claims whatever is asked."""
    reference = (
        b"(" + b"X\7\0\0\0storage" + b"ctorch\nFloatStorage\n" + _plain(key) + _plain("cpu") + _plain(numel) + b"tQ"
    )
    rest = _plain(start) + _plain(size) + _plain(stride) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + reference + rest + b"tR."


def _plain(value: Any) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def edit_metadata(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Change the metadata of a checkpoint that the test has written itself."""
    path = folder / ".metadata"
    found = pickle.loads(path.read_bytes())
    change(found)
    path.write_bytes(pickle.dumps(found))


def plant(folder: Path, key: str, raw: bytes, file: str = "planted.distcp") -> None:
    """Let a tensor or object of the checkpoint be these bytes, in a file of their own."""
    (folder / file).write_bytes(raw)

    def point(metadata: Metadata) -> None:
        places: dict[MetadataIndex, Any] = metadata.storage_data
        for index in [index for index in places if index.fqn == key]:
            places[index] = _StorageInfo(file, 0, len(raw))

    edit_metadata(folder, point)


# ---- readers, as functions of a folder -----------------------------------------------------------------------------

WEIGHT, STEP = "model.weight", "schedule.step"


def write_linear(folder: Path) -> None:
    """A linear layer and one object, as torch writes them."""
    state = {"model": dict(torch.nn.Linear(4, 3).state_dict()), "schedule": {"step": 5}}
    save_alone(state, checkpoint_id=folder)


def by_folder(folder: Path) -> None:
    opened = CheckpointFolder(folder)
    for key in opened.tensors:
        opened.read_tensor(key)
    for key in opened.objects:
        opened.read_object(key)


def by_loading(folder: Path) -> None:
    """With the step as something that a model's owner loads too."""

    class Step:
        def state_dict(self) -> dict[str, Any]:
            return {"step": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(f"given {state}")

    model = torch.nn.Linear(4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_checkpoint(model, None, folder, extra={"schedule": Step()}, with_rng=False)
    except CheckpointError as error:
        if "in memory now" not in str(error):
            assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        raise


def by_verify(folder: Path) -> None:
    report = verify(folder)
    if not report.is_whole:
        raise CheckpointError(str(report))


READERS = [by_folder, by_loading, by_verify]
Reader = Callable[[Path], None]


def refused(read: Reader, folder: Path, marker: Path, *told: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(folder)
    for words in told:
        assert words in str(caught.value)
    assert not marker.exists()
