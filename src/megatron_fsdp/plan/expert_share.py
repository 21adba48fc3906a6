"""What expert-parallel ranks send each other: tokens to their experts and back."""

from __future__ import annotations

from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.decoder_parts import itemsize_of, text_config
from megatron_fsdp.plan.experts_stand_in import fused_experts
from megatron_fsdp.plan.workload import Exchange


def expert_exchanges(model: nn.Module, ranks: int, tokens: int) -> tuple[Exchange, ...]:
    """The exchanges of a microbatch: two all-to-alls of rows per layer with experts, two more in backward.

    Args:
        model: A causal language model of transformers, or a pipeline stage of one.
        ranks: Expert-parallel ranks.
        tokens: Of a microbatch on this rank; each goes to its k experts, of which equally many are on every rank.

    Raises:
        ConfigurationError: The config does not say to how many experts a token goes.
    """
    names = list(fused_experts(model))
    if not names:
        return ()
    config = text_config(model)
    chosen, hidden = (getattr(config, key, None) for key in ("num_experts_per_tok", "hidden_size"))
    if not isinstance(chosen, int) or not isinstance(hidden, int):
        raise ConfigurationError(
            f"the config of {type(model).__name__} lacks num_experts_per_tok or hidden_size, so what ep={ranks} ranks "
            "send is not known; use ep=1"
        )
    sent = chosen * tokens * hidden * itemsize_of(model) * (ranks - 1) // ranks
    return tuple(
        Exchange("ep", name, sent, in_backward, 2, () if in_backward else ("full", "mlp"))
        for name in names
        for in_backward in (False, True)
    )
