"""The examples in the published package's description run as they stand, with their placeholders filled in.

Left out are only the arguments of hybrid sharding, expert parallelism and meta initialisation.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch.distributed.tensor import DTensor

from megatron_fsdp import fully_shard
from tests.support.api_net import Layer, Net, build, largest_difference, train, weights
from tests.support.on_ranks import on_ranks

TOLERANCE = 2e-6

YourModel = Net
YourTransformerBlock = Layer


def reference_weights(steps: int) -> dict[str, torch.Tensor]:
    model = build()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-3), steps)
    return weights(model)


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
    found = {
        "warnings": said,
        "policy": (policy.main_params_dtype, policy.main_grads_dtype, policy.grad_comm_dtype),
        "sharded": all(isinstance(param, DTensor) for param in model.parameters()),
        "trained": largest_difference(saved, reference_weights(3)),
        "loaded": largest_difference(loaded, saved),
        "repeated": largest_difference(weights(model), end),
    }
    assert found["sharded"]
    assert found["trained"] <= TOLERANCE
    assert found["loaded"] == found["repeated"] == 0.0
    assert found["policy"] == (torch.float32, None, None)
    if dist.get_rank() > 0:  # one rank warns for all
        assert not found["warnings"]
        return
    ((category, message, filename),) = found["warnings"]
    assert (category, filename) == ("FutureWarning", Path(__file__).name)
    assert message == (
        "grad_reduce_in_fp32=False is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_grads_dtype=None, grad_comm_dtype=None); write that instead. "
        "preserve_fp32_weights=True is deprecated and was taken as mixed_precision_policy=MixedPrecisionPolicy("
        "main_params_dtype=torch.float32); write that instead."
    )
