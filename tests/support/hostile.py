"""Bytes that no honest writer wrote: pickles that would create a file, and where to plant them; all readers."""

import io
import pickle
import random
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.load import load_checkpoint
from megatron_fsdp.checkpoint.save import save_alone, write_state
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.errors import CheckpointError


def plain(value: Any, protocol: int = 2) -> bytes:
    """The operations that make a value, without header and end."""
    return pickle.dumps(value, protocol)[2:-1]


def call(module: str, name: str, *arguments: Any) -> bytes:
    """A pickle that calls something, without header and end."""
    return b"c" + f"{module}\n{name}\n".encode() + plain(arguments) + b"R"


def whole(*parts: bytes) -> bytes:
    """A pickle of protocol 4, from its operations."""
    return b"\x80\x04" + b"".join(parts) + b"."


def payloads(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Hostile pickles by what they use: the pickle, and what the refusal has to name."""
    code = f"open({str(marker)!r}, 'w').close()"
    text = plain(code)
    run = plain((code,))
    calls: dict[str, tuple[Any, ...]] = {
        **dict.fromkeys(("builtins.eval", "__builtin__.eval", "builtins.exec"), (code,)),
        **dict.fromkeys(("torch.serialization.load", "torch.jit.load", "torch.hub.load"), (str(marker),)),
        **dict.fromkeys(("operator.attrgetter", "operator.methodcaller"), ("a",)),
        **dict.fromkeys(("functools.partial", "copyreg._reconstructor"), (0,)),
        "torch._utils._rebuild_wrapper_subclass": (0,),
        "numpy.f2py.crackfortran.getlincoef": (code, {}),
        "numpy.testing._private.utils.runstring": (code, {}),
        "numpy.load": (str(marker), None, True),
        "builtins.open": (str(marker), "w"),
        "builtins.__import__": ("os",),
        "builtins.getattr": ("", "format"),
        "posix.system": (f"touch {marker}",),
        "subprocess.Popen": (["touch", str(marker)],),
        "pickle.loads": (whole(call("builtins", "eval", code)),),
        "torch.storage._load_from_bytes": (b"",),
        "megatron_fsdp.checkpoint.archive.load_object": ("",),
    }
    named = {path: (call(*path.rsplit(".", 1), *given), path) for path, given in calls.items()}
    ops = {
        "extension code": (b"\x82\xf1" + run + b"R", "0x82"),
        "dotted name": (b"\x8c\x08argparse\x8c\x17Namespace.__init__.name\x93" + run + b"R", "Namespace.__init__"),
        "instance": (b"(" + text + b"ibuiltins\neval\n", "0x69"),
        "object": (b"(cbuiltins\neval\n" + text + b"o", "builtins.eval"),
        "text reference": (b"Pstorage\n", "0x50"),
        "buffer": (b"\x97", "0x97"),
        "duplicate": (b")2", "0x32"),
    }
    return {name: (whole(body), told) for name, (body, told) in {**named, **ops}.items()}


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
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\n"
    reference = storage + plain(key) + plain("cpu") + plain(numel) + b"tQ"
    rest = plain(start) + plain(size) + plain(stride) + b"\x89" + b"ccollections\nOrderedDict\n)R"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + reference + rest + b"tR."


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
    step = Mock(spec=["state_dict", "load_state_dict"])
    step.state_dict.return_value = {"step": 1}
    step.load_state_dict.side_effect = AssertionError
    model = torch.nn.Linear(4, 3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        load_checkpoint(model, None, folder, extra={"schedule": step}, with_rng=False)
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
    assert "safe_globals" not in str(caught.value)  # torch's advice, which would let it run
    assert not marker.exists()


def small_state() -> dict[str, Any]:
    """Tensors of several dtypes, a scalar, an empty one, and objects of the kinds that checkpoints hold."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model": {
            "weight": torch.randn(6, 5, generator=generator),
            "bias": torch.randn(7, generator=generator).to(torch.bfloat16),
            "flags": torch.tensor([True, False, True]),
        },
        "optimizer": {"step": torch.tensor(3.0), "none": torch.empty(0, 4), "lr": 0.1, "betas": (0.9, 0.95)},
        "rng": {"python": random.Random(0).getstate(), "numpy": np.random.RandomState(0).get_state()},
        "iteration": 7,
    }


def write_ours(folder: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # that there is one process
        write_state(small_state(), folder)


def saved_bytes(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
