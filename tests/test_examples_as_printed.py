"""The doors of the README, and the examples in the published package's description, run as they stand.

Placeholders are filled in. Of the published examples the arguments of hybrid sharding, expert parallelism and meta
initialisation are left out.
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import fully_shard
from megatron_fsdp.experimental import Placements
from tests.automodel.training import saved
from tests.support.api_net import Layer, Net, batches, build, largest_difference, mesh, own_part, train, weights
from tests.support.language_models import build as build_language_model
from tests.support.on_ranks import on_ranks
from tests.support.source_tree import ROOT

TOLERANCE = 2e-6

YourModel = Net
YourTransformerBlock = Layer


def reference_weights(steps: int) -> dict[str, torch.Tensor]:
    model = build()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), steps)
    return weights(model)


def doors() -> dict[str, str]:
    """The code of each door in the README, by what one has."""
    rows = re.findall(
        r"^\| ([^|]+) \| (`(?:from|import) .+`) \|", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE
    )
    return {have: "\n".join(re.findall("`(.+?)`(?=<br>|$)", code)) for have, code in rows}


DOORS = doors()


def through_the_door(code: str, folder: Path) -> dict[str, Any]:
    """Run the code of a door, and return its names."""
    model = build()
    placements = Placements(["dp"], parameter=[Shard(0)], gradient=[Shard(0)], optimizer=[Shard(0)])
    names: dict[str, Any] = {"torch": torch, "Block": Layer, "folder": str(folder), "mesh": mesh()}
    names |= {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-3), "placements": placements}
    exec(code, names)
    return names


def test_the_readme_has_seven_doors_of_at_most_four_lines() -> None:
    assert len(DOORS) == 7
    assert all(2 <= len(code.splitlines()) <= 4 for code in DOORS.values())


@pytest.mark.parametrize(
    "have", [have for have, code in DOORS.items() if "fully_shard" in code or "ddp_config" in code]
)
@on_ranks(2)
def test_a_model_behind_a_door_trains_as_one_process(have: str, tmp_path: Path) -> None:
    names = through_the_door(DOORS[have], tmp_path)
    model = names["model"]
    is_new = names["optimizer"].param_groups[0]["params"][0] is not next(iter(model.parameters()))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if is_new else names["optimizer"]
    for inputs, targets in batches(3):
        F.mse_loss(model(own_part(inputs)), own_part(targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
    params: dict[str, Any] = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    whole = {name: param.full_tensor() if isinstance(param, DTensor) else param for name, param in params.items()}
    assert largest_difference(whole, reference_weights(3)) <= TOLERANCE


@on_ranks(2)
def test_the_doors_for_clients_files_and_engines_open(tmp_path: Path) -> None:
    code = {kind: next(lines for lines in DOORS.values() if kind in lines) for kind in ("install()", "Auto", "Weight")}
    from torch.distributed import fsdp

    through_the_door(code["install()"], tmp_path)
    ours = fsdp.fully_shard.__module__
    sys.modules["megatron_fsdp.fsdp2.install"]._installed[0].remove()
    assert (ours, fsdp.fully_shard.__module__.partition(".")[0]) == ("megatron_fsdp.fsdp2.shard", "torch")

    model = through_the_door(code["Auto"], saved("llama", tmp_path))["model"]
    ids = torch.arange(8).reshape(1, 8)
    plain = build_language_model("llama")
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)

    printed: list[str] = []
    exec(code["Weight"], {"model": model, "print": lambda *words: printed.append(" ".join(map(str, words)))})
    assert sorted(printed) == sorted(f"{name} {param.shape}" for name, param in plain.named_parameters())


def device_mesh_of(dp_shard_size: int, cp_size: int, tp_size: int) -> Any:
    device_mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu",
        mesh_shape=(dp_shard_size, cp_size, tp_size),
        mesh_dim_names=("dp_shard", "cp", "tp"),
    )
    device_mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")
    return device_mesh


@on_ranks(2)
def test_the_basic_example_trains_as_one_process() -> None:
    device_mesh = device_mesh_of(dist.get_world_size(), 1, 1)
    torch.manual_seed(0)

    model: Any = YourModel()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)

    model, optimizer = fully_shard(
        model,
        optimizer,
        device_mesh=device_mesh,
        dp_shard_dim="dp_shard_cp",
        fsdp_unit_modules=[YourTransformerBlock],
    )

    train(model, optimizer, 3)
    assert largest_difference(weights(model), reference_weights(3)) <= TOLERANCE


@on_ranks(2)
def test_the_advanced_example_trains_saves_and_loads_and_warns_once_of_old_keywords(tmp_path: Path) -> None:
    folder = str(tmp_path)
    dp_shard_size, cp_size, tp_size = dist.get_world_size(), 1, 1
    CKPT_DIR = Path(folder)  # noqa: N806 - as printed
    torch.manual_seed(0)
    model: Any = YourModel()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-3)

    device_mesh = torch.distributed.device_mesh.init_device_mesh(
        "cpu",
        mesh_shape=(dp_shard_size, cp_size, tp_size),
        mesh_dim_names=("dp_shard", "cp", "tp"),
    )
    # Only required if using CP. Otherwise, just pass dp_shard to FSDP.
    device_mesh[("dp_shard", "cp")]._flatten("dp_shard_cp")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = fully_shard(
            model,
            optimizer,
            device_mesh=device_mesh,
            dp_shard_dim="dp_shard_cp",
            dp_outer_dim=None,
            tp_dim="tp",
            hybrid_fsdp_group=None,
            expt_device_mesh=None,
            zero_dp_strategy=3,
            fsdp_unit_modules=[YourTransformerBlock],
            grad_reduce_in_fp32=False,
            preserve_fp32_weights=True,
            sync_model_each_microbatch=True,
            preproc_state_dict_for_dcp_ckpt=True,
        )
    said = [(warning.category.__name__, str(warning.message), Path(warning.filename).name) for warning in caught]
    policy = model.mp_policy
    train(model, optimizer, 3)
    saved = weights(model)

    # Save model and optimizer state.
    torch.distributed.checkpoint.save(  # type: ignore[attr-defined]
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=str(CKPT_DIR)
    )
    train(model, optimizer, 2, first=3)
    end = weights(model)

    # Load model and optimizer state.
    ckpt_state_dict = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.distributed.checkpoint.load(  # type: ignore[attr-defined]
        state_dict=ckpt_state_dict, checkpoint_id=str(CKPT_DIR)
    )
    model.load_state_dict(ckpt_state_dict["model"], strict=False)
    optimizer.load_state_dict(ckpt_state_dict["optimizer"])
    loaded = weights(model)

    train(model, optimizer, 2, first=3)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert largest_difference(saved, reference_weights(3)) <= TOLERANCE
    assert largest_difference(loaded, saved) == largest_difference(weights(model), end) == 0.0
    assert (policy.main_params_dtype, policy.main_grads_dtype, policy.grad_comm_dtype) == (torch.float32, None, None)
    if dist.get_rank() > 0:  # one rank warns for all
        assert not said
        return
    ((category, message, filename),) = said
    assert (category, filename) == ("FutureWarning", Path(__file__).name)
    assert message == (
        "grad_reduce_in_fp32=False is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_grads_dtype=None, grad_comm_dtype=None); write that instead. "
        "preserve_fp32_weights=True is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_params_dtype=torch.float32); write that instead."
    )
