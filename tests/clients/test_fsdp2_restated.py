"""Calls of torchtitan 0.3 and verl, restated, on our `fully_shard` and on torch's, beside one process."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp.fsdp2 import fully_shard
from tests.fsdp2.test_fully_shard import to_empty
from tests.support.case import SAMPLES
from tests.support.case import momentum as sgd
from tests.support.doors import Noted, assert_same, build, train, whole
from tests.support.on_ranks import on_ranks
from tests.support.zoo import TinyTransformer, make_token_batch

CHUNKS = 4


# ---- torchtitan: distributed/fsdp.py, components/loss.py, trainer.py -------------------------------------------------


class Decoder(TinyTransformer):
    """Ends before the head where the loss calls that itself."""

    def forward(self, tokens: Tensor, skip_head: bool = False) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return x if skip_head else self.head(x)


def apply_fsdp(model: Any, by: Callable[..., Any]) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
    by(model.tokens, **options, reshard_after_forward=True)
    by([model.norm, model.head], **options, reshard_after_forward=False)
    for block in model.blocks:
        by(block, **options, reshard_after_forward=True)
    by(model, **options)
    blocks = list(model.blocks)
    for block, following in zip(blocks, [*blocks[1:], model.head], strict=True):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def chunked_loss(model: Any, batch: Any, tokens: int) -> Tensor:
    """Head and loss by chunks, each with a backward of its own; the gradient of all goes on into the decoder."""
    head, hidden = model.head, model(batch.inputs, skip_head=True)
    chunks = [each.detach().requires_grad_(hidden.requires_grad) for each in hidden.chunk(CHUNKS, dim=1)]
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(False)
        head.set_reshard_after_backward(False)
        head.set_requires_gradient_sync(False, recurse=False)
        head.unshard()
    total = torch.zeros(())
    for number, (chunk, targets) in enumerate(zip(chunks, batch.targets.chunk(CHUNKS, dim=1), strict=True)):
        if isinstance(head, FSDPModule) and number == CHUNKS - 1:
            head.set_requires_gradient_sync(True, recurse=False)
        loss = F.cross_entropy(head(chunk).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        if hidden.requires_grad:
            loss.backward()
        total += loss.detach()
    if isinstance(head, FSDPModule):
        head.set_reshard_after_forward(True)
        head.set_reshard_after_backward(True)
        head.set_requires_gradient_sync(True, recurse=False)
        head.reshard()
    if hidden.requires_grad:
        hidden.backward(torch.cat([chunk.grad for chunk in chunks], dim=1))  # type: ignore[misc]
    if isinstance(head, FSDPModule):
        dist.all_reduce(total)
    return total


def titan(by: Callable[..., Any] | None) -> list[Tensor]:
    """Three steps with a validation after each and a checkpoint in memory: losses, norms, gradients and weights."""
    model: Any = build(Decoder)
    if by is not None:
        source = model
        with torch.device("meta"):
            model = Decoder()
        apply_fsdp(model, by)
        to_empty(model, source)
    optimizer = sgd(model)
    generator, noted = torch.Generator().manual_seed(7), list[Tensor]()
    for step in range(3):
        batch = make_token_batch(SAMPLES, generator)
        mine = batch if by is None else batch.part(dist.get_rank(), dist.get_world_size())
        noted.append(chunked_loss(model, mine, batch.targets.numel()))
        noted += [whole(param.grad) for param in model.parameters()]
        noted.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            noted.append(chunked_loss(model, mine, batch.targets.numel()))
        if step == 1:
            saved = {name: value.clone() for name, value in get_model_state_dict(model).items()}
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            set_model_state_dict(model, saved)
    return [*noted, *map(whole, model.parameters())]


@on_ranks(2)
def test_a_chunked_loss_of_torchtitan_is_one_process() -> None:
    alone = titan(None)
    assert_same(titan(fully_shard), alone)
    if torch.__version__ >= (2, 13):  # with 2.11 torch's own finds weights without memory
        assert_same(titan(torch_fully_shard), alone)


# ---- verl: utils/fsdp_utils.py, workers/engine ----------------------------------------------------------------------


def load_on_first(model: Any, source: nn.Module) -> None:
    """Ranks other than the first have no values; they come by a broadcast of the whole state dict."""
    if dist.get_rank() == 0:
        model.to(device="cpu")
    else:
        model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, cpu_offload=False, broadcast_from_rank0=True)
    set_model_state_dict(model, source.state_dict() if dist.get_rank() == 0 else {}, options=options)


def offload(model: Any, optimizer: torch.optim.Optimizer) -> None:
    """Weights and state to host memory and back, between steps."""
    for device in ("cpu", torch.device("cpu")):
        model.to(device)
        for state in optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = value.to(device, non_blocking=True)
    model.cpu()


def verl(by: Callable[..., Any] | None) -> Noted:
    """Three updates, with a forward without gradients before each: losses, gradients, norms and weights."""
    source = build()
    model: Any = source
    if by is not None:
        with torch.device("meta") if dist.get_rank() else contextlib.nullcontext():
            model = TinyTransformer()
        for block in model.blocks:
            by(block)
        by(model)
        load_on_first(model, source)
    optimizer, indices = sgd(model), itertools.count(0, 2)

    def before(model: Any, is_last: bool) -> None:
        if not is_last:
            batch = make_token_batch(SAMPLES, torch.Generator().manual_seed(next(indices)))
            model.eval()
            with torch.no_grad():
                model(batch.part(dist.get_rank(), dist.get_world_size()).inputs)
            model.reshard()
            offload(model, optimizer)
            model.train()
        model.set_requires_gradient_sync(is_last)

    noted = train(model, optimizer, before, alone=by is None, steps=3)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert by is None or all(whole(param).equal(full[name]) for name, param in model.named_parameters())
    return noted


@on_ranks(2)
def test_updates_of_verl_are_one_process() -> None:
    alone, theirs, ours = verl(None), verl(torch_fully_shard), verl(fully_shard)
    assert_same(theirs, alone)
    assert_same(ours, alone)
