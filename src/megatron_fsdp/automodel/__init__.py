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
    ParallelismSizes,
    ParallelSizes,
    resolve_sizes,
)
from megatron_fsdp.automodel.config_yaml import (
    DistributedSetup,
    load_distributed_config,
    parse_distributed_section,
)
from megatron_fsdp.automodel.context_parallel import shard_batch, unshard_sequence
from megatron_fsdp.automodel.gradients import (
    accumulation_context,
    clip_grad_norm_,
    connect_optimizer,
    count_label_tokens,
    scale_per_token_loss,
)
from megatron_fsdp.automodel.managers import DDPManager, FSDP2Manager, MegatronFSDPManager
from megatron_fsdp.automodel.meshes import MeshContext, build_mesh_context, create_device_mesh
from megatron_fsdp.automodel.pipeline_parallel import Pipeline, PipelineConfig

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSequenceClassification",
    "DDPConfig",
    "DDPManager",
    "DistributedConfig",
    "DistributedSetup",
    "FSDP2Config",
    "FSDP2Manager",
    "MegatronFSDPConfig",
    "MegatronFSDPManager",
    "MeshContext",
    "ParallelSizes",
    "ParallelismSizes",
    "Pipeline",
    "PipelineConfig",
    "accumulation_context",
    "build_mesh_context",
    "clip_grad_norm_",
    "connect_optimizer",
    "count_label_tokens",
    "create_device_mesh",
    "load_distributed_config",
    "parse_distributed_section",
    "resolve_sizes",
    "scale_per_token_loss",
    "shard_batch",
    "unshard_sequence",
]
