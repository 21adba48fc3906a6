"""Bad input is refused in one sentence, alike on every rank, and nobody is left waiting.

Each case runs on two ranks and says what the message must hold: what was given, what is allowed, what to do. After all
cases the same processes shard a good model, so nothing half-done may be left.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.support.api_net import Layer, Net, build, mesh, message_of, train
from tests.support.on_ranks import on_ranks, same_on_ranks


def shard(module: nn.Module | None = None, **arguments: Any) -> MegatronFSDP:
    given = {"device_mesh": mesh(), "fsdp_unit_modules": [Layer], **arguments}
    return fully_shard_model(build() if module is None else module, **given)


# ---- cases -----------------------------------------------------------------------------------------------------------


def tensor_parallel_over_another_mesh() -> None:
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = build()
    parallelize_module(model, grid["dp"], {"head": ColwiseParallel()})
    shard(model, device_mesh=grid, dp_shard_dim="dp", tp_dim="tp")


def meta_parameters() -> None:
    with torch.device("meta"):
        model = Net()
    shard(model)


class _Elsewhere(nn.Parameter):
    """A parameter that claims to lie on a CUDA device, since a CPU build has no second device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


def mixed_devices() -> None:
    model = build()
    model.gain = _Elsewhere(torch.ones(4))
    shard(model)


def sharded_part_inside_a_model() -> None:
    model = build()
    model.layers[0] = shard(build().layers[0], fsdp_unit_modules=None)
    shard(model)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)


def emptied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.param_groups[0]["params"] = []
    return optimizer


AROUND_DDP = (
    "torch's DistributedDataParallel is put around a model that megatron_fsdp has sharded",
    "train the sharded model as it is, and hand it to nothing that wraps models (mfsdp docs integrations",
)

CONFIGURATION_ERRORS: dict[str, tuple[Any, ...]] = {
    "unknown_strategy_name": (
        lambda: shard(zero_dp_strategy="zero3"),
        'zero_dp_strategy=\'zero3\' is not a sharding strategy; give one of 0 or "no_shard", 1 or "optim",',
        '2 or "optim_grads", 3 or "optim_grads_params".',
    ),
    "missing_shard_dimension": (
        lambda: shard(dp_shard_dim="dp_shard"),
        "dp_shard_dim='dp_shard' is not a dimension of the device mesh, which has 'dp'; give one of these",
    ),
    "unnamed_shard_dimension_of_two": (
        lambda: shard(device_mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))),
        "dp_shard_dim is missing; name the mesh dimension",
    ),
    "mesh_without_names": (lambda: shard(device_mesh=DeviceMesh("cpu", [0, 1])), "dp_shard_dim", "name"),
    "tensor_parallel_over_another_mesh": (
        tensor_parallel_over_another_mesh,
        "head.weight is a DTensor over the ranks [0, 1], but tp_dim has the ranks",
        "exactly the tensor-parallel mesh",
    ),
    "class_that_matches_nothing": (
        lambda: shard(fsdp_unit_modules=[nn.Conv2d]),
        "fsdp_unit_modules names Conv2d, but no module of that class holds parameters in this model",
        "Layer (2 x)",
    ),
    "import_path_that_does_not_exist": (
        lambda: shard(fsdp_unit_modules=["tests.support.api_net.Layr"]),
        "fsdp_unit_modules has 'tests.support.api_net.Layr', but 'tests.support.api_net' has no 'Layr'",
        "'Layer'",
    ),
    "meta_parameters": (
        meta_parameters,
        "7 of 7 parameters are on the meta device (such as gain",
        "init_model_with_meta_device is False",
        "materialise",
    ),
    "mixed_devices": (
        mixed_devices,
        "parameters lie on 2 devices (",
        "layers.0.linear.weight on cpu",
        "gain on cuda:0",
        "move the model to one device first",
    ),
    "device_that_is_not_of_the_mesh": (lambda: shard(device="meta"), "device=", "meta", "cpu"),
    "no_parameters": (
        lambda: shard(nn.ReLU(), fsdp_unit_modules=None),
        "ReLU has no parameters; there is nothing to shard",
    ),
    "wrapped_twice": (lambda: shard(shard()), "the model is sharded already (7 of 7 parameters, such as "),
    "sharded_part_inside_a_model": (
        sharded_part_inside_a_model,
        "the model is sharded already (2 of 7 parameters, such as la",
    ),
    "model_that_fsdp2_has_sharded": (
        lambda: shard(torch_fully_shard(build(), mesh=mesh())),
        "the model is sharded by FSDP2 (torch's fully_shard) already; leave that out and give the plain model",
    ),
    "model_in_ddp": (
        lambda: shard(TorchDDP(build())),
        "the model is in torch's DistributedDataParallel",
        "give the module inside it (.module)",
    ),
    "cuda_device_on_a_cpu_build": (
        lambda: shard(device="cuda"),
        "device='cuda', but ",
        "; leave the argument out, or ",
    ),
    "cuda_mesh_on_a_cpu_build": (
        lambda: shard(device_mesh=DeviceMesh.from_group(dist.group.WORLD, "cuda", mesh_dim_names=("dp",))),
        "the mesh is of type 'cuda', but ",
        '; build the mesh with init_device_mesh("cpu", ...)',
    ),
    "legacy_keyword_that_contradicts": (
        lambda: shard(report_nan_in_param_grad=True, check_for_nan_in_grad=False),
        "check_for_nan_in_grad=False is deprecated and contradicts report_nan_in_param_grad=True",
        "leave the former out.",
    ),
    "empty_optimizer": (
        lambda: fully_shard(build(), emptied(sgd(build())), mesh()),
        "the optimizer has no parameters; build it on the parameters of the model",
    ),
    "empty_optimizer_of_a_sharded_model": (
        lambda: fully_shard_optimizer(emptied(sgd(shard()))),
        "the optimizer has no parameters; build it on model.parameters() after fully_shard_model",
    ),
    "optimizer_of_another_model": (
        lambda: fully_shard(build(), sgd(build()), mesh()),
        "parameter 0 of param_groups[0] (shape (4,)) is not a",
        "would train nothing",
        "build the optimizer on",
    ),
    "optimizer_of_an_unsharded_model": (
        lambda: fully_shard_optimizer(sgd(build())),
        "the optimizer's parameters do not belong to a sharded model; build it on model.parameters() after",
    ),
    "optimizer_over_sharded_and_plain_parameters": (
        lambda: fully_shard_optimizer(sgd(_model := shard(), nn.Linear(7, 2, bias=False))),  # a model that lives
        "parameter 7 of param_groups[0] (shape (2, 7)) is not a",
        "would train nothing",
        "build the optimizer on",
    ),
    "ddp_around_no_shard": (lambda: TorchDDP(shard(zero_dp_strategy=0)), *AROUND_DDP),
    "ddp_around_the_module_inside_no_shard": (lambda: TorchDDP(shard(zero_dp_strategy=0).module), *AROUND_DDP),
}
TYPE_ERRORS: dict[str, tuple[Any, ...]] = {
    "bare_class_of_units": (
        lambda: shard(fsdp_unit_modules=Layer),
        "fsdp_unit_modules=Layer is not a list",
        "write fsdp_unit_modules=[...]",
    ),
    "class_of_models": (lambda: shard(Net), "the class Net was given where a model is wanted; give a torch.nn.Module"),
    "policy_of_torch": (
        lambda: shard(mixed_precision_policy=TorchPolicy(param_dtype=torch.bfloat16)),
        "mixed_precision_policy is the MixedPrecisionPolicy of torch.distributed.fsdp; give that of megatron_fsdp",
        "grad_comm_dtype for its reduce_dtype, and build the model in its param_dtype",
    ),
    "policy_that_is_a_name": (
        lambda: shard(mixed_precision_policy="bf16"),
        "mixed_precision_policy='bf16'",
        "MixedPrecisionPolicy",
    ),
    "mesh_that_is_a_name": (lambda: shard(device_mesh="cpu"), "device_mesh='cpu'", "DeviceMesh"),
    "optimizer_before_model": (
        lambda: fully_shard(sgd(build()), build()),  # type: ignore[arg-type]
        "the optimizer was given first and the model second; call fully_shard(model, optimizer)",
    ),
    "class_of_optimizers": (
        lambda: fully_shard(build(), torch.optim.SGD, mesh()),
        "SGD is a class; give an optimizer of it, built as SGD(model.parameters(), ...)",
    ),
    "model_as_optimizer": (
        lambda: fully_shard_optimizer(build()),
        "the optimizer is a Net; give a torch optimizer, built on model",
    ),
}
CASES = {**CONFIGURATION_ERRORS, **TYPE_ERRORS}
"""By name: a call, and what its message must hold."""


@on_ranks(2)
def test_all_is_refused_in_one_clear_sentence_on_every_rank_and_a_good_model_trains_after() -> None:
    found: dict[str, tuple[str, str]] = {}
    for name, (case, *_) in CASES.items():
        found[name] = "", "was accepted"
        try:
            case()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is looked at below
            found[name] = message_of(error)
    same_on_ranks(found)
    for name, (_, *parts) in CASES.items():
        kind, message = found[name]
        assert kind == ("TypeError" if name in TYPE_ERRORS else "ConfigurationError"), (name, message)
        assert [part for part in parts if part not in message] == [], (name, message)
        assert "\n" not in message, name
    assert issubclass(ConfigurationError, ValueError)
    model = shard()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)
    assert all(bool(value.isfinite().all()) for value in model.full_parameters().values())


def test_without_a_process_group_it_says_how_to_get_one() -> None:
    assert not dist.is_initialized()
    with pytest.raises(ConfigurationError) as caught:
        fully_shard_model(build())
    assert str(caught.value) == (
        "torch.distributed is not initialised; start the program with torchrun and call "
        "torch.distributed.init_process_group() before sharding"
    )
