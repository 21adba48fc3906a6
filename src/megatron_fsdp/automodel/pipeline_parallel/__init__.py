"""Pipeline parallelism of Hugging Face decoders by torch.distributed.pipelining."""

from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig

__all__ = ["Pipeline", "PipelineConfig", "build_pipeline"]
