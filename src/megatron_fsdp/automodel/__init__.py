"""Strategy configurations, meshes and managers for models of Hugging Face transformers.

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=FSDP2Config(backend="gloo"), tp_size=2)

The names are those of NeMo AutoModel's `components.distributed`; docs/integrations.md is the guide.
"""

from megatron_fsdp.automodel.auto_model import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from megatron_fsdp.automodel.config import (
    DDPConfig,
    DistributedConfig,
    FSDP2Config,
    MegatronFSDPConfig,
    MoEParallelizerConfig,
    ParallelismSizes,
    ParallelSizes,
    resolve_sizes,
)
from megatron_fsdp.automodel.config_yaml import (
    DistributedSetup,
    create_distributed_setup_from_config,
    load_distributed_config,
    parse_distributed_section,
)
from megatron_fsdp.automodel.context_parallel import shard_batch, unshard_sequence
from megatron_fsdp.automodel.gradients import (
    accumulation_context,
    clip_grad_by_total_norm_,
    clip_grad_norm_,
    connect_optimizer,
    count_label_tokens,
    get_grad_norm,
    scale_per_token_loss,
)
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.meshes import (
    DistInfo,
    MeshAxisName,
    MeshContext,
    build_mesh_context,
    create_device_mesh,
    create_ring_ulysses_mesh,
    initialize_distributed,
)
from megatron_fsdp.automodel.multimodal import (
    CpVisionFrameShardingConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
    normalize_activation_checkpointing_scope,
)
from megatron_fsdp.automodel.parallelizer import (
    ModelParallelizer,
    compile_parallelized_model,
    derive_unit_modules,
    fully_shard_optimizer,
    get_model_parallelizer,
    maybe_shard_optimizer,
    parallelize_model,
)
from megatron_fsdp.automodel.pipeline_parallel import Pipeline, PipelineConfig

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "CpVisionFrameShardingConfig",
    "DDPConfig",
    "DDPManager",
    "DistInfo",
    "DistributedConfig",
    "DistributedSetup",
    "FSDP2Config",
    "FSDP2Manager",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MeshAxisName",
    "MeshContext",
    "MoEParallelizerConfig",
    "ModelParallelizer",
    "MultimodalDistributedConfig",
    "MultimodalVisionConfig",
    "ParallelSizes",
    "ParallelismSizes",
    "Pipeline",
    "PipelineConfig",
    "accumulation_context",
    "build_mesh_context",
    "clip_grad_by_total_norm_",
    "clip_grad_norm_",
    "compile_parallelized_model",
    "connect_optimizer",
    "count_label_tokens",
    "create_device_mesh",
    "create_distributed_setup_from_config",
    "create_ring_ulysses_mesh",
    "derive_unit_modules",
    "fully_shard_optimizer",
    "get_grad_norm",
    "get_model_parallelizer",
    "initialize_distributed",
    "load_distributed_config",
    "maybe_shard_optimizer",
    "normalize_activation_checkpointing_scope",
    "parallelize_model",
    "parse_distributed_section",
    "resolve_sizes",
    "scale_per_token_loss",
    "shard_batch",
    "unshard_sequence",
]
