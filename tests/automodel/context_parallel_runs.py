"""Train a small model whose sequences are shared by ranks; runs on every rank."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from megatron_fsdp import fully_shard_model
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.context_parallel import enable_context_parallel, shard_batch, unshard_sequence
from megatron_fsdp.automodel.gradients import count_label_tokens, scale_per_token_loss
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.fully_shard import fully_shard_optimizer
from tests.automodel.small_models import Reference, batch_of, build, reference
from tests.support.arrangements import flattened, mesh_of
from tests.support.parity import assert_equal_tensors

FSDP2, ENGINE = "fsdp2", "engine"
DP, CP, BOTH = "dp_shard", "cp", "dp_shard_cp"
STEPS, ROWS = 2, 4
EPS = 1e-3
"""Of AdamW, above rounding noise: where the exact gradient is 0, Adam makes steps of what is left."""


@dataclass(frozen=True)
class Case:
    """One model on one arrangement of ranks.

    Attributes:
        kind: Of `FAMILIES`.
        load_balance: As of `shard_batch`.
        strategy: What averages gradients: FSDP2 or the engine of this library.
        cp_size: Ranks that share sequences; the others have other rows.
        checkpointing: Whether activations are computed again in the backward.
        loss_inside: Whether the model computes the loss, in place of the loop.
        changes: Of the config, as items.
    """

    kind: str
    load_balance: bool = True
    strategy: str = FSDP2
    cp_size: int = 2
    checkpointing: bool = False
    loss_inside: bool = False
    changes: tuple[tuple[str, Any], ...] = field(default=())


def mesh_for(cp_size: int) -> DeviceMesh:
    """Data parallel times context parallel over all ranks; the two are one more dimension, `BOTH`."""
    mesh = mesh_of((dist.get_world_size() // cp_size, cp_size), (DP, CP))
    flattened(mesh, (DP, CP), BOTH)
    return mesh


def shard(case: Case, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard over data-parallel and context-parallel ranks together."""
    layers = find_layers(model).modules()
    if case.strategy == ENGINE:
        units = [type(layers[0])]
        wrapped = fully_shard_model(model, device_mesh=mesh, dp_shard_dim=BOTH, fsdp_unit_modules=units)
        assert isinstance(wrapped, nn.Module)
        return wrapped
    over = flattened(mesh, (DP, CP), BOTH)
    for layer in layers:
        fully_shard(layer, mesh=over)
    return fully_shard(model, mesh=over)


def assert_pieces(got: dict[str, Tensor], want: Mapping[str, Tensor], atol: float) -> None:
    """This rank's pieces are those of whole tensors; all ranks together check everything, and nothing is sent."""
    pieces, expected_pieces = {}, {}
    for prefixed, tensor in got.items():
        name = prefixed.removeprefix("module.")
        assert isinstance(tensor, DTensor)
        chunks = [want[name][tuple(slice(o, o + n) for o, n in box)].flatten() for box in boxes_of(tensor)]
        pieces[name] = tensor.to_local().detach().flatten()
        expected_pieces[name] = torch.cat(chunks) if chunks else pieces[name].new_empty(0)
    assert pieces.keys() == want.keys()
    assert_equal_tensors(pieces, expected_pieces, rtol=1e-4, atol=atol)


def boxes_of(tensor: DTensor) -> list[list[tuple[int, int]]]:
    """(offset, length) per dimension of each box of the whole tensor that this rank has."""
    if isinstance(tensor, UnevenDTensor):
        boxes = tensor.shard_frame.description.boxes()
        return [list(zip(box.offsets, box.lengths, strict=True)) for box in boxes]
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return [list(zip(offset, shape, strict=True))]


def train(case: Case, want: Reference) -> None:
    """Train by the ranks together as `reference` does on one process, and compare everything on the way.

    Values are equal but for the order of sums in float32.
    """
    mesh = mesh_for(case.cp_size)
    over = flattened(mesh, (DP, CP), BOTH)
    model = build(case.kind, **dict(case.changes))
    enable_context_parallel(model, mesh[CP], load_balance=case.load_balance)
    if case.checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer releases have another name for it
            model.gradient_checkpointing_enable({"use_reentrant": False})
    sharded = shard(case, model, mesh)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2, eps=EPS)
    if case.strategy == ENGINE:
        fully_shard_optimizer(optimizer)
    for step in range(STEPS):
        rows = {name: part.chunk(mesh[DP].size())[mesh[DP].get_local_rank()] for name, part in all_rows(step).items()}
        batch = shard_batch(rows, mesh[CP], load_balance=case.load_balance)
        count = count_label_tokens(batch["shift_labels"], over, shifted=True)
        logits, summed = forward(case, sharded, batch)
        optimizer.zero_grad()
        scale_per_token_loss(summed, count, dp_group_size=over.size()).backward()
        total = summed.detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total.item() / count, want.losses[step], rtol=1e-5, atol=1e-6)
        if step == 0:
            mine = want.logits.chunk(mesh[DP].size())[mesh[DP].get_local_rank()]
            found = unshard_sequence(logits, mesh[CP], 1, case.load_balance)
            torch.testing.assert_close(found, mine, rtol=1e-4, atol=1e-5)
        gradients = {name: p.grad for name, p in sharded.named_parameters() if p.grad is not None}
        atol = 1e-5 if step == 0 else 5e-5  # what rounding did to the weights of Gemma's scaled embeddings adds up
        assert_pieces(gradients, want.gradients[step], atol)
        optimizer.step()
        assert_pieces(dict(sharded.named_parameters()), want.parameters[step], atol)


def all_rows(step: int) -> dict[str, Tensor]:
    """The batch of one step."""
    return batch_of(ROWS, seed=1 + step)


def forward(case: Case, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits of this rank's tokens, and the sum of their losses."""
    if case.loss_inside:
        out = model(**batch, labels=batch["shift_labels"], num_items_in_batch=1)
        return out.logits, out.loss
    with warnings.catch_warnings():
        # Phi's head has a bias, of which torch makes a view. Nothing is written into it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        out = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    flat = out.logits.float().flatten(0, 1)
    return out.logits, nn.functional.cross_entropy(flat, batch["shift_labels"].flatten(), reduction="sum")


@cache
def expected(kind: str, changes: tuple[tuple[str, Any], ...]) -> Reference:
    """What one process computes."""
    return reference(kind, steps=STEPS, rows=ROWS, changes=dict(changes), eps=EPS)


def check(run_ranks: Callable[..., list[Any]], world_size: int, cases: list[Case]) -> None:
    """All ranks of every case have the losses, logits, gradients and parameters of one process."""
    run_ranks(world_size, train_all, cases, [expected(case.kind, case.changes) for case in cases])


def train_all(cases: list[Case], wanted: list[Reference]) -> None:
    """One after another."""
    for case, want in zip(cases, wanted, strict=True):
        try:
            train(case, want)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from None
