"""Count what wrapping, a step, a save and a load cost on thousands of ranks, by one process, the first of them.

    python -m benchmarks.scale --models llama-3-70b --ranks 8 16384
    python -m benchmarks.scale --publish

The engine and torch's FSDP2 wrap the same model on fake tensors and run one step whose collectives send nothing
(`megatron_fsdp.plan.simulate`), so counts and sizes are exact, and times are CPU seconds of this process. A save is
planned as its coordinator plans it, from the plans of all ranks. Where those of all ranks would not fit into memory
(torch's planner), `SAMPLED` ranks are planned and the sums multiplied: such figures are marked by "~". A load reads
and checks the metadata in a process of its own, as every rank does before it reads tensors; torch's is not counted.
No file is mapped, so the memory of a load is that of its heap.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint._dedup_save_plans import dedup_save_plans
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.bench import ROOT, published_scale
from benchmarks.launching import describe_machine, write_document
from benchmarks.operators import MovedModel
from benchmarks.page import SCALE, table
from megatron_fsdp.checkpoint.checkpointer import collect
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.save import SEAL, SealingPlanner, SealingWriter
from megatron_fsdp.checkpoint.save_plan import Layouts, Written, boxes_of
from megatron_fsdp.comm import agreement
from megatron_fsdp.comm.collectives import real_values
from megatron_fsdp.plan.models import balanced_experts, build_meta_model
from megatron_fsdp.plan.simulate import built_without_memory, simulated_model, simulated_ranks

MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b", "deepseek-v3")
RANKS = (8, 64, 512, 4096, 16384)
ENGINES = ("ours", "fsdp2")
SAMPLED = 32
_MEBIBYTE = 2**20
STRATEGY: dict[str, Any] = {"zero_dp_strategy": 3}
Case = dict[str, Any]


class Sent(MovedModel):
    """Counter of the collectives of tensors, and of the bytes that they make this rank send."""

    messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._bytes.total()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.messages += self._bytes.total() > before
        return result


class Spent:
    """CPU seconds of a block, and the growth of this process's peak memory in MiB."""

    def __enter__(self) -> Spent:
        self._begun, self._held = time.process_time(), peak_mib()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds, self.mib = time.process_time() - self._begun, peak_mib() - self._held


def peak_mib() -> float:
    """Return the largest resident size of this process so far, without that of the process that started it."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024


# ---- one case, in a process of its own -------------------------------------------------------------------------------


def measure(engine: str, build: Callable[[], nn.Module], ranks: int) -> Case:
    """Measure one engine on one model as the first of so many ranks."""
    model, found = build(), {"engine": engine, "ranks": ranks}
    with Agreements() as sent:
        (measure_ours if engine == "ours" else measure_fsdp2)(lambda: model, ranks, found)
    return found | {"agreements": len(sent), "agreement_bytes": sum(sent) * ranks}


class Agreements:
    """Lists the bytes that each rank sends in every agreement of the block."""

    def __enter__(self) -> list[int]:
        self._sent: list[int] = []
        self._patch = mock.patch.object(agreement, "_gather", self._gather)
        self._patch.start()
        return self._sent

    def __exit__(self, *_: object) -> None:
        self._patch.stop()

    def _gather(self, value: Any, group: dist.ProcessGroup) -> list[Any]:
        self._sent.append(max(len(pickle.dumps(value)), agreement.SMALL_BYTES))
        return [value] * dist.get_world_size(group)


def measure_ours(build: Callable[[], nn.Module], ranks: int, found: Case) -> None:
    """Wrap by this engine, step, and plan a save."""
    with Spent() as spent, ExitStack() as stack:
        simulated = stack.enter_context(
            simulated_model(build, num_ranks=ranks, backend="nccl", build_optimizer=torch.optim.AdamW, **STRATEGY)
        )
        spent.__exit__()
        model, optimizer = simulated.model, simulated.optimizer
        assert optimizer is not None
        layouts = [group.plan.layout for unit in model._engine.units for group in unit.groups]
        found |= {"wrap_s": spent.seconds, "wrap_mib": spent.mib}
        found["padding"] = sum(each.padding_numel for each in layouts) / sum(each.payload_numel for each in layouts)
        step(model, optimizer, ranks, found)
        state = collect(model, optimizer, 1)
        known = Layouts.agreed(state, None)
        assert known is not None, "every rank knows the layouts of all"
        planner = SealingPlanner(None, known)
        planner.set_up_planner(state, None, is_coordinator=True)
        own = planner.create_local_plan()
    held = holders(known)
    bits = [row.tobytes() for row in np.packbits(held, axis=1)]
    plans = [of_rank(own, rank, bits[rank]) for rank in range(ranks)]
    boxes = [boxes_of(each.shape, each.description, ranks) for each in known.tensors]
    found["entries"] = sum(len(each.row) for each in boxes) + len(own.items) - 1 + ranks  # a random state each
    coordinate(planner, SealingWriter, plans, found)


def holders(known: Layouts) -> Any:
    """Return, of every rank, which tensors it holds elements of."""
    held = np.zeros((known.num_ranks, len(known.tensors)), bool)
    for index, each in enumerate(known.tensors):
        boxes = boxes_of(each.shape, each.description, known.num_ranks)
        held[boxes.holders[boxes.row], index] = True
    return held


def of_rank(own: SavePlan, rank: int, bits: bytes) -> SavePlan:
    """Turn the plan of the first rank into that of another one: its random states have the rank in their name."""

    def renamed(key: str) -> str:
        return key.replace("(0, 0).0", f"(0, 0).{rank}")

    items = [replace(item, index=replace(item.index, fqn=renamed(item.index.fqn))) for item in own.items]
    paths = {renamed(key): tuple(map(renamed, path)) for key, path in (own.planner_data or {}).items()}
    return replace(own, items=items, planner_data=paths, bits=bits)  # type: ignore[call-arg]


def measure_fsdp2(build: Callable[[], nn.Module], ranks: int, found: Case) -> None:
    """Wrap by torch's FSDP2 (layers and the rest), step, and plan a save with torch's planner."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with simulated_ranks(ranks, backend="nccl") as mesh:
        model = built_without_memory(build)
        with Spent() as spent:
            for layer in layers_of(model):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(model, mesh=mesh, mp_policy=policy)
        groups = [each._get_fsdp_state()._fsdp_param_group for each in model.modules() if isinstance(each, FSDPModule)]
        params = [param for group in groups if group is not None for param in group.fsdp_params]
        padded = sum(param.padded_sharded_param_size.numel() * ranks for param in params)
        found |= {"wrap_s": spent.seconds, "wrap_mib": spent.mib}
        found["padding"] = padded / sum(param._orig_size.numel() for param in params) - 1
        step(model, None, ranks, found)  # its optimizer reads values, which do not exist; it sends nothing
        slots = {
            name: {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param), "step": torch.zeros(())}
            for name, param in model.named_parameters()
        }
        planner, plans, state = DefaultSavePlanner(), [], {"model": model.state_dict(), "optimizer": slots}
        for rank in np.unique(np.linspace(0, ranks - 1, SAMPLED).astype(int)).tolist():
            with real_values(), mock.patch.object(DeviceMesh, "_sym_get_coordinate", lambda *_, rank=rank: rank):
                planner.set_up_planner(state, None, is_coordinator=not rank)
                plans.append(planner.create_local_plan())
    found["entries"] = sum(len(plan.items) for plan in plans) * ranks // len(plans)
    coordinate(planner, FileSystemWriter, plans, found)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the elements of the largest list of modules."""
    lists: list[nn.Module] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda each: sum(param.numel() for param in each.parameters())).children())


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, ranks: int, found: Case) -> None:
    """Run one step and count what it sends."""
    words = torch.zeros(1, 8, dtype=torch.long)
    with Sent(ranks) as sent, balanced_experts(model):
        model(input_ids=words, labels=words, use_cache=False).loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    found |= {"messages": sent.messages, "sent_bytes": sent.moved.sent_bytes}


def coordinate(planner: Any, writer_of: Callable[[Path], Any], plans: list[SavePlan], found: Case) -> None:
    """Do what the coordinator of a save does with the plans and the results of all ranks, or of a sample of them."""
    logging.disable(logging.WARNING)  # a sample does not cover tensors, as torch's planner notes
    share = found["ranks"] / len(plans)
    sent = [pickle.dumps(plan) for plan in plans]
    with tempfile.TemporaryDirectory() as folder:
        with Spent() as spent:
            writer = writer_of(Path(folder))
            received = [pickle.loads(each) for each in sent]
            del plans
            try:
                final, metadata = planner.create_global_plan(received)
            except ValueError:  # the last thing that torch's planner does is to find a sample incomplete
                final, metadata = create_default_global_save_plan(dedup_save_plans(received))
            results = [pickle.dumps(each) for each in results_of(metadata, final)]
            got = [pickle.loads(each) for each in results]
            writer.finish(metadata, got)
        size = Path(folder, ".metadata").stat().st_size
        if share == 1:
            for rank in range(len(final)):
                with Path(folder, f"__{rank}_0.distcp").open("wb") as file:
                    file.truncate(1 << 38)  # bytes that are not there
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
                found["load_s"], found["load_mib"] = other.submit(opened, folder).result()
    found |= {"save_s": spent.seconds * share, "save_mib": spent.mib * share, "metadata_bytes": int(size * share)}
    found["largest_message"] = max(map(len, (*sent, *results)))
    found["gathered_bytes"] = int((sum(map(len, sent)) + sum(map(len, results))) * share)
    found["is_sampled"] = share > 1


def opened(folder: str) -> tuple[float, float]:
    """Open a checkpoint as a load does; return the CPU seconds and MiB that it took."""
    with Spent() as spent:
        CheckpointFolder(folder)
    return spent.seconds, spent.mib


def results_of(metadata: Any, plans: Sequence[SavePlan]) -> Iterator[list[WriteResult]]:
    """Yield what each rank reports when it has written its file."""
    assignment = getattr(metadata, "assignment", None)
    counts = np.zeros((2, len(plans)), int)  # the boxes and tensors that each rank wrote
    known = () if assignment is None else zip(assignment.layouts.tensors, assignment.writers, strict=True)
    for tensor, writers in known:
        counts[:, writers] += boxes_of(tensor.shape, tensor.description, len(plans)).counts, np.ones(len(writers), int)
    for rank, plan in enumerate(plans):
        wrote = []
        for item in plan.items:
            data = item.tensor_data  # of torch's planner; those of the engine come with the seal
            nbytes = 1500 + (0 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize)
            wrote.append(WriteResult(item.index, nbytes, _StorageInfo(f"__{rank}_0.distcp", 1500, nbytes)))
        if assignment is not None:
            extra, sums = np.full(counts[0, rank], 1500, np.uint16), np.full(counts[1, rank], 2**63, np.uint64)
            seal = (Written(0, extra, sums), {item.index.fqn: "0" * 64 for item in plan.items})
            wrote.append(WriteResult(SEAL, 0, seal))
        yield wrote


# ---- all cases, and the page -----------------------------------------------------------------------------------------

_COLUMNS = (
    *("ranks", "engine", "wrap, CPU s", "MiB", "padding, %", "collectives of a step", "GB sent", "agreements, MB"),
    *("entries of a save, a rank", "all, thousands", "largest message, kB", "coordinator: MB received", "CPU s", "MiB"),
    *("metadata, MB", "load: CPU s", "MiB"),
)


def row_of(case: Case) -> list[str]:
    """Return the cells of one case."""
    mark = "~" if case["is_sampled"] else ""
    return [
        *(f"{case['ranks']:,}", case["engine"], f"{case['wrap_s']:.1f}", f"{case['wrap_mib']:.0f}"),
        *(f"{case['padding'] * 100:.2f}", f"{case['messages']:,}", f"{case['sent_bytes'] / 1e9:,.1f}"),
        *(f"{case['agreement_bytes'] / 1e6:.1f}", f"{case['entries'] / case['ranks']:,.0f}"),
        *(f"{case['entries'] / 1e3:,.0f}", f"{case['largest_message'] / 1e3:,.1f}"),
        *(
            f"{mark}{case['gathered_bytes'] / 1e6:,.0f}",
            f"{mark}{case['save_s']:,.1f}",
            f"{mark}{case['save_mib']:,.0f}",
        ),
        f"{mark}{case['metadata_bytes'] / 1e6:,.1f}",
        *((f"{case['load_s']:.1f}", f"{case['load_mib']:,.0f}") if "load_s" in case else ("-", "-")),
    ]


def render(cases: Sequence[Case]) -> str:
    """Write the page of all cases."""
    made = dict.fromkeys("; ".join(f"{key}: {value}" for key, value in case["made"].items()) for case in cases)
    parts = [
        "# What thousands of ranks cost",
        f"Made from `{SCALE}`, which `python -m benchmarks.scale --publish` renews row by row:",
        "\n".join(f"- {each}" for each in made),
        "\n\n".join((__doc__ or "").split("\n\n")[2:]).strip(),
    ]
    for name in dict.fromkeys(case["model"] for case in cases):
        parts += [f"## {name}", table(_COLUMNS, [row_of(case) for case in cases if case["model"] == name])]
    return "\n\n".join(parts) + "\n"


def publish(cases: Sequence[Case], root: Path = ROOT) -> None:
    """Put cases into the results, in the place of those of the same model, ranks and engine."""
    known = {(case["model"], case["ranks"], case["engine"]): case for case in (*published_scale(root), *cases)}
    order = itertools.product(MODELS, RANKS, ENGINES)
    write_document({"cases": [known[each] for each in order if each in known]}, root / SCALE)


def in_process(engine: str, model: str, ranks: int) -> Case:
    """Measure one case in a process of its own, whose peak memory is that of the case."""
    call = [sys.executable, "-m", "benchmarks.scale", "--case", engine, model, str(ranks)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(call)}: {done.stderr[-2000:]}")
    found: Case = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure cases and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="+", default=MODELS, help="presets of `mfsdp plan`")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--publish", action="store_true", help=f"renew {SCALE}; then run `make pages`")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.case:
        engine, model, ranks = given.case
        dtype = torch.bfloat16 if engine == "ours" else torch.float32  # both compute in the one and keep the other
        print(json.dumps(measure(engine, lambda: build_meta_model(model, dtype), int(ranks)) | {"model": model}))
        return
    words = sys.argv[1:] if arguments is None else arguments
    made = {"command": " ".join(["python -m benchmarks.scale", *words])} | describe_machine("cpu", 1)
    print(" | ".join(("model", *_COLUMNS)))
    for model, ranks, engine in itertools.product(given.models, given.ranks, given.engines):
        case = in_process(engine, model, ranks) | {"made": made}
        print(" | ".join([model, *row_of(case)]), flush=True)
        if given.publish:
            publish([case])


if __name__ == "__main__":
    main()
