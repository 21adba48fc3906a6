"""`from_pretrained` and `from_config` that take a strategy and sizes, and return a model that is ready to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from megatron_fsdp.automodel.agreed import agree_on
from megatron_fsdp.automodel.blueprints import (
    adopt_generation_config,
    config_of,
    find_folder,
    refuse_foreign,
    resolve_dtype,
)
from megatron_fsdp.automodel.config import DistributedConfig
from megatron_fsdp.automodel.filling import ready_model
from megatron_fsdp.automodel.pipeline_parallel import PipelineConfig
from megatron_fsdp.automodel.sizes import SIZE_NAMES
from megatron_fsdp.plan.models import build_from_config


class _AutoModel:
    """What the three classes share."""

    _transformers_class: ClassVar[str]
    _new_head: ClassVar[bool] = False

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} is made by from_pretrained(...) or from_config(...)")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        distributed_config: DistributedConfig | None = None,
        dp_size: int | None = None,
        dp_replicate_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        pipeline_config: PipelineConfig | None = None,
        peft_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        attn_implementation: str | None = None,
        config: Any = None,
        key_mapping: Any = None,
        strict: bool = True,
        prepare_model: Callable[[nn.Module], object] | None = None,
        device_map: None = None,
        trust_remote_code: bool | None = False,
        **config_overrides: Any,
    ) -> Any:
        """Build a model without memory, make it parallel, and read its weights straight into the shards; collective.

        Each rank reads the bytes of its own shards; the most that exists beside them is 32 MiB of a tensor, and of
        weights that are not in the files, one layer.

        Args:
            pretrained_model_name_or_path: A local folder, or a name that is in the local cache of the hub. Nothing is
                downloaded.
            distributed_config: The strategy; None: `FSDP2Config()`.
            dp_size: Data-parallel ranks, copies included; None: what the other sizes leave.
            dp_replicate_size: Copies of the sharded model; `FSDP2Config` only.
            tp_size: Tensor-parallel ranks.
            pp_size: Pipeline-parallel ranks; `FSDP2Config` only.
            cp_size: Context-parallel ranks.
            ep_size: Expert-parallel ranks; `FSDP2Config` only.
            pipeline_config: With `pp_size` > 1, how microbatches pass through; None: its defaults.
            peft_config: A configuration of peft; the adapters are added before sharding, and the rest is frozen.
            dtype: Of the weights; "auto" or None: what the config says, else the files.
            attn_implementation: As in transformers; None: what transformers chooses.
            config: A config of transformers in place of the folder's.
            key_mapping: As of `load_hf`.
            strict: Refuse files that lack a weight or have more. False: draw what is missing, and warn.
            prepare_model: Called with the model before it is made parallel, on the meta device: to freeze parameters.
            device_map: Refused, as every rank holds a part of every layer.
            trust_remote_code: Refused where true: code that lies beside weights is never run.
            config_overrides: Fields of the config.

        Returns:
            The model: for FSDP2 the transformers model itself, for the others the wrapper around it, and a `Pipeline`
            with `pp_size` > 1. It has `save_pretrained(folder)` and `mesh_context`.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            CheckpointError: The files cannot be read or do not fit; names the weights.
            ConfigurationError: Another argument cannot be honoured.
        """

        def find() -> tuple[Path, Any]:
            refuse_foreign(device_map, trust_remote_code)
            found = find_folder(pretrained_model_name_or_path)
            return found, config_of(found, config, config_overrides)

        strategy, context, folder, model_config = agree_on(
            distributed_config,
            _sizes(dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size),
            find,
            {
                "pipeline_config": pipeline_config,
                "peft_config": peft_config,
                "dtype": dtype,
                "attn_implementation": attn_implementation,
                "strict": strict,
            },
        )
        assert folder is not None
        twin = cls._on_meta(model_config, resolve_dtype(dtype, model_config, folder), attn_implementation)
        adopt_generation_config(twin, folder)
        return ready_model(
            twin,
            strategy,
            context,
            pipeline_config=pipeline_config,
            peft_config=peft_config,
            folder=folder,
            key_mapping=key_mapping,
            strict=strict,
            new_head=cls._new_head,
            prepare_model=prepare_model,
        )

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        distributed_config: DistributedConfig | None = None,
        dp_size: int | None = None,
        dp_replicate_size: int | None = None,
        tp_size: int | None = None,
        pp_size: int | None = None,
        cp_size: int | None = None,
        ep_size: int | None = None,
        pipeline_config: PipelineConfig | None = None,
        peft_config: Any = None,
        dtype: torch.dtype | str | None = "auto",
        attn_implementation: str | None = None,
        prepare_model: Callable[[nn.Module], object] | None = None,
        device_map: None = None,
        trust_remote_code: bool | None = False,
    ) -> Any:
        """Build a model without memory, make it parallel, and draw its weights straight into the shards; collective.

        The weights are those that transformers draws under the same seed, whatever the strategy, the sizes and the
        number of ranks.

        Args:
            config: A config of transformers, or a local folder with one.
            distributed_config: As of `from_pretrained`, as all that follow.
            dp_size: See there.
            dp_replicate_size: See there.
            tp_size: See there.
            pp_size: See there.
            cp_size: See there.
            ep_size: See there.
            pipeline_config: See there.
            peft_config: See there.
            dtype: See there; "auto" or None: what the config says, else torch's default.
            attn_implementation: See there.
            prepare_model: See there.
            device_map: See there.
            trust_remote_code: See there.

        Returns:
            See there.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            ConfigurationError: Another argument cannot be honoured.
        """

        def find() -> tuple[None, Any]:
            refuse_foreign(device_map, trust_remote_code)
            is_folder = isinstance(config, str | Path)
            return None, config_of(find_folder(config) if is_folder else None, None if is_folder else config, {})

        strategy, context, _, model_config = agree_on(
            distributed_config,
            _sizes(dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size),
            find,
            {
                "pipeline_config": pipeline_config,
                "peft_config": peft_config,
                "dtype": dtype,
                "attn_implementation": attn_implementation,
            },
        )
        twin = cls._on_meta(model_config, resolve_dtype(dtype, model_config, None), attn_implementation)
        return ready_model(
            twin,
            strategy,
            context,
            pipeline_config=pipeline_config,
            peft_config=peft_config,
            prepare_model=prepare_model,
        )

    @classmethod
    def _on_meta(cls, config: Any, dtype: torch.dtype, attn_implementation: str | None) -> nn.Module:
        options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        return build_from_config(config, dtype, cls._transformers_class, **options)


def _sizes(
    dp_size: int | None,
    dp_replicate_size: int | None,
    tp_size: int | None,
    pp_size: int | None,
    cp_size: int | None,
    ep_size: int | None,
) -> dict[str, int | None]:
    return dict(zip(SIZE_NAMES, (dp_size, dp_replicate_size, tp_size, pp_size, cp_size, ep_size), strict=True))


class AutoModelForCausalLM(_AutoModel):
    """Causal language models of transformers, made parallel."""

    _transformers_class = "AutoModelForCausalLM"


class AutoModelForSequenceClassification(_AutoModel):
    """Sequence classifiers; a head that the files lack is drawn, with a warning, and their language head left out."""

    _transformers_class = "AutoModelForSequenceClassification"
    _new_head = True


class AutoModelForImageTextToText(_AutoModel):
    """Models that read images and text and write text."""

    _transformers_class = "AutoModelForImageTextToText"
