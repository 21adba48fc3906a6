"""`from_pretrained` and `from_config` that take a strategy and sizes, and return a model that is ready to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_fsdp.automodel.blueprints import build_on_meta, config_of, find_folder, resolve_dtype
from megatron_fsdp.automodel.config import DistributedConfig, FSDP2Config, check_config
from megatron_fsdp.automodel.filling import ready_model
from megatron_fsdp.automodel.meshes import build_mesh_context
from megatron_fsdp.automodel.pipeline_parallel import PipelineConfig


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
            config_overrides: Fields of the config.

        Returns:
            The model: for FSDP2 the transformers model itself, for the others the wrapper around it, and a `Pipeline`
            with `pp_size` > 1. It has `save_pretrained(folder)` and `mesh_context`.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            CheckpointError: The files cannot be read or do not fit; names the weights.
            ConfigurationError: Another argument cannot be honoured.
        """
        strategy = check_config(distributed_config if distributed_config is not None else FSDP2Config())
        context = build_mesh_context(
            strategy,
            dp_size=dp_size,
            dp_replicate_size=dp_replicate_size,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            ep_size=ep_size,
        )
        folder = find_folder(pretrained_model_name_or_path)
        model_config = config_of(folder, config, config_overrides)
        twin = build_on_meta(
            cls._transformers_class, model_config, resolve_dtype(dtype, model_config, folder), attn_implementation
        )
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

        Returns:
            See there.

        Raises:
            ParallelSizeError: The sizes do not fit the strategy, the ranks or the model.
            ConfigurationError: Another argument cannot be honoured.
        """
        strategy = check_config(distributed_config if distributed_config is not None else FSDP2Config())
        context = build_mesh_context(
            strategy,
            dp_size=dp_size,
            dp_replicate_size=dp_replicate_size,
            tp_size=tp_size,
            pp_size=pp_size,
            cp_size=cp_size,
            ep_size=ep_size,
        )
        folder = find_folder(config) if isinstance(config, str | Path) else None
        model_config = config_of(folder, None if folder is not None else config, {})
        twin = build_on_meta(
            cls._transformers_class, model_config, resolve_dtype(dtype, model_config, None), attn_implementation
        )
        return ready_model(twin, strategy, context, pipeline_config=pipeline_config, peft_config=peft_config)


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
