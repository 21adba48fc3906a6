"""Pipeline parallelism of Hugging Face decoders by torch.distributed.pipelining."""

from megatron_fsdp.automodel.pipeline_parallel.build import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.config import PipelineConfig
from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline

__all__ = ["Pipeline", "PipelineConfig", "build_pipeline"]
