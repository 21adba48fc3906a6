"""The model and its optimizer, sharded: the only place of the trainer where parallelism is set up."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.train.arguments import Settings
from megatron_fsdp.train.model import Block, Decoder, split_for_decay
from megatron_fsdp.train.presets import model_shape
from megatron_fsdp.train.ranks import Rank

BETAS = (0.9, 0.95)
MESH_DIM = "dp_shard"


def precision_policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return float32 main weights and gradients; gradients travel in the dtype that the model computes in."""
    return MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32, grad_comm_dtype=dtype)


def build_model(settings: Settings, vocab_size: int, device: torch.device) -> Decoder:
    """Return the model, the same on every rank, in the dtype it computes in."""
    torch.manual_seed(settings.arguments.seed)
    return Decoder(model_shape(settings.preset, vocab_size)).to(device=device, dtype=settings.dtype)


def build_optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW with two groups: matrices with weight decay, norms and embeddings without."""
    parameters = dict(model.named_parameters())
    decay, keep = split_for_decay(model)
    groups = [
        {"params": [parameters[name] for name in decay], "weight_decay": settings.arguments.weight_decay},
        {"params": [parameters[name] for name in keep], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.preset.learning_rate, betas=BETAS, fused=True)


def build(settings: Settings, vocab_size: int, rank: Rank) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Return the sharded model and its optimizer."""
    model = build_model(settings, vocab_size, rank.device)
    mesh = init_device_mesh(rank.device.type, (rank.count,), mesh_dim_names=(MESH_DIM,))
    return fully_shard(
        model,
        build_optimizer(model, settings),
        device_mesh=mesh,
        dp_shard_dim=MESH_DIM,
        fsdp_unit_modules=[Block],
        zero_dp_strategy=settings.strategy.name,
        mixed_precision_policy=precision_policy(settings.dtype),
    )
