"""Which model can be cut over ranks of which kind, beside which options. Pure."""

from __future__ import annotations

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.job import Sizes
from megatron_fsdp.train.options.model_checks import uses_transformers
from megatron_fsdp.train.options.options import Options


def check_sizes(options: Options, sizes: Sizes) -> None:
    """Refuse sizes that the model or other options cannot do, as far as options tell.

    What only the configuration of a model of transformers tells, such as its heads, is checked when it is built.

    Raises:
        ConfigurationError: Names the size and what to give in place of it.
    """
    if options.parallel.sequence_parallel and sizes.tensor == 1:
        raise ConfigurationError(
            "--sequence-parallel does nothing with --tensor-model-parallel-size 1: give both or neither"
        )
    if sizes.is_data_only:
        return
    if not uses_transformers(options.model):
        raise ConfigurationError(
            "the decoder of this package is not cut over tensor-, pipeline-, context- or expert-parallel ranks: give "
            "--transformer-impl transformers, --hf-config or --hf-model"
        )
    if sizes.expert > 1 and sizes.tensor > 1:
        raise ConfigurationError(
            f"--expert-model-parallel-size {sizes.expert} does not go with --tensor-model-parallel-size "
            f"{sizes.tensor}, whose ranks share out the experts by themselves: give one of the two"
        )
    if options.ddp.num_distributed_optimizer_instances > 1 and sizes.context > 1:
        raise ConfigurationError(
            "--num-distributed-optimizer-instances cuts the data-parallel ranks, which context-parallel ones "
            f"({sizes.context}) are among: give one instance, or --context-parallel-size 1"
        )
    if options.ddp.num_distributed_optimizer_instances > 1 and sizes.expert > 1:
        raise ConfigurationError(
            "--num-distributed-optimizer-instances cuts the data-parallel ranks, which expert-parallel ones "
            f"({sizes.expert}) lie across: give one instance, or --expert-model-parallel-size 1"
        )
    _check_divides(options, sizes)


def _check_divides(options: Options, sizes: Sizes) -> None:
    model, length = options.model, options.model.seq_length
    if length is not None and length % (2 * sizes.context) and sizes.context > 1:
        raise ConfigurationError(
            f"--seq-length {length} is no multiple of twice --context-parallel-size {sizes.context}, since ranks take "
            f"two pieces of a sequence each: give a multiple of {2 * sizes.context}"
        )
    if options.parallel.sequence_parallel and length is not None and length % sizes.tensor:
        raise ConfigurationError(
            f"--seq-length {length} is no multiple of --tensor-model-parallel-size {sizes.tensor}, over which "
            "--sequence-parallel cuts it: give a multiple"
        )
    if model.hf_config is not None or model.hf_model is not None:
        return
    if model.num_layers is not None and model.num_layers < sizes.pipeline:
        raise ConfigurationError(
            f"--pipeline-model-parallel-size {sizes.pipeline} is more than --num-layers {model.num_layers}: every "
            "stage needs a layer"
        )
    if sizes.expert > 1 and (model.num_experts is None or model.num_experts % sizes.expert):
        raise ConfigurationError(
            f"--expert-model-parallel-size {sizes.expert} does not divide --num-experts {model.num_experts}: give a "
            "number of experts that it divides"
        )
