"""Memory and first values for a model that was made parallel on the meta device.

Values are drawn in the same model on the meta device, as transformers built it. It is initialised a layer at a time,
and of each full tensor every rank keeps the boxes that it holds in the live model, for any division. So weights
depend on the seed, and not on strategy, sizes or ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.automodel.architecture import find_layers, parameter_names
from megatron_fsdp.checkpoint.hf.live import LiveTensor, base_tensors, install_weights, keep_local, unwrap
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.comm.fingerprint import random_state, same_random_numbers, set_random_state
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.wrap.meta_init import draw_blueprint, draw_values


def draw_missing(
    meta_model: nn.Module, model: nn.Module, stages: Sequence[nn.Module], filled: Collection[str], device: torch.device
) -> tuple[str, ...]:
    """Draw values for everything that is not in `filled`; collective over all ranks.

    `meta_model`, on the meta device, is consumed. `stages` are those of this rank, each with its own buffers,
    or `model` alone. Returns the names of the parameters that were drawn on this rank.
    """
    _, tensors = base_tensors(unwrap(model))
    empty = [live for live in tensors if live.name not in filled]
    by_name = {alias: live for live in empty for alias in live.aliases}
    held = {live.name: live.local_boxes() for live in empty}
    wanted: dict[str, LiveTensor] = {}
    for name, aliases in parameter_names(meta_model).items():
        live = next((by_name[alias] for alias in aliases if alias in by_name), None)
        if live is not None and live.is_parameter:
            wanted[name] = live
    # Ranks of a pipeline hold different parameters, and all draw the same random numbers.
    everywhere = sorted({name for theirs in gather_objects(sorted(wanted)) for name in theirs})
    store: dict[str, Callable[[torch.Tensor], None]] = {
        name: partial(keep_local, held[wanted[name].name]) if name in wanted else lambda _: None for name in everywhere
    }
    before = random_state(device)
    groups = [dist.group.WORLD] if everywhere and dist.group.WORLD is not None else []
    with same_random_numbers(groups, device):
        draw_values(
            meta_model,
            draw_blueprint(meta_model, everywhere),
            find_layers(meta_model).modules(),
            store,
            device,
            may_leave_buffers=True,
        )
    if not everywhere:
        # The walk for buffers may have drawn, and the next draws must equal those after transformers' loading.
        set_random_state(device, before)
    for stage in stages:
        _fill_buffers(base_tensors(unwrap(stage))[0], meta_model, filled)
    install_weights(model, list(wanted.values()))
    drawn = tuple(live.name for live in wanted.values())
    left = sorted({live.name for live in empty if live.is_parameter}.difference(drawn))
    if left:
        raise ConfigurationError(
            f"{len(left)} parameters have no value and are not in the model that transformers builds: "
            f"{', '.join(left[:8])}; add them after loading, with values"
        )
    return drawn


def _fill_buffers(live: nn.Module, meta_model: nn.Module, filled: Collection[str]) -> None:
    values = dict(meta_model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for name, buffer in live.named_buffers(remove_duplicate=False):
            value = values.get(name)
            if name not in filled and value is not None and not value.is_meta:
                buffer.copy_(value)
    left = [name for name, buffer in live.named_buffers() if buffer.is_floating_point() and bool(buffer.isnan().any())]
    if left:
        raise ConfigurationError(
            f"{len(left)} buffers have no value: {', '.join(left[:8])}; let _init_weights(module) of the model set them"
        )
