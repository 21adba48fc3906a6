"""A mistake that only some ranks can see stops every rank with the same message; nobody hangs.

A call that hangs is killed by the worker pool, and fails the test with the stacks of all ranks.
"""

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    fully_shard,
    fully_shard_model,
)
from tests.support.api_net import Layer, Net, build, largest_difference, weights, wrap
from tests.support.arrangements import mesh_of
from tests.support.experts import FLAT, arguments, build_with_experts, place
from tests.support.on_ranks import on_ranks, refusal


def on_rank_one() -> bool:
    return dist.get_rank() == 1


# ---- one rank's model differs ----------------------------------------------------------------------------------------


def changed_on_one(change: Callable[[Net], object]) -> Callable[[], None]:
    def case() -> None:
        model = build()
        if on_rank_one():
            change(model)
        wrap(model=model)

    return case


def rename_gain(model: Net) -> None:
    del model.gain
    model.register_parameter("gains", nn.Parameter(torch.ones(4)))


def reverse_layers(model: Net) -> None:
    """Give parameters the same names and shapes in another order."""
    model._modules = dict(reversed(model._modules.items()))


_TRAINED = "torch.float32 requires_grad=True"
MODELS: dict[str, tuple[Callable[[Net], object], str]] = {
    "shape": (
        lambda net: setattr(net, "head", nn.Linear(5, 4)),
        f"parameter head.weight is (3, 5) {_TRAINED} on rank 0, (4, 5) {_TRAINED} on rank 1; parameter head.bias is ",
    ),
    "name": (
        rename_gain,
        f"parameter gain is (4,) {_TRAINED} on rank 0, nothing on rank 1; parameter gains is nothing on rank 0, (4,) ",
    ),
    "requires_grad": (
        lambda net: net.head.bias.requires_grad_(False),
        f"parameter head.bias is (3,) {_TRAINED} on rank 0, (3,) torch.float32 requires_grad=False on rank 1; give ",
    ),
    "dtype": (
        lambda net: net.head.to(torch.float64),
        f"parameter head.weight is (3, 5) {_TRAINED} on rank 0, (3, 5) torch.float64 requires_grad=True on rank 1; ",
    ),
    "one parameter more": (
        lambda net: net.register_parameter("extra", nn.Parameter(torch.ones(2))),
        f"parameter extra is nothing on rank 0, (2,) {_TRAINED} on rank 1; give ",
    ),
    "order": (
        reverse_layers,
        "the order, from parameter layers.0.linear.weight on rank 0, parameter head.weight on rank 1; ",
    ),
}


@on_ranks(2)
def test_different_models_are_refused_alike_on_every_rank() -> None:
    for change, difference in MODELS.values():
        message = refusal(changed_on_one(change))
        assert message.startswith(f"ranks differ: {difference}"), message
        assert message.endswith("give the same on every rank")


@on_ranks(4)
def test_ranks_of_other_groups_stop_too() -> None:
    """Beside tensor parallelism ranks 0 and 2 share parameters; of experts ranks 0 and 1 do."""
    rank, grid = dist.get_rank(), mesh_of((2, 2), ("dp", "tp"))
    model = build()
    optimizer = torch.optim.SGD((build() if rank == 2 else model).parameters(), lr=0.1)
    message = refusal(fully_shard, model, optimizer, grid, "dp", tp_dim="tp", fsdp_unit_modules=[Layer])
    said = "sharding the model failed (rank 2: ConfigurationError: parameter 0 of param_groups[0] (shape (4,)) is not"
    assert message.startswith(said)

    config = DistributedDataParallelConfig(bucket_size=10 if rank == 2 else None)
    message = refusal(DistributedDataParallel, config, build(), device_mesh=grid, dp_dim="dp", tp_dim="tp")
    assert message.startswith("ranks differ: bucket_size is None on rank 0, 10 on rank 2;")

    experts = build_with_experts()
    place(FLAT, experts)
    wrapped = fully_shard_model(experts, **arguments(FLAT))
    changed = [param for name, param in wrapped.named_parameters() if ".experts." in name]
    changed[1 if rank == 1 else 0].requires_grad_(False)
    assert ": requires_grad of blocks.0." in refusal(wrapped, torch.zeros(1, 2, dtype=torch.long))


@on_ranks(2)
def test_all_ranks_get_the_weights_of_rank_zero_and_one_warning() -> None:
    model = build(seed=dist.get_rank())
    model.offset.fill_(dist.get_rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = wrap(model=model)
    assert largest_difference(weights(wrapped), weights(build(seed=0))) == 0.0
    assert model.offset.max().item() == 0.0
    if dist.get_rank():  # the first one says it for all
        assert not caught
        return
    (warning,) = caught
    # `gain` is all ones under every seed: 6 parameters and the buffer differ
    said = "7 parameters or buffers differed between ranks at wrap time (first: layers.0."
    assert str(warning.message).startswith(said)
