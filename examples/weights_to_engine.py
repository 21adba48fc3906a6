"""Give an inference engine the weights after every step: torchrun --nproc-per-node 2 examples/weights_to_engine.py.

The engine is a process of its own that holds tensors by name, where vLLM or sglang would be.
"""

import multiprocessing
import socket
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.weights import WeightSource, receive, send, stateless_group

SENDER = 0


def serve(port: int, trainer: Connection) -> None:
    """Run the engine: take weights until the trainer hangs up, and say which version they are of."""
    group = stateless_group("localhost", port, 1, 2)
    weights: dict[str, torch.Tensor] = {}
    while (info := trainer.recv()) is not None:
        receive(group, info, weights.__setitem__)
        trainer.send((info["version"], sum(tensor.double().sum().item() for tensor in weights.values())))


def main() -> None:
    """Train three steps; the engine's weights are the trainer's, in bfloat16, after each."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(100, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)))
    net.append(nn.Linear(32, 100))
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    source = WeightSource(model, destination=SENDER)

    group, is_sender = None, dist.get_rank() == SENDER
    if is_sender:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        here, there = multiprocessing.Pipe()
        engine = multiprocessing.get_context("spawn").Process(target=serve, args=(port, there))
        engine.start()
        group = stateless_group("localhost", port, 0, 2)

    tokens = torch.randint(100, (8, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        send(source, group, on_update=here.send if is_sender else None)  # no step, forward or save meanwhile
        trained = sum(tensor.double().sum().item() for _, tensor in source if tensor is not None)
        if is_sender:
            version, held = here.recv()
            print(f"the engine has version {version} of {source.num_tensors} tensors, as trained: {held == trained}")

    if is_sender:
        here.send(None)
        engine.join()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
