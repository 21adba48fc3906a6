"""What accelerate needs to be told for FSDP2 on CPUs, where it would take DistributedDataParallel instead."""

import torch
from accelerate.state import DistributedType, PartialState  # type: ignore[import-untyped]

ON_CPU = not torch.cuda.is_available()


def shard_on_cpus() -> None:
    """Have accelerate shard models on CPUs as on GPUs; nothing where there are GPUs."""
    if ON_CPU:
        prepare = PartialState._prepare_backend
        PartialState._prepare_backend = lambda *given: (prepare(*given)[0], DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
